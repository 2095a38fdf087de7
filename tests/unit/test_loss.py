"""Cross-entropy as a sum over valid targets: worked examples, masks, and what a masked place may hold."""

from __future__ import annotations

import math

import pytest
import torch

from lib.loss import bits_per_byte, cross_entropy


def lookup(shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs 0 1 2 3 0 1 ..., a fixed model that says t + 1 after t, and targets shifted by `shift` more than one."""
    ids = torch.arange(9) % 4
    logits = torch.nn.functional.one_hot((ids + 1) % 4, 4).to(torch.float32) * 10
    return logits[None, : 8 - shift], ids[None, 1 + shift :]


def test_the_target_of_a_place_is_the_one_given_there() -> None:
    logits, targets = lookup()
    total, count = cross_entropy(logits, targets, torch.ones_like(targets, dtype=torch.bool))
    assert count.item() == 8
    assert (total / count).item() == pytest.approx(0.0001361905, abs=1e-6)  # fp32 is that fine at 10
    logits, targets = lookup(shift=1)
    total, count = cross_entropy(logits, targets, torch.ones_like(targets, dtype=torch.bool))
    assert (total / count).item() == pytest.approx(10.000136, rel=1e-6)


def test_an_end_mark_is_a_target_like_any_other() -> None:
    # [BOS a b E P]: targets a b E count though padding has the same id as E, since the mask comes from lengths
    targets = torch.tensor([[2, 3, 1, 1]])
    mask = torch.tensor([[True, True, True, False]])
    total, count = cross_entropy(torch.zeros(1, 4, 5), targets, mask)
    assert count.item() == 3
    assert total.item() == pytest.approx(3 * math.log(5))


def test_masked_places_give_no_loss_and_no_gradient_whatever_they_hold() -> None:
    logits = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    totals = []
    for garbage in (0, -1, 99, -(2**40), -100):
        targets = torch.tensor([[2, garbage, 4, garbage]])
        total, count = cross_entropy(logits, targets, mask)
        (grad,) = torch.autograd.grad(total, logits)
        assert count.item() == 2
        assert grad[0, 1].tolist() == grad[0, 3].tolist() == [0.0] * 5
        assert grad[0, 0].abs().min() > 0
        totals.append(total.item())
    assert len(set(totals)) == 1


def test_no_valid_target_is_a_loss_of_zero_and_never_nan() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    total, count = cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool))
    (grad,) = torch.autograd.grad(total, logits)
    assert (total.item(), count.item()) == (0.0, 0)
    assert grad.abs().max().item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_softmax_is_taken_in_fp32(dtype: torch.dtype) -> None:
    logits = (torch.randn(1, 64, 300, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    targets = torch.arange(64)[None]
    total, _ = cross_entropy(logits, targets, torch.ones(1, 64, dtype=torch.bool))
    exact = -torch.log_softmax(logits[0].double(), -1)[torch.arange(64), targets[0]].sum()
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)


def test_large_scores_do_not_overflow() -> None:
    total, _ = cross_entropy(torch.tensor([[[3e38, 0.0]]]), torch.tensor([[0]]), torch.tensor([[True]]))
    assert total.item() == 0.0


def test_bits_per_byte() -> None:
    nats = torch.tensor(math.log(2) * 24)
    assert bits_per_byte(nats, torch.tensor(8)).item() == pytest.approx(3.0)
    assert bits_per_byte(nats, torch.tensor(0)).item() == 0.0
    assert bits_per_byte(nats.double(), torch.tensor(2**53 + 1)).dtype == torch.float64
