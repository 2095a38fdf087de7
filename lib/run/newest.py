"""The newest checkpoint of a run, for every verb that begins with one."""

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
from lib.store.checkpoint import read_info
from lib.store.folder import latest

__all__ = ["newest_checkpoint", "newest_state"]


def newest_checkpoint(config: Config, voice: Progress) -> Path:
    """Find the newest checkpoint of a run, verified; with `load=older` damaged ones are named and set aside.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    checkpoints = Path(config.run.dir) / "checkpoints"
    path = latest(
        checkpoints,
        older=config.load == "older",
        aside=lambda folder, why: voice.say(f"{why}; set aside as {folder}"),
    )
    if path is None:
        raise CheckpointError(f"{checkpoints}: no checkpoint is there, must be one; train the run first")
    return path


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
