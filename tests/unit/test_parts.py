"""Parts: which stretches, written once, in any order, written anew when damaged; and what is read without torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.errors import DataError
from lib.store import parts
from lib.store.corpus import Corpus, scan
from lib.store.making import Making
from lib.store.parts import Job, part_path, parts_of, read_part, write_part
from lib.store.record import Reading
from tests.stores import contents, documents, lay, made, names, origins, ready

ROOT = Path(__file__).parents[2]
LINES = Making(Reading(split="line"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.setattr(parts, "PART_BYTES", 10)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that were really written, as they are."""
    numbers: list[int] = []
    real = parts._write

    def write(folder: Path, part: parts.Part, making: Making) -> None:
        real(folder, part, making)
        numbers.append(part.number)

    monkeypatch.setattr(parts, "_write", write)
    return numbers


def corpus_of(root: Path) -> Corpus:
    return scan(lay(root / "text", {"a": b"one\ntwo\nthree\nfour\nfive\n", "b": b"six\n", "c": b"seven"}))


def cut(corpus: Corpus, reading: Reading) -> list[list[tuple[int, int, int]]]:
    return [[(one.file, *one.span) for one in part.stretches] for part in parts_of(corpus, reading)]


def stopping(after: int) -> Callable[..., Iterator[int]]:
    """Do so many jobs, and then no more."""

    def doing(work: Callable[[Any], int], jobs: Any) -> Iterator[int]:
        for number, job in enumerate(jobs):
            if number == after:
                raise KeyboardInterrupt
            yield work(job)

    return doing


def test_a_corpus_is_cut_by_bytes_whatever_lies_in_them_and_wherever_it_lies(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path)
    # A file of 24 bytes in three; small files together.
    lines = [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 24)], [(1, 0, 4), (2, 0, 5)]]
    assert cut(corpus, LINES.reading) == [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 24)], [(1, 0, 4), (2, 0, 5)]] == lines
    assert cut(corpus, Reading(split="file")) == [[(0, 0, 24)], [(1, 0, 4), (2, 0, 5)]]
    (tmp_path / "text").rename(tmp_path / "moved")
    assert cut(scan(tmp_path / "moved"), LINES.reading) == lines
    assert [one.last for part in parts_of(corpus, LINES.reading) for one in part.stretches] == [False] * 2 + [True] * 3


def test_a_part_that_is_there_is_not_written_again(tmp_path: Path, written: list[int]) -> None:
    (tmp_path / "building").mkdir()
    jobs = [Job(str(tmp_path / "building"), part, LINES) for part in parts_of(corpus_of(tmp_path), LINES.reading)]
    assert [write_part(job) for job in jobs[::-1]] == [job.part.size for job in jobs[::-1]]
    assert written == [3, 2, 1, 0]
    before = contents(tmp_path / "building")
    assert [write_part(job) for job in jobs] == [job.part.size for job in jobs]
    assert written == [3, 2, 1, 0]
    assert contents(tmp_path / "building") == before
    assert sorted(os.listdir(tmp_path / "building")) == [f"part-00000{n}" for n in range(4)]


@pytest.mark.parametrize("damage", ["gone", "short", "long", "other bits", "no facts", "no JSON", "a file", "empty"])
def test_a_part_that_is_damaged_is_written_anew(tmp_path: Path, written: list[int], damage: str) -> None:
    building, part = tmp_path / "building", parts_of(corpus_of(tmp_path), LINES.reading)[0]
    building.mkdir()
    write_part(Job(str(building), part, LINES))
    before, path = contents(building), part_path(building, 0)
    ids = path / "ids"
    whole = ids.read_bytes()
    if damage == "gone":
        ids.unlink()
    elif damage in ("short", "long", "other bits"):
        ids.write_bytes({"short": whole[:-1], "long": whole + b"x", "other bits": b"x" * len(whole)}[damage])
    elif damage == "no facts":
        (path / "part.json").unlink()
    elif damage == "no JSON":
        (path / "part.json").write_bytes(b"\xff{")
    else:
        for file in path.iterdir():
            file.unlink()
        if damage == "a file":
            path.rmdir()
            path.write_bytes(b"x")
    assert read_part(building, part, verify=True) is None
    write_part(Job(str(building), part, LINES))
    assert written == [0, 0]
    assert contents(building) == before
    assert os.listdir(building) == ["part-000000"]


def test_a_part_of_other_stretches_is_written_anew(
    tmp_path: Path, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_of(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        made(corpus, tmp_path / "cache", split="line", doing=stopping(3))
    monkeypatch.setattr(parts, "PART_BYTES", 7)
    store = made(corpus, tmp_path / "cache", split="line")
    assert documents(store.train) == [b"one", b"two", b"three", b"four", b"five", b"six", b"seven"]
    assert written == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_a_build_that_was_stopped_goes_on_where_it_was(tmp_path: Path, written: list[int]) -> None:
    corpus, told = corpus_of(tmp_path), list[tuple[int, int]]()
    whole = made(corpus, tmp_path / "whole", split="line", add_bos=True)
    written.clear()
    for stop in range(4):
        with pytest.raises(KeyboardInterrupt):
            made(corpus, tmp_path / "cache", split="line", add_bos=True, doing=stopping(1 if stop < 3 else 0))
        (left,) = names(tmp_path / "cache")
        assert sorted(os.listdir(tmp_path / "cache" / left)) == [f"part-00000{n}" for n in range(min(stop, 2) + 1)]
    tick = lambda done, total: told.append((done, total))  # noqa: E731
    store = made(corpus, tmp_path / "cache", split="line", add_bos=True, progress=tick)
    assert written == [0, 1, 2, 3]
    assert told == [(33, 33)]  # it begins with what was done before
    assert contents(store.path) == contents(whole.path)
    assert names(tmp_path / "cache") == [store.path.name]


def test_a_part_that_goes_bad_before_it_is_put_together_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doing(work: Callable[[Any], int], jobs: Any) -> Iterator[int]:
        for job in jobs:
            yield work(job)
        (part_path(Path(job.folder), job.part.number) / "draws").unlink()

    corpus = corpus_of(tmp_path)
    with pytest.raises(DataError) as error:
        made(corpus, tmp_path / "cache", split="line", doing=doing)
    (left,) = names(tmp_path / "cache")
    path = tmp_path / "cache" / left / "part-000003"
    assert str(error.value) == f"{path}: is not whole; run again to have it written anew"
    assert len(documents(made(corpus, tmp_path / "cache", split="line").train)) == 7


def test_a_bad_record_stops_and_what_was_done_before_is_kept(tmp_path: Path, written: list[int]) -> None:
    good, bad = b'{"text": "a"}\n', b'{"txt": "a"}\n'
    path = lay(tmp_path / "text", {"a.jsonl": good * 3 + bad + good}) / "a.jsonl"
    why = "no field 'text' (fields: 'txt'), must be there; set data.text_key or data.errors=skip"
    corpus = scan(path)
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}:4:1: {why}')}$"):
        made(corpus, tmp_path / "cache")
    assert written == [0, 1, 2, 3]  # stretches of ten bytes, of lines of fourteen
    store = made(corpus, tmp_path / "other", errors="skip")
    assert origins(store.train) == [("a.jsonl", line, "") for line in (1, 2, 3, 5)]
    assert store.counts["skipped"] == {"text is missing": 1}


def test_a_file_that_changes_between_scan_and_reading_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lay(tmp_path / "text", {"a": b"some text here", "b": b"more"})
    os.utime(root / "b", (5, 5))
    corpus = scan(root)
    message = f"{root}/b: changed while it was being read; run again when nothing writes to it"

    def doing(work: Callable[[Any], int], jobs: Any) -> Iterator[int]:
        for job in jobs:
            (root / "b").write_bytes(b"less")  # of the same size
            yield work(job)

    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        made(corpus, tmp_path / "cache", doing=doing)
    # While it is read, too.
    os.utime(root / "b", (5, 5))
    corpus, real = scan(root), parts.records  # type: ignore[attr-defined]

    def records(*args: Any, **options: Any) -> Iterator[Any]:
        yield from real(*args, **options)
        (root / "b").write_bytes(b"still")

    monkeypatch.setattr(parts, "records", records)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        made(corpus, tmp_path / "cache")


def test_rows_of_a_table_are_numbered_in_their_file(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    table = pa.table({"text": [f"row {n}" for n in range(1, 12)], "id": [f"x{n}" for n in range(1, 12)]})
    pq.write_table(table, tmp_path / "text" / "a.parquet", row_group_size=3)
    with pa.OSFile(str(tmp_path / "text" / "b.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=4)
    store = ready(tmp_path, {}, id_key="id")
    assert len(parts_of(scan(tmp_path / "text"), Reading())) > 4
    assert origins(store.train) == [(f, n, f"x{n}") for f in ("a.parquet", "b.arrow") for n in range(1, 12)]
    assert documents(store.train) == [b"row %d" % n for n in range(1, 12)] * 2


def test_duplicates_are_counted_exactly_however_many_documents_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"".join(b"line %d\n" % (n * n % 97) for n in range(500))
    distinct = len(set(text.splitlines()))
    for bucket in (1, 7, 64, 500, 1 << 20):
        monkeypatch.setattr("lib.store.build._AT_ONCE", bucket)
        monkeypatch.setattr(parts, "PART_BYTES", 700)
        store = made(scan(lay(tmp_path / "text", {"a": text})), tmp_path / str(bucket), split="line")
        assert (store.counts["documents"], store.counts["duplicates"]) == (500, 500 - distinct)


def test_only_what_a_part_needs_goes_to_another_process(tmp_path: Path) -> None:
    # A corpus of a million files must not be sent along with each of its parts.
    corpus = scan(lay(tmp_path / "text", {f"{n:04}": b"0123456789" for n in range(200)}))
    assert all(len(part.stretches) == 1 for part in parts_of(corpus, Reading()))


@pytest.mark.parametrize("module", ["lib.store.parts", "lib.store.stream", "lib.store.plans", "lib.store.tokens",
                                    "lib.run.pool", "lib.run.__main__"])  # fmt: skip
def test_nothing_that_prepares_text_imports_torch(module: str) -> None:
    code = f"import sys, {module}\nprint([name for name in ('torch', 'tensordict', 'zarr') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_what_a_part_says_of_itself_is_readable(tmp_path: Path) -> None:
    building, (_, part, *_) = tmp_path / "building", parts_of(corpus_of(tmp_path), LINES.reading)
    building.mkdir()
    write_part(Job(str(building), part, LINES))
    told = json.loads((part_path(building, 1) / "part.json").read_bytes())
    assert (told["documents"], told["ids"], told["text_bytes"], told["empty"]) == (2, 10, 8, 0)
    assert (told["cut"], told["found"]) == ([[0, 10, 20]], [[2, 2]])
