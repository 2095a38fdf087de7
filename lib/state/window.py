"""Slot `window`: the last accepted losses and gradient norms, against which the spike guard holds a new one."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.recipe import Guard
from lib.shapes import Bool, Float, Int
from lib.tree import Tree

__all__ = ["init", "is_spike", "update"]


def init(guard: Guard) -> Tree:
    """Make an empty ring buffer: `loss` and `norm` fp32 [window], `count` int64 [], values stored so far."""
    return {
        "loss": torch.zeros(guard.window),
        "norm": torch.zeros(guard.window),
        "count": torch.zeros((), dtype=torch.int64),
    }


def is_spike(slot: Tree, guard: Guard, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Bool[Tensor, ""]:
    """Whether loss or norm is more than `guard.sigma` standard deviations above its mean over the window.

    Never while the window is less than half full. Values below the mean are never spikes.

    Source: the skip-step rule of OLMo 2 (arXiv:2501.00656), with the new value left out of its own statistics, refused values
    left out of the window, and choice in place of multiplication.
    """
    ready = slot["count"] >= max(2, guard.window // 2)
    spiked: Tensor = _above(slot["loss"], slot["count"], loss, guard) | _above(slot["norm"], slot["count"], norm, guard)
    return spiked.logical_and(ready)


def update(slot: Tree, accept: Bool[Tensor, ""], loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Tree:
    """Store the values of an accepted update, in place of the oldest when the window is full."""
    size = slot["loss"].shape[0]
    here = (torch.arange(size, device=slot["count"].device) == slot["count"] % size) & accept
    return {
        "loss": torch.where(here, loss, slot["loss"]),
        "norm": torch.where(here, norm, slot["norm"]),
        "count": slot["count"] + accept.to(torch.int64),
    }


def _above(values: Tensor, count: Int[Tensor, ""], value: Tensor, guard: Guard) -> Tensor:
    held = torch.arange(values.shape[0], device=values.device) < count
    n = held.sum().clamp(min=2)
    mean = torch.where(held, values, 0.0).sum() / n
    spread = (torch.where(held, values - mean, 0.0).square().sum() / (n - 1)).sqrt()
    above: Tensor = value - mean > guard.sigma * spread
    return above
