"""The choice of a learning rate over a run: shapes, their settings, and which of them clash. Imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from lib.values import Checked, Count, Natural, Positive, Share, check_used

__all__ = ["Schedule", "Stage", "stages_of"]


TAIL = 0.1  # share of a tail that no one has chosen


class Schedule(Checked, frozen=True):
    """The learning rate as a closed form of the update's number u, from 1; see `lib.state.schedule.factor`.

    Attributes:
        shape: after the warm-up: "constant"; down to the floor at `length` and flat beyond: "linear", "cosine", "half_cosine"
            (the lower half of one), "polynomial", "exponential"; without end: "inverse_sqrt", "power"; flat with a tail at
            its end: "wsd"; up from the floor, to find a rate by: "range"; or "stages".
        warmup: updates of linear warm-up; none = in a run a tenth of its length, 30 at most, else 0.
        length: updates until the floor; none = as many as the run has when it starts. Never derived again on resume.
        floor: last learning rate, as a fraction of the peak, in [0, 1].
        start: learning rate before the first update, as a fraction of the peak, from which the warm-up rises.
        exponent: of "polynomial" (none = 2), "power" and "inverse_sqrt" (none = 0.5), and of progress in "cosine" (none = 1).
        cycles: how often "cosine" or "wsd" runs through, from the peak again each time.
        tail: share of `length` (of a cycle of "wsd") that descends from where the shape is then to `end`; none = 0.1 for "wsd",
            else no tail.
        tail_shape: "linear", "cosine", "sqrt" (1 - sqrt) or "reciprocal" (linear in 1 / rate).
        end: learning rate at the end of the tail, as a fraction of the peak; none = `floor`.
        stages: for "stages": texts SHAPE:UPDATES:TO, shape linear or cosine, each from where the one before ended (the first from
            `start`) to TO, a fraction of the peak; constant:UPDATES stays. After the last one its end is held.
        counts: what u counts: "step" (every call, refused updates too), "applied" (applied updates only) or "tokens" (targets
            of all updates, this one included; `warmup`, `length` and stages are tokens then).
    """

    _at: ClassVar[str] = "schedule."
    shape: Literal[
        "constant",
        "linear",
        "cosine",
        "half_cosine",
        "polynomial",
        "inverse_sqrt",
        "power",
        "exponential",
        "wsd",
        "range",
        "stages",
    ] = "cosine"
    warmup: Natural | None = None
    length: Count | None = None
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.1
    start: Share = 0.0
    exponent: Positive | None = None
    cycles: Count = 1
    tail: Annotated[float, Meta(gt=0, le=1)] | None = None
    tail_shape: Literal["linear", "cosine", "sqrt", "reciprocal"] = "linear"
    end: Annotated[float, Meta(ge=0, le=1)] | None = None
    stages: tuple[str, ...] = ()
    counts: Literal["step", "applied", "tokens"] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fields_of_shape(self)
        if self.shape == "stages":
            stages_of(self)
            return
        if self.length is not None and (self.warmup or 0) >= self.length:
            raise ValueError(
                f"schedule.warmup={self.warmup} must be in [0, schedule.length={self.length}); "
                f"lower schedule.warmup or raise steps"
            )
        _check_quotients(self)
        if self.length is not None and self.has_tail:
            _check_tail(self)

    @property
    def has_tail(self) -> bool:
        """Whether it ends in a tail."""
        return self.tail is not None or self.shape == "wsd"

    @property
    def has_length(self) -> bool:
        """Whether its length decides on any rate."""
        return self.has_tail or self.shape not in ("constant", "inverse_sqrt", "power", "stages")

    @property
    def has_floor(self) -> bool:
        """Whether its floor decides on any rate."""
        if self.shape in ("constant", "wsd"):
            return self.has_tail and self.end is None
        return self.shape != "stages"

    @property
    def period(self) -> int:
        """Updates of a cycle of "wsd"; of all else, whose tail comes after all cycles, the whole length."""
        return (self.length or 1) // (self.cycles if self.shape == "wsd" else 1)

    @property
    def down(self) -> int:
        """Updates of the tail of a period."""
        return round((self.tail or TAIL) * self.period)


class Stage(NamedTuple):
    """A stage of a schedule: `shape` from `begin` to `to` within `updates`."""

    shape: str
    updates: int
    begin: float
    to: float


def stages_of(schedule: Schedule) -> tuple[Stage, ...]:
    """Read `schedule.stages`.

    Raises:
        ValueError: a text is no stage.

    >>> stages_of(Schedule(shape="stages", stages=("linear:10:1", "constant:80", "cosine:10:0.1")))[1]
    Stage(shape='constant', updates=80, begin=1.0, to=1.0)
    """
    found: list[Stage] = []
    level = schedule.start
    for text in schedule.stages:
        shape, *words = text.split(":")
        to = _fraction(words[1]) if len(words) == 2 and shape in ("linear", "cosine") else None
        if len(words) == 1 and shape == "constant":
            to = level
        count = words[0] if words else ""
        if to is None or not (count.isascii() and count.isdigit()) or not 1 <= int(count) < 2**63:
            raise ValueError(
                f"schedule.stages={text} must be SHAPE:UPDATES:TO (linear or cosine, TO in [0, 1]) or constant:UPDATES; "
                f"write it like linear:1000:1"
            )
        found.append(Stage(shape, int(count), level, to))
        level = to
    return tuple(found)


_USED_BY = (
    ("exponent", ("cosine", "polynomial", "inverse_sqrt", "power")),
    ("cycles", ("cosine", "wsd")),
    ("tail", ("constant", "cosine", "inverse_sqrt", "power", "wsd")),
    ("stages", ("stages",)),
)


def _check_fields_of_shape(schedule: Schedule) -> None:
    check_used(schedule, "shape", _USED_BY)
    for name in ("tail_shape", "end"):
        if schedule.sets(name) and not schedule.has_tail:
            raise ValueError(
                f"schedule.{name}={getattr(schedule, name)} must go with schedule.tail; set both or neither"
            )
    if schedule.sets("length") and not schedule.has_length:
        raise ValueError(
            f"schedule.length={schedule.length} must not go with schedule.shape={schedule.shape} (it has no end); drop one"
        )
    if schedule.sets("floor") and not schedule.has_floor:
        other = f"schedule.shape={schedule.shape}" if schedule.end is None else f"schedule.end={schedule.end}"
        raise ValueError(f"schedule.floor={schedule.floor} must not go with {other} (it is never reached); drop one")
    if schedule.shape == "stages" and not schedule.stages:
        raise ValueError(
            'schedule.stages=[] must name stages for schedule.shape=stages; write ["linear:1000:1", "cosine:9000:0.1"]'
        )
    if schedule.shape in ("stages", "range") and schedule.warmup:
        raise ValueError(
            f"schedule.warmup={schedule.warmup} must be 0 for schedule.shape={schedule.shape}, which has its own rise; drop it"
        )
    if schedule.start and not schedule.warmup and schedule.warmup is not None and schedule.shape != "stages":
        raise ValueError(
            f"schedule.start={schedule.start} must go with schedule.warmup, which rises from it; set both or neither"
        )


def _check_quotients(schedule: Schedule) -> None:
    """Refuse what would divide by zero."""
    if schedule.shape in ("inverse_sqrt", "power") and schedule.warmup == 0:
        raise ValueError(
            f"schedule.warmup=0 must be at least 1 for schedule.shape={schedule.shape}, "
            f"which falls as (warmup / u)^exponent; set schedule.warmup"
        )
    if schedule.shape in ("exponential", "range") and schedule.floor == 0:
        raise ValueError(
            f"schedule.floor=0 must be above 0 for schedule.shape={schedule.shape}, which multiplies; set schedule.floor=1e-3"
        )
    if schedule.tail_shape == "reciprocal" and (schedule.floor if schedule.end is None else schedule.end) == 0:
        name = "floor" if schedule.end is None else "end"
        raise ValueError(
            f"schedule.{name}=0 must be above 0 for schedule.tail_shape=reciprocal, which divides by it; set schedule.{name}=0.01"
        )


def _check_tail(schedule: Schedule) -> None:
    """Refuse a tail that is empty, or begins before the warm-up has ended: the rate would jump."""
    length, period, tail = schedule.length or 1, schedule.period, f"schedule.tail={schedule.tail or TAIL}"
    if schedule.shape == "wsd" and length % schedule.cycles:
        raise ValueError(f"schedule.cycles={schedule.cycles} must divide schedule.length={length}; change one of them")
    if schedule.down < 1:
        raise ValueError(f"{tail} must be at least one update of schedule.length={length}; raise one of them")
    if period - schedule.down < (schedule.warmup or 0):
        raise ValueError(
            f"{tail} begins at update {period - schedule.down}, "
            f"must not begin within schedule.warmup={schedule.warmup}; lower one of them"
        )


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None
