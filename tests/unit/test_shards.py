"""Chunks and shards: the cut is a pure function, and plain Zarr reads what is put together by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from lib.store import shards
from lib.store.shards import Layout, array_json, chunks, count, file_box, file_size, inside, keys, pieces, plan, tail

MB = 1 << 20


def file_bytes(array: np.ndarray[Any, Any], layout: Layout, index: tuple[int, ...]) -> bytes:
    return b"".join(bytes(memoryview(buffer)) for piece in pieces(array, layout, index) for buffer in piece)


def put(root: Path, array: np.ndarray[Any, Any], layout: Layout) -> None:
    root.mkdir()
    (root / "zarr.json").write_bytes(array_json(layout, array.dtype, {}))
    for index, key in keys(layout):
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(file_bytes(array, layout, index))


@pytest.mark.parametrize(
    ("shape", "itemsize", "chunk", "shard"),
    [
        ((), 4, (), None),
        ((0, 3), 4, (1, 3), None),
        ((7,), 2, (7,), None),
        ((1024, 1024), 4, (1024, 1024), None),  # exactly a chunk
        ((1024, 1025), 4, (512, 1025), (1024, 1025)),
        ((50257, 768), 4, (1359, 768), (25821, 768)),
        ((32, 4096, 4096), 4, (1, 256, 4096), (1, 4096, 4096)),  # a row is larger than a chunk: cut within it
        ((3, 2 * MB), 4, (1, 2 * MB), (3, 2 * MB)),  # a row of 8 MB is a chunk
        ((10**9,), 1, (4184101,), (125523030,)),
    ],
)
def test_the_cut_of_a_leaf(shape: tuple[int, ...], itemsize: int, chunk: tuple[int, ...], shard: Any) -> None:
    assert plan(shape, itemsize) == Layout(shape, chunk, shard)


@given(st.lists(st.integers(1, 5000), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_chunks_are_1_to_16_mb_and_shards_at_most_128(shape: tuple[int, ...], itemsize: int) -> None:
    layout = plan(shape, itemsize)
    chunk = math.prod(layout.chunk) * itemsize
    if math.prod(shape) * itemsize <= 4 * MB:
        assert layout == Layout(shape, shape, None)
        return
    assert layout.shard is not None
    assert MB <= chunk <= 16 * MB
    assert math.prod(layout.shard) * itemsize <= 128 * MB
    assert all(outer % inner == 0 for outer, inner in zip(layout.shard, layout.chunk, strict=True))
    # Contiguous in memory: one row at a time, until an axis that is cut, then whole rows.
    cut = next(i for i, n in enumerate(layout.chunk) if n > 1 or i == len(shape) - 1)
    assert layout.chunk[cut + 1 :] == shape[cut + 1 :]


cuts = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4), st.integers(1, 3)), max_size=3).flatmap(
    lambda axes: st.booleans().map(
        lambda sharded: Layout(
            tuple(n for n, _, _ in axes),
            tuple(c for _, c, _ in axes),
            tuple(c * k for _, c, k in axes) if sharded else None,
        )
    )
)


@given(cuts, st.sampled_from(["bool", "u1", "i2", "f2", "f4", "f8", "i8"]), st.integers(0, 2**32 - 1))
def test_any_cut_is_read_back_by_plain_zarr_and_by_arithmetic(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, dtype: str, seed: int
) -> None:
    raw = np.random.default_rng(seed).bytes(math.prod(layout.shape) * np.dtype(dtype).itemsize)
    array = np.frombuffer(raw, "u1" if dtype == "bool" else dtype).reshape(layout.shape)
    array = array % 2 == 1 if dtype == "bool" else array
    root = tmp_path_factory.mktemp("cut") / "a"
    put(root, array, layout)
    assert np.asarray(zarr.open_array(root, mode="r")[...]).tobytes() == array.tobytes()

    assert count(layout) == len(list(keys(layout)))
    back = np.empty_like(array, order="C")
    for index, key in keys(layout):
        assert (root / key).stat().st_size == file_size(layout, array.itemsize, index)
        data, end = (root / key).read_bytes(), tail(layout, index, array.itemsize)
        stride = math.prod(layout.chunk) * array.itemsize + 4
        for number, box in enumerate(chunks(layout, index)):
            raw = np.frombuffer(data, array.dtype, math.prod(layout.chunk), number * stride).reshape(layout.chunk)
            block = back[inside(box, tuple((0, n) for n in layout.shape))]
            block[...] = raw[tuple(slice(n) for n in block.shape)]
            held = file_box(layout, index)
            part = back[inside(held, tuple((0, n) for n in layout.shape))]
            assert np.shares_memory(part[inside(box, held)], block) or not block.size
        assert data[len(data) - len(end) :] == end
    assert back.tobytes() == array.tobytes()


def test_a_shard_is_chunks_then_index_each_with_its_crc() -> None:
    array = np.arange(10, dtype="<f4")
    data = file_bytes(array, Layout((10,), (4,), (8,)), (1,))
    chunk = array[8:].tobytes() + bytes(8)  # padded
    index = np.array([0, 20, 2**64 - 1, 2**64 - 1], "<u8").tobytes()  # the second chunk is outside of the array

    def crc(raw: bytes) -> bytes:
        return int(google_crc32c.value(raw)).to_bytes(4, "little")

    assert data == chunk + crc(chunk) + index + crc(index)


def test_chunks_that_are_all_fill_value_are_stored() -> None:
    layout = Layout((4,), (2,), None)
    for array in (np.zeros(4, "f4"), -np.zeros(4, "f4")):
        assert [len(file_bytes(array, layout, index)) for index, _ in keys(layout)] == [12, 12]


def test_whole_chunks_are_views_not_copies() -> None:
    array = np.zeros((8, 4), "f4")
    piece, _ = next(iter(pieces(array, Layout((8, 4), (2, 4), (8, 4)), (0, 0))))
    assert isinstance(piece, np.ndarray)
    assert np.shares_memory(piece, array)


def test_counting_and_sizing_list_nothing() -> None:
    huge = Layout((2**40,), (1,), (2**20,))
    assert count(huge) == 2**20
    assert file_size(huge, 8, (0,)) == 2**20 * (12 + 16) + 4
    assert count(plan((0, 2**62), 1)) == 0


def test_plain_zarr_sees_a_flipped_bit(tmp_path: Path) -> None:
    array, layout = np.arange(8, dtype="f4"), Layout((8,), (4,), (8,))
    put(tmp_path / "a", array, layout)
    for at in range(file_size(layout, 4, (0,))):
        data = bytearray(file_bytes(array, layout, (0,)))
        data[at] ^= 4
        (tmp_path / "a/c.0").write_bytes(data)
        with pytest.raises(ValueError, match="checksum"):
            zarr.open_array(tmp_path / "a", mode="r")[...]


def test_all_public_names_are_functions_of_values() -> None:
    assert not {"os", "pathlib", "io"} & set(vars(shards))
