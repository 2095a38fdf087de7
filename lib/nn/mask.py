"""Who may attend to whom."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.shapes import Bool, Float, Int

__all__ = ["as_bias", "causal", "same_document"]


def causal(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "s t"]:
    """Each query sees the keys up to its own place; the last query stands at the last key."""
    q = torch.arange(keys - queries, keys, device=device)
    return q[:, None] >= torch.arange(keys, device=device)


def same_document(segments: Int[Tensor, "b s"]) -> Bool[Tensor, "b s s"]:
    """Each position sees the positions of its own document."""
    return segments[:, :, None] == segments[:, None, :]


def as_bias(mask: Bool[Tensor, "... s t"], dtype: torch.dtype) -> Float[Tensor, "... s t"]:
    """Turn a mask into what is added to attention scores: 0 where allowed, -inf elsewhere."""
    allowed = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, allowed, float("-inf"))
