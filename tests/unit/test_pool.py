"""Work spread over processes: results as they are done, errors as they are, deaths in words."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import DataError
from lib.run import pool
from lib.run.pool import spread

DEATH = (
    "data.processes: a process that prepares text was ended from outside, must live; "
    "run again to go on from what is done (data.processes=1 needs the least memory)"
)


def square(n: int) -> int:
    return n * n


def after_others(told: tuple[str, int]) -> int:
    """The first job waits until the second one was done."""
    folder, n = told
    path = Path(folder) / "done"
    if n == 0:
        while not path.exists():
            time.sleep(0.01)
        time.sleep(0.3)
    else:
        path.touch()
    return n


def about(_: int) -> dict[str, Any]:
    time.sleep(0.05)
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return {
        "pid": os.getpid(),
        "ignored": [signal.getsignal(one) == signal.SIG_IGN for one in stops],
        "held": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "heavy": [name for name in ("torch", "tensordict", "zarr") if name in sys.modules],
        "tokenizers": os.environ.get("TOKENIZERS_PARALLELISM"),
    }


def failing(n: int) -> int:
    if n == 1:
        raise DataError("x.txt:3: is bad, must be good; mend it")
    return n


def dying(n: int) -> int:
    if n == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def lasting(n: int) -> int:
    if n == 0:
        time.sleep(60)
    return os.getpid()


def test_results_come_as_they_are_done(tmp_path: Path) -> None:
    assert list(spread(2)(after_others, [(str(tmp_path), 0), (str(tmp_path), 1)])) == [1, 0]


def test_nothing_is_started_for_little_work_or_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ProcessPoolExecutor", None)
    assert list(spread(1)(square, iter(range(5)))) == [0, 1, 4, 9, 16]
    assert list(spread(2)(square, [3])) == [9]
    assert list(spread(4, least=6)(square, range(5))) == [0, 1, 4, 9, 16]
    assert list(spread(None)(square, [])) == []


def test_processes_ignore_signals_and_import_nothing_heavy() -> None:
    told = list(spread(2)(about, range(4)))
    assert os.getpid() not in {one["pid"] for one in told}
    assert len({one["pid"] for one in told}) <= 2
    for one in told:
        assert (one["ignored"], one["tokenizers"]) == ([True] * 3, "false")
        assert (one["heavy"], one["held"]) == ([], [])
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_error_arrives_as_what_it_is_with_where_it_came_from() -> None:
    with pytest.raises(DataError, match=r"^x\.txt:3: is bad, must be good; mend it$") as error:
        list(spread(2)(failing, range(4)))
    assert "in failing" in str(error.value.__cause__)


def test_a_killed_process_is_an_error_in_words() -> None:
    with pytest.raises(DataError, match=f"^{re.escape(DEATH)}$"):
        list(spread(2)(dying, range(4)))


def test_one_that_is_killed_while_it_waits_for_work_holds_nobody_up() -> None:
    # It dies with the lock of the queue in its hands.
    results = iter(spread(2)(lasting, [0, 1]))
    pid, begin = next(results), time.monotonic()
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=f"^{re.escape(DEATH)}$"):
        next(results)
    assert time.monotonic() - begin < 10


def test_one_that_dies_while_jobs_are_handed_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real, dead = pool.ProcessPoolExecutor.submit, threading.Event()

    def submit(self: Any, *job: Any) -> Any:
        future = real(self, *job)
        if not dead.is_set():
            dead.set()
            future.exception()  # wait until it is known
        return future

    monkeypatch.setattr(pool.ProcessPoolExecutor, "submit", submit)
    with pytest.raises(DataError, match=f"^{re.escape(DEATH)}$"):
        list(spread(2)(dying, [1, 2, 3]))


def test_who_stops_asking_leaves_no_process() -> None:
    def children() -> set[int]:
        listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return {int(one) for one in listed}

    before, results = children(), spread(2)(square, range(50))
    assert isinstance(results, Iterator)
    assert next(results) in {n * n for n in range(50)}
    results.close()  # type: ignore[attr-defined]
    left = [pid for pid in children() - before if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert left == []
