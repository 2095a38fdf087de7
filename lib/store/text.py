"""Plain text -> documents: a file each, or a line each, or a block of lines between blank ones each.

The bytes are kept whatever they are; what is no UTF-8 is the tokenizer's affair. A byte-order mark at the start of a
file is dropped, and a document that is a line or a block loses its own line end (LF or CR LF), nothing else. A line of
nothing but white space is blank: it is no document of its own, and it is what stands between blocks. An empty file is
one empty document, or holds none where documents are lines or blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lib.errors import DataError
from lib.store.compressed import pieces
from lib.store.lines import BOM, LONGEST, after_blank, lines_before, not_text, runs, without_mark
from lib.store.names import shown
from lib.store.record import Record, Span

__all__ = ["text_records"]


def text_records(path: str, span: Span, compression: str, split: str, skipped: Counter[str]) -> Iterator[Record]:
    """Read the documents that begin in a stretch of a text file.

    Args:
        path: the file.
        span: bytes of it.
        compression: "", "gz" or "zst".
        split: "file", "line" or "block".
        skipped: counts of what was passed over by cause, added to.

    Yields:
        The documents; the first line of the span has number 1, a whole file 0.

    Raises:
        DataError: the file cannot be read or is no text.
    """
    if split == "file":  # opened once: where each file is a document, that is much of what it costs
        yield Record(0, text=_whole(path, compression))
        return
    if span.start == 0:
        _check_text(path, next(pieces(path, compression), b""))
    if split == "line":
        yield from _lines(path, span, compression, skipped)
    else:
        yield from _blocks(path, span, compression, skipped)


def _whole(path: str, compression: str) -> Iterator[bytes]:
    for number, piece in enumerate(pieces(path, compression)):
        if number == 0:
            _check_text(path, piece)
        yield piece if number else without_mark(piece)


def _check_text(path: str, head: bytes) -> None:
    if cause := not_text(head):
        raise DataError(f"{shown(path)}: {cause}")


def _lines(path: str, span: Span, compression: str, skipped: Counter[str]) -> Iterator[Record]:
    for number, at, lines in _cut(path, span, compression, skipped):
        texts = [line.removesuffix(b"\r") for line in lines[:-1]]
        if lines[-1]:
            texts.append(lines[-1])
        if at == 0 and texts:
            texts[0] = without_mark(texts[0])
        if all(map(bytes.strip, texts)):
            yield from (Record(line, (text,)) for line, text in enumerate(texts, number))
        else:
            skipped["blank line"] += sum(not text.strip() for text in texts)
            yield from (Record(line, (text,)) for line, text in enumerate(texts, number) if text.strip())


def _blocks(path: str, span: Span, compression: str, skipped: Counter[str]) -> Iterator[Record]:
    block: list[bytes] = []
    size, opened, behind, ended = 0, 0, True, True
    for number, at, lines in _cut(path, span, compression, skipped, to_end=True):
        if number == 1 and at:
            behind = after_blank(path, at)  # if not, the stretch begins within a block that an earlier one owns
        ended = not lines[-1]
        for line, text in enumerate(lines[:-1] if ended else lines, number):
            if not block and not compression and at >= span.stop:
                return
            text, at = text if at else without_mark(text), at + len(text) + 1
            if not text.strip():
                if block:
                    yield Record(opened, (b"\n".join(block).removesuffix(b"\r"),))
                block, size, behind = [], 0, True
            elif behind:
                opened = opened if block else line
                block.append(text)
                size += len(text)
        if size > LONGEST:
            long = f"the block at line {lines_before(path, [span.start])[0] + opened} has over {LONGEST} bytes"
            raise DataError(f"{shown(path)}: {long}, must be shorter; split the file into lines")
    if block:
        text = b"\n".join(block)
        yield Record(opened, (text.removesuffix(b"\r") if ended else text,))


def _cut(
    path: str, span: Span, compression: str, skipped: Counter[str], *, to_end: bool = False
) -> Iterator[tuple[int, int, list[bytes]]]:
    """Cut runs at line feeds; give the number and place of the first line of each, and its lines.

    The last of the lines is what stands behind the last line feed.
    """
    number, empty = 1, span.start == 0
    for at, run in runs(path, span, compression, to_end=to_end):
        if at == 0 and run == BOM:
            break
        empty, lines = False, run.split(b"\n")
        yield number, at, lines
        number += len(lines) - 1
    skipped["empty file"] += empty
