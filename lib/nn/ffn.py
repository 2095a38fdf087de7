"""The gated feed-forward layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lib.nn.linear import linear
from lib.shapes import Float

__all__ = ["swiglu"]


def swiglu(
    x: Float[Tensor, "... d"], gate: Float[Tensor, "f d"], up: Float[Tensor, "f d"], down: Float[Tensor, "d f"]
) -> Float[Tensor, "... d"]:
    """Compute down(silu(gate x) * up x).

    Source: Shazeer 2020, eq. 6, arXiv:2002.05202.
    """
    return linear(F.silu(linear(x, gate)) * linear(x, up), down)
