"""Every rule: a parabola falls, nothing moves without gradient and decay, trees are kept; and the algebra of rules."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.grad import global_norm
from lib.optim import (
    Rule,
    adafactor,
    adamw,
    chain,
    clip_norm,
    clip_value,
    decay,
    descend,
    freeze,
    hyper,
    identity,
    l2,
    lion,
    mask,
    momentum,
    muon,
    partition,
    scale_by_adam,
    scaled,
    sgd,
    sign,
)
from lib.optim.storing import round_by_chance
from lib.testing.strategies import trees
from lib.tree import Tree, from_leaves, leaves, tree_map
from tests.strategies import bits, form, largest_gap, memory, now, same_bits

RULES: Mapping[str, Rule] = {
    "adamw": adamw(),
    "adamw without memory": adamw(beta1=0.0, beta2=0.0),
    "adamw in bf16": adamw(moments="bf16"),
    "sgd": sgd(),
    "sgd with momentum": sgd(0.5),
    "sgd with nesterov": sgd(0.5, nesterov=True),
    "lion": lion(),
    "adafactor": adafactor(),
    "muon": muon(matrices=lambda params: {path for path, leaf in leaves(params).items() if leaf.ndim >= 2}),
    "hyper": hyper(adamw, beta1=0.9, eps=1e-8),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RATE = 0.1


@every_rule
@given(start=st.floats(-5, 5), curvature=st.floats(0.1, 10))
def test_a_parabola_falls(rule: Rule, start: float, curvature: float) -> None:
    params: Tree = {"w": torch.tensor([start, -start])}
    slot = rule.init(params)
    for n in range(100):
        grads = tree_map(lambda w: curvature * w, params)
        _, params, slot = rule.update(grads, params, slot, now(0.2 / (1 + n / 10) * RATE / 0.1))
    assert params["w"].abs().max() <= max(abs(start) * 0.9, 0.3)


@every_rule
@given(params=trees())
def test_without_gradient_and_decay_nothing_changes(rule: Rule, params: Tree) -> None:
    zero = tree_map(torch.zeros_like, params)
    _, new, slot = rule.update(zero, params, rule.init(params), now(RATE))
    # -0.0 minus 0.0 is -0.0, and 0.0 stays 0.0: the bits too
    assert same_bits(new, params)
    held = {path: leaf for path, leaf in leaves(slot).items() if "count" not in path and "hyper." not in path}
    assert all(leaf.abs().max() == 0 for leaf in held.values() if leaf.numel())


@every_rule
@given(params=trees(), weight=st.floats(0, 1))
def test_decay_alone_shrinks_by_one_factor(rule: Rule, params: Tree, weight: float) -> None:
    zero = tree_map(torch.zeros_like, params)
    _, new, _ = rule.update(zero, params, rule.init(params), now(RATE, weight))
    wanted = tree_map(lambda leaf: leaf * np.float32(1 - 0.1 * weight), params)
    assert largest_gap(new, wanted) <= 1e-4  # of at most 1000, in fp32


@every_rule
@given(params=trees(), size=st.floats(-100, 100, width=32))
def test_the_tree_its_dtypes_and_its_inputs_are_kept(rule: Rule, params: Tree, size: float) -> None:
    grads = tree_map(lambda leaf: torch.full_like(leaf, size), params)
    slot = rule.init(params)
    before = bits(params), bits(slot), bits(grads)
    _, new, after = rule.update(grads, params, slot, now(RATE))
    assert (bits(params), bits(slot), bits(grads)) == before
    assert form(new) == form(params)
    assert form(after) == form(slot)
    assert not {*memory(new), *memory(after)} & {*memory(params), *memory(slot), *memory(grads)}
    counts = [leaf.item() for path, leaf in leaves(after).items() if path.endswith("count")]
    assert counts == [1] * len(counts)


@every_rule
@given(params=trees(), data=st.data())
def test_a_parameters_update_does_not_depend_on_its_neighbours(rule: Rule, params: Tree, data: st.DataObject) -> None:
    grads = tree_map(lambda leaf: leaf * 0.5 + 1, params)
    _, new, _ = rule.update(grads, params, rule.init(params), now(RATE))
    path = data.draw(st.sampled_from(list(leaves(params))))
    alone = {"x": leaves(params)[path]}
    _, by_itself, _ = rule.update({"x": leaves(grads)[path]}, alone, rule.init(alone), now(RATE))
    assert same_bits(by_itself, {"x": leaves(new)[path]})


# The algebra ----------------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Rule] = {
    "clip_norm": clip_norm(0.5),
    "clip_value": clip_value(0.25),
    "momentum": momentum(0.75),
    "adam": scale_by_adam(),
    "sign": sign(),
    "decay": decay(),
    "l2": l2(0.125),
    "descend": descend(),
    "nothing": identity(),
}
links = st.sampled_from(sorted(PARTS)).map(PARTS.__getitem__)


def after(rule: Rule, params: Tree, updates: int = 3) -> tuple[Tree, Tree, Tree]:
    """What a rule has made of the parameters, of the last gradients, and of its slot."""
    slot, grads = rule.init(params), params
    for n in range(updates):
        grads = tree_map(lambda leaf, n=n: leaf * 0.5 - n, params)
        grads, params, slot = rule.update(grads, params, slot, now(0.125, 0.5, key=n))
    return params, grads, slot


def same(one: tuple[Tree, ...], two: tuple[Tree, ...]) -> bool:
    return all(same_bits(a, b) for a, b in zip(one, two, strict=True))


@given(params=trees(), a=links, b=links, c=links)
def test_chains_are_associative_slots_included(params: Tree, a: Rule, b: Rule, c: Rule) -> None:
    flat = after(chain(a, b, c), params)
    assert same(after(chain(a, chain(b, c)), params), flat)
    assert same(after(chain(chain(a, b), c), params), flat)


@given(params=trees(), a=links)
def test_the_identity_is_neutral_and_a_chain_of_one_is_that_one(params: Tree, a: Rule) -> None:
    for rule in (chain(a), chain(identity(), a), chain(a, identity())):
        assert same(after(rule, params), after(a, params))
    assert same(after(identity(), params)[:1], (params,))
    assert identity().init(params) == {}


@given(params=trees(), rule=links, data=st.data())
def test_a_mask_is_the_rule_on_its_part_and_nothing_on_the_rest(params: Tree, rule: Rule, data: st.DataObject) -> None:
    paths = data.draw(st.sets(st.sampled_from(list(leaves(params))), min_size=1))
    masked, grads, slot = after(mask(lambda tree: paths, rule), params)
    part = from_leaves({path: leaf for path, leaf in leaves(params).items() if path in paths})
    wanted, wanted_grads, wanted_slot = after(rule, part)
    for path, leaf in leaves(params).items():
        if path in paths:
            assert same_bits({"x": leaves(masked)[path]}, {"x": leaves(wanted)[path]})
            assert same_bits({"x": leaves(grads)[path]}, {"x": leaves(wanted_grads)[path]})
        else:
            assert same_bits({"x": leaves(masked)[path]}, {"x": leaf})
    assert same_bits(slot, wanted_slot)


@given(params=trees(), one=links, two=links, data=st.data())
def test_a_partition_gives_each_part_its_own_rule(params: Tree, one: Rule, two: Rule, data: st.DataObject) -> None:
    paths = data.draw(st.sets(st.sampled_from(list(leaves(params))), min_size=1))
    moved, _, slot = after(partition({"some": (lambda tree: paths, one)}, rest=two), params)
    first, _, first_slot = after(mask(lambda tree: paths, one), params)
    others = set(leaves(params)) - paths
    second, _, second_slot = after(mask(lambda tree: others, two), params)
    wanted = {path: leaves(first if path in paths else second)[path] for path in leaves(params)}
    assert same_bits(moved, from_leaves(wanted))
    assert same_bits(slot.get("some", {}), first_slot)
    assert same_bits(slot.get("rest", {}), second_slot)


@given(params=trees(), data=st.data())
def test_what_is_frozen_keeps_its_bits_and_has_no_slot(params: Tree, data: st.DataObject) -> None:
    paths = data.draw(st.sets(st.sampled_from(list(leaves(params))), min_size=1))
    moved, _, slot = after(partition({"frozen": (lambda tree: paths, freeze())}, rest=adamw()), params)
    for path in paths:
        assert same_bits({"x": leaves(moved)[path]}, {"x": leaves(params)[path]})
    held = {path.removeprefix("rest.adam.first.") for path in leaves(slot) if path.startswith("rest.adam.first.")}
    assert held == set(leaves(params)) - paths


@given(params=trees(), lr=st.sampled_from([0.25, 0.5, 2.0]), weight=st.sampled_from([0.0, 0.5, 2.0]))
def test_a_scaled_rule_is_the_rule_at_another_rate_and_factors_multiply(params: Tree, lr: float, weight: float) -> None:
    grads = tree_map(lambda leaf: leaf * 0.5 + 1, params)
    rule = adamw()
    _, wanted, _ = rule.update(grads, params, rule.init(params), now(0.125 * lr, 0.5 * weight))
    for scaled_ in (scaled(rule, lr=lr, decay=weight), scaled(scaled(rule, lr=lr), decay=weight, where="*")):
        _, moved, _ = scaled_.update(grads, params, rule.init(params), now(0.125, 0.5))
        assert same_bits(moved, wanted)


@given(params=trees(), limit=st.floats(0.01, 100))
def test_clipping_keeps_directions_within_the_limit_and_what_is_small_as_it_is(params: Tree, limit: float) -> None:
    clipped, _, _ = clip_norm(limit).update(params, params, {}, now(1.0))
    before, then = global_norm(params), global_norm(clipped)
    assert then <= limit * (1 + 1e-5)
    if before + 1e-6 <= limit:
        assert same_bits(clipped, params)
    assert largest_gap(tree_map(lambda g: g * before, clipped), tree_map(lambda g: g * then, params)) <= 1e-4 * (
        1 + before * then
    )
    held, _, _ = clip_value(limit).update(params, params, {}, now(1.0))
    assert same_bits(held, tree_map(lambda g: g.clamp(-limit, limit), params))


@given(seed=st.integers(0, 2**32 - 1), size=st.floats(1e-30, 1e30))
def test_rounding_by_chance_is_right_on_average_and_exact_for_what_bf16_has(seed: int, size: float) -> None:
    value = torch.tensor(size, dtype=torch.float32)
    down = (value.view(torch.int32) & ~0xFFFF).view(torch.float32)
    up = (value.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)
    drawn = round_by_chance(value.expand(4096).clone(), torch.tensor(seed)).float()
    assert set(drawn.tolist()) <= {down.item(), up.item()}
    if up > down:
        share, wanted = (drawn == up).double().mean(), (value.double() - down) / (up.double() - down)
        assert abs(share - wanted) < 0.05  # 6 standard deviations of 4096 draws
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), 2.0**-133])
    assert same_bits({"x": round_by_chance(exact, torch.tensor(seed)).float()}, {"x": exact})
    assert round_by_chance(torch.tensor([float("nan")]), torch.tensor(seed)).isnan().all()


@given(
    params=trees(),
    seed=st.integers(0, 2**32 - 1),
    weight=st.sampled_from([0.0, 0.1]),
    betas=st.tuples(st.sampled_from([0.0, 0.9]), st.sampled_from([0.95, 0.999])),
)
def test_adamw_follows_the_published_algorithm(
    params: Tree, seed: int, weight: float, betas: tuple[float, float]
) -> None:
    draw = np.random.default_rng(seed)
    rule = adamw(beta1=betas[0], beta2=betas[1], eps=1e-8)
    slot, values = rule.init(params), params
    exact = {path: leaf.double().numpy().copy() for path, leaf in leaves(params).items()}
    m = {path: np.zeros_like(value) for path, value in exact.items()}
    v = {path: np.zeros_like(value) for path, value in exact.items()}
    for t in range(1, 9):
        lr = 0.1 / t
        grads = tree_map(lambda leaf: torch.from_numpy(draw.normal(size=tuple(leaf.shape)).astype(np.float32)), params)
        _, values, slot = rule.update(grads, values, slot, now(lr, weight))
        for path, g in leaves(grads).items():
            g = g.double().numpy()
            m[path] = betas[0] * m[path] + (1 - betas[0]) * g
            v[path] = betas[1] * v[path] + (1 - betas[1]) * g**2
            root = np.sqrt(v[path] / (1 - betas[1] ** t)) + 1e-8
            exact[path] = exact[path] * (1 - lr * weight) - lr * m[path] / (1 - betas[0] ** t) / root
    for path, leaf in leaves(values).items():
        np.testing.assert_allclose(leaf.numpy(), exact[path], rtol=2e-6, atol=2e-6)
