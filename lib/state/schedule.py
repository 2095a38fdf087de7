"""Slot `scheduler`: where the schedule stands, and the hyper-parameters that a run may change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lib.recipe import Optim, Schedule
from lib.shapes import Bool, Float, Int
from lib.tree import Tree

__all__ = ["factor", "init", "update"]


def init(optim: Optim) -> Tree:
    """Start at position 0.

    Slot: `position` int64 [], updates counted so far; float64 []: `lr`, the peak rate, and `decay`, the weight decay. Changing
    one of these leaves changes the run from there on, with no new compilation.
    """
    return {
        "position": torch.zeros((), dtype=torch.int64),
        "lr": torch.tensor(optim.lr, dtype=torch.float64),
        "decay": torch.tensor(optim.decay, dtype=torch.float64),
    }


def update(slot: Tree, schedule: Schedule, *, accept: Bool[Tensor, ""]) -> Tree:
    """Advance by one update; refused ones count unless `schedule.counts` is "applied"."""
    moved = accept.to(torch.int64) if schedule.counts == "applied" else 1
    return {"position": slot["position"] + moved, "lr": slot["lr"].clone(), "decay": slot["decay"].clone()}


def factor(update_number: Int[Tensor, "..."], schedule: Schedule) -> Float[Tensor, "..."]:
    """Fraction of the peak rate that update u uses, u from 1.

        u <= W:       f = u / W
        W < u < T:    linear:  f = floor + (1 - floor) (1 - r)
                      cosine:  f = floor + (1 - floor) (1 + cos(pi r)) / 2,     r = (u - W) / (T - W)
        u >= T:       f = floor
        constant:     f = 1 for all u > W

    Args:
        update_number: u, >= 1.
        schedule: shape, W = `warmup`, T = `length`.

    Returns:
        The factor in [0, 1], float64.

    Source: Loshchilov & Hutter 2017, eq. 5, arXiv:1608.03983, held at the floor past the end.

    >>> factor(torch.arange(1, 7), Schedule(shape="linear", warmup=2, length=6, floor=0.0)).tolist()
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    u = update_number.to(torch.float64)
    warmup = schedule.warmup or 0
    after = torch.ones_like(u)
    if schedule.shape != "constant":
        length = schedule.length or 1
        r = ((u - warmup) / (length - warmup)).clamp(0.0, 1.0)
        fall = 1 - r if schedule.shape == "linear" else (1 + torch.cos(math.pi * r)) / 2
        after = schedule.floor + (1 - schedule.floor) * fall
        after = torch.where(u >= length, schedule.floor, after)
    return torch.where(u <= warmup, u / max(warmup, 1), after)
