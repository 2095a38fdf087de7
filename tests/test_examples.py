"""Each example runs in a fresh process, needs no argument, and proves what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.testing import LAWS

ROOT = Path(__file__).parent.parent
PROOFS = {
    "01_step_by_hand": "the first state is as it was, and its step gives the same bits again: True",
    "02_train_lm": "stopped, saved, loaded and gone on equals never stopped, bit for bit: True",
    "03_your_own_loss": "the module itself was never touched: True",
    "04_kill_and_resume": "killed twice and resumed equals never killed, 48 leaves bit for bit: True",
    "05_your_own_optimizer": "loaded halfway and gone on equals never stopped, bit for bit: True",
    "06_save_while_training": "plain Zarr reads it, and damage is never a value: True",
    "07_on_two_processes": "two processes train what one does: True",
}


def test_every_example_is_tried() -> None:
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.py")) == sorted(PROOFS)


@pytest.mark.parametrize("name", PROOFS)
def test_an_example_proves_what_it_says(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert PROOFS[name] in done.stdout
    if name == "05_your_own_optimizer":
        assert f"held: {', '.join(LAWS)}\n" in done.stdout
    if name == "03_your_own_loss":  # it learns, too
        line = next(text for text in done.stdout.splitlines() if text.startswith("held-out"))
        assert float(line.split()[1].rstrip(";")) < 0.005
