"""The schedule: a closed form of the update's number, whatever came before, at every update and past the end."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st

from lib.config import Schedule
from lib.state import init_state
from lib.state.schedule import factor
from lib.testing.strategies import fitting
from lib.testing.trees import from_bytes
from tests.strategies import PLAIN, changed, gradients, own

UPDATES = st.one_of(st.integers(1, 60), st.integers(1, 2**53))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    length = draw(st.integers(1, 50))
    warmup = draw(st.integers(0, length - 1))
    shape = draw(st.sampled_from(["constant", "linear", "cosine"]))
    return fitting(shape=shape, warmup=warmup, length=length, floor=draw(st.floats(0, 1)))


SHAPES = tuple(shape for shape in get_args(get_type_hints(Schedule)["shape"]) if shape != "stages")


@st.composite
def any_schedules(draw: st.DrawFn, longest: int = 60, shortest: int = 1) -> tuple[Schedule, int]:
    """Whatever may be chosen, but for stages, and how long to look at it."""
    shape, length = draw(st.sampled_from(SHAPES)), draw(st.integers(shortest, longest))
    least = 1 if shape in ("inverse_sqrt", "power") else 0
    settings: dict[str, Any] = {
        "shape": shape,
        "warmup": 0 if shape == "range" else draw(st.integers(least, max(length // 2, least))),
    }
    if settings["warmup"]:
        settings["start"] = draw(st.floats(0, 0.99))
    if shape in ("cosine", "polynomial", "inverse_sqrt", "power"):
        settings["exponent"] = draw(st.none() | st.floats(0.5, 3))
    if shape in ("constant", "cosine", "inverse_sqrt", "power", "wsd"):
        settings["tail"] = draw(st.floats(0.02, 0.5) if shape == "wsd" else st.none() | st.floats(0.02, 0.5))
        if settings["tail"] is not None:
            settings["tail_shape"] = draw(st.sampled_from(["linear", "cosine", "sqrt", "reciprocal"]))
            settings["end"] = draw(st.none() | st.floats(0.01, 1))
    try:
        return fitting(**settings, length=length, floor=draw(st.floats(0.01, 1))), length
    except ValueError:  # a tail of no update, or one that begins within the warm-up
        reject()


def by_hand(u: int, s: Schedule) -> float:
    if u <= s.warmup:
        return u / s.warmup
    if s.shape == "constant":
        return 1.0
    assert s.length is not None
    if u >= s.length:
        return s.floor
    r = (u - s.warmup) / (s.length - s.warmup)
    return s.floor + (1 - s.floor) * ((1 - r) if s.shape == "linear" else (1 + math.cos(math.pi * r)) / 2)


def factors(s: Schedule, updates: list[int]) -> list[float]:
    return list(factor(torch.tensor(updates), s).tolist())


@given(schedule=schedules(), updates=st.lists(UPDATES, min_size=1, max_size=10))
def test_the_factor_is_its_closed_form(schedule: Schedule, updates: list[int]) -> None:
    assert factors(schedule, updates) == pytest.approx([by_hand(u, schedule) for u in updates], rel=1e-12, abs=1e-15)


@given(schedule=schedules())
def test_the_factor_rises_through_the_warm_up_and_never_after(schedule: Schedule) -> None:
    values = factors(schedule, list(range(1, 80)))
    top = schedule.warmup
    assert all(a < b for a, b in pairwise(values[:top]))
    assert all(a >= b - 1e-12 for a, b in pairwise(values[max(top - 1, 0) :]))
    assert top == 0 or values[top - 1] == 1.0
    if schedule.shape != "constant":
        assert min(values[top:]) == pytest.approx(schedule.floor)
    assert all(0 <= value <= 1 for value in values)


@given(schedule=schedules(), far=st.integers(0, 2**53))
def test_past_the_end_the_factor_stays_exactly_where_it_was(schedule: Schedule, far: int) -> None:
    end = 1.0 if schedule.shape == "constant" else schedule.floor
    assert factors(schedule, [(schedule.length or 50) + 1 + far]) == [end]


@given(schedule=schedules(), updates=st.lists(UPDATES, min_size=1, max_size=6))
def test_each_updates_factor_is_its_own(schedule: Schedule, updates: list[int]) -> None:
    assert factors(schedule, updates) == [factor(torch.tensor(u), schedule).item() for u in updates]


@given(drawn=any_schedules(), far=st.integers(1, 2**40), updates=st.lists(UPDATES, min_size=1, max_size=6))
def test_of_any_shape_the_factor_is_a_fraction_is_each_updates_own_and_stays_at_its_end(
    drawn: tuple[Schedule, int], far: int, updates: list[int]
) -> None:
    schedule, length = drawn
    values = factors(schedule, [*range(1, length + 1), *updates])
    assert all(0 <= value <= 1 for value in values)
    assert values[length:] == [factor(torch.tensor(u), schedule).item() for u in updates]
    if schedule.has_length or schedule.shape == "constant":
        assert factors(schedule, [length + far]) == factors(schedule, [length])
    else:  # a root falls for ever
        assert factors(schedule, [length + far])[0] <= values[length - 1]


@given(case=any_schedules(longest=2_000_000, shortest=1_000_000), data=st.data())
def test_no_shape_jumps_at_a_join_or_anywhere_else(case: tuple[Schedule, int], data: st.DataObject) -> None:
    (schedule, length), warmup = case, case[0].warmup or 0
    begin = length - round((schedule.tail or 0) * length)
    drawn = data.draw(st.lists(st.integers(1, length), min_size=1, max_size=20))
    for u in {warmup, begin, length, *drawn} - {0}:
        # Where it is long, an update moves it little: 1 / warmup at most on the way up, and a root at its begin.
        most = 1 / warmup if 0 < u <= warmup else 0.01 if u > begin or warmup == 0 else max(0.01, 3 / (warmup + 1))
        one, other = factors(schedule, [u, u + 1])
        assert abs(one - other) <= most + 0.01, (u, one, other)


@given(
    stages=st.lists(st.tuples(st.sampled_from(["linear", "cosine"]), st.integers(1, 9), st.floats(0, 1)), min_size=1)
)
def test_each_stage_ends_where_the_next_one_begins(stages: list[tuple[str, int, float]]) -> None:
    schedule = Schedule(shape="stages", stages=tuple(f"{shape}:{updates}:{to!r}" for shape, updates, to in stages))
    ends, at, level = [], 0, 0.0
    for shape, updates, to in stages:
        between = factors(schedule, list(range(at + 1, at + updates + 1)))
        assert all(min(level, to) - 1e-12 <= value <= max(level, to) + 1e-12 for value in between)
        if shape == "linear":
            assert between == pytest.approx([level + (to - level) * n / updates for n in range(1, updates + 1)])
        at, level = at + updates, to
        ends.append((at, to))
    assert factors(schedule, [u for u, _ in ends]) == pytest.approx([to for _, to in ends], abs=1e-12)
    assert factors(schedule, [at + 1, at + 10**9]) == [level, level]


@given(schedule=schedules(), position=st.integers(0, 2**53 - 1), peak=st.floats(1e-6, 10), micro=st.integers(1, 3))
def test_the_rate_of_an_update_is_a_function_of_the_position_restored(
    schedule: Schedule, position: int, peak: float, micro: int
) -> None:
    """Nothing but the two leaves counts: not the step, nor how often the state was from_bytes, nor the recipe's own peak."""
    state = init_state(own(lr=1.0, schedule=schedule), params={"w": torch.tensor(1.0)})
    moved = changed(state, scheduler__position=position, scheduler__lr=peak, step=77)
    batch = gradients(*({"w": 1.0},) * micro)
    new, metrics = PLAIN(from_bytes(from_bytes(moved)), batch)
    assert metrics["lr"].item() == pytest.approx(peak * by_hand(position + 1, schedule), rel=1e-12, abs=1e-15)
    assert new["scheduler", "position"].item() == position + 1
    assert new["scheduler", "lr"].item() == peak
