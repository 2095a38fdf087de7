"""What every mistake gets from the driver: one line, its exit code, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib.run.folder import held
from lib.store import save
from lib.store.checkpoint import commit
from tests.world.running import (
    ROOT,
    Place,
    bits,
    failed,
    kept,
    rows,
    run_apart,
    start,
)

DIVERGING = (f"scale.initial={2.0**126}", f"scale.lowest={2.0**126}", "guard.patience=3")  # nothing but refused updates


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
