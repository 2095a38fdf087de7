"""Parquet and Arrow IPC files (also streams): what columns they have, and stretches that can be read on their own.

A stretch is row groups of a Parquet file or batches of an Arrow file; an Arrow stream is read whole. Rows are read a few
hundred at a time, so memory grows with a row group's pages or with a batch, not with a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from lib.errors import DataError
from lib.store.names import shown
from lib.store.record import Span
from lib.store.remote import binary, said

__all__ = ["Table", "opened", "rows_before", "table_spans"]

_ROWS = 256  # read at a time
_BUFFER = 1 << 20
_MAGIC = b"ARROW1"
_FEATHER_1 = b"FEA1"  # of the time before Arrow had a file format
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class Table(NamedTuple):
    """An open file.

    Attributes:
        schema: its columns.
        sizes: bytes in each of its parts (row groups, batches), near enough to cut by.
        rows: how many rows are in the parts before one.
        read: gives some columns of the parts [start, stop), a few rows at a time.
    """

    schema: Any
    sizes: Sequence[int]
    rows: Callable[[int], int]
    read: Callable[[int, int, list[str]], Iterator[Any]]


@contextmanager
def opened(path: str, form: str, size: int = 0) -> Iterator[Table]:
    """Open a table; whatever goes wrong within is an error that names the file."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        lack = f"pyarrow is not installed, must be there to read .{form}"
        raise DataError(f"{shown(path)}: {lack}; pip install 'purestep[data]'") from None
    with binary(path) as file:
        try:
            if form == "parquet":
                yield _parquet(file)
            elif (head := file.read(len(_MAGIC))).startswith(_FEATHER_1):
                fix = "read it with pyarrow.feather.read_table and write it with pyarrow.feather.write_feather"
                raise DataError(f"{shown(path)}: Feather version 1, must be Arrow IPC (Feather version 2); {fix}")
            elif head == _MAGIC:
                yield _arrow_file(file, size)
            else:
                yield _arrow_stream(path, file, size)
        except (pa.ArrowException, OSError) as error:
            name = {"parquet": "Parquet", "arrow": "Arrow IPC"}[form]
            raise DataError(f"{shown(path)}: no whole {name} file ({said(error)}); fetch it again") from None


def table_spans(path: str, size: int, form: str, target: int) -> list[Span]:
    """Cut a table into runs of parts of about `target` bytes."""
    with opened(path, form, size) as table:
        found, start, taken = list[Span](), 0, 0
        for number, part in enumerate(table.sizes):
            taken += part
            if taken >= target:
                found.append(Span(start, number + 1))
                start, taken = number + 1, 0
        if start < len(table.sizes) or not found:
            found.append(Span(start, len(table.sizes)))
        return found


def rows_before(path: str, span: Span, form: str) -> int:
    """Count the rows before a stretch."""
    if span.start == 0:
        return 0
    with opened(path, form) as table:
        return table.rows(span.start)


def _parquet(file: BinaryIO) -> Table:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True)
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]

    def read(start: int, stop: int, columns: list[str]) -> Iterator[Any]:
        groups = list(range(start, stop))
        return table.iter_batches(_ROWS, row_groups=groups, columns=columns, use_threads=False) if groups else iter(())

    sizes = [group.total_byte_size for group in groups]
    return Table(table.schema_arrow, sizes, lambda part: sum(group.num_rows for group in groups[:part]), read)


def _arrow_file(file: BinaryIO, size: int) -> Table:
    import pyarrow as pa

    file.seek(0)
    table = pa.ipc.open_file(file)
    count = table.num_record_batches

    def read(start: int, stop: int, columns: list[str]) -> Iterator[Any]:
        for number in range(start, stop):
            yield from _few(table.get_batch(number), columns)

    sizes = [size // count] * count if count else []
    return Table(
        table.schema, sizes, lambda part: sum(table.get_batch(number).num_rows for number in range(part)), read
    )


def _arrow_stream(path: str, file: BinaryIO, size: int) -> Table:
    import pyarrow as pa

    # A stream that is cut between two batches looks whole but for this mark, which all writers set.
    end = file.seek(0, 2)
    file.seek(max(0, end - len(_STREAM_END)))
    whole = file.read() == _STREAM_END
    file.seek(0)
    table = pa.ipc.open_stream(file)
    if not whole:
        raise DataError(
            f"{shown(path)}: Arrow stream without an end mark, must have one; it is cut short, fetch it again"
        )

    def read(start: int, stop: int, columns: list[str]) -> Iterator[Any]:
        for batch in table if start < stop else ():
            yield from _few(batch, columns)

    return Table(table.schema, [size], lambda part: 0, read)


def _few(batch: Any, columns: list[str]) -> Iterator[Any]:
    chosen = batch.select(columns)
    for start in range(0, batch.num_rows, _ROWS):
        yield chosen.slice(start, _ROWS)
