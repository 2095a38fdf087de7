"""Laws of a step that need no more than calling it: purity, determinism, structure, cursor, resume.

A law is a function of a case. It gives none where the law holds, and else says in words where it is broken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lib.testing.case import Case, outcome, said
from lib.testing.trees import bits, difference, extras, forms, from_bytes, memory, snapshot
from lib.testing.world import moved, positions, seeded
from lib.tree import leaves

__all__ = ["cursor", "determinism", "purity", "resume", "structure"]

UPDATES = 3  # in a row, at least: what drifts shows by then


def purity(case: Case) -> str | None:
    """Inputs keep their bits, share no memory with outputs, and no global generator is moved or read."""
    state = case.state
    for number, batch in enumerate(case.batches, 1):
        inside = leaves({"state": state, "batch": batch})
        before, versions = snapshot(inside), {path: leaf._version for path, leaf in inside.items()}
        told: list[dict[str, Tensor]] = []
        after: tuple[Any, Any] = (state, {})
        for seed in (1, 1, 2, 2):
            with seeded(seed):
                stood = positions()
                after = case.step(state, batch)
                generator = moved(stood)
            for path, leaf in inside.items():
                if not torch.equal(bits(leaf), bits(before[path])):
                    return f"update {number} changes {path} in place; make a new tensor"
                if leaf._version != versions[path]:
                    return f"update {number} writes to {path} in place, if only what was there; make a new tensor"
            outside = outcome(after)
            if shared := _shared(inside, outside):
                return f"update {number}: {shared}; return a clone"
            if generator is not None:
                return f"update {number} moves {generator}; draw from a key in the state"
            told.append(snapshot(outside))
        alike = difference(told[0], told[1]) is None and difference(told[2], told[3]) is None
        if alike and (where := difference(told[1], told[2])):
            return f"update {number} reads a global generator: by its seed {where}; draw from a key in the state"
        state, _ = after
    return None


def determinism(case: Case) -> str | None:
    """The same state and batch give the same bits, whatever else the step was called with between."""
    for number, batch in enumerate(case.batches[:UPDATES], 1):
        first = snapshot(outcome(case.step(case.state, batch)))
        other, _ = case.step(case.state, case.batches[-number])
        case.step(other, batch)
        if where := difference(first, outcome(case.step(case.state, batch))):
            return (
                f"the same state and batch {number} give other bits when called again: {where}; "
                f"something outside the state counts, make it a leaf"
            )
    return None


def structure(case: Case) -> str | None:
    """State and metrics have one form for ever, and no leaf hangs on a graph of gradients."""
    state, begun, others = case.state, forms(case.state), extras(case.state)
    told: dict[str, str] | None = None
    for number, batch in enumerate(case.chain(max(UPDATES, len(case.batches))), 1):
        after: Any = case.step(state, batch)
        if not (isinstance(after, tuple) and len(after) == 2):
            return f"update {number} returns {type(after).__name__}, must return (state, metrics)"
        new, metrics = after
        if type(new) is not type(state):
            return f"update {number} returns a state that is {type(new).__name__}, was {type(state).__name__}"
        if where := _form_apart(begun, forms(new)):
            return f"update {number}: state.{where}"
        if told is not None and (where := _form_apart(told, forms(metrics))):
            return f"update {number}: metrics.{where}"
        for path, leaf in outcome(after).items():
            if leaf.requires_grad:
                return f"update {number}: {path} hangs on a graph of gradients; detach it"
        now = extras(new)
        for path in sorted({*others, *now}):
            if others.get(path) != now.get(path):
                return (
                    f"update {number}: state.{path} is no tensor, and changes from {others.get(path)!r} to "
                    f"{now.get(path)!r}; make it a 0-d tensor"
                )
        told, state = forms(metrics), new
    return None


def cursor(case: Case) -> str | None:
    """The state's cursor is the one that the batch brought, and `step` counts every call, where there are such."""
    for number, batch in enumerate(case.batches, 1):
        new, _ = case.step(case.state, batch)
        old, after, brought = leaves(case.state), leaves(new), leaves(batch)
        if "step" in old and int(after["step"]) != int(old["step"]) + 1:
            return f"batch {number}: step goes from {int(old['step'])} to {int(after['step'])}, must count each call"
        wanted = {path: leaf for path, leaf in brought.items() if path.startswith("cursor.")}
        held = {path: leaf for path, leaf in after.items() if path.startswith("cursor.")}
        if wanted and (where := difference(held, wanted)):
            return f"batch {number}: {where}; the state must hold the cursor of the batch"
    return None


def resume(case: Case) -> str | None:
    """A run cut at any update and gone on from the bytes of its state is the run that was not cut."""
    batches = case.chain(max(UPDATES, len(case.batches)))
    states, told, state = [case.state], [], case.state
    for batch in batches:
        after = case.step(state, batch)
        state, _ = after
        states.append(state)
        told.append(snapshot(outcome(after)))
    for cut in range(len(batches)):
        try:
            state = from_bytes(states[cut])
            for number in range(cut, len(batches)):
                after = case.step(state, batches[number])
                state, _ = after
                if where := difference(told[number], outcome(after)):
                    return (
                        f"cut after update {cut} and gone on from its bytes, update {number + 1} is another: {where}; "
                        f"something that counts is no leaf of the state"
                    )
        except Exception as error:  # noqa: BLE001 (whatever a step does with a state that is complete)
            return f"cut after update {cut}, the run cannot go on from its bytes: {said(error)}"
    return None


def _shared(inside: dict[str, Tensor], outside: dict[str, Tensor]) -> str | None:
    held, seen = memory(inside), dict[int, str]()
    for path, leaf in outside.items():
        if not leaf.numel():
            continue
        at = leaf.untyped_storage().data_ptr()
        if at in held:
            return f"the new {path} shares memory with the old {held[at]}"
        if at in seen:
            return f"the new {path} shares memory with the new {seen[at]}"
        seen[at] = path
    return None


def _form_apart(one: dict[str, str], other: dict[str, str]) -> str | None:
    for path in sorted({*one, *other}):
        if one.get(path) != other.get(path):
            return f"{path} is {other.get(path, 'gone')}, was {one.get(path, 'not there')}; one form must stay for ever"
    return None
