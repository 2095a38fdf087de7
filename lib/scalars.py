"""Single numbers that whole trees are multiplied with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["constants", "together"]


def together(scalars: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Work out 0-d values once, in fp32, before the loops over parameters that use them.

    A compiler that fuses would otherwise work each out again for every vector of every parameter, powers and roots included.
    As parts of one vector they are values in memory.
    """
    return torch.stack([scalar.to(torch.float32) for scalar in scalars]).unbind(0)


def constants(*values: float | Tensor) -> tuple[Any, ...]:
    """Constants of a rule as what fp32 leaves are multiplied with: numbers stay numbers, 0-d leaves of the state become fp32."""
    if not any(isinstance(value, Tensor) for value in values):
        return values
    return together([torch.as_tensor(value, dtype=torch.float64) for value in values])
