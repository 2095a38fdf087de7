"""Files that are surely on the disk, or surely not there: durable writes, reads of any part, temporary folders.

Guarantees: what a function here has written is synced when it returns; a temporary folder is locked for as long as
its writer lives, so what a killed process leaves behind can be told from a save in progress and is swept away. A folder
that is being read is locked too, for all who share it, so that none deletes it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "IN_FLIGHT",
    "begin_writeback",
    "discard",
    "free",
    "listing",
    "make_folder",
    "open_regular",
    "read_at",
    "shared",
    "sweep",
    "sync",
    "temporary",
    "write_file",
]

IN_FLIGHT = 8  # files written and not yet synced
BATCH_BYTES = 16 << 20  # handed to the disk in one call: ext4 takes many small calls at half the rate
BATCH_PIECES = 512  # Linux takes 1024 in one call
HIDDEN = re.compile(r"\.(saving|deleting)-[0-9a-f]{16}")


def write_file(path: str, pieces: Iterable[Sequence[Any]]) -> None:
    """Write a new file, given as groups of buffers, and sync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        batch: list[memoryview] = []
        for piece in pieces:
            batch += [memoryview(buffer).cast("B") for buffer in piece if len(buffer)]
            if sum(map(len, batch)) >= BATCH_BYTES or len(batch) >= BATCH_PIECES:
                _write(fd, batch)
                batch = []
        _write(fd, batch)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync(folder: str | Path) -> None:
    """Sync the entries of a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading, never through a symlink; return its descriptor and its size in bytes.

    Raises:
        OSError: it is not there, cannot be read, or is no regular file.
    """
    # Without O_NONBLOCK the open itself would wait for ever on a named pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return fd, facts.st_size


def read_at(fd: int, at: int, buffers: Sequence[Any]) -> None:
    """Fill buffers, one after the other, from some place of a file on.

    Raises:
        EOFError: the file ends before they are full.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        got = os.preadv(fd, views, at)
        if not got:
            raise EOFError
        at += got
        views = _behind(views, got)


def listing(root: Path) -> dict[str, int | None]:
    """List what is below a folder: name -> size in bytes, None for what is no regular file; of folders only empty ones."""
    found: dict[str, int | None] = {}
    folders = [(root, "")]
    while folders:
        folder, prefix = folders.pop()
        with os.scandir(folder) as entries:
            there = list(entries)
            if not there and prefix:
                found[prefix] = None
            for entry in there:
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


def begin_writeback(fd: int, at: int, length: int) -> None:
    """Let the disk start on what was written, while the next part is hashed: the sync then has little left to wait for.

    That is what Linux makes of "not needed any more"; elsewhere it is a hint at most.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, at, length, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[None]:
    """Keep a folder from being deleted while the block runs; where a disk has no locks, nothing does."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def free(folder: Path) -> Iterator[bool]:
    """Say whether nobody reads a folder; while the block runs, nobody begins to who asks first."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:  # no locks on this disk
            alone = True
        yield alone
    finally:
        os.close(lock)


def _write(fd: int, views: list[memoryview]) -> None:
    while views:  # a single call may stop early (at 2 GiB on Linux)
        views = _behind(views, os.writev(fd, views))


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers when so many bytes are done."""
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return []
