"""Which parameters decay."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor

from lib.recipe import Recipe
from lib.tree import Tree, leaves, tree_map_named

__all__ = ["decay_tree", "decayed"]


def decayed(params: Tree, recipe: Recipe) -> set[str]:
    """Paths of the parameters that weight decay applies to.

    Without patterns these are the matrices: a vector or scalar (norm, bias, gain) is left alone. Layers stacked on axis 0
    count as the layers they are.

    Raises:
        ValueError: a pattern of `optim.no_decay` matches no path.
    """
    named = leaves(params)
    patterns = recipe.optim.no_decay
    if patterns is None:
        stacked = recipe.model is not None
        return {path for path, leaf in named.items() if leaf.ndim - (stacked and path.startswith("blocks.")) >= 2}
    idle = [pattern for pattern in patterns if not any(fnmatchcase(path, pattern) for path in named)]
    if idle:
        raise ValueError(
            f"optim.no_decay={idle[0]!r} must match a parameter, matches none of {', '.join(list(named)[:6])}, ...; "
            f"fix or drop the pattern"
        )
    return {path for path in named if not any(fnmatchcase(path, pattern) for pattern in patterns)}


def decay_tree(params: Tree, recipe: Recipe, decay: Tensor) -> Tree:
    """Weight decay of each parameter, 0-d: `decay` or 0."""
    chosen = decayed(params, recipe)
    return tree_map_named(lambda path, leaf: decay if path in chosen else torch.zeros_like(decay), params)
