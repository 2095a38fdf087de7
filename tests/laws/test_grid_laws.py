"""Who holds what, who writes what: for any shape on any mesh every element has its place, and every file one writer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.store.grid import Grid, box_at, deal, grid_of, overlap, size, whole
from lib.store.shards import LARGEST_CHUNK_BYTES, SHARD_BYTES, Layout, file_box, keys, plan

Cut = tuple[tuple[int, ...], tuple[int, ...], list[int | None]]


@st.composite
def cuts(draw: st.DrawFn, largest: int = 9) -> Cut:
    """A shape, a mesh, and which dim each of its axes cuts."""
    shape = tuple(draw(st.lists(st.integers(0, largest), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    choice = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    return shape, mesh, [draw(choice) for _ in mesh]


def array(shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(math.prod(shape)).reshape(shape)[(*(slice(*edges) for edges in box), ...)]


@given(cuts())
def test_a_part_is_what_cutting_axis_by_axis_gives(cut: Cut) -> None:
    """As torch does it for DTensors: chunk by the first axis, each chunk by the next."""
    shape, mesh, dims = cut
    for at in itertools.product(*map(range, mesh)):
        local = torch.arange(math.prod(shape)).reshape(shape)
        for ranks, dim, place in zip(mesh, dims, at, strict=True):
            if dim is not None:
                parts = list(local.chunk(ranks, dim))
                parts += [local.narrow(dim, 0, 0)] * (ranks - len(parts))
                local = parts[place]
        box = box_at(shape, mesh, dims, at)
        assert size(box) == local.numel()
        if size(box):
            assert np.array_equal(array(shape, box), local.numpy())


@given(cuts())
def test_cells_are_all_of_the_array_and_no_two_share_an_element(cut: Cut) -> None:
    shape, mesh, dims = cut
    grid = grid_of(shape, mesh, dims)
    seen = np.zeros(shape, int)
    for place, holders in grid.holders.items():
        box = tuple((edges[i], edges[i + 1]) for edges, i in zip(grid.cuts, place, strict=True))
        seen[(*(slice(*edges) for edges in box), ...)] += 1
        assert holders == tuple(
            rank for rank, at in enumerate(itertools.product(*map(range, mesh))) if box_at(shape, mesh, dims, at) == box
        )
    assert (seen == 1).all()


def layouts(shape: tuple[int, ...], grid: Grid | None) -> Layout:
    """A cut into small files, so that arrays of a few elements have several."""
    cell = grid.cell if grid else shape
    part = tuple(max(1, -(-n // 2)) for n in cell)
    return Layout(shape, part, None)


@given(st.lists(st.tuples(cuts(), st.booleans(), st.sampled_from([1, 4, 8])), min_size=1, max_size=3))
def test_every_file_has_one_writer_and_its_parts_come_from_who_holds_them(leaves: list[tuple[Cut, bool, int]]) -> None:
    mesh = leaves[0][0][1]
    ranks = math.prod(mesh)
    arrays = []
    for (shape, _, dims), sharded, itemsize in leaves:
        fits = (dims * len(mesh))[: len(mesh)]
        grid = grid_of(shape, mesh, [dim if dim is not None and dim < len(shape) else None for dim in fits])
        arrays.append((layouts(shape, grid if sharded else None), itemsize, grid if sharded else None))
    dealt = deal(arrays, ranks)
    assert dealt == deal(arrays, ranks)
    for (layout, _, grid), shares in zip(arrays, dealt, strict=True):
        assert [(share.at, share.key) for share in shares] == list(keys(layout))
        seen = np.zeros(layout.shape, int)
        for share in shares:
            box = file_box(layout, share.at)
            assert 0 <= share.writer < ranks
            assert sum(size(part.box) for part in share.parts) == size(box)
            for part in share.parts:
                assert overlap(part.box, box) == (part.box if size(part.box) else None) or not part.box
                seen[(*(slice(*edges) for edges in part.box), ...)] += 1
                if grid is None:
                    assert part.holder == share.writer
                    continue
                cells = {
                    tuple((e[i], e[i + 1]) for e, i in zip(grid.cuts, place, strict=True)): holders
                    for place, holders in grid.holders.items()
                }
                inside = next(h for cell, h in cells.items() if overlap(cell, part.box) == part.box)
                assert part.holder in inside
                assert part.holder == share.writer or share.writer not in inside
        assert (seen == 1).all()


@given(st.integers(1, 8), st.integers(1, 200))
def test_what_all_hold_is_written_by_all(ranks: int, files: int) -> None:
    shares = deal([(Layout((files,), (1,), None), 4, None)], ranks)[0]
    written = [sum(share.writer == rank for share in shares) for rank in range(ranks)]
    assert max(written) - min(written) <= 1


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=3).map(tuple),
    st.sampled_from([1, 4, 8]),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=2),
)
def test_files_of_sharded_leaves_are_neither_tiny_nor_huge(
    shape: tuple[int, ...], itemsize: int, axes: list[tuple[int, int]]
) -> None:
    mesh, dims = tuple(n for n, _ in axes), [dim if dim < len(shape) else None for _, dim in axes]
    grid = grid_of(shape, mesh, dims)
    layout = plan(shape, itemsize, grid.cell)
    chunk, shard = math.prod(layout.chunk) * itemsize, math.prod(layout.shard or layout.chunk) * itemsize
    assert chunk <= LARGEST_CHUNK_BYTES
    assert shard <= SHARD_BYTES
    assert all(outer % inner == 0 for outer, inner in zip(layout.shard or layout.chunk, layout.chunk, strict=True))
    assert all(inner <= n for inner, n in zip(layout.chunk, shape, strict=True))
    # About as many files as there are megabytes or parts, whichever is less.
    parts = math.prod(max(1, len(edges) - 1) for edges in grid.cuts)
    assert len(list(keys(layout))) <= max(parts, 1) * max(1, math.prod(shape) * itemsize // (512 << 10) + 1)


def test_uneven_parts_of_uneven_parts() -> None:
    grid = grid_of((10,), (2, 2), [0, 0])
    assert grid.cuts == ((0, 3, 5, 8, 10),)
    assert grid.holders == {(0,): (0,), (1,): (1,), (2,): (2,), (3,): (3,)}
    assert grid.cell == (3,)
    shares = deal([(Layout((10,), (3,), None), 4, grid)], 4)[0]
    assert [share.writer for share in shares] == [0, 1, 2, 3]
    assert [[(part.box, part.holder) for part in share.parts] for share in shares] == [
        [(((0, 3),), 0)],
        [(((3, 5),), 1), (((5, 6),), 2)],
        [(((6, 8),), 2), (((8, 9),), 3)],
        [(((9, 10),), 3)],
    ]
    assert whole((2, 0)) == ((0, 2), (0, 0))
