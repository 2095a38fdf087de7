"""What a run says: plain flushed lines, a bar on a terminal, and all of it in run.log."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from lib.run.progress import duration, heldout_text, progress, row_text

ROW = {
    "step": 20,
    "loss_nats": 1.25,
    "bpb": 1.8034,
    "lr": 0.002,
    "grad_norm": 0.5,
    "tokens": 8192,
    "scale": 1.0,
    "skipped": 0,
    "tokens_per_s": 48123.4,
}
HELD = {"step": 20, "eval/loss_nats": 1.5, "eval/bpb": 2.16404, "eval/tokens": 100}


def test_a_row_is_one_line() -> None:
    assert row_text(ROW, 700, 92.4) == (
        "step  20/700  bpb 1.803  loss 1.250 nats  lr 2.00e-03  grad 0.50  48.1k tokens/s  1:32 left"
    )


def test_what_is_not_finite_is_a_dash_and_refusals_are_counted() -> None:
    row = {**ROW, "loss_nats": None, "bpb": None, "grad_norm": None, "skipped": 3, "tokens_per_s": None}
    assert row_text(row, 700, None) == (
        "step  20/700  bpb -  loss - nats  lr 2.00e-03  grad -  - tokens/s  refused so far 3"
    )


def test_a_held_out_row_is_one_line() -> None:
    assert heldout_text(HELD) == "step 20: held-out 2.1640 bits per byte (1.5000 nats, 100 targets)"
    assert heldout_text({**HELD, "eval/bpb": None}) == "step 20: held-out - bits per byte (1.5000 nats, 100 targets)"


def test_a_duration_reads_like_a_clock() -> None:
    assert [duration(s) for s in (0, 59.6, 3599.4, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]


def test_a_pipe_gets_one_flushed_line_for_each_thing_said() -> None:
    out = io.StringIO()
    with progress(out) as voice:
        voice.say("reading text")
        voice.begin(0, 700)
        voice.tick(1)
        voice.row({**ROW, "step": 10})
        voice.row(ROW)
        voice.heldout(HELD)
    lines = out.getvalue().splitlines()
    assert [line[:12] for line in lines] == ["reading text", "step  10/700", "step  20/700", "step 20: hel"]
    assert "left" not in lines[1]  # the first row holds the compilation
    assert "left" in lines[2]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_gets_a_bar_and_what_is_said_scrolls_above_it(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", str(columns))
    with progress(out, live=True) as voice:
        voice.say("reading [red]text[/red]")
        voice.begin(10, 700)
        voice.tick(20)
        voice.row(ROW)
        voice.heldout(HELD)
        voice.end()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "reading [red]text[/red]" in text
    assert "20/700" in text
    assert "bpb 1.803" in text
    assert "48.1k tokens/s" in text
    assert ("lr 2.0e-03" in text) == (columns == 120)
    assert heldout_text(HELD) in text
    assert out.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in out.getvalue()  # the cursor is back


@pytest.mark.parametrize(("term", "draws"), [("xterm", True), ("dumb", False), (None, False)])
def test_a_terminal_that_cannot_draw_gets_lines(term: str | None, draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM", raising=False)
    with progress(out) as voice:
        voice.begin(0, 700)
        voice.row(ROW)
    assert ("\x1b[?25h" in out.getvalue()) == draws
    assert (row_text(ROW, 700, None) in out.getvalue()) == (not draws)


def test_all_that_was_said_is_in_the_log_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with progress(io.StringIO(), live=False) as voice:
        voice.say("before there was a folder")
        voice.log_to(path)
        voice.say("two\nlines")
        voice.note("only here")
        assert "only here" in path.read_text()  # at once, not at the end
    lines = path.read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "before there was a folder",
        "two",
        "lines",
        "only here",
    ]
    assert all(re.match(r"\d{4}-", line) for line in lines)


def test_a_log_goes_on_after_a_resume(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with progress(io.StringIO(), live=False) as voice:
            voice.log_to(tmp_path / "run.log")
            voice.say(text)
    assert [line.split()[1] for line in (tmp_path / "run.log").read_text().splitlines()] == ["one", "two"]


@pytest.mark.parametrize("live", [False, True])
def test_a_reader_that_went_away_does_not_end_the_run(live: bool, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    out = os.fdopen(write, "w", buffering=1)
    with progress(out, live=live) as voice:
        voice.log_to(tmp_path / "run.log")
        voice.say("one")
        voice.say("two")
        voice.begin(0, 3)
        voice.row(ROW)
    out.close()
    assert len((tmp_path / "run.log").read_text().splitlines()) == 3
