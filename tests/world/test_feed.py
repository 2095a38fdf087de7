"""Worker processes among real processes: signals are the driver's affair, and no end of anything leaves one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Reads batches for ever, or until a number of them after each signal; prints its workers and then a line a batch.
PROGRAM = """
import signal, sys, time
from functools import partial
from lib.run.feed import feed
from tests.making import {make}

heard = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _frame: heard.append(number))

def finish(batch):
    return batch

with feed({call}, finish, ahead={ahead}, workers=2) as batches:
    print("started", flush=True)
    for n, batch in enumerate(batches):
        print(n, *(int(batch[key]) for key in ("pid", "n") if key in batch), len(heard), flush=True)
        if {stop}:
            break
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def started(*, make: str = "told", call: str = "told", ahead: int = 2, stop: str = "False") -> Iterator[
    subprocess.Popen[str]
]:  # fmt: skip
    program = PROGRAM.format(make=make, call=call, ahead=ahead, stop=stop)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def line(process: subprocess.Popen[str]) -> list[str]:
    """The next line and not a byte more: what a buffer would hold, `communicate` would not find."""
    assert process.stdout is not None
    read = b""
    while not read.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        read += byte
    return read.decode().split()


def gone(pids: list[int], *, within: float) -> bool:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="processes are looked up in /proc")


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(("make", "call"), [("told", "told"), ("stuck", "partial(stuck, at=3)")])
def test_workers_end_with_the_process_that_started_them_whatever_they_do(make: str, call: str, ahead: int) -> None:
    with started(make=make, call=call, ahead=ahead) as process:
        assert line(process) == ["started"]
        for _ in range(3):
            line(process)
        crew = [one for one in children(process.pid) if b"lib.run.worker" in Path(f"/proc/{one}/cmdline").read_bytes()]
        assert len(crew) == 2
        os.kill(process.pid, signal.SIGKILL)
        assert gone(crew, within=3)
        assert process.communicate()[1] == ""  # nor do they say anything


@pytest.mark.parametrize("wait", ["started", "running"])
def test_signals_to_all_of_a_run_s_processes_are_the_driver_s_affair(wait: str) -> None:
    with started(stop="len(heard) and n >= 60") as process:
        assert line(process) == ["started"]  # the workers are only just being born
        if wait == "running":
            line(process)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, "")
        rows = [[int(word) for word in row.split()] for row in out.splitlines()]
        assert [row[0] for row in rows][-1] >= 60
        assert all(row[0] == row[2] for row in rows)  # batch n is batch n
        assert len({row[1] for row in rows}) == 2
        assert rows[-1][-1] == 3


def test_a_killed_worker_ends_the_program_with_one_error_and_no_process() -> None:
    with started() as process:
        assert line(process) == ["started"]
        _, victim, _, _ = line(process)
        crew = children(process.pid)
        begin = time.monotonic()
        os.kill(int(victim), signal.SIGKILL)
        _, err = process.communicate(timeout=30)
        assert time.monotonic() - begin < 3
        assert process.returncode == 1
        assert err.splitlines()[-1] == (
            f"lib.errors.DataError: data worker 0 (pid {victim}) was ended by SIGKILL, must live as long as the run; free "
            "memory or lower data.workers, then run it again"
        )
        assert gone(crew, within=1)


def test_a_run_that_ends_leaves_no_process() -> None:
    with started(stop="n == 5") as process:
        assert line(process) == ["started"]
        line(process)
        crew = children(process.pid)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err, len(out.splitlines())) == (0, "", 5)
        assert gone(crew, within=1)
