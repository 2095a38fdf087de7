"""Parquet and Arrow IPC (file and stream) -> documents: a row each, its text in one column.

The column may hold strings of any width, plain or as a dictionary, or bytes that are UTF-8. A file without the column is
an error even where bad records are skipped, for it is the file that is wrong there and not a record; the order of columns
does not matter, and other columns are not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lib.errors import DataError
from lib.store.faults import REPAIR, REPLACED, Fault, not_utf8, settle, wrong_kind
from lib.store.jsonl import name_of
from lib.store.names import shown
from lib.store.record import Reading, Record, Span
from lib.store.remote import said
from lib.store.tables import opened, rows_before

__all__ = ["table_records"]


def table_records(path: str, span: Span, form: str, reading: Reading, skipped: Counter[str]) -> Iterator[Record]:
    """Read the rows of a stretch of a table.

    Args:
        path: the file.
        span: parts of it.
        form: "parquet" or "arrow".
        reading: columns, kind of record, and what a bad one does.
        skipped: counts by cause, added to.

    Yields:
        The records; the first row of the span has number 1.

    Raises:
        DataError: the file cannot be read, lacks the column, or a row is bad and `reading.errors` does not let it pass.
    """
    number = 1
    with opened(path, form) as table:
        columns = _columns(path, table.schema, reading)
        for batch in table.read(span.start, span.stop, columns):
            rows = _talks if reading.chat else _documents
            where = partial(_place, path, span, form)
            yield from rows(batch, number, reading, skipped, where)
            number += batch.num_rows
        skipped["empty file"] += number == 1 and span == (0, len(table.sizes))


def _columns(path: str, schema: Any, reading: Reading) -> list[str]:
    """Choose the columns to read."""
    import pyarrow as pa  # type: ignore[import-untyped]

    if reading.chat:
        if len(set(schema.names)) < len(schema.names):
            raise DataError(
                f"{shown(path)}: two columns have one name, must differ (columns: {schema.names}); rename them"
            )
        # Times may lie beyond what Python can hold, and no conversation is made of them.
        return [field.name for field in schema if not pa.types.is_temporal(field.type)]
    key, names = reading.text_key, schema.names
    if names.count(key) != 1:
        have = f"{names.count(key)} columns {key!r} (columns: {', '.join(map(repr, names))})"
        raise DataError(f"{shown(path)}: {have}, must be one; set data.text_key")
    kind = schema.field(key).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(check(inner) for check in _text_types()):
        raise DataError(f"{shown(path)}: column {key!r} is {kind}, must be of strings; set data.text_key")
    return [key] if reading.id_key in (None, key) or reading.id_key not in names else [key, reading.id_key]


def _text_types() -> tuple[Callable[[Any], bool], ...]:
    from pyarrow import types

    strings = types.is_string, types.is_large_string, types.is_string_view
    return *strings, types.is_binary, types.is_large_binary, types.is_binary_view, types.is_null


def _documents(
    batch: Any, first: int, reading: Reading, skipped: Counter[str], where: Callable[[int, int], str]
) -> Iterator[Record]:
    names: list[str | None] = [None] * batch.num_rows
    if reading.id_key in batch.schema.names:
        names = [name_of(one) for one in batch.column(reading.id_key).to_pylist()]
    for row, (text, name) in enumerate(zip(_texts(batch.column(reading.text_key)), names, strict=True), first):
        fault = wrong_kind(text, reading.text_key) if text is None else None
        if text is not None and not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                if reading.errors == "replace":
                    skipped[REPLACED] += 1
                    text = text.decode(errors="replace").encode()
                else:
                    fault = not_utf8(error)
        if fault:
            settle(fault, reading.errors, skipped, partial(where, row, fault.column))
        elif text is not None:
            yield Record(row, (text,), name=name)


def _texts(column: Any) -> list[bytes | None]:
    """Take the bytes out of a column; what it says of itself is checked, since a damaged one can point anywhere."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column.validate(full=True)
        column = column.dictionary_decode()
    elif pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
        column.validate(full=True)
    else:
        column.validate()
    plain = column.cast(pa.large_binary())
    plain.validate(full=True)
    texts: list[bytes | None] = plain.to_pylist()
    return texts


def _talks(
    batch: Any, first: int, reading: Reading, skipped: Counter[str], where: Callable[[int, int], str]
) -> Iterator[Record]:
    rows: Sequence[dict[str, Any] | Fault] = _rows(batch)
    if batch.num_rows > 1 and isinstance(rows[0], Fault):
        rows = [one for number in range(batch.num_rows) for one in _rows(batch.slice(number, 1))]
    for row, fields in enumerate(rows, first):
        if isinstance(fields, Fault):
            settle(fields, reading.errors, skipped, partial(where, row, fields.column))
        else:
            yield Record(row, fields=fields, name=name_of(fields.get(reading.id_key)) if reading.id_key else None)


def _rows(batch: Any) -> Sequence[dict[str, Any] | Fault]:
    """Take all rows out of a batch, or one fault if not all of them are valid."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (UnicodeDecodeError, pa.ArrowInvalid) as error:
        return [Fault("row is damaged", f"the row is damaged ({said(error)}), must be valid; {REPAIR}")]
    return rows


def _place(path: str, span: Span, form: str, row: int, column: int) -> str:
    return f"{shown(path)}:{rows_before(path, span, form) + row}:{column}"
