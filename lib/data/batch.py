"""Batches as the TensorDicts that a step takes, made from the arrays of `lib.data.arrays` and `lib.data.heldout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from lib.data.arrays import arrays_at
from lib.data.heldout import heldout_arrays
from lib.data.plan import Plan
from lib.data.rows import Cursor
from lib.data.share import Share
from lib.data.source import Source, Stream

__all__ = ["batch_at", "batch_of", "cursor_of", "cursor_tree", "heldout_batches"]

_ALL = Share(0, 1)


def batch_of(arrays: Mapping[str, Any]) -> TensorDict:
    """Give a batch of these arrays, in the same memory."""
    tree = {name: value for name, value in arrays.items() if name != "cursor"}
    tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in tree.items()}
    at = {name: Cursor(**place) for name, place in arrays.get("cursor", {}).items()}
    return TensorDict({**tensors, "cursor": cursor_tree(at)}, batch_size=[])


def batch_at(
    sources: Sequence[Source], plan: Plan, seed: int, cursor: Mapping[str, Cursor], step: int, share: Share = _ALL
) -> TensorDict:
    """Make the batch whose first row is at this cursor; arguments, results and errors as for `arrays_at`."""
    return batch_of(arrays_at(sources, plan, seed, cursor, step, share))


def heldout_batches(streams: Sequence[Stream], plan: Plan, limit: int | None = None) -> Iterator[TensorDict]:
    """Go through held-out streams once, in order; arguments and errors as for `heldout_arrays`.

    Yields:
        Batches with an empty cursor: an evaluation moves none.
    """
    return map(batch_of, heldout_arrays(streams, plan, limit))


def cursor_tree(cursor: Mapping[str, Cursor]) -> dict[str, dict[str, torch.Tensor]]:
    """Write a cursor as the sub-tree that states and batches carry."""
    return {
        name: {part: torch.tensor(value, dtype=torch.int64) for part, value in at._asdict().items()}
        for name, at in cursor.items()
    }


def cursor_of(tree: TensorDict) -> dict[str, Cursor]:
    """Read a cursor from the sub-tree of a state or a batch."""
    return {str(name): Cursor(int(tree[name, "epoch"]), int(tree[name, "row"])) for name in tree.keys()}  # noqa: SIM118
