"""A run that is stopped and goes on is the run that was not: every bit of its state, every line of its metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.world.running import TINY, Ended, bits, files, hasten, rows, run_apart, run_here, text_folder

STEPS = 12


class Runs:
    """Runs over one text, and the unbroken one to hold them against."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = text_folder(folder / "text")
        self.words = (*TINY, f"data.path={text}", f"data.cache={folder / 'cache'}")
        assert self.launch("unbroken").code == 0
        self.rows, self.bits = rows(folder / "unbroken"), bits(folder / "unbroken")

    def launch(self, name: str, *words: str, run: Callable[..., Ended] = run_here) -> Ended:
        return run(*self.words, f"run.dir={self.folder / name}", *words)

    def is_the_unbroken_run(self, name: str) -> bool:
        return rows(self.folder / name) == self.rows and bits(self.folder / name) == self.bits


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return Runs(tmp_path_factory.mktemp("resume"))


def test_the_run_is_as_hard_as_it_is_meant_to_be(runs: Runs) -> None:
    trained = [row for row in runs.rows if "loss_nats" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert [row["step"] for row in runs.rows if "eval/bpb" in row] == [0, 4, 8, 12]
    refused = [row["step"] for row in trained if row["refused"]]
    assert refused
    assert 1 < min(refused) < STEPS
    assert int.from_bytes(runs.bits["cursor.text.epoch"], "little") >= 2
    assert runs.bits["average.params.embed.weight"] != runs.bits["params.embed.weight"]


@pytest.mark.parametrize("k", range(STEPS + 1))
def test_stopped_after_any_step_it_goes_on_as_if_it_had_not_been(k: int, runs: Runs) -> None:
    name = f"cut-{k}"
    assert runs.launch(name, f"stop={k}").code == 0
    assert int.from_bytes(bits(runs.folder / name)["step"], "little") == k
    assert runs.launch(name).code == 0
    assert runs.is_the_unbroken_run(name)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3, 12), (4, 9), (7, 7, 7)])
def test_stopped_more_than_once_too(cuts: tuple[int, ...], runs: Runs) -> None:
    name = "cuts-" + "-".join(map(str, cuts))
    for k in cuts:
        assert runs.launch(name, f"stop={k}").code == 0
    assert runs.launch(name).code == 0
    assert runs.is_the_unbroken_run(name)


def test_in_another_process_too(runs: Runs) -> None:
    assert runs.launch("apart", "stop=6", run=run_apart).code == 0
    assert runs.launch("apart", run=run_apart).code == 0
    assert runs.is_the_unbroken_run("apart")


def test_however_far_ahead_batches_are_made(runs: Runs) -> None:
    for ahead, stop in ((0, 3), (1, 7), (9, 12)):
        assert runs.launch("ahead", f"stop={stop}", f"data.ahead={ahead}").code == 0
    assert runs.launch("ahead").code == 0
    assert runs.is_the_unbroken_run("ahead")


def test_with_the_run_folder_named_and_nothing_else(runs: Runs) -> None:
    runs.launch("alone", "stop=5")
    assert run_here(f"run.dir={runs.folder / 'alone'}").code == 0
    assert runs.is_the_unbroken_run("alone")


def test_its_saved_config_alone_makes_the_run_again(runs: Runs) -> None:
    copy = runs.folder / "copy.toml"
    copy.write_text((runs.folder / "unbroken" / "config.toml").read_text())
    assert run_here(str(copy), f"run.dir={runs.folder / 'again'}").code == 0
    assert runs.is_the_unbroken_run("again")


def test_a_resume_with_no_step_left_to_its_stop_changes_no_file(runs: Runs) -> None:
    runs.launch("still", "stop=6")
    before = files(runs.folder / "still")
    ended = runs.launch("still", "stop=6")
    run = runs.folder / "still"
    assert ended == (
        0,
        f"{run}: at step 6, stop=6 is reached; to go on: python -m lib.run run.dir={run}\n",
        "",
    )
    assert files(runs.folder / "still") == before


@pytest.mark.parametrize("asked", ["steps=12", "steps=10"])
def test_a_complete_run_says_so_and_changes_no_file(asked: str, runs: Runs) -> None:
    run = runs.folder / "unbroken"
    before = files(run)
    ended = runs.launch("unbroken", asked)
    beyond = ", beyond steps=10" if asked == "steps=10" else ""
    bpb = runs.rows[-1]["eval/bpb"]
    assert ended == (
        0,
        (
            f"{run}: complete at step 12{beyond}, held-out {bpb:.4f} bits per byte; to go on: python -m lib.run "
            f"run.dir={run} steps=24 (the rate stays at its floor unless schedule.length=24 too)\n"
        ),
        "",
    )
    assert files(run) == before


def test_a_complete_run_goes_on_when_asked_for_more_steps_and_the_schedule_does_not_move(runs: Runs) -> None:
    for stop in (12, 14):
        runs.launch("more", "steps=14", "schedule.length=12", f"stop={stop}")
    runs.launch("extended")
    assert runs.launch("extended", "steps=14").code == 0
    extended = [row for row in rows(runs.folder / "extended") if "loss_nats" in row]
    assert extended == [row for row in rows(runs.folder / "more") if "loss_nats" in row]
    floor = 0.1 * 2e-3
    assert [row["lr"] for row in extended[-3:]] == [floor, floor, floor]


def test_lines_beyond_the_checkpoint_are_dropped_and_written_again(runs: Runs) -> None:
    runs.launch("torn", "stop=7")
    path = runs.folder / "torn" / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 8, "loss_nats": 1.0}\n{"step": 9, "loss_n')
    ended = runs.launch("torn")
    assert "metrics.jsonl: 2 lines beyond step 7 or unreadable dropped; steps beyond are taken again\n" in ended.out
    assert runs.is_the_unbroken_run("torn")


def test_an_evaluation_that_was_cut_off_is_made_up_for(runs: Runs) -> None:
    runs.launch("unmeasured", "stop=8")
    path = runs.folder / "unmeasured" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert "eval/bpb" in lines[-1]
    path.write_text("".join(lines[:-1]))
    runs.launch("unmeasured")
    assert runs.is_the_unbroken_run("unmeasured")


def test_a_run_that_was_killed_before_its_last_evaluation_is_not_complete(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    runs.launch("last")
    run = runs.folder / "last"
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (run / "loss.png").unlink()
    assert "done: held-out" in runs.launch("last").out
    assert (run / "loss.png").exists()
    assert runs.is_the_unbroken_run("last")


def test_a_new_rate_holds_from_there_on_and_is_said(runs: Runs) -> None:
    runs.launch("rate", "stop=6")
    ended = runs.launch("rate", "optim.lr=1e-3", "optim.decay=0", "guard.patience=5")
    assert ended.code == 0
    for line in ("optim.lr: 0.002 -> 0.001", "optim.decay: 0.1 -> 0", "guard.patience: 10 -> 5"):
        assert f"{line} from here on\n" in ended.out
    lr = {row["step"]: row["lr"] for row in rows(runs.folder / "rate") if "lr" in row}
    whole = {row["step"]: row["lr"] for row in runs.rows if "lr" in row}
    assert all(lr[step] == whole[step] for step in range(1, 7))
    assert all(lr[step] == pytest.approx(whole[step] / 2, rel=1e-12) for step in range(7, 13))
    assert "lr = 0.001\n" in (runs.folder / "rate" / "config.toml").read_text()
    assert bits(runs.folder / "rate")["recipe"].optim.lr == 1e-3


def test_the_schedule_is_stretched_only_by_name(runs: Runs) -> None:
    runs.launch("stretch", "stop=6")
    ended = runs.launch("stretch", "schedule.length=24")
    assert "schedule.length: 12 -> 24 from here on\n" in ended.out
    last = [row["lr"] for row in rows(runs.folder / "stretch") if "lr" in row][-1]
    assert last > 2 * [row["lr"] for row in runs.rows if "lr" in row][-1]


def test_another_thread_count_is_warned_of_and_kept_thereafter(runs: Runs) -> None:
    runs.launch("threads", "stop=3")
    run = runs.folder / "threads"
    ended = run_here(f"run.dir={run}", "run.threads=2", "stop=4")
    assert "run.threads: 1 -> 2; from here on the bits may differ from those of an unbroken run\n" in ended.out
    ended = run_here(f"run.dir={run}", "stop=5")
    assert "unbroken" not in ended.out
    assert "compile off, 2 threads\n" in ended.out


def test_what_may_change_around_the_step_changes_no_bit_of_it(runs: Runs) -> None:
    runs.launch("around", "stop=4", "checkpoint.every=1", "checkpoint.keep=1", "eval.every=3")
    assert len(list((runs.folder / "around" / "checkpoints").iterdir())) == 1
    runs.launch("around", "stop=9", "log.every=2", "eval.rows=3", "checkpoint.keep=none", "eval.weights=average")
    assert runs.launch("around", "eval.every=0", "sample.seed=4", "sample.prompt=the").code == 0
    assert bits(runs.folder / "around") == runs.bits


@pytest.mark.slow
def test_a_compiled_run_is_cut_and_goes_on_alike(runs: Runs) -> None:
    words = ("compile=on", "model.dropout=0")
    whole = runs.launch("compiled", *words)
    assert "compiling the step: once, about half a minute\n" in whole.out
    runs.launch("compiled-cut", *words, "stop=5")
    # The decision is the run's: it is kept when a launch leaves it open.
    ended = runs.launch("compiled-cut", "model.dropout=0", "compile=auto")
    assert "fp32, compile on, 1 threads\n" in ended.out
    assert rows(runs.folder / "compiled-cut") == rows(runs.folder / "compiled")
    assert bits(runs.folder / "compiled-cut") == bits(runs.folder / "compiled")
