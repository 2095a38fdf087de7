"""Looking up vectors: rows, and gradients that add up in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import library

from lib.nn.embed import embed


def test_each_id_gets_its_row() -> None:
    weight = torch.arange(6.0).view(3, 2)
    assert embed(torch.tensor([[2, 0]]), weight).tolist() == [[[4.0, 5.0], [0.0, 1.0]]]


def test_the_gradient_of_a_row_is_the_sum_over_its_places() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    out = embed(torch.tensor([[1, 3, 1], [1, 0, 3]]), weight)
    (grad,) = torch.autograd.grad((out * torch.tensor([1.0, 10.0])).sum(), weight)
    assert grad.tolist() == [[1.0, 10.0], [3.0, 30.0], [0.0, 0.0], [2.0, 20.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_small_gradients_are_not_lost(dtype: torch.dtype) -> None:
    weight = torch.ones(2, 1, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(embed(torch.zeros(4, 256, dtype=torch.int64), weight).sum(), weight)
    assert grad.tolist() == [[1024.0], [0.0]]  # summed in bf16: 256
    assert grad.dtype == dtype


def test_the_operator_obeys_the_rules_of_custom_operators() -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    library.opcheck(torch.ops.purestep.embed.default, (torch.tensor([[1, 2]]), weight))
