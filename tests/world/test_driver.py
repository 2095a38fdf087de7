"""The driver as a user meets it: what a run leaves behind, what the verbs say, and what every mistake gets."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lib.run.folder import held
from lib.run.plot import NO_MATPLOTLIB
from lib.step import train_step
from lib.store import save
from lib.store.checkpoint import commit
from tests.world.running import ROOT, TINY, Ended, bits, files, hasten, rows, run_apart, run_here, start, text_folder

PLAIN = ("scale.dynamic=none", "scale.initial=none")  # no refused updates
DIVERGING = (f"scale.initial={2.0**126}", f"scale.lowest={2.0**126}", "guard.patience=3")  # nothing but refused updates


class Place:
    """A folder with text, where runs may be started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = text_folder(folder / "text")
        self.words = (*TINY, *PLAIN, "steps=4", "checkpoint.every=2", "eval.every=2", f"data.cache={folder / 'cache'}")

    def train(self, *words: str, name: str = "run") -> Ended:
        return run_here(*self.words, f"data.path={self.text}", f"run.dir={self.folder / name}", *words)

    def verb(self, verb: str, *words: str, name: str = "run") -> Ended:
        return run_here(verb, f"run.dir={self.folder / name}", *words)

    @property
    def run(self) -> Path:
        return self.folder / "run"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    hasten(monkeypatch)
    return Place(tmp_path)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A complete run, for tests that only look at it."""
    finished = Place(tmp_path_factory.mktemp("done"))
    finished.ended = finished.train()  # type: ignore[attr-defined]
    return finished


def kept(run: Path) -> dict[str, Any]:
    """What must not change in a run folder; who holds it may."""
    return {name: content for name, content in files(run).items() if not name.endswith("/.lock")}


def failed(ended: Ended, code: int) -> str:
    """The one line of a mistake."""
    assert ended.code == code, ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err.removeprefix("error: ").rstrip("\n")


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


def test_no_state_but_the_last_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def step(state: TensorDict, batch: TensorDict) -> Any:
        assert not any(leaf() is not None for leaf in seen[:-1])
        seen.append(weakref.ref(state["params", "embed", "weight"]))
        return train_step(state, batch)

    monkeypatch.setattr("lib.run.train.train_step", step)
    assert place.train().code == 0
    assert len(seen) == 4


# Mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["train", "eval", "sample", "inspect", "plot"])
def test_a_misspelt_key_ends_every_verb_before_torch_is_there(verb: str, tmp_path: Path) -> None:
    code = (
        f"import sys; from lib.run.cli import main; code = main([{verb!r}, 'optm.lr=1']); "
        f"sys.exit(code if 'torch' not in sys.modules else 99)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_missing_empty_or_short_text_is_an_error_of_the_data(place: Place, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    (tmp_path / "short.txt").write_text("a few words")
    cases = {
        "absent": f"{tmp_path / 'absent'}: no such file or folder; name files or folders that are there",
        "empty": f"{tmp_path / 'empty'}: all files are empty (1); name files that hold text",
        "short.txt": "training text: have 9 ids, need batch.length+1=17; give more text or lower batch.length",
    }
    for name, line in cases.items():
        assert failed(place.train(f"data.path={tmp_path / name}"), 3) == line
        assert not place.run.exists()


def test_a_folder_of_another_recipe_is_refused_with_every_difference(place: Place) -> None:
    place.train("stop=2")
    before = kept(place.run)
    words = ("model.width=32", "batch.rows=8", "optim.clip=none", "data.holdout=0.1", "run.seed=7", "model.tied=false")
    assert failed(place.train(*words), 2) == (
        f"run.dir={place.run}: this run has another recipe; model.width: run has 16, asked for 32; "
        f"model.tied: run has true, asked for false; batch.rows: run has 4, asked for 8; "
        f"optim.clip: run has 1, asked for none; data.holdout: run has 0.2, asked for 0.1; "
        f"run.seed: run has 0, asked for 7; these must stay as they are, set another run.dir for a new run"
    )
    assert kept(place.run) == before


def test_other_text_is_refused_file_by_file(place: Place) -> None:
    place.train("stop=2")
    (place.text / "0.txt").unlink()
    (place.text / "00.txt").write_text("new")
    old = (place.text / "1.txt").read_text()
    (place.text / "1.txt").write_text(f"T{old[1:]}")
    (place.text / "2.txt").write_text("longer" * 100)
    size = {
        entry[0]: entry[1] for entry in json.loads((place.run / "data.json").read_text())["sources"]["text"]["entries"]
    }
    before = kept(place.run)
    for ended in (place.train(), place.verb("eval")):
        assert failed(ended, 3) == (
            f"run.dir={place.run}: data.path holds other text than this run was trained on; "
            f"0.txt: missing, 00.txt: new, 1.txt: content changed, 2.txt: {size['2.txt']} bytes, now 600; "
            f"restore the files, or set another run.dir for a new run"
        )
    assert kept(place.run) == before


def test_text_that_was_only_moved_or_touched_is_the_same(place: Place) -> None:
    place.train("stop=2")
    os.utime(place.text / "0.txt", (1, 1))
    place.text = place.text.rename(place.folder / "moved")
    assert place.train().code == 0
    assert f'path = "{place.text}"\n' in (place.run / "config.toml").read_text()


def test_a_folder_that_is_being_trained_in_is_left_alone(place: Place) -> None:
    place.train("stop=2")
    with held(place.run, place.run / "checkpoints", lambda: True):
        before = kept(place.run)
        line = failed(place.train(), 2)
        assert kept(place.run) == before
    assert line == (
        f"run.dir={place.run}: process {os.getpid()} is training here, must be one at a time; "
        f"wait for it or set another run.dir"
    )


def newest(place: Place) -> Path:
    return max((place.run / "checkpoints").glob("step_*"))


def damage(checkpoint: Path) -> Path:
    path = next(path for path in sorted((checkpoint / "params").rglob("c*")) if path.is_file())
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    return path


def test_a_damaged_checkpoint_stops_the_run_and_nothing_is_changed(place: Place) -> None:
    place.train("stop=2")
    path = damage(newest(place))
    before = kept(place.run)
    for verb in ("train", "eval", "sample", "inspect"):
        line = failed(place.train() if verb == "train" else place.verb(verb), 5)
        assert str(path) in line
        assert line.endswith(
            f"the nearest good one is {place.run / 'checkpoints' / 'step_0000000000'}, load=older takes it"
        )
    assert kept(place.run) == before


def test_load_older_sets_the_damaged_one_aside_and_ends_with_the_same_bits(place: Place) -> None:
    place.train(name="whole")
    place.train("stop=2")
    damage(newest(place))
    ended = place.train("load=older")
    assert ended.code == 0
    aside = place.run / "checkpoints" / "damaged_step_0000000002"
    assert f"; set aside as {aside}\n" in ended.out
    assert aside.is_dir()
    assert f"{place.run}: going on from step 0 of 4\n" in ended.out
    assert bits(place.run) == bits(place.folder / "whole")
    assert rows(place.run) == rows(place.folder / "whole")


def test_what_a_killed_save_leaves_behind_is_no_checkpoint(place: Place) -> None:
    place.train("stop=2")
    checkpoints = place.run / "checkpoints"
    (checkpoints / "step_0000000003").mkdir()
    (checkpoints / "step_0000000003" / "zarr.json").write_text("{}")
    (checkpoints / f".saving-{'0' * 16}").mkdir()
    ended = place.train()
    assert f"{place.run}: going on from step 2 of 4\n" in ended.out
    assert not (checkpoints / f".saving-{'0' * 16}").exists()


def test_metrics_without_their_checkpoints_are_not_overwritten(place: Place) -> None:
    place.train("stop=2")
    (place.run / "checkpoints").rename(place.folder / "elsewhere")
    before = kept(place.run)
    assert failed(place.train(), 5) == (
        f"run.dir={place.run}: metrics.jsonl goes to step 2 and no checkpoint is there, must have one to go on; "
        f"put the checkpoints back or set another run.dir"
    )
    assert kept(place.run) == before
    line = failed(place.verb("eval"), 5)
    assert line == f"{place.run / 'checkpoints'}: no checkpoint is there, must be one; train the run first"


def test_a_folder_that_cannot_be_made_or_looked_into_is_named(place: Place) -> None:
    (place.folder / "file").write_text("")
    where = place.folder / "file" / "run"
    assert failed(place.train(f"run.dir={where}"), 5) == (
        f"run.dir={where}: Not a directory, must be writable; set another run.dir"
    )
    long = "x" * 300
    assert failed(place.train(f"run.dir={long}"), 5) == (
        f"run.dir={long}: File name too long, must be readable; set another run.dir"
    )


def full_from(monkeypatch: pytest.MonkeyPatch, number: int, until: int = 10**9) -> None:
    """A disk that has no room from the save of this number on, until another."""
    count = [0]

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def on_it(act: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            with pytest.MonkeyPatch.context() as patch:
                if number <= count[0] < until:
                    patch.setattr("lib.store.disk.os.fsync", refuse)
                return act(*arguments, **options)

        return called

    monkeypatch.setattr("lib.run.train.save", on_it(save))
    monkeypatch.setattr("lib.run.saver.commit", on_it(commit))


def test_a_disk_that_is_full_from_the_start_is_found_before_the_first_step(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_from(monkeypatch, 1)
    line = failed(place.train(), 5)
    where = place.run / "checkpoints" / "step_0000000000"
    assert line == (
        f"{where}: not saved (No space left on device), older checkpoints are untouched; "
        f"free 1 MB or set another run.dir"
    )
    assert not place.run.exists()


def test_a_disk_that_fills_up_loses_no_checkpoint(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.train(name="whole")
    with monkeypatch.context() as patch:
        full_from(patch, 2)
        line = failed(place.train(), 5)
    assert "step_0000000002: not saved (No space left on device)" in line
    assert [path.name for path in (place.run / "checkpoints").iterdir()] == ["step_0000000000"]
    assert "error: " in (place.run / "run.log").read_text()
    assert place.train().code == 0
    assert bits(place.run) == bits(place.folder / "whole")
    assert rows(place.run) == rows(place.folder / "whole")


def test_refused_updates_in_a_row_end_the_run_as_diverged(place: Place) -> None:
    ended = place.train("steps=9", "scale.dynamic=true", *DIVERGING)
    checkpoint = place.run / "checkpoints" / "step_0000000002"
    assert failed(ended, 4) == (
        f"step 3: 3 updates in a row were refused, must be below guard.patience=3; "
        f"the last healthy checkpoint is {checkpoint}, lower optim.lr and run again to go on from it"
    )
    assert [row["skipped"] for row in rows(place.run) if "skipped" in row] == [1, 2, 3]
    assert newest(place) == checkpoint
    assert json.loads((place.run / "metrics.jsonl").read_text().splitlines()[-1])["refused"] == 1
    assert failed(place.train("steps=9", "scale.dynamic=true", *DIVERGING), 4)


def test_refused_updates_that_are_followed_by_a_good_one_do_not(place: Place) -> None:
    words = ("steps=9", "scale.dynamic=true", f"scale.initial={2.0**124}", "guard.patience=6")
    assert place.train(*words).code == 0
    trained = [row for row in rows(place.run) if "refused" in row]
    assert [row["refused"] for row in trained[:2]] == [1, 1]
    assert 0 in [row["refused"] for row in trained]


def test_help_into_a_pipe_that_closes_is_no_failure() -> None:
    process = start("--help", stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr.read() == ""
    process.stderr.close()


def test_exit_codes_reach_the_shell(tmp_path: Path) -> None:
    ended = run_apart(f"run.dir={tmp_path / 'run'}", f"data.path={tmp_path / 'absent'}", "steps=100")
    assert failed(ended, 3) == f"{tmp_path / 'absent'}: no such file or folder; name files or folders that are there"
    assert list(tmp_path.iterdir()) == []
