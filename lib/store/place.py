"""Where checkpoints are kept: a folder on a disk, or a prefix in a bucket. What both can do, and nothing else is needed.

A place is a folder of files by name; a checkpoint is one, the folder of a run's checkpoints is one. Whatever a kind of
place does to be safe is its own: a disk renames what is whole and synced, a bucket puts COMMIT last of all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from lib.store.remote import is_remote

__all__ = ["Content", "Draft", "Place", "Source", "Where", "place_of"]

Where = Path | str
"""A folder as people write it: a path, or a URL."""

Content = tuple[str, Iterable[Sequence[Any]]]
"""A file to be written: its name, and its bytes as groups of buffers, made when its turn comes."""


class Source(Protocol):
    """A file that is open for reading."""

    @property
    def size(self) -> int:
        """Bytes in it."""

    def read(self, at: int, buffers: Sequence[Any]) -> None:
        """Fill buffers from `at` on; EOFError when it ends before they are full."""


class Draft(Protocol):
    """A checkpoint that is being written, which nobody takes for one."""

    @property
    def token(self) -> str:
        """By this the other ranks find it."""

    def make(self, folders: Sequence[str]) -> None:
        """Make folders, outer ones first."""

    def write(self, files: Sequence[Content]) -> None:
        """Write new files, surely."""

    def seal(self, folders: Sequence[str], manifest: bytes, commit: bytes) -> None:
        """Make a checkpoint of it: from here on it is one, and before it was none."""


class Place(Protocol):
    """A folder of files. Failures are OSErrors: FileNotFoundError and NotADirectoryError when it is not there."""

    @property
    def name(self) -> str:
        """Its last name."""

    @property
    def where(self) -> Where:
        """As a path, or as a URL."""

    @property
    def is_link(self) -> bool:
        """Whether it is somewhere else in truth."""

    @property
    def parent(self) -> Place:
        """The folder that it is in."""

    @property
    def readers(self) -> int:
        """How many files are best read at once."""

    def child(self, name: str) -> Place:
        """A folder in it."""

    def names(self) -> list[str]:
        """What is in it, sorted."""

    def has(self, name: str) -> bool:
        """Whether there is a file, or anything, of that name; raises when that cannot be seen."""

    def listing(self) -> dict[str, int | None]:
        """All files below it: name -> size in bytes; None for what should be in no checkpoint."""

    def read(self, name: str) -> bytes:
        """Read a small file."""

    def source(self, name: str) -> AbstractContextManager[Source]:
        """Open a file for reading."""

    def shared(self) -> AbstractContextManager[None]:
        """Keep it from being deleted while it is read, as far as this kind of place can."""

    def begin(self) -> AbstractContextManager[Draft]:
        """Begin a checkpoint that is to be here; what is not sealed when the block ends is gone."""

    def join(self, token: str) -> Draft:
        """Take part in the draft that another rank has begun."""

    def discard(self) -> bool:
        """Delete it, so that no part of it is ever taken for a checkpoint; False when it is being read."""

    def set_aside(self) -> Place:
        """Make a damaged checkpoint none, without deleting it; return where it is now."""

    def sweep(self) -> list[str]:
        """Remove what saves and deletions that were killed have left in it; return the names."""

    def fix(self, error: OSError, size_bytes: int) -> str:
        """What to do when it refuses to take a checkpoint of so many bytes."""


def place_of(path: str | os.PathLike[str] | Place) -> Place:
    """Find the kind of place that a path or a URL means; a place is itself.

    Raises:
        ValueError: it is none of these, or it is a URL and a package for its scheme is missing.
    """
    if not isinstance(path, (str, os.PathLike)) and hasattr(path, "listing"):
        return path
    if not isinstance(path, (str, os.PathLike)) or not str(path):
        raise ValueError(f"path: {path!r} must be a path, a URL or a lib.store.place.Place; give one")
    if isinstance(path, str) and path.startswith(("file://", "local://")):
        path = path.partition("://")[2]
    if isinstance(path, str) and is_remote(path):
        from lib.store.bucket import bucket_of  # fsspec is an extra

        return bucket_of(path)
    from lib.store.local import Folder

    return Folder(Path(path))
