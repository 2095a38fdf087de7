"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.nn.linear import linear
from lib.shapes import Float

__all__ = ["gated", "swiglu"]


def swiglu(
    x: Float[Tensor, "... d"], gate: Float[Tensor, "f d"], up: Float[Tensor, "f d"], down: Float[Tensor, "d f"]
) -> Float[Tensor, "... d"]:
    """Compute down(silu(gate x) * up x).

    Source: Shazeer 2020, eq. 6, arXiv:2002.05202.
    """
    return linear(gated(linear(x, gate), linear(x, up)), down)


def gated(gate: Float[Tensor, "... f"], up: Float[Tensor, "... f"]) -> Float[Tensor, "... f"]:
    """Compute silu(gate) * up, keeping nothing for the backward pass but its two arguments.

    Left to autograd, silu(gate) is kept as well: one more activation of the model's widest kind in every layer.
    """
    product: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        # silu(g) = g s(g), and its slope is s(g) (1 + g (1 - s(g))); sums in fp32, as autograd's own formula does
        gate, up = ctx.saved_tensors
        g = gate.to(torch.float32)
        s = torch.sigmoid(g)
        wide = grad.to(torch.float32)
        slope = s * (1 + g * (1 - s))
        return (wide * up * slope).to(gate.dtype), (wide * (g * s)).to(up.dtype)
