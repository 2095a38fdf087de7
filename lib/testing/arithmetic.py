"""Laws of what a step works out: micro-batches are one batch, and a bad update leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lib.recipe import Recipe
from lib.testing.case import Case, axes_of, reshaped
from lib.testing.trees import bits, difference, extras, rebuilt_like, snapshot
from lib.tree import leaves

__all__ = ["UncheckedError", "accumulation", "apart", "refusal"]

LEARNT = ("params.", "optimizer.", "average.")
SPOILT = 6  # leaves that are spoilt in turn
# Sums in another order: 1e-7 each in fp32, and 2^-8 in bf16, of terms that partly cancel.
_TOLERANCE: Mapping[str, float] = {"fp32": 2e-3, "bf16": 0.1, "fp16": 0.02}


class UncheckedError(Exception):
    """A law says nothing of a case; the text says why."""


def accumulation(case: Case) -> str | None:
    """However its rows are cut into micro-batches, a batch is one update; rows have unequal numbers of targets.

    What is compared is the change of each leaf, within what rounding makes of it: so much as one unit in the last place of
    the parameters makes, and a share of the change.
    """
    axes = axes_of(case.batches[0])
    if axes is None:
        raise UncheckedError("the leaves of the batch have no axes [micro-batches, rows, ...] in common")
    rows = axes[0] * axes[1]
    if rows < 2:
        raise UncheckedError("the batch has one row, must have two")
    batch = _uneven(case.batches[0])
    whole = case.step(case.state, reshaped(batch, 1))
    nudged = case.step(_nudged(case.state), reshaped(batch, 1))
    for micro in sorted({2 if rows % 2 == 0 else rows, axes[0], rows} - {1}):
        parts = case.step(case.state, reshaped(batch, micro))
        if where := apart(case.state, whole, parts, nudged, _compute(case.state)):
            if _draws(case, batch):
                raise UncheckedError("the step draws random numbers by micro-batch; check it without")
            return (
                f"{rows} rows in 1 and in {micro} micro-batches are two updates: {where}; "
                f"add up sums and numbers of targets, and divide, clip and test once"
            )
    return None


def refusal(case: Case) -> str | None:
    """An update whose loss or gradient is not finite leaves what was learnt as it was, to the last bit."""
    begun = case.state
    for batch in case.batches:  # moments that are all zero would hide what happens to them
        begun, _ = case.step(begun, batch)
    named, batch = leaves(begun), case.batches[0]
    learnt = [path for path in named if path.startswith(LEARNT)]
    params = [path for path in named if path.startswith("params.") and named[path].is_floating_point()]
    if not params:
        raise UncheckedError("the state has no slot `params`")
    data = [path for path, leaf in leaves(batch).items() if leaf.is_floating_point() and leaf.numel()]
    every = max(1, len(params) // SPOILT)
    spoilt = [("state", path) for path in params[::every] if named[path].numel()] + [("batch", path) for path in data]
    for tree, path in spoilt:
        for value in (math.nan, math.inf):
            state = _spoilt(begun, path, value) if tree == "state" else begun
            brought = _spoilt(batch, path, value) if tree == "batch" else batch
            new, metrics = case.step(state, brought)
            if where := _trace(state, new, metrics, learnt, path if tree == "state" else None):
                return f"with {value} in {tree}.{path}, {where}; choose the old leaves by `where`, do not multiply"
    return None


def apart(old: Any, one: tuple[Any, Any], other: tuple[Any, Any], nudged: tuple[Any, Any], compute: str) -> str | None:
    """The first leaf in which two outcomes differ by more than rounding, in words."""
    begun = leaves(old)
    trees = [{**_named("state", new), **_named("metrics", metrics)} for new, metrics in (one, other, nudged)]
    for path, a in trees[0].items():
        b, noisy = trees[1][path], trees[2][path]
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"{path} is {_shown(a)} and {_shown(b)}"
            continue
        was = begun.get(path.removeprefix("state."), torch.zeros(())) if path.startswith("state.") else torch.zeros(())
        left, right = a.double(), b.double()
        moved, gap = _size(left - was.double()), _size(left - right)
        rounding = 8 * _size(noisy.double() - left) + 1e-6 * _size(left)
        if not gap <= _TOLERANCE[compute] * moved + rounding:
            return f"{path} moves by {moved:.3g} and differs by {gap:.3g}"
    return None


def _named(name: str, tree: Any) -> dict[str, Tensor]:
    return {f"{name}.{path}": leaf for path, leaf in leaves(tree).items()}


def _size(difference_: Tensor) -> float:
    return float(difference_.square().sum().sqrt())


def _shown(leaf: Tensor) -> str:
    return str(leaf.item()) if leaf.ndim == 0 else "one thing"


def _compute(state: Any) -> str:
    recipe = next((value for value in extras(state).values() if isinstance(value, Recipe)), None)
    return "fp32" if recipe is None else recipe.precision.compute


def _draws(case: Case, batch: Any) -> bool:
    """Whether the outcome hangs on the state's key."""
    named = leaves(case.state)
    if "key" not in named:
        return False
    other = rebuilt_like(case.state, {**named, "key": named["key"] + 1}, extras(case.state))
    one, two = case.step(case.state, batch)[1], case.step(other, batch)[1]
    return difference(snapshot(one), snapshot(two)) is not None


def _nudged(state: Any) -> Any:
    """The state with parameters one unit in the last place away."""
    named = {
        path: torch.nextafter(leaf, torch.full_like(leaf, math.inf))
        if path.startswith("params.") and leaf.is_floating_point()
        else leaf
        for path, leaf in leaves(state).items()
    }
    return rebuilt_like(state, named, extras(state))


def _uneven(batch: Any) -> Any:
    """The batch with another number of targets in each row, none in the first, where it has a `mask`."""
    named = leaves(batch)
    mask = named.get("mask")
    if mask is None or mask.dtype != torch.bool or mask.ndim < 3:
        return batch
    rows, length = mask.shape[0] * mask.shape[1], mask.shape[2]
    counts = torch.tensor([(row * 7) % (length + 1) for row in range(rows)]).reshape(*mask.shape[:2], 1)
    places = torch.arange(length).reshape(length, *(1,) * (mask.ndim - 3))
    kept = mask & (places < counts.reshape(*mask.shape[:2], *(1,) * (mask.ndim - 2)))
    return rebuilt_like(batch, {**named, "mask": kept if bool(kept.any()) else mask}, extras(batch))


def _spoilt(tree: Any, path: str, value: float) -> Any:
    named = snapshot(tree)
    named[path].view(-1)[0] = value
    return rebuilt_like(tree, named, extras(tree))


def _trace(old: Any, new: Any, metrics: Any, learnt: list[str], spoilt: str | None) -> str | None:
    before, after = leaves(old), leaves(new)
    changed = [path for path in learnt if not torch.equal(bits(before[path]), bits(after[path]))]
    if not changed:
        return None
    # What is spoilt may have no part in the loss: then the update is a good one, and the spoilt element stays alone.
    bad = [path for path, leaf in leaves(metrics).items() if leaf.is_floating_point() and not leaf.isfinite().all()]
    if bad:
        return f"metrics.{bad[0]} is not finite and yet {changed[0]} changes"
    for path in learnt:
        leaf = after[path]
        own = spoilt is not None and path.removeprefix("average.").endswith(spoilt.removeprefix("params."))
        if leaf.is_floating_point() and int((~leaf.isfinite()).sum()) > int(own):
            return f"{path} becomes non-finite"
    return None
