"""Batches made ahead: the same ones whoever makes them, errors where they are wanted, and an end that never hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tensordict import TensorDict

from lib.errors import DataError
from lib.run import feed as module
from lib.run.crew import Worker
from lib.run.feed import feed, pinned
from lib.run.worker import Failure, receive, send
from tests.making import called, cut, made, slow, stuck, told, unsendable


def finished(batch: Mapping[str, Any]) -> TensorDict:
    values = {name: torch.from_numpy(value) for name, value in batch.items() if isinstance(value, np.ndarray)}
    tree = {name: {key: torch.tensor(at) for key, at in one.items()} for name, one in batch.get("cursor", {}).items()}
    return TensorDict({**values, "cursor": tree}, batch_size=[])


def counted(calls: list[int], *, fail_at: int = -1, wait: Callable[[], object] = bool) -> Callable[[int], Any]:
    def make_one(n: int) -> dict[str, Any]:
        wait()
        if n == fail_at:
            raise DataError(f"row {fail_at} is bad")
        calls.append(n)
        return {"row": np.array(n)}

    return make_one


def threads() -> int:
    return sum(thread.name == "feed" for thread in threading.enumerate())


def pids(batches: Iterator[Any], count: int) -> list[int]:
    return [int(batch["pid"]) for batch in islice(batches, count)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def same(batch: TensorDict, n: int) -> bool:
    wanted = finished(made(n))
    return bool((batch == wanted).all()) and all(batch[name].dtype == wanted[name].dtype for name in ("mask", "turned"))


# The same batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_batches_do_not_depend_on_who_makes_them_and_how_many_wait(workers: int, ahead: int) -> None:
    with feed(made, finished, ahead=ahead, workers=workers) as batches:
        for n, batch in enumerate(islice(batches, 17)):
            assert same(batch, n)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_more_than_asked_for_is_made_ahead(tmp_path: Path, workers: int) -> None:
    # One was used, and one is held by the thread until there is room. Three wait, or with workers one, and two at each.
    most = 5 if not workers else 7
    with feed(partial(called, folder=str(tmp_path)), finished, ahead=3, workers=workers) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        while len(os.listdir(tmp_path)) < most and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(os.listdir(tmp_path)) == most


def test_none_is_made_ahead_where_that_is_asked_for() -> None:
    calls: list[int] = []
    with feed(counted(calls), finished, ahead=0) as batches:
        next(batches)
        assert calls == [0]
        assert threads() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_made_while_the_step_works(workers: int) -> None:
    with feed(partial(slow, seconds=0.02), finished, ahead=4, workers=workers) as batches:
        next(batches)
        time.sleep(0.5)
        begin = time.perf_counter()
        for _ in range(4):
            next(batches)
        assert time.perf_counter() - begin < 0.06  # made when they are asked for, it would be 0.08 at least


def test_workers_work_at_once() -> None:
    with feed(partial(slow, seconds=0.1), finished, ahead=2, workers=4) as batches:
        next(batches)
        begin = time.perf_counter()
        for _ in range(12):
            next(batches)
        assert time.perf_counter() - begin < 0.9  # one after the other, it would be 1.2 at least


def test_batch_n_is_made_by_worker_n_mod_w_which_is_light() -> None:
    facts: list[Any] = []

    def keep(batch: Mapping[str, Any]) -> TensorDict:
        facts.append((batch["heavy"], batch["threads"]))
        return TensorDict({"pid": torch.from_numpy(batch["pid"])}, batch_size=[])

    with feed(told, keep, ahead=1, workers=3) as batches:
        seen = pids(batches, 12)
    assert len(set(seen)) == 3
    assert os.getpid() not in seen
    assert seen == seen[:3] * 4
    assert all(heavy == [] for heavy, _ in facts)
    assert all(count <= 3 for _, count in facts)  # itself, one that sends, one that watches


def test_a_worker_starts_in_a_moment() -> None:
    begin = time.perf_counter()
    with feed(told, finished, ahead=1, workers=1) as batches:
        next(batches)
    assert time.perf_counter() - begin < 2  # 0.2 s on an idle machine; torch alone would take more than 2


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_an_error_is_raised_where_the_batch_was_wanted_with_its_own_traceback(ahead: int) -> None:
    calls: list[int] = []
    with feed(counted(calls, fail_at=2), finished, ahead=ahead) as batches:
        assert [next(batches)["row"].item() for _ in range(2)] == [0, 1]
        with pytest.raises(DataError, match=r"^row 2 is bad$") as caught:
            next(batches)
    assert "make_one" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert calls == [0, 1]
    assert threads() == 0


@pytest.mark.parametrize(("kind", "raised", "text"), [
    ("data", DataError, "row 4 is bad"), ("value", ValueError, "row 4 is bad"),
    ("key", RuntimeError, "KeyError: 'row 4 is bad'"), ("exit", RuntimeError, "SystemExit: row 4 is bad"),
])  # fmt: skip
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_worker_s_error_arrives_as_its_own_kind_with_the_worker_s_traceback(
    ahead: int, kind: str, raised: type[Exception], text: str
) -> None:
    with feed(partial(cut, at=4, kind=kind), finished, ahead=ahead, workers=2) as batches:
        assert all(same(next(batches), n) for n in range(4))
        with pytest.raises(raised) as caught:
            next(batches)
    assert type(caught.value) is raised
    assert str(caught.value) == text
    (note,) = caught.value.__notes__
    assert re.match(r"in data worker 0 \(pid \d+\):\nTraceback \(most recent call last\):\n", note)
    assert "in cut\n" in note
    assert "row 4 is bad" in note.splitlines()[-1]


def test_an_error_while_a_batch_is_finished_is_raised_too() -> None:
    def refuse(_batch: Mapping[str, Any]) -> TensorDict:
        raise ValueError("batch.mask is bad")

    for workers in (0, 1):
        with (
            feed(made, refuse, ahead=1, workers=workers) as batches,
            pytest.raises(ValueError, match=r"^batch\.mask is bad$"),
        ):
            next(batches)


def test_a_value_that_cannot_travel_is_an_error_and_no_silence() -> None:
    with (
        feed(unsendable, finished, ahead=1, workers=1) as batches,
        pytest.raises(RuntimeError, match="^TypeError: Encoding objects of type functools.partial is unsupported\n"),
    ):
        next(batches)


def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    def here(n: int) -> dict[str, Any]:
        return made(n)

    message = rf"^make={re.escape(repr(here))} must be a function that another process can import \(.*here.*\)$"
    with pytest.raises(ValueError, match=message), feed(here, finished, ahead=1, workers=2):
        pass


def test_a_function_that_the_worker_cannot_import_is_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.making.late", made, raising=False)
    monkeypatch.setattr(made, "__qualname__", "late")
    with (
        feed(made, finished, ahead=1, workers=1) as batches,
        pytest.raises(RuntimeError, match=r"^AttributeError: .*late"),
    ):
        next(batches)


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_worker_that_is_killed_is_named_within_a_second(ahead: int) -> None:
    with feed(partial(stuck, at=3), finished, ahead=ahead, workers=2) as batches:
        assert all(same(next(batches), n) for n in range(3))
        (victim,) = [worker for worker in children() if worker.number == 1]
        threading.Timer(0.2, victim.process.kill).start()
        begin = time.perf_counter()
        message = (
            f"data worker 1 (pid {victim.process.pid}) was ended by SIGKILL, must live as long as the run; free memory "
            "or lower data.workers, then run it again"
        )
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            next(batches)
        assert time.perf_counter() - begin < 1.2


def children() -> list[Any]:
    """The workers of the feed that is open."""
    import gc

    return [one for one in gc.get_objects() if type(one) is Worker and one.process.poll() is None]


def test_a_worker_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: Any, **_options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("lib.run.crew.subprocess.Popen", refuse)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    message = "data worker 0 cannot be started (Resource temporarily unavailable); lower data.workers"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"), feed(made, finished, ahead=1, workers=2):
        pass
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("name", ["ahead", "workers"])
def test_a_negative_number_is_refused(name: str) -> None:
    options = {"ahead": 1, "workers": 1, name: -1}
    with (
        pytest.raises(ValueError, match=rf"^data\.{name}=-1 must be >= 0$"),
        feed(made, finished, ahead=options["ahead"], workers=options["workers"]),
    ):
        pass


# The end --------------------------------------------------------------------------------------------------------------


def interrupted(ahead: int, workers: int, used: int) -> None:
    with feed(made, finished, ahead=ahead, workers=workers) as batches:
        list(islice(batches, used))
        raise KeyboardInterrupt


@pytest.mark.parametrize("used", [0, 1, 5])
@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_at_any_time_leaves_nothing(workers: int, ahead: int, used: int) -> None:
    begin = time.perf_counter()
    with feed(made, finished, ahead=ahead, workers=workers) as batches:
        list(islice(batches, used))
        crew = [worker.process.pid for worker in children()]
    assert len(crew) == workers
    assert not any(alive(pid) for pid in crew)
    assert threads() == 0
    with pytest.raises(KeyboardInterrupt):
        interrupted(ahead, workers, used)
    assert threads() == 0
    assert children() == []
    assert time.perf_counter() - begin < (1 if not workers else 5)


def test_an_error_that_nobody_asked_for_is_not_raised_on_leaving() -> None:
    for workers in (0, 1):
        with feed(partial(cut, at=2, kind="data"), finished, ahead=1, workers=workers) as batches:
            next(batches)
            time.sleep(0.05)
        assert threads() == 0


def test_a_read_that_never_returns_ends_with_its_worker() -> None:
    with feed(partial(stuck, at=1), finished, ahead=2, workers=2) as batches:
        next(batches)
        crew = [worker.process.pid for worker in children()]
        time.sleep(0.1)
        begin = time.perf_counter()
    assert time.perf_counter() - begin < 1
    assert not any(alive(pid) for pid in crew)
    assert threads() == 0


def test_a_read_that_never_returns_in_a_thread_is_left_behind_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    release, begin = threading.Event(), time.perf_counter()
    with warnings.catch_warnings(record=True) as said, feed(counted([], wait=release.wait), finished, ahead=1):
        time.sleep(0.05)
    assert 0.2 < time.perf_counter() - begin < 1
    assert (said, threads()) == ([], 1)
    release.set()


def test_many_feeds_leave_no_descriptor_behind() -> None:
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        pytest.skip("descriptors are counted in /proc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = len(os.listdir(folder))
        for ahead in (0, 1, 0, 1):
            with feed(made, finished, ahead=ahead, workers=1) as batches:
                next(batches)
        assert len(os.listdir(folder)) == before


# How a batch travels --------------------------------------------------------------------------------------------------


@given(
    arrays.arrays(
        dtype=st.sampled_from([np.int64, np.uint16, np.bool_, np.float32, np.dtype(">i4")]),
        shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    st.dictionaries(st.text(max_size=3), st.integers(-(1 << 63), (1 << 64) - 1), max_size=3),
)
def test_what_is_received_is_what_was_sent(array: np.ndarray, tree: dict[str, int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, {"b": array, "cursor": tree, "a": array.T})
        got = receive(theirs)
        assert isinstance(got, dict)
        assert list(got) == ["b", "cursor", "a"]
        assert got["cursor"] == tree
        for name, wanted in (("b", array), ("a", array.T)):
            assert (got[name].dtype, got[name].shape, got[name].tobytes()) == (
                wanted.dtype, wanted.shape, wanted.tobytes(),
            )  # fmt: skip
            assert got[name].flags.writeable
        send(ours, Failure("ValueError", "x", "y"))
        assert receive(theirs) == Failure("ValueError", "x", "y")


def test_a_message_that_is_cut_short_is_an_end_and_never_a_batch() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, made(1))
        whole = theirs.recv(1 << 16)
    for stop in range(0, len(whole), 7):
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall(whole[:stop])
            assert receive(theirs) is None


def test_on_the_cpu_a_batch_stays_where_it_is() -> None:
    batch = finished(made(0))
    assert pinned(batch, torch.device("cpu")) is batch
