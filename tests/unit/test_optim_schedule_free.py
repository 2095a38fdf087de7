"""The schedule-free rule: a mean that is trained towards, where it is kept, and who evaluates it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.config import Model, Optim
from lib.metrics import UNITS
from lib.optim import averaged, chain, descend, free, schedule_free
from lib.run.evals import evaluate, weights_of
from lib.state import average, init_state
from lib.step import train_step
from lib.testing.strategies import lm_batch, trees
from lib.tree import Tree, leaves, plain, tree_map
from tests.strategies import PLAIN, gradients, now, own, same_bits, tiny

SETTINGS = {"rule": "schedule_free", "lr": 0.5, "decay": 0.0, "no_decay": (), "beta1": 0.75, "eps": 1e-30}


def test_worked_by_hand() -> None:
    # Of one gradient of 1 the direction is 1, z and x and y all go to 1/2. A second: z = 0, x = 1/4, y = 0/4 + 3/16.
    state = init_state(own(**SETTINGS), params={"w": torch.tensor(1.0)})
    assert average.mean_of(plain(state), state["recipe"])["w"].item() == 1.0
    for want in (0.5, 0.1875):
        state, _ = PLAIN(state, gradients({"w": 1.0}))
        assert state["params", "w"].item() == pytest.approx(want, abs=1e-6)
    assert state["optimizer", "free", "base", "w"].item() == pytest.approx(0.0, abs=1e-6)
    assert average.mean_of(plain(state), state["recipe"])["w"].item() == pytest.approx(0.25, abs=1e-6)
    assert state["optimizer", "free", "weight"].item() == 0.5
    assert state["optimizer", "free", "peak"].item() == 0.5


def test_with_one_rate_the_mean_is_that_of_all_base_points() -> None:
    rule = free(0.9)
    params = {"w": torch.linspace(-1, 1, 5)}
    slot, bases = rule.init(params), []
    for n in range(20):
        _, params, slot = rule.update({"w": torch.cos(torch.arange(5.0) + n)}, params, slot, now(0.01))
        bases.append(slot["base"]["w"].double())
    # Each update rounds the point between, which is divided by beta to tell the mean.
    assert torch.allclose(averaged(params, slot, 0.9)["w"].double(), torch.stack(bases).mean(0), rtol=0, atol=1e-6)


def test_a_rate_of_nothing_at_the_beginning_weighs_nothing() -> None:
    rule, params = free(0.9), {"w": torch.tensor([1.0, -2.0])}
    slot = rule.init(params)
    _, moved, slot = rule.update({"w": torch.ones(2)}, params, slot, now(0.0))
    assert same_bits(moved, params)
    assert same_bits(slot["base"], params)
    _, moved, slot = rule.update({"w": torch.ones(2)}, moved, slot, now(0.25))
    assert moved["w"].tolist() == [0.75, -2.25]
    assert slot["weight"].item() == 0.0625


def test_a_rate_that_falls_weighs_as_its_greatest_did() -> None:
    rule, params = free(0.5), {"w": torch.tensor(0.0)}
    slot = rule.init(params)
    for lr in (0.5, 0.25):
        _, params, slot = rule.update({"w": torch.tensor(-1.0)}, params, slot, now(lr))
    assert slot["peak"].item() == 0.5
    assert averaged(params, slot, 0.5)["w"].item() == (0.5 + 0.75) / 2


def test_decay_is_of_where_gradients_are_taken() -> None:
    rule, params = free(0.5, where="w"), {"w": torch.tensor(1.0), "b": torch.tensor(1.0)}
    slot, zero = rule.init(params), {"w": torch.tensor(0.0), "b": torch.tensor(0.0)}
    _, params, slot = rule.update(zero, params, slot, now(0.5, 0.5))
    assert params["w"].item() == 0.75
    assert params["b"].item() == 1.0
    _, params, slot = rule.update(zero, params, slot, now(0.5, 0.5)._replace(decays={"w": 2.0}))
    assert slot["base"]["w"].item() == 0.75 - 0.5 * 0.75


@given(params=trees(), lr=st.floats(0, 1))
def test_without_gradient_and_decay_no_bit_changes(params: Tree, lr: float) -> None:
    rule, zero = schedule_free(), tree_map(torch.zeros_like, params)
    slot, moved = rule.init(params), params
    for _ in range(3):
        _, moved, slot = rule.update(zero, moved, slot, now(lr))
        assert same_bits(moved, params)
        assert same_bits(slot["free"]["base"], params)
        assert same_bits(averaged(moved, slot["free"], 0.9), params)


def test_it_is_a_part_like_any_other() -> None:
    params = {"w": torch.tensor([1.0, 2.0])}
    rule = chain(free(0.9), descend())  # what follows gets the gradients as they came
    grads, _, slot = rule.update({"w": torch.ones(2)}, params, rule.init(params), now(0.1))
    assert grads["w"].tolist() == [1.0, 1.0]
    assert list(slot) == ["free"]
    assert list(schedule_free().init(params)) == ["rms", "free"]


def test_what_is_frozen_is_its_own_mean() -> None:
    recipe = own(**{**SETTINGS, "groups": ("a:freeze",)})
    state = init_state(recipe, params={"a": torch.tensor(3.0), "b": torch.tensor(3.0)})
    state, _ = PLAIN(state, gradients({"a": 1.0, "b": 1.0}))
    mean = average.mean_of(plain(state), recipe)
    assert mean is not None
    assert mean["a"].item() == 3.0
    assert mean["b"].item() == 2.5


def test_its_mean_is_evaluated_unless_told_otherwise() -> None:
    recipe = tiny(model=Model(width=8, depth=1, heads=2, inner=8, vocab=12), optim=Optim(rule="schedule_free", lr=0.02))
    state = init_state(recipe)
    for n in range(3):
        state, metrics = train_step(state, lm_batch(recipe, n, number=n + 1))
    assert set(metrics.keys()) <= set(UNITS)
    mean = average.mean_of(plain(state), recipe)
    assert same_bits(weights_of(state, None)["params"], mean)
    assert same_bits(weights_of(state, "average")["params"], mean)
    assert same_bits(weights_of(state, "params")["params"], state["params"])
    rows = {which: evaluate(state, [lm_batch(recipe)], weights=which) for which in (None, "average", "params")}
    assert rows[None] == rows["average"] != rows["params"]
    assert not set(leaves(plain(state))) & {"average"}
    other = init_state(tiny(optim=Optim()))
    assert weights_of(other, None) is other
