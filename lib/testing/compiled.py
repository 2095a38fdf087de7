"""Laws of the step compiled whole: the eager bits, and one compilation for all values.

Compiled code is kept by torch from one call to the next, so that the second law goes on with what the first one compiled;
`forgotten` is around both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _dynamo as dynamo

from lib.testing.case import Case, UncheckedError, outcome, said
from lib.testing.trees import difference, extras, forms, from_bytes, rebuilt_like
from lib.tree import leaves

__all__ = ["compilation", "forgotten", "recompilation"]


@contextmanager
def forgotten() -> Iterator[None]:
    """Nothing is compiled before, and nothing that was compiled in here stays."""
    dynamo.reset()
    try:
        with dynamo.config.patch(trace_autograd_ops=True):  # else a step that takes its gradients itself is refused
            yield
    finally:
        dynamo.reset()


def compilation(case: Case) -> str | None:
    """Traced as one graph, gradients included, the step has the bits of the eager one."""
    try:
        found = _traced(case)(case.state, case.batches[0])
    except Exception as error:  # noqa: BLE001 (what a compiler raises has no kind in common)
        return f"the step cannot be compiled whole: {said(error)}"
    if where := difference(outcome(case.step(case.state, case.batches[0])), outcome(found)):
        return f"eager and compiled, {where}; a step must not ask whether it is compiled"
    return None


def recompilation(case: Case) -> str | None:
    """A compiled step is compiled once, whatever the values: later updates, another rate, a state from its bytes."""
    traced, batches = _traced(case), [batch for batch in case.batches if forms(batch) == forms(case.batches[0])]
    try:
        state, _ = traced(case.state, batches[0])
    except Exception as error:
        raise UncheckedError("the step cannot be compiled whole") from error
    with dynamo.config.patch(error_on_recompile=True):
        for what, other, batch in _others(case, state, batches):
            try:
                found = traced(other, batch)
            except dynamo.exc.RecompileError as error:
                return f"{what} is compiled anew: {_guard(error)}; make what changes a tensor of the state"
            if where := difference(outcome(case.step(other, batch)), outcome(found)):
                return f"{what}, eager and compiled, is another: {where}"
    return None


def _traced(case: Case) -> Any:
    return torch.compile(case.step, fullgraph=True, backend="aot_eager", dynamic=False)


def _others(case: Case, state: Any, batches: list[Any]) -> list[tuple[str, Any, Any]]:
    later, found = state, []
    for number in range(2, 5):
        batch = batches[(number - 1) % len(batches)]
        found.append((f"update {number}", later, batch))
        later, _ = case.step(later, batch)
    named = leaves(later)
    for path in ("scheduler.lr", "step", "key"):
        if path in named:
            other = rebuilt_like(later, {**named, path: named[path] + 1}, extras(later))
            found.append((f"an update with another {path}", other, batches[0]))
    return [*found, ("an update of a state made from its bytes", from_bytes(later), batches[0])]


def _guard(error: Exception) -> str:
    """What no longer held, as Dynamo puts it; an order of keys in words."""
    text = " ".join(str(error).partition("guard failure(s):")[2].split())[:240]
    return f"keys stand in another order ({text})" if "dict.keys" in text else text
