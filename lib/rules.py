"""The choice of an optimizer: rules, their settings, and which of them clash. Imports no torch."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from lib.values import Checked, Count, Positive, Share, check_used, shown

__all__ = ["MOST_LR", "Group", "Optim", "groups_of"]

MOST_LR = 1e6  # below it finite gradients make finite steps


class Optim(Checked, frozen=True):
    """The optimizer.

    Attributes:
        rule: update rule; "muon" is for the matrices of the blocks and AdamW there for the rest;
            "schedule_free" is AdamW's, with a mean of its steps to evaluate, which wants a warm-up and a constant rate.
        lr: peak learning rate.
        decay: decoupled weight decay, multiplied by the learning rate.
        beta1: decay of the first moment, of "adamw", "lion", and AdamW's part in "muon"; in "schedule_free" how near to
            the mean gradients are taken, above 0.
        beta2: decay of the second moment, of the same; "lion" is mostly run with 0.99.
        eps: added to the root of the second moment, of "adamw", "muon" and "schedule_free".
        momentum: share of the past, of "sgd" (none = 0.9) and "muon" (none = 0.95).
        nesterov: look ahead, in "sgd" (none = false) and "muon" (none = true).
        moments: dtype that "adamw" keeps its moments in; "bf16" is rounded by chance, from the key.
        matrices: patterns of what "muon" makes orthogonal; none = matrices of the blocks, or all of parameters of one's own.
        clip: greatest global gradient norm; none = no clipping.
        groups: other rates for some parameters, as texts PATTERN:lr=F,decay=F (factors; either may be left out) or
            PATTERN:freeze; a parameter is in one group at most.
        no_decay: patterns (`*`, `?`) of parameter paths without weight decay; none = vectors and scalars (norms, biases).
        average: decay of an exponential moving average of the parameters that is kept beside them, or "uniform" for a plain
            mean; none = no average is kept.
        average_last: so many updates the average is of, up to each end of a window; it is then kept until the next window
            begins. None = all updates.
        average_every: windows end at updates that are a multiple of this.
        average_at: windows end at these updates.
    """

    _at: ClassVar[str] = "optim."
    rule: Literal["adamw", "sgd", "lion", "adafactor", "muon", "schedule_free"] = "adamw"
    lr: Annotated[float, Meta(gt=0, le=MOST_LR)] = 2e-3
    decay: Annotated[float, Meta(ge=0, le=MOST_LR)] = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Annotated[float, Meta(ge=1e-30)] = 1e-8  # in fp32 less would be 0, and 0 / 0 the step of what has no gradient
    momentum: Share | None = None
    nesterov: bool | None = None
    moments: Literal["fp32", "bf16"] = "fp32"
    matrices: tuple[str, ...] | None = None
    groups: tuple[str, ...] = ()
    clip: Positive | None = 1.0
    no_decay: tuple[str, ...] | None = None
    average: Share | Literal["uniform"] | None = None
    average_last: Count | None = None
    average_every: Count | None = None
    average_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("no_decay", "matrices", "groups"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"optim.{name}={value!r} must be a list of texts; write [{value!r}]")
        check_used(self, "rule", _OF_RULES)
        if self.nesterov and self.momentum == 0:
            raise ValueError(
                "optim.nesterov=true must not go with optim.momentum=0 (nothing lies ahead then); drop one"
            )
        if self.rule == "schedule_free" and self.beta1 == 0:
            raise ValueError(
                "optim.beta1=0 must be above 0 with optim.rule=schedule_free (its mean plays no part then); "
                "set one near 0.9"
            )
        if self.rule == "schedule_free" and self.average is not None:
            raise ValueError(
                f"optim.average={shown(self.average)} must not go with optim.rule=schedule_free, which keeps a mean of its "
                f"own; drop one"
            )
        groups_of(self)
        _check_windows(self)


def _check_windows(optim: Optim) -> None:
    last, every, at = optim.average_last, optim.average_every, optim.average_at
    for name in ("average_last", "average_every", "average_at"):
        if optim.sets(name) and optim.average is None:
            raise ValueError(
                f"optim.{name}={shown(getattr(optim, name))} must go with optim.average; set both or neither"
            )
    if (last is None) != (every is None and not at):
        raise ValueError(
            f"optim.average_last={shown(last)} must go with an end, optim.average_every or optim.average_at; set both or neither"
        )
    if every is not None and at:
        raise ValueError(
            f"optim.average_every={every} must not go with optim.average_at={list(at)}, windows must not overlap; drop one"
        )
    if last is not None and every is not None and last > every:
        raise ValueError(
            f"optim.average_last={last} must be at most optim.average_every={every}, windows must not overlap; lower it"
        )
    for before, end in pairwise((0, *at)):
        if end - before < (last or 1):
            raise ValueError(
                f"optim.average_at={end} must be at least optim.average_last={last} after {before}, "
                f"windows must not overlap; change one"
            )


class Group(NamedTuple):
    """Parameters with rates of their own: factors on learning rate and decay, or none at all."""

    pattern: str
    lr: float = 1.0
    decay: float = 1.0
    freeze: bool = False


def groups_of(optim: Optim) -> tuple[Group, ...]:
    """Read `optim.groups`.

    Raises:
        ValueError: a text is no group.

    >>> groups_of(Optim(groups=("embed.*:lr=0.1,decay=0", "head.*:freeze")))[0]
    Group(pattern='embed.*', lr=0.1, decay=0.0, freeze=False)
    """
    return tuple(_group(text) for text in optim.groups)


def _group(text: str) -> Group:
    pattern, _, rest = text.rpartition(":")
    if pattern and rest == "freeze":
        return Group(pattern, freeze=True)
    found: dict[str, float] = {}
    for word in rest.split(","):
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not pattern or name not in ("lr", "decay") or name in found or not 0 <= number <= MOST_LR:
            raise ValueError(
                f"optim.groups={text} must be PATTERN:lr=F,decay=F (factors from 0 to 1e6) or PATTERN:freeze; "
                f"write it like embed.*:lr=0.1"
            )
        found[name] = number
    return Group(pattern, found.get("lr", 1.0), found.get("decay", 1.0))


_OF_RULES = (
    ("beta1", ("adamw", "lion", "muon", "schedule_free")),
    ("beta2", ("adamw", "lion", "muon", "schedule_free")),
    ("eps", ("adamw", "muon", "schedule_free")),
    ("momentum", ("sgd", "muon")),
    ("nesterov", ("sgd", "muon")),
    ("moments", ("adamw",)),
    ("matrices", ("muon",)),
)
