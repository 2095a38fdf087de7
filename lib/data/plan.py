"""The shape of the updates of a run, also where it grows: functions of the update's number and of nothing else.

`step` is the number of updates taken so far, as in the state. The first of them that a change of shape holds for is the
one taken at that `step`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from lib.recipe import Batch, changes

__all__ = ["MODES", "Plan", "check_plan", "length_at", "plan_of", "rows_at", "rows_before"]

MODES = ("concat", "pack", "pad")

_LEAST_REPEATS = 3


class Plan(NamedTuple):
    """The shape of an update.

    Attributes:
        rows: rows of an update, over all its micro-batches and all ranks.
        length: inputs of a row.
        micro: micro-batches, a divisor of `rows`.
        mode: `concat` (the stream is cut into rows), `pack` (whole documents are packed into rows) or `pad` (a row for
            each document).
        buckets: for `pad`, the lengths that a batch may have, rising up to `length`; none = `length` alone.
        rows_at: (step, rows): from this step on an update has so many rows.
        length_at: (step, length): from this step on each row is cut into rows of this length, a divisor of `length`.
        repeats: a row in which something of up to 13 ids stands so often in a row is not trained on; none = all are.
        shuffle: each epoch visits the rows of a source in an order of its own; false = always in that of the stream.
    """

    rows: int
    length: int
    micro: int = 1
    mode: str = "concat"
    buckets: tuple[int, ...] = ()
    rows_at: tuple[tuple[int, int], ...] = ()
    length_at: tuple[tuple[int, int], ...] = ()
    repeats: int | None = None
    shuffle: bool = True


def plan_of(batch: Batch) -> Plan:
    """Take the shape of the updates from a recipe's settings."""
    buckets = batch.buckets
    if buckets is None:
        buckets = tuple(sorted({max(2, batch.length // 4), max(2, batch.length // 2), batch.length}))
    return Plan(
        rows=batch.rows,
        length=batch.length,
        micro=batch.micro,
        mode=batch.mode,
        buckets=buckets if batch.mode == "pad" else (),
        rows_at=changes("batch.rows_at", batch.rows_at),
        length_at=changes("batch.length_at", batch.length_at),
        repeats=batch.repeats,
        shuffle=batch.shuffle,
    )


def check_plan(plan: Plan) -> None:
    """Refuse a plan that no batch can be made by.

    Raises:
        ValueError: names the first thing that is wrong with it.
    """
    if plan.micro < 1 or plan.rows < 1 or plan.rows % plan.micro:
        raise ValueError(f"batch.rows={plan.rows} must be a multiple of batch.micro={plan.micro}, both >= 1")
    if plan.length < 1:
        raise ValueError(f"batch.length={plan.length} must be >= 1")
    if plan.mode not in MODES:
        raise ValueError(f"batch.mode={plan.mode!r} must be one of {', '.join(MODES)}")
    if plan.repeats is not None and plan.repeats < _LEAST_REPEATS:
        raise ValueError(f"batch.repeats={plan.repeats} must be >= {_LEAST_REPEATS}, or none to train on every row")
    for name, pairs in (("rows_at", plan.rows_at), ("length_at", plan.length_at)):
        steps = [step for step, _ in pairs]
        if steps and (steps[0] < 0 or any(a >= b for a, b in pairwise(steps))):
            raise ValueError(f"batch.{name}={list(pairs)} must have rising steps >= 0")
    for step, rows in plan.rows_at:
        if rows < 1 or rows % plan.micro:
            raise ValueError(
                f"batch.rows_at: {rows} rows at step {step} must be a multiple of batch.micro={plan.micro}"
            )
    for step, length in plan.length_at:
        if length < 1 or plan.length % length:
            raise ValueError(f"batch.length_at: {length} at step {step} must divide batch.length={plan.length}")
    _check_buckets(plan)


def rows_at(plan: Plan, step: int) -> int:
    """Give how many rows the update taken at this step has."""
    return _latest(plan.rows, plan.rows_at, step)


def length_at(plan: Plan, step: int) -> int:
    """Give the length that the rows of the update taken at this step are cut to."""
    return _latest(plan.length, plan.length_at, step)


def rows_before(plan: Plan, step: int) -> int:
    """Give how many rows the updates before this step have, together.

    >>> [rows_before(Plan(rows=2, length=8, rows_at=((3, 4),)), step) for step in (0, 2, 3, 4)]
    [0, 4, 6, 10]
    """
    total, rows, since = 0, plan.rows, 0
    for change, more in plan.rows_at:
        if change >= step:
            break
        total, rows, since = total + (change - since) * rows, more, change
    return total + (step - since) * rows


def _latest(value: int, changes: tuple[tuple[int, int], ...], step: int) -> int:
    for change, new in changes:
        value = new if step >= change else value
    return value


def _check_buckets(plan: Plan) -> None:
    if plan.mode != "pad":
        if plan.buckets:
            raise ValueError(f"batch.buckets={list(plan.buckets)} must be empty with batch.mode={plan.mode}")
        return
    if plan.length_at:
        raise ValueError("batch.length_at must be empty with batch.mode=pad; set batch.buckets")
    rising = all(a < b for a, b in pairwise((0, *plan.buckets)))
    if plan.buckets and not (rising and plan.buckets[-1] == plan.length):
        raise ValueError(f"batch.buckets={list(plan.buckets)} must rise up to batch.length={plan.length}")
