"""Batches for the tests of the feed: functions that a worker process can import in a moment."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import DataError

__all__ = ["called", "cut", "made", "slow", "stuck", "told", "unsendable"]


def made(n: int) -> dict[str, Any]:
    """Batch n: every kind of value, of sizes that differ, one of them empty and one not laid out in a row."""
    draw = np.random.default_rng(n)
    return {
        "ids": draw.integers(0, 260, (2, 3, 4 + n % 3)),
        "mask": draw.integers(0, 2, (2, 3)).astype(np.bool_),
        "turned": np.arange(6, dtype=np.int32).reshape(2, 3).T,
        "nothing": np.empty((0, 3), dtype=np.float32),
        "one": np.array(n, dtype=np.int64),
        "cursor": {"text": {"epoch": n // 10, "row": n % 10}, "more": {"epoch": 1 << 40, "row": 0}},
    }


def slow(n: int, *, seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return made(n)


def called(n: int, *, folder: str) -> dict[str, Any]:
    """Leave a file for each call."""
    (Path(folder) / str(n)).touch()
    return made(n)


def cut(n: int, *, at: int, kind: str) -> dict[str, Any]:
    """Fail at one batch."""
    if n == at:
        raise {"data": DataError, "value": ValueError, "key": KeyError, "exit": SystemExit}[kind](f"row {n} is bad")
    return made(n)


def stuck(n: int, *, at: int) -> dict[str, Any]:
    """Never return, in C code."""
    if n == at:
        time.sleep(1000)
    return made(n)


def told(n: int) -> dict[str, Any]:
    """Say who makes it, and of what it is made."""
    heavy = [name for name in ("torch", "tensordict", "zarr") if name in sys.modules]
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    return {"pid": np.array(os.getpid()), "n": np.array(n), "heavy": heavy, "threads": threads}


def unsendable(n: int) -> dict[str, Any]:
    return {"n": np.array(n), "odd": partial(print)}
