"""The step: what moves and what stays, refused updates, counters, and steps of one's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lib.config import Guard, Model, Optim, Precision, Scale
from lib.metrics import merge
from lib.optim import Now, Rule, adamw
from lib.random import keep_mask
from lib.state import init_state
from lib.step import eval_step, make_eval_step, make_train_step, train_step
from lib.testing.strategies import lm_batch
from lib.tree import Tree, leaves, tensordict, tree_map
from tests.strategies import (
    PLAIN,
    SEEN,
    SPOILS,
    bits,
    changed,
    form,
    given_gradients,
    gradients,
    own,
    refusal,
    run,
    same_bits,
    tiny,
    with_leaves,
)

LEARNT = ("params", "optimizer", "average", "window")


def scalar(**parts: Any) -> TensorDict:
    return init_state(own(**parts), params={"w": torch.tensor(1.0)})


def kept(new: TensorDict, old: TensorDict) -> set[str]:
    """Slots whose bits are those of before."""
    return {name for name in old.keys() if name != "recipe" and bits({"x": new[name]}) == bits({"x": old[name]})}  # noqa: SIM118


# One update -----------------------------------------------------------------------------------------------------------


def test_an_update_moves_everything_but_the_key() -> None:
    recipe = tiny(optim=Optim(average=0.9), guard=Guard(window=4))
    state = init_state(recipe, seed=5)
    new, metrics = train_step(state, lm_batch(recipe, number=7))
    assert kept(new, state) == {"key"}
    assert new["recipe"] is recipe
    assert (new["step"].item(), new["scheduler", "position"].item(), new["optimizer", "adam", "count"].item()) == (
        1,
        1,
        1,
    )
    assert new["cursor", "text", "row"].item() == 7 * 4
    assert metrics["step"].item() == 1
    assert all(not torch.equal(leaf, leaves(state["params"])[path]) for path, leaf in leaves(new["params"]).items())


def test_training_lowers_the_loss() -> None:
    recipe = tiny(optim=Optim(lr=1e-2))
    batch = lm_batch(recipe)
    _, rows = run(train_step, init_state(recipe), [batch] * 15)
    assert rows[-1]["loss_nats"] < 0.8 * rows[0]["loss_nats"]


def test_a_batch_of_other_sources_is_refused_by_name() -> None:
    state = init_state(tiny(), cursor={"code": {"row": torch.tensor(3)}})
    message = "batch.cursor: missing code.row, extra text.epoch, extra text.row; both trees must have the same paths"
    assert refusal(train_step, state, lm_batch(tiny())) == message


@pytest.mark.parametrize("start", [2**31 - 1, 2**24, 2**53])
def test_counters_are_exact_at_any_size(start: int) -> None:
    state = changed(
        init_state(own(), params={"w": torch.tensor(1.0)}, cursor={"tokens": torch.tensor(0)}),
        step=start,
        scheduler__position=start,
        optimizer__adam__count=start,
        scale__skipped=start,
        cursor__tokens=start,
    )
    batch = gradients({"w": 1.0})
    batch["cursor"] = TensorDict({"tokens": state["cursor", "tokens"] + 8})
    new, metrics = PLAIN(state, batch)
    new, _ = PLAIN(new, with_cursor(gradients({"w": math.nan}), start + 16))
    assert new["cursor", "tokens"].item() == start + 16
    assert new["step"].item() == start + 2
    assert new["scheduler", "position"].item() == start + 2
    assert new["optimizer", "adam", "count"].item() == start + 1
    assert new["scale", "skipped"].item() == start + 1
    assert metrics["step"].item() == start + 1


def with_cursor(batch: TensorDict, tokens: int) -> TensorDict:
    batch["cursor"] = TensorDict({"tokens": torch.tensor(tokens)})
    return batch


# No targets -----------------------------------------------------------------------------------------------------------


def test_a_batch_without_targets_changes_nothing_that_was_learnt() -> None:
    recipe = tiny(optim=Optim(average=0.9), guard=Guard(window=4), scale=Scale(dynamic=True, initial=8.0))
    state, _ = train_step(init_state(recipe), lm_batch(recipe))
    new, metrics = train_step(state, lm_batch(recipe, 1, valid=0.0, number=2))
    assert kept(new, state) == {*LEARNT, "scale", "key"}
    assert (new["step"].item(), new["cursor", "text", "row"].item(), new["scheduler", "position"].item()) == (2, 8, 2)
    assert (metrics["tokens"].item(), metrics["loss_nats"].item(), metrics["grad_norm"].item()) == (0, 0.0, 0.0)
    assert not metrics["refused"]
    assert all(torch.isfinite(leaf).all() for leaf in leaves(metrics).values())


def test_a_micro_batch_without_targets_among_good_ones_is_as_if_it_were_not_there() -> None:
    step = make_train_step(given_gradients, rule=SEEN)
    state = init_state(own(), params={"w": torch.tensor(1.0)}, rule=SEEN)
    good = {"w": 3.0}, {"w": 5.0}
    with_, told = step(state, gradients(good[0], {"w": 0.0}, good[1], counts=(2, 0, 2)))
    without, told_too = step(state, gradients(*good, counts=(2, 2)))
    assert with_["optimizer", "grads", "w"].item() == without["optimizer", "grads", "w"].item() == 2.0
    assert told["loss_nats"].item() == told_too["loss_nats"].item()


# Refused updates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("at", range(4))
def test_one_bad_micro_batch_refuses_the_whole_update_and_leaves_no_trace(spoil: float, at: int) -> None:
    values = [{"w": 1.0}, {"w": 2.0}, {"w": 3.0}, {"w": 4.0}]
    good = gradients(*values)
    state, _ = PLAIN(scalar(average=0.9), good)
    values[at] = {"w": spoil}
    new, metrics = PLAIN(state, gradients(*values))
    assert metrics["refused"].item()
    assert kept(new, state) == {"params", "optimizer", "average", "key"}
    after, _ = PLAIN(new, good)
    clean, _ = PLAIN(state, good)
    for slot in ("params", "optimizer", "average"):
        assert bits(after[slot]) == bits(clean[slot])


def test_good_and_bad_updates_in_turn_never_make_two_bad_ones_in_a_row() -> None:
    state, seen = scalar(scale=Scale(dynamic=True, initial=8.0)), []
    for n, value in enumerate((1.0, math.inf, 1.0, math.nan, 1.0), 1):
        old = state
        state, metrics = PLAIN(state, gradients({"w": value}))
        assert metrics["refused"].item() is (not math.isfinite(value))
        assert ({"params", "optimizer"} <= kept(state, old)) is (not math.isfinite(value))
        assert (state["step"].item(), state["cursor", "batch"].item()) == (n, n)
        seen.append((state["scale", "bad"].item(), state["scale", "skipped"].item(), state["scale", "scale"].item()))
    assert seen == [(0, 0, 8.0), (1, 1, 4.0), (0, 1, 4.0), (1, 2, 2.0), (0, 2, 2.0)]
    assert state["optimizer", "adam", "count"].item() == 3


@pytest.mark.parametrize("path", ["embed.weight", "blocks.attention.wo", "blocks.ffn.norm", "norm"])
@pytest.mark.parametrize("spoil", SPOILS)
def test_a_parameter_gone_bad_refuses_the_update_and_keeps_its_bits(path: str, spoil: float) -> None:
    recipe = tiny(optim=Optim(average=0.9), guard=Guard(window=4))
    state = init_state(recipe)
    state[("params", *path.split("."))].view(-1)[-1] = spoil
    new, metrics = train_step(state, lm_batch(recipe, valid=1.0))
    assert metrics["refused"].item()
    assert kept(new, state) == {*LEARNT, "key"}


def test_a_gradient_that_is_not_finite_is_refused_though_the_loss_is() -> None:
    def root(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        return (params["w"] * batch["x"]).sqrt().sum(), torch.tensor(1)

    new, metrics = make_train_step(root)(scalar(), tensordict({"x": torch.zeros(1)}))
    assert metrics["loss_nats"].item() == 0.0
    assert not math.isfinite(metrics["grad_norm"].item())
    assert metrics["refused"].item()
    assert new["params", "w"].item() == 1.0


def test_a_loss_that_is_not_finite_is_refused_though_the_gradient_is() -> None:
    def beyond(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        return params["w"] * batch["x"] + math.inf, torch.tensor(1)

    new, metrics = make_train_step(beyond)(scalar(), tensordict({"x": torch.ones(1)}))
    assert metrics["grad_norm"].item() == 1.0
    assert metrics["refused"].item()
    assert new["params", "w"].item() == 1.0


# fp16 -----------------------------------------------------------------------------------------------------------------


def tiny_gradient(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """d loss / d w = 1e-8, passed back through fp16."""
    return params["w"].to(torch.float32).sum() * 1e-8, torch.tensor(1)


@pytest.mark.parametrize(("scale", "wanted"), [(1.0, 0.0), (1024.0, 1.0012e-8)])
def test_the_scale_saves_small_gradients_from_fp16(scale: float, wanted: float) -> None:
    recipe = own(precision=Precision(compute="fp16"), scale=Scale(initial=scale))
    state = init_state(recipe, params={"w": torch.tensor(1.0)}, rule=SEEN)
    new, metrics = make_train_step(tiny_gradient, rule=SEEN)(state, tensordict({"x": torch.zeros(1)}))
    assert new["optimizer", "grads", "w"].item() == pytest.approx(wanted, rel=1e-4)
    assert not metrics["refused"]


def test_an_overflow_of_fp16_is_refused_and_halves_the_scale() -> None:
    def big(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        assert params["w"].dtype == batch["x"].dtype == torch.float16
        return (params["w"] * batch["x"]).sum(), torch.tensor(1)

    state = scalar(precision=Precision(compute="fp16"), scale=Scale(initial=4.0))
    step, rows = make_train_step(big), []
    for _ in range(3):
        state, metrics = step(state, tensordict({"x": torch.tensor([30000.0])}))
        rows.append((metrics["scale"].item(), metrics["refused"].item()))
    assert rows == [(4.0, True), (2.0, False), (2.0, False)]  # 4 * 30000 is more than 65504, 2 * 30000 is not
    assert state["params", "w"].dtype == torch.float32
    _, metrics = step(state, tensordict({"x": torch.tensor([70000.0])}))
    assert metrics["refused"].item()


def test_the_language_model_trains_in_fp16_once_its_scale_has_settled() -> None:
    recipe = tiny(precision=Precision(compute="fp16"), optim=Optim(lr=1e-2))
    state, rows = run(train_step, init_state(recipe), [lm_batch(recipe)] * 12)
    refused = [row["refused"].item() for row in rows]
    assert refused[0]
    assert sum(refused) < 8
    assert state["scale", "scale"].item() == 65536 / 2 ** sum(refused)
    assert rows[-1]["loss_nats"] < 0.9 * rows[0]["loss_nats"]


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_evaluation_draws_nothing_and_merges_to_the_whole() -> None:
    recipe = tiny(model=Model(width=8, depth=1, heads=2, inner=8, vocab=12, dropout=0.5))
    state, batch = init_state(recipe), lm_batch(recipe)
    whole = eval_step(state, batch)
    assert same_bits(whole, eval_step(changed(state, key=9, step=5), batch))
    first = torch.tensor([True, False])[:, None, None]
    parts = [with_leaves(batch, mask=batch["mask"] & keep) for keep in (first, ~first)]
    merged = merge([eval_step(state, part) for part in parts])
    assert merged["loss_nats"].item() == pytest.approx(whole["loss_nats"].item(), rel=1e-6)
    assert merged["tokens"].item() == whole["tokens"].item() == int(batch["mask"].sum())
    assert not any(leaf.requires_grad for leaf in leaves(whole).values())


def test_evaluation_leaves_its_inputs_alone_and_may_come_between_steps() -> None:
    recipe = tiny(model=Model(width=8, depth=1, heads=2, inner=8, vocab=12, dropout=0.5))
    state, batch = init_state(recipe), lm_batch(recipe)
    before = bits(state), bits(batch)
    straight, _ = train_step(state, batch)
    eval_step(state, batch)
    between, _ = train_step(state, batch)
    assert same_bits(straight, between)
    assert (bits(state), bits(batch)) == before


# Steps of one's own ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))[..., 0]
        return out


def net() -> Net:
    module = Net()
    for n, p in enumerate(module.parameters()):
        p.data = torch.sin(torch.arange(p.numel(), dtype=torch.float32) + n).view(p.shape)
    return module


def fit(call: Any, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
    error = call(batch["x"]) - batch["y"]
    return error.square().sum(), torch.tensor(error.numel())


def points(seed: int = 0, micro: int = 2) -> TensorDict:
    draw = torch.Generator().manual_seed(seed)
    return tensordict({"x": torch.randn(micro, 5, 3, generator=draw), "y": torch.randn(micro, 5, generator=draw)})


def test_a_module_trains_as_a_plain_loop_would() -> None:
    module, recipe = net(), own(decay=0.01, clip=1.0, no_decay=())
    state, step = init_state(recipe, params=module), make_train_step(fit, module)
    twin = net()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=0.01)
    for n in range(10):
        batch = points(n)
        state, metrics = step(state, batch)
        loss = (twin(batch["x"].flatten(0, 1)) - batch["y"].flatten()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        assert metrics["loss_nats"].item() == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
    for path, p in twin.named_parameters():
        assert torch.allclose(state[("params", *path.split("."))], p, atol=1e-5), path
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), net().parameters(), strict=True))
    assert state["cursor", "batch"].item() == 10


def test_an_eval_step_of_ones_own_goes_with_it() -> None:
    module = net()
    state = init_state(own(), params=module)
    report = make_eval_step(fit, module)(state, points())
    _, metrics = make_train_step(fit, module)(state, points())
    assert report["loss_nats"].item() == pytest.approx(metrics["loss_nats"].item(), rel=1e-6)
    assert report["tokens"].item() == 10


def test_a_module_with_hidden_state_is_refused_when_the_step_is_made() -> None:
    message = "module.1: BatchNorm1d keeps running statistics outside the state; use a layer or group norm"
    for make in (make_train_step, make_eval_step):
        assert refusal(make, fit, nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))) == message


def test_a_rule_of_ones_own_is_used() -> None:
    def descend(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        moved = tree_map(lambda p, g: (p - now.lr * g).to(torch.float32), params, grads)
        return grads, moved, {"count": slot["count"] + 1}

    rule = Rule(init=lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update=descend)
    state = init_state(own(lr=0.5), params={"w": torch.tensor(1.0)}, rule=rule)
    new, _ = make_train_step(given_gradients, rule=rule)(state, gradients({"w": 0.5}))
    assert new["params", "w"].item() == 0.75
    assert new["optimizer", "count"].item() == 1
    other = adamw(beta1=0.0, beta2=0.0)
    state = init_state(own(lr=0.5), params={"w": torch.tensor(1.0)}, rule=other)
    new, _ = make_train_step(given_gradients, rule=other)(state, gradients({"w": 3.0}))
    assert new["params", "w"].item() == pytest.approx(0.5)


def test_the_key_of_a_loss_is_its_own_in_each_step_micro_batch_and_run_and_none_in_evaluation() -> None:
    seen: list[int | None] = []

    def noted(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append(None if key is None else int(key))
        return given_gradients(params, batch, key)

    step, state = make_train_step(noted), scalar()
    batch = gradients({"w": 1.0}, {"w": 1.0})
    first, _ = step(state, batch)
    step(first, batch)
    step(state, batch)
    step(changed(state, key=1), batch)
    make_eval_step(noted)(state, batch)
    one, two, again, other, none = (tuple(seen[n : n + 2]) for n in range(0, 10, 2))
    assert one == again
    assert none == (None, None)
    assert len({*one, *two, *other}) == 6


def test_dropout_of_ones_own_from_the_key_is_the_same_twice() -> None:
    def dropped(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        assert key is not None
        keep = keep_mask(key[None], 0, 64, 0.5)[0]
        return torch.where(keep, params["w"] * 2, 0.0).sum(), torch.tensor(1)

    state = init_state(own(), params={"w": torch.ones(64)}, rule=SEEN)
    step = make_train_step(dropped, rule=SEEN)
    batch = tensordict({"x": torch.zeros(1)})
    (one, _), (two, _) = step(state, batch), step(state, batch)
    next_, _ = step(one, batch)
    assert same_bits(one, two)
    assert 10 < (one["optimizer", "grads", "w"] > 0).sum() < 54
    assert not torch.equal(one["optimizer", "grads", "w"], next_["optimizer", "grads", "w"])


@pytest.mark.parametrize(
    ("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_loss_sees_parameters_and_floats_of_the_batch_in_the_compute_dtype(compute: Any, dtype: torch.dtype) -> None:
    def looked(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        assert params["w"].dtype == batch["x"].dtype == dtype
        assert batch["ids"].dtype == torch.int64
        assert batch["keep"].dtype == torch.bool
        return (params["w"] * batch["x"]).sum(), batch["keep"].sum()

    state = scalar(precision=Precision(compute=compute), scale=Scale(initial=1.0))
    batch = tensordict({"x": torch.ones(1, 3), "ids": torch.tensor([[2**40]]), "keep": torch.tensor([[True, False]])})
    new, metrics = make_train_step(looked)(state, batch)
    assert form(new) == form(state)
    assert metrics["loss_nats"].dtype == torch.float32
    assert make_eval_step(looked)(state, batch)["loss_nats"].item() == 3.0
