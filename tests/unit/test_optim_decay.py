"""Which parameters decay: matrices by default, everything but the patterns otherwise."""

from __future__ import annotations

import pytest
import torch

from lib.config import Model, Optim
from lib.optim.decay import decay_tree, decayed
from lib.state import init_state
from lib.tree import leaves
from tests.strategies import PLAIN, gradients, own, rebuilt, refusal, run, tiny

DECAY = torch.tensor(0.1, dtype=torch.float64)


def chosen(recipe: object, params: object) -> set[str]:
    return {path for path, leaf in leaves(decay_tree(params, recipe, DECAY)).items() if leaf.item() == 0.1}  # type: ignore[arg-type]


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
    assert chosen(own(), params) == {"blocks.w", "c"}


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
    assert decayed(params, own(no_decay=patterns)) == left


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    message = "optim.no_decay='W' must match a parameter, matches none of w, ...; fix or drop the pattern"
    assert refusal(decayed, {"w": torch.ones(2, 2)}, own(no_decay=("w", "W"))) == message


def test_two_groups_keep_their_own_decay_after_a_resume() -> None:
    params = {"with_": torch.ones(()), "without": torch.ones(())}
    recipe = own(decay=0.5, no_decay=("without",), lr=0.1)
    idle = gradients({"with_": 0.0, "without": 0.0})
    state, _ = run(PLAIN, init_state(recipe, params=params), [idle] * 2)
    state, _ = PLAIN(rebuilt(state), idle)
    assert state["params", "with_"].item() == pytest.approx(0.95**3, rel=1e-6)
    assert state["params", "without"].item() == 1.0


def test_the_decay_is_a_leaf_of_the_state_and_may_be_changed() -> None:
    state = init_state(own(decay=0.0), params={"w": torch.ones(1, 1)})
    state["scheduler", "decay"] = torch.tensor(1.0, dtype=torch.float64)
    new, _ = PLAIN(state, gradients({"w": [[0.0]]}))
    assert new["params", "w"].item() == pytest.approx(0.9)
    assert Optim().decay == 0.1
