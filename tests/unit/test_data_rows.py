"""Rows and the cursor: worked examples, counts past 2**31, each error in full."""

from __future__ import annotations

import re

import pytest

from lib.data.rows import Cursor, advance, count, first, ordinal, require, seek, starts
from lib.errors import DataError


def test_thirteen_ids_make_rows_of_four_that_lose_nothing() -> None:
    # "abc", "de", "fghij" with their end marks are 13 ids: rows at 0, 4, 8, 12, and 12 runs on into the next epoch.
    assert [count(epoch, size=13, length=4) for epoch in range(5)] == [4, 3, 3, 3, 4]
    assert [first(epoch, size=13, length=4) for epoch in range(5)] == [0, 4, 7, 10, 13]
    assert sorted(starts(Cursor(0, 0), 4, size=13, length=4, seed=0).tolist()) == [0, 4, 8, 12]
    assert sorted(starts(Cursor(1, 0), 3, size=13, length=4, seed=0).tolist()) == [3, 7, 11]


def test_an_epoch_is_visited_in_an_order_of_its_own() -> None:
    size, length = 20 * 8, 8
    orders = [starts(Cursor(epoch, 0), 20, size=size, length=length, seed=0).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(0, size, length)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] != starts(Cursor(0, 0), 20, size=size, length=length, seed=1).tolist()


def test_going_on_in_the_middle_of_an_epoch_repeats_and_misses_nothing() -> None:
    whole = starts(Cursor(0, 0), 20, size=160, length=8, seed=4).tolist()
    rest = starts(Cursor(0, 8), 12, size=160, length=8, seed=4).tolist()
    assert whole[8:] == rest
    assert len(set(whole)) == 20


def test_both_epochs_after_a_resume_are_whole() -> None:
    # 20 rows, batches of 4, resumed at update 2: each later epoch still has its 20 rows.
    at = advance(Cursor(0, 0), 8, size=160, length=8)
    rows = starts(at, 12 + 20 + 20, size=160, length=8, seed=0).tolist()
    assert len(set(rows[12:32])) == len(set(rows[32:])) == 20


def test_the_end_of_an_epoch_has_one_normal_form() -> None:
    assert seek(0, size=160, length=8) == Cursor(0, 0)
    assert seek(20, size=160, length=8) == Cursor(1, 0)
    assert advance(Cursor(0, 20), 0, size=160, length=8) == Cursor(1, 0)
    assert advance(Cursor(1, 0), -1, size=160, length=8) == Cursor(0, 19)
    assert (
        starts(Cursor(0, 20), 5, size=160, length=8, seed=0).tolist()
        == starts(Cursor(1, 0), 5, size=160, length=8, seed=0).tolist()
    )


def test_counts_beyond_the_reach_of_small_integers_stay_exact() -> None:
    size, length = 10**12 + 7, 2048
    rows = 10**17 + 1
    at = seek(rows, size=size, length=length)
    assert at.epoch == rows * length // size
    assert ordinal(at, size=size, length=length) == rows
    begin = starts(at, 3, size=size, length=length, seed=0)
    assert begin.dtype.name == "int64"
    assert begin.min() >= 0
    assert begin.max() < size
    assert seek(2**31 + 15, size=2**31 + 10, length=1) == Cursor(1, 5)


def test_rows_of_one_id_and_rows_of_all_but_one() -> None:
    assert sorted(starts(Cursor(0, 0), 2, size=2, length=1, seed=0).tolist()) == [0, 1]
    # Nine ids, rows of eight: one row an epoch, and every eighth epoch a second one.
    assert [count(epoch, size=9, length=8) for epoch in range(9)] == [2, 1, 1, 1, 1, 1, 1, 1, 2]
    assert starts(Cursor(0, 0), 3, size=9, length=8, seed=0).tolist() in ([0, 8, 7], [8, 0, 7])


def test_no_rows_are_no_rows() -> None:
    assert starts(Cursor(0, 3), 0, size=160, length=8, seed=0).tolist() == []


def test_a_stream_shorter_than_a_row_is_refused() -> None:
    message = "training text: have 8 ids, need batch.length+1=9; give more text or lower batch.length"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        require(8, 8)
    require(9, 8)
    message = "data.sources.code: have 8 ids, need batch.length+1=9; give more text or lower batch.length"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        require(8, 8, "code")
    message = "training text: have 7 ids, need batch.length+1=9; give more text or lower batch.length"
    for call in (lambda: seek(0, size=7, length=8), lambda: starts(Cursor(0, 0), 1, size=7, length=8, seed=0)):
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            call()


def test_a_stream_of_one_row_has_it_once_an_epoch() -> None:
    assert [seek(n, size=8, length=8) for n in range(3)] == [Cursor(0, 0), Cursor(1, 0), Cursor(2, 0)]
    assert starts(Cursor(0, 0), 3, size=1, length=1, seed=0).tolist() == [0, 0, 0]


def test_a_place_before_the_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rows=-1 must be >= 0$"):
        advance(Cursor(0, 2), -3, size=160, length=8)
    with pytest.raises(ValueError, match=r"^cursor=\(0, -1\) must not be negative$"):
        starts(Cursor(0, -1), 1, size=160, length=8, seed=0)
