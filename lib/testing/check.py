"""The laws together: held against a step one after the other, and said in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from types import MappingProxyType
from typing import Any

from lib.testing.arithmetic import accumulation, refusal
from lib.testing.case import Case, UncheckedError, Verdict, smaller
from lib.testing.compiled import compilation, forgotten, recompilation
from lib.testing.laws import cursor, determinism, purity, resume, structure
from lib.testing.mesh import mesh, ranks

__all__ = ["LAWS", "LawError", "check_step", "examine"]

Law = Callable[[Case], str | None]

LAWS: Mapping[str, Law] = MappingProxyType(
    {
        "purity": purity,
        "determinism": determinism,
        "structure": structure,
        "cursor": cursor,
        "resume": resume,
        "accumulation": accumulation,
        "refusal": refusal,
        "compilation": compilation,
        "recompilation": recompilation,
        "mesh": mesh,
        "ranks": ranks,
    }
)
"""Each law by its name, in the order in which they are checked."""

# Where one of these is broken, the others would say nothing of their own.
_GROUND = ("purity", "determinism", "structure")
_COMPILED = ("compilation", "recompilation")


class LawError(AssertionError):
    """A step breaks a law; the text names each, where, and the smallest input that breaks it.

    Attributes:
        verdicts: what came of each law.
    """

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        self.verdicts = tuple(verdicts)
        super().__init__("\n".join(str(verdict) for verdict in verdicts if verdict.kind == "broken"))


def check_step(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Any, *, laws: Sequence[str] = tuple(LAWS)
) -> tuple[Verdict, ...]:
    """Hold the laws of a training state against a step.

    Args:
        step: `step(state, batch) -> (state, metrics)`, eager; it is compiled here.
        state: a TensorDict, or nested dict, of tensors. Slots `params`, `optimizer` and `average` are what is learnt.
        batches: one or several batches; leaves are [micro-batches, rows, ...], but for `cursor`; `mask`, if there is one, says
            which positions are targets.
        laws: which of `LAWS`.

    Returns:
        What came of each law: held, or not checked and why.

    Raises:
        LawError: at least one law is broken.
        ValueError: no batch, or no such law.
        Exception: whatever the step raises on what it is given here.
    """
    verdicts = tuple(examine(step, state, batches, laws=laws))
    if any(verdict.kind == "broken" for verdict in verdicts):
        raise LawError(verdicts)
    return verdicts


def examine(
    step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batches: Any, *, laws: Sequence[str] = tuple(LAWS)
) -> Iterator[Verdict]:
    """Hold the laws against a step, as `check_step` does, and give each verdict as it comes."""
    brought = tuple(batches) if isinstance(batches, (list, tuple)) else (batches,)
    if not brought:
        raise ValueError("batches=() must have at least one; make one")
    for name in laws:
        if name not in LAWS:
            raise ValueError(f"laws={name} must be one of {', '.join(LAWS)}; change it")
    case, broken = Case(step, state, brought), ""
    with forgotten() if set(laws) & set(_COMPILED) else nullcontext():
        for name in LAWS:
            if name not in laws:
                continue
            verdict = Verdict(name, "not checked", f"{broken} is broken") if broken else _judged(name, case)
            if verdict.kind == "broken" and name in _GROUND:
                broken = name
            yield verdict


def _judged(name: str, case: Case) -> Verdict:
    law = LAWS[name]
    try:
        said = law(case)
    except UncheckedError as reason:
        return Verdict(name, "not checked", str(reason))
    if said is None:
        return Verdict(name, "held")
    for less in islice(smaller(case), 3 if name in _COMPILED else None):
        try:
            found = law(less)
        except Exception:  # noqa: BLE001 (a step need not take every smaller input)
            continue
        if found is not None:
            return Verdict(name, "broken", f"{found} (smallest input: {less})")
    return Verdict(name, "broken", f"{said} (input: {case})")
