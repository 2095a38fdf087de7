"""Who sees whom, as a table."""

from __future__ import annotations

import pytest
import torch

from lib.nn.mask import causal_bias, document_bias

OPEN, SHUT = 0.0, float("-inf")


def drawn(bias: torch.Tensor) -> list[str]:
    assert set(bias.flatten().tolist()) <= {OPEN, SHUT}
    return ["".join("x" if value == OPEN else "." for value in row) for row in bias.tolist()]


def test_each_query_sees_the_keys_up_to_its_own_place() -> None:
    assert drawn(causal_bias(3, 3, torch.float32)) == ["x..", "xx.", "xxx"]


def test_the_last_query_stands_at_the_last_key() -> None:
    assert drawn(causal_bias(2, 4, torch.float32)) == ["xxx.", "xxxx"]
    assert drawn(causal_bias(1, 3, torch.float32)) == ["xxx"]


def test_a_document_sees_only_its_own_past() -> None:
    bias = document_bias(torch.tensor([[0, 0, 1, 1, 1], [5, 6, 6, 6, 9]]), torch.float32)
    assert drawn(bias[0]) == ["x....", "xx...", "..x..", "..xx.", "..xxx"]
    assert drawn(bias[1]) == ["x....", ".x...", ".xx..", ".xxx.", "....x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_has_the_dtype_it_is_added_to(dtype: torch.dtype) -> None:
    assert causal_bias(2, 2, dtype).dtype == dtype
    assert document_bias(torch.tensor([[0, 1]]), dtype).dtype == dtype
    assert drawn(document_bias(torch.tensor([[0, 1]]), dtype)[0]) == ["x.", ".x"]


def test_numbers_of_segments_beyond_int32_are_told_apart() -> None:
    assert drawn(document_bias(torch.tensor([[2**32, 2**32 + 1]]), torch.float32)[0]) == ["x.", ".x"]
    assert drawn(document_bias(torch.tensor([[0, 2**32]]), torch.float32)[0]) == ["x.", ".x"]
