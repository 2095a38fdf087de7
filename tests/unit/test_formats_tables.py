"""Parquet and Arrow IPC: any width of string, rows that are no text, files that are no tables; messages in full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.store.formats import Kind, first_lines, spans
from lib.store.record import Reading
from tests.formats import put, read, refused, texts

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

REPAIR = "repair it or set data.errors=skip"


def parquet(path: Path, table: Any, rows: int = 1 << 20) -> Path:
    pq.write_table(table, path, row_group_size=rows)
    return path


def arrow(path: Path, table: Any, rows: int = 1 << 20) -> Path:
    with pa.ipc.new_file(path, table.schema) as out:
        out.write_table(table, max_chunksize=rows)
    return path


def stream(path: Path, table: Any, rows: int = 1 << 20) -> Path:
    with pa.ipc.new_stream(path, table.schema) as out:
        out.write_table(table, max_chunksize=rows)
    return path


WRITE = pytest.mark.parametrize(
    ("name", "write"),
    [("x.parquet", parquet), ("x.ARROW", arrow), ("x.ipc", stream)],
    ids=["parquet", "arrow", "stream"],
)
Write = Callable[..., Path]


def not_utf8(*values: bytes) -> Any:
    """A column of strings of which some are no UTF-8, as careless writers leave them."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


@WRITE
@pytest.mark.parametrize("kind", [
    pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.binary(),
    pa.large_binary(),
], ids=str)  # fmt: skip
def test_any_column_of_strings_gives_the_same_text(tmp_path: Path, name: str, write: Write, kind: Any) -> None:
    values = ["a", "", "caf\u00e9\r\n ", "a", "\0"]
    if pa.types.is_dictionary(kind):
        column = pa.array(values).dictionary_encode()
    else:
        column = pa.array([value.encode() for value in values], pa.binary()).cast(kind)
    path = write(tmp_path / name, pa.table({"n": [1] * 5, "text": column}))
    assert texts(path) == [value.encode() for value in values]


@WRITE
def test_rows_are_found_in_the_file_from_a_stretch_in_its_middle(tmp_path: Path, name: str, write: Write) -> None:
    column = [str(n) for n in range(1000)]
    path = write(tmp_path / name, pa.table({"text": [*column[:700], None, *column[701:]]}), 100)
    got = read(path, target=1, errors="skip")
    assert got.values == [one.encode() for one in column if one != "700"]
    assert got.places == [f"{name}:{n + 1}" for n in range(1000) if n != 700]
    assert got.skipped == {"text is null": 1}
    refused(path, f"@:701:1: field 'text' is null, must be a string; {REPAIR}", target=1)
    cut = spans(
        str(path),
        path.stat().st_size,
        Kind(kind := "parquet" if write is parquet else "arrow", ""),
        Reading(),
        target=1,
    )
    assert len(cut) == (1 if write is stream else 10)
    assert first_lines(str(path), cut, Kind(kind, "")) == list(range(0, 1000, 100))[: len(cut)]


@WRITE
def test_a_column_of_nothing_but_nulls_is_nulls(tmp_path: Path, name: str, write: Write) -> None:
    path = write(tmp_path / name, pa.table({"text": pa.nulls(3)}))
    refused(path, f"@:1:1: field 'text' is null, must be a string; {REPAIR}")
    assert read(path, errors="skip").skipped == {"text is null": 3}


@WRITE
@pytest.mark.parametrize("binary", [True, False])
def test_bytes_that_are_no_utf8_are_named_counted_or_replaced(
    tmp_path: Path, name: str, write: Write, binary: bool
) -> None:
    values = [b"ok \xc3\xa9", b"caf\xe9!", b"ok"]
    path = write(tmp_path / name, pa.table({"text": pa.array(values, pa.binary()) if binary else not_utf8(*values)}))
    refused(path, "@:2:4: byte e9 is not UTF-8; save the file as UTF-8 or set data.errors=replace")
    assert read(path, errors="skip")[::3] == ([values[0], values[2]], {"not UTF-8": 1})
    got = read(path, errors="replace")
    assert (got.values[1], got.skipped) == (b"caf\xef\xbf\xbd!", {"bytes that are no UTF-8 replaced": 1})


@WRITE
def test_a_missing_column_is_named_with_those_there_are_even_when_skipping(
    tmp_path: Path, name: str, write: Write
) -> None:
    table = pa.table({"body": ["a"], "id": [3], "list": [["a"]]})
    path = write(tmp_path / name, table)
    for errors in ("stop", "skip"):
        refused(
            path, "@: 0 columns 'text' (columns: 'body', 'id', 'list'), must be one; set data.text_key", errors=errors
        )
    refused(path, "@: column 'id' is int64, must be of strings; set data.text_key", text_key="id")
    refused(path, "@: column 'list' is list<element: string>, must be of strings; set data.text_key".replace(
        "element", "element" if write is parquet else "item"), text_key="list")  # fmt: skip
    got = read(path, text_key="body", id_key="id")
    assert (got.values, got.names) == ([b"a"], ["3"])
    assert read(path, text_key="body", id_key="none").names == [None]
    assert texts(write(tmp_path / f"y{name}", table.select(["id", "body"])), text_key="body") == [b"a"]


@WRITE
def test_a_file_without_rows_is_counted(tmp_path: Path, name: str, write: Write) -> None:
    empty = pa.table({"text": pa.array([], pa.string())})
    assert read(write(tmp_path / name, empty)) == ([], [], [], {"empty file": 1})


def test_a_parquet_file_without_rows_or_without_row_groups_is_counted(tmp_path: Path) -> None:
    empty = pa.table({"text": pa.array([], pa.string())})
    for groups in (0, 1, 2):
        with pq.ParquetWriter(tmp_path / "x.parquet", empty.schema) as out:
            for _ in range(groups):
                out.write_batch(pa.record_batch(empty.to_pydict(), empty.schema))
        assert read(tmp_path / "x.parquet") == ([], [], [], {"empty file": 1})


@WRITE
def test_conversations_come_as_their_fields(tmp_path: Path, name: str, write: Write) -> None:
    talk = [{"role": "user", "content": "\u00e9"}, {"role": "assistant", "content": ""}]
    when = pa.array([2**62, 0], pa.timestamp("ns"))  # beyond what Python can hold, and passed over
    path = write(tmp_path / name, pa.table({"messages": [talk, None], "n": [1, 2], "when": when}))
    got = read(path, chat=True, id_key="n")
    assert got.values == [{"messages": talk, "n": 1}, {"messages": None, "n": 2}]
    assert (got.names, got.skipped) == (["1", "2"], {})


@WRITE
def test_a_damaged_row_of_a_conversation_is_named_or_counted(tmp_path: Path, name: str, write: Write) -> None:
    path = write(tmp_path / name, pa.table({"text": not_utf8(b"a", b"\xff", b"c")}))
    says = "the row is damaged (In column 0: Invalid: Invalid UTF8 sequence at string index 0), must be valid"
    refused(path, f"@:2:1: {says}; {REPAIR}", chat=True)
    got = read(path, chat=True, errors="skip")
    assert (got.values, got.skipped) == ([{"text": "a"}, {"text": "c"}], {"row is damaged": 1})


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    column = pa.array(["a"])
    path = arrow(tmp_path / "x.arrow", pa.Table.from_arrays([column, column], ["text", "text"]))
    refused(path, "@: 2 columns 'text' (columns: 'text', 'text'), must be one; set data.text_key")
    says = "two columns have one name, must differ (columns: ['text', 'text']); rename them"
    refused(path, f"@: {says}", chat=True)


@pytest.mark.parametrize(("name", "data", "says"), [
    ("x.parquet", b"", "no whole Parquet file (Parquet file size is 0 bytes)"),
    ("x.parquet", b"PAR1", "no whole Parquet file (Parquet file size is 4 bytes, smaller than the minimum file footer "
     "(8 bytes))"),
    ("x.parquet", b'{"text": "a"}\n', "no whole Parquet file (Parquet magic bytes not found in footer. Either the file is "
     "corrupted or this is not a parquet file.)"),
    ("x.arrow", b"", "no whole Arrow IPC file (Tried reading schema message, was null or length 0)"),
])  # fmt: skip
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    refused(put(tmp_path / name, data), f"@: {says}; fetch it again")


def test_feather_of_the_first_version_is_named(tmp_path: Path) -> None:
    path = put(tmp_path / "x.feather", b"FEA1" + b"\0" * 100 + b"FEA1")
    says = "Feather version 1, must be Arrow IPC (Feather version 2)"
    refused(path, f"@: {says}; read it with pyarrow.feather.read_table and write it with pyarrow.feather.write_feather")


@WRITE
def test_a_table_that_is_cut_short_is_an_error_and_no_short_table(tmp_path: Path, name: str, write: Write) -> None:
    path = write(tmp_path / name, pa.table({"text": [str(n) for n in range(1000)]}), 100)
    whole = path.read_bytes()
    for stop in (len(whole) // 2, len(whole) - 1, len(whole) - 8, 100):
        put(path, whole[:stop])
        with pytest.raises(RuntimeError, match=rf"^{path}: (no whole .*|Arrow stream without .*); .*fetch it again$"):
            read(path, errors="skip")


def test_a_stream_that_is_cut_between_two_batches_is_an_error(tmp_path: Path) -> None:
    whole = stream(tmp_path / "x.arrow", pa.table({"text": ["a", "b"]}), 1).read_bytes()
    path = put(tmp_path / "x.arrow", whole[:-8])
    refused(path, "@: Arrow stream without an end mark, must have one; it is cut short, fetch it again")


def test_damage_that_a_page_checksum_shows_is_an_error(tmp_path: Path) -> None:
    path, text = tmp_path / "x.parquet", "a text to be damaged"
    pq.write_table(pa.table({"text": [text]}), path, compression="none", use_dictionary=False, write_page_checksum=True)
    whole = path.read_bytes()
    put(path, whole.replace(text.encode(), text.replace("x", "s").encode()))
    with pytest.raises(RuntimeError, match=rf"^{path}: no whole Parquet file \(.*CRC checksum.*\); fetch it again$"):
        read(path)


def test_an_arrow_batch_that_points_outside_of_itself_is_an_error(tmp_path: Path) -> None:
    path = arrow(tmp_path / "x.arrow", pa.table({"text": ["abcdefgh", "ijklmnop"]}))
    whole = path.read_bytes()
    offsets = b"\0\0\0\0\x08\0\0\0\x10\0\0\0"
    assert whole.count(offsets) == 1
    put(path, whole.replace(offsets, b"\0\0\0\0\xff\xff\xff\x0f\x10\0\0\0"))
    with pytest.raises(RuntimeError, match=rf"^{path}: no whole Arrow IPC file \(.*\); fetch it again$"):
        read(path)


def test_without_its_library_a_table_is_refused_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path / "x.parquet", pa.table({"text": ["a"]}))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    lack = "pyarrow is not installed, must be there to read .parquet; pip install 'purestep[data]'"
    refused(path, f"@: {lack}")
