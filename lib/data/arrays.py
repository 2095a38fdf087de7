"""The batch of one update as arrays: a function of (sources, plan, seed, cursor, step) and of nothing else.

A batch brings the cursor that stands after it, so whoever made it ahead of time leaves no trace. Global row n is at
[n // B, n % B], whatever the number of micro-batches; a rank makes its own rows and reads no others. Imports no torch:
processes that make batches start at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lib.data.cut import Rows, empty, placed, planned, streamed, targets_in
from lib.data.invariants import check_arrays
from lib.data.mix import counts, deal, mix_of
from lib.data.plan import Plan, check_plan, length_at, rows_at, rows_before
from lib.data.repeat import repeats
from lib.data.rows import Cursor, seek, starts
from lib.data.share import Share, places
from lib.data.shuffle import fold
from lib.data.source import Source, check_sources, extent, ordinals

__all__ = ["arrays_after", "arrays_at", "assemble", "place_at", "positions_at"]

_Ints = NDArray[np.int64]
_ALL = Share(0, 1)


def arrays_at(
    sources: Sequence[Source], plan: Plan, seed: int, cursor: Mapping[str, Cursor], step: int, share: Share = _ALL
) -> dict[str, Any]:
    """Make the batch whose first row is at this cursor.

    Args:
        sources: what is read, in any order that stays the same.
        plan: shape of the updates.
        seed: which order of rows.
        cursor: where to begin, for each source.
        step: updates taken before this one.
        share: which of the rows to make.

    Returns:
        inputs, targets, segments, positions [A, B, T] int64, mask [A, B, T] bool, bytes [A, B] int64 (bytes of text
        that the valid targets stand for), and `cursor`, the place after this batch as a tree of whole numbers.

    Raises:
        ValueError: plan, sources, cursor and share do not fit each other.
        DataError: a source is shorter than one row, or damaged.
    """
    number, visited, dealt, visits = _dealt(sources, plan, seed, cursor, step)
    own = places(share, number, plan.micro)
    rows = empty(len(own), _width(sources, visits, plan))
    for n, (source, visit) in enumerate(zip(sources, visits, strict=True)):
        here = dealt[own] == n
        mine = visit[(np.cumsum(dealt == n) - 1)[own[here]]]
        for into, part in zip(rows, _cut(source, mine, rows.inputs.shape[1]), strict=True):
            into[here] = part
    batch = assemble(rows, plan, length=_length(plan, step, rows.inputs.shape[1]))
    check_arrays(batch, sources[0].stream.vocab, max(int(source.stream.sizes.max()) for source in sources))
    return {**batch, "cursor": _tree(_moved(sources, plan, seed, visited, number))}


def place_at(
    sources: Sequence[Source], plan: Plan, seed: int, cursor: Mapping[str, Cursor], step: int, updates: int
) -> tuple[dict[str, Cursor], int]:
    """Give where a run stands so many updates later: cursor and step.

    Raises:
        ValueError: plan, sources and cursor do not fit each other.
    """
    visited = _standing(sources, plan, seed, cursor)
    rows = rows_before(plan, step + updates) - rows_before(plan, step)
    return _moved(sources, plan, seed, visited, rows), step + updates


def positions_at(
    sources: Sequence[Source], plan: Plan, seed: int, cursor: Mapping[str, Cursor], step: int
) -> tuple[_Ints, _Ints]:
    """Say where the targets of `arrays_at` come from, for people to look them up.

    Returns:
        Which source each row is of [A * B], and where in its stream each target stands [A * B, T]; -1 = padding.
    """
    number, _, dealt, visits = _dealt(sources, plan, seed, cursor, step)
    width = _width(sources, visits, plan)
    found = np.full((number, width), -1, dtype=np.int64)
    for n, (source, visit) in enumerate(zip(sources, visits, strict=True)):
        if source.rows is None:
            found[dealt == n] = (visit[:, None] + 1 + np.arange(width)) % source.stream.size
        else:
            found[dealt == n] = placed(source.rows, visit, width)
    length = _length(plan, step, width)
    return np.repeat(dealt, width // length), found.reshape(-1, length)


def _dealt(
    sources: Sequence[Source], plan: Plan, seed: int, cursor: Mapping[str, Cursor], step: int
) -> tuple[int, tuple[int, ...], _Ints, list[_Ints]]:
    """Deal out a batch: how many rows it has, rows visited before, the source of each row, each source's rows."""
    check_plan(plan)
    check_sources(sources, plan)
    number, visited = rows_at(plan, step), _standing(sources, plan, seed, cursor)
    dealt = deal(mix_of(sources), sum(visited), number, seed)
    visits = [
        _visits(*each, plan, seed, int((dealt == n).sum())) for n, each in enumerate(zip(sources, visited, strict=True))
    ]
    return number, visited, dealt, visits


def arrays_after(
    sources: Sequence[Source],
    plan: Plan,
    seed: int,
    cursor: Mapping[str, Cursor],
    step: int,
    share: Share,
    updates: int,
) -> dict[str, Any]:
    """Make the batch so many updates after a place, whoever makes the ones between."""
    at, then = place_at(sources, plan, seed, cursor, step, updates)
    return arrays_at(sources, plan, seed, at, then, share)


def assemble(rows: Rows, plan: Plan, *, length: int) -> dict[str, Any]:
    """Lay rows out as micro-batches, each row cut into rows of this length."""
    mask = rows.mask
    if plan.repeats is not None:
        # Of whole rows, so that what is learnt of a row does not depend on how it is cut; padding equals nothing.
        column = np.arange(rows.targets.shape[1])
        mask = mask & ~repeats(np.where(rows.used, rows.targets, -1 - column), plan.repeats)[:, None]
    ids = np.stack((rows.inputs, rows.targets, rows.sizes))
    flags = np.stack((rows.opens, mask))
    inputs, targets, sizes = ids.reshape(3, -1, length)
    opens, mask = flags.reshape(2, -1, length)
    column = np.arange(length, dtype=np.int64)
    opens &= column > 0  # a row begins in its segment 0, whatever its first input is
    values = {
        "inputs": inputs,
        "targets": targets,
        "segments": np.cumsum(opens, axis=1, dtype=np.int64),
        "positions": column - np.maximum.accumulate(np.where(opens, column, 0), axis=1),
        "mask": mask,
        "bytes": (sizes * mask).sum(axis=1, dtype=np.int64),
    }
    return {name: part.reshape(plan.micro, -1, *part.shape[1:]) for name, part in values.items()}


def _standing(sources: Sequence[Source], plan: Plan, seed: int, cursor: Mapping[str, Cursor]) -> tuple[int, ...]:
    """Rows visited of each source, held against what the mixture has dealt out so far."""
    visited = ordinals(sources, plan.length, cursor)
    wanted = counts(mix_of(sources), sum(visited), seed)
    if visited != wanted:
        names = [source.name for source in sources]
        have, must = (
            ", ".join(f"{name}: {n}" for name, n in zip(names, part, strict=True)) for part in (visited, wanted)
        )
        raise ValueError(
            f"cursor stands after rows {have}, must stand after {must} with these weights and this seed; "
            f"go on with the weights and the seed that the run began with"
        )
    return visited


def _moved(sources: Sequence[Source], plan: Plan, seed: int, visited: Sequence[int], rows: int) -> dict[str, Cursor]:
    found = counts(mix_of(sources), sum(visited) + rows, seed)
    ends = ((source, *extent(source, plan.length), n) for source, n in zip(sources, found, strict=True))
    return {source.name: seek(n, size=size, length=length) for source, size, length, n in ends}


def _visits(source: Source, visited: int, plan: Plan, seed: int, rows: int) -> _Ints:
    """Give the next rows of a source: where they begin in its stream, or their numbers in its table."""
    size, length = extent(source, plan.length)
    at = seek(visited, size=size, length=length)
    key = fold(seed, "source", source.name) if plan.shuffle else None
    return starts(at, rows, size=size, length=length, seed=key)


def _width(sources: Sequence[Source], visits: Sequence[_Ints], plan: Plan) -> int:
    """Give the length of a batch's rows, for all ranks the same."""
    if not plan.buckets:
        return plan.length
    tables = [(source.rows, visit) for source, visit in zip(sources, visits, strict=True) if source.rows is not None]
    longest = max(int(targets_in(table, visit).max(initial=0)) for table, visit in tables)
    return next((bucket for bucket in plan.buckets if bucket >= longest), plan.length)


def _length(plan: Plan, step: int, width: int) -> int:
    """Give the length that rows of this width are cut to."""
    return width if plan.mode == "pad" else length_at(plan, step)


def _cut(source: Source, visits: _Ints, width: int) -> Rows:
    if source.rows is None:
        return streamed(source.stream, visits, width, wrap=True)
    return planned(source.stream, source.rows, visits, width)


def _tree(cursor: Mapping[str, Cursor]) -> dict[str, dict[str, int]]:
    return {name: at._asdict() for name, at in cursor.items()}
