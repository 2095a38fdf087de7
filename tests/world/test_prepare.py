"""Text prepared among real processes: killed at any moment, by one or by several, two at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.store import parts
from lib.store.corpus import scan
from lib.store.tokens import TokenStore
from tests.stores import contents, made, names

ROOT = Path(__file__).parents[2]
LINES = 400

# Writes parts of 500 bytes, each at leisure. A line in `log` for each part begun, one for each written.
LEISURE = """
import os, sys, time
from functools import partial
from pathlib import Path
from lib.store import parts, tokens

def say(root, word):
    file = os.open(Path(root) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{word}\\n".encode())
    os.close(file)

parts.PART_BYTES = 500
real, put_together = parts._write, tokens.assemble

def write(root, pace, folder, part, making):
    say(root, f"begun {part.number}")
    time.sleep(pace)
    real(folder, part, making)
    say(root, f"written {part.number}")

def write_part(job, root, pace):
    parts._write = partial(write, root, pace)
    return parts.write_part(job)

def assemble(root, pace, *some, **others):
    say(root, "assembling")
    time.sleep(pace)
    put_together(*some, **others)
    say(root, "assembled")
    time.sleep(pace)
"""

PROGRAM = """
import sys
from functools import partial
from pathlib import Path
import leisure
from lib.run.pool import spread
from lib.run.signals import watched
from lib.store import tokens
from lib.store.corpus import scan
from lib.store.making import Making
from lib.store.record import Reading

ROOT, PROCESSES, PACE = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
tokens.assemble = partial(leisure.assemble, ROOT, PACE)

def doing(work, jobs):
    return spread(PROCESSES)(partial(leisure.write_part, root=ROOT, pace=PACE), jobs)

with watched() as signals, signals.at_once():
    root = Path(ROOT)
    making = Making(Reading(split="line"))
    store = tokens.prepare(scan(root / "text"), making, tokens.Split(0.2, "document"), cache=root / "cache", doing=doing)
    leisure.say(ROOT, f"done {store.path.name} {len(store.notes)}")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_bytes(b"".join(b"line %d\n" % n for n in range(LINES)))
    (tmp_path / "leisure.py").write_text(LEISURE)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def start(root: Path, *, processes: int = 1, pace: float = 0.02) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(root / "program.py"), str(root), str(processes), str(pace)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def log(root: Path, word: str) -> list[str]:
    path = root / "log"
    said = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix(word).strip() for line in said if line.startswith(word)]


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def whole(root: Path) -> TokenStore:
    """The store as it must be, built here in one part."""
    return made(scan(root / "text"), root / "whole", split="line", holdout=0.2, how="document")


def finish(root: Path, **options: float) -> str:
    process = start(root, **options)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    return log(root, "done")[-1].split()[0]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("word", "count"), [("begun", 1), ("written", 1), ("written", 4), ("assembling", 1),
                                             ("assembled", 1)])  # fmt: skip
def test_a_build_that_was_killed_goes_on_and_has_the_same_bits(
    root: Path, processes: int, word: str, count: int
) -> None:
    process = start(root, processes=processes)
    wait_for(lambda: len(log(root, word)) >= count)
    workers = children(process.pid)
    process.kill()
    assert process.communicate()[1] == ""  # nor do the workers say anything
    wait_for(lambda: not any(map(alive, workers)))
    cache = root / "cache"
    building = next(cache.glob(".building-*"))
    kept = sorted(path.name for path in building.glob("part-*"))
    if word != "begun":
        assert len(kept) >= count or word.startswith("assembl")
    (root / "log").unlink()
    name = finish(root, processes=processes, pace=0.0)
    # Only what was not finished is written.
    again = sorted(f"part-{int(number):06}" for number in log(root, "written"))
    every = len(parts_of_text(root))
    assert sorted(kept + again) == [f"part-{number:06}" for number in range(every)]
    assert log(root, "begun") and again if len(kept) < every else not again
    assert names(cache) == [name]
    assert contents(cache / name) == contents(whole(root).path)
    assert len(names(root / "whole")) == 1


def parts_of_text(root: Path) -> list[int]:
    size = (root / "text" / "a").stat().st_size
    return list(range(-(-size // 500)))


@pytest.mark.parametrize("processes", [1, 2])
def test_of_two_builders_one_builds_and_the_other_waits_and_takes_it(root: Path, processes: int) -> None:
    first = start(root, processes=processes)
    wait_for(lambda: bool(log(root, "begun")))
    second = start(root, processes=processes)
    for process in (first, second):
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    one, two = log(root, "done")
    assert one == two == f"{one.split()[0]} 0"
    assert sorted(map(int, log(root, "written"))) == parts_of_text(root)
    assert len(log(root, "assembled")) == 1
    assert names(root / "cache") == [one.split()[0]]


def test_when_the_one_that_builds_is_killed_the_one_that_waits_goes_on(root: Path) -> None:
    first = start(root)
    wait_for(lambda: len(log(root, "written")) >= 2)
    second = start(root)
    time.sleep(0.5)
    before = len(log(root, "begun"))
    first.kill()
    first.communicate()
    _, err = second.communicate(timeout=60)
    assert (second.returncode, err) == (0, "")
    written = list(map(int, log(root, "written")))
    assert sorted(written) == parts_of_text(root)  # none twice
    assert before >= 2
    assert contents(root / "cache" / log(root, "done")[-1].split()[0]) == contents(whole(root).path)


def test_another_share_waits_too_and_is_built_of_parts_of_its_own(root: Path) -> None:
    first = start(root)
    wait_for(lambda: bool(log(root, "begun")))
    second = subprocess.Popen(
        [sys.executable, "-c", (root / "program.py").read_text().replace("Split(0.2", "Split(0.4"), str(root), "1", "0"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{root}"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for process in (first, second):
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
    assert len(set(log(root, "done"))) == 2
    assert names(root / "cache") == sorted(line.split()[0] for line in log(root, "done"))


def test_a_process_of_the_pool_that_is_killed_ends_the_build_in_words_and_keeps_what_is_done(root: Path) -> None:
    process = start(root, processes=2, pace=0.1)
    wait_for(lambda: len(log(root, "written")) >= 2)
    workers = [pid for pid in children(process.pid) if b"lib.run.pool" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == (
        f"lib.errors.DataError: data.processes: a process that prepares text (pid {workers[0]}) was ended by SIGKILL, "
        "must live; "
        "run again to go on from what is done (data.processes=1 needs the least memory)"
    )
    wait_for(lambda: not any(map(alive, workers)))
    kept = len(list(next((root / "cache").glob(".building-*")).glob("part-*")))
    assert kept >= 2
    (root / "log").unlink()
    name = finish(root, pace=0.0)
    assert len(log(root, "written")) == len(parts_of_text(root)) - kept
    assert contents(root / "cache" / name) == contents(whole(root).path)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_affair_of_the_process_that_was_started(root: Path, number: int, early: bool) -> None:
    process = start(root, processes=2, pace=0.1)

    def workers() -> list[int]:
        return [pid for pid in children(process.pid) if b"lib.run.pool" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    wait_for(lambda: len(workers()) == 2 and (early or len(log(root, "written")) >= 1))
    for pid in workers():
        os.kill(pid, number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert sorted(map(int, log(root, "written"))) == parts_of_text(root)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_build_and_all_of_its_processes_with_two_lines_and_nothing_behind_them(
    root: Path, number: signal.Signals
) -> None:
    process = start(root, processes=2, pace=0.1)
    wait_for(lambda: len(log(root, "written")) >= 1)
    workers = children(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    note = f"\n{number.name}: leaving, nothing here needs saving\n"
    note += "interrupted: nothing is lost, run the same command again to go on\n"
    assert (process.returncode, err, len(workers)) == (75, note, 2)
    wait_for(lambda: not any(map(alive, workers)))
    finish(root, processes=2, pace=0.0)


def test_the_verb_builds_what_a_run_then_finds(root: Path) -> None:
    words = [f"data.path={root / 'text'}", f"data.cache={root / 'cache'}", "data.split=line", "batch.length=16",
             "data.processes=2"]  # fmt: skip
    ran = subprocess.run([sys.executable, "-m", "lib.run", "prepare", *words], cwd=ROOT, check=False,
                         capture_output=True, text=True)  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, ""), ran
    (name,) = names(root / "cache")
    before = contents(root / "cache")
    store = made(scan(root / "text"), root / "cache", split="line", holdout=0.01, how="auto")
    assert (store.path.name, store.notes) == (name, ())
    assert contents(root / "cache") == before
    told = json.loads((store.path / "zarr.json").read_bytes())["attributes"]["counts"]
    assert (told["documents"], told["duplicates"]) == (LINES, 0)
    assert parts.PART_BYTES == 32 << 20
