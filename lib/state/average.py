"""Slot `average`: a mean of the parameters as they went, beside them and never mixed up with them.

A schedule-free rule keeps a mean of its own, within its slot: `mean_of` gives whichever a state has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lib.optim import averaged
from lib.recipe import Recipe
from lib.rules import Optim
from lib.scalars import together
from lib.shapes import Int
from lib.tree import Tree, tree_map

__all__ = ["init", "mean_of", "update"]


def init(params: Tree, optim: Optim) -> Tree:
    """Start at the parameters, which count for nothing.

    Slot: `params`, the mean, shaped as the parameters; int64 []: `count`, parameters that are in it, and with windows `end`,
    the update at which the window ends that they are of, 0 before the first one.
    """
    counts = ("count",) if optim.average_last is None else ("count", "end")
    return {"params": tree_map(torch.clone, params), **{name: torch.zeros((), dtype=torch.int64) for name in counts}}


def update(slot: Tree, params: Tree, optim: Optim, number: Int[Tensor, ""]) -> Tree:
    """Take in the parameters of an update.

        a <- a + w (p - a),    w = 1 / n for "uniform",    w = (1 - d) / (1 - d^n) for a decay d

    where n counts the parameters taken in, these included. The mean is of what was taken in alone: nothing of where it
    started is left after the first. With windows, it is that of the updates of the last window that has begun, whole or so
    far, and before the first window the parameters themselves.

    Args:
        slot: as `init` makes it.
        params: the new parameters.
        optim: kind and windows.
        number: number of the update, from 1.

    Source: Polyak & Juditsky 1992 (uniform); Kingma & Ba 2015, section 3, arXiv:1412.6980, for the bias of a decay; for
    windows Izmailov et al. 2018, arXiv:1803.05407.
    """
    if optim.average_last is None:
        count = slot["count"] + 1
        return {"params": _mixed(slot["params"], params, optim, count), "count": count}
    end = _end(number, optim)
    inside, waiting = end > 0, slot["end"] == 0
    count = torch.where(inside, torch.where(end == slot["end"], slot["count"] + 1, 1), slot["count"])
    # 1 takes the parameters as they are: at the beginning of a window, and before any.
    mixed = _mixed(slot["params"], params, optim, torch.where(inside, count, 1))
    (takes,) = together([inside | waiting])
    held = tree_map(lambda a, b: torch.where(takes > 0, a, b), mixed, slot["params"])
    return {"params": held, "count": count, "end": torch.where(inside, end, slot["end"])}


def mean_of(state: Tree, recipe: Recipe) -> Tree | None:
    """The mean of the parameters that a state keeps, in its own slot or within its rule's; none = it keeps none.

    Args:
        state: a state, or what of it lies at `average.params`, or at `params` and `optimizer.free.base`.
        recipe: of the state.
    """
    if "average" in state:
        mean: Tree = state["average"]["params"]
        return mean
    slot = state.get("optimizer", {})
    if recipe.optim.rule == "schedule_free" and "free" in slot:
        return averaged(state["params"], slot["free"], recipe.optim.beta1)
    return None


def _mixed(mean: Tree, params: Tree, optim: Optim, count: Tensor) -> Tree:
    n = count.to(torch.float64)
    decay = 0.0 if optim.average in (None, "uniform") else float(optim.average)
    weight = 1 / n if optim.average == "uniform" else (1 - decay) / (1 - decay**n)
    share, first = together([weight, count == 1])
    mix: Callable[[Tensor, Tensor], Tensor] = lambda a, p: torch.where(first > 0, p, a + share * (p - a))  # noqa: E731
    return tree_map(mix, mean, params)


def _end(number: Tensor, optim: Optim) -> Tensor:
    """The end of the window that an update is in; 0 if it is in none."""
    last = optim.average_last or 0
    if optim.average_every is not None:
        end = (number + optim.average_every - 1) // optim.average_every * optim.average_every
        return torch.where(number > end - last, end, 0)
    found = torch.zeros_like(number)
    for at in optim.average_at:
        found = torch.where((number > at - last) & (number <= at), at, found)
    return found
