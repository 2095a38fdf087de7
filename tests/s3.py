"""A real S3 server for tests: moto behind HTTP on loopback, inside this process, with faults made to order.

    with s3_server() as server:
        files = fsspec.filesystem("s3", **server.options)
        bucket = server.new_bucket()
        server.answer(503, times=2)                                            # two answers "slow down"
        server.drop(only=lambda method, path: method == "PUT", carried=True)   # done, but nobody is told

Each request meets the first fault that is left for it and no other. A path is what was asked for, percent signs, query
and all: `/bucket/key?partNumber=1&uploadId=...`.

fsspec keeps filesystems by their options, across tests. `options` hold a key that no other server has, so those are
never mistaken. `fsspec.filesystem("s3")` with the settings in `environment` has no options to tell servers apart by:
kept ones are dropped when a server starts and when it stops, so of two servers at once only one may be used this way.

Botocore tries five times and waits for seconds in between, s3fs five times around that. Where a test is not about the
patience of botocore, `config_kwargs={"retries": {"max_attempts": 0}}` beside the options, or `AWS_MAX_ATTEMPTS=1` in the
environment, leaves the tries of s3fs alone: two seconds in all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import FakeKey, FakeMultipart, s3_backends
from werkzeug.serving import make_server
from werkzeug.test import Client
from werkzeug.wsgi import get_input_stream

__all__ = ["ONCE", "S3Server", "s3_server"]

Only = Callable[[str, str], bool]

REGION = "us-east-1"
ONCE = {"config_kwargs": {"retries": {"max_attempts": 0}}}
"""Botocore does not try again; s3fs still does."""
# Status -> its line, and the code and words that S3 itself puts into the body.
ANSWERS = {
    403: ("403 Forbidden", "AccessDenied", "Access Denied"),
    404: ("404 Not Found", "NoSuchKey", "The specified key does not exist."),
    500: ("500 Internal Server Error", "InternalError", "We encountered an internal error. Please try again."),
    503: ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
}


@dataclass
class Fault:
    """What the next requests meet; `times` counts down, None = all of them."""

    meet: Callable[[Any, Any], Iterable[bytes]]
    times: int | None
    only: Only | None

    def met(self, method: str, path: str) -> bool:
        if self.times == 0 or (self.only is not None and not self.only(method, path)):
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass
class S3Server:
    """A server that runs.

    Attributes:
        endpoint: URL of it.
        account: moto keeps what is stored by account; each server has its own.
        requests: method and path of every request that has come in, in order, also those that a fault was put upon.
    """

    endpoint: str = ""
    account: str = field(default_factory=lambda: f"{int.from_bytes(os.urandom(8)) % 10**12:012}")
    requests: list[tuple[str, str]] = field(default_factory=list)
    _moto: Any = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def options(self) -> dict[str, Any]:
        """For `fsspec.filesystem("s3", **options)`."""
        client = {"endpoint_url": self.endpoint, "region_name": REGION}
        return {"key": f"key-{self.account}", "secret": "secret", "client_kwargs": client}

    @property
    def environment(self) -> dict[str, str]:
        """For `fsspec.filesystem("s3")`, in this process or another, whatever the machine is set up for."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": f"key-{self.account}",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def new_bucket(self) -> str:
        """Make a bucket; no fault is met and nothing is noted."""
        name = f"bucket-{os.urandom(8).hex()}"
        answer = Client(self._keep).put(f"/{name}", headers={"Host": self.endpoint.removeprefix("http://")})
        assert answer.status_code == 200, answer.text
        return name

    def answer(self, status: int, *, times: int | None = 1, only: Only | None = None) -> None:
        """Answer the next requests with an error of S3: 403, 404, 500 or 503."""
        self._add(lambda environ, start: _refuse(status, environ, start), times, only)

    def delay(self, seconds: float, *, times: int | None = 1, only: Only | None = None) -> None:
        """Do what the next requests ask for, but late."""

        def late(environ: Any, start: Any) -> Iterable[bytes]:
            if self._stopping.wait(seconds):
                _hang_up(environ)
            return self._keep(environ, start)

        self._add(late, times, only)

    def drop(self, *, times: int | None = 1, only: Only | None = None, carried: bool = False) -> None:
        """Close the connection of the next requests without an answer; `carried` = after what they ask for is done."""

        def dropped(environ: Any, _: Any) -> Iterable[bytes]:
            if carried:
                unheard = self._keep(environ, lambda *_: None)
                b"".join(unheard)
                getattr(unheard, "close", lambda: None)()
            else:
                get_input_stream(environ).read()
            _hang_up(environ)

        self._add(dropped, times, only)

    def heal(self) -> None:
        """Forget the faults that were not met."""
        with self._lock:
            self._faults.clear()

    def __call__(self, environ: Any, start: Any) -> Iterable[bytes]:
        """Take a request, as a WSGI application."""
        method, path = environ["REQUEST_METHOD"], environ["RAW_URI"]
        with self._lock:
            self.requests.append((method, path))
            meet = next((fault.meet for fault in self._faults if fault.met(method, path)), self._keep)
        return meet(environ, start)

    def _add(self, meet: Callable[[Any, Any], Iterable[bytes]], times: int | None, only: Only | None) -> None:
        with self._lock:
            self._faults.append(Fault(meet, times, only))

    def _keep(self, environ: Any, start: Any) -> Iterable[bytes]:
        answer: Iterable[bytes] = self._moto({**environ, "HTTP_X_MOTO_ACCOUNT_ID": self.account}, start)
        return answer

    def _forget(self) -> None:
        """Let go of all that is stored: moto keeps it for the whole process, and warns of what it finds unclosed."""
        for kind in (FakeMultipart, FakeKey):
            every = kind.instances_tracked
            for one in every:
                if one.account_id == self.account:
                    one.dispose()
            every[:] = [one for one in every if one.account_id != self.account]
        buckets = s3_backends[self.account]["aws"].buckets
        for name in buckets:
            s3_backends.bucket_accounts.pop(name, None)
        buckets.clear()


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server while the block runs."""
    server, live, lock = S3Server(), dict[threading.Thread, socket.socket](), threading.Lock()

    class Handler(MotoRequestHandler):
        def setup(self) -> None:
            super().setup()
            with lock:
                live[threading.current_thread()] = self.connection

        def finish(self) -> None:
            with lock:
                del live[threading.current_thread()]
            super().finish()

        def log_request(self, *_: Any) -> None:
            pass

        def send_response(self, code: int, message: str | None = None) -> None:
            self.send_response_only(code, message)  # moto sends `Server` and `Date` itself, a strict client takes one

    http = make_server("127.0.0.1", 0, server, threaded=True, request_handler=Handler)
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server._stopping.set()
        http.shutdown()
        http.server_close()
        with lock:
            left = dict(live)
            for connection in left.values():  # a client may keep one open and say nothing
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for one in (thread, *left):
            one.join(10)
        server._forget()


def _refuse(status: int, environ: Any, start: Any) -> Iterable[bytes]:
    get_input_stream(environ).read()
    line, code, words = ANSWERS[status]
    xml = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{words}</Message></Error>'
    body = b"" if environ["REQUEST_METHOD"] == "HEAD" else xml.encode()
    start(line, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def _hang_up(environ: Any) -> NoReturn:
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError  # the one way to tell Werkzeug that there is no one to answer
