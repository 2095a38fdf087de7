"""Single numbers that whole trees are multiplied with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["together"]


def together(scalars: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Work out 0-d values once, in fp32, before the loops over parameters that use them.

    A compiler that fuses would otherwise work each out again for every vector of every parameter, powers and roots included.
    As parts of one vector they are values in memory.
    """
    return torch.stack([scalar.to(torch.float32) for scalar in scalars]).unbind(0)
