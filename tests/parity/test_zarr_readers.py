"""What is put together by hand is read by others, bit for bit: zarr-python, its zarrs pipeline, tensorstore."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from numpy.typing import NDArray

from lib.store import save
from lib.store.leaves import STORED, array_of
from lib.store.shards import Layout, array_json, keys, pieces
from tests.checkpoints import td

pytestmark = pytest.mark.parity

MB = 1 << 20
LAYOUTS = [
    Layout((), (), None),
    Layout((7,), (7,), None),
    Layout((7,), (3,), None),  # a ragged last chunk
    Layout((10,), (4,), (8,)),  # a chunk that lies wholly outside of the array
    Layout((5, 6), (2, 6), (4, 6)),
    Layout((4, 5, 6), (1, 5, 6), (2, 5, 6)),
    Layout((0, 3), (1, 3), None),
    Layout((3, 9), (3, 4), None),  # cut along the second dim, as for columns on two ranks
]


@pytest.fixture(params=["zarr", "zarrs", "tensorstore"])
def read(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A function that reads an array, or a part of it."""
    if request.param == "tensorstore":
        tensorstore = pytest.importorskip("tensorstore")

        def by_tensorstore(path: Path, at: Any = ...) -> NDArray[Any]:
            kind = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
            return np.asarray(tensorstore.open(kind, read=True).result()[at].read().result())

        yield by_tensorstore
        return
    pipeline = {}
    if request.param == "zarrs":
        pytest.importorskip("zarrs")
        pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
    with zarr.config.set(pipeline):
        yield lambda path, at=...: np.asarray(zarr.open_array(path, mode="r")[at])


def written(root: Path, array: NDArray[Any], layout: Layout) -> Path:
    root.mkdir()
    (root / "zarr.json").write_bytes(array_json(layout, array.dtype, {}))
    for index, key in keys(layout):
        parts = [bytes(memoryview(buffer)) for piece in pieces(array, layout, index) for buffer in piece]
        (root / key).write_bytes(b"".join(parts))
    return root


def random_bits(layout: Layout, dtype: np.dtype[Any]) -> NDArray[Any]:
    raw = np.random.default_rng(0).bytes(math.prod(layout.shape) * dtype.itemsize)
    if dtype.kind == "b":
        return (np.frombuffer(raw, "u1") % 2 == 1).reshape(layout.shape)
    return np.frombuffer(raw, dtype).reshape(layout.shape)


@pytest.mark.parametrize("dtype", sorted({str(stored) for _, stored in STORED.values()}))
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.shape}{layout.chunk}{layout.shard}")
def test_every_cut_of_every_dtype_is_read(read: Any, tmp_path: Path, layout: Layout, dtype: str) -> None:
    array = random_bits(layout, np.dtype(dtype))
    assert read(written(tmp_path / "a", array, layout)).tobytes() == array.tobytes()


def test_a_whole_checkpoint_is_read(read: Any, tmp_path: Path) -> None:
    state = td(
        params=td(large=torch.randn(1500, 2049), small=torch.randn(3), half=torch.randn(5, 2).bfloat16()),
        zero=-torch.zeros(4),
        step=torch.tensor(2**40),
    )
    path = save(tmp_path / "a", state)
    for name in ("params/large", "params/small", "params/half", "zero", "step"):
        want = array_of(state[tuple(name.split("/"))])
        assert read(path / name).tobytes() == want.tobytes()
    part = read(path / "params/large", (slice(700, 1200), slice(5, 100)))
    assert part.tobytes() == array_of(state["params", "large"])[700:1200, 5:100].tobytes()


@pytest.mark.parametrize("shard", [None, (8,)], ids=["chunk", "shard"])
def test_a_flipped_bit_is_seen(read: Any, tmp_path: Path, shard: Any, request: pytest.FixtureRequest) -> None:
    array, layout = np.arange(8, dtype="f4"), Layout((8,), (8,) if shard is None else (4,), shard)
    path = written(tmp_path / "a", array, layout)
    file = path / "c.0"
    data = file.read_bytes()
    for at in range(len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << (at % 8)
        file.write_bytes(spoilt)
        with pytest.raises(Exception, match=r"(?i)checksum|crc|corrupt|digest|length"):
            read(path)
