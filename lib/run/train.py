"""The verb `train`: start a run or go on with it, train, and end it with a picture and a sample of text.

The run folder is touched only when everything that can be checked has been, and a checkpoint is committed in it before
the first step: a mistake leaves no trace, and a full disk is found at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from lib.config import run_steps
from lib.data.arrays import arrays_after
from lib.data.batch import batch_of, cursor_of, heldout_batches
from lib.data.plan import plan_of
from lib.data.share import Share
from lib.errors import CheckpointError
from lib.metrics import UNITS
from lib.run.compile import faster
from lib.run.evals import EVAL_UNITS, evaluate
from lib.run.feed import feed, pinned
from lib.run.folder import as_toml, held, write_file
from lib.run.launch import Launch
from lib.run.lines import append, cut, evaluated, open_lines, read_lines, sync
from lib.run.loop import Acts, End, Plan, Save, due, loop
from lib.run.meter import METER_UNITS, meter
from lib.run.newest import checkpoints_of
from lib.run.plot import NO_MATPLOTLIB, drawable, drawn, plot
from lib.run.progress import Progress, duration
from lib.run.sampling import written
from lib.run.saver import Saver
from lib.run.signals import INTERRUPTED, Interrupted, Signals
from lib.run.start import Start, again, ended, fresh, resumed
from lib.step import Step, train_step
from lib.store import save
from lib.store.folder import newest, prune, step_name, sweep
from lib.store.place import Where, place_of
from lib.store.retention import Policy
from lib.tree import leaves

__all__ = ["train_verb"]


def train_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Train as told.

    Returns:
        0, or 75 when it was interrupted and everything is saved.

    Raises:
        ValueError: the run folder belongs to another recipe or to another process.
        DataError: the text is absent, too short, or other than the run's.
        DivergedError: too many updates in a row were refused.
        CheckpointError: a checkpoint is damaged or cannot be written.
    """
    run, checkpoints = Path(told.config.run.dir), checkpoints_of(told.config)
    alone = partial(held, run, checkpoints, lambda: newest(checkpoints) is not None)
    began = time.monotonic()
    with ExitStack() as stack:
        with signals.at_once():
            begun = newest(checkpoints) is not None
            if begun and told.config.resume == "never":
                raise ValueError(f"run.dir={run}: a run is there, must be none with resume=never; set another run.dir")
            if begun and (nothing_left := ended(told)):
                voice.say(nothing_left)
                return 0
            if begun:
                stack.enter_context(alone())
                start = resumed(told, voice)
            else:
                start = fresh(told, voice)
                stack.enter_context(alone())
                start = start._replace(checkpoint=_first(start, run))
            _settle(start, run, voice)
        try:
            end = _train(start, run, voice, signals)
        except (Exception, Interrupted) as error:
            voice.end()
            voice.note(f"error: {error}" if str(error) else "interrupted")
            raise
        voice.end()
        step = int(end.state["step"])
        if end.asked or step < run_steps(start.config):
            why = "interrupted" if end.asked else "stopped"
            voice.say(f"{why} at step {step}, saved; to go on: {again(told.config)}")
            return INTERRUPTED if end.asked else 0
        _finish(end.state, start, run, voice, signals)
        voice.say(_done(run, step, time.monotonic() - began))
        return 0


def _first(start: Start, run: Path) -> Where:
    """Commit the state that a run begins with."""
    checkpoints = checkpoints_of(start.config)
    if newest(checkpoints) is not None:
        raise ValueError(f"run.dir={run}: another process has begun a run here, must be one at a time; run again")
    write_file(run / "config.toml", as_toml(start.config).encode())
    state = start.state[0]
    sweep(checkpoints)
    return save(place_of(checkpoints).child(step_name(int(state["step"]))), state, info=_told(start, "permanent"))


def _settle(start: Start, run: Path, voice: Progress) -> None:
    """Make the process and the run folder agree with where the launch begins."""
    torch.set_num_threads(start.info["threads"])
    voice.log_to(run / "run.log")
    write_file(run / "config.toml", as_toml(start.config).encode())
    write_file(run / "data.json", start.data.encode())
    step = int(start.state[0]["step"])
    if dropped := cut(run / "metrics.jsonl", step):
        voice.say(
            f"metrics.jsonl: {dropped} lines beyond step {step} or unreadable dropped; steps beyond are taken again"
        )


def _train(start: Start, run: Path, voice: Progress, signals: Signals) -> End:
    """Take the steps of this launch."""
    step, seed, cursor = (start.state[0][name] for name in ("step", "key", "cursor"))
    first, plan, metrics, data = int(step), _plan(start), run / "metrics.jsonl", start.config.data
    voice.say(_about(start, plan))
    # A function of the arguments it is given here, in whatever process it runs.
    where = (start.text.sources, plan_of(start.recipe.batch), int(seed), cursor_of(cursor), first, Share())
    make, device = partial(arrays_after, *where), step.device

    def there(made: Mapping[str, Any]) -> TensorDict:
        return pinned(batch_of(made), device)

    with (
        open_lines(metrics, {**UNITS, **EVAL_UNITS, **METER_UNITS}) as lines,
        feed(make, there, ahead=data.ahead, workers=data.workers) as batches,
        _saver(start, run, lines, voice) as saver,
    ):
        acts = _acts(start, run, lines, saver, voice, signals)
        if due(first, plan) and evaluated(metrics, first) is None:  # no launch before got so far
            voice.say(f"evaluating on held-out text before step {first + 1}")
            acts.evaluate(start.state[0])
        if start.compiled and first < plan.last and not signals.asked():
            voice.say("compiling the step: once, about half a minute")
        voice.begin(first, plan.last)
        return loop(start.state, batches, plan, acts)


def _saver(start: Start, run: Path, lines: FileIO, voice: Progress) -> Saver:
    """Who saves the run's states; what is said of it is said by the thread that has done it."""
    checkpoints, how = checkpoints_of(start.config), start.config.checkpoint
    policy = Policy(how.keep, how.keep_every, how.keep_every_s, how.keep_best, frozenset(how.at))

    def after(step: int) -> None:
        voice.note(f"saved {place_of(checkpoints).child(step_name(step))}")
        rows = read_lines(run / "metrics.jsonl") if how.keep_best is not None else []
        # Its own line may be written just now, or not yet: what goes must not depend on that.
        rows = [row for row in rows if row["step"] < step and isinstance(row.get(how.best_by), (int, float))]
        scores = {row["step"]: row[how.best_by] for row in rows}
        prune(checkpoints, policy, scores=scores)  # only now that its successor is committed
        sweep(checkpoints)

    return Saver(
        checkpoints,
        newest=start.checkpoint,
        background=how.background,
        before=lambda: sync(lines),  # no checkpoint ever lacks its rows
        after=after,
    )


def _told(start: Start, kind: Save) -> dict[str, Any]:
    """What a checkpoint is to say of itself: how it came about, when, and whether it may go soon."""
    return {**start.info, "saved_at_s": round(time.time(), 3), "temporary": kind == "temporary"}


def _acts(start: Start, run: Path, lines: FileIO, saver: Saver, voice: Progress, signals: Signals) -> Acts:
    """What the loop causes, as functions of values: files, clock and screen."""
    config, heldout = start.config, list(start.text.heldout.values())
    clock = meter(read_lines(run / "metrics.jsonl"), int(start.state[0]["step"]))

    def tick(step: int) -> None:
        clock.tick(step)
        voice.tick(step)

    def log(step: int, metrics: TensorDict) -> None:
        row = clock.row(step, metrics)
        append(lines, row)
        voice.row(row)

    def tried(act: Callable[[], None]) -> None:
        """A save that fails ends the run, unless it is told to go on."""
        try:
            act()
        except CheckpointError as error:
            if config.checkpoint.on_error == "stop":
                raise
            voice.say(f"going on without this checkpoint, checkpoint.on_error=go_on: {error}")

    def commit(state: TensorDict, kind: Save) -> bool:
        if saver.busy and kind != "last" and config.checkpoint.busy == "skip":
            voice.note(f"step {int(state['step'])} is not saved, the save before it is still at hand")
            return False
        tried(saver.settle)
        if kind == "last":
            saver.save(state, _told(start, kind))
        else:
            tried(lambda: saver.save(state, _told(start, kind)))
        if not config.checkpoint.background:
            clock.pause()
        return True

    def settle() -> Where:
        saver.settle()
        assert saver.newest is not None  # one was committed before the first step
        return saver.newest

    def measure(state: TensorDict) -> None:
        if not heldout:
            return
        batches = heldout_batches(heldout, plan_of(start.recipe.batch), config.eval.rows)
        row = evaluate(state, batches, weights=config.eval.weights, asked=signals.asked)
        if row is not None:
            append(lines, row)
            voice.heldout(row)
        clock.pause()

    step = faster(train_step, compile=start.compiled, donate=True)
    taken = _compiling(step, signals) if start.compiled else step
    return Acts(taken, log, commit, lambda: tried(saver.check), settle, measure, tick, signals.asked)


def _finish(state: TensorDict, start: Start, run: Path, voice: Progress, signals: Signals) -> None:
    """The end of a run; everything is saved by now, so a signal drops what is left."""
    with signals.at_once():
        if drawable():
            if any(map(drawn, read_lines(run / "metrics.jsonl"))):  # a short run may have logged nothing
                plot(run)
        else:
            voice.say(NO_MATPLOTLIB.format("loss.png"))
        if start.config.sample.length and not start.config.data.tokenizer.startswith("ids:"):
            voice.say(f"sample:\n{written(state, start.config.sample, start.config.eval.weights, start.text.coder)}")


def _plan(start: Start) -> Plan:
    config, total = start.config, run_steps(start.config)
    return Plan(
        last=total if config.stop is None else min(total, config.stop),
        total=total,
        log_every=config.log.every,
        save_every=config.checkpoint.every,
        save_at=frozenset(config.checkpoint.at),
        temporary_every=config.checkpoint.temporary or 0,
        eval_every=config.eval.every if start.text.heldout else 0,
        patience=config.guard.patience,
    )


def _about(start: Start, plan: Plan) -> str:
    config, batch = start.config, start.config.batch
    count = sum(leaf.numel() for leaf in leaves(start.state[0]["params"]).values())
    return (
        f"{count:,} parameters; {plan.total} updates of {batch.rows} rows of {batch.length}; "
        f"{config.precision.compute}, compile {config.compile}, {config.run.threads} threads"
    )


def _done(run: Path, step: int, seconds: float) -> str:
    row = evaluated(run / "metrics.jsonl", step)
    bpb = row.get("eval/bpb") if row else None
    held = "" if bpb is None else f"held-out {bpb:.4f} bits per byte "
    return f"done: {held}at step {step}, {duration(seconds)} for this launch; all of it is in {run}"


def _compiling(step: Step, signals: Signals) -> Step:
    """The first call compiles: long, and with nothing unsaved before it, so a signal ends it at once."""
    compiled: list[bool] = []

    def stepped(state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        if compiled:
            return step(state, batch)
        with signals.at_once():
            taken = step(state, batch)
        compiled.append(True)
        return taken

    return stepped
