"""Gradients over micro-batches: sums and one division, fp32 throughout, the norm and the clip of worked examples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lib.grad import Part, accumulate, clip_factor, global_norm, micro_batches
from lib.state import init_state
from lib.step import make_train_step
from lib.tree import Tree, tensordict
from tests.strategies import PLAIN, SEEN, given_gradients, gradients, own, refusal

ONE = torch.tensor(1.0)


def per_micro(params: Tree, part: Tree, which: Part) -> tuple[Tensor, Tensor]:
    return (params["w"] * part["x"]).sum(), part["count"]


def parts(*values: float, counts: tuple[int, ...]) -> list[Tree]:
    return [{"x": torch.tensor(x), "count": torch.tensor(n)} for x, n in zip(values, counts, strict=True)]


def test_the_loss_of_an_update_is_per_target_and_not_a_mean_of_means() -> None:
    # counts 8 1 4 3 and loss sums 8 5 8 9: 30 / 16, where the mean of the means is 2.75
    found = accumulate(per_micro, {"w": ONE}, parts(8.0, 5.0, 8.0, 9.0, counts=(8, 1, 4, 3)), ONE)
    assert (found.total / found.targets).item() == 1.875
    assert found.targets.item() == 16
    step = make_train_step(given_gradients, rule=SEEN)
    state = init_state(own(), params={"w": ONE}, rule=SEEN)
    new, metrics = step(state, gradients(*({"w": x} for x in (8.0, 5.0, 8.0, 9.0)), counts=(8, 1, 4, 3)))
    assert metrics["loss_nats"].item() == 1.875
    assert metrics["grad_norm"].item() == 1.875
    assert new["optimizer", "grads", "w"].item() == 1.875


def test_a_short_window_is_divided_by_what_it_holds() -> None:
    step = make_train_step(given_gradients, rule=SEEN)
    state = init_state(own(), params={"w": ONE}, rule=SEEN)
    four, _ = step(state, gradients(*({"w": 2.0},) * 4))
    two, _ = step(state, gradients(*({"w": 2.0},) * 2))
    assert four["optimizer", "grads", "w"].item() == two["optimizer", "grads", "w"].item() == 2.0


def test_a_single_target_is_divided_by_one() -> None:
    step = make_train_step(given_gradients, rule=SEEN)
    new, metrics = step(
        init_state(own(), params={"w": ONE}, rule=SEEN), gradients({"w": 3.0}, {"w": 0.0}, counts=(1, 0))
    )
    assert (new["optimizer", "grads", "w"].item(), metrics["loss_nats"].item()) == (3.0, 3.0)


def test_gradients_are_added_in_fp32_whatever_they_are_computed_in() -> None:
    def in_bf16(params: Tree, part: Tree, which: Part) -> tuple[Tensor, Tensor]:
        return (params["w"].to(torch.bfloat16) * part["x"].to(torch.bfloat16)).sum(), part["count"]

    found = accumulate(in_bf16, {"w": ONE}, parts(256.0, 1.0, counts=(1, 1)), ONE)
    assert found.grads["w"].item() == 257.0  # in bf16: 256
    assert found.grads["w"].dtype == found.total.dtype == torch.float32


def test_a_parameter_that_is_not_used_has_gradient_zero() -> None:
    params = {"w": ONE, "idle": torch.ones(3)}
    found = accumulate(per_micro, params, parts(2.0, 3.0, counts=(1, 1)), ONE)
    assert found.grads["idle"].tolist() == [0.0, 0.0, 0.0]
    assert found.grads["w"].item() == 5.0


def test_the_loss_is_told_the_number_of_its_micro_batch() -> None:
    seen = []

    def noted(params: Tree, part: Tree, which: Part) -> tuple[Tensor, Tensor]:
        seen.append(which)
        return per_micro(params, part, which)

    accumulate(noted, {"w": ONE}, parts(1.0, 1.0, 1.0, counts=(1, 1, 1)), ONE)
    assert seen == [Part(0), Part(1), Part(2)]
    assert [which.word(ONE.device) for which in seen] == [0, 1, 2]
    assert torch.cat([which.rows(2, ONE.device) for which in seen]).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_scale_is_in_the_gradients_and_not_in_the_loss() -> None:
    found = accumulate(per_micro, {"w": ONE}, parts(3.0, counts=(1,)), torch.tensor(8.0))
    assert (found.grads["w"].item(), found.total.item()) == (24.0, 3.0)


def test_parameters_are_left_without_a_graph_and_unchanged() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    found = accumulate(per_micro, {"w": w}, parts(3.0, counts=(1,)), ONE)
    assert w.grad is None
    assert not found.grads["w"].requires_grad
    assert not found.total.requires_grad
    assert not found.targets.requires_grad


def test_gradients_are_taken_inside_no_grad_too() -> None:
    with torch.no_grad():
        found = accumulate(per_micro, {"w": ONE}, parts(3.0, counts=(1,)), ONE)
    assert found.grads["w"].item() == 3.0


def test_a_count_may_be_a_python_number() -> None:
    found = accumulate(lambda p, part, n: ((p["w"] * part["x"]).sum(), 4), {"w": ONE}, parts(8.0, counts=(1,)), ONE)
    assert (found.total / found.targets).item() == 2.0


def test_no_micro_batches_are_refused() -> None:
    message = "batch: has 0 micro-batches, must have at least one; give leaves a leading axis of 1 or more"
    assert refusal(accumulate, per_micro, {"w": ONE}, [], ONE) == message
    empty = tensordict({"grads": {"w": torch.zeros(0)}, "count": torch.zeros(0, dtype=torch.int64)})
    assert refusal(PLAIN, init_state(own(), params={"w": ONE}), empty) == message


def test_a_batch_is_cut_on_its_leading_axis_and_keeps_its_cursor() -> None:
    batch: Tree = {"x": torch.arange(6).view(2, 3), "deep": {"y": torch.arange(2)}, "cursor": {"row": torch.tensor(5)}}
    first, second = micro_batches(batch)
    assert first["x"].tolist() == [0, 1, 2]
    assert second["x"].tolist() == [3, 4, 5]
    assert (first["deep"]["y"].item(), second["deep"]["y"].item()) == (0, 1)
    assert "cursor" not in first


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        ({"x": torch.zeros(2, 3), "y": torch.zeros(3)}, "[2, 3]"),
        ({"x": torch.zeros(2, 3), "y": torch.tensor(0)}, "[0, 2]"),
        ({}, "[]"),
        ({"cursor": {"row": torch.tensor(5)}}, "[]"),
    ],
)
def test_leaves_that_disagree_on_the_leading_axis_are_refused(batch: Tree, counts: str) -> None:
    message = (
        f"batch: leaves have {counts} micro-batches on axis 0, must all have the same number; "
        f"add a leading axis with batch.unsqueeze(0) for one micro-batch"
    )
    assert refusal(micro_batches, batch) == message


def test_the_norm_is_over_all_leaves() -> None:
    tree = {"a": torch.tensor([3.0]), "b": {"c": torch.tensor([[4.0]]), "d": torch.tensor(12.0)}}
    assert global_norm(tree).item() == 13.0
    assert global_norm({"a": torch.zeros(2, 0), "b": torch.tensor([3.0])}).item() == 3.0


@pytest.mark.parametrize("spoil", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_makes_the_norm_not_finite(spoil: float) -> None:
    tree = {"a": torch.zeros(5), "b": torch.tensor([0.0, spoil])}
    assert not torch.isfinite(global_norm(tree))


@pytest.mark.parametrize(
    ("limit", "clipped"),
    [
        (None, [3.0, 4.0]),
        (10.0, [3.0, 4.0]),
        (5.0, [3.0, 4.0]),
        (1.0, [0.6, 0.8]),
        (1e-3, [0.0006, 0.0008]),
    ],
)
def test_clipping_3_4(limit: float | None, clipped: list[float]) -> None:
    factor = clip_factor(torch.tensor(5.0), limit)
    assert (torch.tensor([3.0, 4.0]) * factor).tolist() == pytest.approx(clipped, abs=1e-6)
    if limit is None or limit > 5:
        assert factor.item() == 1.0


def test_a_norm_of_zero_clips_nothing() -> None:
    assert clip_factor(torch.tensor(0.0), 1.0).item() == 1.0


@pytest.mark.parametrize("clip", [None, 1.0, 5.0, 10.0])
def test_clipping_happens_once_an_update_and_the_norm_is_told_before_it(clip: float | None) -> None:
    # [3, 0] + [0, 4]: each clipped by itself would give [1, 1]
    step = make_train_step(given_gradients, rule=SEEN)
    state = init_state(own(clip=clip), params={"w": torch.zeros(2)}, rule=SEEN)
    new, metrics = step(state, gradients({"w": [6.0, 0.0]}, {"w": [0.0, 8.0]}))
    assert metrics["grad_norm"].item() == 5.0
    wanted = [0.6, 0.8] if clip == 1.0 else [3.0, 4.0]
    assert new["optimizer", "grads", "w"].tolist() == pytest.approx(wanted, abs=1e-6)
