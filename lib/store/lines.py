"""Stretches of a file as runs of whole lines.

Only a line feed ends a line; separators of other readers (U+2028, U+0085, form feed, ...) are text. A stretch owns the
lines that begin in it, so whatever bytes a file is cut at, each of its lines is read exactly once. A run holds as many
lines as came with one piece of the file: memory grows with the longest line alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lib.errors import DataError
from lib.store.compressed import PIECE, packing, pieces
from lib.store.names import shown
from lib.store.record import Span
from lib.store.remote import binary

__all__ = ["BOM", "LONGEST", "after_blank", "lines_before", "not_text", "runs", "without_mark"]

BOM = b"\xef\xbb\xbf"
LONGEST = 1 << 30
"""Bytes of a line, or of a block of lines, that are held at most."""

_HEAD = 8192  # a NUL among so many first bytes means that a file is binary, much as in git


def runs(path: str, span: Span, compression: str, *, to_end: bool = False) -> Iterator[tuple[int, bytes]]:
    """Read the lines that begin in a stretch of a file.

    Args:
        path: the file.
        span: bytes [start, stop) of the file; a compressed one is always read whole.
        compression: "", "gz" or "zst".
        to_end: go on to the end of the file.

    Yields:
        Where a run of lines begins in the file, and the run; each line ends with its line feed, but for the last one of
        a file, which may lack it.

    Raises:
        DataError: the file cannot be read, or a line is longer than 1 GiB.
    """
    if span.stop <= span.start and not compression:
        return
    stop = None if compression or to_end else span.stop
    held: list[bytes] = []
    at, size = -1, 0
    for begin, piece in _owned(path, span.start, stop, compression):
        at = begin if at < 0 else at
        end = piece.rfind(b"\n") + 1
        if end:
            run = b"".join([*held, piece[:end]])
            yield at, run
            held, at, size = [], at + len(run), 0
        if end < len(piece):
            held.append(piece[end:])
            size += len(held[-1])
        if size > LONGEST:
            raise DataError(f"{shown(path)}: the line at byte {at} has over {LONGEST} bytes, must be shorter; split it")
    if held:
        yield at, b"".join(held)


def lines_before(path: str, starts: Sequence[int]) -> list[int]:
    """Count the lines of a file before the first that begins at each of these bytes (rising) or later."""
    counts: list[int] = []
    at, ended = 0, 0
    source = pieces(path)
    piece = b""
    for start in starts:
        # The line feed before that line is the first at `start - 1` or later.
        while start and at + len(piece) < start:
            ended += piece.count(b"\n")
            at += len(piece)
            piece = next(source, b"")
            if not piece:
                break
        counts.append(ended + piece.count(b"\n", 0, max(0, start - 1 - at)) + 1 if start else 0)
    return counts


def after_blank(path: str, at: int) -> bool:
    """Tell whether the line before the one that begins at byte `at` is blank, or there is none."""
    with binary(path) as file:
        stop = at - 1  # of its line feed
        while stop > 0:
            start = max(0, stop - 4096)
            file.seek(start)
            back = file.read(stop - start)
            text = without_mark(back) if start == 0 else back
            if line := text[text.rfind(b"\n") + 1 :].strip():
                return not line
            if b"\n" in text:
                return True
            stop = start
    return True


def not_text(head: bytes) -> str | None:
    """Say why a file with these first bytes is no text, and what to do; none = nothing speaks against it.

    Bytes are counted as offsets, from 0.
    """
    if packed := packing(head):  # within what has been unpacked
        return f"begins as {packed[0]} does inside, must be text; unpack it"
    nul = head.find(b"\0", 0, _HEAD)
    if nul < 0:
        return None
    wide = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    return ("UTF-16, not UTF-8" if wide else "binary, not text") + f" (NUL at byte {nul}); save it as UTF-8 text"


def without_mark(piece: bytes) -> bytes:
    """Drop a byte-order mark."""
    return piece.removeprefix(BOM)


def _owned(path: str, start: int, stop: int | None, compression: str) -> Iterator[tuple[int, bytes]]:
    """Read from the first line that begins at `start` or later up to the first that begins at `stop` or later."""
    at, inside = max(start - 1, 0), start == 0
    for piece in pieces(path, compression, at):
        begin = 0
        if not inside:
            begin = piece.find(b"\n") + 1
            inside = begin > 0
            if inside and stop is not None and at + begin >= stop:
                return
        end = 0
        if stop is not None and at + len(piece) >= stop:
            end = piece.find(b"\n", max(begin, stop - 1 - at)) + 1
        if inside and begin < (end or len(piece)):
            yield at + begin, piece[begin : end or len(piece)]
        if end:
            return
        at += len(piece)


assert PIECE >= _HEAD  # the head of a file comes in one piece
