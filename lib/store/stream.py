"""One side of a token store, read where it lies: opening it reads the index, a row costs one system call.

Ids are read by position (`pread`) rather than mapped: as quick, a file that has gone bad is an error instead of the
end of the process, and memory does not fill with the pages of a corpus. All positions are int64. A stream that is sent to
another process is opened there anew.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lib.errors import DataError
from lib.store.making import ids_dtype

__all__ = ["CHUNK_IDS", "Stream", "open_stream"]

CHUNK_IDS = 1 << 24  # 32 MiB: few files, and still cheap to copy, or to read whole with plain Zarr

_OPEN_FILES = 64
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Stream:
    """Documents laid end to end.

    Attributes:
        path: folder of this side.
        size: how many ids.
        documents: how many documents.
        vocab: ids are in [0, vocab).
        eos: the id that closes a document; -1 = there is none.
        shared: documents begin with no mark of their own, so the end mark before one is what its first id is predicted
            from.
        marks: ids of a document that are its marks, not its text.
        offsets: where each document begins, and last the size.
        sizes: uint16 [vocab], bytes of text that each id stands for.
        masked: whether some ids are not trained on.
        files: names of the corpus' files, by number, for people; a store does not know them, since a file may be renamed.
    """

    path: Path
    size: int
    documents: int
    vocab: int
    eos: int
    shared: bool
    marks: int
    masked: bool
    offsets: NDArray[np.int64] = field(repr=False, compare=False)
    sizes: NDArray[np.uint16] = field(repr=False, compare=False)
    _open: Callable[[str, int], _File] = field(repr=False, compare=False)
    files: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def ids(self, start: int, stop: int) -> NDArray[np.integer]:
        """Read the ids at [start, stop).

        Raises:
            ValueError: the range leaves the stream.
            DataError: the store's files are gone or cut short.
        """
        return self._read("ids", ids_dtype(self.vocab), start, stop)

    def mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Read whether the ids at [start, stop) are trained on; none = all of them are."""
        return self._read("mask", np.dtype(np.bool_), start, stop) if self.masked else None

    def document(self, position: int) -> int:
        """Give the number of the document that the id at this position belongs to."""
        if not 0 <= position < self.size:
            raise ValueError(f"position={position} must be in [0, {self.size})")
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def origin(self, document: int) -> tuple[str, int, str]:
        """Say where a document comes from: its file's name, the line or row there (0 = the whole file), its own name."""
        number, line = _index(self.path / "origin", "<i8", "0/0")[2 * document : 2 * document + 2].tolist()
        own = b""
        if (self.path / "names").is_dir():
            ends = _index(self.path / "name_ends", "<i8")
            own = _index(self.path / "names", "u1")[ends[document - 1] if document else 0 : ends[document]].tobytes()
        return self.files[number] if self.files else f"file {number}", line, own.decode("utf-8", "replace")

    def among(self, other: Stream) -> int:
        """Count the documents that are also in another stream, empty ones aside; memory grows with this one alone."""
        own = _index(self.path / "draws", "<u8")[np.diff(self.offsets) > self.marks]
        words, found = np.unique(own), np.zeros(0, np.uint64)
        theirs = _index(other.path / "draws", "<u8")
        for at in range(0, len(theirs), _AT_ONCE):
            found = np.union1d(found, np.intersect1d(words, theirs[at : at + _AT_ONCE]))
        return int(np.isin(own, found).sum())

    def _read(self, array: str, dtype: np.dtype[Any], start: int, stop: int) -> NDArray[Any]:
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"{array}[{start}:{stop}] must lie in [0, {self.size})")
        out = np.empty(stop - start, dtype=dtype)
        view, at, chunk_bytes = out.view(np.uint8).data, start * dtype.itemsize, CHUNK_IDS * dtype.itemsize
        while view:
            chunk, inside = divmod(at, chunk_bytes)
            part = view[: chunk_bytes - inside]
            try:
                got = os.preadv(self._open(array, chunk).fd, [part], inside)
            except OSError as error:
                raise self._damaged(array, chunk, str(error.strerror)) from None
            if not got:
                raise self._damaged(array, chunk, "cut short")
            view, at = view[got:], at + got
        return out

    def _damaged(self, array: str, chunk: int, why: str) -> DataError:
        return DataError(f"{self.path}/{array}/c/{chunk}: {why}; run again to have the token store built anew")

    def __reduce__(self) -> tuple[Callable[[Path], Stream], tuple[Path]]:
        return open_stream, (self.path,)


class _File:
    """A descriptor that is closed when nothing holds it any more; a thread may still read what another let go of."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


def open_stream(folder: Path) -> Stream:
    """Open one side of a store.

    Raises:
        OSError, ValueError, KeyError: it is not there, or not what a store is made of.
    """
    store = json.loads((folder.parent / "zarr.json").read_bytes())["attributes"]
    facts = json.loads((folder / "zarr.json").read_bytes())["attributes"]
    offsets = _index(folder / "offsets", "<i8")
    if len(offsets) != facts["documents"] + 1 or offsets[0] != 0 or offsets[-1] != facts["tokens"]:
        raise ValueError(
            f"{folder.name}/offsets must lead from 0 to {facts['tokens']} in {facts['documents']} documents"
        )
    tokenizer = store["tokenizer"]
    sizes = np.fromfile(folder.parent / "sizes" / "c" / "0", dtype="<u2")
    if len(sizes) != tokenizer["vocab"]:
        raise ValueError(f"sizes has {len(sizes)} ids, must have {tokenizer['vocab']}")
    return Stream(
        path=folder,
        size=facts["tokens"],
        documents=facts["documents"],
        vocab=tokenizer["vocab"],
        eos=tokenizer["eos"],
        shared=store["add_eos"] and not store["add_bos"],
        marks=store["add_eos"] + store["add_bos"],
        masked=(folder / "mask").is_dir(),
        offsets=offsets,
        sizes=sizes,
        _open=functools.lru_cache(_OPEN_FILES)(lambda array, chunk: _File(folder / array / "c" / str(chunk))),
    )


def _index(folder: Path, dtype: str, chunk: str = "0") -> NDArray[Any]:
    """Map an array of the index; nothing of it is read yet."""
    path = folder / "c" / chunk
    if not path.exists() or not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)
