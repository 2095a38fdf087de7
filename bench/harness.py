"""Timing two things against each other, and keeping what came out.

Machines are noisy and differ, so no time is ever compared with another day's: both contenders run turn by turn in one
process, and what counts is the ratio of their times within a turn.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Ratio", "interleave", "last_lines", "record"]

HISTORY = Path(__file__).parent / "history.jsonl"


class Ratio(NamedTuple):
    """Ours over the baseline, per turn: below 1 is faster. Times are medians in seconds."""

    least: float
    median: float
    most: float
    ours_s: float
    baseline_s: float


def interleave(ours: Callable[[], Any], baseline: Callable[[], Any], *, turns: int, warm: int = 3) -> Ratio:
    """Time both, turn by turn, swapping who goes first; the first `warm` turns do not count."""
    pairs: list[tuple[float, float]] = []
    for turn in range(turns + warm):
        first, second = (ours, baseline) if turn % 2 == 0 else (baseline, ours)
        times = {first: _seconds(first), second: _seconds(second)}
        if turn >= warm:
            pairs.append((times[ours], times[baseline]))
    ratios = [a / b for a, b in pairs]
    return Ratio(
        min(ratios),
        statistics.median(ratios),
        max(ratios),
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
    )


def record(name: str, case: str, **values: Any) -> None:
    """Append one line to the history and print it."""
    import torch  # not before: processes that only read text need none

    line = {
        "bench": name,
        "case": case,
        **{key: round(value, 5) if isinstance(value, float) else value for key, value in values.items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "machine": f"{_cpu()}, {torch.get_num_threads()} threads",
        "versions": {package: version(package) for package in ("torch", "tensordict", "numpy")},
    }
    with HISTORY.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def last_lines(name: str, count: int) -> list[str]:
    """The last lines of a benchmark, short."""
    if not HISTORY.exists():
        return []
    lines = [json.loads(text) for text in HISTORY.read_text(encoding="utf-8").splitlines()]
    keys = ("date", "commit", "case", "ratio", "faster", "memory_ratio", "save_s", "load_s", "above_mb")
    mine = [line for line in lines if line["bench"] == name][-count:]
    return [f"{name}: " + "  ".join(f"{key}={line[key]}" for key in keys if key in line) for line in mine]


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=HISTORY.parent)
    return done.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
