"""Files by URL: found by the rules of local ones, and read in every format as if they were local."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import re
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.errors import DataError
from lib.store.formats import first_lines, kind_of, records, spans
from lib.store.record import Reading
from lib.store.remote import Remote, exists, is_remote, list_remote, open_binary
from tests.formats import value_of

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def root() -> Iterator[str]:
    """A folder in fsspec's memory, as a URL."""
    memory, name = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    memory.mkdir(name)
    yield f"memory:/{name}"
    memory.rm(name, recursive=True)


def put(url: str, data: bytes) -> str:
    with fsspec.open(url, "wb") as out:
        out.write(data)
    return url


def found(url: str) -> tuple[list[Remote], dict[str, int]]:
    skipped = Counter[str]()
    return list_remote(url, skipped), dict(skipped)


def read(url: str, *, target: int, **options: Any) -> list[tuple[Any, str]]:
    ((name, where, size, named),) = list_remote(url, Counter())
    assert named
    kind, reading = kind_of(name), Reading(**options)
    cut = spans(where, size, kind, reading, target=target)
    return [
        (value_of(record), f"{name}:{before + record.line}")
        for span, before in zip(cut, first_lines(where, cut, kind), strict=True)
        for record in records(where, span, kind, reading, Counter(), eos=2, vocab=260)
    ]


def test_what_is_a_url() -> None:
    yes = ["memory://a", "s3://b/c?d", "HTTP://x", "gs://y", "file:///z", "zip://a::file:///b.zip"]
    assert [is_remote(item) for item in yes] == [True] * len(yes)
    no = ["a", "/a", "stdlib:", "C:\\a", "a:b", "./s3://b", "~/a", "://a", ""]
    assert [is_remote(item) for item in no] == [False] * len(no)


def test_a_file_a_folder_and_patterns_are_found_by_the_rules_of_local_ones(root: str) -> None:
    names = ["a.txt", "b/x.jsonl", "b/y.txt", "b/d/z.txt", ".git/config", "b/.hidden", "b/y.txt~", "b/z.tmp"]
    for name in names:
        put(f"{root}/{name}", b"data")
    url = root.replace("memory://", "memory:///")
    all_of = [Remote(name, f"{url}/{name}", 4, False) for name in ["a.txt", "b/d/z.txt", "b/x.jsonl", "b/y.txt"]]
    passed = {"hidden": 2, "leftover of an editor or a download": 2}
    assert found(root) == found(root + "/") == found(f"{root}/**") == (all_of, passed)
    assert found(f"{root}/b/y.txt") == ([Remote("y.txt", f"{url}/b/y.txt", 4, True)], {})
    assert found(f"{root}/b/.hidden")[0] == [Remote(".hidden", f"{url}/b/.hidden", 4, True)]
    assert [one.name for one in found(f"{root}/**/*.txt")[0]] == ["a.txt", "b/d/z.txt", "b/y.txt"]
    assert [one.name for one in found(f"{root}/b/[xy].*")[0]] == ["x.jsonl", "y.txt"]
    assert [one.name for one in found(f"{root}/*.txt")[0]] == ["a.txt"]
    literal = put(f"{root}/x[1]*.txt", b"")
    assert [(one.name, one.named) for one in found(literal)[0]] == [("x[1]*.txt", True)]


@pytest.mark.parametrize(("item", "says"), [
    ("/none", "no such file or folder; check the URL"),
    ("/none*", "no file there; check the URL"),
])  # fmt: skip
def test_what_means_nothing_is_refused(root: str, item: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        found(root + item)
    assert str(caught.value) == f"{root}{item}: {says}"


def test_a_scheme_that_is_not_at_hand_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        found("none://a")
    assert str(caught.value) == "none://a: cannot be read (Protocol not known: none); check the URL and your rights"


def test_without_fsspec_a_url_is_refused_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DataError) as caught:
        open_binary("memory://a")
    want = "fsspec is not installed, must be there to read URLs; pip install 'purestep[remote]'"
    assert str(caught.value) == f"memory://a: {want}"


def test_a_file_that_went_away_is_named(root: str) -> None:
    assert not exists(f"{root}/x")
    with pytest.raises(DataError) as caught:
        open_binary(f"{root}/x")
    assert str(caught.value) == f"{root}/x: no such file or folder; check the URL"


def test_text_and_jsonl_are_read_in_stretches(root: str) -> None:
    lines = put(f"{root}/x.jsonl", b"".join(b'{"text": "%d"}\n' % n for n in range(300)))
    want = [(b"%d" % n, f"x.jsonl:{n + 1}") for n in range(300)]
    assert read(lines, target=100) == read(lines, target=1 << 20) == want
    assert read(put(f"{root}/x.jsonl.gz", gzip.compress(b'{"text": "a"}')), target=1) == [(b"a", "x.jsonl.gz:1")]
    assert read(put(f"{root}/x.txt", b"a\nb\n\nc"), target=1) == [(b"a\nb\n\nc", "x.txt:0")]
    assert read(f"{root}/x.txt", target=1, split="block") == [(b"a\nb", "x.txt:1"), (b"c", "x.txt:4")]


def test_tables_are_read(root: str) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), out, row_group_size=1)
    want = [(b"a", "x.parquet:1"), (b"b", "x.parquet:2"), (b"c", "x.parquet:3")]
    assert read(put(f"{root}/x.parquet", out.getvalue()), target=1) == want


def test_token_files_are_read_with_their_side_cars(root: str) -> None:
    out = io.BytesIO()
    np.save(out, np.array([5, 2, 6], ">u2"))
    assert read(put(f"{root}/x.npy", out.getvalue()), target=1) == [([5], "x.npy:1"), ([6], "x.npy:2")]
    put(f"{root}/y.bin.json", b'{"dtype": ">u2"}')
    assert read(put(f"{root}/y.bin", b"\0\5\0\2\0\6"), target=1) == [([5], "y.bin:1"), ([6], "y.bin:2")]


def test_a_local_file_may_be_given_as_a_url_but_no_url_within_another(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"b")
    assert read(f"file://{tmp_path}/x.txt", target=5) == [(b"b", "x.txt:0")]
    with pytest.raises(DataError) as caught:
        found("zip://x::memory://y.zip")
    assert (
        str(caught.value) == "zip://x::memory://y.zip: one URL within another, must be one alone; unpack what it is in"
    )


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A web server that gives parts of files, as most do and Python's own does not."""

    def send_head(self) -> Any:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.exists():
            return super().send_head()
        data = path.read_bytes()
        part = data[int(asked[1]) : int(asked[2] or len(data)) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)


@contextmanager
def served(handler: type[http.server.SimpleHTTPRequestHandler], folder: Path) -> Iterator[str]:
    serve = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_a_file_is_read_over_http(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    data = b"".join(b'{"text": "%d"}\n' % n for n in range(3000))
    (tmp_path / "x.jsonl").write_bytes(data)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(data))
    want = [b"%d" % n for n in range(3000)]
    with served(Ranges, tmp_path) as base:
        for name, target in (("x.jsonl", 1 << 20), ("x.jsonl", 9000), ("x.jsonl.gz", 9), ("x.jsonl?a=b/c", 9000)):
            assert [value for value, _ in read(f"{base}/{name}", target=target)] == want
        with pytest.raises(DataError) as caught:
            found(f"{base}/none.jsonl")
        assert str(caught.value) == f"{base}/none.jsonl: no such file or folder; check the URL"
    with served(http.server.SimpleHTTPRequestHandler, tmp_path) as base, pytest.raises(DataError) as caught:
        found(f"{base}/x.jsonl")
    says = "its server does not give parts of files, must do; download it first"
    assert str(caught.value) == f"{base}/x.jsonl: {says}"


class Refusing(http.server.BaseHTTPRequestHandler):
    """A web server that answers with the number it is asked for."""

    def do_GET(self) -> None:
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for


@pytest.mark.parametrize(("status", "says"), [
    (403, "cannot be read (its server answers 403); check the URL and your rights"),
    (500, "cannot be read (its server answers 500); check the URL and your rights"),
    (404, "no such file or folder; check the URL"),
    (410, "no such file or folder; check the URL"),
])  # fmt: skip
def test_what_a_server_refuses_is_told_from_what_it_has_not(status: int, says: str) -> None:
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/{status}"
        try:
            with pytest.raises(DataError) as caught:
                found(url)
        finally:
            server.shutdown()
    assert str(caught.value) == f"{url}: {says}"


def test_a_server_that_cannot_be_reached_is_said() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(DataError) as caught:
        found("http://127.0.0.1:1/x.txt")
    says = "cannot be reached (Connect call failed ('127.0.0.1', 1)); check the URL and the network"
    assert str(caught.value) == f"http://127.0.0.1:1/x.txt: {says}"
    with pytest.raises(
        DataError, match=r"^http://nowhere\.invalid/x: cannot be reached \(.*\); check the URL and the network$"
    ):
        found("http://nowhere.invalid/x")
