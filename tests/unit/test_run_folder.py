"""A run folder: one holder at a time, nothing left of a failed start, each step once in metrics.jsonl."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

import pytest

from lib.config import Schedule, load_config
from lib.errors import CheckpointError
from lib.run.folder import held, settled, write_file
from lib.run.lines import append, cut, evaluated, open_lines, read_lines, sync


def commit(folder: Path) -> None:
    (folder / "checkpoints" / "step_0000000000").mkdir(parents=True)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def hold_(folder: Path, elsewhere: Path | None = None) -> AbstractContextManager[None]:
    checkpoints = elsewhere or folder / "checkpoints"
    return held(folder, checkpoints, lambda: any(checkpoints.glob("step_*")))


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    hold = (
        "from pathlib import Path; from lib.run.folder import held\n"
        f"with held(Path({str(folder)!r}), Path({str(folder / 'checkpoints')!r}), lambda: True): pass"
    )
    with hold_(folder):
        commit(folder)
        other = subprocess.run([sys.executable, "-c", hold], capture_output=True, text=True, check=False)
        assert other.stderr.splitlines()[-1] == (
            f"ValueError: run.dir={folder}: process {os.getpid()} is training here, must be one at a time; "
            f"wait for it or set another run.dir"
        )
    assert subprocess.run([sys.executable, "-c", hold], capture_output=True, check=False).returncode == 0


def test_a_folder_of_checkpoints_elsewhere_is_held_too(tmp_path: Path) -> None:
    with hold_(tmp_path / "one", tmp_path / "both"):
        (tmp_path / "both" / "step_0000000000").mkdir()
        with pytest.raises(ValueError) as caught, hold_(tmp_path / "two", tmp_path / "both"):
            pass
        assert str(caught.value) == (
            f"checkpoint.dir={tmp_path / 'both'}: process {os.getpid()} is training here, must be one at a time; "
            f"wait for it or set another checkpoint.dir"
        )
    assert (tmp_path / "one").is_dir()
    with pytest.raises(RuntimeError, match="no"), hold_(tmp_path / "three", tmp_path / "new" / "place"):
        raise RuntimeError("no")
    assert not (tmp_path / "three").exists()
    assert not (tmp_path / "new").exists()


def test_where_it_cannot_be_seen_whether_a_run_has_begun_nothing_is_removed(tmp_path: Path) -> None:
    def unseen() -> bool:
        raise CheckpointError("s3://bucket: cannot be read")

    with held(tmp_path / "run", "s3://bucket", unseen):
        (tmp_path / "run" / "config.toml").write_text("x")
    assert (tmp_path / "run" / "config.toml").exists()


def fail_in(folder: Path, *made: str) -> None:
    """Hold a folder, make files in it, and fail."""
    with hold_(folder):
        for name in made:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("x")
        raise RuntimeError("no")


def test_a_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"):
        fail_in(tmp_path / "a" / "b", "config.toml", ".config.toml.new", "metrics.jsonl", "checkpoints/.saving-1/x")
    assert tree(tmp_path) == {}


def test_a_failed_start_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("mine")
    (tmp_path / "run" / "notes.txt").write_text("mine too")
    before = tree(tmp_path)
    with pytest.raises(RuntimeError, match="no"):
        fail_in(tmp_path / "run", "metrics.jsonl", "run.log")
    assert tree(tmp_path) == before


def test_a_started_run_stays_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no"):
        fail_in(tmp_path / "run", "checkpoints/step_0000000000/COMMIT")
    assert (tmp_path / "run" / "checkpoints" / "step_0000000000").is_dir()


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught, hold_(tmp_path / "file" / "run"):
        pass
    where = tmp_path / "file" / "run"
    assert str(caught.value) == f"run.dir={where}: Not a directory, must be writable; set another run.dir"


def test_a_small_file_is_written_in_one_rename_and_only_when_it_differs(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert write_file(path, b"a\n")
    before = path.stat().st_mtime_ns
    assert not write_file(path, b"a\n")
    assert path.stat().st_mtime_ns == before
    assert write_file(path, b"b\n")
    assert tree(tmp_path) == {"config.toml": b"b\n"}


def test_the_settled_config_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("tokens=819200", "batch.rows=32", "batch.length=256", "data.path=[text, stdlib:]", "stop=3")
    fixed = settled(config, Schedule(length=100, warmup=50), threads=2, compiled=False)
    assert (fixed.steps, fixed.tokens, fixed.schedule.length) == (100, None, 100)
    assert (fixed.run.threads, fixed.compile) == (2, "off")
    assert fixed.data.path == (str(tmp_path / "text"), "stdlib:")


def lines_of(path: Path, *rows: dict[str, object]) -> None:
    with open_lines(path, {"loss_nats": "nats"}) as file:
        for row in rows:
            append(file, row)
        sync(file)


def test_metrics_begin_with_a_header_that_names_the_clock_s_fields(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines_of(path, {"step": 1, "loss_nats": None})
    lines_of(path, {"step": 2, "loss_nats": 1.5})
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert header == {
        "header": {"format": 1, "wall_clock": ["tokens_per_s", "elapsed_s"], "units": {"loss_nats": "nats"}}
    }
    assert rows == [{"step": 1, "loss_nats": None}, {"step": 2, "loss_nats": 1.5}]


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        lines_of(tmp_path / "metrics.jsonl", {"step": 1, "loss_nats": math.nan})


def test_after_a_resume_each_step_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines_of(path, {"step": 0, "eval/bpb": 8.0}, *({"step": n} for n in range(1, 10)))
    with path.open("a") as file:
        file.write('{"step": 1')  # torn: were it whole it would be step 10
    assert cut(path, 6) == 4
    lines_of(path, *({"step": n} for n in range(7, 13)))
    assert [row["step"] for row in read_lines(path)] == list(range(13))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_last_line_without_its_end_is_torn_though_it_parses(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines_of(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2}')
    assert [row["step"] for row in read_lines(path)] == [1]
    assert cut(path, 9) == 1
    assert path.read_text().endswith("}\n")


def test_nothing_to_cut_touches_no_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert cut(path, 3) == 0
    assert not path.exists()
    lines_of(path, {"step": 1}, {"step": 2})
    before = (path.stat().st_mtime_ns, path.stat().st_ino)
    assert cut(path, 2) == 0
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_a_file_torn_within_its_header_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"header": {"form')
    cut(path, 0)
    lines_of(path, {"step": 1})
    assert list(json.loads(path.read_text().splitlines()[0])) == ["header"]


def test_the_held_out_line_of_a_step_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines_of(path, {"step": 4, "bpb": 3.0}, {"step": 4, "eval/bpb": 2.0})
    assert evaluated(path, 4) == {"step": 4, "eval/bpb": 2.0}
    assert evaluated(path, 3) is None


def test_a_full_disk_is_told_of_with_the_file(tmp_path: Path) -> None:
    with FileIO("/dev/full", "w") as file, pytest.raises(CheckpointError) as caught:
        append(file, {"step": 1})
    assert str(caught.value) == (
        "/dev/full: No space left on device, must be writable; free the disk and run again to go on"
    )
