"""loss.png: train and held-out loss in bits per byte, learning rate and gradient norm, from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.run.folder import run_folder, write_file
from lib.run.launch import Launch
from lib.run.lines import read_lines
from lib.run.progress import Progress
from lib.run.signals import Signals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NO_MATPLOTLIB", "RATE", "drawable", "drawn", "plot", "plot_verb", "save", "tidy"]

NO_MATPLOTLIB = '{}: matplotlib is absent, must be installed to draw; pip install "purestep[plot]"'

RATE = "#2a9d8f"  # the colour of learning rates
_TRAIN, _HELDOUT, _NORM, _REFUSED = "#3b6fb6", "#d1495b", "#6c5b7b", "#e07a00"

Row = dict[str, Any]


def plot_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Draw loss.png of a run folder again.

    Raises:
        ValueError: there is no such run, nothing to draw, or matplotlib is absent.
    """
    with signals.at_once():
        voice.say(str(plot(run_folder(told.config))))
    return 0


def drawable() -> bool:
    """Whether matplotlib is there."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def drawn(row: Row) -> bool:
    """Whether a row of metrics has something to draw."""
    return "loss_nats" in row or row.get("eval/bpb") is not None


def plot(folder: Path) -> Path:
    """Draw `folder`/loss.png.

    Returns:
        Its path.

    Raises:
        ValueError: matplotlib is absent, or there is nothing to draw.
        CheckpointError: the file cannot be written.
    """
    if not drawable():
        raise ValueError(NO_MATPLOTLIB.format("loss.png"))
    rows = read_lines(folder / "metrics.jsonl")
    train = [row for row in rows if "loss_nats" in row]
    heldout = [row for row in rows if row.get("eval/bpb") is not None]
    if not train and not heldout:
        raise ValueError(f"{folder / 'metrics.jsonl'}: 0 rows, must have some to draw; train first")
    # No pyplot: it would pick a screen and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=150, layout="constrained", facecolor="white")
    loss, rate, norm = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3.2, 1, 1]})
    _draw_loss(loss, train, heldout)
    _draw_rate(rate, train)
    _draw_norm(norm, train)
    norm.set_xlabel("update")
    figure.suptitle(_title(folder, heldout or train), fontsize=13, fontweight="bold")
    return save(figure, folder / "loss.png")


def save(figure: Figure, path: Path) -> Path:
    """Write a picture whole or not at all.

    Returns:
        `path`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())
    return path


def tidy(axes: Axes) -> None:
    """A faint grid, and no frame above and on the right."""
    axes.grid(visible=True, which="major", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(folder: Path, rows: Sequence[Row]) -> str:
    key = "eval/bpb" if "eval/bpb" in rows[-1] else "bpb"
    kind = "held-out" if key == "eval/bpb" else "train"
    value = rows[-1][key]
    number = "no finite loss" if value is None else f"{value:.3f} bits per byte"
    return f"{folder.resolve().name}: {kind} {number} at update {rows[-1]['step']}"


def _draw_loss(axes: Axes, train: Sequence[Row], heldout: Sequence[Row]) -> None:
    steps, values = _series(train, "bpb")
    if steps:
        axes.plot(steps, values, color=_TRAIN, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(values), color=_TRAIN, linewidth=1.8, label="train (smoothed over faint raw)")
    steps_out, values_out = _series(heldout, "eval/bpb")
    if steps_out:
        axes.plot(steps_out, values_out, "o-", color=_HELDOUT, linewidth=1.6, markersize=4, label="held-out")
        axes.annotate(
            f"{values_out[-1]:.3f}",
            (steps_out[-1], values_out[-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=_HELDOUT,
            fontweight="bold",
        )
    axes.margins(x=0.09)  # room for the number beside the last point
    _log_scale(axes, values + values_out, fine_below=30)
    axes.set_ylabel("loss [bits per byte]")
    if steps or steps_out:
        axes.legend(frameon=False, loc="upper right")
    tidy(axes)


def _draw_rate(axes: Axes, train: Sequence[Row]) -> None:
    steps, values = _series(train, "lr")
    axes.plot(steps, values, color=RATE, linewidth=1.6)
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    tidy(axes)


def _draw_norm(axes: Axes, train: Sequence[Row]) -> None:
    steps, values = _series(train, "grad_norm")
    axes.plot(steps, values, color=_NORM, alpha=0.35, linewidth=1)
    axes.plot(steps, _smooth(values), color=_NORM, linewidth=1.6)
    _log_scale(axes, values, fine_below=5)
    axes.set_ylabel("gradient norm")
    refused = _refused(train)
    for index, step in enumerate(refused):
        axes.axvline(step, color=_REFUSED, linewidth=1, alpha=0.8, label="refused updates" if index == 0 else None)
    if refused:
        axes.legend(frameon=False, loc="upper right")
    tidy(axes)


def _refused(train: Sequence[Row]) -> list[int]:
    """Steps of the rows since whose predecessor an update was refused: the count runs on between rows."""
    found, before = [], 0
    for row in train:
        count = row.get("skipped") or 0
        if count > before:
            found.append(row["step"])
        before = count
    return found


def _series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _smooth(values: Sequence[float]) -> list[float]:
    """A centred mean over about a twentieth of the curve, narrower at the ends: no lag, and the ends stay true."""
    reach = max(len(values) // 40, min(2, len(values) // 5))
    result = []
    for at in range(len(values)):
        near = min(reach, at, len(values) - 1 - at)
        window = values[at - near : at + near + 1]
        result.append(sum(window) / len(window))
    return result


def _log_scale(axes: Axes, values: Sequence[float], *, fine_below: float) -> None:
    """Ratios matter in a loss and a norm; the ticks stay plain numbers, and few when they span many."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    if not values or min(values) <= 0:
        return
    span = max(values) / min(values)
    ticks = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if span < fine_below else (1.0, 3.0) if span < 100 else (1.0,)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
