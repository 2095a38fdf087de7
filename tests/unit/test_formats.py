"""Which format a file is read as, and where its stretches and records are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.store.formats import SIDE_CAR, Kind, first_lines, kind_of, place_of, spans
from lib.store.record import FORMATS, Reading, Span
from tests.formats import put


@pytest.mark.parametrize(("name", "format", "compression"), [
    ("x", "text", ""), ("x.txt", "text", ""), ("README.md", "text", ""), ("jsonl", "text", ""), ("x.json", "text", ""),
    ("x.jsonl", "jsonl", ""), ("a.b/x.NDJSON", "jsonl", ""), ("x.JsonL.GZ", "jsonl", "gz"), ("x.jsonl.zst", "jsonl", "zst"),
    ("x.gz", "text", "gz"), ("x.txt.zst", "text", "zst"), ("x.parquet", "parquet", ""), ("x.arrow", "arrow", ""),
    ("x.feather", "arrow", ""), ("x.ipc", "arrow", ""), ("x.npy", "npy", ""), ("x.bin", "bin", ""), ("x.bin.json", "text", ""),
    ("x.parquet.gz", "parquet", "gz"), ("x.jsonl~", "text", ""), ("x.jsonl.gz.1", "text", ""), ("x.gzip", "text", ""),
])  # fmt: skip
def test_the_end_of_a_name_says_the_format(name: str, format: str, compression: str) -> None:  # noqa: A002
    assert kind_of(name) == Kind(format, compression)
    assert kind_of("x.bin" + SIDE_CAR.removeprefix(".bin")) == Kind("text", "")


@pytest.mark.parametrize("format", FORMATS[1:])
def test_a_format_that_is_set_stands_above_the_name_but_not_above_its_compression(format: str) -> None:  # noqa: A002
    assert kind_of("x.jsonl", format) == kind_of("x", format) == Kind(format, "")
    assert kind_of("x.txt.gz", format) == Kind(format, "gz")


def test_only_lines_and_blocks_of_plain_files_are_cut(tmp_path: Path) -> None:
    path, lines = str(tmp_path / "x"), Reading(split="line")
    assert spans(path, 25, Kind("jsonl", ""), Reading(), target=10) == [(0, 10), (10, 20), (20, 25)]
    assert spans(path, 25, Kind("text", ""), lines, target=25) == [(0, 25)]
    assert spans(path, 0, Kind("text", ""), lines, target=25) == [(0, 0)]
    for kind in (Kind("text", ""), Kind("npy", ""), Kind("bin", "")):
        assert spans(path, 25, kind, Reading(), target=10) == [(0, 25)]
    for kind in (Kind("jsonl", "gz"), Kind("text", "zst")):
        assert spans(path, 25, kind, lines, target=10) == [(0, 25)]


def test_lines_before_stretches_are_counted_in_one_pass(tmp_path: Path) -> None:
    path, kind = put(tmp_path / "a\nb", b"ab\n\ncdefgh\ni"), Kind("jsonl", "")
    cut = [Span(start, start + 1) for start in range(12)]
    # A stretch begins with the first line that begins in it or behind it.
    assert first_lines(str(path), cut, kind) == [0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3]
    assert place_of(str(path), cut[4], kind, 5) == f"{tmp_path}/a\\nb:7"
    assert place_of(str(path), cut[4], kind, 0) == f"{tmp_path}/a\\nb"
