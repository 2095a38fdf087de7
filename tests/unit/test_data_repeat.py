"""Rows that repeat: worked examples at the usual settings."""

from __future__ import annotations

import numpy as np

from lib.data.repeat import repeats


def test_thirty_two_times_in_a_row_is_often() -> None:
    spaces, lines = [36] * 40 + [5] * 60, [9, 8, 7] * 32 + [1] * 4
    varied = [n % 14 for n in range(100)]  # a period of fourteen is not looked for
    assert repeats(np.array([spaces, lines, varied]), 32).tolist() == [True, True, False]


def test_one_time_less_is_not() -> None:
    assert repeats(np.array([[7] * 31 + [1], [7] * 32]), 32).tolist() == [False, True]
    assert repeats(np.array([[1, 2, 1, 2, 1]]), 3).tolist() == [False]
    assert repeats(np.array([[1, 2, 1, 2, 1, 2]]), 3, longest=1).tolist() == [False]


def test_a_row_too_short_to_repeat_does_not() -> None:
    assert repeats(np.zeros((2, 3), np.int64), 4).tolist() == [False, False]
    assert repeats(np.zeros((2, 0), np.int64), 3).tolist() == [False, False]
    assert repeats(np.zeros((0, 9), np.int64), 3).tolist() == []


def test_axes_before_the_last_are_kept() -> None:
    ids = np.arange(24).reshape(2, 3, 4)
    ids[1, 2] = 5
    assert repeats(ids, 3).tolist() == [[False] * 3, [False, False, True]]
