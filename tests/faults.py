"""Stores that fail: a machine between `lib.store` and the disk, and a bucket that answers as it likes.

Either stops for good at any operation that writes, half done or not; refuses it; or interrupts it. The machine then takes
from the disk what was not synced. The bucket loses the last put or keeps it, answers late, with errors, or with other bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lib.store import bucket, disk, local
from lib.store.bucket import Bucket


class Crash(BaseException):
    """The process is gone: nothing it would still do happens."""


class Machine:
    """The `os` and `shutil` that the store uses, on a machine that fails at the n-th operation that writes."""

    def __init__(self, fails_at: int, failure: type[BaseException] = Crash, code: int = errno.ENOSPC) -> None:
        self.left, self.failure, self.code, self.dead = fails_at, failure, code, False
        self.open_files: dict[int, Path] = {}
        self.unsynced_entries: set[Path] = set()
        self.unsynced_files: set[Path] = set()
        self.unsynced_renames: set[tuple[Path, Path]] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (disk, local):
                patch.setattr(module, "os", self)
            patch.setattr(local, "THREADS", 1)  # the n-th operation is the same each time
            patch.setattr(disk, "shutil", self)
            try:
                yield
            finally:
                for fd in self.open_files:
                    os.close(fd)

    def lose_what_was_not_synced(self) -> None:
        for path in self.unsynced_files:
            if path.exists():
                os.truncate(path, 0)
        for path in self.unsynced_entries:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _writes(self, done: Callable[[], Any], torn: Callable[[], Any] | None = None) -> Any:
        """Do an operation, or the half of it that can be done, and fail when it is the one to fail at."""
        if self.dead:
            raise Crash
        self.left -= 1
        if self.left != 0:
            return done()
        if self.failure is OSError:
            raise OSError(self.code, os.strerror(self.code))
        (torn or done)()
        self.dead = self.failure is Crash
        raise self.failure

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            self._alive()
            fd = os.open(path, flags, mode)
        else:
            self.unsynced_entries.add(Path(path))
            opened: list[int] = []
            try:
                self._writes(lambda: opened.append(os.open(path, flags, mode)))
            finally:
                self.open_files.update(dict.fromkeys(opened, Path(path)))
            fd = opened[0]
        self.open_files[fd] = Path(path)
        return fd

    def close(self, fd: int) -> None:
        self._alive()
        self.open_files.pop(fd, None)
        os.close(fd)

    def writev(self, fd: int, buffers: Sequence[memoryview]) -> int:
        self.unsynced_files.add(self.open_files[fd])
        data = b"".join(buffers)
        return self._writes(lambda: os.writev(fd, buffers), lambda: os.write(fd, data[: len(data) // 2]))

    def fsync(self, fd: int) -> None:
        self._writes(lambda: None)
        path = self.open_files[fd]
        self.unsynced_files.discard(path)
        self.unsynced_entries = {entry for entry in self.unsynced_entries if entry.parent != path}
        self.unsynced_renames = {pair for pair in self.unsynced_renames if pair[0].parent != path}

    def mkdir(self, path: Path | str, mode: int = 0o777) -> None:
        path = Path(path)
        if not path.exists():
            self.unsynced_entries.add(path)
            self._writes(lambda: os.mkdir(path, mode))
        else:
            os.mkdir(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        """A rename is taken to last at once, so that what it makes visible must have been synced before."""
        self._writes(lambda: os.rename(old, new))

        def moved(path: Path) -> Path:
            return new / path.relative_to(old) if path.is_relative_to(old) else path

        self.unsynced_files = {moved(path) for path in self.unsynced_files}
        self.unsynced_entries = {moved(path) for path in self.unsynced_entries if path != old}
        self.open_files = {fd: moved(path) for fd, path in self.open_files.items()}
        self.unsynced_renames.add((old, new))

    def rmdir(self, path: Path) -> None:
        self._writes(lambda: os.rmdir(path))

    def rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        def half() -> None:
            for name in sorted(os.listdir(path))[::2]:
                shutil.rmtree(path / name) if (path / name).is_dir() else (path / name).unlink()

        self._alive()
        if not path.exists():
            return
        if self.failure is OSError and ignore_errors:
            shutil.rmtree(path)
            return
        # After a power cut an unsynced rename may be undone: what it hid would be back, half deleted.
        assert not [new for _, new in self.unsynced_renames if new.is_relative_to(path)]
        self._writes(lambda: shutil.rmtree(path, ignore_errors), half)
        self.unsynced_entries = {entry for entry in self.unsynced_entries if not entry.is_relative_to(path)}

    def _alive(self) -> None:
        if self.dead:
            raise Crash


class Objects:
    """What `lib.store.bucket` uses of an fsspec file system, over a dict: puts are whole or not there, no folders, no rename."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.left = 10**9
        self.failure: type[BaseException] = Crash
        self.arrives = False
        self.dead = False
        self.errors: list[Exception] = []
        self.delay_s = 0.0

    def bucket(self, path: str = "run/checkpoints") -> Bucket:
        return Bucket(self, path, f"fake://{path}")

    def fail_at(self, request: int, failure: type[BaseException] = Crash, *, arrives: bool = False) -> None:
        """Fail at a request that writes; does what it asks for arrive all the same?"""
        self.left, self.failure, self.arrives, self.dead = request, failure, arrives, False

    def recover(self) -> None:
        """What was stored is there again, for whoever comes next."""
        self.fail_at(10**9)

    def ls(self, path: str, detail: bool) -> list[str]:
        assert not detail
        self._answers()
        below = f"{path}/"
        found = {below + key.removeprefix(below).split("/")[0] for key in list(self.kept) if key.startswith(below)}
        if not found and path not in self.kept:
            raise FileNotFoundError(path)
        return sorted(found) or [path]

    def info(self, path: str) -> dict[str, Any]:
        self._answers()
        if path in self.kept:
            return {"name": path, "type": "file", "size": len(self.kept[path])}
        if any(key.startswith(f"{path}/") for key in list(self.kept)):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def find(self, path: str, detail: bool) -> dict[str, dict[str, Any]]:
        assert detail
        return {key: self.info(key) for key in list(self.kept) if key.startswith(f"{path}/")}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        self._answers()
        if path not in self.kept:
            raise FileNotFoundError(path)
        return self.kept[path][start:end]

    def pipe_file(self, path: str, data: bytes) -> None:
        self._answers()
        self._writes(lambda: self.kept.__setitem__(path, bytes(data)))

    def open(self, path: str, mode: str, block_size: int) -> _Upload:
        assert mode == "wb"
        assert block_size >= 5 << 20
        return _Upload(self, path)

    def rm(self, paths: list[str]) -> None:
        """Like a request for many: it may have got half of them."""
        self._answers()
        for path in paths:
            if path not in self.kept:
                raise FileNotFoundError(path)
            self._writes(lambda path=path: self.kept.pop(path))

    def _answers(self) -> None:
        if self.dead:
            raise Crash
        time.sleep(self.delay_s)
        if self.errors:
            raise self.errors.pop(0)

    def _writes(self, act: Callable[[], Any]) -> None:
        if self.dead:
            raise Crash
        self.left -= 1
        if self.left == 0:
            if self.arrives:
                act()
            self.dead = self.failure is Crash
            raise self.failure
        act()


class _Upload:
    """A multipart upload: its object is there when it is closed."""

    def __init__(self, objects: Objects, path: str) -> None:
        self.objects, self.path, self.parts, self.closed = objects, path, [], False  # type: ignore[var-annotated]

    def write(self, data: bytes) -> None:
        self.objects._answers()
        self.parts.append(bytes(data))

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.objects.pipe_file(self.path, b"".join(self.parts))

    def discard(self) -> None:
        self.parts = []


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """One request after the other, and no waiting between tries: the n-th request is the same each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "THREADS", 1)
        patch.setattr(bucket, "FIRST_WAIT_S", 0.0)
        yield
