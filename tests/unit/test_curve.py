"""`plot schedule`: the rates that the run would have, before there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lib.config import load_config, recipe_of
from lib.run import curve as curves
from lib.run.cli import main
from lib.run.curve import curve
from lib.state.schedule import factor

SMALL = ["steps=200", "optim.lr=0.5"]


def test_the_points_are_the_rates_of_the_runs_own_schedule() -> None:
    config = load_config(*SMALL, "schedule.shape=wsd")
    updates, rates = curve(config, 50)
    assert (updates[0], updates[-1], len(updates)) == (1, 200, 51)  # and the last one of the warm-up
    assert rates == (0.5 * factor(torch.tensor(updates), recipe_of(config).schedule)).tolist()
    assert max(rates) == 0.5


def test_a_schedule_that_is_longer_than_the_run_is_drawn_to_its_end() -> None:
    assert curve(load_config(*SMALL, "schedule.length=500"), 10)[0][-1] == 500
    assert curve(load_config(*SMALL, "schedule.length=50"), 10)[0][-1] == 200
    assert curve(load_config("steps=1"), 10)[0] == [1]


def test_it_is_drawn_and_listed_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "new"
    assert main(["plot", "schedule", f"run.dir={run}", *SMALL, "schedule.warmup=20", "schedule.floor=0"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "update  learning rate"
    assert [line.split() for line in said[1:-1] if line.split()[0] in ("1", "20", "200")] == [
        ["1", "0.025"],
        ["20", "0.5"],
        ["200", "0"],
    ]
    assert said[-1] == str(run / "schedule.png")
    assert (run / "schedule.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.name for path in run.iterdir()] == ["schedule.png"]


@pytest.mark.parametrize("extra", [["schedule.shape=range", "schedule.floor=1e-6"], ["schedule.counts=tokens"]])
def test_a_rise_over_decades_and_a_count_of_tokens_are_drawn(tmp_path: Path, extra: list[str]) -> None:
    assert main(["plot", "schedule", f"run.dir={tmp_path}", *SMALL, *extra]) == 0
    assert (tmp_path / "schedule.png").stat().st_size > 10_000


def test_bad_settings_keys_and_folders_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(*words: str) -> tuple[int, str]:
        return main(["plot", "schedule", f"run.dir={tmp_path}", *words]), capsys.readouterr().err

    code, said = error("schedule.shape=power", "schedule.warmup=0")
    assert (code, said.count("\n")) == (2, 1)
    assert "schedule.warmup=0 must be at least 1 for schedule.shape=power" in said
    assert error("model.width=64")[1].startswith("error: model.width: has no effect in plot schedule")
    (tmp_path / "file").write_text("")
    assert error(f"run.dir={tmp_path / 'file' / 'x'}")[0] == 5
    monkeypatch.setattr(curves, "drawable", lambda: False)
    assert error() == (
        2,
        'error: schedule.png: matplotlib is absent, must be installed to draw; pip install "purestep[plot]"\n',
    )
