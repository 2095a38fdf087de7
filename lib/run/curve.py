"""schedule.png: the learning rate of every update of a run, before there is one."""

from __future__ import annotations

from pathlib import Path

import torch

from lib.config import Config, recipe_of, run_reach
from lib.errors import CheckpointError
from lib.run.launch import Launch
from lib.run.plot import NO_MATPLOTLIB, RATE, drawable, save, tidy
from lib.run.progress import Progress
from lib.run.signals import Signals
from lib.state.schedule import factor

__all__ = ["curve", "schedule_verb"]

POINTS = 4000  # drawn, each the true value of one update
LISTED = 9


def schedule_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Draw schedule.png in run.dir, and list some rates.

    Raises:
        ValueError: the settings clash, or matplotlib is absent.
        CheckpointError: run.dir cannot be written.
    """
    with signals.at_once():
        if not drawable():
            raise ValueError(NO_MATPLOTLIB.format("schedule.png"))
        config = told.config
        updates, rates = curve(config, POINTS)
        unit = _unit(config)
        some, listed = curve(config, LISTED)
        width = max(len(unit), len(f"{some[-1]:,}"))
        voice.say(f"{unit:>{width}}  learning rate")
        for update, rate in zip(some, listed, strict=True):
            voice.say(f"{update:>{width},}  {rate:.6g}")
        voice.say(str(_draw(Path(config.run.dir), config, updates, rates)))
    return 0


def curve(config: Config, points: int) -> tuple[list[int], list[float]]:
    """Updates (or tokens) from 1 to the end of the run or of the schedule, evenly spread, and their learning rates."""
    schedule = recipe_of(config).schedule
    end = max(run_reach(config), (schedule.length or 0) if schedule.has_length else 0)
    count = max(min(points, end), 2)
    # The last update of the warm-up is where the eye looks for the peak.
    drawn = {1 + round(n * (end - 1) / (count - 1)) for n in range(count)} | {min(schedule.warmup or 1, end)}
    updates = sorted(drawn)
    return updates, list((config.optim.lr * factor(torch.tensor(updates), schedule)).tolist())


def _unit(config: Config) -> str:
    return "tokens" if config.schedule.counts == "tokens" else "update"


def _draw(folder: Path, config: Config, updates: list[int], rates: list[float]) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.plot(updates, rates, color=RATE, linewidth=1.8)
    axes.set_xlabel(_unit(config))
    axes.set_ylabel("learning rate")
    if config.schedule.shape == "range":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    tidy(axes)
    axes.set_title(f"{config.schedule.shape}, peak {config.optim.lr:g}", fontsize=12, fontweight="bold")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"run.dir={folder}: {error.strerror}; set another run.dir") from None
    return save(figure, folder / "schedule.png")
