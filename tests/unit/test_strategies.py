"""The strategies reach what they are said to reach, and what they give is valid."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from lib.recipe import Optim, Recipe, Schedule
from lib.state import abstract_state
from lib.step import eval_step, train_step
from lib.testing.strategies import batches, lm_batch, masks, optims, recipes, schedules, states
from tests.strategies import FEW, form, own, refusal, same_bits

MANY = settings(max_examples=2000, database=None, suppress_health_check=list(HealthCheck))


def test_every_rule_and_every_shape_comes_up() -> None:
    for rule in get_args(get_type_hints(Optim)["rule"]):
        assert find(optims(), lambda optim, rule=rule: optim.rule == rule, settings=MANY).rule == rule
    for shape in get_args(get_type_hints(Schedule)["shape"]):
        assert find(schedules(), lambda given, shape=shape: given.shape == shape, settings=MANY).shape == shape


@pytest.mark.parametrize(
    "wanted",
    [
        lambda mask: mask.all(),
        lambda mask: not mask.any(),
        lambda mask: mask[0].sum() == 0 < mask[1].sum(),
        lambda mask: 0 < mask[0].sum() < mask[1].sum(),
        lambda mask: mask.sum() == 1,
    ],
    ids=["all", "none", "none of a micro-batch", "unequal numbers", "one"],
)
def test_masks_of_every_kind_come_up(wanted: object) -> None:
    mask = find(masks(2, 2, 3), wanted, settings=MANY)  # type: ignore[arg-type]
    assert (mask.shape, mask.dtype) == ((2, 2, 3), torch.bool)


@FEW
@given(recipe=recipes(), data=st.data())
def test_batches_follow_each_other_and_states_are_whole(recipe: Recipe, data: st.DataObject) -> None:
    state = data.draw(states(recipe, updates=1))
    assert form(state) == form(abstract_state(recipe))
    assert state["step"].item() in (0, 1)
    one, two = data.draw(batches(recipe, begin=3))
    assert [batch["cursor", "text", "row"].item() for batch in (one, two)] == [
        4 * recipe.batch.rows,
        5 * recipe.batch.rows,
    ]
    new, _ = train_step(state, one)
    assert same_bits(new["cursor"], one["cursor"])
    assert eval_step(state, two)["tokens"].item() == two["mask"].sum().item()


def test_a_batch_is_a_function_of_its_arguments() -> None:
    recipe = Recipe()
    assert same_bits(lm_batch(recipe, 3, number=2), lm_batch(recipe, 3, number=2))
    assert not same_bits(lm_batch(recipe, 3), lm_batch(recipe, 4))
    assert refusal(lm_batch, own()) == "recipe.model=none must be a model to make batches of ids for; give one"
