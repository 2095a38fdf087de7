"""Lion: the signs of a momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.optim.combine import Where, chain
from lib.optim.decay import decay
from lib.optim.parts import check, descend
from lib.optim.rule import Now, Rule
from lib.scalars import constants
from lib.tree import Tree, tree_map

__all__ = ["lion", "scale_by_lion"]


def scale_by_lion(beta1: float | Tensor = 0.9, beta2: float | Tensor = 0.99) -> Rule:
    """Turn gradients into Lion's direction.

        g' = sign(beta1 m + (1 - beta1) g);    m <- beta2 m + (1 - beta2) g

    Slot: `first` (m), shaped as the parameters.

    Source: Chen et al. 2023, algorithm 2, arXiv:2302.06675.
    """
    check("lion", "beta1", beta1, below=1)
    check("lion", "beta2", beta2, below=1)

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        keep1, fresh1, keep2, fresh2 = constants(beta1, 1 - beta1, beta2, 1 - beta2)
        direction = tree_map(lambda m, g: torch.sign(keep1 * m + fresh1 * g), slot["first"], grads)
        return direction, params, {"first": tree_map(lambda m, g: keep2 * m + fresh2 * g, slot["first"], grads)}

    return Rule(lambda params: {"first": tree_map(torch.zeros_like, params)}, update, "lion")


def lion(*, beta1: float | Tensor = 0.9, beta2: float | Tensor = 0.99, where: Where = "*") -> Rule:
    """Make the Lion rule: `decay`, `scale_by_lion`, `descend`. It wants a learning rate 3 to 10 times below AdamW's."""
    return chain(decay(where), scale_by_lion(beta1, beta2), descend())
