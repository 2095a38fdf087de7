"""What a run's checkpoint settings do: which checkpoints stay, and what becomes of a save that fails or is late."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lib.store import disk, load
from lib.store.checkpoint import read_info
from lib.store.folder import committed, step_name
from tests.world.running import TINY, Ended, bits, hasten, rows, run_here, text_folder


class Place:
    """A folder with text; runs in it by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, text_folder(folder / "text")

    def train(self, name: str, *words: str) -> Ended:
        shared = (f"data.path={self.text}", f"data.cache={self.folder / 'cache'}")
        return run_here(*TINY, *shared, f"run.dir={self.folder / name}", *words)

    def steps(self, name: str) -> list[int]:
        return committed(self.folder / name / "checkpoints")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    hasten(monkeypatch)
    return Place(tmp_path)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("checkpoint.every=2", "checkpoint.keep=2"), [10, 12]),
        (("checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4"), [0, 4, 8, 12]),
        (("checkpoint.every=4", "checkpoint.keep=1", "checkpoint.at=[3,5]"), [3, 5, 12]),
        (("checkpoint.every=5", "checkpoint.keep=none"), [0, 5, 10, 12]),
        (("checkpoint.every=8", "checkpoint.keep=none", "checkpoint.temporary=3"), [0, 8, 12]),
        (("checkpoint.every=3", "checkpoint.keep=1", "checkpoint.keep_every_s=1e9"), [0, 12]),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else None,
)
def test_the_checkpoints_that_the_rules_keep_stay(place: Place, words: tuple[str, ...], steps: list[int]) -> None:
    assert place.train("a", *words).code == 0
    assert place.steps("a") == steps
    # The same when it is stopped on the way, but for the states it stopped with.
    for stop in ("stop=4", "stop=9"):
        assert place.train("b", *words, stop).code == 0
    assert place.train("b", *words).code == 0
    assert set(steps) <= {*place.steps("b"), 4, 9}
    assert bits(place.folder / "a") == bits(place.folder / "b")


def test_a_temporary_checkpoint_is_told_by_its_flag_and_goes_with_the_next(place: Place) -> None:
    words = ("checkpoint.every=8", "checkpoint.temporary=2", "checkpoint.keep=none")
    assert place.train("a", *words, "stop=7").code == 0
    assert place.steps("a") == [0, 7]
    checkpoints = place.folder / "a" / "checkpoints"
    assert read_info(checkpoints / step_name(7))["temporary"] is False  # what a launch ends with is none
    assert place.train("b", *words, "stop=1").code == 0
    with pytest.MonkeyPatch.context() as patch:  # struck dead after update 4
        patch.setattr("lib.run.loop.save_due", _dies_at(5))
        assert place.train("b", *words).code == 1
    assert place.steps("b") == [0, 1, 4]
    assert read_info(place.folder / "b" / "checkpoints" / step_name(4))["temporary"] is True
    # With another interval it is still the temporary one that goes, and none that is not.
    assert place.train("b", "checkpoint.every=6", "checkpoint.temporary=none", "checkpoint.keep=none").code == 0
    assert place.steps("b") == [0, 1, 6, 12]


def _dies_at(step: int) -> Any:
    from lib.run.loop import save_due

    def due(at: int, plan: Any) -> Any:
        if at == step:
            raise ZeroDivisionError
        return save_due(at, plan)

    return due


def test_the_best_by_held_out_loss_stay_also_after_a_resume(place: Place) -> None:
    words = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=2", "eval.every=1")
    for stop in ("stop=5", "stop=9", "steps=12"):
        assert place.train("a", *words, stop).code == 0
    measured = {row["step"]: row["eval/loss_nats"] for row in rows(place.folder / "a") if "eval/loss_nats" in row}
    # The last state's own line comes after it is saved.
    known = {step: loss for step, loss in measured.items() if step < 12}
    best = sorted(known, key=lambda step: (known[step], step))[:2]
    assert place.steps("a") == sorted({*best, 12})


def refuses(numbers: set[int]) -> Any:
    """`disk.write_file` on a disk that is full whenever one of these saves, from 1, is at hand."""
    real, saves = disk.write_file, [0]
    names: set[str] = set()

    def write(path: str, pieces: Any) -> None:
        hidden = next(part for part in path.split("/") if part.startswith(".saving-"))
        if hidden not in names:
            names.add(hidden)
            saves[0] += 1
        if saves[0] in numbers:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, pieces)

    return write


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run_if_told_so(
    place: Place, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    assert place.train("whole", "checkpoint.every=2").code == 0
    words = (
        "checkpoint.every=2",
        "checkpoint.keep=none",
        "checkpoint.on_error=go_on",
        f"checkpoint.async={background}",
    )
    monkeypatch.setattr(disk, "write_file", refuses({3, 4}))
    ended = place.train("a", *words)
    assert (ended.code, ended.err) == (0, "")
    assert place.steps("a") == [0, 2, 8, 10, 12]
    for step in (4, 6):
        where = place.folder / "a" / "checkpoints" / step_name(step)
        assert (
            f"going on without this checkpoint, checkpoint.on_error=go_on: {where}: not saved (No space left on device), "
            f"older checkpoints are untouched; free 1 MB or set another run.dir" in ended.out
        )
    assert bits(place.folder / "a") == bits(place.folder / "whole")
    assert rows(place.folder / "a") == rows(place.folder / "whole")


def test_the_last_checkpoint_must_be_saved_whatever_it_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "write_file", refuses({3}))
    ended = place.train("a", "steps=4", "checkpoint.every=2", "checkpoint.on_error=go_on")
    assert ended.code == 5
    assert "step_0000000004: not saved (No space left on device)" in ended.err
    assert place.steps("a") == [0, 2]
    assert place.train("a", "steps=4").code == 0
    assert place.steps("a")[-1] == 4


def test_a_save_that_is_late_is_waited_for_or_the_next_is_skipped(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.train("whole", "checkpoint.every=2").code == 0
    gate, real = threading.Event(), disk.write_file

    def slow(path: str, pieces: Any) -> None:
        if (place.folder / "a" / "checkpoints" / step_name(0)).exists():
            assert gate.wait(60)
        real(path, pieces)

    def taken(state: Any, batch: Any) -> Any:
        if int(state["step"]) == 7:
            gate.set()
        return step(state, batch)

    step: Any = __import__("lib.step", fromlist=["train_step"]).train_step
    monkeypatch.setattr(disk, "write_file", slow)
    monkeypatch.setattr("lib.run.train.train_step", taken)
    ended = place.train("a", "checkpoint.every=2", "checkpoint.keep=none", "checkpoint.busy=skip")
    assert (ended.code, ended.err) == (0, "")
    log = (place.folder / "a" / "run.log").read_text()
    for skipped in (4, 6):
        assert f"step {skipped} is not saved, the save before it is still at hand" in log
        assert skipped not in place.steps("a")
    assert {0, 2, 12} <= set(place.steps("a"))
    assert bits(place.folder / "a") == bits(place.folder / "whole")


def test_saving_in_the_background_or_not_gives_the_same_run(place: Place) -> None:
    for name, background in (("a", "true"), ("b", "false")):
        assert (
            place.train(name, "checkpoint.every=1", "checkpoint.keep=none", f"checkpoint.async={background}").code == 0
        )
    assert rows(place.folder / "a") == rows(place.folder / "b")
    assert place.steps("a") == place.steps("b") == list(range(13))
    for step in range(13):
        one, other = (place.folder / name / "checkpoints" / step_name(step) for name in "ab")
        manifests = [json.loads((path / "manifest.json").read_text()) for path in (one, other)]
        for manifest in manifests:
            del manifest["files"]["zarr.json"]  # it holds the time
        assert manifests[0] == manifests[1]


def test_checkpoints_may_lie_in_another_folder(place: Place) -> None:
    elsewhere = place.folder / "large disk" / "a"
    words = (f"checkpoint.dir={elsewhere}", "checkpoint.every=4", "checkpoint.keep=2")
    assert place.train("a", *words, "stop=6").code == 0
    assert not (place.folder / "a" / "checkpoints").exists()
    assert committed(elsewhere) == [4, 6]
    ended = run_here(f"run.dir={place.folder / 'a'}")
    assert ended.code == 0, ended.err
    assert committed(elsewhere) == [8, 12]
    assert load(elsewhere)["step"] == 12
    for verb in ("eval", "sample", "inspect"):
        assert run_here(verb, f"run.dir={place.folder / 'a'}").code == 0
    assert run_here(f"run.dir={place.folder / 'a'}").out.startswith(f"{place.folder / 'a'}: complete at step 12")


def test_a_run_whose_checkpoints_are_elsewhere_is_not_begun_anew(place: Place) -> None:
    few = ("log.every=100", "eval.every=0", "stop=4")  # metrics.jsonl has no line of a step yet
    one, other = place.folder / "one", place.folder / "other"
    assert place.train("a", f"checkpoint.dir={one}", *few).code == 0
    ended = place.train("a", f"checkpoint.dir={other}", *few)
    assert ended.code == 5
    assert f"its checkpoints are in {one}, {other} has none, must be where they are; drop checkpoint.dir" in ended.err
    assert not other.exists()
    assert place.train("a", "log.every=100", "eval.every=0").code == 0
