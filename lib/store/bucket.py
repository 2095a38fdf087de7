"""Checkpoints in an object store, through fsspec (`s3://`, `gs://`, `az://`, `memory://`, ...).

Guarantees: no rename is assumed. Files are put where they stay; COMMIT is the last put of all, and a single one, so a
checkpoint is there whole or not at all. Deleting removes COMMIT first. A damaged checkpoint is set aside by a file DAMAGED
in COMMIT's place. What a killed save has left has neither, and goes with the next sweep, or the next save of its step.

A request that fails for a cause that may pass is made again, at most `TRIES` times, each time after twice the wait; the
packages behind fsspec do the same of themselves (s3fs 5 times). Listings are never cached. What cannot be held off
here: nobody can lock a prefix, so one run alone writes to it, and who reads a checkpoint while it is deleted is told that
a file is missing.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from lib.errors import CheckpointError
from lib.store.each import each
from lib.store.manifest import COMMIT, MANIFEST, METADATA, decode_attributes
from lib.store.place import Content
from lib.store.remote import said

__all__ = ["Bucket", "bucket_of"]

DAMAGED = "DAMAGED"
TRIES = 5
FIRST_WAIT_S = 0.2
THREADS = 8  # files read or written at once: it is all waiting
PART_BYTES = 16 << 20  # of a multipart upload; S3 takes 5 MB to 5 GB, and 10,000 of them

_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError)

T = TypeVar("T")


def bucket_of(url: str) -> Bucket:
    """Find the file system of a URL; nothing is asked of it yet.

    Raises:
        ValueError: a package for it is missing, or there is no such scheme.
    """
    if "::" in url:
        raise ValueError(f"{url}: one URL within another, must be one alone; name the place itself")
    try:
        import fsspec  # type: ignore[import-untyped]

        files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        kind = url.partition("://")[0]
        raise ValueError(
            f"{url}: a package for {kind}:// is not installed ({said(error)}); pip install 'purestep[remote]'"
        ) from None
    except ValueError as error:
        raise ValueError(f"{url}: must be a path or a URL that fsspec knows ({said(error)}); check it") from None
    except Exception as error:  # some ask their server at once
        raise CheckpointError(f"{url}: cannot be reached ({said(error)}); check the URL and the network") from error
    return Bucket(files, str(root).rstrip("/"), url.rstrip("/"))


@dataclass(frozen=True)
class Bucket:
    """A prefix of an object store; see `lib.store.place.Place`."""

    files: Any
    root: str
    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def where(self) -> str:
        return self.url

    @property
    def is_link(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Bucket:
        return Bucket(self.files, self.root.rpartition("/")[0], self.url.rpartition("/")[0])

    @property
    def readers(self) -> int:
        return THREADS

    def child(self, name: str) -> Bucket:
        return Bucket(self.files, f"{self.root}/{name}", f"{self.url}/{name}")

    def names(self) -> list[str]:
        found = _asked(lambda: self.files.ls(self.root, detail=False))
        names = {str(path).rstrip("/").rpartition("/")[2] for path in found if str(path).rstrip("/") != self.root}
        return sorted(names)

    def has(self, name: str) -> bool:
        try:
            _asked(lambda: self.files.info(f"{self.root}/{name}"))
        except FileNotFoundError:
            return False
        return True

    def listing(self) -> dict[str, int | None]:
        found = _asked(lambda: self.files.find(self.root, detail=True))
        return {
            str(path).removeprefix(self.root).lstrip("/"): int(about["size"]) if about["type"] == "file" else None
            for path, about in found.items()
            if str(path).rstrip("/") != self.root  # some consoles put an empty object for a folder
        }

    def read(self, name: str) -> bytes:
        return bytes(_asked(lambda: self.files.cat_file(f"{self.root}/{name}")))

    @contextlib.contextmanager
    def source(self, name: str) -> Iterator[_Source]:
        path = f"{self.root}/{name}"
        yield _Source(self.files, path, int(_asked(lambda: self.files.info(path))["size"]))

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def begin(self) -> Iterator[_Draft]:
        self._clear()
        draft = _Draft(self)
        try:
            yield draft
        except BaseException:
            # As well as it goes: what is left has no COMMIT. A commit that may have arrived is not to be trusted either.
            with contextlib.suppress(OSError):
                self._clear()
            raise

    def join(self, token: str) -> _Draft:
        del token  # files are put where they stay, so there is nothing to find
        return _Draft(self)

    def discard(self) -> bool:
        self._clear()
        return True

    def set_aside(self) -> Bucket:
        self._put(DAMAGED, b"set aside: COMMIT was here\n")
        self._remove([COMMIT])
        return self

    def sweep(self) -> list[str]:
        swept = []
        for name in self.names():
            inside = self.child(name)
            if inside._is_ours() and not inside.has(COMMIT) and not inside.has(DAMAGED):
                inside._clear()
                swept.append(name)
        return swept

    def fix(self, error: OSError, size_bytes: int) -> str:
        return "check the bucket"

    def _is_ours(self) -> bool:
        """Whether a save has begun here: by its first file, which says so; whatever else lies beside is let alone."""
        try:
            decode_attributes(self.read(METADATA), str(self))
        except (FileNotFoundError, CheckpointError):
            return False
        return True

    def _put(self, name: str, data: bytes) -> None:
        """Write one small file in one request."""
        _asked(lambda: self.files.pipe_file(f"{self.root}/{name}", data))

    def _clear(self) -> None:
        """Delete all below, COMMIT before anything else, and last what tells that the rest is ours."""
        try:
            names = set(self.listing())
        except FileNotFoundError:
            return
        self._remove([COMMIT] if COMMIT in names else [])
        self._remove(sorted(names - {COMMIT, METADATA}))
        self._remove([METADATA] if METADATA in names else [])

    def _remove(self, names: Sequence[str]) -> None:
        if names:
            with contextlib.suppress(FileNotFoundError):  # of several tries an earlier one may have done it
                _asked(lambda: self.files.rm([f"{self.root}/{name}" for name in names]))


@dataclass(frozen=True)
class _Source:
    files: Any
    path: str
    size: int

    def read(self, at: int, buffers: Sequence[Any]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        stop = at + sum(map(len, views))
        got = memoryview(_asked(lambda: self.files.cat_file(self.path, start=at, end=stop)))
        if len(got) != stop - at:
            raise EOFError
        for view in views:
            view[:] = got[: len(view)]
            got = got[len(view) :]


@dataclass(frozen=True)
class _Draft:
    """See `lib.store.place.Draft`."""

    target: Bucket

    @property
    def token(self) -> str:
        return ""

    def make(self, folders: Sequence[str]) -> None:
        """Folders are no more than a part of names."""

    def write(self, files: Sequence[Content]) -> None:
        each(self._put, files, THREADS)

    def seal(self, folders: Sequence[str], manifest: bytes, commit: bytes) -> None:
        del folders
        self.target._put(MANIFEST, manifest)
        self.target._put(COMMIT, commit)

    def _put(self, file: Content) -> None:
        name, pieces = file
        path, files = f"{self.target.root}/{name}", self.target.files
        # Held until it is put, for another try: a file is at most a shard, 128 MB.
        buffers = [bytes(memoryview(buffer).cast("B")) for piece in pieces for buffer in piece if len(buffer)]
        if sum(map(len, buffers)) <= PART_BYTES:
            _asked(lambda: files.pipe_file(path, b"".join(buffers)))
        else:
            _asked(lambda: self._stream(path, buffers))

    def _stream(self, path: str, buffers: Sequence[bytes]) -> None:
        """Put a large file part by part; it is there when all parts are."""
        out = self.target.files.open(path, "wb", block_size=PART_BYTES)
        try:
            for buffer in buffers:
                out.write(buffer)
        except BaseException:
            with contextlib.suppress(Exception):
                out.discard()
            out.closed = True  # closing it would put together the parts that arrived
            raise
        out.close()


def _asked(ask: Callable[[], T]) -> T:
    """Make a request, again if need be; whatever the package raises becomes an OSError."""
    delay = FIRST_WAIT_S
    for left in reversed(range(TRIES)):
        try:
            return ask()
        except _LASTING:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) or not left:
                raise
        except Exception as error:  # each package has errors of its own
            if not left:
                raise OSError(errno.EIO, said(error)) from error
        wait([Future[None]()], delay)  # nothing is awaited but the time
        delay *= 2
    raise AssertionError
