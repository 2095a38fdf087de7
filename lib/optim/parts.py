"""Small parts that rules are chained of: clipping, momentum, signs, and the step down the slope."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.grad import clip_factor, global_norm
from lib.optim.rule import Now, Rule
from lib.scalars import constants, together
from lib.tree import Tree, tree_map

__all__ = ["check", "clip_norm", "clip_value", "descend", "momentum", "sign", "stateless"]


def stateless(change: object, name: str = "") -> Rule:
    """A rule of one function, (grads, params, now) -> (grads, params), that holds nothing."""

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        after_grads, after_params = change(grads, params, now)  # type: ignore[operator]
        return after_grads, after_params, slot

    return Rule(lambda params: {}, update, name)


def descend() -> Rule:
    """Move the parameters against the gradients: p <- p - lr g."""

    def change(grads: Tree, params: Tree, now: Now) -> tuple[Tree, Tree]:
        return grads, tree_map(lambda p, g, lr: p - lr * g, params, grads, now.each_rate(params))

    return stateless(change)


def clip_norm(limit: float | Tensor) -> Rule:
    """Scale all gradients so that their global norm is at most `limit`: g <- g min(1, limit / (norm + 1e-6))."""
    check("clip_norm", "limit", limit, above=0)

    def change(grads: Tree, params: Tree, now: Now) -> tuple[Tree, Tree]:
        (factor,) = together([clip_factor(global_norm(grads), limit)])
        return tree_map(lambda g: g * factor, grads), params

    return stateless(change)


def clip_value(limit: float) -> Rule:
    """Hold each component of the gradients in [-limit, limit]."""
    check("clip_value", "limit", limit, above=0)

    def change(grads: Tree, params: Tree, now: Now) -> tuple[Tree, Tree]:
        return tree_map(lambda g: g.clamp(-limit, limit), grads), params

    return stateless(change)


def sign() -> Rule:
    """Take the signs of the gradients."""
    return stateless(lambda grads, params, now: (tree_map(torch.sign, grads), params))


def momentum(beta: float | Tensor = 0.9, *, nesterov: bool = False, average: bool = False) -> Rule:
    """Gather the gradients of past updates.

        b <- beta b + g,    g <- b, or with Nesterov's look ahead g + beta b
        average:  b <- b + (1 - beta) (g - b),    g <- b, or g + beta (b - g)

    Slot: `buffer` (b), shaped as the parameters, from zero.

    Source: Sutskever et al. 2013, in the form of torch.optim.SGD (dampening 0); `average` is that of torch.optim.Muon.
    """
    check("momentum", "beta", beta, below=1)

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        keep, fresh = constants(beta, 1 - beta)
        if average:
            buffer = tree_map(lambda b, g: b + fresh * (g - b), slot["buffer"], grads)
            ahead = tree_map(lambda b, g: g + keep * (b - g), buffer, grads)
        else:
            buffer = tree_map(lambda b, g: keep * b + g, slot["buffer"], grads)
            ahead = tree_map(lambda b, g: g + keep * b, buffer, grads)
        # A leaf is in one place of the new state only, and what goes on from here is not kept.
        return (ahead if nesterov else buffer), params, {"buffer": buffer}

    return Rule(lambda params: {"buffer": tree_map(torch.zeros_like, params)}, update, "momentum")


def check(
    part: str, name: str, value: float | Tensor, *, above: float | None = None, below: float | None = None
) -> None:
    """Check a constant that is a number: above `above`, or at least 0 and below `below`; a leaf of the state is not looked at.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, Tensor):
        return
    if above is not None and not value > above:
        raise ValueError(f"{part}: {name}={value} must be above {above}; change it")
    if below is not None and not 0 <= value < below:
        raise ValueError(f"{part}: {name}={value} must be in [0, {below}); change it")
