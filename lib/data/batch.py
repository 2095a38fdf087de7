"""Rows of a stream as the batch of one update, and the invariants that every batch obeys.

`batch_at` is a function of (stream, plan, seed, cursor) and of nothing else. A batch brings the cursor that stands
after it, so whoever made it ahead of time leaves no trace. Global row n is at [n // B, n % B], whatever the number of
micro-batches.

Documents are kept apart by `segments`: an end mark that is an input opens the next document's segment, since it is
what that document's first byte is predicted from. Where documents begin is read from the stream's offsets, never from
the ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from lib.data.bytes import OFFSET
from lib.data.rows import Cursor, advance, starts
from lib.errors import DataError

__all__ = ["SOURCE", "Plan", "Stream", "batch_at", "check_batch", "cursor_of", "cursor_tree", "heldout_batches"]

# The one source of a run on a single corpus; a mixture has a sub-tree of the cursor for each of its sources.
SOURCE = "text"

_Ints = NDArray[np.int64]


class Stream(Protocol):
    """Documents laid end to end, each closed by its end mark."""

    @property
    def size(self) -> int:
        """How many ids there are."""

    @property
    def vocab(self) -> int:
        """Ids are in [0, vocab)."""

    @property
    def offsets(self) -> _Ints:
        """Where each document begins, and last the size: strictly rising."""

    def ids(self, start: int, stop: int) -> NDArray[np.integer]:
        """Read the ids at [start, stop), 0 <= start <= stop <= size."""


class Plan(NamedTuple):
    """The shape of an update.

    Attributes:
        rows: rows of an update, over all its micro-batches.
        length: inputs of a row.
        micro: micro-batches, a divisor of `rows`.
    """

    rows: int
    length: int
    micro: int = 1


class _Rows(NamedTuple):
    ids: _Ints  # [rows, length + 1]: inputs, and one further the targets
    opens: NDArray[np.bool_]  # [rows, length]: this input opens a segment
    valid: _Ints  # [rows]: how many targets are real


def batch_at(stream: Stream, plan: Plan, seed: int, cursor: Cursor) -> TensorDict:
    """Make the batch whose first row is at this cursor.

    Args:
        stream: ids to cut rows from, more than `plan.length` of them.
        plan: shape of the update.
        seed: which order of rows.
        cursor: where to begin.

    Returns:
        inputs, targets, segments, positions [A, B, T] int64, mask [A, B, T] bool, bytes [A, B] int64 (bytes of text
        that the valid targets stand for), cursor (the place after this batch).

    Raises:
        ValueError: rows cannot be dealt out to the micro-batches.
        DataError: the stream is shorter than one row, or damaged.
    """
    if plan.micro < 1 or plan.rows < 1 or plan.rows % plan.micro:
        raise ValueError(f"batch.rows={plan.rows} must be a multiple of batch.micro={plan.micro}, both >= 1")
    begin = starts(cursor, plan.rows, size=stream.size, length=plan.length, seed=seed)
    rows = _cut(stream, begin, plan.length, wrap=True)
    after = advance(cursor, plan.rows, size=stream.size, length=plan.length)
    return _assemble(rows, plan, vocab=stream.vocab, cursor=after)


def heldout_batches(stream: Stream, plan: Plan, limit: int | None = None) -> Iterator[TensorDict]:
    """Go through a held-out stream once, in order: every id but the stream's first is a target exactly once.

    All batches have the shape of one micro-batch, [1, B, T]; what is missing at the end is padding with `mask` False.
    Their cursor is zero: an evaluation moves none.

    Args:
        stream: held-out ids, at least two.
        plan: shape of the training update; its micro-batch is the shape used here.
        limit: at most this many rows, spread evenly, the same ones each time; none = all.

    Yields:
        Batches as from `batch_at`.

    Raises:
        ValueError: the limit allows no row.
        DataError: there is no target to be evaluated on, or the stream is damaged.
    """
    if stream.size < 2:
        raise DataError(f"held-out text: have {stream.size} ids, need 2; raise data.holdout or give more text")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be >= 1 rows, or none for all")
    total = -(-(stream.size - 1) // plan.length)
    wanted = total if limit is None else min(limit, total)
    shape = Plan(plan.rows // plan.micro, plan.length, 1)
    for at in range(0, wanted, shape.rows):
        places = range(at, min(at + shape.rows, wanted))
        begin = np.array([place * total // wanted * plan.length for place in places], dtype=np.int64)
        rows = _pad(_cut(stream, begin, plan.length, wrap=False), shape.rows)
        yield _assemble(rows, shape, vocab=stream.vocab, cursor=Cursor(0, 0))


def cursor_tree(cursor: Cursor) -> dict[str, dict[str, torch.Tensor]]:
    """Write a cursor as the sub-tree that states and batches carry."""
    return {SOURCE: {name: torch.tensor(value, dtype=torch.int64) for name, value in cursor._asdict().items()}}


def cursor_of(tree: TensorDict) -> Cursor:
    """Read a cursor from the sub-tree of a state or a batch."""
    return Cursor(int(tree[SOURCE, "epoch"]), int(tree[SOURCE, "row"]))


def check_batch(batch: TensorDict, vocab: int) -> None:
    """Hold a batch to its invariants: shapes, dtypes, ids in range, segments and positions that tell one story.

    Args:
        batch: a batch in the memory of the CPU.
        vocab: ids must be in [0, vocab).

    Raises:
        ValueError: the first invariant that is broken, with the index.
    """
    shape = tuple(batch["inputs"].shape)
    if len(shape) != 3:
        raise ValueError(f"batch.inputs={shape} must have three axes: micro-batches, rows, positions")
    for name in ("inputs", "targets", "segments", "positions", "mask", "bytes"):
        axes = shape[:2] if name == "bytes" else shape
        dtype = torch.bool if name == "mask" else torch.int64
        if tuple(batch[name].shape) != axes or batch[name].dtype != dtype:
            raise ValueError(f"batch.{name}={tuple(batch[name].shape)} {batch[name].dtype} must be {axes} {dtype}")
    for name in ("inputs", "targets"):
        ids = batch[name].numpy()
        _hold(batch, name, (ids >= 0) & (ids < vocab), f"in [0, {vocab}), the vocabulary")
    segments, positions = batch["segments"].numpy(), batch["positions"].numpy()
    _hold(batch, "segments", segments[..., :1] == 0, "0 where a row begins")
    _hold(batch, "positions", positions[..., :1] == 0, "0 where a row begins")
    rise = np.diff(segments, axis=-1)
    _hold(batch, "segments", (rise == 0) | (rise == 1), "the segment before or the next one", shift=1)
    step = np.where(rise == 0, positions[..., :-1] + 1, 0)
    _hold(batch, "positions", positions[..., 1:] == step, "one more than before, or 0 where a segment begins", shift=1)
    count = batch["bytes"].numpy()
    _hold(batch, "bytes", (count >= 0) & (count <= batch["mask"].numpy().sum(-1)), "between 0 and the valid targets")


def _hold(batch: TensorDict, name: str, good: NDArray[np.bool_], must: str, *, shift: int = 0) -> None:
    if good.all():
        return
    where = [int(axis) for axis in np.argwhere(~good)[0]]
    where[-1] += shift
    value = int(batch[name].numpy()[tuple(where)])
    raise ValueError(f"batch.{name}{where}={value} must be {must}")


def _cut(stream: Stream, begin: _Ints, length: int, *, wrap: bool) -> _Rows:
    """Read rows that begin at these positions; past the end the stream starts again, or the row stays short."""
    ids = np.zeros((len(begin), length + 1), dtype=np.int64)
    valid = np.full(len(begin), length, dtype=np.int64)
    for row, start in enumerate(begin.tolist()):
        have = min(length + 1, stream.size - start)
        ids[row, :have] = stream.ids(start, start + have)
        if wrap:
            ids[row, have:] = stream.ids(0, length + 1 - have)
        else:
            valid[row] = have - 1
    if int(ids.max(initial=0)) >= stream.vocab:
        row, column = (int(axis) for axis in np.argwhere(ids >= stream.vocab)[0])
        where = f"token store: id {ids[row, column]} at {(int(begin[row]) + column) % stream.size}"
        raise DataError(f"{where} must be below {stream.vocab}; it is damaged, remove it to have it built again")
    opens = np.zeros((len(begin), length), dtype=np.bool_)
    _mark(opens, stream.offsets, begin, begin, np.minimum(begin + valid, stream.size))
    if wrap:
        over = np.maximum(begin + length - stream.size, 0)
        _mark(opens, stream.offsets, begin - stream.size, np.zeros_like(begin), over)
    else:
        short = np.flatnonzero(valid < length)
        opens[short, valid[short]] = True
    return _Rows(ids, opens, valid)


def _mark(opens: NDArray[np.bool_], offsets: _Ints, begin: _Ints, low: _Ints, high: _Ints) -> None:
    """Mark the end marks at stream positions [low, high) of each row; a row's column 0 stands at position `begin`."""
    # The end mark before a document stands one before its offset.
    at, stop = np.searchsorted(offsets, low + 1), np.searchsorted(offsets, high + 1)
    counts = np.maximum(stop - at, 0)
    row = np.repeat(np.arange(len(begin)), counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    opens[row, offsets[at[row] + nth] - 1 - begin[row]] = True


def _pad(rows: _Rows, wanted: int) -> _Rows:
    below = (0, wanted - len(rows.ids))
    return _Rows(np.pad(rows.ids, (below, (0, 0))), np.pad(rows.opens, (below, (0, 0))), np.pad(rows.valid, below))


def _assemble(rows: _Rows, plan: Plan, *, vocab: int, cursor: Cursor) -> TensorDict:
    # All in numpy: torch would start threads of its own inside the reader's thread.
    column = np.arange(plan.length, dtype=np.int64)
    opens = rows.opens.copy()
    opens[:, 0] = False  # a row begins in its segment 0, also when its first input is an end mark
    segments = np.cumsum(opens, axis=1, dtype=np.int64)
    positions = column - np.maximum.accumulate(np.where(opens, column, 0), axis=1)
    mask = column < rows.valid[:, None]
    targets = np.ascontiguousarray(rows.ids[:, 1:])
    values = {
        "inputs": np.where(mask, rows.ids[:, :-1], 0),
        "targets": targets,
        "segments": segments,
        "positions": positions,
        "mask": mask,
        "bytes": ((targets >= OFFSET) & mask).sum(axis=1, dtype=np.int64),
    }
    rest = {name: torch.from_numpy(part.reshape(plan.micro, -1, *part.shape[1:])) for name, part in values.items()}
    batch = TensorDict({**rest, "cursor": cursor_tree(cursor)}, batch_size=[])
    check_batch(batch, vocab)
    return batch
