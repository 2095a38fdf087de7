"""loss.png: drawn from metrics.jsonl alone, whatever it holds."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from lib.errors import CheckpointError
from lib.run import plot as plots
from lib.run.cli import main
from lib.run.lines import append, open_lines
from lib.run.plot import NO_MATPLOTLIB, plot


def metrics(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    with open_lines(folder / "metrics.jsonl", {}) as file:
        for row in rows:
            append(file, row)
    return folder


def train_row(step: int, **changes: object) -> dict[str, object]:
    values = {"loss_nats": 2.0 / step, "bpb": 3.0 / step, "lr": 1e-3, "grad_norm": 0.5, "skipped": 0}
    return {"step": step, **values, **changes}


def size_of(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


CASES: dict[str, list[dict[str, object]]] = {
    "only the evaluation at step 0": [{"step": 0, "eval/bpb": 8.7, "eval/loss_nats": 6.0, "eval/tokens": 9}],
    "one row": [train_row(1)],
    "nothing finite": [train_row(1, loss_nats=None, bpb=None, grad_norm=None), train_row(2, loss_nats=None, bpb=None)],
    "refused updates": [train_row(n, skipped=n // 3) for n in range(1, 100)],
    "no gradient": [train_row(1, grad_norm=0.0), train_row(2, grad_norm=0.0)],
    "all of it": [
        {"step": 0, "eval/bpb": 8.7},
        *(train_row(n, grad_norm=10.0**-n) for n in range(1, 9)),
        {"step": 8, "eval/bpb": None},
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_drawn_whatever_the_metrics_hold(case: str, tmp_path: Path) -> None:
    path = plot(metrics(tmp_path / "run", *CASES[case]))
    assert path == tmp_path / "run" / "loss.png"
    assert size_of(path) == (1350, 1200)
    assert sorted(p.name for p in path.parent.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_the_smoothed_line_has_no_lag_and_keeps_the_ends() -> None:
    line = [float(n) for n in range(200)]
    assert plots._smooth(line) == line
    assert plots._smooth([1.0, 5.0]) == [1.0, 5.0]


def test_a_refusal_between_two_rows_is_marked_at_the_later_one() -> None:
    rows = [train_row(10), train_row(20, skipped=2), train_row(30, skipped=2), train_row(40, skipped=None)]
    assert plots._refused(rows) == [20]


def test_an_empty_metrics_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 rows") as caught:
        plot(metrics(tmp_path / "run"))
    path = tmp_path / "run" / "metrics.jsonl"
    assert str(caught.value) == f"{path}: 0 rows, must have some to draw; train first"


def test_without_matplotlib_the_verb_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = metrics(tmp_path / "run", train_row(1))
    (folder / "config.toml").write_text("")
    monkeypatch.setattr(plots, "drawable", lambda: False)
    assert main(["plot", f"run.dir={folder}"]) == 2
    assert capsys.readouterr().err == "error: " + NO_MATPLOTLIB.format("loss.png") + "\n"
    assert not (folder / "loss.png").exists()


def test_the_verb_draws_again_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = metrics(tmp_path / "run", train_row(1))
    (folder / "config.toml").write_text("")
    assert main(["plot", f"run.dir={folder}"]) == 0
    assert capsys.readouterr().out == f"{folder / 'loss.png'}\n"


def test_a_picture_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    folder = metrics(tmp_path / "run", train_row(1))
    (folder / ".loss.png.new").mkdir()
    with pytest.raises(CheckpointError) as caught:
        plot(folder)
    assert str(caught.value) == f"{folder / 'loss.png'}: Is a directory, must be writable; free the disk and run again"
