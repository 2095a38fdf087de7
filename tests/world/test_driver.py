"""The driver as a user meets it: what a run leaves behind, and what the verbs say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
from tensordict import TensorDict

from lib.run.plot import NO_MATPLOTLIB
from lib.step import train_step
from tests.world.running import (
    Place,
    failed,
    files,
    rows,
    start,
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A complete run, for tests that only look at it."""
    finished = Place(tmp_path_factory.mktemp("done"))
    finished.ended = finished.train()  # type: ignore[attr-defined]
    return finished


# What a run leaves behind --------------------------------------------------------------------------------------------


def test_a_run_says_what_it_does_and_ends_with_a_picture_and_a_sample(done: Place) -> None:
    assert done.ended.code == 0  # type: ignore[attr-defined]
    assert done.ended.err == ""  # type: ignore[attr-defined]
    bpb = rows(done.run)[-1]["eval/bpb"]
    patterns = [
        f"{done.run}: a new run",
        f"reading text: {done.text}",
        r"reading text: 4 files, \d+ bytes",
        r"text: 4 documents \(\d train, \d held out by tail\), \d+ bytes, \d+ ids",
        "8,304 parameters; 4 updates of 4 rows of 16; fp32, compile off, 1 threads",
        "evaluating on held-out text before step 1",
        r"step 0: held-out 8\.\d{4} bits per byte \(\d\.\d{4} nats, \d+ targets\)",
        *(rf"step {n}/4  bpb .*  loss .* nats  lr .*  grad .*  .* tokens/s.*" for n in (1, 2)),
        "step 2: held-out .*",
        *(rf"step {n}/4  .*" for n in (3, 4)),
        "step 4: held-out .*",
        "sample:",
        r"def .*",
        rf"done: held-out {bpb:.4f} bits per byte at step 4, 0:\d\d for this launch; all of it is in {done.run}",
    ]
    assert re.fullmatch("\n".join(patterns) + "\n", done.ended.out, re.DOTALL), done.ended.out  # type: ignore[attr-defined]


def test_a_run_folder_holds_what_it_is_said_to_hold(done: Place) -> None:
    names = sorted(path.name for path in done.run.iterdir())
    assert names == [".lock", "checkpoints", "config.toml", "data.json", "loss.png", "metrics.jsonl", "run.log"]
    steps = [f"step_{step:010d}" for step in (0, 2, 4)]
    assert sorted(path.name for path in (done.run / "checkpoints").iterdir()) == steps
    assert "done: held-out" in (done.run / "run.log").read_text()
    known = json.loads((done.run / "data.json").read_text())
    assert [entry[0] for entry in known["sources"]["text"]["entries"]] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert known["sources"]["text"]["path"] == str(done.text)


def test_metric_lines_have_the_documented_names(done: Place) -> None:
    header, first, *_ = map(json.loads, (done.run / "metrics.jsonl").read_text().splitlines())
    assert header["header"]["wall_clock"] == ["tokens_per_s", "elapsed_s"]
    assert list(first) == ["step", "eval/loss_nats", "eval/bpb", "eval/tokens"]
    trained = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines() if "bpb" in line]
    names = "step loss_nats bpb lr grad_norm tokens bytes scale skipped refused tokens_per_s elapsed_s"
    assert list(next(row for row in trained if "loss_nats" in row)) == names.split()
    assert set(header["header"]["units"]) >= {*names.split(), *first}


def test_the_saved_config_holds_what_was_left_open(done: Place) -> None:
    text = (done.run / "config.toml").read_text()
    for line in ("steps = 4", 'compile = "off"', "threads = 1", "length = 4", f'path = "{done.text}"'):
        assert f"{line}\n" in text
    assert "\nstop =" not in text


# Verbs ---------------------------------------------------------------------------------------------------------------


def test_eval_gives_the_number_of_the_run(done: Place) -> None:
    before = files(done.run)
    ended = done.verb("eval")
    assert ended.code == 0
    row = rows(done.run)[-1]
    assert ended.out.splitlines()[-1] == (
        f"step 4: held-out {row['eval/bpb']:.4f} bits per byte "
        f"({row['eval/loss_nats']:.4f} nats, {row['eval/tokens']} targets)"
    )
    assert files(done.run) == before


def test_sample_is_a_function_of_its_settings(done: Place) -> None:
    words = ("sample.prompt=the ", "sample.length=20")
    first, again = (done.verb("sample", *words) for _ in range(2))
    assert first.code == 0
    assert first.out.startswith("the ")
    assert first == again
    assert done.verb("sample", *words, "sample.seed=1") != first
    assert done.verb("sample", "sample.prompt=the ", "sample.length=0").out == "the \n"


def test_sample_begins_a_document_when_there_is_no_prompt(done: Place) -> None:
    assert done.verb("sample", "sample.prompt=", "sample.length=5").code == 0


def test_inspect_lists_the_leaves_and_where_the_run_stands(done: Place) -> None:
    ended = done.verb("inspect")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0].split() == ["leaf", "shape", "dtype", "bytes", "norm"]
    branch = lines.index(next(line for line in lines if line.startswith("params ")))
    leaf = next(line.split() for line in lines[branch:] if line.strip().startswith("weight"))
    assert leaf[1:4] == ["260x16", "float32", str(260 * 16 * 4)]
    assert float(leaf[4]) > 0
    assert any(re.fullmatch(r"verified: step 4, \d+ leaves, 1\d\d\.\d kB", line) for line in lines)
    assert "cursor text: epoch 0, row 16" in lines
    assert any(line.startswith("recipe model: width 16, depth 1, heads 2, kv_heads none") for line in lines)
    assert any(line.startswith("written by: threads 1, compiled False, torch 2.") for line in lines)


def test_plot_draws_the_picture_again(done: Place) -> None:
    before = (done.run / "loss.png").read_bytes()
    (done.run / "loss.png").unlink()
    assert done.verb("plot") == (0, f"{done.run / 'loss.png'}\n", "")
    assert (done.run / "loss.png").read_bytes() == before


def test_without_matplotlib_training_goes_on_and_the_extra_is_named(place: Place) -> None:
    ended = place.train()
    assert ended.code == 0
    assert NO_MATPLOTLIB.format("loss.png") + "\n" in ended.out
    assert not (place.run / "loss.png").exists()


def test_without_held_out_text_nothing_is_evaluated(place: Place) -> None:
    ended = place.train("data.holdout=0")
    assert ended.code == 0
    assert "held-out" not in ended.out
    assert not [row for row in rows(place.run) if "eval/bpb" in row]
    assert "complete at step 4; to go on" in place.train("data.holdout=0").out
    line = failed(place.verb("eval"), 3)
    assert line == f"run.dir={place.run}: data.holdout=0 must be above 0 to evaluate; train a run with some"


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(place: Place) -> None:
    ours, theirs = os.openpty()
    process = start(*place.words, f"data.path={place.text}", f"run.dir={place.run}", stdout=theirs, terminal="xterm")
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 4096):
            seen += piece
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "4/4" in text
    assert "step 4: held-out" in text
    assert b"\x1b[?25h" in seen  # the cursor is back


def test_a_reader_that_leaves_does_not_end_the_run(place: Place) -> None:
    process = start(*place.words, f"data.path={place.text}", f"run.dir={place.run}", stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert rows(place.run)[-1]["step"] == 4


@pytest.mark.parametrize("watched", [False, True])
def test_no_state_but_the_last_is_kept(watched: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def step(state: TensorDict, batch: TensorDict) -> Any:
        assert not any(leaf() is not None for leaf in seen[:-1])
        seen.append(weakref.ref(state["params", "embed", "weight"]))
        return train_step(state, batch)

    monkeypatch.setattr("lib.run.train.train_step", step)
    # Where Dynamo watches frames, Python keeps the arguments of a call until it returns.
    launch = torch._dynamo.run(place.train) if watched else place.train  # type: ignore[no-untyped-call]
    assert launch().code == 0
    assert len(seen) == 4
