"""Rows of a stream as arrays: what is read, where documents begin in it, which targets are to be learnt.

Documents are kept apart by what opens a segment. In a shared stream that is an input that is an end mark, since it is
what the next document's first id is predicted from; else it is the document's first id, which is no target. Where
documents begin is read from the stream's offsets, never from the ids.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.source import Planned, Stream
from lib.errors import DataError

__all__ = ["Rows", "empty", "placed", "planned", "streamed", "targets_in"]

_Ints = NDArray[np.int64]
_Bools = NDArray[np.bool_]

# Reading over a gap of so many ids is cheaper than a second read.
_GAP = 4096


class Rows(NamedTuple):
    """Rows, each array [rows, length].

    Attributes:
        inputs: ids, 0 where nothing is used.
        targets: ids, 0 where nothing is used.
        opens: this input opens a segment; what a row begins with always does.
        used: text stands here; the rest is padding.
        mask: this target is to be learnt.
        sizes: bytes of text that the target stands for.
    """

    inputs: _Ints
    targets: _Ints
    opens: _Bools
    used: _Bools
    mask: _Bools
    sizes: _Ints


def empty(rows: int, length: int) -> Rows:
    """Give rows of padding, to be written into."""
    ids, flags = np.zeros((3, rows, length), dtype=np.int64), np.zeros((3, rows, length), dtype=np.bool_)
    return Rows(ids[0], ids[1], flags[0], flags[1], flags[2], ids[2])


def streamed(stream: Stream, begin: _Ints, length: int, *, wrap: bool) -> Rows:
    """Read rows of consecutive ids.

    Args:
        stream: ids.
        begin: positions of the rows' first inputs.
        length: inputs in a row.
        wrap: past the end the stream begins again; if not, rows are padded there.
    """
    ids = np.zeros((len(begin), length + 1), dtype=np.int64)
    learnt = np.ones((len(begin), length + 1), dtype=np.bool_)
    valid = np.full(len(begin), length, dtype=np.int64)
    for row, start in enumerate(begin.tolist()):
        have = min(length + 1, stream.size - start)
        _read(stream, start, start + have, ids[row, :have], learnt[row, :have])
        if wrap and have <= length:
            _read(stream, 0, length + 1 - have, ids[row, have:], learnt[row, have:])
        elif have <= length:
            valid[row] = have - 1
    first = np.zeros((len(begin), length), dtype=np.bool_)  # this target is the first id of a document
    _mark(first, stream.offsets, begin, begin, np.minimum(begin + valid, stream.size))
    if wrap:
        over = np.maximum(begin + length - stream.size, 0)
        _mark(first, stream.offsets, begin - stream.size, np.zeros_like(begin), over)
    used = np.arange(length) < valid[:, None]
    opens, mask = first, learnt[:, 1:] & used
    if not stream.shared:
        opens = np.zeros_like(first)
        opens[:, 1:] = first[:, :-1]
        mask &= ~first
    short = np.flatnonzero(valid < length)
    opens[short, valid[short]] = True
    targets = np.ascontiguousarray(ids[:, 1:])
    return Rows(np.where(used, ids[:, :-1], 0), targets, opens, used, mask, stream.sizes[targets].astype(np.int64))


def targets_in(table: Planned, index: _Ints) -> _Ints:
    """Give how many targets these rows of a table hold; no id is read."""
    return _laid(table, index).full


def placed(table: Planned, index: _Ints, length: int) -> _Ints:
    """Give where in its stream each target of these rows stands [rows, length]; -1 = padding. No id is read."""
    laid = _laid(table, index)
    found = np.full((len(index), length), -1, dtype=np.int64)
    found.reshape(-1)[laid.into(length)] = laid.each(laid.start)
    return found


def planned(stream: Stream, table: Planned, index: _Ints, length: int) -> Rows:
    """Read rows of a table, each piece as a segment of its own and the rest of the row as padding.

    Args:
        stream: ids.
        table: its rows.
        index: which of them.
        length: inputs in a row, at least what any of them holds.

    Raises:
        DataError: a row holds more than `length`: the table is of another plan.
    """
    rows, laid = empty(len(index), length), _laid(table, index)
    if len(laid.full) and int(laid.full.max()) > length:
        at = int(laid.full.argmax())
        got = f"row {index[at]} of the row table: {laid.full[at]} targets"
        raise DataError(f"{got}, must be at most {length}; build it anew")
    pool, learnt, base = _pool(stream, laid.start, laid.targets)
    into, take = laid.into(length), laid.each(base)
    rows.inputs.reshape(-1)[into] = pool[take - 1]
    rows.targets.reshape(-1)[into] = pool[take]
    rows.used.reshape(-1)[into] = True
    rows.mask.reshape(-1)[into] = learnt[take]
    rows.sizes.reshape(-1)[into] = stream.sizes[pool[take]]
    if stream.shared:
        first = stream.offsets[np.searchsorted(stream.offsets, laid.start)] == laid.start
        rows.inputs[laid.row[first], laid.column[first]] = stream.eos
    rows.opens[laid.row, laid.column] = True
    short = np.flatnonzero(laid.full < length)
    rows.opens[short, laid.full[short]] = True
    return rows


class _Laid(NamedTuple):
    """The pieces of some rows: where each begins in the stream, how many targets it has, in which row and column it stands."""

    start: _Ints
    targets: _Ints
    row: _Ints
    column: _Ints
    full: _Ints  # targets of each row

    def each(self, begin: _Ints) -> _Ints:
        """Count on from where each piece begins, for each of its targets."""
        before = np.cumsum(self.targets) - self.targets
        return np.repeat(begin - before, self.targets) + np.arange(int(self.targets.sum()), dtype=np.int64)

    def into(self, length: int) -> _Ints:
        """Give the place of each target in rows of this length that are laid end to end."""
        return self.each(self.row * length + self.column)


def _laid(table: Planned, index: _Ints) -> _Laid:
    low, high = (np.asarray(table.rows[index + after], dtype=np.int64) for after in (0, 1))
    number = high - low
    row = np.repeat(np.arange(len(index), dtype=np.int64), number)
    nth = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(number) - number, number)
    pieces = np.asarray(table.pieces[low[row] + nth], dtype=np.int64).reshape(-1, 2)
    start, count = pieces[:, 0], pieces[:, 1]
    full = np.bincount(row, weights=count, minlength=len(index)).astype(np.int64)
    column = np.cumsum(count) - count - np.repeat(np.cumsum(full) - full, number)
    return _Laid(start, count, row, column, full)


def _pool(stream: Stream, start: _Ints, count: _Ints) -> tuple[_Ints, _Bools, _Ints]:
    """Read the ids of pieces and the one before each: ids, what of them is learnt, where each piece begins in them."""
    order = np.argsort(start, kind="stable")
    low, high = np.maximum(start[order] - 1, 0), (start + count)[order]  # both rise: pieces do not overlap
    fresh = np.ones(len(order), dtype=np.bool_)
    fresh[1:] = low[1:] > high[:-1] + _GAP
    begin = low[fresh]
    stop = high[np.append(np.flatnonzero(fresh)[1:] - 1, len(order) - 1)] if len(order) else begin
    offset = np.cumsum(stop - begin) - (stop - begin)
    ids = np.empty(int((stop - begin).sum()), dtype=np.int64)
    learnt = np.ones(len(ids), dtype=np.bool_)
    for at, a, b in zip(offset.tolist(), begin.tolist(), stop.tolist(), strict=True):
        _read(stream, a, b, ids[at : at + b - a], learnt[at : at + b - a])
    base = np.empty_like(start)
    stretch = np.cumsum(fresh) - 1
    base[order] = offset[stretch] + start[order] - begin[stretch]
    return ids, learnt, base


def _read(stream: Stream, start: int, stop: int, ids: _Ints, learnt: _Bools) -> None:
    """Read ids, and which of them are learnt, into these arrays."""
    ids[:] = stream.ids(start, stop)
    if len(ids) and int(ids.max()) >= stream.vocab:
        at = int((ids >= stream.vocab).argmax())
        where = f"token store: id {ids[at]} at {start + at}"
        raise DataError(f"{where} must be below {stream.vocab}; it is damaged, remove it to have it built again")
    mask = stream.mask(start, stop)
    if mask is not None:
        learnt[:] = mask


def _mark(first: _Bools, offsets: _Ints, begin: _Ints, low: _Ints, high: _Ints) -> None:
    """Mark the documents whose first id is one after a position in [low, high); column 0 stands at `begin`."""
    at, stop = np.searchsorted(offsets, low + 1), np.searchsorted(offsets, high + 1)
    counts = np.maximum(stop - at, 0)
    row = np.repeat(np.arange(len(begin)), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    first[row, offsets[at[row] + nth] - 1 - begin[row]] = True
