"""Work spread over processes: results as they are done, errors as they are, deaths in words."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lib.errors import DataError
from lib.run import crew, pool
from lib.run.pool import spread


def death(pid: int | str) -> str:
    return (
        f"data.processes: a process that prepares text (pid {pid}) was ended by SIGKILL, must live; "
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


def after_others_with_pid(n: int, folder: str) -> int:
    """The first job waits until it is let go."""
    while n == 0 and not (Path(folder) / "go").exists():
        time.sleep(0.01)
    return os.getpid()


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


def full(n: int) -> int:
    if n == 1:
        raise OSError(28, "No space left on device", "x")
    return n


class OddError(Exception):
    """One that pickle cannot make again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def odd(n: int) -> Any:
    if n == 1:
        raise OddError(1, 2)
    return lambda: n


def dying(n: int, folder: str) -> int:
    if n == 1:
        (Path(folder) / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def lasting(n: int, folder: str) -> int:
    """The first job never ends, and tells who does it."""
    if n == 0:
        (Path(folder) / str(os.getpid())).touch()
        time.sleep(60)
    return os.getpid()


def marking(n: int, folder: str) -> int:
    (Path(folder) / f"begun {n}").touch()
    time.sleep(0.2)
    (Path(folder) / f"done {n}").touch()
    if n == 0:
        raise ValueError("n=0 must be more")
    return n


def children() -> set[int]:
    listed = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return {int(one) for one in listed}


def refused(work: Callable[[Any], Any], kind: type[Exception], message: str) -> BaseException:
    with pytest.raises(kind) as caught:
        list(spread(2)(work, range(4)))
    assert str(caught.value) == message
    return caught.value


def test_results_come_as_they_are_done(tmp_path: Path) -> None:
    assert list(spread(2)(after_others, [(str(tmp_path), 0), (str(tmp_path), 1)])) == [1, 0]


def test_nothing_is_started_for_little_work_or_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "start", None)
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
    (note,) = refused(failing, DataError, "x.txt:3: is bad, must be good; mend it").__notes__
    assert re.match(r"in data worker [01] \(pid \d+\):\nTraceback \(most recent call last\):\n", note)
    assert "in failing\n" in note


def test_an_error_of_the_system_stays_one() -> None:
    error = refused(full, OSError, "[Errno 28] No space left on device: 'x'")
    assert isinstance(error, OSError)
    assert (error.errno, error.strerror) == (28, "No space left on device")


def test_what_cannot_travel_is_an_error_and_no_silence() -> None:
    with pytest.raises(RuntimeError, match=r"^(AttributeError|PicklingError): .*lambda"):
        list(spread(2)(odd, [2, 3]))
    with pytest.raises(RuntimeError, match=r"^OddError: 1 and 2\n") as caught:
        list(spread(2)(odd, [1, 1]))
    assert "in odd\n" in caught.value.__notes__[0]


def test_work_that_no_other_process_can_import_is_refused() -> None:
    def here(n: int) -> int:
        return n

    message = (
        r"^work=functools\.partial\(<function .*here.*, 0\) must be a function that another process can import \(.*\)$"
    )
    with pytest.raises(ValueError, match=message):
        list(spread(2)(here, range(3)))


def test_a_killed_process_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        list(spread(2)(partial(dying, folder=str(tmp_path)), range(4)))
    (pid,) = os.listdir(tmp_path)
    assert str(caught.value) == death(pid)


def test_one_that_is_killed_at_work_is_named_at_once_and_holds_nobody_up(tmp_path: Path) -> None:
    results = iter(spread(2)(partial(lasting, folder=str(tmp_path)), [0, 1]))
    next(results)
    while not os.listdir(tmp_path):  # the other one may only just begin
        time.sleep(0.01)
    (pid,), begin = os.listdir(tmp_path), time.monotonic()
    os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(DataError) as caught:
        next(results)
    assert str(caught.value) == death(pid)
    assert time.monotonic() - begin < 2


def test_one_that_is_killed_while_it_has_no_work_is_not_missed(tmp_path: Path) -> None:
    results = iter(spread(2)(partial(after_others_with_pid, folder=str(tmp_path)), [0, 1]))
    os.kill(next(results), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert next(results) not in (os.getpid(), 0)
    assert list(results) == []


def test_one_that_dies_before_it_is_given_work_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real, pids = crew.start, list[int]()

    def start(*words: Any, **options: Any) -> Any:
        worker = real(*words, **options)
        worker.process.kill()
        worker.process.wait()
        pids.append(worker.process.pid)
        return worker

    monkeypatch.setattr(pool, "start", start)
    with pytest.raises(DataError) as caught:
        list(spread(2)(square, [1, 2, 3]))
    assert str(caught.value) in map(death, pids)


def test_one_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: Any, **_options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("lib.run.crew.subprocess.Popen", refuse)
    refused(
        square, DataError, "data worker 0 cannot be started (Resource temporarily unavailable); lower data.processes"
    )
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_who_stops_asking_leaves_no_process() -> None:
    before, results = children(), spread(2)(square, range(50))
    assert isinstance(results, Iterator)
    assert next(results) in {n * n for n in range(50)}
    results.close()  # type: ignore[attr-defined]
    assert children() == before


def test_after_an_error_what_is_begun_is_finished_and_no_more_is_begun(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(ValueError, match=r"^n=0 must be more\n"):
        list(spread(2)(partial(marking, folder=str(tmp_path)), range(50)))
    names = os.listdir(tmp_path)
    assert sorted(name.split()[1] for name in names if "begun" in name) == sorted(
        name.split()[1] for name in names if "done" in name
    )
    assert 2 <= len(names) // 2 < 50
    assert children() == before


def test_many_pools_leave_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert sorted(spread(2)(square, range(3))) == [0, 1, 4]
    assert len(os.listdir("/proc/self/fd")) == before
