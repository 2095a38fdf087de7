"""Zarr arrays of any length, written item by item.

The chunks are written by hand, since an uncompressed Zarr chunk is its bytes and nothing else; who has all items writes
the metadata.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lib.store.disk import IN_FLIGHT, begin_writeback

__all__ = ["Array"]

_BUFFER = 1 << 20  # many documents are shorter than a page


@dataclass
class Array:
    """A Zarr array while it is written.

    Attributes:
        folder: where it lies.
        dtype: of its items.
        most: items along the first axis in a chunk.
        inner: axes behind the first one, each in one chunk.
        size: items along the first axis so far.
        chunk: the chunk at hand.
        unsynced: descriptors of chunks that are finished but may not be on the disk.
    """

    folder: Path
    dtype: np.dtype[Any]
    most: int
    inner: tuple[int, ...] = ()
    size: int = 0
    chunk: BinaryIO | None = None
    unsynced: deque[int] = field(default_factory=deque)

    def append(self, items: NDArray[Any]) -> None:
        """Write items behind those that are there."""
        while len(items):
            number, inside = divmod(self.size, self.most)
            if self.chunk is None:
                path = self.folder / "c" / "/".join([str(number), *"0" * len(self.inner)])
                path.parent.mkdir(parents=True, exist_ok=True)
                self.chunk = open(path, "wb", _BUFFER)  # noqa: SIM115 - shut when full
            part = items[: self.most - inside]
            self.chunk.write(part.astype(self.dtype, copy=False).data)
            self.size += len(part)
            items = items[len(part) :]
            if self.size % self.most == 0:
                self.shut()

    def drop(self) -> None:
        """Let go of what is not finished."""
        if self.chunk is not None:
            self.chunk.close()
        while self.unsynced:
            os.close(self.unsynced.popleft())

    def shut(self) -> None:
        """End the chunk at hand; the disk begins with it while the next one is filled."""
        if self.chunk is not None:
            if self.size > self.most:  # Zarr wants chunks in full; what is missing is a hole in the file, without room
                self.chunk.truncate(self.most * self.dtype.itemsize)
            self.chunk.flush()
            self.unsynced.append(os.dup(self.chunk.fileno()))  # without the buffer, which goes with the file
            self.chunk.close()
            self.chunk = None
            begin_writeback(self.unsynced[-1], 0, 0)
        self.settle(IN_FLIGHT)

    def settle(self, left: int = 0) -> None:
        """Sync finished chunks until so many are left."""
        while len(self.unsynced) > left:
            os.fsync(self.unsynced[0])
            os.close(self.unsynced.popleft())
