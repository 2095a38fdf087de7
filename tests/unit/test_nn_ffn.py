"""The gated layer against its formula."""

from __future__ import annotations

import torch

from lib.nn.ffn import swiglu


def test_the_gate_passes_through_silu_and_the_other_half_does_not() -> None:
    draw = torch.Generator().manual_seed(0)
    x, gate, up, down = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((3, 4), (6, 4), (6, 4), (4, 6))
    )
    g = x @ gate.T
    wanted = (g / (1 + torch.exp(-g)) * (x @ up.T)) @ down.T
    assert torch.allclose(swiglu(x, gate, up, down), wanted, rtol=1e-12)


def test_a_gate_of_zero_lets_nothing_through() -> None:
    x = torch.ones(1, 2)
    assert swiglu(x, torch.zeros(3, 2), torch.ones(3, 2), torch.ones(2, 3)).tolist() == [[0.0, 0.0]]
