"""The verb `inspect`: what is in the newest checkpoint, every byte of it verified."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from lib.config import Recipe
from lib.run.launch import Launch
from lib.run.newest import newest_state
from lib.run.progress import Progress
from lib.run.rows import shown_rows
from lib.run.signals import Signals
from lib.store.checkpoint import read_info
from lib.tree import leaves

__all__ = ["inspect_verb"]


def inspect_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """List the leaves of the newest checkpoint: path, shape, dtype, bytes, norm; then its recipe and where it stands.

    Raises:
        ValueError: there is no such run.
        CheckpointError: its newest checkpoint is absent or damaged.
    """
    with signals.at_once():
        if told.config.inspect.rows:
            voice.say(shown_rows(told, voice))
            return 0
        state = newest_state(told.config, voice)  # read in full, so it is verified
        named = leaves(state)
        rows = [("leaf", "shape", "dtype", "bytes", "norm"), *(_row(path, leaf) for path, leaf in named.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            left = "  ".join(text.ljust(width) for text, width in zip(row[:3], widths[:3], strict=True))
            right = "  ".join(text.rjust(width) for text, width in zip(row[3:], widths[3:], strict=True))
            voice.say(f"{left}  {right}")
        size = sum(leaf.nbytes for leaf in named.values())
        voice.say(f"verified: step {int(state['step'])}, {len(named)} leaves, {size / 1e6:.1f} MB")
        for source, cursor in state["cursor"].items():
            voice.say(f"cursor {source}: {', '.join(f'{name} {int(value)}' for name, value in cursor.items())}")
        for line in _data(Path(told.config.run.dir) / "data.json"):
            voice.say(line)
        voice.say(_recipe(state["recipe"]))
        info = read_info(Path(told.config.run.dir))
        voice.say("written by: " + ", ".join(f"{name} {value}" for name, value in info.items()))
    return 0


def _row(path: str, leaf: torch.Tensor) -> tuple[str, str, str, str, str]:
    norm = torch.linalg.vector_norm(leaf.to(torch.float64))
    shape = "x".join(map(str, leaf.shape)) or "-"
    return path, shape, str(leaf.dtype).removeprefix("torch."), str(leaf.nbytes), f"{norm:.6g}"


def _data(path: Path) -> Iterator[str]:
    """What was read for each source, and what was not."""
    try:
        sources = json.loads(path.read_bytes())["sources"]
        yield from (f"data {name}: {about['summary']}" for name, about in sources.items())
    except (OSError, ValueError, KeyError, TypeError):
        yield f"{path}: cannot be read; the run writes it anew when it goes on"


def _recipe(recipe: Recipe) -> str:
    sections: dict[str, Any] = msgspec.to_builtins(recipe)
    lines = []
    for name, values in sections.items():
        shown = "none" if values is None else ", ".join(f"{key} {_shown(value)}" for key, value in values.items())
        lines.append(f"recipe {name}: {shown}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
