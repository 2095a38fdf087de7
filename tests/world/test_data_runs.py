"""Runs on every kind of text: any folder, mixtures, packed rows, conversations, worker processes; stopped at any step."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.tiny_tokenizer import tiny_tokenizer
from tests.world.running import TINY, Ended, bits, hasten, rows, run_here, start

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "looked",
    "at",
    "what",
    "there",
    "was",
    "to",
    "see",
    "of",
    "it",
    "all",
]


def said(number: int) -> str:
    return " ".join(WORDS[(number * step + number // 3) % len(WORDS)] for step in range(4 + number % 9))


def lines(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"id": f"d{n}", "text": said(n)}).encode() + b"\n" for n in range(first, first + count))


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One folder with a file of each kind."""
    path = tmp_path / "text"
    path.mkdir()
    (path / "a.txt").write_text("\n".join(map(said, range(12))))
    (path / "b.jsonl").write_bytes(lines(0, 20))
    (path / "c.jsonl.gz").write_bytes(gzip.compress(lines(20, 20)))
    (path / "d.jsonl.zst").write_bytes(zstandard.compress(lines(40, 20)))
    pq.write_table(pa.table({"text": [said(n) for n in range(60, 80)]}), path / "e.parquet")
    return path


def train(tmp_path: Path, *words: str, run: str = "run") -> Ended:
    return run_here(*TINY, f"data.cache={tmp_path / 'cache'}", f"run.dir={tmp_path / run}", *words)


def failed(ended: Ended, code: int) -> str:
    """The error line of a launch that failed with this code."""
    assert ended.code == code, ended
    assert ended.err.count("\n") == 1
    return ended.err.removeprefix("error: ").rstrip("\n")


def test_a_folder_of_every_kind_of_text_trains_with_no_other_setting(tmp_path: Path, folder: Path) -> None:
    ended = train(tmp_path, f"data.path={folder}")
    assert ended.code == 0, ended
    assert "reading text: 5 files" in ended.out
    assert "text: 81 documents (" in ended.out
    inspected = run_here("inspect", f"run.dir={tmp_path / 'run'}").out
    assert "data text: 81 documents (" in inspected


MIXED = (
    "data.sources.books.path={0}/a.txt", "data.sources.books.split=line", "data.sources.books.weight=0.3",
    "data.sources.web.path=[{0}/b.jsonl, {0}/c.jsonl.gz]", "data.sources.web.weight=0.7", "data.sources.web.id_key=id",
)  # fmt: skip
KINDS = {
    "mixture": MIXED,
    "packed": ("data.path={0}", "batch.mode=pack"),
    "padded": ("data.path={0}", "batch.mode=pad", "batch.buckets=[4, 8, 16]"),
    "packed mixture": (*MIXED, "batch.mode=pack", "batch.micro=2"),
    "growing": (*MIXED, "batch.rows_at=[2:4, 5:8]", "batch.length_at=[0:4, 3:8, 6:16]", "batch.rows=2"),
    "by processes": (*MIXED, "data.workers=2"),
    "filtered": ("data.path={0}", "batch.repeats=3", "batch.shuffle=false"),
    "with marks": ("data.path={0}", "data.add_bos=true", "data.holdout_by=tail"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_any_text_is_stopped_and_goes_on_with_the_same_bits(kind: str, tmp_path: Path, folder: Path) -> None:
    words = (*(word.format(folder) for word in KINDS[kind]), "steps=8", "checkpoint.every=3", "log.every=1")
    assert train(tmp_path, *words).code == 0
    for stop in (1, 4, 7):
        assert train(tmp_path, *words, f"stop={stop}", run="cut").code == 0
    assert train(tmp_path, *words, run="cut").code == 0
    assert bits(tmp_path / "cut") == bits(tmp_path / "run")
    assert rows(tmp_path / "cut") == rows(tmp_path / "run")


def test_each_source_keeps_its_own_way_of_holding_out(tmp_path: Path, folder: Path) -> None:
    many = tmp_path / "many.jsonl"
    many.write_bytes(lines(0, 150))
    words = (f"data.sources.many.path={many}", f"data.sources.few.path={folder}/a.txt", "steps=6")
    ended = train(tmp_path, *words)
    assert "held out by document" in ended.out
    assert "held out by tail" in ended.out
    assert train(tmp_path, *words, "stop=2", run="cut").code == 0
    assert train(tmp_path, *words, run="cut").code == 0
    assert bits(tmp_path / "cut") == bits(tmp_path / "run")
    assert rows(tmp_path / "cut") == rows(tmp_path / "run")


def test_who_makes_the_batches_changes_no_bit(tmp_path: Path, folder: Path) -> None:
    mixed = [word.format(folder) for word in MIXED]
    for name, ahead, workers in (("none", 0, 0), ("thread", 4, 0), ("one", 3, 1), ("three", 1, 3)):
        assert train(tmp_path, *mixed, f"data.ahead={ahead}", f"data.workers={workers}", run=name).code == 0
    assert len({json.dumps(rows(tmp_path / name)) for name in ("none", "thread", "one", "three")}) == 1
    assert all(bits(tmp_path / name) == bits(tmp_path / "none") for name in ("thread", "one", "three"))


# What stays as it is in a run -----------------------------------------------------------------------------------------


def test_each_difference_of_the_data_is_listed(tmp_path: Path, folder: Path) -> None:
    mixed = [word.format(folder) for word in MIXED]
    assert train(tmp_path, *mixed, "stop=1").code == 0
    run = tmp_path / "run"
    ended = run_here(
        f"run.dir={run}", "data.sources.books.weight=0.5", "data.sources.web.text_key=body", "batch.mode=pack"
    )
    assert failed(ended, 2) == (
        f"run.dir={run}: this run has another recipe; batch.mode: run has concat, asked for pack; "
        "data.sources.books.weight: run has 0.3, asked for 0.5; "
        "how data.sources.web is read: run has id_key=id, asked for text_key=body id_key=id; "
        "these must stay as they are, set another run.dir for a new run"
    )
    more = run_here(f"run.dir={run}", f"data.sources.new.path={folder}/d.jsonl.zst")
    assert "data.sources: run has books, web, asked for books, web, new" in failed(more, 2)


CHANGES: dict[str, tuple[Callable[[Path], Any], str | None]] = {
    "five lines more": (lambda f: (f / "b.jsonl").write_bytes(lines(0, 25)), "b.jsonl: 1"),
    "a file deleted": (lambda f: (f / "c.jsonl.gz").unlink(), "c.jsonl.gz: missing"),
    "two names swapped": (
        lambda f: [(f / "b.jsonl").rename(f / "x"), (f / "a.txt").rename(f / "b.jsonl"), (f / "x").rename(f / "a.txt")],
        "a.txt: ",
    ),
    "one byte edited": (
        lambda f: (f / "a.txt").write_bytes(b"T" + (f / "a.txt").read_bytes()[1:]),
        "a.txt: content changed",
    ),
    "a file that sorts first": (lambda f: (f / "0.txt").write_text("new"), "0.txt: new"),
    "touched": (lambda f: os.utime(f / "a.txt", (1, 1)), None),
    "moved": (lambda f: None, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_named_and_moved_ones_are_not_changed(change: str, tmp_path: Path, folder: Path) -> None:
    assert train(tmp_path, f"data.path={folder}", "stop=1").code == 0
    done, named = CHANGES[change]
    done(folder)
    if change == "moved":
        folder = Path(shutil.move(folder, tmp_path / "elsewhere"))
    ended = run_here(f"run.dir={tmp_path / 'run'}", f"data.path={folder}")
    if named is None:
        assert ended.code == 0, ended
        return
    line = failed(ended, 3)
    assert line.startswith(f"run.dir={tmp_path / 'run'}: data.path holds other text than this run was trained on; ")
    assert named in line
    assert line.endswith("; restore the files, or set another run.dir for a new run")


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_bad_record_stops_the_run_before_it_begins_or_is_counted(tmp_path: Path, folder: Path) -> None:
    (folder / "b.jsonl").write_bytes(lines(0, 2) + b'{"text": 3}\n' + lines(2, 18) + b'{"text": "half')
    line = failed(train(tmp_path, f"data.path={folder}"), 3)
    assert line.startswith(f"{folder}/b.jsonl:3:")
    assert not (tmp_path / "run").exists()
    ended = train(tmp_path, f"data.path={folder}", "data.errors=skip")
    assert ended.code == 0, ended
    for place in (ended.out, (tmp_path / "run" / "run.log").read_text(), (tmp_path / "run" / "data.json").read_text()):
        assert "skipped, text is a number: 1" in place
    assert "skipped, no JSON: 1" in run_here("inspect", f"run.dir={tmp_path / 'run'}").out


def test_a_file_on_both_sides_is_refused(tmp_path: Path, folder: Path) -> None:
    (folder / "valid.txt").write_bytes((folder / "a.txt").read_bytes())
    line = failed(train(tmp_path, f"data.path={folder}", f"data.heldout={folder}/valid.txt", "data.holdout=none"), 3)
    assert line == (
        "data.heldout: valid.txt is also trained on, as a.txt of source text, must be on one side only; take it out of one"
    )
    shutil.move(folder / "valid.txt", tmp_path / "valid.txt")
    (tmp_path / "valid.txt").write_text("other text that is long enough to be evaluated on")
    words = (f"data.path={folder}", "data.holdout=none", f"data.heldout={tmp_path}/valid.txt")
    ended = train(tmp_path, *words, "stop=2")
    assert ended.code == 0, ended
    assert "held-out text: 1 document" in ended.out
    assert "are also trained on" not in ended.out
    run = tmp_path / "run"
    assert failed(run_here(f"run.dir={run}", "~data.heldout"), 2) == (
        f"run.dir={run}: this run has another recipe; data.holdout: run has 0, asked for 0.01; "
        f"data.heldout: run has {recorded(run)}, asked for none; these must stay as they are, set another run.dir for a new run"
    )
    (tmp_path / "valid.txt").write_text("changed")
    assert "valid.txt: " in failed(run_here(f"run.dir={run}"), 3)


def recorded(run: Path) -> str:
    return str(json.loads((run / "data.json").read_text())["sources"]["heldout"]["digest"])


def test_documents_that_are_evaluated_and_trained_on_are_counted(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "valid.jsonl").write_bytes(lines(3, 2) + json.dumps({"text": "only here to be evaluated on"}).encode())
    ended = train(tmp_path, f"data.path={folder}", "data.holdout=none", f"data.heldout={tmp_path}/valid.jsonl")
    assert ended.code == 0, ended
    assert "data.heldout: 2 of its documents are also trained on, in text\n" in ended.out


NO_EFFECT = {
    "data.text_key=body": "data.text_key=body must have a file that it is for (arrow, jsonl, parquet)",
    "data.id_key=id": "data.id_key=id must have a file that it is for (arrow, jsonl, parquet)",
    "data.template=chatml": "data.template=chatml must have a file that it is for (arrow, jsonl, parquet)",
    "data.dtype=<u2": "data.dtype=<u2 must have a file that it is for (bin)",
}


@pytest.mark.parametrize("setting", NO_EFFECT)
def test_a_setting_that_no_file_is_read_by_is_refused(setting: str, tmp_path: Path, folder: Path) -> None:
    line = failed(train(tmp_path, f"data.path={folder}/a.txt", setting), 2)
    assert line == f"{NO_EFFECT[setting]}, there is none; drop it"
    mixed = (
        f"data.sources.a.path={folder}/a.txt",
        f"data.sources.a.{setting[5:]}",
        f"data.sources.b.path={folder}/b.jsonl",
    )
    assert failed(train(tmp_path, *mixed), 2).startswith(NO_EFFECT[setting].replace("data.", "data.sources.a.", 1))
    assert not (tmp_path / "run").exists()


def test_a_key_that_a_verb_does_not_read_is_refused(tmp_path: Path) -> None:
    line = "inspect.rows: has no effect in prepare, must be one of its keys; see python -m lib.run prepare --help"
    assert failed(run_here("prepare", f"run.dir={tmp_path}", "inspect.rows=1"), 2) == line


def test_a_run_on_ids_alone_ends_without_a_sample(tmp_path: Path) -> None:
    ids = np.tile(np.arange(3, 60, dtype=np.uint16), 40)
    ids[::100] = 2
    np.save(tmp_path / "ids.npy", ids)
    ended = train(tmp_path, f"data.path={tmp_path}/ids.npy", "data.tokenizer=ids:60:2")
    assert ended.code == 0, ended
    assert "sample" not in ended.out


def test_more_passes_than_a_source_allows_are_refused_before_the_first_step(tmp_path: Path, folder: Path) -> None:
    mixed = [word.format(folder) for word in MIXED]
    line = failed(train(tmp_path, *mixed, "data.sources.books.repeat=1", "steps=500"), 2)
    assert line.startswith("data.sources.books.repeat=1")
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_under_the_same_name_is_refused(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tiny_tokenizer(path, 300)
    words = (f"data.path={folder}", f"data.tokenizer={path}", "data.holdout_by=tail", "data.holdout=0.1")
    ended = train(tmp_path, *words, "stop=2")
    assert ended.code == 0, ended
    assert train(tmp_path, *words).code == 0
    tiny_tokenizer(path, 290)
    for words in (("steps=20",), ("sample",), ("eval",), ("inspect", "inspect.rows=1")):
        line = failed(run_here(*words, f"run.dir={tmp_path / 'run'}"), 3)
        assert "data.tokenizer is tokenizer.json:" in line
        assert "which this run was trained with" in line
    line = failed(run_here(f"run.dir={tmp_path / 'run'}", "data.tokenizer=bytes"), 2)
    assert "data.tokenizer: run has tokenizer.json:" in line
    assert ", asked for bytes; " in line


def test_other_marks_of_the_same_tokenizer_are_refused(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tiny_tokenizer(path, 300, marks=("<s>", "</s>", "<|im_end|>"))
    words = (f"data.path={folder}", f"data.tokenizer={path}", "data.holdout=0.1", "data.add_bos=true")
    ended = train(tmp_path, *words, "stop=2")
    assert ended.code == 0, ended
    for mark in ("data.eos_token=<|im_end|>", "data.bos_token=<|im_end|>"):
        for verb in (("steps=20",), ("eval",), ("inspect", "inspect.rows=1")):
            line = failed(run_here(*verb, f"run.dir={tmp_path / 'run'}", mark), 3)
            assert "ids, end 1, begin 0, special tokens" in line
            assert line.endswith("restore its file and marks, or set another run.dir for a new run")
    ended = run_here(f"run.dir={tmp_path / 'run'}", "data.eos_token=</s>", "data.bos_token=<s>", "steps=3")
    assert ended.code == 0, ended


def test_a_tokenizer_without_an_end_mark_serves_where_none_is_asked_for(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "plain.json"
    tiny_tokenizer(path, 300, marks=())
    words = (f"data.path={folder}", f"data.tokenizer={path}", "steps=3", "sample.prompt=the")
    assert failed(train(tmp_path, *words), 2).endswith("add one to the tokenizer or set data.add_eos=false")
    ended = train(tmp_path, *words, "data.add_eos=false")
    assert ended.code == 0, ended
    assert "sample:\nthe" in ended.out
    line = failed(run_here("sample", f"run.dir={tmp_path / 'run'}", "sample.prompt="), 2)
    assert line == ("sample.prompt='' must be some text, for the tokenizer has no end mark to begin from; give one")


def test_conversations_are_trained_on_by_a_template(tmp_path: Path) -> None:
    chat = tmp_path / "chat.jsonl"
    records = [
        {"messages": [{"role": "user", "content": said(n)}, {"role": "assistant", "content": said(n + 1)}]}
        for n in range(30)
    ]
    chat.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = (f"data.path={chat}", "data.template=chatml", "batch.mode=pack", "batch.length=256", "batch.rows=2")
    shown = run_here(
        "inspect", f"run.dir={tmp_path / 'none'}", *words, f"data.cache={tmp_path / 'cache'}", "inspect.rows=1"
    )
    assert shown.code == 0, shown
    assert "[[<|im_start|>user" in shown.out
    assert re.search(r"<\|im_start\|>assistant\\n\]\][a-z ]+<\|im_end\|>\\n\{end\}\n", shown.out)
    assert train(tmp_path, *words).code == 0
    records[4]["messages"].reverse()
    chat.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert failed(train(tmp_path, *words, run="other"), 3).startswith(f"{chat}:5: ")


# Processes ------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_ends_the_run_with_its_state_saved(tmp_path: Path, folder: Path) -> None:
    words = (
        *(word.format(folder) for word in MIXED),
        "data.workers=2",
        "steps=2000",
        "log.every=1",
        "checkpoint.every=2000",
    )
    whole = (*TINY, f"data.cache={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}", *words)
    process = start(*whole)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None
        time.sleep(0.01)
    found = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True, timeout=20
    ).stdout.split()
    assert len(found) == 2
    os.kill(int(found[0]), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, (out, err)
    assert "was ended by SIGKILL" in err
    assert err.count("\n") == 1
    step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert step >= 4
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert step == last
    assert train(tmp_path, *words, f"stop={step + 3}").code == 0
    assert train(tmp_path, *words, f"stop={step + 3}", run="straight").code == 0
    assert bits(tmp_path / "run") == bits(tmp_path / "straight")
