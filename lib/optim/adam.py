"""Adam, and AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lib.optim.combine import Where, chain
from lib.optim.decay import decay
from lib.optim.parts import check, descend
from lib.optim.rule import Now, Rule, counter
from lib.optim.storing import stored
from lib.scalars import constants, together
from lib.tree import Tree, tree_map

__all__ = ["adam", "adamw", "scale_by_adam", "scale_by_rms"]

Moments = Literal["fp32", "bf16"]


def scale_by_adam(
    beta1: float | Tensor = 0.9,
    beta2: float | Tensor = 0.999,
    eps: float | Tensor = 1e-8,
    *,
    moments: Moments = "fp32",
) -> Rule:
    """Turn gradients into Adam's direction.

        m <- m + (1 - beta1) (g - m)
        v <- beta2 v + (1 - beta2) g^2
        g <- m / (sqrt(v) / sqrt(1 - beta2^t) + eps) / (1 - beta1^t),    t = updates applied, this one included

    Slot: `count` int64 [], `first` (m) and `second` (v) shaped as the parameters, in the dtype of `moments`. In bf16 what is
    kept is rounded up or down by chance, from the update's key, so that small changes are not lost on average; the direction
    itself is of the values before rounding.

    Source: Kingma & Ba 2015, algorithm 1, arXiv:1412.6980, in torch.optim.AdamW's order of operations.
    """
    check("adam", "beta1", beta1, below=1)
    check("adam", "beta2", beta2, below=1)
    check("adam", "eps", eps, above=0)
    if moments not in ("fp32", "bf16"):
        raise ValueError(f"adam: moments={moments!r} must be 'fp32' or 'bf16'; change it")
    dtype = torch.bfloat16 if moments == "bf16" else torch.float32

    def init(params: Tree) -> Tree:
        return {
            "count": counter(params),
            "first": tree_map(lambda p: torch.zeros_like(p, dtype=dtype), params),
            "second": tree_map(lambda p: torch.zeros_like(p, dtype=dtype), params),
        }

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        count = slot["count"] + 1
        # Counted in float64: beta^t of a long run is exact to the last bit of fp32.
        times = count.to(torch.float64)
        correction, root = together([1 / (1 - beta1**times), (1 - beta2**times).sqrt()])
        fresh1, keep2, fresh2, least = constants(1 - beta1, beta2, 1 - beta2, eps)
        first = tree_map(lambda m, g: _fp32(m) + fresh1 * (g - _fp32(m)), slot["first"], grads)
        second = tree_map(lambda v, g: _fp32(v) * keep2 + fresh2 * g * g, slot["second"], grads)
        direction = tree_map(lambda m, v: m / (v.sqrt() / root + least) * correction, first, second)
        after = {"count": count, "first": stored(first, dtype, now.key, 1), "second": stored(second, dtype, now.key, 2)}
        return direction, params, after

    return Rule(init, update, "adam")


def scale_by_rms(beta2: float | Tensor = 0.999, eps: float | Tensor = 1e-8) -> Rule:
    """Divide gradients by the root of their mean square: Adam's direction without its first moment.

        v <- beta2 v + (1 - beta2) g^2
        g <- g / (sqrt(v) / sqrt(1 - beta2^t) + eps),    t = updates applied, this one included

    Slot: `count` int64 [], `second` (v) shaped as the parameters.
    """
    check("rms", "beta2", beta2, below=1)
    check("rms", "eps", eps, above=0)

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        count = slot["count"] + 1
        (root,) = together([(1 - beta2 ** count.to(torch.float64)).sqrt()])
        keep, fresh, least = constants(beta2, 1 - beta2, eps)
        second = tree_map(lambda v, g: v * keep + fresh * g * g, slot["second"], grads)
        direction = tree_map(lambda g, v: g / (v.sqrt() / root + least), grads, second)
        return direction, params, {"count": count, "second": second}

    return Rule(lambda p: {"count": counter(p), "second": tree_map(torch.zeros_like, p)}, update, "rms")


def adam(
    *,
    beta1: float | Tensor = 0.9,
    beta2: float | Tensor = 0.999,
    eps: float | Tensor = 1e-8,
    moments: Moments = "fp32",
) -> Rule:
    """Make the Adam rule: `scale_by_adam`, then `descend`."""
    return chain(scale_by_adam(beta1, beta2, eps, moments=moments), descend())


def adamw(
    *,
    beta1: float | Tensor = 0.9,
    beta2: float | Tensor = 0.999,
    eps: float | Tensor = 1e-8,
    where: Where = "*",
    moments: Moments = "fp32",
) -> Rule:
    """Make the AdamW rule: `decay` of the parameters in `where`, then Adam.

    Source: Loshchilov & Hutter 2019, algorithm 2, arXiv:1711.05101, in torch.optim.AdamW's order of operations.
    """
    return chain(decay(where), adam(beta1=beta1, beta2=beta2, eps=eps, moments=moments))


def _fp32(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float32)
