"""Plain text by file, by line and by block: which bytes a document keeps; messages in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.formats import put, read, refused, texts

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("data", [
    b"one\r\ntwo\r\n", b"  a \n\n", b" \n ", b"caf\xe9 \xed\xa0\x80 \xff", b"e\xcc\x81 \xc3\xa9",
    b"a\xe2\x80\xa8b\xc2\x85c\x0b\x0cd", b"joined\n" + MARK + b"by cat", b"", b"x" * 9000 + b"\0",
    (b"text " * (1 << 18))[: 3 << 20] + b"end",
], ids=["Q01", "Q27", "Q18", "Q11", "Q29", "Q15", "Q03", "Q17", "a late NUL", "longer than a piece"])  # fmt: skip
def test_a_file_is_one_document_byte_for_byte(tmp_path: Path, data: bytes) -> None:
    path = put(tmp_path / "x.txt", data)
    assert texts(path, target=2) == [data]
    assert read(path).places == ["x.txt"]


@pytest.mark.parametrize("split", ["file", "line", "block"])
def test_a_byte_order_mark_is_dropped_once_at_the_start_of_a_file(tmp_path: Path, split: str) -> None:
    path = put(tmp_path / "x.txt", MARK + MARK + b"a\n\n" + MARK + b"b")
    whole, parts = [MARK + b"a\n\n" + MARK + b"b"], [MARK + b"a", MARK + b"b"]
    for target in (1, 2, 3, 4, 1 << 20):
        assert read(path, split=split, target=target).values == (whole if split == "file" else parts)


def test_a_line_loses_its_own_line_end_alone(tmp_path: Path) -> None:
    path = put(tmp_path / "x.txt", b" a \r\nb\rc\r\r\nd\x0b\x0c\xc2\x85\xe2\x80\xa8e\nf\xff\r")
    assert texts(path, split="line") == [b" a ", b"b\rc\r", b"d\x0b\x0c\xc2\x85\xe2\x80\xa8e", b"f\xff\r"]


def test_blank_lines_are_no_documents_and_counted(tmp_path: Path) -> None:
    got = read(put(tmp_path / "x.txt", b"\na\n \t\r\n\r\nb\n\n"), split="line")
    assert (got.values, got.places, got.skipped) == ([b"a", b"b"], ["x.txt:2", "x.txt:5"], {"blank line": 4})


def test_blocks_are_what_stands_between_blank_lines(tmp_path: Path) -> None:
    path = put(tmp_path / "x.txt", b"\n\r\n a\r\nb \n\n \t\nc\n\nd\r\n\r\ne\r\nf\r\n")
    got = read(path, split="block")
    assert got.values == [b" a\r\nb ", b"c", b"d", b"e\r\nf"]
    assert got.places == ["x.txt:3", "x.txt:7", "x.txt:9", "x.txt:11"]
    assert got.skipped == {}
    assert texts(put(path, b"a\nb\r"), split="block") == [b"a\nb\r"]


def test_a_block_that_goes_over_many_stretches_is_whole(tmp_path: Path) -> None:
    path = put(tmp_path / "x.txt", b"a\n\n" + b"line\n" * 2000 + b"\nz")
    assert texts(path, split="block", target=700) == [b"a", (b"line\n" * 2000)[:-1], b"z"]


@pytest.mark.parametrize(("split", "values", "skipped"), [
    ("file", [b""], {}), ("line", [], {"empty file": 1}), ("block", [], {"empty file": 1}),
])  # fmt: skip
@pytest.mark.parametrize("data", [b"", MARK])
def test_an_empty_file_is_an_empty_document_or_holds_none(
    tmp_path: Path, split: str, values: list[bytes], skipped: dict[str, int], data: bytes
) -> None:
    got = read(put(tmp_path / "x.txt", data), split=split)
    assert (got.values, got.skipped) == (values, skipped)


@pytest.mark.parametrize("split", ["file", "line", "block"])
@pytest.mark.parametrize("target", [3, 1 << 20])
def test_binary_files_are_refused(tmp_path: Path, split: str, target: int) -> None:
    path = put(tmp_path / "x.txt", b"a\nb\nc\0d\n")
    refused(path, "@: binary, not text (NUL at byte 5); save it as UTF-8 text", split=split, target=target)
    put(path, "\ufeffab".encode("utf-16-le"))
    refused(path, "@: UTF-16, not UTF-8 (NUL at byte 3); save it as UTF-8 text", split=split, target=target)


def test_a_line_or_a_block_beyond_all_measure_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lib.store.lines.LONGEST", 2 << 20)
    path = put(tmp_path / "x.txt", b"a\n" + b"x" * (4 << 20))
    refused(path, "@: the line at byte 2 has over 2097152 bytes, must be shorter; split it", split="line")
    monkeypatch.setattr("lib.store.text.LONGEST", 1 << 20)
    put(path, b"a\n\n" + b"line\n" * (1 << 19))
    says = "the block at line 3 has over 1048576 bytes, must be shorter; split the file into lines"
    refused(path, f"@: {says}", split="block")
    refused(path, f"@: {says}", split="block", target=2)
