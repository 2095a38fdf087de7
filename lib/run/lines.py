"""metrics.jsonl: a header, then one line a logged step and one an evaluation; each step once, also after a resume.

A line is written whole and at once, so a killed process leaves at most one torn line, the last one. Numbers that are
not finite are null: NaN is no JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from lib.errors import CheckpointError
from lib.run.folder import write_file

__all__ = ["WALL_CLOCK", "append", "cut", "evaluated", "open_lines", "read_lines", "sync"]

FORMAT = 1
WALL_CLOCK = ("tokens_per_s", "elapsed_s")

Row = dict[str, Any]


def read_lines(path: Path) -> list[Row]:
    """The rows of a metrics file, in order; without the header, a torn last line and lines that do not parse."""
    return [row for row in map(_parsed, _texts(path)) if row is not None and "step" in row]


def evaluated(path: Path, step: int) -> Row | None:
    """The held-out line of `step`, if there is one."""
    return next((row for row in read_lines(path) if row["step"] == step and "eval/bpb" in row), None)


def cut(path: Path, step: int) -> int:
    """Drop what lies beyond `step`, and torn lines, in one rename; nothing is written when there is nothing to drop.

    Returns:
        How many rows were dropped.
    """
    texts = _texts(path)
    rows = [_parsed(text) for text in texts]
    kept = [t for t, row in zip(texts, rows, strict=True) if row is not None and row.get("step", 0) <= step]
    if len(kept) == len(texts) and (not texts or texts[-1].endswith("\n")):
        return 0
    write_file(path, "".join(kept).encode())
    return len(texts) - len(kept)


def open_lines(path: Path, units: Mapping[str, str]) -> FileIO:
    """Open for appending, with the header in place; without a buffer, which could fail once more when it is closed."""
    try:
        file = FileIO(path, "a")
    except OSError as error:
        raise _unwritable(str(path), error) from None
    if os.fstat(file.fileno()).st_size == 0:
        append(file, {"header": {"format": FORMAT, "wall_clock": list(WALL_CLOCK), "units": dict(units)}})
    return file


def append(file: FileIO, row: Row) -> None:
    """Write one line."""
    rest = memoryview((json.dumps(row, allow_nan=False) + "\n").encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise _unwritable(str(file.name), error) from None


def sync(file: FileIO) -> None:
    """Wait until the lines are on the disk; before a checkpoint, so that none ever lacks its rows."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(str(file.name), error) from None


def _texts(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            return list(file)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}, must be readable; restore it or set another run.dir"
        ) from None


def _parsed(text: str) -> Row | None:
    """None for what is no whole line of ours; a torn number may still parse, so the line's end counts too."""
    try:
        row = json.loads(text) if text.endswith("\n") else None
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _unwritable(path: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: {error.strerror}, must be writable; free the disk and run again to go on")
