"""Which parameters decay: matrices by default, everything but the patterns otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from lib.config import Model, Optim, Recipe
from lib.optim import rule_of
from lib.optim.decay import decayed
from lib.state import init_state
from lib.testing.trees import from_bytes
from lib.tree import leaves, plain, tree_map
from tests.strategies import PLAIN, gradients, now, own, refusal, run, tiny


def chosen(recipe: Recipe, params: Any) -> set[str]:
    """Those that an update without gradient makes smaller."""
    tree = plain(params)
    ones, none = tree_map(torch.ones_like, tree), tree_map(torch.zeros_like, tree)
    rule = rule_of(recipe)
    _, after, _ = rule.update(none, ones, rule.init(ones), now(1.0, 0.1))
    return {path for path, leaf in leaves(after).items() if leaf.numel() and bool((leaf == 0.9).all())}


def test_the_matrices_of_the_language_model_decay_and_its_norms_do_not() -> None:
    recipe = tiny(model=Model(width=8, depth=2, heads=2, vocab=9, tied=False))
    params = init_state(recipe)["params"]
    everything = set(leaves(params))
    assert everything - chosen(recipe, params) == {"norm", "blocks.attention.norm", "blocks.ffn.norm"}


def test_of_ones_own_parameters_those_of_two_axes_or_more_decay() -> None:
    params = {
        "blocks": {"bias": torch.ones(3), "w": torch.ones(2, 3)},
        "gain": torch.tensor(1.0),
        "c": torch.ones(1, 1, 1),
    }
    own_ = msgspec.structs.replace(own(), model=None)
    assert chosen(own_, params) == {"blocks.w", "c"}


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ((), {"a.w", "a.bias", "b.w"}),
        (("*.bias",), {"a.w", "b.w"}),
        (("a.*",), {"b.w"}),
        (("?.w", "a.bias"), set()),
    ],
)
def test_patterns_name_what_does_not_decay(patterns: tuple[str, ...], left: set[str]) -> None:
    params = {"a": {"w": torch.ones(2, 2), "bias": torch.ones(2)}, "b": {"w": torch.ones(2, 2)}}
    assert chosen(own(no_decay=patterns), params) == left
    assert decayed(own(no_decay=patterns))(params) == left


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    message = "optim.no_decay='W' must match a parameter, matches none of w; fix or drop the pattern"
    assert refusal(init_state, own(no_decay=("w", "W")), params={"w": torch.ones(2, 2)}) == message


def test_two_groups_keep_their_own_decay_after_a_resume() -> None:
    params = {"with_": torch.ones(()), "without": torch.ones(())}
    recipe = own(decay=0.5, no_decay=("without",), lr=0.1)
    idle = gradients({"with_": 0.0, "without": 0.0})
    state, _ = run(PLAIN, init_state(recipe, params=params), [idle] * 2)
    state, _ = PLAIN(from_bytes(state), idle)
    assert state["params", "with_"].item() == pytest.approx(0.95**3, rel=1e-6)
    assert state["params", "without"].item() == 1.0


def test_the_decay_is_a_leaf_of_the_state_and_may_be_changed() -> None:
    state = init_state(own(decay=0.0), params={"w": torch.ones(1, 1)})
    state["scheduler", "decay"] = torch.tensor(1.0, dtype=torch.float64)
    new, _ = PLAIN(state, gradients({"w": [[0.0]]}))
    assert new["params", "w"].item() == pytest.approx(0.9)
    assert Optim().decay == 0.1
