"""Retention: what each rule keeps, by hand, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import pytest

from lib.store.retention import Policy, Saved, retain
from tests.strategies import refusal

NONE: Mapping[int, float] = {}


def stay(
    committed: list[Saved], policy: Policy, scores: Mapping[int, float] = NONE, pinned: Collection[int] = ()
) -> list[int]:
    """The steps that are left, in order."""
    return sorted({one.step for one in committed} - retain(committed, policy, scores=scores, pinned=pinned))


def saved(*steps: int) -> list[Saved]:
    return [Saved(step) for step in steps]


def temporary(*steps: int) -> list[Saved]:
    return [Saved(step, temporary=True) for step in steps]


def timed(times: dict[int, float | None]) -> list[Saved]:
    return [Saved(step, at) for step, at in times.items()]


# The n newest ---------------------------------------------------------------------------------------------------------


def test_nothing_committed_is_nothing_to_delete() -> None:
    assert retain([], Policy()) == set()
    assert retain([], Policy(last=1, every=1, every_s=1.0, best=1, steps=frozenset({3})), pinned=[3]) == set()


def test_order_is_by_number_never_by_text_or_place() -> None:
    assert stay(saved(9999, 10000, 8000), Policy(last=2)) == [9999, 10000]
    assert stay(saved(9999, 10000, 8000), Policy(last=1)) == [10000]
    assert stay(saved(9999, 10000, 8000), Policy(last=9)) == [8000, 9999, 10000]


def test_without_last_all_permanent_ones_stay_whatever_else_is_set() -> None:
    for policy in (Policy(), Policy(every=2), Policy(every_s=1e9), Policy(best=1), Policy(steps=frozenset({1}))):
        assert stay([*timed({1: 0.0, 2: 1.0, 3: None}), *temporary(0)], policy, {2: 0.5}) == [1, 2, 3]


# Each rule by itself and together -------------------------------------------------------------------------------------


def test_multiples_stay_and_0_is_one() -> None:
    assert stay(saved(0, 5, 10, 15, 20, 23), Policy(last=1, every=10)) == [0, 10, 20, 23]
    assert stay(saved(0, 5, 10), Policy(last=1, every=1)) == [0, 5, 10]


def test_the_first_of_each_stretch_of_time_stays() -> None:
    times = {1: 3599.0, 2: 3600.0, 3: 7199.5, 4: 7200.0, 5: 7300.0, 6: 18000.0, 7: 18001.0}
    assert stay(timed(times), Policy(last=1, every_s=3600.0)) == [1, 2, 4, 6, 7]
    assert stay(timed({1: -0.5, 2: 0.0, 3: 0.5, 4: 0.6}), Policy(last=1, every_s=1.0)) == [1, 2, 4]


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, -math.inf, 1.7e308])
def test_one_whose_time_is_not_known_stays_and_is_the_first_of_nothing(unknown: float | None) -> None:
    times = {1: unknown, 2: 0.0, 3: 0.1, 4: unknown, 5: 0.2}
    assert stay(timed(times), Policy(last=1, every_s=0.25)) == [1, 2, 4, 5]


def test_a_clock_set_back_lets_no_newer_one_push_out_an_older_one() -> None:
    assert stay(timed({1: 50.0, 2: 10.0, 3: 120.0}), Policy(last=1, every_s=100.0)) == [1, 3]


def test_the_best_stay_as_scores_come_in() -> None:
    policy = Policy(last=1, best=2)
    scores = {1: 3.0, 2: 1.0, 3: 2.0}
    assert stay(saved(1, 2, 3), policy, scores) == [2, 3]
    scores[4] = 1.5
    assert stay(saved(2, 3, 4), policy, scores) == [2, 4]
    scores[5] = math.nan
    assert stay(saved(2, 4, 5), policy, scores) == [2, 4, 5]
    scores[6] = 1.2
    assert stay(saved(2, 4, 5, 6), policy, scores) == [2, 6]


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_score_that_is_not_finite_is_never_best_and_evicts_nothing(spoilt: float, at: int) -> None:
    scores = {1: 2.0, 2: 2.0, 3: 2.0, at: spoilt}
    assert stay(saved(1, 2, 3, 4), Policy(last=1, best=2), scores) == sorted({1, 2, 3, 4} - {at})


def test_one_without_a_score_is_never_best() -> None:
    assert stay(saved(1, 2, 3), Policy(last=1, best=3), {2: 9.0}) == [2, 3]
    assert stay(saved(1, 2, 3), Policy(last=1, best=3)) == [3]


def test_of_equal_scores_the_smaller_step_is_better() -> None:
    assert stay(saved(3, 1, 2, 9), Policy(last=1, best=2), {3: 1.0, 2: 1.0, 1: 1.0}) == [1, 2, 9]
    assert stay(saved(1, 2, 9), Policy(last=1, best=1), {2: -0.0, 1: 0.0}) == [1, 9]


def test_scores_of_what_is_gone_take_no_place() -> None:
    assert stay(saved(3, 4, 9), Policy(last=1, best=1), {1: 0.0, 2: 0.0, 3: 2.0, 4: 1.0}) == [4, 9]


def test_named_and_pinned_ones_stay_and_need_not_be_there() -> None:
    assert stay(saved(1, 2, 3, 4), Policy(last=1, steps=frozenset({1, 77}))) == [1, 4]
    assert stay(saved(1, 2, 3, 4), Policy(last=1), pinned=[2, 77]) == [2, 4]


def test_one_goes_only_when_no_rule_keeps_it() -> None:
    times = {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0, 5: 110.0, 6: 120.0, 7: 130.0, 8: 140.0, 9: 150.0}
    policy = Policy(last=2, every=4, every_s=100.0, best=1, steps=frozenset({2}))
    # newest 8 9; multiples 4 8; firsts 1 5; best 6; named 2; pinned 7
    assert stay(timed(times), policy, {6: 0.1, 3: 0.2}, {7}) == [1, 2, 4, 5, 6, 7, 8, 9]


# Temporary ones -------------------------------------------------------------------------------------------------------


def test_only_the_newest_temporary_one_stays_and_only_while_it_is_the_newest_of_all() -> None:
    assert stay([*saved(10), *temporary(11, 12)], Policy(last=1)) == [10, 12]
    assert stay([*saved(10, 13), *temporary(12)], Policy(last=2)) == [10, 13]
    assert stay([*saved(10, 13), *temporary(12)], Policy()) == [10, 13]
    assert stay(temporary(1, 2, 3), Policy()) == [3]


def test_temporary_ones_take_no_place_among_the_newest() -> None:
    assert stay([*saved(10, 20, 30), *temporary(31, 32)], Policy(last=2)) == [20, 30, 32]


def test_no_rule_but_a_name_or_a_pin_looks_at_temporary_ones() -> None:
    committed = [Saved(4, 0.0, True), Saved(5, 1.0), Saved(6, 2.0, True), Saved(7, 3.0), Saved(8, 100.0)]
    policy = Policy(last=1, every=2, every_s=50.0, best=1)
    assert stay(committed, policy, {4: 0.0, 6: 0.1, 7: 0.5}) == [5, 7, 8]
    assert stay(committed, policy._replace(steps=frozenset({4})), {7: 0.5}, [6]) == [4, 5, 6, 7, 8]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_1_is_refused(count: int) -> None:
    said = {
        Policy(last=count): f"checkpoint.keep={count} must be at least 1; set checkpoint.keep=1, or none to keep all",
        Policy(every=count): f"checkpoint.keep_every={count} must be at least 1; "
        "set checkpoint.keep_every=1, or none for no such rule",
        Policy(best=count): f"checkpoint.keep_best={count} must be at least 1; "
        "set checkpoint.keep_best=1, or none for no such rule",
    }
    for policy, message in said.items():
        assert refusal(retain, saved(1), policy) == message
        assert refusal(retain, [], policy) == message


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0"), (0.0, "0.0"), (-1.5, "-1.5"), (math.nan, "nan"), (math.inf, "inf")]
)
def test_a_stretch_that_is_no_time_is_refused(seconds: float, shown: str) -> None:
    message = (
        f"checkpoint.keep_every_s={shown} must be above 0 and finite; "
        "set checkpoint.keep_every_s=3600, or none for no such rule"
    )
    assert refusal(retain, saved(1), Policy(every_s=seconds)) == message


@pytest.mark.parametrize("policy", [Policy(), Policy(last=1)])
def test_a_step_that_is_there_twice_is_refused(policy: Policy) -> None:
    message = "committed: step 7 is there twice, must be there once; leave one of the two out"
    assert refusal(retain, saved(9, 7, 8, 7), policy) == message
    assert refusal(retain, [*saved(7), *temporary(7)], policy) == message
    assert refusal(retain, [Saved(7, 1.0), Saved(7, 2.0)], policy) == message


@pytest.mark.parametrize("policy", [Policy(), Policy(last=1)])
def test_a_negative_step_is_refused(policy: Policy) -> None:
    message = "committed: step -2 must be at least 0; a step is the number of updates taken"
    assert refusal(retain, saved(3, -2, -1), policy) == message
