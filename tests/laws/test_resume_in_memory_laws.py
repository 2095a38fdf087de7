"""A state is all there is: a run stopped after any update and taken up from its bytes is the run that never stopped."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from lib.config import Batch, Guard, Model, Optim, Precision, Recipe, Scale, Schedule
from lib.state import init_state
from lib.step import eval_step, make_train_step, train_step
from lib.store import load, save
from lib.testing.strategies import lm_batch, recipes
from lib.testing.trees import from_bytes
from tests.strategies import FEW, PLAIN, bits, gradients, own, run, same_bits, tiny

# Everything at once: two micro-batches, dropout, uneven masks, an average, a guard, a schedule that ends within the run, and
# a loss scale that starts too high and grows back, so that updates are refused first and later.
LENGTH = 7
RECIPE = tiny(
    model=Model(width=8, depth=2, heads=2, kv_heads=1, inner=8, vocab=12, dropout=0.3),
    batch=Batch(rows=4, length=6, micro=2),
    optim=Optim(lr=1e-2, average=0.9, clip=0.5),
    schedule=Schedule(shape="cosine", warmup=1, length=4, floor=0.1, counts="applied"),
    precision=Precision(compute="fp16"),
    scale=Scale(initial=2.0**14, every=2),
    guard=Guard(window=4, sigma=2.0),
)


def data(recipe: Recipe = RECIPE) -> list[TensorDict]:
    return [lm_batch(recipe, n, number=n + 1) for n in range(LENGTH)]


@cache
def straight() -> tuple[tuple[TensorDict, ...], tuple[TensorDict, ...]]:
    """The states after each number of updates, and each update's metrics."""
    states, rows = [init_state(RECIPE, seed=3)], []
    for batch in data():
        state, metrics = train_step(states[-1], batch)
        states.append(state)
        rows.append(metrics)
    return tuple(states), tuple(rows)


def test_the_run_that_is_stopped_has_refused_updates_and_accepted_ones() -> None:
    refused = [row["refused"].item() for row in straight()[1]]
    assert 1 <= sum(refused) <= LENGTH - 3
    assert any(before and not after for before, after in pairwise(refused))


@pytest.mark.parametrize("stop", range(LENGTH))
def test_a_run_stopped_after_any_update_is_the_run_that_never_stopped(stop: int) -> None:
    states, rows = straight()
    state, told = run(train_step, from_bytes(states[stop]), data()[stop:])
    assert same_bits(state, states[-1])
    assert all(same_bits(a, b) for a, b in zip(told, rows[stop:], strict=True))


def test_a_run_may_be_stopped_after_every_update_and_evaluated_in_between() -> None:
    states, rows = straight()
    state = init_state(RECIPE, seed=3)
    for n, batch in enumerate(data()):
        state, metrics = train_step(from_bytes(state), batch)
        eval_step(state, batch)
        assert same_bits(state, states[n + 1])
        assert same_bits(metrics, rows[n])


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    states, _ = straight()
    for stop in (0, 1, LENGTH - 1):
        save(tmp_path / f"{stop}", states[stop])
        state, _ = run(train_step, load(tmp_path / f"{stop}"), data()[stop:])
        assert same_bits(state, states[-1])


@FEW
@given(recipe=recipes(), seed=st.integers(0, 2**32), stop=st.integers(0, 2))
def test_any_recipe_resumes(recipe: Recipe, seed: int, stop: int) -> None:
    batches = [lm_batch(recipe, seed + n, number=n + 1) for n in range(2)]
    whole, _ = run(train_step, init_state(recipe, seed=seed), batches)
    half, _ = run(train_step, init_state(recipe, seed=seed), batches[:stop])
    resumed, _ = run(train_step, from_bytes(half), batches[stop:])
    assert same_bits(whole, resumed)
    assert resumed["recipe"] == recipe


@given(values=st.lists(st.floats(width=32), min_size=1, max_size=6), data=st.data())
def test_a_step_of_ones_own_resumes_whatever_its_gradients_were(values: list[float], data: st.DataObject) -> None:
    batches = [gradients({"w": value}) for value in values]
    state = init_state(own(average=0.5, guard=Guard(window=4)), params={"w": torch.tensor(1.0)})
    whole, told = run(PLAIN, state, batches)
    stop = data.draw(st.integers(0, len(batches)))
    half, first = run(PLAIN, state, batches[:stop])
    again = make_train_step(lambda params, batch, key: ((params["w"] * batch["grads"]["w"]).sum(), batch["count"]))
    resumed, second = run(again, from_bytes(half), batches[stop:])
    assert same_bits(whole, resumed)
    assert [bits(row) for row in told] == [bits(row) for row in first + second]
