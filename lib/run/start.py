"""Where a launch begins: at step 0 of a new run, at the newest checkpoint of an old one, or nowhere, since it is done.

Nothing here writes: mistakes are found in the order config, recipe, text, and leave no trace.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

from lib.config import Config, DataIdentity, recipe_of, run_steps
from lib.errors import CheckpointError
from lib.run.compile import decide
from lib.run.folder import settled
from lib.run.launch import Launch
from lib.run.lines import evaluated, read_lines
from lib.run.newest import newest_checkpoint
from lib.run.plot import drawable
from lib.run.progress import Progress
from lib.run.reading import Text, check_same, corpus_text, find_text, open_text
from lib.run.resume import Resumed, as_info, compare, recorded_in, with_changes
from lib.state import init_state
from lib.store import load
from lib.store.checkpoint import read_info
from lib.store.folder import newest

__all__ = ["Start", "again", "ended", "fresh", "resumed"]

_STAYS = " (the rate stays at its floor unless schedule.length={} too)"


class Start(NamedTuple):
    """Where a launch begins.

    Attributes:
        config: with nothing left open.
        state: of step 0, or of the newest checkpoint; in a list, for the loop to take it out: a second holder would keep
            its memory for as long as the run lasts.
        checkpoint: the newest checkpoint; none = not one is committed yet.
        text: what is trained on.
        data: content of data.json.
        info: what checkpoints are to say of this process.
        compiled: whether the step is compiled.
    """

    config: Config
    state: list[TensorDict]
    checkpoint: Path | None
    text: Text
    data: str
    info: dict[str, Any]
    compiled: bool


def fresh(told: Launch, voice: Progress) -> Start:
    """Begin a new run.

    Raises:
        CheckpointError: the folder holds the metrics of a run whose checkpoints are gone.
        DataError: there is no text to train on.
    """
    config, run = told.config, Path(told.config.run.dir)
    lost = [row["step"] for row in read_lines(run / "metrics.jsonl") if row["step"] > 0]
    if lost:
        raise CheckpointError(
            f"run.dir={run}: metrics.jsonl goes to step {lost[-1]} and no checkpoint is there, must have one to go on; "
            f"put the checkpoints back or set another run.dir"
        )
    voice.say(f"{run}: a new run")
    corpus = find_text(config, voice)
    asked = recipe_of(config, DataIdentity(holdout=config.data.holdout))
    text = open_text(corpus, asked, config.data.cache, voice, how=config.data.holdout_by)
    recipe = recipe_of(config, text.identity)
    threads = config.run.threads or torch.get_num_threads()
    compiled = config.compile == "on" or (config.compile == "auto" and decide(recipe, run_steps(config)))
    state = init_state(recipe, seed=config.run.seed)
    fixed = settled(config, recipe.schedule, threads=threads, compiled=compiled)
    info = as_info(threads, compiled, state["step"].device.type)
    return Start(fixed, [state], None, text, corpus_text(corpus, fixed.data.path), info, compiled)


def resumed(told: Launch, voice: Progress) -> Start:
    """Go on with a run; its folder is held.

    Raises:
        ValueError: it has another recipe.
        DataError: its text is gone, or other than it was.
        CheckpointError: its newest checkpoint is damaged, or, with load=older, every one is.
    """
    config, run = told.config, Path(told.config.run.dir)
    path = newest_checkpoint(config, voice)
    state = load(path)
    going = _going_on(told, state, read_info(path))
    voice.say(f"{run}: going on from step {int(state['step'])} of {run_steps(config)}")
    schedule, steps = going.recipe.schedule, run_steps(config)
    if schedule.shape != "constant" and schedule.length is not None and steps > schedule.length:
        voice.say(f"schedule.length: stays {schedule.length}, beyond it the rate stays at its floor")
    for note in going.notes:
        voice.say(note)
    corpus = find_text(config, voice)
    check_same(corpus, going.recipe.data.digest, run / "data.json", config)
    text = open_text(corpus, going.recipe, config.data.cache, voice)
    threads = going.threads or config.run.threads or torch.get_num_threads()
    compiled = config.compile == "on" if going.compiled is None else going.compiled
    fixed = settled(config, going.recipe.schedule, threads=threads, compiled=compiled)
    info = as_info(threads, compiled, state["step"].device.type)
    return Start(
        fixed, [with_changes(state, going.recipe)], path, text, corpus_text(corpus, fixed.data.path), info, compiled
    )


def ended(told: Launch) -> str | None:
    """The line for a run or launch that has nothing left to do; none = it has. Reads little and changes nothing.

    Raises:
        ValueError: the run has another recipe.
    """
    config, run = told.config, Path(told.config.run.dir)
    path = newest(run / "checkpoints")
    if path is None:
        return None
    try:
        state, info = load(path, keys=["step", "key", "recipe"]), read_info(path)
    except CheckpointError:  # reading it in full will say what is wrong, or take an older one
        return None
    _going_on(told, state, info)
    step, total = int(state["step"]), run_steps(config)
    if step < total:
        stopped = config.stop is not None and step >= config.stop
        return f"{run}: at step {step}, stop={config.stop} is reached; to go on: {again(config)}" if stopped else None
    row = evaluated(run / "metrics.jsonl", step)
    measured = row is not None or not config.eval.every or not state["recipe"].data.holdout
    drawn = (run / "loss.png").exists() or not drawable()
    if step == total and not (measured and drawn):
        return None  # it was interrupted between its last step and its end
    bpb = row.get("eval/bpb") if row else None
    held = f", held-out {bpb:.4f} bits per byte" if bpb is not None else ""
    past = f", beyond steps={total}" if step > total else ""
    stays = "" if state["recipe"].schedule.shape == "constant" else _STAYS.format(2 * step)
    return f"{run}: complete at step {step}{past}{held}; to go on: {again(config)} steps={2 * step}{stays}"


def again(config: Config) -> str:
    """The command that goes on with a run."""
    return f"python -m lib.run run.dir={shlex.quote(config.run.dir)}"


def _going_on(told: Launch, state: TensorDict, info: Mapping[str, Any]) -> Resumed:
    return compare(state["recipe"], int(state["key"]), told, recorded_in(info), state["step"].device.type)
