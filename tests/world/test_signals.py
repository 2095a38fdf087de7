"""Signals and kills at every moment: the run is saved or as it was, the exit code says which, and it goes on alike."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.run.signals import AGAIN as AGAIN_LINE
from lib.run.signals import Interrupted, watched
from tests.world.running import TINY, bits, files, hasten, rows, run_here, start, text_folder

AGAIN = f"{AGAIN_LINE}\n"


class Place:
    """Text, settings, and the unbroken run of them."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.text = text_folder(folder / "text")
        self.words = (*TINY, f"data.path={self.text}", f"data.cache={folder / 'cache'}", *words)
        assert run_here(*self.words, f"run.dir={folder / 'unbroken'}").code == 0
        self.rows, self.bits = rows(folder / "unbroken"), bits(folder / "unbroken")

    def words_for(self, name: str) -> tuple[str, ...]:
        return (*self.words, f"run.dir={self.folder / name}")

    def completes(self, name: str) -> bool:
        ended = run_here(*self.words_for(name))
        assert ended.code == 0, ended
        run = self.folder / name
        return rows(run) == self.rows and bits(run) == self.bits


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return Place(tmp_path_factory.mktemp("signals"))


# The answer to a signal, alone ---------------------------------------------------------------------------------------


def test_a_signal_is_a_question_until_it_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with watched() as signals:
        assert not signals.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked()
        with pytest.raises(Interrupted), signals.at_once():
            raise AssertionError("where nothing needs finishing nothing is begun")
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err == "\nSIGTERM: saving after this step; once more to leave at once\n"


def test_where_nothing_needs_saving_it_is_obeyed_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with watched() as signals, pytest.raises(Interrupted), signals.at_once(), signals.at_once():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == "\nSIGINT: leaving, nothing here needs saving\n"


def test_an_error_that_comes_of_a_signal_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib.run.signals._drop", lambda: None)

    def ended_with_us() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("the compiler's own process was ended by the same key")

    with watched() as signals, pytest.raises(Interrupted), signals.at_once():
        ended_with_us()
    with watched() as signals, pytest.raises(ImportError), signals.at_once():
        raise ImportError("with no signal it stays what it is")


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watched() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.asked()
    finally:
        signal.signal(signal.SIGHUP, before)


# One signal, at every kind of moment ---------------------------------------------------------------------------------

# (what is being done, in which call of it, before or after, whether a run folder is there afterwards)
MOMENTS = [
    ("reading.scan", 1, "before", False),
    ("reading.prepare", 1, "after", False),
    ("start.init_state", 1, "before", False),
    ("train.save", 1, "before", False),
    ("train.save", 1, "after", True),  # a signal after the first commit finds a run
    ("train.cut", 1, "before", True),
    ("evals.eval_step", 1, "before", True),
    ("train.train_step", 1, "before", True),
    ("train.train_step", 5, "after", True),
    ("train.append", 6, "before", True),
    ("train.append", 6, "after", True),
    ("saver.commit", 1, "before", True),
    ("saver.commit", 1, "after", True),
    ("train.prune", 2, "after", True),
    ("evals.eval_step", 3, "before", True),
    ("evals.eval_step", 4, "after", True),
    ("train.train_step", 12, "after", True),
    ("saver.commit", 3, "after", True),
    ("train.written", 1, "before", True),
]


def signalled(patch: pytest.MonkeyPatch, what: str, call: int, *, after: bool, number: int = signal.SIGTERM) -> None:
    """Let a signal arrive just before or just after the given call of a function of the driver."""
    module, _, name = what.rpartition(".")
    real: Callable[..., Any] = getattr(__import__(f"lib.run.{module}", fromlist=[name]), name)
    count = [0]

    def called(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] == call and not after:
            os.kill(os.getpid(), number)
        result = real(*arguments, **options)
        if count[0] == call and after:
            os.kill(os.getpid(), number)
        return result

    patch.setattr(f"lib.run.{what}", called)


@pytest.mark.parametrize(("what", "call", "when", "there"), MOMENTS, ids=["-".join(map(str, m[:3])) for m in MOMENTS])
def test_a_signal_at_any_moment_loses_nothing(
    what: str, call: int, when: str, there: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{what}-{call}-{when}"
    with monkeypatch.context() as patch:
        signalled(patch, what, call, after=when == "after")
        ended = run_here(*place.words_for(name))
    assert ended.code == 75, ended
    assert ended.err == AGAIN or "saved; to go on: python -m lib.run run.dir=" in ended.out
    assert (place.folder / name).exists() == there
    assert place.completes(name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_line_says_where_it_was_saved(
    number: signal.Signals, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signalled(patch, "train.train_step", 3, after=False, number=number)
        ended = run_here(*place.words_for(number.name))
    run = place.folder / number.name
    assert ended.code == 75
    assert ended.out.endswith(f"interrupted at step 3, saved; to go on: python -m lib.run run.dir={run}\n")
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
    assert max((run / "checkpoints").iterdir()).name == "step_0000000003"


@pytest.mark.parametrize("verb", ["eval", "sample", "inspect"])
def test_a_verb_that_only_reads_leaves_at_once(verb: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(place.folder / "unbroken")
    with monkeypatch.context() as patch:
        signalled(patch, "inspect.load" if verb == "inspect" else "newest.load", 1, after=False)
        ended = run_here(verb, f"run.dir={place.folder / 'unbroken'}")
    assert ended == (75, "", AGAIN)
    assert files(place.folder / "unbroken") == before


@pytest.mark.parametrize("fails", [False, True], ids=["goes on", "fails for the signal"])
def test_compiling_is_left_at_once_since_all_is_saved(
    fails: bool, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"compiling-{fails}"

    def compiled(_state: Any, _batch: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            if fails:
                raise RuntimeError("the compiler was killed")
        raise AssertionError("it was not left")

    with monkeypatch.context() as patch:
        patch.setattr("lib.run.train.faster", lambda _step, **_options: compiled)
        assert run_here(*place.words_for(name), "compile=on")[::2] == (75, AGAIN)
    assert bits(place.folder / name)["step"] == bytes(8)


# Real processes ------------------------------------------------------------------------------------------------------

LONG = ("steps=120", "checkpoint.every=20", "checkpoint.keep=2", "eval.every=50", "schedule.warmup=20")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return Place(tmp_path_factory.mktemp("long"), *LONG)


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    """Until metrics.jsonl has so many lines, or the process has ended."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)


def test_a_process_that_gets_a_signal_saves_and_exits_75(long: Place) -> None:
    process = start(*long.words_for("asked"))
    wait_for_lines(process, long.folder / "asked" / "metrics.jsonl", 15)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, (out, err)
    assert err == "\nSIGTERM: saving after this step; once more to leave at once\n"
    assert "saved; to go on: python -m lib.run run.dir=" in out
    assert long.completes("asked")


def test_a_second_signal_leaves_at_once_and_the_committed_is_whole(long: Place) -> None:
    # A step that takes for ever, after the third: the first signal waits for it, the second does not.
    slow = (
        "import sys, time; import lib.run.train as train; from lib.run.cli import main; real = train.train_step\n"
        "def step(state, batch):\n"
        "    if int(state['step']) == 22: print('stuck', flush=True); time.sleep(60)\n"
        "    return real(state, batch)\n"
        "train.train_step = step; sys.exit(main(sys.argv[1:]))"
    )
    process = start(*long.words_for("twice"), program=("-c", slow))
    assert process.stdout is not None
    while "stuck" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode == 128 + signal.SIGINT
    assert err.endswith("SIGINT again: leaving at once; committed checkpoints are whole\n")
    assert max((long.folder / "twice" / "checkpoints").iterdir()).name == "step_0000000020"
    assert long.completes("twice")


def kill_often(place: Place, name: str, kills: int, seed: int, number: signal.Signals) -> tuple[list[int], list[str]]:
    """Start the run again and again, each time ended by a signal at a random moment; the exit codes and what was said."""
    draw, codes, said = random.Random(seed), [], []
    for _ in range(kills):
        process = start(*place.words_for(name))
        # Half of them while the process starts, reads and loads, half while it trains, saves and evaluates.
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0.3, 5.0))
        else:
            path = place.folder / name / "metrics.jsonl"
            have = path.read_bytes().count(b"\n") if path.exists() else 0
            wait_for_lines(process, path, max(1, have - 20) + draw.randrange(1, 40))
        process.send_signal(number)
        said.append("".join(process.communicate(timeout=60)))
        codes.append(process.returncode)
    return codes, said


def test_a_run_that_is_killed_goes_on_from_its_last_checkpoint(long: Place) -> None:
    assert set(kill_often(long, "killed", 2, 1, signal.SIGKILL)[0]) <= {-signal.SIGKILL, 0}
    assert long.completes("killed")


def test_a_signal_while_the_program_is_loaded_is_obeyed(long: Place) -> None:
    # In the middle of torch's import, where an exception from a handler would abort the process.
    late = (
        "import os, signal, sys; import lib.run.cli as cli\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch.utils.data': os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Late()); sys.exit(cli.main(sys.argv[1:]))"
    )
    process = start(*long.words_for("loading"), program=("-c", late))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, "")
    assert err == f"\nSIGTERM: leaving, nothing here needs saving\n{AGAIN}"
    assert not (long.folder / "loading").exists()


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_bit(long: Place) -> None:
    assert set(kill_often(long, "killed-20", 20, 2, signal.SIGKILL)[0]) <= {-signal.SIGKILL, 0}
    assert long.completes("killed-20")


@pytest.mark.slow
def test_twenty_signals_at_random_moments_end_with_75_and_change_no_bit(long: Place) -> None:
    codes, said = kill_often(long, "asked-20", 20, 3, signal.SIGTERM)
    # Before Python has come as far as our first line a signal has its default meaning.
    assert set(codes) <= {75, 0, -signal.SIGTERM}, said
    # how many come before the first line of ours depends on how busy the machine is
    assert codes.count(75) >= 4
    assert long.completes("asked-20")
