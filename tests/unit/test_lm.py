"""The language model against the same formulas in plain numpy, its parameters, and its loss."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lib.config import Batch, Model, Precision, Recipe, Scale
from lib.model import lm
from lib.model.lm import inner_width, parameters
from lib.model.loss import language_loss
from lib.nn.dropout import position_keys
from lib.state import init_state
from lib.step import eval_step, train_step
from lib.testing.strategies import lm_batch
from lib.tree import leaves, plain, tree_map
from tests.strategies import refusal, same_bits, tiny, with_leaves

Array = NDArray[np.float64]


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x: Array, positions: NDArray[np.int64], theta: float) -> Array:
    """x [s, k]: pairs (j, j + k/2) as complex numbers."""
    half = x.shape[1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate((z.real, z.imag), 1)


def by_hand(params: Any, model: Model, ids: Any, segments: Any, positions: Any) -> Array:
    """Logits of one row, in float64, with loops where the model has none."""
    p = {path: leaf.double().numpy() for path, leaf in leaves(params).items()}
    width = model.width // model.heads
    x = p["embed.weight"][ids]
    for layer in range(model.depth):
        a, f = (
            {name.rpartition(".")[2]: value[layer] for name, value in p.items() if name.startswith(f"blocks.{part}.")}
            for part in ("attention", "ffn")
        )
        h = norm(x, a["norm"], model.eps)
        q, k, v = h @ a["wq"].T, h @ a["wk"].T, h @ a["wv"].T
        mixed = []
        for head in range(model.heads):
            group = head // (model.heads // (model.kv_heads or model.heads))
            mine, theirs = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
            scores = turned(q[:, mine], positions, model.theta) @ turned(k[:, theirs], positions, model.theta).T
            seen = np.tril(np.ones(scores.shape, bool))
            if model.documents:
                seen &= segments[:, None] == segments[None]
            scores = np.where(seen, scores / math.sqrt(width), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, theirs])
        x = x + np.concatenate(mixed, 1) @ a["wo"].T
        h = norm(x, f["norm"], model.eps)
        gate = h @ f["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ f["up"].T)) @ f["down"].T
    out: Array = norm(x, p["norm"], model.eps) @ p["embed.weight" if model.tied else "head.weight"].T
    return out


@pytest.mark.parametrize(
    "model",
    [
        Model(width=8, depth=2, heads=2, inner=12, vocab=11, tied=True),
        Model(width=12, depth=1, heads=3, kv_heads=1, inner=4, vocab=5, tied=False, theta=100.0, eps=0.1),
        Model(width=8, depth=2, heads=4, kv_heads=2, inner=12, vocab=11, documents=False, tied=True),
        Model(width=2, depth=3, heads=1, inner=4, vocab=2, dropout=0.5),
    ],
)
def test_the_model_is_its_formula(model: Model) -> None:
    recipe = Recipe(model=model, batch=Batch(rows=2, length=7))
    params = plain(init_state(recipe)["params"])
    # norms start at 1 and embeddings small: scaled, so that each of them shows
    params = tree_map(lambda leaf: leaf * torch.linspace(0.5, 2.0, leaf.shape[-1]), params)
    batch = lm_batch(recipe)
    part = {name: batch[name][0] for name in ("inputs", "segments", "positions")}
    logits = lm.logits(params, part, model)
    assert logits.shape == (2, 7, model.vocab)
    for row in range(2):
        wanted = by_hand(params, model, *(part[name][row].numpy() for name in ("inputs", "segments", "positions")))
        np.testing.assert_allclose(logits[row].numpy(), wanted, rtol=1e-4, atol=2e-5)


def test_the_inner_width_is_8_thirds_rounded_up_to_32() -> None:
    assert [inner_width(Model(width=width, heads=1)) for width in (2, 12, 14, 128, 256)] == [32, 32, 64, 352, 704]
    assert inner_width(Model(inner=7)) == 7


def test_an_untied_head_is_one_more_parameter() -> None:
    tied, untied = parameters(Model(tied=True)), parameters(Model(tied=False))
    assert {**tied, "head.weight": tied["embed.weight"]} == untied


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_a_new_model_is_about_the_log_of_the_vocabulary_and_a_half(tied: bool) -> None:
    recipe = Recipe(model=Model(width=64, depth=4, heads=4, tied=tied), batch=Batch(rows=16, length=32))
    for seed in range(2):
        loss = eval_step(init_state(recipe, seed=seed), lm_batch(recipe, seed))["loss_nats"].item()
        assert loss == pytest.approx(math.log(260) + 0.5, abs=0.1)


def test_the_stream_does_not_grow_with_depth() -> None:
    sizes = []
    original = lm.rms_norm  # type: ignore[attr-defined]
    for depth in (1, 16):
        stream: list[float] = []

        def noted(x: torch.Tensor, weight: torch.Tensor, eps: float, stream: list[float] = stream) -> torch.Tensor:
            stream.append(x.square().mean().item())
            return original(x, weight, eps)

        recipe = Recipe(model=Model(width=64, depth=depth, heads=4), batch=Batch(rows=2, length=16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lm, "rms_norm", noted)
            eval_step(init_state(recipe), lm_batch(recipe))
        assert len(stream) == 2 * depth + 1
        sizes.append(stream[-1])
    assert sizes[1] == pytest.approx(sizes[0], rel=0.5)  # with branches of full size it would be 16 times as much


def test_the_loss_sums_over_valid_targets_and_needs_no_key_to_evaluate() -> None:
    recipe = tiny(model=Model(width=8, depth=1, heads=2, vocab=12, dropout=0.5))
    batch, params = lm_batch(recipe), plain(init_state(recipe)["params"])
    part = {name: batch[name][1] for name in ("inputs", "targets", "segments", "positions", "mask")}
    total, count = language_loss(recipe)(params, part, None, 1)
    scores = lm.logits(params, part, recipe.model)  # type: ignore[arg-type]
    nats = -torch.log_softmax(scores, -1).gather(2, part["targets"][..., None])[..., 0]
    assert total.item() == pytest.approx(nats[part["mask"]].sum().item(), rel=1e-6)
    assert count.item() == int(part["mask"].sum())


def test_torchs_mark_of_a_target_to_ignore_is_one_here_too() -> None:
    recipe = tiny()
    state, batch = init_state(recipe), lm_batch(recipe, valid=1.0)
    some = torch.arange(6) % 3 == 0
    marked, told = train_step(state, with_leaves(batch, targets=torch.where(some, -100, batch["targets"])))
    masked, told_too = train_step(state, with_leaves(batch, mask=batch["mask"] & ~some))
    assert told["tokens"].item() == 16
    assert same_bits(marked, masked)
    assert same_bits(told, told_too)


def test_dropout_is_at_every_residual_branch_and_at_the_embedding() -> None:
    model = Model(width=8, depth=2, heads=2, vocab=12, dropout=0.5)
    recipe = tiny(model=model)
    params = plain(init_state(recipe)["params"])
    batch = lm_batch(recipe)
    part = {name: batch[name][0] for name in ("inputs", "segments", "positions")}
    keys = position_keys(torch.tensor(1), torch.arange(2), 6)
    places: list[int] = []
    original = lm.dropout  # type: ignore[attr-defined]

    def noted(x: torch.Tensor, rate: float, keys: Any, site: int) -> torch.Tensor:
        places.append(site)
        return original(x, rate, keys, site)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "dropout", noted)
        lm.logits(params, part, model, keys)
    assert places == [0, 1, 2, 3, 4]


def test_a_recipe_without_a_model_has_no_language_loss() -> None:
    message = "state.recipe.model=none must be a model for train_step; use make_train_step with your own loss"
    assert refusal(language_loss, Recipe(model=None)) == message
    state = init_state(Recipe(), params={"w": torch.ones(1)})
    assert refusal(train_step, state, lm_batch(tiny())) == message
    assert refusal(eval_step, state, lm_batch(tiny())) == message


@pytest.mark.parametrize(("compute", "tolerance"), [("bf16", 0.02), ("fp16", 0.002)])
def test_narrow_computation_is_close_and_keeps_masters_and_sums_wide(compute: Any, tolerance: float) -> None:
    recipe = tiny(precision=Precision(compute=compute), scale=Scale(initial=64.0))
    wide = init_state(tiny())
    narrow = init_state(recipe)
    batch = lm_batch(recipe)
    (new, metrics), (_, wanted) = train_step(narrow, batch), train_step(wide, batch)
    assert {leaf.dtype for leaf in leaves(new["params"]).values()} == {torch.float32}
    assert {leaf.dtype for leaf in leaves(new["optimizer", "adam", "second"]).values()} == {torch.float32}
    assert metrics["loss_nats"].item() == pytest.approx(wanted["loss_nats"].item(), rel=tolerance)
    assert metrics["loss_nats"].item() != wanted["loss_nats"].item()
    assert metrics["grad_norm"].item() == pytest.approx(wanted["grad_norm"].item(), rel=3 * tolerance)
    moved = new["params", "embed", "weight"] - narrow["params", "embed", "weight"]
    assert (moved.abs() < 1e-2).all()  # less than bf16 could store in a weight of 1
    assert moved.abs().max() > 0


def test_the_compute_dtype_reaches_the_matrix_products() -> None:
    seen = set()
    original = lm.linear  # type: ignore[attr-defined]

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.update((x.dtype, weight.dtype))
        return original(x, weight)

    recipe = tiny(precision=Precision(compute="bf16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "linear", noted)
        train_step(init_state(recipe), lm_batch(recipe))
    assert seen == {torch.bfloat16}


def test_the_recipe_decides_alone_and_not_the_parameters_names() -> None:
    recipe = tiny()
    state = init_state(recipe)
    other = msgspec.structs.replace(recipe, model=msgspec.structs.replace(recipe.model, documents=False))
    batch = lm_batch(recipe)
    batch["segments"] = torch.arange(6).expand(2, 2, 6).contiguous()
    apart = eval_step(state, batch)["loss_nats"]
    together = state.clone()
    together.set_non_tensor("recipe", other)
    assert eval_step(together, batch)["loss_nats"] != apart
