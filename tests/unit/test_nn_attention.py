"""Attention against its formula, and grouped heads against repeated ones."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lib.nn.attention import attend
from lib.nn.mask import causal_bias, document_bias


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One row, one head and one query at a time."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            g = h // (q.shape[2] // k.shape[2])
            for s in range(q.shape[1]):
                scores = k[b, :, g] @ q[b, s, h] / math.sqrt(q.shape[3]) + bias[b, s]
                out[b, s, h] = torch.softmax(scores, 0) @ v[b, :, g]
    return out


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_is_the_softmax_of_scaled_products(groups: int) -> None:
    q, k, v = normal(2, 5, 4, 6), normal(2, 5, groups, 6, seed=1), normal(2, 5, groups, 6, seed=2)
    bias = document_bias(torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]), torch.float64)
    assert torch.allclose(attend(q, k, v, bias), by_hand(q, k, v, bias), rtol=1e-10)


def test_without_a_bias_attention_is_causal() -> None:
    q, k, v = normal(1, 4, 2, 4), normal(1, 4, 2, 4, seed=1), normal(1, 4, 2, 4, seed=2)
    causal = causal_bias(4, 4, torch.float64)[None]
    assert torch.allclose(attend(q, k, v, None), by_hand(q, k, v, causal), rtol=1e-10)


def test_fewer_queries_than_keys() -> None:
    q, k, v = normal(1, 2, 2, 4), normal(1, 5, 1, 4, seed=1), normal(1, 5, 1, 4, seed=2)
    bias = causal_bias(2, 5, torch.float64)[None]
    assert torch.allclose(attend(q, k, v, bias), by_hand(q, k, v, bias), rtol=1e-10)


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_are_heads_whose_keys_and_values_repeat(groups: int) -> None:
    q, k, v = normal(2, 5, 4, 6), normal(2, 5, groups, 6, seed=1), normal(2, 5, groups, 6, seed=2)
    wide = [torch.cat([x[:, :, i // (4 // groups)][:, :, None] for i in range(4)], 2) for x in (k, v)]
    assert torch.equal(attend(q, k, v, None), attend(q, wide[0], wide[1], None))


def test_a_place_that_sees_only_itself_gets_its_own_value() -> None:
    q, v = normal(1, 3, 1, 4), normal(1, 3, 1, 4, seed=2)
    alone = document_bias(torch.tensor([[0, 1, 2]]), torch.float64)
    assert torch.allclose(attend(q, q, v, alone), v)


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 3, 1, 4), 1e18, dtype=torch.float32)
    assert torch.isfinite(attend(q, q, torch.ones(1, 3, 1, 4), None)).all()
