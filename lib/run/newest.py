"""The checkpoint that a verb begins with: a run's newest, or the one that is asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

from lib.config import Config
from lib.errors import CheckpointError
from lib.run.folder import run_folder
from lib.run.progress import Progress
from lib.run.resume import recorded_in
from lib.store import load
from lib.store.checkpoint import read_info, resolve
from lib.store.folder import at_step, latest, newest
from lib.store.place import Where, place_of
from lib.store.remote import is_remote

__all__ = ["checkpoint_in", "checkpoints_of", "newest_checkpoint", "newest_state"]


def checkpoints_of(config: Config) -> Where:
    """The folder of a run's checkpoints, which may be elsewhere."""
    elsewhere = config.checkpoint.dir
    if elsewhere is None:
        return Path(config.run.dir) / "checkpoints"
    return elsewhere if is_remote(elsewhere) else Path(elsewhere)


def newest_checkpoint(config: Config, voice: Progress) -> Where:
    """Find the checkpoint that `load` asks for; whoever reads it verifies it.

    With `load=older` damaged ones that are newer are named and set aside.

    Raises:
        CheckpointError: there is none, or with `load=older` no good one.
    """
    checkpoints = checkpoints_of(config)
    if isinstance(config.load, int):
        return at_step(checkpoints, config.load)
    if config.load == "older":
        path = latest(checkpoints, older=True, aside=lambda folder, why: voice.say(f"{why}; set aside as {folder}"))
    else:
        path = newest(checkpoints)
    if path is None:
        raise CheckpointError(f"{checkpoints}: no checkpoint is there, must be one; train the run first")
    return path


def checkpoint_in(config: Config, path: str, key: str) -> Where:
    """Find the checkpoint that a key of the config names, at the step that `load` asks for.

    Raises:
        ValueError: `load=older`, which sets checkpoints of a run aside, for what may be no run.
        CheckpointError: none is there.
    """
    if config.load == "older":
        raise ValueError(f"load=older must not go with {key}, it is for the run in run.dir; name the checkpoint itself")
    if isinstance(config.load, int):
        return at_step(place_of(resolve(path)).parent, config.load)
    return resolve(path)


def newest_state(config: Config, voice: Progress) -> TensorDict:
    """Read it, for a verb that trains nothing; with as many threads as the run has.

    Raises:
        ValueError: there is no such run.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    run_folder(config)
    path = newest_checkpoint(config, voice)
    threads = config.run.threads or recorded_in(read_info(path)).threads
    if threads is not None:
        torch.set_num_threads(threads)
    return load(path)
