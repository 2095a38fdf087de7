"""Adam with decoupled weight decay."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.optim.rule import Rule
from lib.scalars import together
from lib.tree import Tree, flatten, leaves, tree_map

__all__ = ["adamw"]


def adamw(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Rule:
    """Make the AdamW rule.

        m <- m + (1 - beta1) (g - m)
        v <- beta2 v + (1 - beta2) g^2
        p <- p - lr decay p
        p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps),    t = updates applied, this one included

    Slot: `count` int64 [], `first` (m) and `second` (v) shaped as the parameters.

    Source: Loshchilov & Hutter 2019, algorithm 2, arXiv:1711.05101; decay is multiplied by the learning rate, as in
    torch.optim.AdamW, whose order of operations is kept.
    """

    def init(params: Tree) -> Tree:
        return {
            "count": torch.zeros((), dtype=torch.int64, device=next(iter(leaves(params).values())).device),
            "first": tree_map(torch.zeros_like, params),
            "second": tree_map(torch.zeros_like, params),
        }

    def update(grads: Tree, slot: Tree, params: Tree, lr: Tensor, decays: Tree) -> tuple[Tree, Tree]:
        count = slot["count"] + 1
        # counted in float64: beta^t of a long run is exact to the last bit of fp32
        step = lr / (1 - beta1 ** count.to(torch.float64))
        root = (1 - beta2 ** count.to(torch.float64)).sqrt()
        each, rebuild = flatten(decays)
        step, root, *kept = together([step, root, *[1 - lr * decay for decay in each]])
        first = tree_map(lambda m, g: m + (1 - beta1) * (g - m), slot["first"], grads)
        second = tree_map(lambda v, g: v * beta2 + (1 - beta2) * g * g, slot["second"], grads)

        def apply(p: Tensor, m: Tensor, v: Tensor, keep: Tensor) -> Tensor:
            return p * keep - step * (m / (v.sqrt() / root + eps))

        new = tree_map(apply, params, first, second, rebuild(kept))
        return new, {"count": count, "first": first, "second": second}

    return Rule(init, update)
