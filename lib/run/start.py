"""Where a launch begins: at step 0 of a new run, at the newest checkpoint of an old one, or nowhere, since it is done.

Nothing here writes: mistakes are found in the order config, recipe, text, and leave no trace.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tensordict import TensorDict

from lib.config import Config, load_config, recipe_of, run_reach, run_steps
from lib.data.mix import check_repeats
from lib.data.plan import plan_of, rows_before
from lib.errors import CheckpointError
from lib.recipe import DataIdentity, Recipe
from lib.run.compile import decide
from lib.run.folder import settled
from lib.run.init import check_source, with_weights
from lib.run.launch import Launch
from lib.run.lines import evaluated, read_lines
from lib.run.newest import checkpoints_of, newest_checkpoint
from lib.run.plot import drawable
from lib.run.progress import Progress
from lib.run.reading import Text, check_same, data_text, find_text, open_text
from lib.run.resume import Resumed, as_info, compare, recorded_in, with_changes
from lib.sources import sources_of
from lib.state import abstract_state, init_state
from lib.store import load
from lib.store.checkpoint import read_info, resolve
from lib.store.folder import STEP, newest, unfinished
from lib.store.place import Where, place_of

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
        recipe: of the state, which itself the loop takes away.
    """

    config: Config
    state: list[TensorDict]
    checkpoint: Where | None
    text: Text
    data: str
    info: dict[str, Any]
    compiled: bool
    recipe: Recipe


def fresh(told: Launch, voice: Progress) -> Start:
    """Begin a new run.

    Raises:
        CheckpointError: the folder holds the metrics of a run whose checkpoints are gone.
        DataError: there is no text to train on.
    """
    config, run = told.config, Path(told.config.run.dir)
    if config.resume == "always" or isinstance(config.load, int):
        how = "resume=always" if config.resume == "always" else f"load={config.load}"
        raise CheckpointError(
            f"{checkpoints_of(config)}: no checkpoint is there, must be one with {how}; check run.dir and "
            f"checkpoint.dir, or begin a run without it"
        )
    lost = [row["step"] for row in read_lines(run / "metrics.jsonl") if row["step"] > 0]
    if lost:
        raise CheckpointError(
            f"run.dir={run}: metrics.jsonl goes to step {lost[-1]} and no checkpoint is there, must have one to go on; "
            f"put the checkpoints back or set another run.dir"
        )
    before = run / "config.toml"
    if before.is_file() and (old := checkpoints_of(load_config(before))) != checkpoints_of(config) and newest(old):
        raise CheckpointError(
            f"run.dir={run}: its checkpoints are in {old}, {checkpoints_of(config)} has none, must be where they are; "
            f"drop checkpoint.dir or set another run.dir"
        )
    if config.init.path is not None:
        check_source(config.init)  # before much text is read in vain
    voice.say(f"{run}: a new run")
    if config.init.path is not None and config.init.take == "all":
        at = resolve(config.init.path)
        # Its run folder, if it lies in one, tells the names of its files.
        names = at.parents[1] / "data.json" if isinstance(at, Path) else run / "data.json"
        return _from(told, voice, at, names)._replace(checkpoint=None)
    found = find_text(config, voice)
    text = open_text(found, config, None, voice)
    config = _with_vocab(told, text)
    recipe = recipe_of(config, text.identity)
    _check_repeats(config, recipe, text)
    threads = config.run.threads or torch.get_num_threads()
    compiled = config.compile == "on" or (config.compile == "auto" and decide(recipe, run_steps(config)))
    state = init_state(recipe, seed=config.run.seed)
    if config.init.path is not None:
        state = with_weights(state, config.init)
        voice.say(f"{run}: begins with the weights of {config.init.path}")
    fixed = settled(config, recipe.schedule, threads=threads, compiled=compiled)
    info = as_info(threads, compiled, state["step"].device.type)
    return Start(fixed, [state], None, text, data_text(found, fixed, text), info, compiled, recipe)


def resumed(told: Launch, voice: Progress) -> Start:
    """Go on with a run; its folder is held.

    Raises:
        ValueError: it has another recipe.
        DataError: its text is gone, or other than it was.
        CheckpointError: its newest checkpoint is damaged, or, with load=older, every one is.
    """
    config, run = told.config, Path(told.config.run.dir)
    path = newest_checkpoint(config, voice)
    last = newest(checkpoints_of(config))
    for rest in unfinished(checkpoints_of(config)):
        voice.say(f"{rest}: has no COMMIT, so it is no checkpoint; passed over")
    if path != last:
        raise ValueError(
            f"load={config.load}: the run goes on to {last}, must be the newest to train on; to branch off from it set "
            f"init.path={path} init.take=all and another run.dir"
        )
    return _from(told, voice, path, run / "data.json")


def _from(told: Launch, voice: Progress, path: Where, names: Path) -> Start:
    """Go on from a checkpoint, of this run or of another; `names` is the data.json that goes with it."""
    config, run = told.config, Path(told.config.run.dir)
    head = load(path, keys=["step", "key", "recipe"])
    place, ours = place_of(path), place_of(checkpoints_of(config))
    name = STEP.fullmatch(place.name)
    if name and int(name[1]) != int(head["step"]):
        raise CheckpointError(f"{path}: holds step {int(head['step'])}, must hold the one of its name; rename it back")
    try:
        going = _going_on(told, head, read_info(path))
    except ValueError as error:
        if place.parent == ours:
            raise
        why = str(error).replace(f"run.dir={config.run.dir}: this", f"init.path={config.init.path}: that", 1)
        raise ValueError(why) from None
    state = load(path, like=abstract_state(head["recipe"]))
    source = "" if place.parent == ours else f", from {path}"
    voice.say(f"{run}: going on from step {int(state['step'])} of {run_steps(config)}{source}")
    schedule = going.recipe.schedule
    if schedule.has_length and schedule.length is not None and run_reach(config) > schedule.length:
        voice.say(f"schedule.length: stays {schedule.length}, beyond it the rate stays at its floor")
    for note in going.notes:
        voice.say(note)
    if "init.path" in told.named and place.parent == ours:
        voice.say("init.path: this run has begun, so it is not looked at")
    found = find_text(config, voice)
    check_same(found, going.recipe.data, names, config)
    text = open_text(found, config, going.recipe, voice)
    _check_repeats(config, going.recipe, text)
    threads = going.threads or config.run.threads or torch.get_num_threads()
    compiled = config.compile == "on" if going.compiled is None else going.compiled
    fixed = settled(config, going.recipe.schedule, threads=threads, compiled=compiled)
    info = as_info(threads, compiled, state["step"].device.type)
    return Start(
        fixed,
        [with_changes(state, going.recipe)],
        path,
        text,
        data_text(found, fixed, text),
        info,
        compiled,
        going.recipe,
    )


def ended(told: Launch) -> str | None:
    """The line for a run or launch that has nothing left to do; none = it has. Reads little and changes nothing.

    Raises:
        ValueError: the run has another recipe.
    """
    config, run = told.config, Path(told.config.run.dir)
    path = newest(checkpoints_of(config))
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
    measured = row is not None or not config.eval.every or not _evaluated_on(state["recipe"].data)
    drawn = (run / "loss.png").exists() or not drawable()
    if step == total and not (measured and drawn):
        return None  # it was interrupted between its last step and its end
    bpb = row.get("eval/bpb") if row else None
    held = f", held-out {bpb:.4f} bits per byte" if bpb is not None else ""
    past = f", beyond steps={total}" if step > total else ""
    schedule = state["recipe"].schedule
    stays = "" if schedule.counts == "tokens" or not schedule.has_length else _STAYS.format(2 * step)
    return f"{run}: complete at step {step}{past}{held}; to go on: {again(config)} steps={2 * step}{stays}"


def _evaluated_on(data: DataIdentity) -> bool:
    return bool(data.holdout or data.heldout)


def again(config: Config) -> str:
    """The command that goes on with a run."""
    return f"python -m lib.run run.dir={shlex.quote(config.run.dir)}"


def _going_on(told: Launch, state: TensorDict, info: Mapping[str, Any]) -> Resumed:
    return compare(state["recipe"], int(state["key"]), told, recorded_in(info), state["step"].device.type)


def _with_vocab(told: Launch, text: Text) -> Config:
    """The config with the model's vocabulary, which the tokenizer decides unless it is told.

    Raises:
        ValueError: it is told, and too small.
    """
    config, replace, vocab = told.config, msgspec.structs.replace, text.coder.tokenizer.vocab
    if "model.vocab" not in told.named:
        return replace(config, model=replace(config.model, vocab=vocab))
    if config.model.vocab < vocab:
        raise ValueError(
            f"model.vocab={config.model.vocab} must be at least {vocab}, the vocabulary of data.tokenizer; drop it"
        )
    return config


def _check_repeats(config: Config, recipe: Recipe, text: Text) -> None:
    """Hold the whole run against the passes that sources allow, before its first step."""
    limits = {name: source.repeat for name, source in sources_of(config.data).items()}
    plan = plan_of(recipe.batch)
    check_repeats(text.sources, plan, limits, rows=rows_before(plan, run_steps(config)), seed=config.run.seed)
