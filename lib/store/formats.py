"""Any file -> records: the format by its name, stretches that can be read on their own, and what is in them.

Whatever the format, memory does not grow with the file, and a record is read by exactly one stretch of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lib.errors import DataError
from lib.store.arrays import array_records
from lib.store.columns import table_records
from lib.store.jsonl import jsonl_records
from lib.store.lines import lines_before
from lib.store.names import shown
from lib.store.record import Reading, Record, Span
from lib.store.tables import rows_before, table_spans
from lib.store.text import text_records

__all__ = ["SIDE_CAR", "Kind", "first_lines", "kind_of", "place_of", "records", "spans"]

SIDE_CAR = ".bin.json"
"""How the name of the file ends that says what a raw token file holds."""

_SUFFIXES: Mapping[str, str] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".npy": "npy",
    ".bin": "bin",
}


class Kind(NamedTuple):
    """What a file is read as.

    Attributes:
        format: "text", "jsonl", "parquet", "arrow", "npy" or "bin".
        compression: "", "gz" or "zst".
    """

    format: str
    compression: str


def kind_of(name: str, format: str = "auto") -> Kind:  # noqa: A002 - the setting has this name
    """Choose how to read a file, by the end of its name in either case; what has no known one is text.

    Args:
        name: of the file.
        format: one of `lib.store.record.FORMATS`; any but "auto" stands above the name, which then only tells whether
            text or JSONL is compressed.

    >>> kind_of("a/B.JSONL.gz"), kind_of("notes"), kind_of("x.bin", "text")
    (Kind(format='jsonl', compression='gz'), Kind(format='text', compression=''), Kind(format='text', compression=''))
    """
    low = name.lower()
    compression = next((one for one in ("gz", "zst") if low.endswith("." + one)), "")
    inner = low.removesuffix("." + compression)
    by_name = next((kind for suffix, kind in _SUFFIXES.items() if inner.endswith(suffix)), "text")
    return Kind(by_name if format == "auto" else format, compression)


def spans(path: str, size: int, kind: Kind, reading: Reading, *, target: int) -> list[Span]:
    """Cut a file into stretches of about `target` bytes; together they hold each record once.

    Args:
        path: where it is.
        size: bytes in it.
        kind: what it is read as.
        reading: options.
        target: bytes wanted in a stretch, >= 1.

    Returns:
        The stretches in order, at least one; the same for the same file.

    Raises:
        DataError: the file cannot be read.
    """
    _refuse_packed(path, kind)
    if kind.format in ("parquet", "arrow"):
        return table_spans(path, size, kind.format, target)
    whole = kind.compression or (kind.format == "text" and reading.split == "file")
    if kind.format in ("text", "jsonl") and not whole:
        return [Span(at, min(at + target, size)) for at in range(0, size, target)] or [Span(0, 0)]
    return [Span(0, size)]


def records(
    path: str,
    span: Span,
    kind: Kind,
    reading: Reading,
    skipped: Counter[str],
    *,
    eos: int | None = None,
    vocab: int | None = None,
) -> Iterator[Record]:
    """Read the records of a stretch of a file.

    Args:
        path: where it is.
        span: one of its `spans`.
        kind: what it is read as.
        reading: options.
        skipped: counts by cause of what was passed over or mended, added to while reading.
        eos: end mark that cuts token files into documents; none = each is one document.
        vocab: ids of token files must be below it; none = any id.

    Yields:
        The records in order. Lines and rows are numbered from 1 in the span; `place_of` finds them in the file.

    Raises:
        DataError: the file cannot be read, or a record is bad and `reading.errors` does not let it pass.
    """
    _refuse_packed(path, kind)
    if kind.format in ("parquet", "arrow"):
        yield from table_records(path, span, kind.format, reading, skipped)
    elif kind.format in ("npy", "bin"):
        yield from array_records(path, kind.format, reading, skipped, eos=eos, vocab=vocab)
    elif kind.format == "jsonl":
        yield from jsonl_records(path, span, kind.compression, reading, skipped)
    else:
        yield from text_records(path, span, kind.compression, reading.split, skipped)


def first_lines(path: str, cut: Sequence[Span], kind: Kind) -> list[int]:
    """Count what stands in a file before each of its stretches: lines, rows, or documents of a token file."""
    if kind.format in ("parquet", "arrow"):
        return [rows_before(path, span, kind.format) for span in cut]
    return lines_before(path, [span.start for span in cut])


def place_of(path: str, span: Span, kind: Kind, line: int) -> str:
    """Write where a record of a stretch stands in its file, for an error: `file:line`, or `file` for a whole one."""
    if line == 0:
        return shown(path)
    return f"{shown(path)}:{first_lines(path, [span], kind)[0] + line}"


def _refuse_packed(path: str, kind: Kind) -> None:
    if kind.compression and kind.format not in ("text", "jsonl"):
        raise DataError(f"{shown(path)}: {kind.format} within .{kind.compression}, must be unpacked; unpack it")
