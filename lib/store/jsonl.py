"""JSONL -> documents: one object a line, its text under one key.

A byte-order mark is dropped where a line begins (files joined by `cat` have them inside), blank lines are passed over
and counted, of a key that stands twice the last one counts, a surrogate without its partner becomes U+FFFD and is
counted. Fields that are not asked for may hold anything that is JSON. Whatever else is wrong is an error that names
file, line and column, both from 1 (a column is a byte of its line), or is counted by its cause.

A run of good lines goes through a typed decoder; only a run with something odd in it is read line by line, and only
the odd lines by the slower parser of the standard library, which knows the column of a mistake.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from lib.errors import DataError
from lib.store.faults import REPAIR, REPLACED, SURROGATE, Fault, kind_name, missing, not_utf8, settle, wrong_kind
from lib.store.lines import BOM, lines_before, runs
from lib.store.names import shown
from lib.store.record import Reading, Record, Span

__all__ = ["jsonl_records", "name_of"]

_UNSURE = (msgspec.DecodeError, UnicodeError, RecursionError)
_BYTE = re.compile(r"\(byte (\d+)\)")
_ALONE = re.compile("[\ud800-\udfff]")


class _Way(NamedTuple):
    """How lines become records: the keys, a typed decoder, and what makes a record of what it gives."""

    key: str
    id_key: str | None
    chat: bool
    decode: Callable[[bytes], Any]
    typed: Callable[[int, Any], Record]


def jsonl_records(path: str, span: Span, compression: str, reading: Reading, skipped: Counter[str]) -> Iterator[Record]:
    """Read the records that begin in a stretch of a JSONL file.

    Args:
        path: the file.
        span: bytes of it.
        compression: "", "gz" or "zst".
        reading: keys, kind of record, and what a bad one does.
        skipped: counts by cause, added to.

    Yields:
        The records; the first line of the span has number 1.

    Raises:
        ValueError: the keys cannot be.
        DataError: the file cannot be read, or a line is bad and `reading.errors` does not let it pass.
    """
    way, number, empty = _way(reading), 1, span.start == 0
    for at, run in runs(path, span, compression):
        if at == 0 and run.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{shown(path)}: UTF-16, not UTF-8; save it as UTF-8 text")
        if at == 0 and run == BOM:
            break
        empty, lines = False, run.removesuffix(b"\n").split(b"\n")
        good = _sure(way, run, lines, number)
        if good is None:
            yield from _careful(path, span, lines, number, reading, way, skipped)
        else:
            yield from good
        number += len(lines)
    skipped["empty file"] += empty


def name_of(value: Any) -> str | None:
    """Write what stands under the id key as a name."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _way(reading: Reading) -> _Way:
    key, id_key = reading.text_key, reading.id_key

    def document(number: int, row: Any) -> Record:
        return Record(number, (row.text.encode(),), name=None if row.id is None else name_of(row.id))

    def nameless(number: int, row: Any) -> Record:
        return Record(number, (row.text.encode(),))

    def talk(number: int, fields: dict[str, Any]) -> Record:
        return Record(number, fields=fields, name=name_of(fields.get(id_key)) if id_key else None)

    if reading.chat:
        return _Way(key, id_key, True, msgspec.json.Decoder(dict[str, Any]).decode, talk)
    named: list[Any] = [("text", str), ("id", Any, None)] if id_key else [("text", str)]
    try:
        row = msgspec.defstruct("Row", named, rename={"text": key, "id": id_key or "id"})
    except ValueError:
        keys = f"data.text_key={key!r}, data.id_key={id_key!r}"
        want = "must differ and hold no quotes, backslashes or control characters"
        raise ValueError(f"{keys} {want}; rename the fields") from None
    return _Way(key, id_key, False, msgspec.json.Decoder(row).decode, document if id_key else nameless)


def _sure(way: _Way, run: bytes, lines: Sequence[bytes], number: int) -> list[Record] | None:
    """Read a run that has nothing odd in it; none = it has."""
    try:
        if not run.isascii():
            run.decode()
        return [way.typed(line, row) for line, row in enumerate(map(way.decode, lines), number)]
    except _UNSURE:
        return None


def _careful(
    path: str, span: Span, lines: Sequence[bytes], first: int, reading: Reading, way: _Way, skipped: Counter[str]
) -> Iterator[Record]:
    for number, line in enumerate(lines, first):
        text = line
        while text.startswith(BOM):
            text = text.removeprefix(BOM)
        padded = reading.errors == "skip" and text != text.strip(b"\0")
        if padded:
            skipped["NUL padding"] += 1
            text = text.strip(b"\0")
        if not text.strip():
            skipped["blank line"] += not padded
            continue
        got = _one(text, reading, way, skipped)
        if isinstance(got, Record):
            yield got._replace(line=number)
        else:
            column = got.column + len(line) - len(text)
            settle(got, reading.errors, skipped, partial(_place, path, span, number, column))


def _place(path: str, span: Span, number: int, column: int) -> str:
    return f"{shown(path)}:{lines_before(path, [span.start])[0] + number}:{column}"


def _one(line: bytes, reading: Reading, way: _Way, skipped: Counter[str]) -> Record | Fault:
    """Read one line."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        if reading.errors != "replace":
            return not_utf8(error)
        skipped[REPLACED] += 1
        text = line.decode(errors="replace")
    try:
        return way.typed(0, way.decode(text.encode()))
    except _UNSURE as error:
        found = _BYTE.search(str(error))
        return _parsed(text, way, skipped, int(found[1]) + 1 if found else 1)


def _parsed(text: str, way: _Way, skipped: Counter[str], column: int) -> Record | Fault:
    """Read a line that the typed decoder refuses at this column: by what it is, or by what is wrong with it."""
    try:
        value = json.loads(text, parse_int=_whole, parse_constant=_refused)
    except json.JSONDecodeError as error:
        what = "NUL byte" if text.startswith("\0", error.pos) else error.msg.removesuffix(" at")
        return _no_json(text, what, len(text[: error.pos].encode()) + 1)
    except RecursionError:
        return Fault("nested too deeply", f"nested too deeply, must be flatter; {REPAIR}")
    except _ConstantError as error:
        # The typed decoder may have stopped behind the sign.
        at = text.encode("utf-8", "surrogatepass").find(str(error).encode(), max(0, column - 2))
        return _no_json(text, f"{error} is no number", at + 1 if at >= 0 else column)
    if not isinstance(value, dict):
        if isinstance(value, list) and any(isinstance(one, dict) for one in value):
            return _no_json(text, "", 1)
        return Fault("not an object", f"the record is {kind_name(value)}, must be an object; {REPAIR}")
    used = value if way.chat else {name: value[name] for name in (way.key, way.id_key) if name in value}
    clean = _mended(used)
    skipped[SURROGATE] += clean != used
    if way.chat:
        return way.typed(0, clean)
    if way.key not in clean:
        return missing(way.key, value)
    if not isinstance(clean[way.key], str):
        return wrong_kind(clean[way.key], way.key)
    return Record(0, (clean[way.key].encode(),), name=name_of(clean.get(way.id_key)))


def _no_json(text: str, what: str, column: int) -> Fault:
    start = text.strip()
    if start.startswith("["):
        column, says = 1, "looks like a JSON array, must be one record a line; rewrite it with jq -c '.[]'"
    elif start == "{":
        column, says = 1, "looks like pretty-printed JSON, must be one record a line; rewrite it with jq -c ."
    else:
        says = f"no JSON ({what}), must be one object a line; {REPAIR}"
    return Fault("no JSON", says, column)


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return _ALONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(one) for one in value]
    if isinstance(value, dict):
        return {_mended(name): _mended(one) for name, one in value.items()}
    return value


class _ConstantError(Exception):
    """NaN or Infinity, which Python's parser takes for numbers."""


def _refused(name: str) -> float:
    raise _ConstantError(name)


def _whole(digits: str) -> int | float:
    # Python refuses to turn very long digits into an int; as a float they are infinite, as 1e400 is.
    return int(digits) if len(digits) <= 4000 else float(digits)
