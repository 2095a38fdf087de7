"""Ours against what torch ships: the optimizer, the norm, attention, the loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lib.loss import cross_entropy
from lib.nn.attention import attend
from lib.nn.norm import rms_norm
from lib.optim import adamw
from lib.tree import tree_map

pytestmark = pytest.mark.parity


@given(
    seed=st.integers(0, 2**31),
    lr=st.floats(1e-5, 1e-1),
    decay=st.floats(0, 0.5),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0.5, 0.999),
)
def test_adamw_equals_torchs_over_fifty_updates(seed: int, lr: float, decay: float, beta1: float, beta2: float) -> None:
    source = torch.Generator().manual_seed(seed)
    params = {"a": torch.randn(3, 4, generator=source), "b": {"c": torch.randn(5, generator=source)}}
    theirs = [params["a"].clone().requires_grad_(), params["b"]["c"].clone().requires_grad_()]
    reference = torch.optim.AdamW(theirs, lr=lr, betas=(beta1, beta2), eps=1e-8, weight_decay=decay)
    rule = adamw(beta1=beta1, beta2=beta2, eps=1e-8)
    slot = rule.init(params)
    decays = tree_map(lambda _: torch.tensor(decay, dtype=torch.float64), params)
    for _ in range(50):
        grads = tree_map(lambda p: torch.randn(p.shape, generator=source), params)
        params, slot = rule.update(grads, slot, params, torch.tensor(lr, dtype=torch.float64), decays)
        for parameter, grad in zip(theirs, (grads["a"], grads["b"]["c"]), strict=True):
            parameter.grad = grad.clone()
        reference.step()
    # both round each product to fp32; torch takes the scalars of the last line in another order: some ulp an update
    for mine, parameter in zip((params["a"], params["b"]["c"]), theirs, strict=True):
        torch.testing.assert_close(mine, parameter.detach(), rtol=3e-5, atol=3e-6)


@given(seed=st.integers(0, 2**31), width=st.integers(1, 65))
def test_rms_norm_equals_torchs(seed: int, width: int) -> None:
    source = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(3, 4, width, generator=source) * 10, torch.randn(width, generator=source)
    # sums over the width in another order
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (width,), weight, 1e-5), rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 2**31), groups=st.sampled_from([1, 2, 4]), length=st.integers(1, 17))
def test_grouped_attention_equals_the_formula(seed: int, groups: int, length: int) -> None:
    source = torch.Generator().manual_seed(seed)
    q = torch.randn(2, length, 4, 8, generator=source)
    k, v = (torch.randn(2, length, groups, 8, generator=source) for _ in range(2))
    spread_k, spread_v = (x.repeat_interleave(4 // groups, dim=2) for x in (k, v))
    scores = torch.einsum("bshk,bthk->bhst", q, spread_k) / 8**0.5
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    wanted = torch.einsum("bhst,bthk->bshk", weights, spread_v)
    # an online softmax against a plain one
    torch.testing.assert_close(attend(q, k, v, None), wanted, rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 2**31), vocab=st.integers(2, 300))
def test_cross_entropy_equals_a_float64_reference(seed: int, vocab: int) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 7, vocab, generator=source) * 5
    targets = torch.randint(0, vocab, (2, 7), generator=source)
    mask = torch.rand(2, 7, generator=source) > 0.3
    nats = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    total, count = cross_entropy(logits, targets, mask)
    assert count.item() == mask.sum().item()
    # fp32 against float64
    torch.testing.assert_close(total.double(), nats[mask].sum(), rtol=1e-5, atol=1e-5)
