"""Compile time of the step against depth: scan at 32 layers over scan at 4, and unrolled for comparison.

    python -m bench compile [unroll=true]

Each compilation runs in a fresh process with all caches off.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bench.harness import record


def run(unroll: str = "true") -> None:
    """Compile at both depths and record the ratios."""
    shallow, deep = seconds("scan", 4), seconds("scan", 32)
    record("compile", "scan 32 / scan 4", ratio=deep / shallow, shallow_s=shallow, deep_s=deep)
    if unroll == "true":
        plain = seconds("unroll", 4), seconds("unroll", 32)
        record("compile", "unroll 32 / unroll 4", ratio=plain[1] / plain[0], shallow_s=plain[0], deep_s=plain[1])


def seconds(layers: str, depth: int) -> float:
    """Time of the first call of a compiled step."""
    words = [sys.executable, "-m", "bench.compile", layers, str(depth)]
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def _measure(layers: str, depth: int) -> None:
    import torch

    from bench.step import batch_of
    from lib.config import Batch, Model, Recipe
    from lib.run.compile import faster
    from lib.state import init_state
    from lib.step import train_step

    model = Model(width=64, depth=depth, heads=4, layers=layers)  # type: ignore[arg-type]
    recipe = Recipe(model=model, batch=Batch(rows=4, length=32))
    torch.compile(lambda x: x * 2 + 1)(torch.ones(8))  # Inductor's own start-up is not the question
    state, batch = init_state(recipe), batch_of(recipe, 0)
    start = time.perf_counter()
    faster(train_step, compile=True)(state, batch)
    print(time.perf_counter() - start)


if __name__ == "__main__":
    _measure(sys.argv[1], int(sys.argv[2]))
