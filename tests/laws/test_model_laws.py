"""The model: causal, documents apart, layouts of the same arithmetic equal, masked targets without effect."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from lib.config import Batch, Model, Optim, Recipe
from lib.model import lm
from lib.nn.dropout import position_keys
from lib.state import init_state
from lib.step import eval_step, train_step
from lib.testing.strategies import lm_batch, models
from lib.tree import Tree, leaves, plain
from tests.strategies import FEW, gradient_of, largest_gap, same_bits, tiny, with_leaves

# An eager scan is traced, and the tracer meets warnings that it hides from whoever runs it, but not from pytest, for which
# a warning is an error before it is shown.
by_tracing = pytest.mark.filterwarnings("ignore")

SEEING = Optim(beta1=0.0, clip=None)  # the first moment is the gradient itself


def part_of(recipe: Recipe, seed: int = 0) -> Tree:
    batch = lm_batch(recipe, seed)
    return {name: batch[name][0] for name in ("inputs", "segments", "positions", "targets", "mask")}


def weights(recipe: Recipe, seed: int = 0) -> Tree:
    return plain(init_state(recipe, seed=seed)["params"])


def scores(recipe: Recipe, params: Tree, part: Tree, keys: Tensor | None = None) -> Tensor:
    assert recipe.model is not None
    return lm.logits(params, part, recipe.model, keys)


def causal(recipe: Recipe, cut: int, seed: int) -> None:
    """Change every input from `cut` on; the scores before it keep their bits, the scores after it change."""
    assert recipe.model is not None
    params, part = weights(recipe, seed), part_of(recipe, seed)
    part["segments"] = torch.zeros_like(part["segments"])
    keys = None
    if recipe.model.dropout:
        keys = position_keys(torch.tensor(seed), torch.arange(part["inputs"].shape[0]), recipe.batch.length)
    later = {**part, "inputs": part["inputs"].clone()}
    later["inputs"][:, cut:] = (later["inputs"][:, cut:] + 1) % recipe.model.vocab
    before, after = scores(recipe, params, part, keys), scores(recipe, params, later, keys)
    assert torch.equal(before[:, :cut], after[:, :cut])
    assert not torch.equal(before[:, cut:], after[:, cut:])


@given(model=models(), seed=st.integers(0, 2**32), data=st.data())
def test_a_later_id_changes_no_bit_of_an_earlier_score(model: Model, seed: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 12))
    recipe = Recipe(model=model, batch=Batch(rows=2, length=length))
    causal(recipe, data.draw(st.integers(1, length - 1)), seed)


@by_tracing
def test_a_later_id_changes_no_bit_of_an_earlier_score_by_scan_either() -> None:
    model = Model(width=8, depth=2, heads=2, kv_heads=1, inner=8, vocab=12, layers="scan")
    causal(Recipe(model=model, batch=Batch(rows=2, length=8)), 5, 3)


def test_a_long_row_is_causal_too() -> None:
    # longer than the blocks that attention kernels work in
    model = Model(width=32, depth=1, heads=2, inner=32, vocab=50)
    causal(Recipe(model=model, batch=Batch(rows=1, length=600)), 300, 1)


@given(model=models(dropout=False), seed=st.integers(0, 2**32), data=st.data())
def test_a_document_does_not_see_another_one(model: Model, seed: int, data: st.DataObject) -> None:
    model = msgspec.structs.replace(model, documents=True)
    recipe = Recipe(model=model, batch=Batch(rows=1, length=8))
    params, part = weights(recipe), part_of(recipe, seed)
    cut = data.draw(st.integers(1, 7))
    part["segments"] = (torch.arange(8) >= cut).to(torch.int64)[None] * 3
    part["positions"] = torch.cat((torch.arange(cut), torch.arange(8 - cut)))[None]
    other = {**part, "inputs": part["inputs"].clone()}
    other["inputs"][:, :cut] = (other["inputs"][:, :cut] + 1) % model.vocab
    whole = scores(recipe, params, part)
    assert torch.equal(scores(recipe, params, other)[:, cut:], whole[:, cut:])
    # and each has the scores that it would have by itself, but for the order of sums in other shapes of products
    for span in (slice(0, cut), slice(cut, 8)):
        alone = {name: leaf[:, span] for name, leaf in part.items()}
        assert torch.allclose(scores(recipe, params, alone), whole[:, span], rtol=1e-5, atol=1e-5)


@given(model=models(dropout=False), seed=st.integers(0, 2**32), shift=st.integers(1, 50))
def test_only_distances_between_positions_matter(model: Model, seed: int, shift: int) -> None:
    recipe = Recipe(model=model, batch=Batch(rows=2, length=6))
    params, part = weights(recipe), part_of(recipe, seed)
    moved = {**part, "positions": part["positions"] + shift}
    # fp32 angles of 56 radians are good to 4e-6
    assert torch.allclose(scores(recipe, params, moved), scores(recipe, params, part), atol=1e-3, rtol=1e-4)


@given(model=models(dropout=False), seed=st.integers(0, 2**32))
def test_rows_do_not_see_each_other(model: Model, seed: int) -> None:
    recipe = Recipe(model=model, batch=Batch(rows=3, length=5))
    params, part = weights(recipe), part_of(recipe, seed)
    other = {**part, "inputs": part["inputs"].clone()}
    other["inputs"][0] = (other["inputs"][0] + 1) % model.vocab
    assert torch.equal(scores(recipe, params, other)[1:], scores(recipe, params, part)[1:])


def test_shared_key_value_heads_are_heads_with_repeated_weights() -> None:
    shared = tiny(model=Model(width=16, depth=2, heads=4, kv_heads=2, inner=8, vocab=12))
    own = tiny(model=Model(width=16, depth=2, heads=4, inner=8, vocab=12))
    params, part = weights(shared), part_of(shared)
    attention = params["blocks"]["attention"]
    wide = {
        name: attention[name].view(2, 2, 4, 16).repeat_interleave(2, dim=1).reshape(2, 16, 16) for name in ("wk", "wv")
    }
    repeated = {**params, "blocks": {**params["blocks"], "attention": {**attention, **wide}}}
    assert torch.allclose(scores(shared, params, part), scores(own, repeated, part), rtol=1e-5, atol=1e-6)


# Gradients ------------------------------------------------------------------------------------------------------------


@FEW
@given(model=models(), seed=st.integers(0, 2**32), data=st.data())
def test_masked_targets_have_no_effect(model: Model, seed: int, data: st.DataObject) -> None:
    recipe = Recipe(model=model, batch=Batch(rows=2, length=4), optim=SEEING)
    state, batch = init_state(recipe), lm_batch(recipe, seed)
    garbage = data.draw(st.integers(-(2**62), 2**62))
    other = with_leaves(batch, targets=torch.where(batch["mask"], batch["targets"], garbage))
    (one, told), (two, told_too) = train_step(state, batch), train_step(state, other)
    assert same_bits(one, two)
    assert same_bits(told, told_too)


def test_a_masked_row_gives_no_gradient_to_what_it_alone_uses() -> None:
    recipe = tiny(optim=SEEING, model=Model(width=8, depth=1, heads=2, inner=8, vocab=12, tied=False))
    batch = lm_batch(recipe)
    ids = torch.full_like(batch["inputs"], 3)
    mask = torch.ones_like(batch["mask"])
    ids[0, 1], mask[0, 1] = 7, False
    grad = gradient_of(train_step, init_state(recipe), with_leaves(batch, inputs=ids, mask=mask))
    table = grad["embed"]["weight"]
    assert table[7].abs().max() == 0
    assert table[3].abs().min() > 0


def test_the_gradient_of_a_tied_head_is_the_sum_over_both_its_uses() -> None:
    tied = tiny(optim=SEEING)
    untied = msgspec.structs.replace(tied, model=msgspec.structs.replace(tied.model, tied=False))
    state, apart = init_state(tied), init_state(untied)
    apart["params", "head", "weight"] = apart["params", "embed", "weight"].clone()
    batch = lm_batch(tied)
    one, two = gradient_of(train_step, state, batch), gradient_of(train_step, apart, batch)
    both = two["embed"]["weight"] + two["head"]["weight"]
    assert torch.allclose(one["embed"]["weight"], both, rtol=1e-5, atol=1e-7)
    assert largest_gap(one["blocks"], two["blocks"]) < 1e-6


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    recipe = tiny(optim=SEEING, batch=Batch(rows=4, length=8, micro=2))
    state, batch = init_state(recipe), lm_batch(recipe)
    grad = leaves(gradient_of(train_step, state, batch))
    draw = torch.Generator().manual_seed(0)
    for path, leaf in leaves(state["params"]).items():
        direction = torch.randn(leaf.shape, generator=draw)
        direction /= direction.norm()
        losses = []
        for step in (-1e-2, 1e-2):
            moved = state.clone()
            moved[("params", *path.split("."))] = leaf + step * direction
            losses.append(eval_step(moved, batch)["loss_nats"].item())
        slope = (losses[1] - losses[0]) / 2e-2
        assert slope == pytest.approx((grad[path] * direction).sum().item(), rel=0.02, abs=1e-3), path


# Layouts of the same arithmetic ---------------------------------------------------------------------------------------


def by_scan(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, layers="scan"))


def moved_to(state: TensorDict, recipe: Recipe) -> TensorDict:
    copy = state.clone()
    copy.set_non_tensor("recipe", recipe)
    return copy


@by_tracing
@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_layers_by_scan_are_the_layers_unrolled(dropout: float) -> None:
    model = Model(width=8, depth=2, heads=2, kv_heads=1, inner=8, vocab=12, dropout=dropout)
    recipe = tiny(model=model, optim=SEEING, batch=Batch(rows=2, length=6))
    state, batch = init_state(recipe), lm_batch(recipe)
    (one, told), (two, told_too) = train_step(state, batch), train_step(moved_to(state, by_scan(recipe)), batch)
    # the same operations in the same order; scan only sums the layers' gradients into another buffer
    assert told_too["loss_nats"].item() == pytest.approx(told["loss_nats"].item(), rel=1e-6)
    assert largest_gap(one["optimizer", "adam", "first"], two["optimizer", "adam", "first"]) < 1e-6


@FEW
@given(model=models(dropout=False), seed=st.integers(0, 2**32), data=st.data())
def test_the_order_of_rows_changes_the_loss_by_rounding_at_most(model: Model, seed: int, data: st.DataObject) -> None:
    recipe = Recipe(model=model, batch=Batch(rows=4, length=4), optim=SEEING)
    state, batch = init_state(recipe), lm_batch(recipe, seed)
    order = torch.tensor(data.draw(st.permutations(range(4))))
    names = [name for name in batch.keys() if name != "cursor"]  # noqa: SIM118 (a TensorDict iterates over its rows)
    turned = with_leaves(batch, **{name: batch[name][:, order] for name in names})
    (one, told), (two, told_too) = train_step(state, batch), train_step(state, turned)
    assert told_too["loss_nats"].item() == pytest.approx(told["loss_nats"].item(), rel=1e-5)
    assert largest_gap(one["optimizer", "adam", "first"], two["optimizer", "adam", "first"]) < 1e-5
