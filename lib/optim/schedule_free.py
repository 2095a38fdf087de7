"""Schedule-free training: no schedule is needed, since what is used is a mean of the steps, kept implicitly."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.optim.adam import scale_by_rms
from lib.optim.combine import Where, chain, chosen
from lib.optim.parts import check
from lib.optim.rule import Now, Rule
from lib.scalars import constants, together
from lib.tree import Tree, from_leaves, leaves, tree_map

__all__ = ["averaged", "free", "schedule_free"]


def free(beta: float | Tensor = 0.9, where: Where = "*") -> Rule:
    """Step down from a base point z, and train at y, between z and the mean x of all z so far.

        d = g + decay y                       with decay for the parameters in `where`
        c = lr_max^2 / sum of lr_max^2        lr_max = greatest learning rate so far, in each update of the sum
        z <- z - lr d,    x <- x + c (z - x),    y <- (1 - beta) z + beta x

    The parameters of the state are y. What to evaluate and to keep is x, which `averaged` gives; it is not stored.

    Slot: `base` (z), shaped as the parameters; float64 []: `peak` (lr_max) and `weight` (the sum).

    Args:
        beta: in (0, 1); place of the momentum.
        where: those that decay.

    Source: Defazio et al. 2024, "The Road Less Scheduled", arXiv:2405.15682, algorithm 1 and section 4.
    """
    _check(beta)

    def init(params: Tree) -> Tree:
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(leaves(params).values())).device)
        return {"base": tree_map(torch.clone, params), "peak": zero, "weight": zero.clone()}

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        peak = torch.maximum(slot["peak"], now.lr)
        weight = slot["weight"] + peak**2
        # A rate of 0 from the first update on weighs nothing, and all points are one.
        share = torch.where(weight > 0, peak**2 / weight, 0.0)
        pull, ahead = together([share, 1 - beta * (1 - share)])
        rates, decays = now.each_rate(params), now.each_decay(params, chosen(where, params))
        step = tree_map(lambda p, g, lr, weight: lr * (g + weight * p), params, grads, rates, decays)
        # x is put in by its definition, so nothing is divided by beta; and all is taken off at once, so that with no gradient
        # even the bits of -0.0 stay.
        moved = tree_map(lambda p, z, d: p - (ahead * d - pull * (z - p)), params, slot["base"], step)
        base = tree_map(lambda z, d: z - d, slot["base"], step)
        return grads, moved, {"base": base, "peak": peak, "weight": weight}

    return Rule(init, update, "free")


def averaged(params: Tree, slot: Tree, beta: float | Tensor) -> Tree:
    """The mean x that a rule with `free` trains towards: x = y + (1 - beta) / beta (y - z).

    Args:
        params: the parameters y.
        slot: the one of `free`; a parameter without a base point was left alone, and is its own mean.
        beta: as given to `free`.
    """
    _check(beta)
    (ratio,) = constants((1 - beta) / beta)
    bases = leaves(slot["base"])
    return from_leaves(
        {path: p - ratio * (bases[path] - p) if path in bases else p.clone() for path, p in leaves(params).items()}
    )


def schedule_free(
    *, beta1: float | Tensor = 0.9, beta2: float | Tensor = 0.999, eps: float | Tensor = 1e-8, where: Where = "*"
) -> Rule:
    """Make the schedule-free AdamW rule: `scale_by_rms`, then `free`. Warm up, then keep the learning rate constant.

    Source: Defazio et al. 2024, arXiv:2405.15682, algorithm 1.
    """
    return chain(scale_by_rms(beta2, eps), free(beta1, where))


def _check(beta: float | Tensor) -> None:
    check("free", "beta", beta, below=1)
    if not isinstance(beta, Tensor):
        check("free", "beta", beta, above=0)
