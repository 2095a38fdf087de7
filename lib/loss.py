"""Losses as sums over valid targets, so that parts of a batch add up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.shapes import Bool, Float, Int

__all__ = ["bits_per_byte", "cross_entropy"]


def cross_entropy(
    logits: Float[Tensor, "b s v"], targets: Int[Tensor, "b s"], mask: Bool[Tensor, "b s"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum the loss of the valid targets, and count them.

        total = - sum over valid i of log softmax(logits_i)[target_i]

    Args:
        logits: scores, any dtype; the softmax is taken in fp32.
        targets: ids in [0, v).
        mask: which targets are valid; the others get no gradient.

    Returns:
        The sum in nats, fp32, and the number of valid targets.
    """
    wanted = torch.where(mask, targets, -100)
    total = F.cross_entropy(
        logits.to(torch.float32).flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, mask.sum()


def bits_per_byte(nats: Tensor, size_bytes: Tensor) -> Tensor:
    """Bits per byte of text: nats / (ln 2 * bytes); 0 where there are no bytes."""
    return torch.where(size_bytes > 0, nats / (math.log(2) * size_bytes.clamp(min=1)), 0.0)
