"""The choice of an optimizer: rules, their settings, and which of them clash. Imports no torch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from lib.values import Checked, Positive, Share, check_used

__all__ = ["MOST_LR", "Group", "Optim", "groups_of"]

MOST_LR = 1e6  # below it finite gradients make finite steps


class Optim(Checked, frozen=True):
    """The optimizer.

    Attributes:
        rule: update rule; "muon" is for the matrices of the blocks and AdamW there for the rest.
        lr: peak learning rate.
        decay: decoupled weight decay, multiplied by the learning rate.
        beta1: decay of the first moment, of "adamw", "lion", and AdamW's part in "muon".
        beta2: decay of the second moment, of the same; "lion" is mostly run with 0.99.
        eps: added to the root of the second moment, of "adamw" and "muon".
        momentum: share of the past, of "sgd" (none = 0.9) and "muon" (none = 0.95).
        nesterov: look ahead, in "sgd" (none = false) and "muon" (none = true).
        moments: dtype that "adamw" keeps its moments in; "bf16" is rounded by chance, from the key.
        matrices: patterns of what "muon" makes orthogonal; none = matrices of the blocks, or all of parameters of one's own.
        clip: greatest global gradient norm; none = no clipping.
        groups: other rates for some parameters, as texts PATTERN:lr=F,decay=F (factors; either may be left out) or
            PATTERN:freeze; a parameter is in one group at most.
        no_decay: patterns (`*`, `?`) of parameter paths without weight decay; none = vectors and scalars (norms, biases).
        average: decay of an exponential moving average of the parameters; none = no average is kept.
    """

    _at: ClassVar[str] = "optim."
    rule: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = "adamw"
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
    average: Share | None = None

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
        groups_of(self)


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
    ("beta1", ("adamw", "lion", "muon")),
    ("beta2", ("adamw", "lion", "muon")),
    ("eps", ("adamw", "muon")),
    ("momentum", ("sgd", "muon")),
    ("nesterov", ("sgd", "muon")),
    ("moments", ("adamw",)),
    ("matrices", ("muon",)),
)
