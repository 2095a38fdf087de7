"""Slot `key`: the root of all randomness, an int64 that never changes."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.shapes import Int

__all__ = ["init", "update"]


def init(seed: int) -> Int[Tensor, ""]:
    """Make the key of a seed.

    Raises:
        ValueError: the seed is no whole number in [0, 2**63).
    """
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r} must be a whole number in [0, 2**63); give one")
    return torch.tensor(seed, dtype=torch.int64)


def update(slot: Int[Tensor, ""]) -> Int[Tensor, ""]:
    """Keep the key; every draw hashes the step's number into it."""
    return slot.clone()
