"""Rows of whole documents, planned once: packed several to a row, or one to a row.

A document longer than a row is cut into pieces of a row's length; a piece is some targets with the ids one before them
as inputs, so every id that can be a target is one exactly once, and a cut loses none. What is left of documents is
packed by best fit, longest first, among those of the same window, so that planning takes little memory and the number
of rows does not depend on any order of visiting them.

Source: best-fit decreasing for language-model rows, Ding et al. 2024, arXiv:2404.10830. Windows are ours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["plan_rows"]

_Ints = NDArray[np.int64]

# Documents of about so many rows are packed together.
WINDOW = 64

# Pieces of one document that are given at a time.
_BLOCK = 1 << 16


def plan_rows(offsets: _Ints, length: int, mode: str, *, shared: bool) -> Iterator[tuple[_Ints, _Ints]]:
    """Plan the rows of a stream; in parts, to be laid end to end.

    Args:
        offsets: where each document begins, and last the size.
        length: the most targets that a row holds.
        mode: `pack`, or `pad` for one piece a row.
        shared: whether the first id of a document is a target, predicted from an end mark.

    Yields:
        (pieces in each row [rows], pieces [pieces, 2] as (start, count)): rows in the order of the stream, and the
        pieces of a row as well.

    Raises:
        ValueError: the mode plans no rows, or the length is below 1.
    """
    if mode not in ("pack", "pad") or length < 1:
        raise ValueError(f"plan_rows: mode={mode!r}, length={length} must be pack or pad, and >= 1")
    at, last = 0, len(offsets) - 1
    while at < last:
        stop = int(np.searchsorted(offsets, offsets[at] + WINDOW * length, side="right")) - 1
        stop = min(max(stop, at + 1), last)
        start = np.asarray(offsets[at:stop], dtype=np.int64) + (not shared)
        count = np.asarray(offsets[at + 1 : stop + 1], dtype=np.int64) - start
        yield from _whole(start, count // length, length)
        rest = count % length
        some = np.flatnonzero(rest)
        left = np.stack((start + count - rest, rest), axis=1)[some]
        if len(left):
            yield _packed(left, length) if mode == "pack" else (np.ones(len(left), dtype=np.int64), left)
        at = stop


def _whole(start: _Ints, full: _Ints, length: int) -> Iterator[tuple[_Ints, _Ints]]:
    """Give the pieces that fill a row, each as a row."""
    ends = np.cumsum(full)
    for low in range(0, int(ends[-1]), _BLOCK):
        number = np.arange(low, min(low + _BLOCK, int(ends[-1])), dtype=np.int64)
        document = np.searchsorted(ends, number, side="right")
        nth = number - (ends - full)[document]
        begin = start[document] + nth * length
        yield np.ones_like(begin), np.stack((begin, np.full_like(begin, length)), axis=1)


def _packed(pieces: _Ints, length: int) -> tuple[_Ints, _Ints]:
    """Pack pieces into rows: each, longest first, into the fullest row that has room for it."""
    counts = pieces[:, 1].tolist()
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row), rising
    for piece in sorted(range(len(counts)), key=lambda n: (-counts[n], n)):
        fit = bisect_left(rooms, (counts[piece], 0))
        if fit < len(rooms):
            room, row = rooms.pop(fit)
            rows[row].append(piece)
        else:
            room, row = length, len(rows)
            rows.append([piece])
        if room > counts[piece]:
            insort(rooms, (room - counts[piece], row))
    order = sorted(sorted(row) for row in rows)
    return np.array([len(row) for row in order], dtype=np.int64), pieces[[piece for row in order for piece in row]]
