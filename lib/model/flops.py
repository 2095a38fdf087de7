"""Arithmetic of a model: how much one token costs."""

from __future__ import annotations

import math

from lib.model.lm import parameters
from lib.recipe import Model

__all__ = ["parameter_count", "train_flops_per_token"]


def parameter_count(model: Model) -> int:
    """Parameters, a tied head counted once."""
    return sum(math.prod(spec.shape) for spec in parameters(model).values())


def train_flops_per_token(model: Model, length: int) -> int:
    """Floating-point operations of forward and backward for one token, causal attention counted by half.

        6 * (matrix parameters, head included) + 6 * l * length * d

    Source: Kaplan et al. 2020, table 1, arXiv:2001.08361; the backward pass is twice the forward.
    """
    matrices = sum(math.prod(s.shape) for path, s in parameters(model).items() if s.std and path != "embed.weight")
    head = model.vocab * model.width if model.tied else 0
    return 6 * (matrices + head) + 6 * model.depth * length * model.width
