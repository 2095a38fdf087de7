"""A place to train in, for tests that run the driver in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world.running import Place, hasten


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    hasten(monkeypatch)
    return Place(tmp_path)
