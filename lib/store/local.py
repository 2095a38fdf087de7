"""Checkpoints in a folder of a disk, local or shared: whole or not there, by a rename after everything is synced.

Order of a save: a hidden folder beside the final one, locked while its writer lives; all files and folders in it synced;
`manifest.json`; `COMMIT`; rename to the final name; sync of the folder above. Deleting hides by a rename first.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.store import disk
from lib.store.each import each
from lib.store.manifest import COMMIT, MANIFEST
from lib.store.place import Content

__all__ = ["Folder"]

THREADS = 8  # files written or synced at once; one alone leaves the disk here waiting for half of the time


@dataclass(frozen=True)
class Folder:
    """A folder of a disk; see `lib.store.place.Place`."""

    where: Path

    def __str__(self) -> str:
        return str(self.where)

    @property
    def name(self) -> str:
        return self.where.name

    @property
    def is_link(self) -> bool:
        return self.where.is_symlink()

    @property
    def parent(self) -> Folder:
        return Folder(self.where.parent)

    @property
    def readers(self) -> int:
        # What is in memory already is bound by cores (more than they are cost a fifth here); a disk waits in one more.
        return min(THREADS, (os.cpu_count() or 1) + 1)

    def child(self, name: str) -> Folder:
        return Folder(self.where / name)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.where))

    def has(self, name: str) -> bool:
        # Like os.path.lexists, which takes what it may not look at for absent: here that is an error.
        try:
            os.lstat(self.where / name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def listing(self) -> dict[str, int | None]:
        return disk.listing(self.where)

    def read(self, name: str) -> bytes:
        with self.source(name) as source:
            buffer = bytearray(source.size)
            source.read(0, [buffer])
            return bytes(buffer)

    @contextlib.contextmanager
    def source(self, name: str) -> Iterator[_Source]:
        fd, size = disk.open_regular(self.where / name)
        try:
            yield _Source(fd, size)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with disk.shared(self.where):
            yield

    @contextlib.contextmanager
    def begin(self) -> Iterator[_Draft]:
        made: list[Path] = []
        try:
            disk.make_folder(self.where.parent, made)
            disk.sweep(self.where.parent)
            with disk.temporary(self.where.parent) as hidden:
                yield _Draft(hidden, self.where)
        except BaseException:  # if the save fails, the folders that were made for it go again
            for folder in reversed(made):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            raise

    def join(self, token: str) -> _Draft:
        return _Draft(self.where.parent / token, self.where)

    def discard(self) -> bool:
        with disk.free(self.where) as unread:
            if unread:
                disk.discard(self.where)
            return unread

    def set_aside(self) -> Folder:
        target, number = self.where.with_name(f"damaged_{self.name}"), 2
        while os.path.lexists(target):
            target, number = self.where.with_name(f"damaged_{self.name}_{number}"), number + 1
        os.rename(self.where, target)
        disk.sync(self.where.parent)
        return Folder(target)

    def sweep(self) -> list[str]:
        return [folder.name for folder in disk.sweep(self.where)]

    def fix(self, error: OSError, size_bytes: int) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"free {math.ceil(size_bytes / 1e6)} MB or set another run.dir"
        if error.errno == errno.ENOTDIR:
            return f"move {error.filename} out of the way or set another run.dir"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"make {self.parent} writable or set another run.dir"
        return "check the disk"


@dataclass(frozen=True)
class _Source:
    fd: int
    size: int

    def read(self, at: int, buffers: Sequence[Any]) -> None:
        disk.read_at(self.fd, at, buffers)


@dataclass(frozen=True)
class _Draft:
    """See `lib.store.place.Draft`."""

    hidden: Path
    target: Path

    @property
    def token(self) -> str:
        return self.hidden.name

    def make(self, folders: Sequence[str]) -> None:
        for name in folders:
            os.mkdir(f"{self.hidden}/{name}")

    def write(self, files: Sequence[Content]) -> None:
        each(lambda file: disk.write_file(f"{self.hidden}/{file[0]}", file[1]), files, THREADS)

    def seal(self, folders: Sequence[str], manifest: bytes, commit: bytes) -> None:
        each(lambda name: disk.sync(f"{self.hidden}/{name}"), folders, THREADS)
        disk.write_file(f"{self.hidden}/{MANIFEST}", [(manifest,)])
        disk.write_file(f"{self.hidden}/{COMMIT}", [(commit,)])
        disk.sync(self.hidden)
        if self.target.exists():
            disk.discard(self.target)
        os.rename(self.hidden, self.target)
        try:
            disk.sync(self.target.parent)
        except OSError:
            os.rename(self.target, self.hidden)  # not surely on the disk, so not there
            raise
