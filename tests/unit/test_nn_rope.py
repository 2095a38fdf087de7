"""Rotary positions: worked angles, lengths kept, products that see only distances."""

from __future__ import annotations

import math

import pytest
import torch

from lib.nn.rope import rotate, rotations


def turned(x: torch.Tensor, positions: list[int], theta: float = 10_000.0) -> torch.Tensor:
    cos, sin = rotations(torch.tensor([positions]), x.shape[-1], theta)
    return rotate(x, cos, sin)


def test_the_angle_of_a_pair_is_its_position_times_a_power_of_theta() -> None:
    cos, sin = rotations(torch.tensor([[0, 1, 3]]), 4, 100.0)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [3.0, 0.3]])
    assert torch.allclose(cos[0], angles.cos())
    assert torch.allclose(sin[0], angles.sin())
    assert cos.dtype == sin.dtype == torch.float32


def test_pairs_are_the_two_halves_of_a_head() -> None:
    x = torch.tensor([1.0, 2.0, 30.0, 40.0]).view(1, 1, 1, 4)
    c, s, c2, s2 = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
    wanted = [1 * c - 30 * s, 2 * c2 - 40 * s2, 30 * c + 1 * s, 40 * c2 + 2 * s2]
    assert turned(x, [2], 100.0).flatten().tolist() == pytest.approx(wanted, rel=1e-6)


def test_position_0_turns_nothing_and_lengths_are_kept() -> None:
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turned(x, [0] * 5), x)
    assert torch.allclose(turned(x, [0, 1, 10, 100, 1000]).norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_products_see_only_the_distance() -> None:
    q, k = torch.randn(2, 1, 3, 1, 8, generator=torch.Generator().manual_seed(0))
    products = [turned(q, [a + 7, a + 9, a]) @ turned(k, [a + 2, a, a]).mT for a in (0, 5, 500)]
    for other in products[1:]:
        assert torch.allclose(other, products[0], atol=2e-4)  # fp32 angles of 500 radians are good to 3e-5
    apart = turned(q, [7, 9, 0]) @ turned(k, [3, 0, 0]).mT
    assert not torch.allclose(apart, products[0], atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_turned_in_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(1, 3, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = [1, 300, 1000]  # bf16 cannot tell 1000 from 1001
    assert turned(x, positions).dtype == dtype
    assert torch.equal(turned(x, positions), turned(x.float(), positions).to(dtype))
    assert not torch.equal(turned(x, positions), turned(x, [1, 300, 1001]))
