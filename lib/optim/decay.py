"""Weight decay, decoupled from the gradients or within them, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lib.optim.combine import Where, chosen
from lib.optim.parts import stateless
from lib.optim.rule import Now, Rule
from lib.recipe import Recipe
from lib.tree import Tree, leaves, matching, tree_map, tree_map_named

__all__ = ["decay", "decayed", "l2", "stacked"]


def decay(where: Where = "*") -> Rule:
    """Shrink parameters: p <- p (1 - lr decay).

    Args:
        where: those that decay.

    Source: Loshchilov & Hutter 2019, arXiv:1711.05101, multiplied by the learning rate, as in torch.optim.AdamW.
    """

    def change(grads: Tree, params: Tree, now: Now) -> tuple[Tree, Tree]:
        return grads, tree_map(lambda p, keep: p * keep, params, now.each_keep(params, chosen(where, params)))

    return stateless(change)


def l2(weight: float, where: Where = "*") -> Rule:
    """Add the gradient of weight / 2 |p|^2: g <- g + weight p, which what follows scales like any gradient."""

    def change(grads: Tree, params: Tree, now: Now) -> tuple[Tree, Tree]:
        paths = chosen(where, params)

        def add(path: str, g: Tensor, p: Tensor) -> Tensor:
            return g + weight * p if path in paths else g

        return tree_map_named(add, grads, params), params

    return stateless(change)


def decayed(recipe: Recipe) -> Callable[[Tree], set[str]]:
    """Which parameters of a recipe decay.

    Without patterns these are the matrices: a vector or scalar (norm, bias, gain) is left alone. Layers stacked on axis 0
    count as the layers they are.
    """

    def those(params: Tree) -> set[str]:
        patterns = recipe.optim.no_decay
        if patterns is None:
            return {path for path, leaf in leaves(params).items() if leaf.ndim - stacked(recipe, path) >= 2}
        return set(leaves(params)) - set(matching(patterns, tuple(leaves(params))))

    return those


def stacked(recipe: Recipe, path: str) -> bool:
    """Whether axis 0 of a parameter counts layers."""
    return recipe.model is not None and path.startswith("blocks.")
