"""Root-mean-square normalisation: worked values, scale, and fp32 inside."""

from __future__ import annotations

import pytest
import torch

from lib.nn.norm import rms_norm


def test_a_vector_is_divided_by_its_root_mean_square() -> None:
    assert rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), 1e-12).tolist() == pytest.approx([0.848528, 1.131371])
    assert rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([10.0, 0.0]), 1e-12)[0].item() == pytest.approx(8.48528)


def test_eps_is_added_to_the_mean_square() -> None:
    assert rms_norm(torch.tensor([1.0, 1.0]), torch.ones(2), 3.0).tolist() == [0.5, 0.5]
    assert rms_norm(torch.zeros(2), torch.ones(2), 1e-5).tolist() == [0.0, 0.0]


def test_the_size_of_the_input_does_not_matter() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    for size in (2.0**-20, 2.0**20):
        assert torch.allclose(rms_norm(x * size, torch.ones(64), 1e-30), rms_norm(x, torch.ones(64), 1e-30), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squares_are_taken_in_fp32(dtype: torch.dtype) -> None:
    x = torch.full((4096,), 300.0).to(
        dtype
    )  # 300 squared is more than fp16 holds, and 4096 of them more than bf16 counts
    assert rms_norm(x, torch.ones(4096, dtype=dtype), 1e-5).tolist() == [1.0] * 4096
    assert rms_norm(x, torch.ones(4096, dtype=dtype), 1e-5).dtype == dtype
