"""Mixtures: worked blocks, fixed orders, passes over a source, and each message in full."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from lib.data.mix import Mix, check_repeats, counts, deal, mix_of, passes
from lib.data.plan import Plan
from lib.data.source import Source
from tests.streams import numbered, source_of

FIXED = [0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0]


def sources(*weights: Any) -> list[Source]:
    return [Source("abc"[n], numbered([100]), weight) for n, weight in enumerate(weights)]


@pytest.mark.parametrize(("weights", "shares"), [
    ((1,), (64,)),
    ((1, 1), (32, 32)),
    ((0.7, 0.3), (42, 18)),  # as decimals: 7 and 3 of ten, in a block of sixty
    (("2/3", "1/3"), (42, 21)),
    ((0.1, 0.2, "0.7"), (6, 12, 42)),
    ((Fraction(1, 4095), Fraction(4094, 4095)), (1, 4094)),
    (("0.3333", "0.3333", "0.3334"), (1365, 1365, 1366)),  # a denominator of 10 000: by largest remainders
    ((1e-3, 0.999), (1, 999)),
])  # fmt: skip
def test_weights_become_whole_rows_of_a_block(weights: tuple[Any, ...], shares: tuple[int, ...]) -> None:
    assert mix_of(sources(*weights)).shares == shares


def test_the_order_of_a_block_is_fixed_for_ever() -> None:
    mix = Mix((6, 3))
    assert mix.block == 9
    assert deal(mix, 0, 18, 7).tolist() == FIXED
    assert deal(mix, 5, 10, 7).tolist() == FIXED[5:15]
    assert deal(mix, 3, 0, 7).tolist() == []
    assert [counts(mix, row, 7) for row in (0, 9, 18)] == [(0, 0), (6, 3), (12, 6)]
    assert deal(mix, 0, 18, 8).tolist() != FIXED
    assert FIXED[:9] != FIXED[9:]


def test_counts_far_out_are_exact() -> None:
    assert counts(Mix((6, 3)), 9 * 10**17, 1) == (6 * 10**17, 3 * 10**17)
    assert sum(counts(Mix((6, 3)), 10**18 + 5, 1)) == 10**18 + 5


def test_the_order_in_a_block_is_drawn_evenly() -> None:
    mix, places = Mix((1, 5)), np.zeros(6)
    for block in range(600):
        places += deal(mix, block * 6, 6, 3) == 0
    assert ((places - 100) ** 2 / 100).sum() < 20.5  # chi-square, 5 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("weights", "message"), [
    ((1, 0), "data.sources.b.weight=0 must be a number above 0"),
    ((-0.5, 1), "data.sources.a.weight=-0.5 must be a number above 0"),
    ((float("nan"), 1), "data.sources.a.weight=nan must be a number above 0"),
    ((1, float("inf")), "data.sources.b.weight=inf must be a number above 0"),
    ((1, "much"), "data.sources.b.weight=much must be a number above 0"),
    ((1, "1/0"), "data.sources.b.weight=1/0 must be a number above 0"),
    ((1, 1e-6), "data.sources.b.weight=1e-06 must be at least 0.000244; raise it"),
])  # fmt: skip
def test_a_weight_that_gives_no_row_is_refused(weights: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mix_of(sources(*weights))


def test_passes_are_counted_in_the_ids_of_a_stream_or_the_rows_of_a_table() -> None:
    plan = Plan(4, 8)
    mixed = [source_of("a", numbered([100]), plan), source_of("b", numbered([20, 30]), plan)]
    assert passes(mixed, plan, 64, 0) == {"a": Fraction(32 * 8, 100), "b": Fraction(32 * 8, 50)}
    packed = plan._replace(mode="pack")
    mixed = [source_of("a", numbered([100]), packed), source_of("b", numbered([20, 30]), packed)]
    assert passes(mixed, packed, 64, 0) == {"a": Fraction(32, 13), "b": Fraction(32, 7)}


def test_a_source_that_would_be_read_too_often_is_refused_before_the_first_step() -> None:
    plan = Plan(4, 8)
    mixed = [source_of("a", numbered([100]), plan), source_of("code", numbered([20, 30]), plan)]
    check_repeats(mixed, plan, {}, rows=10**6, seed=0)
    check_repeats(mixed, plan, {"a": None, "code": 5.12}, rows=64, seed=0)
    message = (
        "data.sources.code.repeat=5 must be at least 5.12, which is how often the 64 rows of this run read it; "
        "raise it, give more text, or lower the weight or steps"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_repeats(mixed, plan, {"a": 3, "code": 5}, rows=64, seed=0)
    with pytest.raises(ValueError, match=r"^data\.sources\.a\.repeat=1\.0 must be at least 1\.01, "):
        check_repeats([source_of("a", numbered([799]), plan)], plan, {"a": 1.0}, rows=100, seed=0)
