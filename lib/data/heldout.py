"""Held-out text as arrays: each stream once, in order, cut as it is, whatever plan the run trains by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lib.data.arrays import assemble
from lib.data.cut import empty, streamed
from lib.data.invariants import check_arrays
from lib.data.plan import Plan
from lib.data.source import Stream
from lib.errors import DataError

__all__ = ["heldout_arrays"]


def heldout_arrays(streams: Sequence[Stream], plan: Plan, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Go through held-out streams once, in order: every id that may be a target is one exactly once.

    What comes first in a stream is no target. No row holds ids of two streams. All batches have the shape of one
    micro-batch, [1, B, T]; what is missing at the end is padding with `mask` False. They bring no cursor.

    Args:
        streams: held-out ids; those with fewer than two have no target and are passed over.
        plan: shape of the training update at its start; its micro-batch at full length is the shape used here.
        limit: at most this many rows, spread evenly over all streams, the same ones each time; none = all.

    Yields:
        Arrays as from `arrays_at`, without `cursor`.

    Raises:
        ValueError: the limit allows no row.
        DataError: there is no target to be evaluated on, or a stream is damaged.
    """
    some = [stream for stream in streams if stream.size > 1]
    if not some:
        size = max((stream.size for stream in streams), default=0)
        raise DataError(f"held-out text: have {size} ids, need 2; raise data.holdout or give more text")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be >= 1 rows, or none for all")
    ends = np.cumsum([-(-(stream.size - 1) // plan.length) for stream in some])
    total = int(ends[-1])
    wanted = total if limit is None else min(limit, total)
    shape = Plan(plan.rows // plan.micro, plan.length)
    for at in range(0, wanted, shape.rows):
        chosen = [place * total // wanted for place in range(at, min(at + shape.rows, wanted))]
        number = np.array(chosen, dtype=np.int64)
        rows, whose = empty(shape.rows, plan.length), np.searchsorted(ends, number, side="right")
        for n in np.unique(whose).tolist():
            here = np.flatnonzero(whose == n)
            begin = (number[here] - (ends[n - 1] if n else 0)) * plan.length
            for into, part in zip(rows, streamed(some[n], begin, plan.length, wrap=False), strict=True):
                into[here] = part
        batch = assemble(rows, shape, length=plan.length)
        check_arrays(batch, some[0].vocab, max(int(stream.sizes.max()) for stream in some))
        yield batch
