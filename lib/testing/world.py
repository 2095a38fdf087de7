"""The generators of random numbers that belong to no state: whether they move, and what hangs on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["moved", "positions", "seeded"]


def positions() -> dict[str, str]:
    """Where each generator stands."""
    return {
        "torch's global generator": str(torch.get_rng_state().numpy().tobytes()),
        "a global generator of CUDA": str([state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]),
        "numpy's global generator": str(np.random.get_state(legacy=False)),
        "Python's global generator": str(random.getstate()),
    }


def moved(before: dict[str, str]) -> str | None:
    """The first generator that no longer stands where it stood."""
    now = positions()
    return next((name for name in before if before[name] != now[name]), None)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Put all generators at a seed, and back when it is over."""
    kept = np.random.get_state(), random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(kept[0])
            random.setstate(kept[1])
