"""Documents -> parts of a token store: the work that can be done in any order, by any number of processes, and again.

A part is some stretches of some files, about `PART_BYTES` of them, chosen by the files' names and sizes alone. What is
written of it is all that a store needs to know: ids with their marks, how long each document is, its digest, where it
stands in its file. It appears under its name in one rename, whole; a part that is there is not written again.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from lib.errors import DataError
from lib.store.corpus import Corpus
from lib.store.disk import sync, temporary
from lib.store.encoded import Files, Place, write_records
from lib.store.files import shown, stamp
from lib.store.formats import Kind, kind_of, records, spans
from lib.store.making import Making
from lib.store.record import Reading, Span
from lib.store.remote import open_binary

__all__ = ["Job", "Part", "Written", "part_path", "parts_of", "read_part", "write_part"]

PART_BYTES = 32 << 20
_BUFFER = 1 << 20


class Part(NamedTuple):
    """Some stretches of some files: (number of the file, where it is, its stamp, stretch)."""

    number: int
    stretches: tuple[tuple[int, str, tuple[int, ...], Span], ...]
    size: int


class Job(NamedTuple):
    """A part to be written into a folder."""

    folder: str
    part: Part
    making: Making


class Written(msgspec.Struct, frozen=True):
    """What a written part says of itself."""

    documents: int
    ids: int
    text_bytes: int
    counted_bytes: int
    empty: int
    skipped: dict[str, int]
    stretches: list[tuple[int, int, int]]  # number of the file, documents, lines or rows of the file that belong to it
    sizes: dict[str, int]


def parts_of(corpus: Corpus, reading: Reading) -> list[Part]:
    """Cut a corpus into parts, in the order of its files; the same ones wherever it lies."""
    parts, held, size = list[Part](), list[tuple[int, str, tuple[int, ...], Span]](), 0
    for number, (entry, path, mark) in enumerate(zip(corpus.entries, corpus.paths, corpus.stamps, strict=True)):
        kind = kind_of(path, reading.format)
        some = spans(path, entry.size, kind, reading, target=PART_BYTES)
        share = entry.size // max(1, len(some))
        for span in some:
            if held and size + share > PART_BYTES:
                parts.append(Part(len(parts), tuple(held), size))
                held, size = [], 0
            held.append((number, path, mark, span))
            size += share
    if held:
        parts.append(Part(len(parts), tuple(held), size))
    return parts


def part_path(folder: Path, number: int) -> Path:
    """Where a part lies once it is written."""
    return folder / f"part-{number:06d}"


def read_part(path: Path) -> Written | None:
    """What a part says of itself; none = it is not there, or not whole."""
    try:
        written = msgspec.json.decode((path / "part.json").read_bytes(), type=Written)
        whole = all((path / name).stat().st_size == size for name, size in written.sizes.items())
    except (OSError, msgspec.DecodeError):
        return None
    return written if whole else None


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
    if read_part(final) is None:
        with temporary(folder) as fresh:
            inside = fresh / final.name
            inside.mkdir()
            _write(inside, job.part, job.making)
            sync(inside)
            try:
                os.rename(inside, final)
            except OSError:  # another process was quicker; what it wrote has the same bits
                if read_part(final) is None:
                    raise
            sync(folder)
    return job.part.size


def _write(folder: Path, part: Part, making: Making) -> None:
    coder, skipped = making.coder(), Counter[str]()
    if making.add_bos and coder.tokenizer.bos is None:
        raise ValueError(f"data.add_bos=true: {making.tokenizer} has no begin mark; set data.bos_token or leave it out")
    counts, stretches = Counter[str](), list[tuple[int, int, int]]()
    with ExitStack() as stack:

        def made(name: str) -> BinaryIO:
            return stack.enter_context(open(folder / name, "wb", _BUFFER))

        named = making.reading.id_key is not None
        files = Files(
            made("ids"),
            made("mask") if making.template is not None else None,
            made("lengths"),
            made("digests"),
            made("draws"),
            made("origin"),
            made("names") if named else None,
            made("name_lengths") if named else None,
        )
        for number, path, mark, span in part.stretches:
            kind = kind_of(path, making.reading.format)
            tokenizer = coder.tokenizer
            found = records(path, span, kind, making.reading, skipped, eos=tokenizer.eos, vocab=tokenizer.vocab)
            at = Place(number, path, span, kind, making, coder, counts, skipped)
            before = counts["documents"]
            _check_unchanged(path, mark)
            write_records(files, found, at)
            _check_unchanged(path, mark)
            stretches.append((number, counts["documents"] - before, _lines(path, span, kind)))
        for file in files:
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    about = Written(
        counts["documents"], counts["ids"], counts["text_bytes"], counts["counted_bytes"], counts["empty"],
        dict(sorted(skipped.items())),
        stretches, sizes,
    )  # fmt: skip
    with open(folder / "part.json", "wb") as file:
        file.write(msgspec.json.encode(about))
        file.flush()
        os.fsync(file.fileno())


def _check_unchanged(path: str, mark: tuple[int, ...]) -> None:
    if stamp(path) != mark:
        raise DataError(f"{shown(path)}: changed while it was being read; run again when nothing writes to it")


def _lines(path: str, span: Span, kind: Kind) -> int:
    """Count the lines that begin in a stretch of a file of lines: what the numbers in the next one begin after."""
    if kind.compression or kind.format not in ("text", "jsonl"):
        return 0
    count, left = int(span.start == 0), max(0, span.stop - 1) - max(0, span.start - 1)
    with open_binary(path) as file:
        file.seek(max(0, span.start - 1))
        while left > 0 and (piece := file.read(min(left, _BUFFER))):
            count += piece.count(b"\n")
            left -= len(piece)
    return count
