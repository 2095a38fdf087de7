"""The loss of a recipe's language model on one micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.grad import MicroLoss
from lib.loss import cross_entropy
from lib.model import lm
from lib.nn.dropout import position_keys
from lib.random import fold, purpose
from lib.recipe import Recipe
from lib.tree import Tree

__all__ = ["language_loss"]

_DROPOUT = purpose("dropout")


def language_loss(recipe: Recipe) -> MicroLoss:
    """Make the loss: sum of nats over the micro-batch's valid targets, and their number.

    Raises:
        ValueError: the recipe has no model.
    """
    model = recipe.model
    if model is None:
        raise ValueError(
            "state.recipe.model=none must be a model for train_step; use make_train_step with your own loss"
        )

    def loss(params: Tree, part: Tree, draws: Tensor | None, number: int) -> tuple[Tensor, Tensor]:
        rows, length = part["inputs"].shape
        keys = None
        if draws is not None and model.dropout > 0:
            numbers = torch.arange(number * rows, (number + 1) * rows, device=draws.device)
            keys = position_keys(fold(draws, _DROPOUT), numbers, length)
        # -100, torch's mark of a target to ignore, is one here too: it must not count in the denominator
        mask = part["mask"] & (part["targets"] != -100)
        return cross_entropy(lm.logits(params, part, model, keys), part["targets"], mask)

    return loss
