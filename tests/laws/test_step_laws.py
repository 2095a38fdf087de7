"""The step: same inputs, same bits; inputs untouched; one form for ever; parts of a batch add up; refusal leaves no trace."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from lib.config import Batch, Guard, Model, Optim, Recipe, Scale
from lib.state import abstract_state, init_state
from lib.step import eval_step, make_train_step, train_step
from lib.testing import check_step
from lib.testing.case import reshaped
from lib.testing.strategies import batches as drawn
from lib.testing.strategies import lm_batch, recipes, states, trees
from lib.tree import Tree, leaves, tree_map
from tests.strategies import (
    FEW,
    PLAIN,
    SEEN,
    SPOILS,
    bits,
    form,
    given_gradients,
    gradients,
    largest_gap,
    own,
    same_bits,
    tiny,
    with_leaves,
)

SMALL = st.integers(0, 2**32 - 1)
VALID = st.sampled_from([0.0, 0.3, 1.0])


def batches(recipe: Recipe, seed: int, valid: float, count: int = 2) -> list[TensorDict]:
    return [lm_batch(recipe, seed + n, valid=valid, number=n + 1) for n in range(count)]


# Purity ---------------------------------------------------------------------------------------------------------------


@FEW
@given(recipe=recipes(), data=st.data())
def test_any_recipe_is_pure_and_deterministic(recipe: Recipe, data: st.DataObject) -> None:
    state, some = data.draw(states(recipe)), data.draw(drawn(recipe))
    check_step(train_step, state, some, laws=["purity", "determinism", "structure", "resume"])
    assert state["recipe"] == recipe


@FEW
@given(recipe=recipes(), seed=SMALL, valid=VALID)
def test_evaluation_is_so_too(recipe: Recipe, seed: int, valid: float) -> None:
    def step(state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        return state.clone(), eval_step(state, batch)

    laws = ["purity", "determinism", "structure"]
    check_step(step, init_state(recipe, seed=seed), batches(recipe, seed, valid), laws=laws)


def order(state: TensorDict) -> list[str]:
    """Keys as the containers hold them, which compiled code is guarded by."""
    return [str(key) for key in state.keys(include_nested=True)]


@FEW
@given(recipe=recipes(), seed=SMALL, valid=VALID)
def test_the_form_of_state_and_metrics_is_a_fixed_point(recipe: Recipe, seed: int, valid: float) -> None:
    state = init_state(recipe)
    start, told = form(state), []
    assert start == form(abstract_state(recipe))
    for batch in batches(recipe, seed, valid, 2):
        state, metrics = train_step(state, batch)
        assert form(state) == start
        assert state.batch_size == torch.Size([])
        assert order(state) == order(init_state(recipe)) == order(abstract_state(recipe))
        assert all(leaf.is_contiguous() for leaf in leaves(state).values())
        told.append(form(metrics))
    assert told[0] == told[1]
    assert state["recipe"] == recipe


def test_the_step_is_the_same_inside_no_grad() -> None:
    recipe = tiny()
    state, batch = init_state(recipe), lm_batch(recipe)
    with torch.no_grad():
        inside, _ = train_step(state, batch)
    assert same_bits(inside, train_step(state, batch)[0])


# Parts of a batch -----------------------------------------------------------------------------------------------------


@FEW
@given(seed=SMALL, dropout=st.sampled_from([0.0, 0.5]), empty=st.integers(-1, 3), data=st.data())
def test_micro_batches_of_unequal_counts_are_one_batch(
    seed: int, dropout: float, empty: int, data: st.DataObject
) -> None:
    """Gradients and losses of 4 rows cut into 1, 2 and 4 parts; counts from 0 to 6, perhaps a part without any."""
    model = Model(width=8, depth=1, heads=2, inner=8, vocab=12, dropout=dropout)
    recipe = tiny(model=model, batch=Batch(rows=4, length=6, micro=1), optim=Optim(beta1=0.0, clip=None))
    counts = [0 if row == empty else data.draw(st.integers(0, 6)) for row in range(4)]
    mask = torch.arange(6) < torch.tensor(counts)[:, None]
    batch = with_leaves(lm_batch(recipe, seed), mask=mask[None])
    results = []
    for micro in (1, 2, 4):
        cut = msgspec.structs.replace(recipe, batch=Batch(rows=4, length=6, micro=micro))
        results.append(train_step(init_state(cut), reshaped(batch, micro)))
    (one, told), *others = results
    assert told["tokens"].item() == sum(counts)
    for other, told_too in others:
        # the same numbers added in another order
        assert told_too["loss_nats"].item() == pytest.approx(told["loss_nats"].item(), rel=1e-5, abs=1e-6)
        assert told_too["tokens"].item() == told["tokens"].item()
        assert largest_gap(other["optimizer", "adam", "first"], one["optimizer", "adam", "first"]) < 1e-5
        assert same_bits(other["cursor"], one["cursor"])


def test_eight_sequences_of_uneven_counts_give_one_gradient_however_they_are_cut() -> None:
    counts = torch.tensor([6, 6, 1, 0, 4, 2, 5, 1])
    recipe = tiny(batch=Batch(rows=8, length=6), optim=Optim(beta1=0.0, clip=None))
    batch = with_leaves(lm_batch(recipe), mask=(torch.arange(6) < counts[:, None])[None])
    whole, told = train_step(init_state(recipe), batch)
    for micro in (2, 4, 8):
        cut = msgspec.structs.replace(recipe, batch=Batch(rows=8, length=6, micro=micro))
        parts, told_too = train_step(init_state(cut), reshaped(batch, micro))
        assert told_too["loss_nats"].item() == pytest.approx(told["loss_nats"].item(), abs=1e-6)
        assert largest_gap(parts["optimizer", "adam", "first"], whole["optimizer", "adam", "first"]) < 1e-6


WHOLE = st.integers(-1000, 1000).map(float)


@given(parts=st.lists(st.tuples(WHOLE, WHOLE, st.integers(0, 8)), min_size=1, max_size=5), data=st.data())
def test_the_order_of_micro_batches_never_shows_where_sums_are_exact(
    parts: list[tuple[float, float, int]], data: st.DataObject
) -> None:
    step, state = make_train_step(given_gradients, rule=SEEN), init_state(own(), params={"w": torch.ones(2)}, rule=SEEN)
    turned = data.draw(st.permutations(parts))
    one, two = (
        step(state, gradients(*({"w": [a, b]} for a, b, _ in order), counts=tuple(n for *_, n in order)))
        for order in (parts, turned)
    )
    assert same_bits(one[0], two[0])
    assert same_bits(one[1], two[1])
    total = sum(n for *_, n in parts)
    if total:
        wanted = torch.tensor([sum(a for a, *_ in parts), sum(b for _, b, _ in parts)]) / total
        assert torch.equal(one[0]["optimizer", "grads", "w"], wanted)


@FEW
@given(recipe=recipes(), seed=SMALL)
def test_a_batch_without_targets_changes_nothing_that_was_learnt(recipe: Recipe, seed: int) -> None:
    first, empty = batches(recipe, seed, 1.0, 1)[0], lm_batch(recipe, seed, valid=0.0, number=2)
    state, _ = train_step(init_state(recipe), first)
    new, metrics = train_step(state, empty)
    for slot in ("params", "optimizer", "average", "window", "scale", "key"):
        assert slot not in state or bits({"x": new[slot]}) == bits({"x": state[slot]}), slot
    assert new["step"].item() == 2
    assert same_bits(new["cursor"], empty["cursor"])
    assert (metrics["tokens"].item(), metrics["refused"].item()) == (0, False)
    assert all(torch.isfinite(leaf).all() for leaf in leaves(metrics).values())


# Refusal --------------------------------------------------------------------------------------------------------------


def filled(tree: Tree) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in leaves(tree).items() if leaf.numel()}


@given(
    params=trees().filter(filled),
    spoil=st.sampled_from(SPOILS),
    micro=st.integers(1, 3),
    counts=st.sampled_from(["step", "applied"]),
    data=st.data(),
)
def test_one_element_of_one_leaf_of_one_micro_batch_refuses_the_update(
    params: Tree, spoil: float, micro: int, counts: str, data: st.DataObject
) -> None:
    recipe = own(
        average=0.5,
        decay=0.1,
        guard=Guard(window=4),
        scale=Scale(dynamic=True, initial=4.0, every=2),
        schedule=msgspec.structs.replace(Recipe().schedule, counts=counts),
    )
    parts = [{path: torch.ones_like(leaf) for path, leaf in leaves(params).items()} for _ in range(micro)]
    good = gradients(*parts)
    state, _ = PLAIN(init_state(recipe, params=params), good)
    path = data.draw(st.sampled_from(list(filled(params))))
    bad = [{name: leaf.clone() for name, leaf in part.items()} for part in parts]
    spoilt = bad[data.draw(st.integers(0, micro - 1))][path]
    spoilt.view(-1)[data.draw(st.integers(0, spoilt.numel() - 1))] = spoil
    new, metrics = PLAIN(state, gradients(*bad))
    assert metrics["refused"].item()
    for slot in ("params", "optimizer", "average", "window", "key"):
        assert bits({"x": new[slot]}) == bits({"x": state[slot]}), slot
    assert (new["step"].item(), new["cursor", "batch"].item()) == (2, 2)
    assert new["scheduler", "position"].item() == (2 if counts == "step" else 1)
    scale = {name: leaf.item() for name, leaf in leaves(new["scale"]).items()}
    assert scale == {"scale": 2.0, "good": 0, "bad": 1, "skipped": 1}
    again, _ = PLAIN(new, good)
    clean, _ = PLAIN(state, good)
    for slot in ("params", "optimizer", "average"):
        assert bits({"x": again[slot]}) == bits({"x": clean[slot]}), slot


@FEW
@given(recipe=recipes(), seed=SMALL, spoil=st.sampled_from(SPOILS), data=st.data())
def test_a_language_model_with_one_bad_weight_is_refused_and_kept(
    recipe: Recipe, seed: int, spoil: float, data: st.DataObject
) -> None:
    state, (batch,) = init_state(recipe), batches(recipe, seed, 1.0, 1)
    path = data.draw(st.sampled_from(["norm", "blocks.ffn.norm", "blocks.attention.norm", "blocks.ffn.down"]))
    leaf = state[("params", *path.split("."))]
    leaf.view(-1)[data.draw(st.integers(0, leaf.numel() - 1))] = spoil
    new, metrics = train_step(state, batch)
    assert metrics["refused"].item()
    for slot in ("params", "optimizer", "average", "window", "key"):
        assert slot not in state or bits({"x": new[slot]}) == bits({"x": state[slot]}), slot
    assert new["scale", "bad"].item() == new["scale", "skipped"].item() == 1
    assert same_bits(new["cursor"], batch["cursor"])


# Clipping -------------------------------------------------------------------------------------------------------------


@given(grads=trees().filter(filled), limit=st.floats(1e-3, 1e3))
def test_clipping_keeps_the_direction_and_bounds_the_length(grads: Tree, limit: float) -> None:
    params = tree_map(torch.zeros_like, grads)
    step = make_train_step(given_gradients, rule=SEEN)
    plain_, told = step(init_state(own(clip=None), params=params, rule=SEEN), gradients(leaves(grads)))
    clipped, told_too = step(init_state(own(clip=limit), params=params, rule=SEEN), gradients(leaves(grads)))
    before, after = (
        torch.cat([leaf.flatten() for leaf in leaves(new["optimizer", "grads"]).values()]).double()
        for new in (plain_, clipped)
    )
    norm = torch.linalg.vector_norm(before).item()
    assert told["grad_norm"].item() == told_too["grad_norm"].item() == pytest.approx(norm, rel=1e-5, abs=1e-18)
    assert torch.linalg.vector_norm(after).item() <= limit * (1 + 1e-5)
    if norm + 1e-6 <= limit:
        assert same_bits(plain_["optimizer"], clipped["optimizer"])
    else:
        assert torch.allclose(after, before * (limit / (norm + 1e-6)), rtol=1e-5, atol=1e-30)
