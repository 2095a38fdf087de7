"""What is descended: penalties against their formulas in float64, and the head by chunks against the head at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lib.loss import by_chunks, cross_entropy, penalised
from lib.nn.linear import linear

PENALTIES = st.fixed_dictionaries(
    {"smoothing": st.sampled_from([0.0, 0.1, 0.5]), "z": st.sampled_from([0.0, 1e-4, 0.1])}
)


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Tensor]:
    """Activations, a head, targets and a mask, with what a masked place may hold."""
    rows, length, vocab, width = (draw(st.integers(1, most)) for most in (3, 5, 9, 4))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    mask = torch.rand(rows, length, generator=seed) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    targets = torch.randint(vocab, (rows, length), generator=seed)
    return {
        "hidden": torch.randn(rows, length, width, generator=seed) * draw(st.sampled_from([1.0, 10.0])),
        "weight": torch.randn(vocab, width, generator=seed),
        "targets": torch.where(mask, targets, draw(st.sampled_from([0, -1, 999]))),
        "mask": mask,
    }


def gradients(head: dict[str, Tensor], found: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Reported sum, count, and gradients of what is descended by activations and weights."""
    hidden, weight = head["hidden"].clone().requires_grad_(), head["weight"].clone().requires_grad_()
    descended, count, nats = found(hidden, weight)
    d_hidden, d_weight = torch.autograd.grad(descended, (hidden, weight))
    return descended.detach(), count, nats, d_hidden, d_weight


@given(head=heads(), penalty=PENALTIES)
def test_penalties_are_their_formulas(head: dict[str, Tensor], penalty: dict[str, float]) -> None:
    logits = linear(head["hidden"], head["weight"])
    descended, count, nats = penalised(logits, head["targets"], head["mask"], **penalty)
    log_p = logits.double().log_softmax(-1)
    lse = logits.double().logsumexp(-1)
    want = alone = 0.0
    for place in head["mask"].nonzero().tolist():
        own = -log_p[tuple(place)][head["targets"][tuple(place)]].item()
        spread = -log_p[tuple(place)].mean().item()
        alone += own
        want += (
            (1 - penalty["smoothing"]) * own
            + penalty["smoothing"] * spread
            + penalty["z"] * lse[tuple(place)].item() ** 2
        )
    assert descended.item() == pytest.approx(want, rel=1e-5, abs=1e-4)
    assert nats.item() == pytest.approx(alone, rel=1e-5, abs=1e-4)
    assert count == head["mask"].sum()
    plain, _ = cross_entropy(logits, head["targets"], head["mask"])
    assert nats.item() == pytest.approx(plain.item(), rel=1e-5, abs=1e-4)


@given(head=heads(), penalty=PENALTIES, chunk=st.integers(1, 20))
def test_a_head_by_chunks_has_the_loss_and_the_gradients_of_the_head_at_once(
    head: dict[str, Tensor], penalty: dict[str, float], chunk: int
) -> None:
    targets, mask = head["targets"], head["mask"]
    _, count, nats, *found = gradients(head, lambda h, w: by_chunks(h, w, targets, mask, chunk, **penalty))
    _, wanted_count, wanted_nats, *wanted = gradients(
        head, lambda h, w: penalised(linear(h, w), targets, mask, **penalty)
    )
    assert count == wanted_count
    assert nats.item() == pytest.approx(wanted_nats.item(), rel=1e-6, abs=1e-5)
    for mine, theirs in zip(found, wanted, strict=True):
        # Sums of up to 15 places in another order.
        assert (mine - theirs).abs().max().item() <= 1e-6 * max(1.0, theirs.abs().max().item()) * 4


@given(head=heads(), chunk=st.integers(1, 20))
def test_without_a_descent_it_is_the_cross_entropy_alone(head: dict[str, Tensor], chunk: int) -> None:
    targets, mask = head["targets"], head["mask"]
    found = by_chunks(head["hidden"], head["weight"], targets, mask, chunk, smoothing=0.5, z=1.0, descends=False)
    plain, _ = cross_entropy(linear(head["hidden"], head["weight"]), targets, mask)
    assert found[0].item() == found[2].item() == pytest.approx(plain.item(), rel=1e-5, abs=1e-4)


@given(head=heads(), scale=st.sampled_from([2.0**-8, 2.0**16]))
def test_a_loss_scale_scales_the_gradients_and_nothing_else(head: dict[str, Tensor], scale: float) -> None:
    targets, mask = head["targets"], head["mask"]
    hidden, weight = head["hidden"].clone().requires_grad_(), head["weight"].clone().requires_grad_()
    descended, _, _ = by_chunks(hidden, weight, targets, mask, 2)
    one = torch.autograd.grad(descended, (hidden, weight), retain_graph=True)
    two = torch.autograd.grad(descended * scale, (hidden, weight))
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a * scale, b)
