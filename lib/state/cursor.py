"""Slot `cursor`: where the data stands, a few integers a source and never data.

It is the position after the last batch that was trained on, and it comes with that batch: however far ahead readers are, the
state holds what was used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lib.tree import Tree, assert_same, leaves, tree_map

__all__ = ["init", "update"]


def init(given: Mapping[str, Any] | None, *, own: bool = False, sources: Sequence[str] = ()) -> Tree:
    """Make the cursor of the start.

    Args:
        given: a tree of int64 tensors, or whole numbers, to start from; none = the start.
        own: batches are the caller's own; the start is then `batch` = 0, batches taken, else `epoch` = `row` = 0 of each
            source.
        sources: their names; none = `text` alone.

    Raises:
        ValueError: a leaf is no whole number, or not int64.
    """
    if given is None:
        zero = torch.zeros((), dtype=torch.int64)
        if own:
            return {"batch": zero}
        return {name: {"epoch": zero.clone(), "row": zero.clone()} for name in sources or ("text",)}
    tree = _copied(given, "")
    kinds = {leaf.dtype for leaf in leaves(tree).values()}
    if kinds - {torch.int64}:
        raise ValueError(f"cursor: leaves are {sorted(map(str, kinds))}, must all be torch.int64; convert them")
    return tree


def _copied(given: Mapping[str, Any], at: str) -> Tree:
    tree: Tree = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            tree[name] = value.clone()
        elif hasattr(value, "items"):
            tree[name] = _copied(value, f"{at}{name}.")
        elif isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            tree[name] = torch.tensor(value, dtype=torch.int64)
        else:
            raise ValueError(f"cursor.{at}{name}={value!r} must be a whole number within int64; convert it")
    return tree


def update(slot: Tree, batch: Tree) -> Tree:
    """Take the cursor the batch brought; a batch without one is the next one, and each count goes up by one.

    Raises:
        ValueError: the batch's cursor has other paths than the state's.
    """
    if "cursor" not in batch:
        return tree_map(lambda leaf: leaf + 1, slot)
    assert_same(slot, batch["cursor"], where="batch.cursor")
    return tree_map(lambda leaf: leaf.clone(), batch["cursor"])
