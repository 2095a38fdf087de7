"""Metric rows with the clock in them: the only place where a row learns what time it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDict

from lib.metrics import UNITS, as_row

__all__ = ["METER_UNITS", "Meter", "meter"]

METER_UNITS = {
    "tokens_per_s": "valid targets per second, without evaluations, saves and a launch's first step",
    "elapsed_s": "seconds of training, over all launches",
}

Row = dict[str, Any]


class Meter(NamedTuple):
    """A run's clock.

    Attributes:
        row: `row(step, metrics)`: the row of a step, in one copy from the device.
        tick: `tick(step)`: a step was taken.
        pause: what was done since the last step is no training.
    """

    row: Callable[[int, TensorDict], Row]
    tick: Callable[[int], None]
    pause: Callable[[], None]


def meter(rows: Sequence[Row], step: int) -> Meter:
    """Start the clock at `step`; the seconds of the launches before are in their rows."""
    before = max((row.get("elapsed_s") or 0.0 for row in rows), default=0.0)
    now = time.monotonic()
    began = (step, now)
    since, current, ticked = [began], [step], [False]

    def row(at: int, metrics: TensorDict) -> Row:
        values: Row = as_row(metrics)
        then = time.monotonic()
        first, clock = since[0] if at > since[0][0] else began
        since[0] = (at, then)
        pace = (values["tokens"] or 0) * (at - first) / max(then - clock, 1e-9)
        values = {name: values[name] for name in UNITS if name in values}  # as documented, not as sorted
        return {**values, "tokens_per_s": round(pace, 1), "elapsed_s": round(before + then - now, 3)}

    def tick(at: int) -> None:
        current[0] = at
        if not ticked[0]:  # the first step of a launch compiles
            ticked[0] = True
            since[0] = (at, time.monotonic())

    def pause() -> None:
        since[0] = (current[0], time.monotonic())

    return Meter(row, tick, pause)
