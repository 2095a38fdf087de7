"""The schedule: a closed form of the update's number, whatever came before, at every update and past the end."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.config import Schedule
from lib.state import init_state
from lib.state.schedule import factor
from tests.strategies import PLAIN, changed, gradients, own, rebuilt

UPDATES = st.one_of(st.integers(1, 60), st.integers(1, 2**53))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    length = draw(st.integers(1, 50))
    return Schedule(
        shape=draw(st.sampled_from(["constant", "linear", "cosine"])),
        warmup=draw(st.integers(0, length - 1)),
        length=length,
        floor=draw(st.floats(0, 1)),
    )


def by_hand(u: int, s: Schedule) -> float:
    assert s.length is not None
    if u <= s.warmup:
        return u / s.warmup
    if s.shape == "constant":
        return 1.0
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
    assert schedule.length is not None
    end = 1.0 if schedule.shape == "constant" else schedule.floor
    if schedule.warmup < schedule.length:
        assert factors(schedule, [schedule.length + 1 + far]) == [end]


@given(schedule=schedules(), updates=st.lists(UPDATES, min_size=1, max_size=6))
def test_each_updates_factor_is_its_own(schedule: Schedule, updates: list[int]) -> None:
    assert factors(schedule, updates) == [factor(torch.tensor(u), schedule).item() for u in updates]


@given(schedule=schedules(), position=st.integers(0, 2**53 - 1), peak=st.floats(1e-6, 10), micro=st.integers(1, 3))
def test_the_rate_of_an_update_is_a_function_of_the_position_restored(
    schedule: Schedule, position: int, peak: float, micro: int
) -> None:
    """Nothing but the two leaves counts: not the step, nor how often the state was rebuilt, nor the recipe's own peak."""
    state = init_state(own(lr=1.0, schedule=schedule), params={"w": torch.tensor(1.0)})
    moved = changed(state, scheduler__position=position, scheduler__lr=peak, step=77)
    batch = gradients(*({"w": 1.0},) * micro)
    new, metrics = PLAIN(rebuilt(rebuilt(moved)), batch)
    assert metrics["lr"].item() == pytest.approx(peak * by_hand(position + 1, schedule), rel=1e-12, abs=1e-15)
    assert new["scheduler", "position"].item() == position + 1
    assert new["scheduler", "lr"].item() == peak
