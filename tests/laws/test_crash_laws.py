"""No moment of death, no refusal and no interruption loses a committed state, in any order of events.

`Machine` (tests/faults.py) stands between the store and the disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from lib.errors import CheckpointError
from lib.store import load, save
from lib.store.folder import committed, latest, prune, step_name, sweep
from lib.store.local import Folder
from lib.store.retention import Policy
from tests.checkpoints import assert_same, flip, tree
from tests.faults import Crash, Machine
from tests.life import MESHES, VALUES, Life, numbered
from tests.ranks import save_by_ranks


@pytest.fixture(autouse=True)
def _no_power_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing takes most of the time of small saves; whether it is done is what `Machine` watches."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# Death, refusal, interruption -----------------------------------------------------------------------------------------


def operations(action: Callable[[], Any]) -> int:
    """Count the operations of an action that write."""
    machine = Machine(10**9)
    with machine.running():
        action()
    return 10**9 - machine.left


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


class OnDisk(Life):
    """A disk, a machine that may die and lose what was not synced."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.root = Folder(Path(self.temporary.name) / "checkpoints")

    def teardown(self) -> None:
        self.temporary.cleanup()

    def spoil(self, step: int, data: st.DataObject) -> None:
        flip(data.draw(st.sampled_from(sorted(p for p in self.at(step).where.rglob("*") if p.is_file()))))

    @rule(value=VALUES, at=st.integers(1, 60), losing=st.booleans(), mesh=MESHES | st.none())
    def dies_while_saving(self, value: int, at: int, losing: bool, mesh: tuple[int, ...] | None) -> None:
        self.step += 1
        machine, state = Machine(at), numbered(self.step, value)
        with machine.running():
            try:
                if mesh is None:
                    save(self.at(self.step), state)
                else:
                    save_by_ranks(self.at(self.step), state, mesh, {"params/w": [0] * len(mesh)})
            except Crash:
                if losing:
                    machine.lose_what_was_not_synced()
        self.died(value)


TestLife = OnDisk.TestCase
TestLife.settings = settings(max_examples=15, stateful_step_count=12)
