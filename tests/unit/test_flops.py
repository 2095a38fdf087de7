"""What a token costs, counted by hand and from the products that really run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lib.config import Batch, Model, Recipe
from lib.model import lm
from lib.model.flops import parameter_count, train_flops_per_token
from lib.state import init_state
from lib.testing.strategies import lm_batch
from lib.tree import leaves, plain

MODELS = [
    Model(width=16, depth=2, heads=2, inner=24, vocab=20, tied=True),
    Model(width=16, depth=3, heads=4, kv_heads=2, inner=24, vocab=20, tied=False),
]


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_counted_once(model: Model) -> None:
    state = init_state(Recipe(model=model))
    assert parameter_count(model) == sum(leaf.numel() for leaf in leaves(state["params"]).values())


def test_the_cost_of_a_token_by_hand() -> None:
    block = 4 * 4 * 4 + 3 * 4 * 8
    for tied in (True, False):
        model = Model(width=4, depth=2, heads=1, inner=8, vocab=10, tied=tied)
        assert train_flops_per_token(model, 6) == 6 * (2 * block + 10 * 4) + 6 * 2 * 6 * 4


@pytest.mark.parametrize("model", MODELS)
def test_the_cost_of_a_token_is_three_times_the_products_of_the_forward_pass(model: Model) -> None:
    recipe = Recipe(model=model, batch=Batch(rows=2, length=8))
    batch = lm_batch(recipe)
    part = {name: batch[name][0] for name in ("inputs", "segments", "positions")}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lm.logits(plain(init_state(recipe)["params"]), part, model)
    # the counter sees products with weights, over 16 tokens; attention's own are q k and weights v, causal, so half of them
    attention = 2 * 2 * 8 * model.width * model.depth // 2
    assert train_flops_per_token(model, 8) == 3 * (counter.get_total_flops() // 16 + attention)
