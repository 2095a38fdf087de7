"""The step compiled whole, and its buffers reused.

The pure step makes a new state; a driver that will never look at the old one again can let the compiler write the new values
where the old ones were. That is donation: a wrapper, so that the step itself stays pure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor
from torch import _dynamo as dynamo

from lib.data.plan import plan_of
from lib.model.flops import train_flops_per_token
from lib.recipe import Batch, Recipe
from lib.step import Step
from lib.tree import Tree, from_leaves, leaves, tensordict

__all__ = ["decide", "faster"]

_Whole = Callable[[list[Tensor], list[Tensor]], tuple[list[Tensor], Tree]]

# Both figures are from a two-core machine, on the side of not compiling: a slower machine compiles more slowly too.
_COMPILE_S = 60.0
_EAGER_FLOPS_PER_S = 60e9
_FORMS = 4096
_SAVED = 0.2  # share of an eager step's time that compilation saves at least


def decide(recipe: Recipe, steps: int) -> bool:
    """Whether a run is long enough to earn back its compilation: a function of the recipe and its length, nothing else."""
    if recipe.model is None:
        return False
    flops = train_flops_per_token(recipe.model, recipe.batch.length) * recipe.batch.rows * recipe.batch.length
    return steps * flops / _EAGER_FLOPS_PER_S * _SAVED > _COMPILE_S * _shapes(recipe.batch)


def _shapes(batch: Batch) -> int:
    """How many shapes batches may have, at most: each is compiled."""
    plan = plan_of(batch)
    return (len(plan.rows_at) + 1) * (len(plan.length_at) + 1) * max(1, len(plan.buckets))


def faster(step: Step, *, compile: bool, donate: bool = True) -> Step:  # noqa: A002 (the name of the setting)
    """Make the same step, compiled as one graph.

    Args:
        step: a pure step.
        compile: false = the step as it is.
        donate: the input state's memory becomes the output's; the input must not be used afterwards.

    Returns:
        A step. Another recipe, or other shapes, compile anew; other values never do.
    """
    if not compile:
        return step
    # Dynamo gives up after eight forms of a function, and a run has as many as its settings name.
    dynamo.config.recompile_limit = dynamo.config.accumulated_recompile_limit = _FORMS
    known: dict[tuple[Recipe, tuple[str, ...], tuple[str, ...]], _Whole] = {}

    def compiled(state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        old, data, recipe = leaves(state), leaves(batch), state["recipe"]
        form = (recipe, tuple(old), tuple(data))
        if form not in known:
            known[form] = torch.compile(_whole(step, *form, donate=donate), fullgraph=True, dynamic=False)
        after, report = known[form](list(old.values()), list(data.values()))
        return _tree(form[1], after, recipe), tensordict(report)

    return compiled


def _whole(step: Step, recipe: Recipe, old: tuple[str, ...], data: tuple[str, ...], *, donate: bool) -> _Whole:
    """The step over plain lists of tensors, so that there is least to guard at each call."""

    def whole(state: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], Tree]:
        new, report = step(_tree(old, state, recipe), tensordict(from_leaves(dict(zip(data, batch, strict=True)))))
        after = list(leaves(new).values())
        if donate:
            for before, value in zip(state, after, strict=True):
                before.copy_(value)
            after = state
        return after, leaves(report)

    return whole


def _tree(paths: tuple[str, ...], values: list[Tensor], recipe: Recipe) -> TensorDict:
    tree = tensordict(from_leaves(dict(zip(paths, values, strict=True))))
    tree.set_non_tensor("recipe", recipe)
    return tree
