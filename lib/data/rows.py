"""The stream cut into rows, and the cursor that says which row comes next.

The stream of N ids is repeated for ever; epoch e is positions [eN, (e+1)N). Row j is positions jT .. jT + T: T inputs
and, one further, T targets. Rows touch, so no id is ever left out: the last row of an epoch runs on into the next
one. A row belongs to the epoch that its first input lies in, and within its epoch rows are visited in a keyed order.

    first(e) = ceil(eN / T)        count(e) = first(e + 1) - first(e)        row n of the run: epoch = nT // N

So the cursor is two integers, any batch is found in O(1), and moving on by k rows is the same as seeking k rows
further.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.shuffle import permute
from lib.errors import DataError

__all__ = ["Cursor", "advance", "count", "first", "ordinal", "require", "seek", "starts"]


class Cursor(NamedTuple):
    """Where the next row is.

    Attributes:
        epoch: complete passes over the stream, >= 0.
        row: rows of this epoch already visited; in normal form below `count(epoch)`.
    """

    epoch: int
    row: int


def require(size: int, length: int, name: str | None = None) -> None:
    """Refuse a stream that is shorter than one row and its targets.

    Args:
        size: ids in the stream.
        length: inputs in a row.
        name: of the source, where there are several.

    Raises:
        DataError: fewer than length + 1 ids.
    """
    if size < length + 1:
        where = "training text" if name is None else f"data.sources.{name}"
        raise DataError(
            f"{where}: have {size} ids, need batch.length+1={length + 1}; give more text or lower batch.length"
        )


def first(epoch: int, *, size: int, length: int) -> int:
    """Give the number of the first row that begins in this epoch, counted from the start of the run."""
    return -(-epoch * size // length)


def count(epoch: int, *, size: int, length: int) -> int:
    """Give how many rows begin in this epoch: at least one, and among epochs no more than one apart."""
    return first(epoch + 1, size=size, length=length) - first(epoch, size=size, length=length)


def seek(rows: int, *, size: int, length: int) -> Cursor:
    """Give the cursor after this many rows from the start of the run, in normal form.

    >>> seek(3, size=7, length=4)
    Cursor(epoch=1, row=1)
    """
    if rows < 0:
        raise ValueError(f"rows={rows} must be >= 0")
    if size < length:  # an epoch would have no row
        require(size, length)
    epoch = rows * length // size
    return Cursor(epoch, rows - first(epoch, size=size, length=length))


def ordinal(cursor: Cursor, *, size: int, length: int) -> int:
    """Give how many rows a run has visited when it stands at this cursor: the inverse of `seek`."""
    if cursor.epoch < 0 or cursor.row < 0:
        raise ValueError(f"cursor={tuple(cursor)} must not be negative")
    return first(cursor.epoch, size=size, length=length) + cursor.row


def advance(cursor: Cursor, rows: int, *, size: int, length: int) -> Cursor:
    """Move by this many rows, also backward, through any number of epochs."""
    return seek(ordinal(cursor, size=size, length=length) + rows, size=size, length=length)


def starts(cursor: Cursor, rows: int, *, size: int, length: int, seed: int | None) -> NDArray[np.int64]:
    """Give the stream positions, each in [0, size), at which the next rows begin, in the order of visiting.

    Args:
        cursor: the first of them.
        rows: how many, also more than an epoch holds.
        size: ids in the stream, >= length.
        length: inputs in a row.
        seed: which order of rows; none = that of the stream, in every epoch.

    Raises:
        DataError: the stream is shorter than one row.
    """
    at = advance(cursor, 0, size=size, length=length)
    parts = []
    while rows:
        some = min(rows, count(at.epoch, size=size, length=length) - at.row)
        order = np.arange(at.row, at.row + some, dtype=np.int64)
        if seed is not None:
            order = permute(order, count(at.epoch, size=size, length=length), seed=seed, epoch=at.epoch)
        # Ints of Python here, for epoch * size may pass 2^63 though no position within an epoch does.
        parts.append(order * length + (first(at.epoch, size=size, length=length) * length - at.epoch * size))
        at = advance(at, some, size=size, length=length)
        rows -= some
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
