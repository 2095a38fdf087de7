"""Which rank holds which part of an array, and who writes which file: arithmetic, the same on every rank.

An array that is sharded is cut by a grid: along each dim at the places where one rank's part ends and the next one's
begins. Each cell of the grid is held by one rank, or by several (replicas). A file belongs to exactly one writer. Where
the files' edges do not fall on the grid's (uneven parts of uneven parts; small parts, which share a file), the writer is
sent what it lacks.

Nothing here communicates, and nothing is torch's own private arithmetic: `Shard` cuts like `torch.chunk`, into parts of
ceil(n / ranks), the last ones shorter or empty.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lib.store.shards import Box, Layout, file_box, keys

__all__ = ["Grid", "Part", "Share", "box_at", "deal", "grid_of", "overlap", "size", "whole"]

Index = tuple[int, ...]


class Grid(NamedTuple):
    """Who holds an array of some shape.

    Attributes:
        cuts: along each dim, where cells begin, and the end of the dim.
        holders: ranks that hold a cell, by its place in the grid; every cell that is not empty is there.
        cell: size of the largest cell along each dim.
        ranks: how many ranks the mesh has.
    """

    cuts: tuple[tuple[int, ...], ...]
    holders: Mapping[Index, tuple[int, ...]]
    cell: Index
    ranks: int


class Part(NamedTuple):
    """A part of a file and the rank that it comes from."""

    box: Box
    holder: int


class Share(NamedTuple):
    """A file of an array: its place among them, who writes it, what it is put together from."""

    at: Index
    key: str
    writer: int
    parts: tuple[Part, ...]


def whole(shape: Index) -> Box:
    """The box of all of an array."""
    return tuple((0, n) for n in shape)


def size(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def overlap(one: Box, other: Box) -> Box | None:
    """The box that two have in common; None when there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def box_at(shape: Index, mesh: Index, dims: Sequence[int | None], coordinate: Index) -> Box:
    """The part of an array that one place of a mesh holds.

    Args:
        shape: of the array.
        mesh: ranks along each mesh axis.
        dims: for each mesh axis, the dim of the array that it cuts; None = it holds copies.
        coordinate: the place.

    >>> box_at((5, 2), (2,), [0], (1,))
    ((3, 5), (0, 2))
    """
    box = list(whole(shape))
    for ranks, dim, at in zip(mesh, dims, coordinate, strict=True):
        if dim is not None:
            start, stop = box[dim]
            part = -(-(stop - start) // ranks)
            box[dim] = (min(start + at * part, stop), min(start + (at + 1) * part, stop))
    return tuple(box)


def grid_of(shape: Index, mesh: Index, dims: Sequence[int | None]) -> Grid:
    """The grid of an array over a mesh; ranks are numbered in the mesh's C order."""
    boxes = [box_at(shape, mesh, dims, at) for at in itertools.product(*map(range, mesh))]
    cuts = tuple(tuple(sorted({edge for box in boxes for edge in (*box[dim], 0, n)})) for dim, n in enumerate(shape))
    holders: dict[Index, list[int]] = {}
    for rank, box in enumerate(boxes):
        if size(box):
            place = tuple(cut.index(start) for cut, (start, _) in zip(cuts, box, strict=True))
            holders.setdefault(place, []).append(rank)
    return Grid(cuts, {place: tuple(ranks) for place, ranks in holders.items()}, _cell(cuts), len(boxes))


def deal(arrays: Sequence[tuple[Layout, int, Grid | None]], ranks: int) -> list[list[Share]]:
    """Deal the files of all arrays to writers: to a rank that holds them whole if there is one, the least busy first.

    Args:
        arrays: for each one its cut into files, bytes of an element, and who holds it; None = every rank.
        ranks: how many there are.

    Returns:
        For each array its files, in order.
    """
    busy = [0] * ranks
    everyone = tuple(range(ranks))
    dealt: list[list[Share]] = []
    for layout, itemsize, grid in arrays:
        shares: list[Share] = []
        for index, key in keys(layout):
            box = file_box(layout, index)
            cells = [(box, everyone)] if grid is None else list(_cells(grid, box))
            most = max(size(part) for part, _ in cells)
            able = next(holders for part, holders in cells if size(part) == most)
            writer = min(able, key=lambda rank: busy[rank])
            busy[writer] += size(box) * itemsize
            parts = tuple(Part(part, writer if writer in holders else holders[0]) for part, holders in cells)
            shares.append(Share(index, key, writer, parts))
        dealt.append(shares)
    return dealt


def _cells(grid: Grid, box: Box) -> list[tuple[Box, tuple[int, ...]]]:
    """The parts of a box by who holds them."""
    spans = [
        range(bisect.bisect_right(cut, start) - 1, bisect.bisect_left(cut, stop))
        for cut, (start, stop) in zip(grid.cuts, box, strict=True)
    ]
    found = []
    for place in itertools.product(*spans):
        cell = tuple((cut[i], cut[i + 1]) for cut, i in zip(grid.cuts, place, strict=True))
        common = overlap(cell, box)
        if common is not None:
            found.append((common, grid.holders[place]))
    return found


def _cell(cuts: tuple[tuple[int, ...], ...]) -> Index:
    return tuple(max((stop - start for start, stop in itertools.pairwise(cut)), default=0) for cut in cuts)
