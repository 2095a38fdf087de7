"""Saving while training goes on: a copy of the state, written by a thread, one at a time.

Guarantees: what is written is the state as it was when `save` was called, whatever becomes of it afterwards; a save that
fails raises at the next `check`, on every rank at the same step, and leaves no COMMIT; leaving the block waits for the
save at hand, so a process never ends before it is settled; the copy's memory is free as soon as it is written.

A thread is enough: copying to the disk, waiting for it and most checksums run outside of the interpreter, and the
thread has a low priority where the system allows it. Where a GPU is, the copy goes to pinned memory, behind the work at
hand and before the next step's (not run yet on one).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from tensordict import TensorDict
from torch import Tensor

from lib.store.checkpoint import commit, hold
from lib.store.exchange import Found
from lib.store.folder import step_name
from lib.store.leaves import nodes
from lib.store.place import Place, Where, place_of
from lib.store.ranks import ALONE, Ranks
from lib.store.sharded import Held

__all__ = ["Saver", "snapshot"]

NICE = 10  # of 19: training goes first where both want a core


class Snapshot(NamedTuple):
    """A copy of a state as this rank holds it, and what to wait for before it is read."""

    found: Found
    ready: Callable[[], None]


class _Flight(NamedTuple):
    """A save at hand."""

    step: int
    thread: threading.Thread
    failure: list[BaseException]


class Saver:
    """Saves states as the checkpoints of one run.

    Attributes:
        newest: the newest checkpoint that this saver, or whoever made it, knows to be committed.
    """

    def __init__(
        self,
        checkpoints: Where | Place,
        *,
        newest: Where | None = None,
        background: bool = True,
        before: Callable[[], None] = lambda: None,
        after: Callable[[int], None] = lambda _step: None,
        ranks: tuple[Ranks, Ranks] = (ALONE, ALONE),
    ) -> None:
        """Make a saver.

        Args:
            checkpoints: the folder that checkpoints go to, a path or a URL.
            newest: a checkpoint that is committed there already.
            background: write while the caller goes on; else `save` returns when all is done.
            before: done in the background before a save commits anything, as by syncing what the checkpoint relies on.
            after: done when a step's checkpoint is committed, as by pruning older ones; only on the first rank.
            ranks: those who save together (`lib.store.ranks.over`), twice, over two groups: one that the background
                talks through, one that `check` does.
        """
        self.newest = newest
        self._checkpoints, self._background = place_of(checkpoints), background
        self._before, self._after = before, after
        self._writers, self._watchers = ranks
        self._flight: _Flight | None = None
        # Who forgets to settle is waited for all the same, before the interpreter takes its pools of threads away.
        threading._register_atexit(_waited_for, weakref.ref(self))  # type: ignore[attr-defined]

    @property
    def busy(self) -> bool:
        """Whether a save is at hand that `check` has not seen the end of."""
        return self._flight is not None

    def save(self, state: TensorDict, info: Mapping[str, Any]) -> None:
        """Begin to save a state under its own step; a save at hand is waited for.

        Raises:
            CheckpointError: the save before failed; or, not in the background, this one.
        """
        self.settle()
        step = _step_of(state)
        held = hold(nodes(state))
        if not self._background:
            self._write(step, Snapshot(held, lambda: None), info)
            self._landed(step)
            return
        # The copy is handed over and nowhere kept, so that its memory is free once it is written.
        handed, failure = [snapshot(held)], list[BaseException]()

        def act() -> None:
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            try:
                self._write(step, handed.pop(), info)
            except BaseException as error:  # noqa: BLE001 - raised where the caller looks
                failure.append(error.with_traceback(None))

        thread = threading.Thread(target=act, name=f"save {step}")
        self._flight = _Flight(step, thread, failure)
        thread.start()

    def check(self) -> None:
        """See whether the save at hand has ended; on several ranks, on all of them.

        Raises:
            CheckpointError: it failed.
        """
        if self._flight is None:
            return
        ended = b"" if self._flight.thread.is_alive() else b"ended"
        if all(self._watchers.share(ended)):
            self._land()

    def settle(self) -> None:
        """Wait for the save at hand.

        Raises:
            CheckpointError: it failed.
        """
        if self._flight is not None:
            self._land()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.settle()
        elif self._flight is not None:  # what ended the block counts for more than what became of the save
            flight, self._flight = self._flight, None
            flight.thread.join()
            if flight.failure:
                error.add_note(f"the save at hand failed too: {flight.failure.pop()}")

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        assert flight is not None
        flight.thread.join()
        if flight.failure:
            raise flight.failure.pop()
        self._landed(flight.step)

    def _landed(self, step: int) -> None:
        self.newest = self._checkpoints.child(step_name(step)).where

    def _write(self, step: int, copy: Snapshot, info: Mapping[str, Any]) -> None:
        copy.ready()
        self._before()
        commit(self._checkpoints.child(step_name(step)), copy.found, info, self._writers)
        if self._writers.rank == 0:
            self._after(step)


def _step_of(state: TensorDict) -> int:
    step = state.get("step", None)
    kind = f"{step.dtype} {tuple(step.shape)}" if isinstance(step, Tensor) else type(step).__name__
    if not isinstance(step, Tensor) or step.is_floating_point() or step.ndim or int(step) < 0:
        raise ValueError(f"state.step: {kind} must be a whole number >= 0, as an int64 tensor of no dims; set it")
    return int(step)


def _waited_for(saver: weakref.ref[Saver]) -> None:
    """At the end of the process: wait for a save, and say so if it failed and nobody has heard of it."""
    # A save at hand keeps its saver alive.
    flight = None if (left := saver()) is None else left._flight
    if flight is None:
        return
    flight.thread.join()
    if flight.failure:
        print(f"error: {flight.failure[0]}", file=sys.stderr, flush=True)


def snapshot(found: Found) -> Snapshot:
    """Copy what this rank holds into the CPU's memory; later changes of the state do not reach the copy."""
    copied: dict[str, Any] = {}
    events: dict[torch.device, torch.cuda.Event] = {}
    for path, leaf in found.items():
        copied[path] = leaf._replace(local=_copy(leaf.local)) if isinstance(leaf, Held) else leaf
        if isinstance(leaf, Held) and leaf.local.device.type == "cuda":
            events[leaf.local.device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for device, event in events.items():
        event.record(torch.cuda.current_stream(device))

    def ready() -> None:
        for event in events.values():
            event.synchronize()

    return Snapshot(copied, ready)


def _copy(local: Tensor) -> Tensor:
    if local.device.type == "cuda":
        # Behind all work on this stream so far and before all that comes, so the state may be overwritten at once.
        pinned = torch.empty(local.shape, dtype=local.dtype, pin_memory=True)
        return pinned.copy_(local.detach(), non_blocking=True)
    if local.device.type == "cpu":
        return local.detach().clone(memory_format=torch.contiguous_format)
    return local.detach().cpu().contiguous()
