"""The loss of a recipe's language model on one micro-batch."""

from __future__ import annotations

from torch import Tensor

from lib.grad import Found, MicroLoss, Part
from lib.loss import by_chunks, cross_entropy, penalised
from lib.model import lm
from lib.nn.dropout import position_keys
from lib.random import fold, purpose
from lib.recipe import Recipe
from lib.tree import Tree

__all__ = ["language_loss"]

_DROPOUT = purpose("dropout")


def language_loss(recipe: Recipe) -> MicroLoss:
    """Make the loss: sum over the micro-batch's valid targets, their number, and the cross-entropy alone in nats.

    Raises:
        ValueError: the recipe has no model.
    """
    model, choice = recipe.model, recipe.loss
    if model is None:
        raise ValueError(
            "state.recipe.model=none must be a model for train_step; use make_train_step with your own loss"
        )

    def loss(params: Tree, part: Tree, draws: Tensor | None, which: Part) -> Found:
        rows, length = part["inputs"].shape
        keys = None
        if draws is not None and model.dropout > 0:
            keys = position_keys(fold(draws, _DROPOUT), which.rows(rows, draws.device), length)
        # -100, torch's mark of a target to ignore, is one here too: it must not count in the denominator
        targets, mask = part["targets"], part["mask"] & (part["targets"] != -100)
        if choice.chunk is not None:
            head = params["embed" if model.tied else "head"]["weight"]
            return by_chunks(
                lm.hidden(params, part, model, keys),
                head,
                targets,
                mask,
                choice.chunk,
                smoothing=choice.smoothing,
                z=choice.z,
                descends=draws is not None,
            )
        logits = lm.logits(params, part, model, keys)
        if draws is None or not (choice.smoothing or choice.z):
            return cross_entropy(logits, targets, mask)
        return penalised(logits, targets, mask, smoothing=choice.smoothing, z=choice.z)

    return loss
