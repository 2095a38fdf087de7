"""Which checkpoints a policy lets go of: a pure function of what is committed.

Each rule only ever keeps: a checkpoint goes when none of them asks for it. The greatest committed step never goes, so
there is always one to resume from. As steps grow, no later look wants back what an earlier one gave up: while scores and
pins do not change, looking after every save leaves what one look at the end would.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["Policy", "Saved", "retain"]


class Saved(NamedTuple):
    """One committed checkpoint, as retention sees it.

    Attributes:
        step: updates taken, >= 0.
        saved_at_s: seconds since 1970 when it was saved; none = not known, and so is one that is not finite.
        temporary: it is there to resume from until a newer one is; its own flag says so, never arithmetic on the step.
    """

    step: int
    saved_at_s: float | None = None
    temporary: bool = False


class Policy(NamedTuple):
    """Which checkpoints stay: those that at least one rule keeps.

    `last`, `every`, `every_s` and `best` look at permanent ones alone.

    Attributes:
        last: the n newest stay, >= 1; none = all stay, and the three rules below change nothing.
        every: those whose step is a multiple stay, 0 among them, >= 1; none = no such rule.
        every_s: of each stretch of so many seconds, counted from 1970, the smallest step stays, and so does each whose
            time is not known; finite, > 0; none = no such rule.
        best: the n with the lowest score stay, >= 1; none = no such rule.
        steps: these stay, temporary ones too.
    """

    last: int | None = None
    every: int | None = None
    every_s: float | None = None
    best: int | None = None
    steps: frozenset[int] = frozenset()


def retain(
    committed: Sequence[Saved],
    policy: Policy,
    *,
    scores: Mapping[int, float] = MappingProxyType({}),
    pinned: Collection[int] = (),
) -> set[int]:
    """Choose the steps to delete: those that no rule keeps.

    A temporary one stays while it is the greatest step of all, or is named or pinned.

    Args:
        committed: what is there, each step once, in any order.
        policy: the rules.
        scores: of steps, lower is better, ties go to the smaller step; one without a finite score is never best and
            takes no place among the best. Steps that are not there do not matter, here as in `pinned`.
        pinned: steps being read; they stay, temporary ones too.

    Returns:
        The steps to delete, never the greatest one.

    Raises:
        ValueError: a rule is out of its range; a step is negative, or there twice.

    >>> sorted(retain([Saved(9999), Saved(10000), Saved(8000)], Policy(last=1, every=4000)))
    [9999]
    """
    _check_policy(policy)
    known = sorted(one.step for one in committed)
    _check_steps(known)
    if not known:
        return set()
    permanent = sorted((one for one in committed if not one.temporary), key=lambda one: one.step)
    steps = [one.step for one in permanent]
    stay = {known[-1], *policy.steps, *pinned}
    stay.update(steps if policy.last is None else steps[-policy.last :])
    if policy.every is not None:
        stay.update(step for step in steps if step % policy.every == 0)
    if policy.every_s is not None:
        stay |= _firsts(permanent, policy.every_s)
    if policy.best is not None:
        ranked = sorted((scores[step], step) for step in steps if step in scores and math.isfinite(scores[step]))
        stay.update(step for _, step in ranked[: policy.best])
    return set(known) - stay


def _firsts(permanent: Sequence[Saved], every_s: float) -> set[int]:
    """Steps that are the first of their stretch of time, and those whose time is not known; `permanent` is in order.

    The first by step, not by time: after a clock was set back, a newer checkpoint must not push out an older one.
    """
    first: dict[int, int] = {}
    unknown = set()
    for one in permanent:
        stretch = math.nan if one.saved_at_s is None else one.saved_at_s / every_s
        if math.isfinite(stretch):
            first.setdefault(math.floor(stretch), one.step)
        else:
            unknown.add(one.step)
    return unknown | set(first.values())


def _check_policy(policy: Policy) -> None:
    counts = (
        ("keep", policy.last, "to keep all"),
        ("keep_every", policy.every, "for no such rule"),
        ("keep_best", policy.best, "for no such rule"),
    )
    for key, count, otherwise in counts:
        if count is not None and count < 1:
            raise ValueError(
                f"checkpoint.{key}={count} must be at least 1; set checkpoint.{key}=1, or none {otherwise}"
            )
    if policy.every_s is not None and not 0 < policy.every_s < math.inf:  # NaN is on no side of anything
        raise ValueError(
            f"checkpoint.keep_every_s={policy.every_s} must be above 0 and finite; "
            "set checkpoint.keep_every_s=3600, or none for no such rule"
        )


def _check_steps(known: Sequence[int]) -> None:
    """Refuse steps, in order, that are negative or there twice."""
    if known and known[0] < 0:
        raise ValueError(f"committed: step {known[0]} must be at least 0; a step is the number of updates taken")
    for step, following in pairwise(known):
        if step == following:
            raise ValueError(f"committed: step {step} is there twice, must be there once; leave one of the two out")
