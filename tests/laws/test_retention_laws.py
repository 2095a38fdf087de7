"""Retention: whatever is committed and whatever the policy, what has to stay stays, and nothing else does."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lib.store.retention import Policy, Saved, retain

# Few steps, two of them large, so that rules meet and scores are of what is there.
STEPS = st.integers(0, 25).map(lambda n: n if n < 24 else 10**12 - n)
# Quarters of seconds: their quotients are exact enough that no floor of a float differs from that of a fraction.
TIMES = st.sampled_from([*(n / 4 for n in range(-20, 40)), *[None, math.nan, math.inf, -math.inf] * 3])
NAMED = st.frozensets(STEPS, max_size=3)
VALUES = st.sampled_from([0, 0.0, 0.5, 1, 1.0, 2.0, 3.0, -1.5, 1e300, math.nan, math.inf, -math.inf])
SCORES = st.sampled_from([0, 18, 24]).flatmap(lambda least: st.dictionaries(STEPS, VALUES, min_size=least))
SAVED = st.builds(Saved, STEPS, TIMES, st.sampled_from([False, False, True]))
COMMITTED = st.sampled_from([0, 8, 12]).flatmap(
    lambda least: st.lists(SAVED, unique_by=lambda one: one.step, min_size=least, max_size=20)
)
# Every rule hides others, and without `last` no permanent one goes: so most policies have few rules, and `last`.
LAST = st.sampled_from([1, 1, 1, 2, 3, 5, None])
EVERY = st.sampled_from([None, None, None, 1, 3, 4, 7])
EVERY_S = st.sampled_from([None, None, None, 0.25, 2.5, 7.0, 10.0])
BEST = st.sampled_from([None, None, None, 1, 2, 3, 5])


def policies(last: st.SearchStrategy[int | None] = LAST) -> st.SearchStrategy[Policy]:
    return st.builds(Policy, last, EVERY, EVERY_S, BEST, NAMED)


def steps(committed: Collection[Saved]) -> set[int]:
    return {one.step for one in committed}


def left(committed: list[Saved], policy: Policy, scores: Mapping[int, float], pinned: Collection[int]) -> list[Saved]:
    gone = retain(committed, policy, scores=scores, pinned=pinned)
    return [one for one in committed if one.step not in gone]


def by_hand(
    one: Saved, there: list[Saved], policy: Policy, scores: Mapping[int, float], pinned: Collection[int]
) -> bool:
    """Whether one stays, told by counting those that go before it."""
    if one.step in policy.steps or one.step in pinned or all(other.step <= one.step for other in there):
        return True
    if one.temporary:
        return False
    others = [other for other in there if not other.temporary and other.step != one.step]

    def stretch(saved: Saved) -> int | None:
        if policy.every_s is None or saved.saved_at_s is None or not abs(saved.saved_at_s) < math.inf:
            return None
        return Fraction(saved.saved_at_s) // Fraction(policy.every_s)

    def score(saved: Saved) -> tuple[float, int] | None:
        value = scores.get(saved.step, math.nan)
        return (value, saved.step) if abs(value) < math.inf else None

    mine, value = stretch(one), score(one)
    newest = policy.last is None or sum(other.step > one.step for other in others) < policy.last
    multiple = policy.every is not None and one.step // policy.every * policy.every == one.step
    first = policy.every_s is not None and (
        mine is None or not any(stretch(other) == mine and other.step < one.step for other in others)
    )
    best = policy.best is not None and (
        value is not None and sum((score(other) or (math.inf, 0)) < value for other in others) < policy.best
    )
    return newest or multiple or first or best


@given(committed=COMMITTED, policy=policies(), scores=SCORES, pinned=NAMED)
def test_what_stays_is_what_the_rules_say_one_by_one(
    committed: list[Saved], policy: Policy, scores: dict[int, float], pinned: frozenset[int]
) -> None:
    stay = [one for one in committed if by_hand(one, committed, policy, scores, pinned)]
    assert left(committed, policy, scores, pinned) == stay


@given(committed=COMMITTED, policy=policies(), scores=SCORES, pinned=NAMED)
def test_the_greatest_the_named_and_the_pinned_never_go_and_only_what_is_there_does(
    committed: list[Saved], policy: Policy, scores: dict[int, float], pinned: frozenset[int]
) -> None:
    gone = retain(committed, policy, scores=scores, pinned=pinned)
    assert gone <= steps(committed)
    assert not gone & policy.steps
    assert not gone & pinned
    assert not committed or max(steps(committed)) not in gone


@given(committed=COMMITTED, policy=policies(), scores=SCORES, pinned=NAMED)
def test_at_most_one_temporary_one_stays_unasked_and_it_is_the_greatest(
    committed: list[Saved], policy: Policy, scores: dict[int, float], pinned: frozenset[int]
) -> None:
    stay = {one.step for one in left(committed, policy, scores, pinned) if one.temporary}
    unasked = stay - policy.steps - pinned
    assert not unasked or unasked == {max(steps(committed))}


@given(committed=COMMITTED, rules=policies(last=st.none()), scores=SCORES, pinned=NAMED)
def test_without_last_no_permanent_one_goes(
    committed: list[Saved], rules: Policy, scores: dict[int, float], pinned: frozenset[int]
) -> None:
    gone = retain(committed, rules, scores=scores, pinned=pinned)
    assert all(one.temporary for one in committed if one.step in gone)
    assert gone == retain(committed, Policy(steps=rules.steps), pinned=pinned)


@given(
    committed=COMMITTED,
    policy=policies(last=st.integers(1, 5)),
    more=policies(),
    by=st.integers(0, 3),
    scores=SCORES,
    pins=st.tuples(NAMED, NAMED),
)
def test_a_rule_more_or_a_count_raised_never_deletes_more(
    committed: list[Saved],
    policy: Policy,
    more: Policy,
    by: int,
    scores: dict[int, float],
    pins: tuple[frozenset[int], frozenset[int]],
) -> None:
    assert policy.last is not None
    looser = Policy(
        last=None if more.last is None else policy.last + by,
        every=more.every if policy.every is None else policy.every,
        every_s=more.every_s if policy.every_s is None else policy.every_s,
        best=more.best if policy.best is None else policy.best + by,
        steps=policy.steps | more.steps,
    )
    before = retain(committed, policy, scores=scores, pinned=pins[0])
    # One change at a time, then all of them: what one rule adds, another must not hide.
    for field, value in zip(Policy._fields, looser, strict=True):
        assert retain(committed, policy._replace(**{field: value}), scores=scores, pinned=pins[0]) <= before
    assert retain(committed, policy, scores=scores, pinned=pins[0] | pins[1]) <= before
    assert retain(committed, looser, scores=scores, pinned=pins[0] | pins[1]) <= before


@given(committed=COMMITTED, policy=policies(), scores=SCORES, pinned=NAMED)
def test_of_what_is_left_nothing_goes(
    committed: list[Saved], policy: Policy, scores: dict[int, float], pinned: frozenset[int]
) -> None:
    stay = left(committed, policy, scores, pinned)
    assert retain(stay, policy, scores=scores, pinned=pinned) == set()


@given(committed=COMMITTED, policy=policies(), scores=SCORES, pinned=NAMED, data=st.data())
def test_the_order_in_which_they_come_does_not_matter_and_nothing_given_is_changed(
    committed: list[Saved], policy: Policy, scores: dict[int, float], pinned: frozenset[int], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(committed))
    turned = dict(reversed(scores.items()))
    pins, before = set(pinned), repr((shuffled, turned, pinned, policy))
    gone = retain(committed, policy, scores=scores, pinned=pinned)
    assert retain(shuffled, policy, scores=turned, pinned=pins) == gone
    assert retain(tuple(shuffled), policy, scores=turned, pinned=sorted(pins)) == gone
    assert repr((shuffled, turned, pinned, policy)) == before
    assert pins == pinned


@given(history=COMMITTED, policy=policies(), scores=SCORES, pinned=NAMED)
def test_a_growing_run_never_loses_what_a_rule_keeps_and_ends_as_if_looked_at_once(
    history: list[Saved], policy: Policy, scores: dict[int, float], pinned: frozenset[int]
) -> None:
    history = sorted(history)
    there: list[Saved] = []
    for n, one in enumerate(history, start=1):
        there = left([*there, one], policy, scores, pinned)
        seen, stay = history[:n], steps(there)
        assert one.step in stay
        assert steps(seen) & policy.steps <= stay
        if policy.every is not None:
            assert {old.step for old in seen if not old.temporary and old.step % policy.every == 0} <= stay
        assert there == left(seen, policy, scores, pinned)


@given(history=COMMITTED, policy=policies(last=st.integers(1, 5)), data=st.data())
def test_multiples_firsts_and_names_are_never_lost_while_scores_and_pins_come_and_go(
    history: list[Saved], policy: Policy, data: st.DataObject
) -> None:
    history = sorted(history)
    firsts = policy._replace(every=None, best=None, last=1, steps=frozenset())
    there: list[Saved] = []
    for n, one in enumerate(history, start=1):
        there = left([*there, one], policy, data.draw(SCORES), data.draw(NAMED))
        seen, stay = history[:n], steps(there)
        assert steps(seen) & policy.steps <= stay
        assert steps(left(seen, firsts, {}, ())) <= stay
        if policy.every is not None:
            assert {old.step for old in seen if not old.temporary and old.step % policy.every == 0} <= stay
