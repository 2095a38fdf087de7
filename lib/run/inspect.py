"""The verb `inspect`: what is in a checkpoint, every byte of it verified."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from tensordict import TensorDict

from lib.recipe import Recipe
from lib.run.folder import run_folder
from lib.run.launch import Launch
from lib.run.newest import checkpoint_in, newest_checkpoint
from lib.run.progress import Progress, size_text
from lib.run.rows import shown_rows
from lib.run.signals import Signals
from lib.store import load
from lib.store.checkpoint import Row, describe, has_recipe, read_info
from lib.store.folder import nearest_named
from lib.store.place import Where, place_of
from lib.store.reader import verify
from lib.tree import leaves

__all__ = ["inspect_verb"]

BATCH_BYTES = 256 << 20  # of leaves in memory at once


def inspect_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Show a checkpoint as a tree: shape, dtype, bytes and norm of each leaf; then its recipe and where it stands.

    Raises:
        ValueError: there is no such run.
        CheckpointError: the checkpoint is absent or damaged.
    """
    with signals.at_once():
        config = told.config
        if config.inspect.rows:
            voice.say(shown_rows(told, voice))
            return 0
        if config.inspect.path is None:
            run_folder(config)
            path = newest_checkpoint(config, voice)
        else:
            path = checkpoint_in(config, config.inspect.path, "inspect.path")
        with nearest_named(place_of(path)):
            verify(place_of(path))
        rows = describe(path)
        for line in _tree(rows, _norms(path, rows)):
            voice.say(line)
        there = {"recipe"} if has_recipe(path) else set()
        there |= {row.path.split(".")[0] for row in rows}
        small = load(path, keys=[name for name in ("step", "cursor", "recipe") if name in there])
        step = f"step {int(small['step'])}, " if "step" in small.keys() else ""  # noqa: SIM118
        size = sum(row.size_bytes for row in rows)
        voice.say(f"verified: {step}{len(rows)} leaves, {size_text(size)}")
        voice.say(f"checkpoint: {path}")
        for line in _standing(small):
            voice.say(line)
        if config.inspect.path is None:
            for line in _data(Path(config.run.dir) / "data.json"):
                voice.say(line)
        if "recipe" in there:
            voice.say(_recipe(small["recipe"]))
        if info := read_info(path):
            voice.say("written by: " + ", ".join(f"{name} {value}" for name, value in info.items()))
    return 0


def _norms(path: Where, rows: Sequence[Row]) -> dict[str, str]:
    """The Euclidean norm of each leaf, in float64; some leaves at a time, so that a state of any size can be shown."""
    norms: dict[str, str] = {}
    batch: list[str] = []
    held = 0
    for number, row in enumerate(rows):
        batch.append(row.path)
        held += row.size_bytes
        if held >= BATCH_BYTES or number == len(rows) - 1:
            for name, leaf in leaves(load(path, keys=batch)).items():
                norms[name] = f"{torch.linalg.vector_norm(leaf.to(torch.float64)):.6g}"
            batch, held = [], 0
    return norms


def _tree(rows: Sequence[Row], norms: Mapping[str, str]) -> Iterator[str]:
    """Lines of a table whose first column is a tree."""
    table = [("leaf", "shape", "dtype", "bytes", "norm")]
    above: list[str] = []
    for row in rows:
        *branches, name = row.path.split(".")
        common = 0
        while common < min(len(above), len(branches)) and above[common] == branches[common]:
            common += 1
        for depth in range(common, len(branches)):
            inside = ".".join(branches[: depth + 1])
            size = sum(each.size_bytes for each in rows if each.path.startswith(f"{inside}."))
            table.append((f"{'  ' * depth}{branches[depth]}", "", "", str(size), ""))
        above = branches
        shape = "x".join(map(str, row.shape)) or "-"
        table.append((f"{'  ' * len(branches)}{name}", shape, row.dtype, str(row.size_bytes), norms[row.path]))
    widths = [max(len(line[column]) for line in table) for column in range(5)]
    for line in table:
        left = "  ".join(text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True))
        right = "  ".join(text.rjust(width) for text, width in zip(line[3:], widths[3:], strict=True))
        yield f"{left}  {right}".rstrip()


def _standing(state: TensorDict) -> Iterator[str]:
    """Where the data of each source stands."""
    if "cursor" in state.keys():  # noqa: SIM118 (iterating a TensorDict iterates its batch)
        for source, cursor in state["cursor"].items():
            if isinstance(cursor, TensorDict):
                yield f"cursor {source}: {', '.join(f'{name} {int(leaf)}' for name, leaf in leaves(cursor).items())}"


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
