"""What holds for every checkpoint: bits come back, no damage passes, no moment of death loses a committed state.

`Machine` (tests/faults.py) stands between the store and the disk.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from lib.config import Model, Recipe
from lib.errors import CheckpointError
from lib.store import load, save, shards
from lib.store.leaves import STORED, check_names, nodes
from tests.checkpoints import assert_same, bits, td, tree
from tests.ranks import save_by_ranks


@pytest.fixture(autouse=True)
def _no_power_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing takes most of the time of small saves; whether it is done is what `Machine` watches."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# Random states --------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any bits, dtype and small shape; sometimes a view that is not contiguous."""
    kind = STORED[draw(st.sampled_from(sorted(STORED)))][0]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape)) * kind.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    values = (raw % 2 == 1) if kind is torch.bool else raw.view(kind)
    values = values.reshape(shape)
    return draw(st.sampled_from([values, values.movedim(0, -1), values[::2]])) if shape else values


def fits(names: dict[str, Any]) -> bool:
    try:
        check_names("", names)
    except CheckpointError:
        return False
    return True


names = st.text(min_size=1, max_size=5) | st.sampled_from(["c", "0", "w", "a.b", "zarr"])
trees = st.recursive(
    tensors(),
    lambda inner: (
        st.dictionaries(names.filter(lambda name: name != "params"), inner, max_size=4)
        .filter(fits)
        .map(lambda leaves: TensorDict(leaves, batch_size=[]))
    ),
    max_leaves=6,
)
recipes = st.sampled_from([None, Recipe(), Recipe(model=Model(width=64, dropout=0.1))])


@st.composite
def states(draw: st.DrawFn) -> TensorDict:
    state = TensorDict({"tree": draw(trees)}, batch_size=[])
    if recipe := draw(recipes):
        state.set("recipe", NonTensorData(recipe))
    if draw(st.booleans()):
        state["step"] = torch.tensor(draw(st.integers(0, 2**62)))
    return state


@given(states())
def test_load_gives_back_the_bits_that_were_saved(state: TensorDict) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = save(Path(root) / "a", state)
        back = load(path)
        assert_same(state, back)
        group = zarr.open_group(path, mode="r")
        for name, leaf in nodes(back).items():
            if isinstance(leaf, torch.Tensor):
                assert leaf.is_contiguous()
                assert np.asarray(group[name][...]).tobytes() == bits(leaf)  # type: ignore[index]


@given(states())
def test_saving_what_was_loaded_writes_the_same_bytes(state: TensorDict) -> None:
    with tempfile.TemporaryDirectory() as root:
        first = save(Path(root) / "a", state)
        second = save(Path(root) / "b", load(first))
        assert tree(first) == tree(second)


@given(states())
def test_saving_changes_neither_the_state_nor_the_generator(state: TensorDict) -> None:
    before = {path: bits(leaf) for path, leaf in nodes(state).items() if isinstance(leaf, torch.Tensor)}
    generator = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as root:
        load(save(Path(root) / "a", state))
    assert before == {path: bits(leaf) for path, leaf in nodes(state).items() if isinstance(leaf, torch.Tensor)}
    assert torch.equal(generator, torch.get_rng_state())


@st.composite
def cut_states(draw: st.DrawFn) -> tuple[TensorDict, tuple[int, ...], dict[str, list[int | None]]]:
    """A state, a mesh, and how some of its leaves are cut over it."""
    state = draw(states())
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dims: dict[str, list[int | None]] = {}
    for path, leaf in nodes(state).items():
        if isinstance(leaf, torch.Tensor) and draw(st.booleans()):
            choice = st.none() | st.integers(0, leaf.ndim - 1) if leaf.ndim else st.none()
            dims[path] = [draw(choice) for _ in mesh]
    return state, mesh, dims


@given(cut_states())
def test_what_several_ranks_save_is_one_state(
    cut: tuple[TensorDict, tuple[int, ...], dict[str, list[int | None]]],
) -> None:
    state, mesh, dims = cut
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALLEST_CHUNK_BYTES", 1)  # so that parts of a few bytes are files of their own
        save_by_ranks(Path(root) / "a", state, mesh, dims)
        assert_same(load(Path(root) / "a"), state)
        before = tree(Path(root))
        save_by_ranks(Path(root) / "a", state, mesh, dims)  # the same again
        assert tree(Path(root)) == before


# Damage ---------------------------------------------------------------------------------------------------------------


def small() -> TensorDict:
    return td(
        step=torch.tensor(3),
        params=td(w=torch.tensor([1.5, -0.0]), b=torch.tensor([1.0]).bfloat16()),
        none=torch.zeros(0, 2),
    )


def must_name(path: Path, name: str) -> None:
    """Loading fails, and the error names the leaf the file belongs to, or the file."""
    owner = name.rpartition("/c")[0] or name.rpartition("/")[0]
    want = f"state.{owner.replace('/', '.')}" if owner else name
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert want in str(caught.value), (name, str(caught.value))
    assert str(path) in str(caught.value)


def test_no_flipped_byte_passes(tmp_path: Path) -> None:
    path = save(tmp_path / "a", small())
    for name, data in tree(path).items():
        for at in range(len(data or b"")):
            # Every bit of the values, one bit of every byte of the metadata.
            for bit in range(8) if name.partition("/c")[1] else [at % 8]:
                spoilt = bytearray(data or b"")
                spoilt[at] ^= 1 << bit
                (path / name).write_bytes(spoilt)
                must_name(path, name)
        if data is not None:
            (path / name).write_bytes(data)
    assert_same(load(path), small())


def test_no_shortened_lengthened_emptied_missing_or_extra_file_passes(tmp_path: Path) -> None:
    path = save(tmp_path / "a", small())
    for name, data in tree(path).items():
        if data is None:
            continue
        for spoilt in (data[:-1], data[1:], data + b"\0", b"", data + data, bytes(len(data))):
            (path / name).write_bytes(spoilt)
            must_name(path, name)
        (path / name).unlink()
        must_name(path, name)
        (path / name).mkdir()
        must_name(path, name)
        (path / name).rmdir()
        (path / name).write_bytes(data)
        extra = path / f"{name}.bak"
        extra.write_bytes(data)
        must_name(path, f"{name}.bak")
        extra.unlink()
    assert_same(load(path), small())


def test_of_a_large_checkpoint_no_sampled_damage_passes(tmp_path: Path) -> None:
    state = td(params=td(w=torch.randn(1500, 2049), v=torch.randn(70)), step=torch.tensor(5))
    path = save(tmp_path / "a", state)
    draw = np.random.default_rng(0)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    weights = np.array([file.stat().st_size for file in files], float)
    for turn in range(60):
        # Half of the time anywhere in the bytes, half in any of the files.
        file = files[draw.choice(len(files), p=weights / weights.sum() if turn % 2 else None)]
        data = file.read_bytes()
        at = int(draw.integers(len(data)))
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(draw.integers(8))
        file.write_bytes([bytes(flipped), data[:at], data[:at] + data[at + 1 :]][turn % 3])
        must_name(path, str(file.relative_to(path)).replace("/c.", "/c"))
        file.write_bytes(data)
    assert_same(load(path), state)


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    one, two = save(tmp_path / "a", small()), save(tmp_path / "b", td(**{**small(), "params": td(w=torch.ones(2))}))
    for name, data in tree(one).items():
        other = tree(two).get(name)
        if data is not None and other is not None and other != data:
            (one / name).write_bytes(other)
            with pytest.raises(CheckpointError):
                load(one)
            (one / name).write_bytes(data)
