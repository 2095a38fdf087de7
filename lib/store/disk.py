"""Files that are surely on the disk, or surely not there: durable writes, digests, temporary folders.

Guarantees: what a function here has written is synced when it returns; a temporary folder is locked for as long as
its writer lives, so what a killed process leaves behind can be told from a save in progress and is swept away. A
digest is taken while the bytes pass by. One thread does it all; the disk works behind it (see `begin_writeback`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "IN_FLIGHT",
    "begin_writeback",
    "digest",
    "discard",
    "listing",
    "make_folder",
    "read_bytes",
    "reading",
    "sweep",
    "sync",
    "temporary",
    "write_files",
]

IN_FLIGHT = 8  # files written and not yet synced
BLOCK_BYTES = 4 << 20
HIDDEN = re.compile(r"\.(saving|deleting)-[0-9a-f]{16}")


def write_files(files: Iterable[tuple[Path, Iterable[Any]]]) -> dict[Path, tuple[int, str]]:
    """Write new files, each given as its pieces, and sync them; return size in bytes and sha256 of each."""
    written: dict[Path, tuple[int, str]] = {}
    unsynced: deque[int] = deque()
    try:
        for path, pieces in files:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            unsynced.append(fd)
            written[path] = _write(fd, pieces)
            while len(unsynced) > IN_FLIGHT:
                _sync_and_close(unsynced)
        while unsynced:
            _sync_and_close(unsynced)
    finally:
        for fd in unsynced:
            os.close(fd)
    return written


def sync(folder: Path) -> None:
    """Sync the entries of a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[tuple[int, Callable[[NDArray[np.uint8]], None], Callable[[], str]]]:
    """Open a regular file, never through a symlink: its size, a function that fills a buffer, and the sha256 so far.

    Raises:
        EOFError: the file ends before the buffer is full.
        OSError: it is not there, cannot be read, or is no regular file.
    """
    sha = hashlib.sha256()
    # Without O_NONBLOCK the open itself would wait for ever on a named pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", buffering=0, closefd=True) as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))

        def fill(buffer: NDArray[np.uint8]) -> None:
            view = buffer.data
            while view:
                got = file.readinto(view)
                if not got:
                    raise EOFError
                sha.update(view[:got])
                view = view[got:]

        yield facts.st_size, fill, sha.hexdigest


def read_bytes(path: Path) -> bytes:
    """Read a whole file."""
    with reading(path) as (size, fill, _):
        buffer = np.empty(size, np.uint8)
        fill(buffer)
        return buffer.tobytes()


def digest(path: Path) -> str:
    """Hash a file."""
    with reading(path) as (size, fill, sha256):
        buffer = np.empty(min(size, BLOCK_BYTES), np.uint8)
        for at in range(0, size, BLOCK_BYTES):
            fill(buffer[: size - at])
        return sha256()


def listing(root: Path) -> dict[str, int | None]:
    """List what is below a folder, but folders: name -> size in bytes, or None for what is no regular file."""
    found: dict[str, int | None] = {}
    folders = [(root, "")]
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append((folder / entry.name, f"{prefix}{entry.name}/"))
                else:
                    facts = entry.stat(follow_symlinks=False)
                    found[prefix + entry.name] = facts.st_size if stat.S_ISREG(facts.st_mode) else None
    return found


def make_folder(folder: Path, made: list[Path]) -> None:
    """Make a folder and those above it, synced; note in `made` the ones that were not there, outermost first."""
    for step in (*reversed(folder.parents), folder):
        made.append(step)  # before it is made: an interrupt between the two must not lose it
        try:
            os.mkdir(step)
        except OSError:
            made.pop()
            if step.is_dir():
                continue
            if step.exists():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(step)) from None
            raise
        sync(step.parent)


@contextlib.contextmanager
def temporary(parent: Path, purpose: str = "saving") -> Iterator[Path]:
    """Make a hidden folder, locked while the block runs; what is left of it afterwards is removed."""
    folder = parent / f".{purpose}-{os.urandom(8).hex()}"
    lock = None
    try:
        os.mkdir(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # some network disks have no locks; there nothing is swept
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def discard(folder: Path) -> None:
    """Remove a folder so that no part of it is ever seen under its name: first hidden by a rename, then removed."""
    with temporary(folder.parent, "deleting") as hidden:
        os.rename(folder, hidden / folder.name)
        sync(folder.parent)


def sweep(parent: Path) -> list[Path]:
    """Remove the temporary folders whose writers are dead; return those removed."""
    swept = []
    for folder in sorted(entry for entry in parent.iterdir() if HIDDEN.fullmatch(entry.name)):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                swept.append(folder)
            finally:
                os.close(lock)
    return swept


def _write(fd: int, pieces: Iterable[Any]) -> tuple[int, str]:
    sha, size, begun = hashlib.sha256(), 0, 0
    for piece in pieces:
        view = memoryview(piece)
        sha.update(view)
        size += len(view)
        while view:  # a single write may stop early (at 2 GiB on Linux)
            view = view[os.write(fd, view) :]
        if size - begun >= BLOCK_BYTES:
            begin_writeback(fd, begun, size - begun)
            begun = size
    return size, sha.hexdigest()


def begin_writeback(fd: int, at: int, length: int) -> None:
    """Let the disk start on what was written, while the next part is hashed: the sync then has little left to wait for.

    That is what Linux makes of "not needed any more"; elsewhere it is a hint at most.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, at, length, os.POSIX_FADV_DONTNEED)


def _sync_and_close(unsynced: deque[int]) -> None:
    os.fsync(unsynced[0])
    os.close(unsynced.popleft())
