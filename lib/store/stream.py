"""One side of a token store, read where it lies: opening it reads the index, a row costs one system call.

Ids are read by position (`pread`) rather than mapped: as quick, a file that has gone bad is an error instead of the
end of the process, and memory does not fill with the pages of a corpus. All positions are int64.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lib.errors import DataError

__all__ = ["CHUNK_IDS", "ID_BYTES", "Stream", "open_stream"]

CHUNK_IDS = 1 << 24  # 32 MiB: few files, and still cheap to copy, or to read whole with plain Zarr
ID_BYTES = 2

_OPEN_FILES = 64


@dataclass(frozen=True)
class Stream:
    """Documents laid end to end, each closed by its end mark.

    Attributes:
        path: folder of this side.
        size: how many ids.
        documents: how many documents.
        text_bytes: bytes of text in them.
        vocab: ids are in [0, vocab).
        offsets: where each document begins, and last the size.
    """

    path: Path
    size: int
    documents: int
    text_bytes: int
    vocab: int
    offsets: NDArray[np.int64] = field(repr=False, compare=False)
    _open: Callable[[int], _File] = field(repr=False, compare=False)

    def ids(self, start: int, stop: int) -> NDArray[np.uint16]:
        """Read the ids at [start, stop).

        Raises:
            ValueError: the range leaves the stream.
            DataError: the store's files are gone or cut short.
        """
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"ids[{start}:{stop}] must lie in [0, {self.size})")
        out = np.empty(stop - start, dtype="<u2")
        view, at = out.view(np.uint8).data, start * ID_BYTES
        while view:
            chunk, inside = divmod(at, CHUNK_IDS * ID_BYTES)
            part = view[: CHUNK_IDS * ID_BYTES - inside]
            try:
                got = os.preadv(self._open(chunk).fd, [part], inside)
            except OSError as error:
                raise self._damaged(chunk, str(error.strerror)) from None
            if not got:
                raise self._damaged(chunk, "cut short")
            view, at = view[got:], at + got
        return out

    def document(self, position: int) -> int:
        """Give the number of the document that the id at this position belongs to."""
        if not 0 <= position < self.size:
            raise ValueError(f"position={position} must be in [0, {self.size})")
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def _damaged(self, chunk: int, why: str) -> DataError:
        return DataError(f"{self.path}/ids/c/{chunk}: {why}; run again to have the token store built anew")


class _File:
    """A descriptor that is closed when nothing holds it any more; a thread may still read what another let go of."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def open_stream(folder: Path, vocab: int) -> Stream:
    """Open one side of a store.

    Raises:
        OSError, ValueError, KeyError: it is not there, or not what a store is made of.
    """
    facts = json.loads((folder / "zarr.json").read_bytes())["attributes"]
    with open(folder / "offsets" / "c" / "0", "rb") as file:
        offsets = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype="<i8")
    if offsets[0] != 0 or offsets[-1] != facts["tokens"] or len(offsets) != facts["documents"] + 1:
        raise ValueError(
            f"{folder.name}/offsets must lead from 0 to {facts['tokens']} in {facts['documents']} documents"
        )
    return Stream(
        path=folder,
        size=facts["tokens"],
        documents=facts["documents"],
        text_bytes=facts["text_bytes"],
        vocab=vocab,
        offsets=offsets,
        _open=functools.lru_cache(_OPEN_FILES)(lambda chunk: _File(folder / "ids" / "c" / str(chunk))),
    )
