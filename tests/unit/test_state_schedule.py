"""The schedule: its worked values, its end and beyond, and the leaves that a run may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.config import Optim, Schedule
from lib.state import init_state, schedule
from tests.strategies import PLAIN, changed, gradients, memory, own, run

FX = Schedule(shape="cosine", warmup=4, length=12, floor=0.1)
FX_LR = [0.25, 0.5, 0.75, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1, 0.1, 0.1]


def factors(choice: Schedule, *updates: int) -> list[float]:
    values = schedule.factor(torch.tensor(updates), choice)
    assert values.dtype == torch.float64
    return list(values.tolist())


def test_the_worked_schedule() -> None:
    assert factors(FX, *range(1, 15)) == pytest.approx(FX_LR, abs=1e-6)


def test_past_its_end_the_schedule_stays_at_the_floor() -> None:
    assert factors(FX, 12, 13, 14, 10**9, 2**53) == [0.1] * 5
    assert factors(Schedule(shape="cosine", length=10, floor=0.0), 10, 12, 10**9) == [0.0] * 3
    assert factors(Schedule(shape="linear", length=10, floor=0.25), 10, 12, 10**9) == [0.25] * 3


def test_a_cosine_of_ten() -> None:
    choice = Schedule(shape="cosine", length=10, floor=0.0)
    assert factors(choice, 4, 5, 6, 7) == pytest.approx([0.654508, 0.5, 0.345492, 0.206107], abs=1e-6)


def test_warm_up_alone_and_no_warm_up() -> None:
    assert factors(Schedule(shape="constant", warmup=2), 1, 2, 3, 10**9) == [0.5, 1.0, 1.0, 1.0]
    assert factors(Schedule(shape="constant"), 1, 2) == [1.0, 1.0]
    assert factors(Schedule(shape="linear", length=1, floor=0.5), 1) == [0.5]
    assert factors(Schedule(shape="linear", warmup=1, length=2, floor=0.5), 1, 2) == [1.0, 0.5]


def test_the_floor_at_its_ends() -> None:
    assert factors(Schedule(shape="cosine", length=4, floor=1.0), *range(1, 6)) == [1.0] * 5
    assert factors(Schedule(shape="linear", length=4, floor=0.0), *range(1, 6)) == [0.75, 0.5, 0.25, 0.0, 0.0]


def logged(state: Any, updates: int, gradient: Any = 1.0) -> list[float]:
    _, rows = run(PLAIN, state, [gradients({"w": gradient})] * updates)
    return [row["lr"].item() for row in rows]


def fx_state(**parts: Any) -> Any:
    return init_state(own(lr=1.0, schedule=FX, **parts), params={"w": torch.tensor(1.0)})


def test_the_rate_of_every_update_is_the_schedules() -> None:
    assert logged(fx_state(), 14) == pytest.approx(FX_LR, abs=1e-6)


def test_the_schedule_counts_updates_and_not_micro_batches() -> None:
    _, rows = run(PLAIN, fx_state(), [gradients(*({"w": 1.0},) * 4)] * 4)
    assert [row["lr"].item() for row in rows] == [0.25, 0.5, 0.75, 1.0]


def test_refused_updates_count_unless_told_otherwise() -> None:
    bad, good = gradients({"w": float("nan")}), gradients({"w": 1.0})
    for counts, wanted in (("step", [0.25, 0.5, 0.75, 1.0]), ("applied", [0.25, 0.25, 0.25, 0.5])):
        choice = Schedule(shape="cosine", warmup=4, length=12, floor=0.1, counts=counts)
        state = init_state(own(lr=1.0, schedule=choice), params={"w": torch.tensor(1.0)})
        state, rows = run(PLAIN, state, [bad, bad, good, good])
        assert [row["lr"].item() for row in rows] == wanted
        assert state["scheduler", "position"].item() == (4 if counts == "step" else 2)
        assert state["step"].item() == 4


def test_changing_the_peak_changes_the_rates_from_there_on_and_nothing_else() -> None:
    state, _ = run(PLAIN, fx_state(), [gradients({"w": 1.0})] * 6)
    raised = changed(state, scheduler__lr=10.0)
    assert logged(raised, 2) == pytest.approx([7.22208, 5.5], abs=1e-5)
    assert raised["scheduler", "position"].item() == 6


def test_the_base_rate_never_compounds() -> None:
    slot = schedule.init(Optim(lr=1e-3, decay=0.1))
    first = slot
    for _ in range(10):
        slot = schedule.update(slot, FX, accept=torch.tensor(True), targets=torch.tensor(5))
    assert slot["lr"].item() == first["lr"].item() == 1e-3
    assert slot["decay"].item() == 0.1
    assert slot["lr"].dtype == slot["decay"].dtype == torch.float64
    assert slot["position"].item() == 10
    places = memory(first, schedule.update(first, FX, accept=torch.tensor(False), targets=torch.tensor(5)))
    assert len(set(places)) == len(places)


def test_positions_beyond_fp32_and_int32_are_exact() -> None:
    slot = {**schedule.init(Optim()), "position": torch.tensor(2**53)}
    assert schedule.update(slot, FX, accept=torch.tensor(True), targets=torch.tensor(5))["position"].item() == 2**53 + 1
