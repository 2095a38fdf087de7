"""Token files (.npy, raw .bin) -> documents of ids: cut at end marks, which are not given.

What stands behind the last end mark is a document too; a file without any is one document, and one of nothing but end
marks holds that many empty documents. What the ids are is stated, never guessed: by the header of a .npy file, by a
side-car `NAME.bin.json` of a raw file, or by a setting, and whatever contradicts it is an error. An id outside of the
vocabulary is an error even where bad records are skipped, for then the file is not what it is taken for.

Files are read in blocks and indices are Python's, so neither memory nor numbers grow over anything. Only a document of
many millions of ids is given as a map of its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lib.errors import DataError
from lib.store.headers import Header, header_of
from lib.store.names import shown
from lib.store.record import Reading, Record
from lib.store.remote import binary, is_remote

__all__ = ["array_records"]

_BLOCK = 1 << 20  # ids read at once
_LONG = 1 << 24  # ids of a document that is not held


def array_records(
    path: str,
    form: str,
    reading: Reading,
    skipped: Counter[str],
    *,
    eos: int | None,
    vocab: int | None,
) -> Iterator[Record]:
    """Read the documents of a token file.

    Args:
        path: the file.
        form: "npy" or "bin".
        reading: its `dtype` is that of raw files.
        skipped: counts by cause, added to.
        eos: the end mark; none = the file is one document.
        vocab: ids must be below it; none = any id.

    Yields:
        The documents, numbered from 1, their ids in this machine's byte order.

    Raises:
        ValueError: `reading.dtype` is no integer dtype.
        DataError: the file cannot be read, is not what it is said to be, or holds an id outside of the vocabulary.
    """
    header = header_of(path, form, reading.dtype, vocab)
    skipped["empty file"] += not header.length
    # Only what lies on this machine, in its byte order, can be mapped.
    mapped = not is_remote(path) and header.dtype.isnative
    number, begin, held = 0, 0, list[NDArray[np.integer[Any]]]()
    for at, block in _blocks(path, header, vocab):
        after = 0
        for end in np.flatnonzero(block == eos).tolist() if eos is not None else ():
            number += 1
            yield Record(number, ids=_joined(path, header, begin, at + end, [*held, block[after:end]]))
            held, after, begin = [], end + 1, at + end + 1
        held.append(block[after:])
        if mapped and at + len(block) - begin > _LONG:
            held = []
    if begin < header.length:
        yield Record(number + 1, ids=_joined(path, header, begin, header.length, held))


def _joined(
    path: str, header: Header, begin: int, end: int, held: list[NDArray[np.integer[Any]]]
) -> NDArray[np.integer[Any]]:
    """Put a document together from its pieces; where they were not kept, map it."""
    if sum(map(len, held)) == end - begin:
        return held[0] if len(held) == 1 else np.concatenate(held)
    offset = header.start + begin * header.dtype.itemsize
    return np.memmap(path, header.dtype, "r", offset, (end - begin,))


def _blocks(path: str, header: Header, vocab: int | None) -> Iterator[tuple[int, NDArray[np.integer[Any]]]]:
    """Read the ids in order, checked, with the index of the first of each block."""
    with binary(path) as file:
        file.seek(header.start)
        for at in range(0, header.length, _BLOCK):
            size = min(_BLOCK, header.length - at) * header.dtype.itemsize
            data = file.read(size)
            if len(data) != size:
                raise DataError(f"{shown(path)}: became shorter while it was read; run again when nothing writes to it")
            block = np.frombuffer(data, header.dtype)
            if not header.stated and at == 0:
                _refuse_wider(path, block, vocab)
            block = block.astype(header.dtype.newbyteorder("="), copy=False)
            low, high = int(block.min()), int(block.max())
            if low < 0 or (vocab is not None and high >= vocab):
                raise _outside(path, at, block, vocab)
            yield at, block


def _outside(path: str, at: int, block: NDArray[np.integer[Any]], vocab: int | None) -> DataError:
    bad = block < 0 if vocab is None else (block < 0) | (block >= vocab)
    first = int(bad.argmax())
    want = "0 or more" if vocab is None else f"in [0, {vocab})"
    got = f"id {block[first]} at index {at + first}"
    return DataError(f"{shown(path)}: {got}, must be {want}; check the file's dtype and data.tokenizer")


def _refuse_wider(path: str, ids: NDArray[np.integer[Any]], vocab: int | None) -> None:
    """Refuse ids that look like halves of wider ones: each second of them is no more than a high half can be."""
    bits = 8 * ids.dtype.itemsize
    if len(ids) < 4 or bits > 32:
        return
    low = int(ids.dtype.byteorder == ">")
    most = ((vocab or 1 << bits) - 1) >> bits
    if (ids[1 - low :: 2] <= most).all() and (ids[low::2] > most).any():
        got, fix = (
            f"looks like {2 * bits}-bit ids",
            f"set data.dtype or write {shown(path)}.json, which says it for sure",
        )
        raise DataError(f"{shown(path)}: {got}, data.dtype={ids.dtype.str} must fit; {fix}")
