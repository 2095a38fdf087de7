"""The loop: state and batches in, state out. Everything else is an act around it that gets values and holds nothing.

The step's number and the data's cursor are read from the state and nowhere else; the counter here only mirrors
`state["step"]`. What is due at a step is a function of its number alone, so a run cut in two does the same things as
one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from lib.errors import DataError, DivergedError
from lib.step import Step
from lib.store.place import Where

__all__ = ["Acts", "End", "Plan", "Save", "due", "loop", "save_due"]

Save = Literal["permanent", "temporary", "last"]
"""Why a state is saved; the last one of a launch is permanent, and must succeed."""


class Plan(NamedTuple):
    """What is due when.

    Attributes:
        last: the step this launch ends at.
        total: the step the run ends at.
        log_every: steps between metric rows.
        save_every: steps between checkpoints.
        save_at: steps that have one besides.
        temporary_every: steps between temporary checkpoints; 0 = none.
        eval_every: steps between evaluations; 0 = never.
        patience: refused updates in a row that end the run.
    """

    last: int
    total: int
    log_every: int
    save_every: int
    save_at: frozenset[int]
    temporary_every: int
    eval_every: int
    patience: int


class Acts(NamedTuple):
    """What the loop causes.

    Attributes:
        step: the train step; it may use up the state it is given.
        log: write the metrics of a step.
        save: begin to commit a state; it may go on after the call, and when that fails the next `check` raises. False = not
            begun, since another save is at hand.
        check: raise if a save has failed.
        settle: wait until all is saved; give the newest checkpoint.
        evaluate: measure a state on held-out text.
        tick: a step was taken.
        asked: has somebody asked for an end.
    """

    step: Step
    log: Callable[[int, TensorDict], None]
    save: Callable[[TensorDict, Save], bool]
    check: Callable[[], None]
    settle: Callable[[], Where]
    evaluate: Callable[[TensorDict], None]
    tick: Callable[[int], None]
    asked: Callable[[], bool]


class End(NamedTuple):
    """Where the loop ended: the state, committed, and whether somebody asked for an end."""

    state: TensorDict
    asked: bool


def loop(begin: list[TensorDict], batches: Iterator[TensorDict], plan: Plan, acts: Acts) -> End:
    """Train until `plan.last` or until asked to end; the state it ends with is committed.

    Args:
        begin: where to begin, committed, as the one element of a list. It is taken out here: an argument of a call may stay
            held by the caller until the call is over (Python does so wherever Dynamo watches frames), with all its memory.
        batches: from the state's cursor on.
        plan: what is due when.
        acts: how it is done.

    Raises:
        DataError: a batch could not be made; the state before it is committed.
        DivergedError: `plan.patience` updates in a row were refused; no such state is committed.
        CheckpointError: a checkpoint or a row could not be written; the earlier ones are intact.
    """
    state = begin.pop()
    step = saved = int(state["step"])
    worst = torch.zeros_like(state["scale", "bad"])
    each_step = worst.device.type == "cpu"  # elsewhere reading a number waits for the device
    while step < plan.last and not acts.asked():
        # 1. The batch at the cursor, made ahead of time: the state does not know how far ahead.
        try:
            batch = next(batches)
        except DataError:  # whoever makes batches has failed, the state has not
            _end(state, step, saved, worst, plan, acts)
            raise
        # 2. The pure step. The old state may be used up by it, so from here on only the new one exists.
        state, metrics = acts.step(state, batch)
        step += 1
        acts.tick(step)
        # 3. The step's own row, before a checkpoint could hold the step without its row.
        logged = step % plan.log_every == 0
        if logged:
            acts.log(step, metrics)
        # 4. Refused updates in a row, before the save: a run that has diverged commits nothing more.
        worst = torch.maximum(worst, state["scale", "bad"])
        if each_step or logged or step == plan.last:
            _check_refused(worst, step, plan.patience, acts.settle)
        # 5. The checkpoint, before the evaluation of the same step: whatever happens in there, the step is kept. A save
        # that has failed since the last step is heard of here, before another begins.
        acts.check()
        if (kind := save_due(step, plan)) is not None and acts.save(state, kind):
            saved = step
        # 6. The evaluation sees exactly the parameters of its step; it gives back nothing.
        if due(step, plan) and not acts.asked():
            acts.evaluate(state)
    # 7. Asked to end: the step is finished, and it is committed whatever its number.
    _end(state, step, saved, worst, plan, acts)
    return End(state, acts.asked())


def save_due(step: int, plan: Plan) -> Save | None:
    """Which kind of checkpoint is: a function of the step's number."""
    if step == plan.last:
        return "last"
    if step % plan.save_every == 0 or step in plan.save_at:
        return "permanent"
    return "temporary" if plan.temporary_every and step % plan.temporary_every == 0 else None


def due(step: int, plan: Plan) -> bool:
    """Whether an evaluation is: every `eval_every` steps and at the end of the run, not where a launch merely stops."""
    return plan.eval_every > 0 and (step % plan.eval_every == 0 or step == plan.total)


def _end(state: TensorDict, step: int, saved: int, worst: Tensor, plan: Plan, acts: Acts) -> None:
    """Commit the state if it is not, and wait for it."""
    if saved != step:
        _check_refused(worst, step, plan.patience, acts.settle)
        acts.save(state, "last")
    acts.settle()


def _check_refused(worst: Tensor, step: int, patience: int, settle: Callable[[], Where]) -> None:
    count = int(worst)
    if count >= patience:
        checkpoint = settle()
        raise DivergedError(
            f"step {step}: {count} updates in a row were refused, must be below guard.patience={patience}; "
            f"the last healthy checkpoint is {checkpoint}, lower optim.lr and run again to go on from it"
        )
