"""The spike guard: quiet until half full, one side only, and what it remembers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lib.config import Guard
from lib.state import init_state, window
from lib.testing.trees import from_bytes
from tests.strategies import PLAIN, bits, gradients, own, run

GUARD = Guard(window=4, sigma=2.0)
TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def filled(*values: tuple[float, float], guard: Guard = GUARD) -> Any:
    slot = window.init(guard)
    for loss, norm in values:
        slot = stored(slot, TRUE, loss, norm)
    return slot


def stored(slot: Any, accept: torch.Tensor, loss: float, norm: float) -> Any:
    loss_, norm_ = torch.tensor(loss), torch.tensor(norm)
    measured = torch.isfinite(loss_) & torch.isfinite(norm_)
    return window.update(slot, accept=accept, spike=FALSE, measured=measured, loss=loss_, norm=norm_)


def spike(slot: Any, loss: float, norm: float, guard: Guard = GUARD) -> bool:
    return bool(window.is_spike(slot, guard, torch.tensor(loss), torch.tensor(norm)))


def test_the_guard_says_nothing_before_it_is_half_full() -> None:
    assert not spike(window.init(GUARD), 1e9, 1e9)
    assert not spike(filled((1.0, 1.0)), 1e9, 1e9)
    assert spike(filled((1.0, 1.0), (2.0, 2.0)), 1e9, 1.0)
    large = Guard(window=9, sigma=2.0)
    assert not spike(filled(*((x, x) for x in (1.0, 2.0, 1.0)), guard=large), 1e9, 1e9, guard=large)
    assert spike(filled(*((x, x) for x in (1.0, 2.0, 1.0, 2.0)), guard=large), 1e9, 1e9, guard=large)


def test_a_spike_is_sigma_deviations_above_the_mean_of_loss_or_norm() -> None:
    # losses 1 3: mean 2, deviation sqrt(2); norms 10 30: mean 20, deviation 10 sqrt(2)
    slot = filled((1.0, 10.0), (3.0, 30.0))
    edge, wide = 2 + 2 * math.sqrt(2), 20 + 20 * math.sqrt(2)
    assert not spike(slot, edge - 1e-3, wide - 1e-3)
    assert spike(slot, edge + 1e-3, 20.0)
    assert spike(slot, 2.0, wide + 1e-3)
    assert not spike(slot, -1e9, 0.0)


def test_what_is_not_finite_is_no_business_of_the_guard() -> None:
    slot = filled((1.0, 1.0), (2.0, 2.0))
    assert not spike(slot, math.nan, math.nan)


def test_the_oldest_value_makes_room() -> None:
    slot = filled(*((float(n), 10.0 * n) for n in range(1, 7)))
    assert slot["loss"].tolist() == [5.0, 6.0, 3.0, 4.0]
    assert slot["norm"].tolist() == [50.0, 60.0, 30.0, 40.0]
    assert slot["count"].item() == 6


def test_refused_values_are_not_stored_even_if_they_are_not_finite() -> None:
    slot = filled((1.0, 1.0), (2.0, 2.0))
    for value in (math.nan, math.inf, 1e9):
        new = stored(slot, FALSE, value, value)
        assert {name for name in slot if bits(new)[name] != bits(slot)[name]} == ({"judged"} if value == 1e9 else set())


def losses(*values: float) -> list[Any]:
    """One-parameter batches whose loss and norm are `value`: the parameter is 1 and hardly moves."""
    return [gradients({"w": value}) for value in values]


def test_a_spike_is_refused_and_leaves_no_trace_in_the_guard() -> None:
    state = init_state(own(lr=1e-9, guard=GUARD), params={"w": torch.tensor(1.0)})
    state, _ = run(PLAIN, state, losses(1.0, 2.0, 1.0))
    new, metrics = PLAIN(state, losses(100.0)[0])
    assert metrics["refused"].item()
    for slot in ("params", "optimizer"):
        assert bits(new[slot]) == bits(state[slot])
    for leaf in ("loss", "norm", "count"):
        assert torch.equal(new["window", leaf], state["window", leaf])
    assert (new["scale", "skipped"].item(), new["scale", "bad"].item()) == (1, 1)
    after, metrics = PLAIN(new, losses(1.5)[0])
    assert not metrics["refused"].item()
    assert after["scale", "bad"].item() == 0
    assert after["window", "count"].item() == 4


def test_a_spike_before_half_full_is_applied() -> None:
    state = init_state(own(lr=1e-9, guard=GUARD), params={"w": torch.tensor(1.0)})
    state, rows = run(PLAIN, state, losses(1.0, 1e6))
    assert [bool(row["refused"]) for row in rows] == [False, False]
    assert state["window", "count"].item() == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_never_stored(value: float) -> None:
    state = init_state(own(lr=1e-9, guard=GUARD), params={"w": torch.tensor(1.0)})
    state, _ = run(PLAIN, state, losses(1.0, value, 2.0, value, value))
    assert state["window", "loss"].tolist() == pytest.approx([1.0, 2.0, 0.0, 0.0], abs=1e-6)
    assert state["window", "count"].item() == 2


@pytest.mark.parametrize("spikes", ["refuse", "count"])
def test_the_spike_score_is_the_share_of_spikes_among_the_updates_that_were_judged(spikes: Any) -> None:
    guard = Guard(window=4, sigma=2.0, spikes=spikes)
    state = init_state(own(lr=1e-9, guard=guard), params={"w": torch.tensor(1.0)})
    scores, refused = [], []
    # Not judged: the first two, and what is not finite. Spikes: 100 after 1 2, and 1e9 whatever was stored between.
    for batch in losses(1.0, 2.0, 100.0, math.nan, 1.5, 1e9):
        state, row = PLAIN(from_bytes(state), batch)
        scores.append(row["spike_score"].item())
        refused.append(bool(row["refused"]))
    assert scores == pytest.approx([0, 0, 1, 1, 1 / 2, 2 / 3])
    assert refused == [False, False, spikes == "refuse", True, False, spikes == "refuse"]
    assert state["window", "judged"].item() == 3
    assert state["window", "spikes"].item() == 2


def test_a_run_without_a_guard_has_no_score() -> None:
    _, row = PLAIN(init_state(own(), params={"w": torch.tensor(1.0)}), losses(1.0)[0])
    assert "spike_score" not in row.keys()  # noqa: SIM118
