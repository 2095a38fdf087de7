"""One process at a time in a folder; what a process holds when it dies is free again.

Some network disks have no locks. There all of this does nothing, and renaming alone keeps whole what is in the folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lib.store.disk import temporary

__all__ = ["alone", "alone_in_new", "temporary_in"]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in a folder that is there, and keep others out."""
    lock = _locked(folder)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def alone_in_new(folder: Path) -> Iterator[None]:
    """The same for a folder that is made where it is missing, and that whoever is in it may remove."""
    while (lock := _locked_new(folder)) is None:
        pass
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def temporary_in(folder: Path) -> Iterator[Path]:
    """Make a temporary folder that nobody sweeps away before it is locked."""
    with ExitStack() as stack:
        with alone(folder):
            path = stack.enter_context(temporary(folder))
        yield path


def _locked_new(folder: Path) -> int | None:
    """Make and lock a folder; none = whoever held it has removed it, so the lock is on one that nobody finds any more."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        lock = _locked(folder)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(folder)):
                return lock
        os.close(lock)
    return None


def _locked(folder: Path) -> int:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock
