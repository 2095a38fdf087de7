"""Recipes and steps of one's own that the core is tried on, and how bits are compared; more is in lib.testing.strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from lib.config import Batch, Model, Optim, Recipe
from lib.optim import Now, Rule
from lib.step import Step, make_train_step
from lib.tree import Tree, from_leaves, leaves, tensordict, tree_map

SEEDS = st.integers(0, 2**63 - 1)
FINITE = st.floats(-1e3, 1e3, width=32)
SPOILS = (math.nan, math.inf, -math.inf)
FEW = settings(max_examples=max(5, settings().max_examples * 2 // 5))
"""For laws whose every example is several steps of a model."""


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What the one-line `ValueError` of a call says."""
    with pytest.raises(ValueError, match=r"\S") as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Bits -----------------------------------------------------------------------------------------------------------------


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have the same paths, dtypes, shapes and bits; NaN equals itself and -0.0 is not 0.0."""
    return bits(a) == bits(b)


def bits(tree: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {path: (leaf.dtype, tuple(leaf.shape), _bytes(leaf)) for path, leaf in leaves(tree).items()}


def form(tree: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {path: (leaf.dtype, tuple(leaf.shape)) for path, leaf in leaves(tree).items()}


def memory(*trees: Any) -> list[int]:
    """Where the leaves' storages lie, one entry a leaf."""
    return [leaf.untyped_storage().data_ptr() for tree in trees for leaf in leaves(tree).values() if leaf.numel()]


def largest_gap(a: Any, b: Any) -> float:
    """Greatest absolute difference of two trees of the same paths."""
    left, right = leaves(a), leaves(b)
    assert list(left) == list(right)
    return max(
        (float((left[p].double() - right[p].double()).abs().max()) for p in left if left[p].numel()), default=0.0
    )


def changed(state: TensorDict, **new: Any) -> TensorDict:
    """A copy with some leaves put in place of the old, `path__to__leaf=value`, in the old dtype and shape."""
    copy = state.clone()
    for path, value in new.items():
        key = tuple(path.split("__"))
        copy[key] = torch.as_tensor(value, dtype=copy[key].dtype).expand(copy[key].shape).clone()
    return copy


def _bytes(leaf: Tensor) -> bytes:
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# The language model ---------------------------------------------------------------------------------------------------


def tiny(**parts: Any) -> Recipe:
    """A recipe small enough for many steps; sections by name replace those here."""
    model = Model(width=8, depth=2, heads=2, inner=8, vocab=12, tied=True)
    return Recipe(**{"model": model, "batch": Batch(rows=4, length=6, micro=2), **parts})


def with_leaves(batch: TensorDict, **new: Tensor) -> TensorDict:
    copy = batch.clone()
    for name, value in new.items():
        copy[name] = value
    return copy


# Configs ------------------------------------------------------------------------------------------------------------


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


# Steps of one's own ---------------------------------------------------------------------------------------------------

OWN = Recipe(model=None, optim=Optim(lr=0.1, decay=0.0, beta2=0.999, clip=None))


def own(**parts: Any) -> Recipe:
    """A recipe without a model, lr 0.1, no clipping, no decay; keys of `optim` and whole sections by name."""
    optim = {key: parts.pop(key) for key in tuple(parts) if key in Optim.__struct_fields__}
    recipe = msgspec.structs.replace(OWN, optim=msgspec.structs.replace(OWN.optim, **optim))
    return msgspec.structs.replace(recipe, **parts)


def given_gradients(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """A loss whose gradient is what the batch says, leaf by leaf: sum of p * g; `count` says how many targets."""
    gradients = leaves(batch["grads"])
    return torch.stack([(p * gradients[path]).sum() for path, p in leaves(params).items()]).sum(), batch["count"]


def gradients(*parts: Mapping[str, Any], counts: tuple[int, ...] | None = None) -> TensorDict:
    """A batch for `given_gradients`: for each micro-batch the gradients by path, and its targets (one each)."""
    trees = [from_leaves({path: torch.as_tensor(g, dtype=torch.float32) for path, g in part.items()}) for part in parts]
    stacked = tree_map(lambda *leaf: torch.stack(leaf), trees[0], *trees[1:])
    return tensordict({"grads": stacked, "count": torch.tensor(counts or (1,) * len(parts))})


PLAIN = make_train_step(given_gradients)


def now(lr: float, decay: float = 0.0, key: int = 7) -> Now:
    """What a rule is told of an update."""
    return Now(torch.tensor(lr, dtype=torch.float64), torch.tensor(decay, dtype=torch.float64), torch.tensor(key))


SEEN = Rule(
    init=lambda params: {"grads": tree_map(torch.zeros_like, params)},
    update=lambda grads, params, slot, now: (grads, tree_map(torch.clone, params), {"grads": grads}),
)
"""A rule that changes no parameter and keeps the gradient it was given: averaged and clipped."""


def run(step: Step, state: TensorDict, batches: list[TensorDict]) -> tuple[TensorDict, list[TensorDict]]:
    """Steps over a list of batches: the last state, and all metrics."""
    rows = []
    for batch in batches:
        state, metrics = step(state, batch)
        rows.append(metrics)
    return state, rows


def gradient_of(step: Callable[..., Any], state: TensorDict, batch: TensorDict) -> Tree:
    """The gradient of a recipe's model, read off the first moment: the recipe has beta1=0 and no clipping."""
    assert state["recipe"].optim.beta1 == 0
    assert state["recipe"].optim.clip is None
    new, _ = step(state, batch)
    tree: Tree = from_leaves(leaves(new["optimizer", "adam", "first"]))
    return tree
