"""Batches made ahead: the same ones however many wait, errors where they are wanted, and an end that never hangs."""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from tensordict import TensorDict

from lib.data.batch import Plan, batch_at, cursor_of, cursor_tree
from lib.data.rows import Cursor
from lib.errors import DataError
from lib.run import feed as module
from lib.run.feed import feed
from tests.unit.test_data_batch import laid

STREAM = laid([b"some text %d" % n for n in range(30)])


def make(cursor: Cursor) -> TensorDict:
    return batch_at(STREAM, Plan(4, 8, 2), 5, cursor)


def counted(
    calls: list[int], *, fail_at: int = -1, wait: Callable[[], object] = bool
) -> Callable[[Cursor], TensorDict]:
    """Number the batches from the cursor on."""

    def make_one(cursor: Cursor) -> TensorDict:
        wait()
        if cursor.row == fail_at:
            raise DataError(f"row {fail_at} is bad")
        calls.append(cursor.row)
        return TensorDict({"row": torch.tensor(cursor.row), "cursor": cursor_tree(Cursor(0, cursor.row + 1))})

    return make_one


def threads() -> int:
    return sum(thread.name == "feed" for thread in threading.enumerate())


def test_batches_do_not_depend_on_how_many_are_made_ahead() -> None:
    runs = []
    for ahead in (0, 1, 2, 7):
        with feed(make, Cursor(0, 3), ahead=ahead) as batches:
            runs.append(list(islice(batches, 40)))
    assert cursor_of(runs[0][-1]["cursor"]).epoch > 1
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            assert (a == b).all()


def test_going_on_from_the_last_batch_that_was_used_repeats_and_misses_nothing() -> None:
    with feed(make, Cursor(0, 0), ahead=3) as batches:
        whole = list(islice(batches, 12))
    for stop in range(1, 12):
        with feed(make, Cursor(0, 0), ahead=3) as batches:
            head = list(islice(batches, stop))
        with feed(make, cursor_of(head[-1]["cursor"]), ahead=2) as batches:
            tail = list(islice(batches, 12 - stop))
        for a, b in zip(whole, head + tail, strict=True):
            assert (a == b).all()


def test_no_more_than_asked_for_is_made_ahead() -> None:
    calls: list[int] = []
    with feed(counted(calls), Cursor(0, 0), ahead=3) as batches:
        next(batches)
        for _ in range(500):
            if len(calls) == 5:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        # One was used, three wait, and one more is held by the thread until there is room.
        assert len(calls) == 5
    calls.clear()
    with feed(counted(calls), Cursor(0, 0), ahead=0) as batches:
        next(batches)
        assert calls == [0]
        assert threads() == 0


def test_batches_are_made_while_the_step_works() -> None:
    with feed(counted([], wait=lambda: time.sleep(0.02)), Cursor(0, 0), ahead=4) as batches:
        next(batches)
        time.sleep(0.5)
        begin = time.perf_counter()
        for _ in range(4):
            next(batches)
        assert time.perf_counter() - begin < 0.06  # made when they are asked for, it would be 0.08 at least


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_an_error_is_raised_where_the_batch_was_wanted_with_its_own_traceback(ahead: int) -> None:
    calls: list[int] = []
    with feed(counted(calls, fail_at=2), Cursor(0, 0), ahead=ahead) as batches:
        assert [next(batches)["row"].item() for _ in range(2)] == [0, 1]
        with pytest.raises(DataError, match=r"^row 2 is bad$") as caught:
            next(batches)
    assert "make_one" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert calls == [0, 1]
    assert threads() == 0


def interrupted(ahead: int, used: int) -> None:
    with feed(make, Cursor(0, 0), ahead=ahead) as batches:
        list(islice(batches, used))
        raise KeyboardInterrupt


@pytest.mark.parametrize("used", [0, 1, 5])
@pytest.mark.parametrize("ahead", [1, 3])
def test_leaving_at_any_time_ends_the_thread(ahead: int, used: int) -> None:
    begin = time.perf_counter()
    with feed(make, Cursor(0, 0), ahead=ahead) as batches:
        list(islice(batches, used))
    assert threads() == 0
    with pytest.raises(KeyboardInterrupt):
        interrupted(ahead, used)
    assert threads() == 0
    assert time.perf_counter() - begin < 1


def test_an_error_that_nobody_asked_for_is_not_raised_on_leaving() -> None:
    with feed(counted([], fail_at=2), Cursor(0, 0), ahead=1) as batches:
        next(batches)
        time.sleep(0.05)
    assert threads() == 0


def test_a_read_that_never_returns_is_left_behind_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    release = threading.Event()
    message = "feed: a batch was not made within 0.2 s; its reader is left behind"
    with (
        pytest.warns(UserWarning, match=f"^{re.escape(message)}$"),
        feed(counted([], wait=release.wait), Cursor(0, 0), ahead=1),
    ):
        time.sleep(0.05)
    release.set()


def test_a_negative_number_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^data\.ahead=-1 must be >= 0$"), feed(make, Cursor(0, 0), ahead=-1):
        pass
