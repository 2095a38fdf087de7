"""AdamW: the worked example with and without decay, what a lost part would do, and unused parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lib.config import Optim, Recipe
from lib.optim import adamw, rule_of
from lib.state import init_state
from lib.testing.trees import from_bytes
from lib.tree import leaves
from tests.strategies import PLAIN, changed, form, gradients, memory, now, own, run

WAVE = [gradients({"w": math.sin(k + 1)}) for k in range(6)]


def one(**optim: Any) -> TensorDict:
    return init_state(own(**optim), params={"w": torch.tensor(1.0)})


def weight(state: TensorDict) -> float:
    return float(state["params", "w"].item())


@pytest.mark.parametrize(("decay", "wanted"), [(0.0, 0.7132777), (0.1, 0.6665774)])
def test_the_worked_example(decay: float, wanted: float) -> None:
    settings: dict[str, Any] = {"decay": decay, "no_decay": ()}
    state, _ = run(PLAIN, one(**settings), WAVE)
    assert weight(state) == pytest.approx(wanted, abs=3e-7)
    assert state["optimizer", "adam", "count"].item() == 6


@pytest.mark.parametrize(("decay", "moments", "count"), [(0.0, 1.0052079, 0.6998142), (0.1, 0.9550441, 0.6534904)])
def test_a_run_resumed_halfway_needs_the_moments_and_the_count(decay: float, moments: float, count: float) -> None:
    state, _ = run(PLAIN, one(decay=decay, no_decay=()), WAVE)
    half, _ = run(PLAIN, one(decay=decay, no_decay=()), WAVE[:3])
    resumed, _ = run(PLAIN, from_bytes(half), WAVE[3:])
    assert weight(resumed) == weight(state)
    lost = changed(half, optimizer__adam__first__w=0.0, optimizer__adam__second__w=0.0, optimizer__adam__count=0)
    assert weight(run(PLAIN, lost, WAVE[3:])[0]) == pytest.approx(moments, abs=3e-7)
    restarted = changed(half, optimizer__adam__count=0)
    assert weight(run(PLAIN, restarted, WAVE[3:])[0]) == pytest.approx(count, abs=3e-7)


def test_a_scalar_does_not_decay_by_default() -> None:
    state, _ = run(PLAIN, one(decay=0.1), WAVE)
    assert weight(state) == pytest.approx(0.7132777, abs=3e-7)


def test_an_unused_parameter_decays_and_its_moments_stay_zero() -> None:
    params = {"w": torch.tensor(1.0), "idle": torch.ones(2, 2)}
    state = init_state(own(decay=0.1), params=params)
    before = form(state)
    state, _ = run(PLAIN, state, [gradients({"w": 1.0, "idle": torch.zeros(2, 2)})] * 3)
    assert state["params", "idle"].flatten().tolist() == pytest.approx([0.99**3] * 4, rel=1e-6)
    assert state["optimizer", "adam", "second", "idle"].abs().max().item() == 0.0
    assert form(state) == before


def test_a_small_update_is_not_lost_in_low_precision() -> None:
    # 1.0 - 1000 * 1e-3, where bf16 stays at 1.0; beta 0 makes Adam's step lr * sign(g)
    rule = adamw(beta1=0.0, beta2=0.0)
    params, slot = {"w": torch.tensor(1.0)}, rule.init({"w": torch.tensor(1.0)})
    for _ in range(1000):
        _, params, slot = rule.update({"w": torch.tensor(1.0)}, params, slot, now(1e-3))
    assert params["w"].item() == pytest.approx(0.0, abs=1e-4)


def test_a_small_decay_is_not_lost_in_low_precision() -> None:
    rule = adamw()
    params, slot = {"w": torch.tensor(1.0)}, rule.init({"w": torch.tensor(1.0)})
    for _ in range(1000):
        _, params, slot = rule.update({"w": torch.tensor(0.0)}, params, slot, now(1e-3, 0.1))
    assert params["w"].item() == pytest.approx(0.904833, abs=1e-4)


def test_the_first_step_is_the_learning_rate_whatever_the_gradients_size() -> None:
    for size in (1e-3, 1.0, 1e6):
        state, _ = PLAIN(one(), gradients({"w": size}))
        assert weight(state) == pytest.approx(0.9, abs=1e-5)


def test_bias_is_corrected_to_the_last_bit_in_a_long_run() -> None:
    # beta2^t of a count in fp32 or int32 would be wrong long before
    rule = adamw(beta2=1 - 2.0**-20)
    moments = {"count": torch.tensor(2**31), "first": {"w": torch.tensor(1.0)}, "second": {"w": torch.tensor(1.0)}}
    _, params, new = rule.update({"w": torch.tensor(1.0)}, {"w": torch.tensor(0.0)}, {"adam": moments}, now(1.0))
    assert new["adam"]["count"].item() == 2**31 + 1
    assert params["w"].item() == pytest.approx(-1.0, abs=1e-6)


def test_the_slot_is_named_as_the_parameters_are() -> None:
    params = {"b": {"c": torch.ones(2, 3)}, "a": torch.ones(4)}
    slot = adamw().init(params)
    assert list(leaves(slot)) == [
        f"adam.{name}" for name in ("count", "first.a", "first.b.c", "second.a", "second.b.c")
    ]
    assert slot["adam"]["first"]["b"]["c"].shape == (2, 3)
    assert not set(memory(slot)) & set(memory(params))


def test_the_rule_of_a_recipe_has_the_recipes_constants() -> None:
    rule = rule_of(Recipe(optim=Optim(beta1=0.5, beta2=0.25, eps=1.0)))
    params = {"w": torch.tensor(0.0)}
    _, params, slot = rule.update({"w": torch.tensor(2.0)}, params, rule.init(params), now(1.0))
    assert (slot["adam"]["first"]["w"].item(), slot["adam"]["second"]["w"].item()) == (1.0, 3.0)
    assert params["w"].item() == pytest.approx(-2 / (2 + 1))
