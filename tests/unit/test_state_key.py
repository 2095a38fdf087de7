"""The key: a seed in, the same for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lib.state import key
from tests.strategies import memory, refusal


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_a_seed_is_the_key(seed: int) -> None:
    assert key.init(seed).item() == seed
    assert key.init(seed).dtype == torch.int64


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "1", None, np.int64(3)])
def test_what_is_no_seed_is_refused(seed: Any) -> None:
    assert refusal(key.init, seed) == f"seed={seed!r} must be a whole number in [0, 2**63); give one"


def test_the_key_stays() -> None:
    slot = key.init(5)
    assert key.update(slot).item() == 5
    assert memory({"k": key.update(slot)}) != memory({"k": slot})
