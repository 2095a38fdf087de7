"""Slot `average`: an exponential moving average of the parameters, beside them and never mixed up with them."""

from __future__ import annotations

import torch

from lib.tree import Tree, tree_map

__all__ = ["init", "update"]


def init(params: Tree) -> Tree:
    """Start at the parameters themselves, so no bias has to be corrected."""
    return tree_map(torch.clone, params)


def update(slot: Tree, params: Tree, decay: float) -> Tree:
    """Move towards the new parameters: a <- decay a + (1 - decay) p.

    Source: Polyak & Juditsky 1992, in the exponential form.
    """
    return tree_map(lambda a, p: decay * a + (1 - decay) * p, slot, params)
