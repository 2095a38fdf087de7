"""Products with a weight stored [out, in], as torch.nn.Linear stores it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lib.shapes import Float

__all__ = ["linear"]


def linear(x: Float[Tensor, "... i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "... o"]:
    """Multiply by a weight: y = x @ weight.T."""
    return F.linear(x, weight)
