"""What holds for every checkpoint: bits come back, no damage passes, no moment of death loses a committed state.

`Machine` (tests/faults.py) stands between the store and the disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import NonTensorData, TensorDict

from lib.config import Model, Recipe
from lib.errors import CheckpointError
from lib.run.saver import Saver
from lib.store import load, save, shards
from lib.store.checkpoint import commit
from lib.store.folder import committed, latest, prune, step_name, sweep
from lib.store.leaves import STORED, check_names, nodes
from lib.store.place import place_of
from lib.store.retention import Policy, Saved, retain
from tests.checkpoints import assert_same, bits, flip, td, tree
from tests.faults import Crash, Machine
from tests.ranks import Dims, part_of, together


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


def save_by_ranks(path: Path, state: TensorDict, mesh: tuple[int, ...], dims: Dims) -> None:
    together(
        int(np.prod(mesh)),
        lambda ranks: commit(place_of(path), part_of(state, mesh, dims, ranks.rank), {}, ranks),
    )


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


# Death, refusal, interruption -----------------------------------------------------------------------------------------


def operations(action: Callable[[], Any]) -> int:
    """Count the operations of an action that write."""
    machine = Machine(10**9)
    with machine.running():
        action()
    return 10**9 - machine.left


def numbered(n: int) -> TensorDict:
    return td(step=torch.tensor(n), params=td(w=torch.full((3,), float(n))), none=td())


@pytest.mark.parametrize("losing", [False, True], ids=["all that was written lasts", "only what was synced lasts"])
@pytest.mark.parametrize("rest", [False, True], ids=["nothing there", "the rest of an unfinished save there"])
def test_a_save_that_dies_at_any_operation_costs_at_most_itself(tmp_path: Path, losing: bool, rest: bool) -> None:
    def prepare(root: Path) -> Callable[[], Any]:
        save(root / "a" / step_name(1), numbered(1))
        if rest:
            save(root / "a" / step_name(2), numbered(5))
            (root / "a" / step_name(2) / "COMMIT").unlink()
        return lambda: save(root / "a" / step_name(2), numbered(2))

    total = operations(prepare(tmp_path / "count"))
    assert total > 30
    seen = set()
    for n in range(1, total + 1):
        root = tmp_path / str(n)
        action = prepare(root)
        machine = Machine(n)
        with machine.running(), pytest.raises(Crash):
            action()
        if losing:
            machine.lose_what_was_not_synced()
        steps = committed(root / "a")
        assert steps in ([1], [1, 2])
        seen.add(len(steps))
        assert_same(load(root / "a"), numbered(steps[-1]))  # whole, and never a mix
        save(root / "a" / step_name(2), numbered(2))
        assert_same(load(root / "a"), numbered(2))
        assert sorted(os.listdir(root / "a")) == [step_name(1), step_name(2)]
        shutil.rmtree(root)
    assert seen == {1, 2}


def test_nothing_that_returned_waits_for_the_disk(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    save(tmp_path / "rest" / step_name(3), numbered(5))
    (tmp_path / "rest" / step_name(3) / "COMMIT").unlink()
    machine = Machine(10**9)

    def synced() -> bool:
        return not machine.unsynced_files | machine.unsynced_entries | machine.unsynced_renames

    with machine.running():
        for step in (1, 2):
            save(root / step_name(step), numbered(step))
            assert synced()
        save(tmp_path / "rest" / step_name(3), numbered(3))
        assert synced()
        prune(root, Policy(last=1))
        assert synced()
        save(root / step_name(3), numbered(3))
        flip(root / step_name(3) / "COMMIT")
        latest(root, older=True)
        assert synced()
    assert_same(load(root), numbered(2))


def test_the_first_save_that_dies_leaves_no_checkpoint_or_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    total = operations(lambda: save(tmp_path / "0" / "run" / "checkpoints" / "a", numbered(1)))
    for n in range(1, total + 1):
        (tmp_path / str(n)).mkdir()
        path = tmp_path / str(n) / "run" / "checkpoints" / step_name(1)
        machine = Machine(n)
        with machine.running(), pytest.raises(Crash):
            save(path, numbered(1))
        machine.lose_what_was_not_synced()
        assert committed(path.parent) in ([], [1])
        assert_same(load(save(path, numbered(1))), numbered(1))


@pytest.mark.parametrize("failure", [OSError, KeyboardInterrupt])
def test_a_save_that_fails_at_any_operation_leaves_the_disk_as_it_was(
    tmp_path: Path, failure: type[BaseException]
) -> None:
    save(tmp_path / "a" / step_name(1), numbered(1))
    before = tree(tmp_path)
    target = tmp_path / "new" / "checkpoints" / step_name(2)
    total = operations(lambda: save(target, numbered(2)))
    shutil.rmtree(tmp_path / "new")
    saved = 0
    for n in range(1, total + 1):
        machine = Machine(n, failure)
        with machine.running(), pytest.raises(CheckpointError if failure is OSError else KeyboardInterrupt) as caught:
            save(target, numbered(2))
        if failure is OSError:
            assert str(caught.value) == (
                f"{target}: not saved (No space left on device), older checkpoints are untouched; "
                f"free 1 MB or set another run.dir"
            )
        if committed(target.parent):  # interrupted when all was done: then all is there
            assert failure is KeyboardInterrupt
            assert_same(load(target), numbered(2))
            shutil.rmtree(tmp_path / "new")
            saved += 1
        assert tree(tmp_path) == before, n
    assert saved == (2 if failure is KeyboardInterrupt else 0)


def test_pruning_that_dies_at_any_operation_spares_the_newest(tmp_path: Path) -> None:
    def prepare(root: Path) -> Callable[[], Any]:
        for step in (1, 2, 3):
            save(root / step_name(step), numbered(step))
        return lambda: prune(root, Policy(last=1))

    for n in range(1, operations(prepare(tmp_path / "count")) + 1):
        root = tmp_path / str(n)
        action = prepare(root)
        machine = Machine(n)
        with machine.running(), pytest.raises(Crash):
            action()
        machine.lose_what_was_not_synced()
        assert committed(root) in ([1, 2, 3], [2, 3], [3])
        for step in committed(root):
            assert_same(load(root / step_name(step)), numbered(step))
        prune(root, Policy(last=1))
        sweep(root)
        assert os.listdir(root) == [step_name(3)]


def test_setting_aside_that_dies_at_any_operation_can_be_done_again(tmp_path: Path) -> None:
    def prepare(root: Path) -> Callable[[], Any]:
        for step in (1, 2, 3):
            save(root / step_name(step), numbered(step))
        for step in (2, 3):
            flip(root / step_name(step) / "COMMIT")
        return lambda: latest(root, older=True)

    for n in range(1, operations(prepare(tmp_path / "count")) + 1):
        root = tmp_path / str(n)
        action = prepare(root)
        with Machine(n).running(), pytest.raises(Crash):
            action()
        assert latest(root, older=True) == root / step_name(1)
        assert len(os.listdir(root)) == 3


# A run's life ---------------------------------------------------------------------------------------------------------


MESHES = st.sampled_from([(2,), (3,), (2, 2)])


class Life(RuleBasedStateMachine):
    """Any sequence of saves, by one or several, in the background or not, deaths, damage, pruning and resuming."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.root = Path(self.place.name) / "checkpoints"
        self.good: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.step = 0

    def teardown(self) -> None:
        self.place.cleanup()

    @initialize(step=st.sampled_from([0, 9997, 2**40]))
    def begin(self, step: int) -> None:
        self.step = step

    @rule(value=st.integers(0, 100), stride=st.integers(1, 3))
    def saves(self, value: int, stride: int) -> None:
        self.step += stride
        save(self.root / step_name(self.step), numbered(value))
        self.good[self.step] = value

    @rule(value=st.integers(0, 100), at=st.integers(1, 60), losing=st.booleans())
    def dies_while_saving(self, value: int, at: int, losing: bool) -> None:
        self.step += 1
        machine = Machine(at)
        with machine.running():
            try:
                save(self.root / step_name(self.step), numbered(value))
            except Crash:
                if losing:
                    machine.lose_what_was_not_synced()
        if self.step in committed(self.root):
            self.good[self.step] = value

    @rule(value=st.integers(0, 100), other=st.integers(0, 100))
    def saves_in_the_background(self, value: int, other: int) -> None:
        self.step += 1
        state = numbered(value)
        with Saver(self.root) as saver:
            state["step"].fill_(self.step)
            saver.save(state, {})
            state["params", "w"].fill_(other)
            state["step"].fill_(0)
        written = numbered(value)
        written["step"].fill_(self.step)
        assert_same(load(self.root / step_name(self.step)), written)
        # What a state says of itself is its step there, and its value in the rest of this machine.
        shutil.rmtree(self.root / step_name(self.step))
        save(self.root / step_name(self.step), numbered(value))
        self.good[self.step] = value

    @rule(value=st.integers(0, 100), mesh=MESHES)
    def several_save(self, value: int, mesh: tuple[int, ...]) -> None:
        self.step += 1
        save_by_ranks(self.root / step_name(self.step), numbered(value), mesh, {"params/w": [0] * len(mesh)})
        self.good[self.step] = value

    @rule(value=st.integers(0, 100), mesh=MESHES, at=st.integers(1, 60), losing=st.booleans())
    def dies_while_several_save(self, value: int, mesh: tuple[int, ...], at: int, losing: bool) -> None:
        self.step += 1
        machine = Machine(at)
        with machine.running():
            try:
                save_by_ranks(self.root / step_name(self.step), numbered(value), mesh, {"params/w": [0] * len(mesh)})
            except Crash:
                if losing:
                    machine.lose_what_was_not_synced()
        if self.step in committed(self.root):
            self.good[self.step] = value

    @precondition(lambda self: self.good)
    @rule(data=st.data())
    def is_damaged(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.good)))
        path = self.root / step_name(step)
        flip(data.draw(st.sampled_from(sorted(p for p in path.rglob("*") if p.is_file()))))
        del self.good[step]
        self.damaged.add(step)

    @rule(keep=st.none() | st.integers(1, 3))
    def prunes(self, keep: int | None) -> None:
        known = committed(self.root)  # damage in the data does not show without reading it
        gone = retain(list(map(Saved, known)), Policy(last=keep))
        assert set(prune(self.root, Policy(last=keep))) == gone
        self.good = {step: value for step, value in self.good.items() if step not in gone}
        self.damaged -= gone

    @rule()
    def resumes(self) -> None:
        last = max({*self.good, *self.damaged}, default=None)
        if last is None:
            assert latest(self.root) is None
        elif last in self.damaged:
            with pytest.raises(CheckpointError, match=step_name(last)):
                load(self.root)
        else:
            assert_same(load(self.root), numbered(self.good[last]))

    @precondition(lambda self: self.good)
    @rule()
    def resumes_older(self) -> None:
        last = max(self.good)
        assert latest(self.root, older=True) == self.root / step_name(last)
        self.damaged = {step for step in self.damaged if step < last}

    @rule()
    def sweeps(self) -> None:
        sweep(self.root)
        assert not self.root.exists() or not [name for name in os.listdir(self.root) if name.startswith(".")]

    @invariant()
    def every_good_one_loads(self) -> None:
        assert set(self.good) <= set(committed(self.root))
        for step, value in self.good.items():
            assert load(self.root / step_name(step), keys=["step"])["step"] == value


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=12)
