"""Slot `scale`: the loss scale, and counts of good and refused updates."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.recipe import Recipe
from lib.shapes import Bool
from lib.tree import Tree

__all__ = ["init", "update"]


def init(recipe: Recipe) -> Tree:
    """Start at `scale.initial`.

    Slot: `scale` fp32 []; int64 []: `good` updates in a row since the scale last moved, `bad` refused updates in a row,
    `skipped` refused updates in all.
    """
    start = recipe.scale.initial or (65536.0 if _dynamic(recipe) else 1.0)
    count = torch.zeros((), dtype=torch.int64)
    return {"scale": torch.tensor(start), "good": count, "bad": count.clone(), "skipped": count.clone()}


def update(
    slot: Tree, recipe: Recipe, *, finite: Bool[Tensor, ""], refused: Bool[Tensor, ""], some: Bool[Tensor, ""]
) -> Tree:
    """Grow after `scale.every` finite updates in a row, back off on overflow.

    Args:
        slot: as `init` makes it.
        recipe: bounds and factors.
        finite: loss and gradients are finite.
        refused: the update had targets and was refused, for whatever cause.
        some: the batch had valid targets; without any nothing was learnt and nothing counts.

    Source: torch.amp.GradScaler, which grows on the `every`-th good step in a row.
    """
    choice = recipe.scale
    scale, good = slot["scale"], slot["good"] + 1
    if _dynamic(recipe):
        full = good >= choice.every
        grown = torch.where(full, (scale * choice.growth).clamp(max=choice.highest), scale)
        backed = (scale * choice.backoff).clamp(min=choice.lowest)
        scale = torch.where(some, torch.where(finite, grown, backed), scale)
        good = torch.where(full, 0, good)
    return {
        "scale": scale.clone(),
        "good": torch.where(some, torch.where(finite, good, 0), slot["good"]),
        "bad": torch.where(some, torch.where(refused, slot["bad"] + 1, 0), slot["bad"]),
        "skipped": slot["skipped"] + refused.to(torch.int64),
    }


def _dynamic(recipe: Recipe) -> bool:
    return recipe.precision.compute == "fp16" if recipe.scale.dynamic is None else recipe.scale.dynamic
