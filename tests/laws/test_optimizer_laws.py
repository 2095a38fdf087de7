"""Every rule: a parabola falls, nothing moves without gradient and decay, the tree and its dtypes are kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.optim import Rule, adamw
from lib.tree import Tree, leaves, tree_map
from tests.strategies import bits, form, largest_gap, memory, same_bits, trees

RULES: Mapping[str, Rule] = {"adamw": adamw(), "adamw_without_memory": adamw(beta1=0.0, beta2=0.0)}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RATE = torch.tensor(0.1, dtype=torch.float64)
NONE = torch.tensor(0.0, dtype=torch.float64)


def no_decay(params: Tree) -> Tree:
    return tree_map(lambda leaf: NONE, params)


@every_rule
@given(start=st.floats(-5, 5), curvature=st.floats(0.1, 10))
def test_a_parabola_falls(rule: Rule, start: float, curvature: float) -> None:
    params: Tree = {"w": torch.tensor([start, -start])}
    slot = rule.init(params)
    for n in range(100):
        lr = 0.2 / (1 + n / 10) * RATE / 0.1
        grads = tree_map(lambda w: curvature * w, params)
        params, slot = rule.update(grads, slot, params, lr, no_decay(params))
    assert params["w"].abs().max() <= max(abs(start) * 0.9, 0.2)


@every_rule
@given(params=trees())
def test_without_gradient_and_decay_nothing_changes(rule: Rule, params: Tree) -> None:
    zero = tree_map(torch.zeros_like, params)
    new, slot = rule.update(zero, rule.init(params), params, RATE, no_decay(params))
    # -0.0 minus 0.0 is -0.0, and 0.0 stays 0.0: the bits too
    assert same_bits(new, params)
    assert all(leaf.abs().max() == 0 for path, leaf in leaves(slot).items() if path != "count" and leaf.numel())


@every_rule
@given(params=trees(), decay=st.floats(0, 1))
def test_decay_alone_shrinks_by_one_factor(rule: Rule, params: Tree, decay: float) -> None:
    zero = tree_map(torch.zeros_like, params)
    decays = tree_map(lambda leaf: torch.tensor(decay, dtype=torch.float64), params)
    new, _ = rule.update(zero, rule.init(params), params, RATE, decays)
    wanted = tree_map(lambda leaf: leaf * np.float32(1 - 0.1 * decay), params)
    assert largest_gap(new, wanted) <= 1e-4  # of at most 1000, in fp32


@every_rule
@given(params=trees(), size=st.floats(-100, 100, width=32))
def test_the_tree_its_dtypes_and_its_inputs_are_kept(rule: Rule, params: Tree, size: float) -> None:
    grads = tree_map(lambda leaf: torch.full_like(leaf, size), params)
    slot = rule.init(params)
    before = bits(params), bits(slot), bits(grads)
    new, after = rule.update(grads, slot, params, RATE, no_decay(params))
    assert (bits(params), bits(slot), bits(grads)) == before
    assert form(new) == form(params)
    assert form(after) == form(slot)
    assert not {*memory(new), *memory(after)} & {*memory(params), *memory(slot), *memory(grads)}
    assert after["count"].item() == 1


@every_rule
@given(params=trees(), data=st.data())
def test_a_parameters_update_does_not_depend_on_its_neighbours(rule: Rule, params: Tree, data: st.DataObject) -> None:
    grads = tree_map(lambda leaf: leaf * 0.5 + 1, params)
    new, _ = rule.update(grads, rule.init(params), params, RATE, no_decay(params))
    path = data.draw(st.sampled_from(list(leaves(params))))
    alone = {"x": leaves(params)[path]}
    by_itself, _ = rule.update({"x": leaves(grads)[path]}, rule.init(alone), alone, RATE, no_decay(alone))
    assert same_bits(by_itself, {"x": leaves(new)[path]})


@given(
    params=trees(),
    seed=st.integers(0, 2**32 - 1),
    decay=st.sampled_from([0.0, 0.1]),
    betas=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.95, 0.999])),
)
def test_adamw_follows_the_published_algorithm(
    params: Tree, seed: int, decay: float, betas: tuple[float, float]
) -> None:
    draw = np.random.default_rng(seed)
    rule = adamw(beta1=betas[0], beta2=betas[1], eps=1e-8)
    slot, values = rule.init(params), params
    exact = {path: leaf.double().numpy().copy() for path, leaf in leaves(params).items()}
    m = {path: np.zeros_like(value) for path, value in exact.items()}
    v = {path: np.zeros_like(value) for path, value in exact.items()}
    decays = tree_map(lambda leaf: torch.tensor(decay, dtype=torch.float64), params)
    for t in range(1, 9):
        lr = 0.1 / t
        grads = tree_map(lambda leaf: torch.from_numpy(draw.normal(size=tuple(leaf.shape)).astype(np.float32)), params)
        values, slot = rule.update(grads, slot, values, torch.tensor(lr, dtype=torch.float64), decays)
        for path, g in leaves(grads).items():
            g = g.double().numpy()
            m[path] = betas[0] * m[path] + (1 - betas[0]) * g
            v[path] = betas[1] * v[path] + (1 - betas[1]) * g**2
            root = np.sqrt(v[path] / (1 - betas[1] ** t)) + 1e-8
            exact[path] = exact[path] * (1 - lr * decay) - lr * m[path] / (1 - betas[0] ** t) / root
    for path, leaf in leaves(values).items():
        np.testing.assert_allclose(leaf.numpy(), exact[path], rtol=2e-6, atol=2e-6)
