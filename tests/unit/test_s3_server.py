from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto.moto_server.werkzeug_app")

from tests.s3 import ONCE, S3Server, s3_server  # noqa: E402 (not without the packages above)


@pytest.fixture
def files(server: S3Server) -> Any:
    found = fsspec.filesystem("s3", **server.options, **ONCE)
    found.invalidate_cache()
    return found


def test_what_is_put_there_is_listed_read_and_removed(server: S3Server, files: Any) -> None:
    bucket = server.new_bucket()
    assert server.requests == []
    files.pipe_file(f"{bucket}/a/b c.bin", b"\x00\xffbytes")
    assert server.requests == [("PUT", f"/{bucket}/a/b%20c.bin")]
    assert files.find(bucket) == [f"{bucket}/a/b c.bin"]
    assert files.cat_file(f"{bucket}/a/b c.bin") == b"\x00\xffbytes"
    assert files.cat_file(f"{bucket}/a/b c.bin", start=2, end=5) == b"byt"
    files.rm_file(f"{bucket}/a/b c.bin")
    files.invalidate_cache()
    assert files.find(bucket) == []


def test_a_large_file_goes_up_in_parts_and_reads_back_the_same(server: S3Server, files: Any) -> None:
    path, block = f"{server.new_bucket()}/large", os.urandom(1 << 20)
    with files.open(path, "wb", block_size=5 << 20) as file:
        for _ in range(12):
            file.write(block)
    parts = [asked for method, asked in server.requests if method == "PUT"]
    assert [asked.partition("&")[0] for asked in parts] == [f"/{path}?partNumber={n}" for n in (1, 2, 3)]
    with files.open(path, "rb", block_size=5 << 20) as file:
        assert file.read() == 12 * block


@pytest.mark.parametrize("act", ["put", "get"])
def test_two_answers_to_slow_down_are_overcome(server: S3Server, files: Any, act: str) -> None:
    path = f"{server.new_bucket()}/a"
    files.pipe_file(path, b"old")
    server.answer(503, times=2, only=lambda method, _: method == act.upper())
    if act == "put":
        files.pipe_file(path, b"new")
        assert [method for method, _ in server.requests] == ["PUT"] * 4
    assert files.cat_file(path) == (b"new" if act == "put" else b"old")


@pytest.mark.parametrize(
    ("status", "kind", "number"),
    [(403, PermissionError, None), (500, OSError, errno.EREMOTEIO), (503, OSError, errno.EBUSY)],
)
def test_answers_that_last_become_errors_of_python(
    server: S3Server, files: Any, status: int, kind: type[OSError], number: int | None
) -> None:
    path = f"{server.new_bucket()}/a"
    server.answer(status, times=None)
    for act in (lambda: files.pipe_file(path, b"x"), lambda: files.info(path)):
        with pytest.raises(OSError) as caught:
            act()
        assert (type(caught.value), caught.value.errno) == (kind, number)
    server.heal()
    files.pipe_file(path, b"x")


def test_a_missing_key_and_a_missing_bucket_are_files_not_found(server: S3Server, files: Any) -> None:
    for path in (f"{server.new_bucket()}/a", "no-bucket-of-this-name/a"):
        with pytest.raises(FileNotFoundError) as caught:
            files.cat_file(path)
        assert caught.value.errno is None


def test_a_slow_answer_is_waited_for(server: S3Server, files: Any) -> None:
    path = f"{server.new_bucket()}/a"
    server.delay(0.3, only=lambda method, _: method == "PUT")
    begin = time.monotonic()
    files.pipe_file(path, b"x")
    assert time.monotonic() - begin >= 0.3
    assert files.cat_file(path) == b"x"


@pytest.mark.parametrize("carried", [False, True])
def test_a_dropped_connection_is_tried_again(server: S3Server, files: Any, carried: bool) -> None:
    path = f"{server.new_bucket()}/a"
    server.drop(carried=carried, only=lambda method, _: method == "PUT")
    files.pipe_file(path, b"x")
    assert [method for method, _ in server.requests] == ["PUT", "PUT"]
    assert files.cat_file(path) == b"x"


def test_a_request_that_was_carried_out_is_so_though_nobody_was_told(server: S3Server, files: Any) -> None:
    path = f"{server.new_bucket()}/a"
    server.drop(carried=True, only=lambda method, _: method == "PUT")
    server.answer(403, only=lambda method, _: method == "PUT")
    with pytest.raises(PermissionError):
        files.pipe_file(path, b"x")
    assert files.cat_file(path) == b"x"


def test_a_request_meets_one_fault_and_only_the_one_for_it(server: S3Server, files: Any) -> None:
    path = f"{server.new_bucket()}/a"
    server.answer(403, only=lambda _, asked: asked.endswith("/b"))
    server.answer(500, only=lambda method, _: method == "PUT")
    with pytest.raises(OSError) as caught:
        files.pipe_file(path, b"x")
    assert caught.value.errno == errno.EREMOTEIO
    files.pipe_file(path, b"x")
    with pytest.raises(PermissionError):
        files.pipe_file(path[:-1] + "b", b"x")


def test_another_process_needs_no_more_than_the_environment(server: S3Server) -> None:
    path = f"{server.new_bucket()}/a"
    program = f"import fsspec; fsspec.filesystem('s3').pipe_file('{path}', b'x'); print(fsspec.open('s3://{path}').fs.size('{path}'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def test_servers_share_nothing_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    with s3_server() as one, s3_server() as two:
        assert one.options["key"] != two.options["key"]
        bucket = one.new_bucket()
        assert fsspec.filesystem("s3", **one.options, **ONCE).ls("") == [bucket]
        assert fsspec.filesystem("s3", **two.options, **ONCE).ls("") == []
    threads |= {thread for thread in threading.enumerate() if thread.name == "fsspecIO"}
    assert set(threading.enumerate()) <= threads
    for _ in range(2):
        with s3_server() as server, monkeypatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            assert fsspec.filesystem("s3").ls("") == []
            bucket = server.new_bucket()
            assert fsspec.filesystem("s3").ls("", refresh=True) == [bucket]


def test_a_server_that_has_stopped_refuses_to_be_reached() -> None:
    from botocore.exceptions import EndpointConnectionError

    with s3_server() as server:
        files = fsspec.filesystem("s3", **server.options, **ONCE)
        bucket = server.new_bucket()
        files.pipe_file(f"{bucket}/a", b"x")
    with pytest.raises(EndpointConnectionError, match="Could not connect to the endpoint URL"):
        files.cat_file(f"{bucket}/a")


def ask(endpoint: str, text: bytes) -> socket.socket:
    host, _, port = endpoint.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(text)
    return connection


@pytest.mark.parametrize("late_s", [0, 60])
def test_a_server_stops_though_a_client_waits(late_s: int) -> None:
    begin = time.monotonic()
    with s3_server() as server:
        server.delay(late_s, times=None)
        silent, waiting = ask(server.endpoint, b""), ask(server.endpoint, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.2)
    silent.close()
    waiting.close()
    assert time.monotonic() - begin < 5
