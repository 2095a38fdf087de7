"""Slot `window`: the last accepted losses and gradient norms, against which the spike guard holds a new one."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.recipe import Guard
from lib.shapes import Bool, Float, Int
from lib.tree import Tree

__all__ = ["init", "is_spike", "score", "update"]


def init(guard: Guard) -> Tree:
    """Make an empty ring buffer.

    Slot: `loss` and `norm` fp32 [window]; int64 []: `count` values stored so far, `judged` updates that were held against
    them, and `spikes` of these.
    """
    counts = {name: torch.zeros((), dtype=torch.int64) for name in ("count", "judged", "spikes")}
    return {"loss": torch.zeros(guard.window), "norm": torch.zeros(guard.window), **counts}


def is_spike(slot: Tree, guard: Guard, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> Bool[Tensor, ""]:
    """Whether loss or norm is more than `guard.sigma` standard deviations above its mean over the window.

    Never while the window is less than half full. Values below the mean are never spikes.

    Source: the skip-step rule of OLMo 2 (arXiv:2501.00656), with the new value left out of its own statistics, refused values
    left out of the window, and choice in place of multiplication.
    """
    spiked: Tensor = _above(slot["loss"], slot["count"], loss, guard) | _above(slot["norm"], slot["count"], norm, guard)
    return spiked.logical_and(_ready(slot))


def update(
    slot: Tree,
    *,
    accept: Bool[Tensor, ""],
    spike: Bool[Tensor, ""],
    measured: Bool[Tensor, ""],
    loss: Float[Tensor, ""],
    norm: Float[Tensor, ""],
) -> Tree:
    """Store the values of an accepted update, in place of the oldest when the window is full, and count spikes.

    Args:
        slot: as `init` makes it.
        accept: the update was accepted.
        spike: it was a spike.
        measured: it had targets, and its loss and norm are finite; else nothing is counted.
        loss: its loss.
        norm: its gradient norm.
    """
    size = slot["loss"].shape[0]
    here = (torch.arange(size, device=slot["count"].device) == slot["count"] % size) & accept
    return {
        "loss": torch.where(here, loss, slot["loss"]),
        "norm": torch.where(here, norm, slot["norm"]),
        "count": slot["count"] + accept.to(torch.int64),
        "judged": slot["judged"] + (measured & _ready(slot)).to(torch.int64),
        "spikes": slot["spikes"] + (measured & spike).to(torch.int64),
    }


def score(slot: Tree) -> Float[Tensor, ""]:
    """Share of the judged updates that were spikes, in [0, 1]; 0 before any.

    Source: the spike score of OLMo 2, arXiv:2501.00656, over the run so far and with this guard's window and sigma.
    """
    share: Tensor = slot["spikes"].to(torch.float64) / slot["judged"].clamp(min=1)
    return share.to(torch.float32)


def _ready(slot: Tree) -> Bool[Tensor, ""]:
    ready: Tensor = slot["count"] >= max(2, slot["loss"].shape[0] // 2)
    return ready


def _above(values: Tensor, count: Int[Tensor, ""], value: Tensor, guard: Guard) -> Tensor:
    held = torch.arange(values.shape[0], device=values.device) < count
    n = held.sum().clamp(min=2)
    mean = torch.where(held, values, 0.0).sum() / n
    spread = (torch.where(held, values - mean, 0.0).square().sum() / (n - 1)).sqrt()
    above: Tensor = value - mean > guard.sigma * spread
    return above
