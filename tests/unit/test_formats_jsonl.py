"""JSONL as people have it: which bytes a record gives, and what each bad line is told; messages in full."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lib.errors import DataError
from lib.store.formats import Kind, records
from lib.store.record import Reading, Span
from tests.formats import put, read, refused, texts

GOOD = b'{"text": "a"}\n'
MARK = b"\xef\xbb\xbf"
OBJECT = "must be one object a line; repair it or set data.errors=skip"
REPAIR = "repair it or set data.errors=skip"


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize(("data", "values"), [
    (b'{"text": "a\\r\\nb"}\r\n{"text": "c"}\r\n', [b"a\r\nb", b"c"]),
    (MARK + GOOD, [b"a"]),
    (GOOD + MARK + GOOD, [b"a", b"a"]),
    (b'{"text": "' + MARK + b'a' + MARK + b'"}', [MARK + b"a" + MARK]),
    (GOOD + b'{"text": "b"}', [b"a", b"b"]),
    (b'{"text": "a\\u0000b\\t"}', [b"a\0b\t"]),
    (b'{"text": "\\ud83d\\ude00"}', [b"\xf0\x9f\x98\x80"]),
    ('{"text": "a\u2028b\u2029c\u0085d\x7f"}\n{"text": "e"}'.encode(), ["a\u2028b\u2029c\u0085d\x7f".encode(), b"e"]),
    (b'{"text": ""}\n{"text": " \\n\\t "}', [b"", b" \n\t "]),
    (b'  {"text": " \\n a \\n\\n"}\t \n', [b" \n a \n\n"]),
    (b'{"text": "e\xcc\x81"}\n{"text": "\xc3\xa9"}', [b"e\xcc\x81", b"\xc3\xa9"]),
    (b'{"text": "a", "text": "b"}', [b"b"]),
    (b'{"text": null, "text": "b"}', [b"b"]),
    (lines({"a": [1], "text": "x"}, {"a": {"b": None}, "text": "y"}, {"text": "z", "a": "s"}), [b"x", b"y", b"z"]),
    (b'{"x": 1e400, "y": ' + b"9" * 5000 + b', "z": "\\ud800", "text": "a"}', [b"a"]),
    (b'{"te\\u0078t": "a"}', [b"a"]),
], ids=["Q01 line ends", "Q02 mark at the start", "Q03 mark at a later line", "Q03 mark inside a text",
        "Q06 no last line feed", "Q09 an escaped NUL", "Q14 a surrogate pair", "Q15 other separators",
        "Q17 Q18 empty and blank texts", "Q27 white space in a text", "Q29 no normalising", "Q21 a key twice",
        "Q21 a key twice of two kinds", "Q30 other fields of any kind", "Q25 numbers beyond all bounds", "an escaped key"],
)  # fmt: skip
def test_what_is_json_gives_its_text_byte_for_byte(tmp_path: Path, data: bytes, values: list[bytes]) -> None:
    assert texts(put(tmp_path / "x.jsonl", data)) == values


def test_blank_lines_are_counted_and_line_numbers_stay_right(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", b"\n" + GOOD + b" \t\r\n\n" + GOOD + b"\n  ")
    got = read(path)
    assert (got.values, got.places) == ([b"a", b"a"], ["x.jsonl:2", "x.jsonl:5"])
    assert got.skipped == {"blank line": 5}
    put(path, b"\n\n" + GOOD + b"{,}")
    refused(path, f"@:4:2: no JSON (Expecting property name enclosed in double quotes), {OBJECT}")


@pytest.mark.parametrize(("line", "says", "cause"), [
    (b'{"text": "half a li', f"10: no JSON (Unterminated string starting), {OBJECT}", "no JSON"),
    (b'{"text": "a\tb"}', f"12: no JSON (Invalid control character), {OBJECT}", "no JSON"),
    (b'{"text": "a\0b"}', f"12: no JSON (NUL byte), {OBJECT}", "no JSON"),
    (b'{"text": "caf\xe9"}', "14: byte e9 is not UTF-8; save the file as UTF-8 or set data.errors=replace", "not UTF-8"),
    (b'{"id": "\xff", "text": "a"}', "9: byte ff is not UTF-8; save the file as UTF-8 or set data.errors=replace",
     "not UTF-8"),
    ('{"n": "\u00e9", "text": 3 4}'.encode(), f"23: no JSON (Expecting ',' delimiter), {OBJECT}", "no JSON"),
    (b'{"text": "a"} {"text": "b"}', f"15: no JSON (Extra data), {OBJECT}", "no JSON"),
    (b'{"content": "a", "id": 1}', "1: no field 'text' (fields: 'content', 'id'), must be there; "
     "set data.text_key or data.errors=skip", "text is missing"),
    (b"{}", "1: no field 'text' (fields: none), must be there; set data.text_key or data.errors=skip",
     "text is missing"),
    (b'{"text": null}', f"1: field 'text' is null, must be a string; {REPAIR}", "text is null"),
    (b'{"text": 3}', f"1: field 'text' is a number, must be a string; {REPAIR}", "text is a number"),
    (b'{"text": ["a"]}', f"1: field 'text' is an array, must be a string; {REPAIR}", "text is an array"),
    (b'{"text": {"x": 1}}', f"1: field 'text' is an object, must be a string; {REPAIR}", "text is an object"),
    (b'{"text": true}', f"1: field 'text' is a truth value, must be a string; {REPAIR}", "text is a truth value"),
    (b'["a"]', f"1: the record is an array, must be an object; {REPAIR}", "not an object"),
    (b'"a"', f"1: the record is a string, must be an object; {REPAIR}", "not an object"),
    (b"3", f"1: the record is a number, must be an object; {REPAIR}", "not an object"),
    (b"null", f"1: the record is null, must be an object; {REPAIR}", "not an object"),
    (b'[{"text": "a"},', "1: looks like a JSON array, must be one record a line; rewrite it with jq -c '.[]'", "no JSON"),
    (b"{", "1: looks like pretty-printed JSON, must be one record a line; rewrite it with jq -c .", "no JSON"),
    (b'{"x": NaN, "text": "a"}', f"7: no JSON (NaN is no number), {OBJECT}", "no JSON"),
    (b'{"x": [-Infinity], "text": "a"}', f"8: no JSON (-Infinity is no number), {OBJECT}", "no JSON"),
    (b'{"x": Infinity, "text": "a"}', f"7: no JSON (Infinity is no number), {OBJECT}", "no JSON"),
    ('{"\u00e9": 1, "x": -Infinity}'.encode(), f"16: no JSON (-Infinity is no number), {OBJECT}", "no JSON"),
    (b'-Infinity', f"1: no JSON (-Infinity is no number), {OBJECT}", "no JSON"),
    (b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
     f"1: nested too deeply, must be flatter; {REPAIR}", "nested too deeply"),
], ids=["Q07 half a line", "Q09 a raw tab", "Q09 a raw NUL", "Q11 latin-1", "Q11 latin-1 in another field",
        "a column is counted in bytes", "two objects", "Q19 another key", "Q19 no key", "B127 null", "B127 number",
        "B127 array", "B127 object", "B127 truth", "Q22 array", "Q22 string", "Q22 number", "Q22 null", "Q23 JSON array",
        "Q23 pretty-printed", "Q25 NaN", "Q25 -Infinity", "Q25 Infinity",
        "Q25 -Infinity behind another letter", "Q25 -Infinity alone", "Q26 deep nesting"])  # fmt: skip
def test_a_bad_line_is_named_or_counted(tmp_path: Path, line: bytes, says: str, cause: str) -> None:
    path = put(tmp_path / "x.jsonl", GOOD + line + b"\n" + GOOD)
    refused(path, f"@:2:{says}")
    got = read(path, errors="skip")
    assert (got.values, got.places, got.skipped) == ([b"a", b"a"], ["x.jsonl:1", "x.jsonl:3"], {cause: 1})


def test_an_array_on_one_line_is_told_from_a_record(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", b'[{"text": "a"}, {"text": "b"}]')
    refused(path, "@:1:1: looks like a JSON array, must be one record a line; rewrite it with jq -c '.[]'")


@pytest.mark.parametrize("padding", [b"\0\0\0", b"\0\0\0\n"], ids=["before a record", "on a line of its own"])
def test_nul_padding_is_an_error_and_both_neighbours_survive_skipping(tmp_path: Path, padding: bytes) -> None:
    path = put(tmp_path / "x.jsonl", GOOD + padding + GOOD + b"\0" * 9)
    refused(path, f"@:2:1: no JSON (NUL byte), {OBJECT}")
    got = read(path, errors="skip")
    assert got.values == [b"a", b"a"]
    assert got.skipped == {"NUL padding": 2}


def test_bytes_that_are_no_utf8_are_replaced_on_demand_and_nothing_else_is(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", GOOD + b'{"text": "caf\xe9"}\n' + GOOD)
    got = read(path, errors="replace")
    assert got.values == [b"a", b"caf\xef\xbf\xbd", b"a"]
    assert got.skipped == {"bytes that are no UTF-8 replaced": 1}
    refused(put(path, b'{"text": 3}'), f"@:1:1: field 'text' is a number, must be a string; {REPAIR}", errors="replace")


@pytest.mark.parametrize("text", [b"a\\ud800b", b"a\\udc00b"])
def test_a_lone_surrogate_becomes_a_replacement_character_and_is_counted(tmp_path: Path, text: bytes) -> None:
    got = read(put(tmp_path / "x.jsonl", b'{"text": "' + text + b'"}'))
    assert got.values == [b"a\xef\xbf\xbdb"]
    assert got.skipped == {"lone surrogate replaced": 1}


def test_utf16_is_named(tmp_path: Path) -> None:
    refused(
        put(tmp_path / "x.jsonl", '\ufeff{"text": "a"}'.encode("utf-16-le")),
        "@: UTF-16, not UTF-8; save it as UTF-8 text",
    )


def test_a_very_long_record_between_short_ones_is_whole(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", GOOD + lines({"text": "x" * 20_000_000}) + GOOD)
    assert list(map(len, texts(path))) == [1, 20_000_000, 1]
    assert read(path, target=1 << 20).values == [b"a", b"x" * 20_000_000, b"a"]


@pytest.mark.parametrize("data", [b"", MARK])
def test_a_file_without_lines_is_counted(tmp_path: Path, data: bytes) -> None:
    assert read(put(tmp_path / "x.jsonl", data)) == ([], [], [], {"empty file": 1})


def test_keys_are_settings(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", lines({"body": "a", "id": 7}, {"body": "b", "id": "n\u00e9"}, {"body": "c"},
                                           {"body": "d\ud800", "id": 1.5}))  # fmt: skip
    got = read(path, text_key="body", id_key="id")
    assert got.values == [b"a", b"b", b"c", b"d\xef\xbf\xbd"]
    assert got.names == ["7", "n\u00e9", None, "1.5"]
    assert read(path, text_key="body").names == [None] * 4


@pytest.mark.parametrize(("key", "id_key"), [("text", "text"), ('a"b', None), ("a\nb", "id")])
def test_keys_that_cannot_be_are_a_mistake_of_the_config(tmp_path: Path, key: str, id_key: str | None) -> None:
    want = "must differ and hold no quotes, backslashes or control characters; rename the fields"
    message = f"data.text_key={key!r}, data.id_key={id_key!r} {want}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(put(tmp_path / "x.jsonl", GOOD), text_key=key, id_key=id_key)


def test_conversations_come_as_their_fields(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "\u00e9"}], "id": 1, "n": 1.5}
    path = put(tmp_path / "x.jsonl", lines(talk) + b'{"messages": "\\ud800"}\n')
    got = read(path, chat=True, id_key="id")
    assert (got.values, got.names) == ([talk, {"messages": "\ufffd"}], ["1", None])
    assert got.skipped == {"lone surrogate replaced": 1}
    refused(put(path, b"[1]"), f"@:1:1: the record is an array, must be an object; {REPAIR}", chat=True)


def test_a_line_is_found_in_the_file_from_a_stretch_in_its_middle(tmp_path: Path) -> None:
    path = put(tmp_path / "x.jsonl", GOOD * 500 + b'{"text": 3}\n' + GOOD * 100)
    refused(path, f"@:501:1: field 'text' is a number, must be a string; {REPAIR}", target=999)
    got = read(path, target=999, errors="skip")
    assert got.places == [f"x.jsonl:{line}" for line in range(1, 602) if line != 501]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(DataError) as caught:
        list(records(str(path), Span(0, 9), Kind("jsonl", ""), Reading(), Counter()))
    assert str(caught.value) == f"{path}: cannot be read (No such file or directory); allow reading or remove it"


def test_a_file_that_cannot_be_read_to_its_end_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    refused(tmp_path / "x.jsonl", "@: cannot be read (Is a directory); allow reading or remove it")
