"""Saving in the background: what is written is the state as it was, and what goes wrong is heard."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lib.errors import CheckpointError
from lib.run.saver import Saver, snapshot
from lib.store import disk, load
from lib.store.checkpoint import hold
from lib.store.folder import committed, step_name
from lib.store.leaves import nodes
from tests.checkpoints import assert_same, td, tree

ROOT = Path(__file__).parents[2]


def state(step: int, *, size: int = 1000) -> TensorDict:
    return td(step=torch.tensor(step), params=td(w=torch.full((size,), float(step)), v=torch.arange(6.0).view(2, 3).T))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every write until it is set."""
    opened, real = threading.Event(), disk.write_file

    def write(path: str, pieces: Any) -> None:
        assert opened.wait(60)
        real(path, pieces)

    monkeypatch.setattr(disk, "write_file", write)
    yield opened
    opened.set()


def fail(_path: str, _pieces: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def watch(saver: Saver) -> None:
    while saver.busy:
        saver.check()


def test_what_is_saved_is_the_state_as_it_was_whatever_becomes_of_it(tmp_path: Path, gate: threading.Event) -> None:
    first = state(3)
    view = first["params", "w"].view(10, 100)  # another name for the same memory
    with Saver(tmp_path) as saver:
        saver.save(first, {})
        first["params", "w"].fill_(9)
        first["step"].fill_(9)
        view[0] = 7
        del first["params", "v"]
        gate.set()
    assert os.listdir(tmp_path) == [step_name(3)]
    assert_same(load(tmp_path), state(3))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4, unique=True).map(sorted), st.booleans())
def test_in_the_background_or_not_the_same_bytes_are_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], background: bool
) -> None:
    root = tmp_path_factory.mktemp("saves")
    for name, how in (("a", background), ("b", not background)):
        with Saver(root / name, background=how) as saver:
            for step in steps:
                saver.save(state(step), {"threads": 1})
                saver.check()
        assert saver.newest == root / name / step_name(steps[-1])
        assert not saver.busy
    assert tree(root / "a") == tree(root / "b")


def test_the_caller_goes_on_while_it_is_written_and_the_next_save_waits(tmp_path: Path, gate: threading.Event) -> None:
    with Saver(tmp_path) as saver:
        saver.save(state(1), {})
        assert saver.busy
        saver.check()
        assert saver.busy
        assert committed(tmp_path) == []
        threading.Timer(0.2, gate.set).start()
        saver.save(state(2), {})
        assert committed(tmp_path) in ([1], [1, 2])
        assert saver.newest == tmp_path / step_name(1)
    assert committed(tmp_path) == [1, 2]


def test_a_failed_save_is_raised_once_at_the_next_check_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Saver(tmp_path / "run") as saver:
        saver.save(state(1), {})
        saver.settle()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "write_file", fail)
            saver.save(state(2), {})
            with pytest.raises(CheckpointError, match="step_0000000002: not saved .No space left on device."):
                watch(saver)
        assert os.listdir(tmp_path / "run") == [step_name(1)]
        assert saver.newest == tmp_path / "run" / step_name(1)
        saver.check()
        saver.save(state(2), {})
    assert committed(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("where", ["save", "settle", "end"])
def test_a_failed_save_is_heard_wherever_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(disk, "write_file", fail)

    def waits() -> None:
        with Saver(tmp_path / "run") as saver:
            saver.save(state(1), {})
            if where == "save":
                saver.save(state(2), {})
            elif where == "settle":
                saver.settle()

    with pytest.raises(CheckpointError, match="step_0000000001: not saved"):
        waits()
    assert not (tmp_path / "run").exists()


def test_an_error_that_ends_the_run_is_the_one_that_is_raised_and_the_save_is_settled(
    tmp_path: Path, gate: threading.Event
) -> None:
    def train() -> None:
        with Saver(tmp_path) as saver:
            saver.save(state(1), {})
            threading.Timer(0.2, gate.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert committed(tmp_path) == [1]


def test_parameters_that_are_no_numbers_are_found_in_the_background(tmp_path: Path) -> None:
    bad = state(1)
    bad["params", "w"][5] = float("nan")
    with Saver(tmp_path / "run") as saver:
        saver.save(bad, {})
        with pytest.raises(CheckpointError, match="state.params.w: 1 of 1000 values are not finite"):
            saver.settle()
    assert not (tmp_path / "run").exists()


def test_before_and_after_come_before_and_after_the_commit(tmp_path: Path) -> None:
    seen: list[Any] = []
    with Saver(
        tmp_path,
        before=lambda: seen.append(("before", committed(tmp_path))),
        after=lambda step: seen.append(("after", step, committed(tmp_path))),
    ) as saver:
        saver.save(state(4), {})
    assert seen == [("before", []), ("after", 4, [4])]


def test_a_snapshot_shares_no_memory_with_the_state() -> None:
    whole = state(1)
    whole["params", "part"] = whole["params", "w"][10:20]
    found = hold(nodes(whole))
    copy = snapshot(found).found
    for path, leaf in found.items():
        if leaf is not None:
            other: Any = copy[path]
            assert other.local.untyped_storage().data_ptr() != leaf.local.untyped_storage().data_ptr()  # type: ignore[union-attr]
            assert other.local.untyped_storage().nbytes() == other.local.nbytes  # a view's base is not copied with it
            assert torch.equal(other.local, leaf.local)  # type: ignore[union-attr]


def python(program: str, *words: Any) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


MEMORY = """
import gc, os, sys, psutil, torch
from pathlib import Path
from tensordict import TensorDict
from lib.run.saver import Saver
root, seen = Path(sys.argv[1]), []
state = TensorDict({"step": torch.tensor(0), "params": TensorDict({str(i): torch.ones(1 << 20) for i in range(8)}, [])}, [])
def after(step):
    import shutil
    for old in root.glob("step_*"):
        if old.name != f"step_{step:010d}": shutil.rmtree(old)
with Saver(root, after=after) as saver:
    for step in range(1, 51):
        state["step"].fill_(step)
        saver.save(state, {})
        saver.settle()
        gc.collect()
        seen.append(psutil.Process().memory_info().rss)
print(seen[4], seen[49])
"""


@pytest.mark.slow
def test_fifty_saves_take_no_more_memory_than_five(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    done = python(MEMORY, tmp_path)
    five, fifty = map(int, done.stdout.split())
    assert fifty < 1.05 * five


FORGETFUL = """
import sys, torch
from tensordict import TensorDict
from lib.run.saver import Saver
saver = Saver(sys.argv[1])
saver.save(TensorDict({"step": torch.tensor(3), "x": torch.ones(1 << 20)}, []), {})
print("end")
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_that_nobody_waits_for_is_finished_or_heard_of(tmp_path: Path, fails: bool) -> None:
    where = tmp_path / "run"
    if fails:
        where.write_text("")
    done = python(FORGETFUL, where)
    assert done.stdout == "end\n"
    if fails:
        assert done.stderr.startswith(f"error: {where / step_name(3)}: not saved (Not a directory)")
    else:
        assert done.stderr == ""
        assert load(where)["x"].sum() == 1 << 20


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (torch.tensor(-3), "torch.int64 ()"),
        (torch.tensor(2.5), "torch.float32 ()"),
        (torch.tensor([1, 2]), "torch.int64 (2,)"),
        (None, "NoneType"),
    ],
)
def test_a_state_without_a_step_of_its_own_is_refused(tmp_path: Path, step: Any, kind: str) -> None:
    state = td(x=torch.ones(1)) if step is None else td(x=torch.ones(1), step=step)
    with Saver(tmp_path / "run") as saver, pytest.raises(ValueError) as caught:
        saver.save(state, {})
    assert str(caught.value) == f"state.step: {kind} must be a whole number >= 0, as an int64 tensor of no dims; set it"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["", None, 3])
def test_a_saver_of_no_place_is_refused(place: Any) -> None:
    with pytest.raises(ValueError, match="^path: .* must be a path, a URL or a lib.store.place.Place; give one$"):
        Saver(place)


def test_two_failures_at_once_are_both_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "write_file", fail)

    def train() -> None:
        with Saver(tmp_path / "run") as saver:
            saver.save(state(1), {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    assert caught.value.__notes__[0].startswith("the save at hand failed too: ")


def test_a_copy_is_let_go_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """Nothing of a save that has ended keeps its tensors, also before anybody has looked."""

    def copies() -> int:
        gc.collect()
        return sum(type(thing) is torch.Tensor and thing.numel() == 12_345 for thing in gc.get_objects())

    whole = state(1, size=12_345)
    before = copies()
    with Saver(tmp_path) as saver:
        saver.save(whole, {})
        deadline = time.monotonic() + 60
        while committed(tmp_path) != [1] or copies() != before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
