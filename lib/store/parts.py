"""Documents -> parts of a token store: the work that can be done in any order, by any number of processes, and again.

A part is some stretches of some files, about `PART_BYTES` of them, chosen by the files' names and sizes alone. What is
written of it is all that a store needs to know: ids with their marks, how long each document is, its digest, where it
stands in its file. It appears under its name in one rename, whole; a part that is there is not written again, unless it
is damaged or of other stretches. Nothing is synced, for most parts live no longer than a minute: what an earlier
process left is held against its checksums before it is used.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import msgspec

from lib.errors import DataError
from lib.store.corpus import Corpus
from lib.store.disk import discard, temporary
from lib.store.documents import Place
from lib.store.encoded import Files, write_records
from lib.store.files import stamp
from lib.store.formats import Kind, first_lines, kind_of, records, spans
from lib.store.headers import side_car_of
from lib.store.making import Making
from lib.store.names import shown
from lib.store.record import Reading, Record, Span
from lib.store.remote import binary

__all__ = ["Job", "Part", "Stretch", "Written", "part_path", "parts_of", "read_part", "write_part"]

PART_BYTES = 32 << 20
_BUFFER = 1 << 20


class Stretch(NamedTuple):
    """What a part reads of a file.

    Attributes:
        file: its number in the corpus.
        path: where it is.
        stamp: what it was like when it was scanned.
        kind: what it is read as.
        span: the stretch.
        last: whether nothing of the file comes after.
    """

    file: int
    path: str
    stamp: tuple[int, ...]
    kind: Kind
    span: Span
    last: bool


class Part(NamedTuple):
    """Some stretches of some files, and how many bytes of files they stand for."""

    number: int
    stretches: tuple[Stretch, ...]
    size: int


class Job(NamedTuple):
    """A part to be written into a folder."""

    folder: str
    part: Part
    making: Making


class Written(msgspec.Struct, frozen=True):
    """What a written part says of itself.

    Attributes:
        documents: how many.
        ids: how many, with marks.
        text_bytes: bytes of text in them.
        counted_bytes: bytes of text that the ids stand for.
        empty: empty documents met.
        skipped: what was passed over or mended, by cause.
        cut: file, start and stop of each of its stretches.
        found: documents of each stretch, and how many lines of the file belong to it.
        files: bytes in each of its files, and their crc32c.
    """

    documents: int
    ids: int
    text_bytes: int
    counted_bytes: int
    empty: int
    skipped: dict[str, int]
    cut: list[tuple[int, int, int]]
    found: list[tuple[int, int]]
    files: dict[str, tuple[int, int]]


def parts_of(corpus: Corpus, reading: Reading) -> list[Part]:
    """Cut a corpus into parts, in the order of its files; the same ones wherever it lies."""
    parts, held, size = list[Part](), list[Stretch](), 0
    for number, (entry, path, mark) in enumerate(zip(corpus.entries, corpus.paths, corpus.stamps, strict=True)):
        kind = kind_of(entry.name, reading.format)
        some = spans(path, entry.size, kind, reading, target=PART_BYTES)
        share = entry.size // max(1, len(some))
        for span in some:
            if held and size + share > PART_BYTES:
                parts.append(Part(len(parts), tuple(held), size))
                held, size = [], 0
            held.append(Stretch(number, path, mark, kind, span, span == some[-1]))
            size += share
    if held:
        parts.append(Part(len(parts), tuple(held), size))
    return parts


def part_path(folder: Path, number: int) -> Path:
    """Where a part lies once it is written."""
    return folder / f"part-{number:06d}"


def read_part(folder: Path, part: Part, *, verify: bool = False) -> Written | None:
    """What a part says of itself; none = it is not there, not whole, or of other stretches.

    Args:
        folder: where parts are.
        part: which.
        verify: read all of it, and hold it against its checksums.
    """
    path = part_path(folder, part.number)
    try:
        written = msgspec.json.decode((path / "part.json").read_bytes(), type=Written)
        whole = all((path / name).stat().st_size == size for name, (size, _) in written.files.items())
        whole = whole and not (verify and any(_crc(path / name) != crc for name, (_, crc) in written.files.items()))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return written if whole and written.cut == _cut(part) else None


def write_part(job: Job) -> int:
    """Write a part, unless it is there.

    Returns:
        The bytes of files it stands for.

    Raises:
        DataError: a record is bad, or a file cannot be read.
        OSError: the disk would not take it.
    """
    folder = Path(job.folder)
    final = part_path(folder, job.part.number)
    if read_part(folder, job.part, verify=True) is None:
        with temporary(folder) as fresh:
            inside = fresh / final.name
            inside.mkdir()
            _write(inside, job.part, job.making)
            # Else another process was quicker; what it wrote has the same bits.
            if read_part(folder, job.part, verify=True) is None:
                if os.path.lexists(final):
                    discard(final)
                os.rename(inside, final)
    return job.part.size


def _cut(part: Part) -> list[tuple[int, int, int]]:
    return [(one.file, one.span.start, one.span.stop) for one in part.stretches]


def _write(folder: Path, part: Part, making: Making) -> None:
    coder, counts, found, skipped = making.coder(), Counter[str](), Counter[int](), Counter[str]()
    places = [
        Place(n, one.file, one.path, one.span, one.kind, _first(one), making, coder, counts, found, skipped)
        for n, one in enumerate(part.stretches)
    ]
    with ExitStack() as stack:
        files = Files(**{
            name: stack.enter_context(open(folder / name, "wb", _BUFFER)) for name in _names(making)
        })  # fmt: skip
        write_records(files, _read(part, places))
    about = Written(
        counts["documents"], counts["ids"], counts["text_bytes"], counts["counted_bytes"], counts["empty"],
        skipped=dict(sorted((+skipped).items())),
        cut=_cut(part),
        found=[(found[n], _lines(one)) for n, one in enumerate(part.stretches)],
        files={path.name: (path.stat().st_size, _crc(path)) for path in folder.iterdir()},
    )  # fmt: skip
    (folder / "part.json").write_bytes(msgspec.json.encode(about))


def _read(part: Part, places: Sequence[Place]) -> Iterator[tuple[Place, Record]]:
    """Read the records of all stretches, each with where it is from."""
    for one, at in zip(part.stretches, places, strict=True):
        marks, reading = at.coder.tokenizer, at.making.reading
        _check_unchanged(one)
        if one.kind.format == "bin":
            _check_side_car(one, marks.name)
        for record in records(
            one.path,
            one.span,
            one.kind,
            reading,
            at.skipped,
            eos=None if marks.eos < 0 else marks.eos,
            vocab=marks.vocab,
        ):
            yield at, record
        _check_unchanged(one)


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_BUFFER):
            crc = google_crc32c.extend(crc, piece)
    return int(crc)


def _names(making: Making) -> list[str]:
    names = ["ids", "lengths", "digests", "draws", "origin"]
    names += ["mask"] if making.template is not None else []
    return names + (["names", "name_lengths"] if making.reading.id_key is not None else [])


def _check_side_car(one: Stretch, tokenizer: str) -> None:
    told = side_car_of(one.path)
    if told is not None and told.tokenizer not in (None, tokenizer):
        raise DataError(
            f"{shown(one.path)}.json: tokenizer={told.tokenizer} must be {tokenizer}, which data.tokenizer names; "
            f"name the one that made the ids"
        )


def _check_unchanged(one: Stretch) -> None:
    if stamp(one.path) != one.stamp:
        raise DataError(f"{shown(one.path)}: changed while it was being read; run again when nothing writes to it")


def _first(one: Stretch) -> int:
    """How many rows of a table come before a stretch; lines are counted up when all parts are there."""
    return first_lines(one.path, [one.span], one.kind)[0] if one.kind.format in ("parquet", "arrow") else 0


def _lines(one: Stretch) -> int:
    """Count the lines that begin in a stretch of a file of lines: what the numbers in the next one begin after."""
    if one.last or one.kind.compression or one.kind.format not in ("text", "jsonl"):
        return 0
    start, stop = one.span
    count, left = int(start == 0), max(0, stop - 1) - max(0, start - 1)
    with binary(one.path) as file:
        file.seek(max(0, start - 1))
        while left > 0 and (piece := file.read(min(left, _BUFFER))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count
