"""Held-out rows: worked examples of one stream and of several, the limit, and each message in full."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lib.data.batch import cursor_of, heldout_batches
from lib.data.heldout import heldout_arrays
from lib.data.plan import Plan
from lib.errors import DataError
from tests.streams import flat, laid, numbered

THREE = laid([b"abc", b"de", b"fghij"])


def test_rows_come_in_order_and_the_last_is_padded() -> None:
    batches = list(heldout_arrays([THREE], Plan(4, 5, 2)))
    assert [batch["inputs"].shape for batch in batches] == [(1, 2, 5), (1, 2, 5)]
    assert flat(batches[0], "inputs") == [[101, 102, 103, 2, 104], [105, 2, 106, 107, 108]]
    assert flat(batches[1], "inputs") == [[109, 110, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert flat(batches[1], "targets") == [[110, 2, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert flat(batches[1], "mask") == [[True, True, False, False, False], [False] * 5]
    assert flat(batches[1], "segments") == [[0, 0, 1, 1, 1], [0] * 5]
    assert flat(batches[1], "bytes") == [1, 0]


def test_streams_follow_one_another_and_share_no_row() -> None:
    batches = list(heldout_arrays([laid([b"abcd"]), laid([b""]), laid([b"xyz"])], Plan(3, 3)))
    assert len(batches) == 1  # the second has no target and is passed over
    assert flat(batches[0], "targets") == [[102, 103, 104], [2, 0, 0], [125, 126, 2]]
    assert flat(batches[0], "inputs")[2] == [124, 125, 126]


def test_an_evaluation_moves_no_cursor_and_is_of_the_full_shape_whatever_the_plan_of_the_run() -> None:
    plan = Plan(4, 6, 2, mode="pack", rows_at=((0, 8),), length_at=((0, 3),), repeats=3)
    batches = list(heldout_batches([laid([b"aaaaaaaaaaa"])], plan))
    assert [batch["inputs"].shape for batch in batches] == [(1, 2, 6)]
    assert batches[0]["mask"].sum() == 11
    assert cursor_of(batches[0]["cursor"]) == {}


def test_a_limit_takes_rows_spread_evenly_the_same_each_time() -> None:
    sides = [numbered([51]), numbered([50])]  # five rows of ten, and five
    few = [list(heldout_arrays(sides, Plan(3, 10), limit=4)) for _ in range(2)]
    first = [
        row[0]
        for batch in few[0]
        for row, good in zip(flat(batch, "inputs"), flat(batch, "mask"), strict=True)
        if good[0]
    ]
    assert first == [1, 21, 1, 21]
    for a, b in zip(*few, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    assert (
        len(list(heldout_arrays(sides, Plan(3, 10), limit=1000))) == len(list(heldout_arrays(sides, Plan(3, 10)))) == 4
    )


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^limit=0 must be >= 1 rows, or none for all$"):
        next(heldout_arrays([THREE], Plan(1, 4), limit=0))
    message = "held-out text: have 1 ids, need 2; raise data.holdout or give more text"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        next(heldout_arrays([laid([b""]), laid([b""])], Plan(1, 4)))
