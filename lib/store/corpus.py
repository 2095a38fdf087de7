"""Which files a corpus is made of, with an identity that is made of their content.

Every regular file is read once for its digest; what the records in it are is another module's affair. Archives and binary
files of no known format are passed over and counted where they are met, and refused where they are named. What cannot be
read stops the run before its first step.

The identity is relative names, sizes and content digests. All content is read for it each time, since no time stamp
proves that a file is unchanged; this runs at the speed of the hash, near 1 GB/s.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from lib.errors import DataError
from lib.store.compressed import packing
from lib.store.files import STDLIB, Found, find, refuse, stamp
from lib.store.formats import SIDE_CAR, Kind, kind_of
from lib.store.lines import not_text
from lib.store.names import shown, unreadable
from lib.store.remote import binary, exists, is_remote

__all__ = ["STDLIB", "Corpus", "Entry", "Progress", "differences", "identity_of", "scan"]

# Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]

_BOM = b"\xef\xbb\xbf"
_PIECE = 1 << 20


class Entry(NamedTuple):
    """One file, as far as it decides what is trained on.

    Attributes:
        name: relative to what was named, with `/` between folders.
        size: bytes in the file.
        digest: blake2b, 16 bytes in hex, of the file's content after a byte-order mark; of a raw token file also of
            its side-car.
    """

    name: str
    size: int
    digest: str


class Corpus(NamedTuple):
    """What a scan found.

    Attributes:
        entries: the files, in the order of their names' bytes.
        paths: where each of them is now; no part of the identity.
        stamps: size, time and place of each before it was read, to notice a change until it is read again.
        skipped: how many files or folders were passed over, by cause.
        size: bytes in all files together.
        identity: digest over all entries.
    """

    entries: tuple[Entry, ...]
    paths: tuple[str, ...]
    stamps: tuple[tuple[int, ...], ...]
    skipped: Mapping[str, int]
    size: int
    identity: str


class _Read(NamedTuple):
    entry: Entry
    path: str
    stamp: tuple[int, ...]


def scan(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    progress: Progress | None = None,
    *,
    format: str = "auto",  # noqa: A002 - the name of the setting
) -> Corpus:
    """Find the files and read each of them once for its digest.

    Args:
        path: a file, a folder, a pattern, `stdlib:`, an address (s3://...), or a list of these; the order of a list does
            not matter.
        progress: told how far the reading is.
        format: what the files are (`lib.store.record.FORMATS`); `auto` = by their names.

    Returns:
        The corpus; the same content under the same relative names has the same identity, wherever and whenever.

    Raises:
        ValueError: the path is empty.
        DataError: nothing is found, or something named or met cannot be read as text.
    """
    items = [os.fspath(path)] if isinstance(path, (str, os.PathLike)) else [os.fspath(item) for item in path]
    if not items or not all(items):
        raise ValueError(f"path={path!r} must name files, folders or patterns; name some, or {STDLIB}")
    skipped: Counter[str] = Counter()
    found = find(items, skipped)
    tick = _ticker(sum(each.size for each in found), progress)
    read = [one for each in found if (one := _read(each, kind_of(each.name, format), skipped, tick))]
    # Where the names in a list of folders meet, content decides on the order, never the absolute path.
    read.sort(key=lambda one: (one.entry.name.encode(), one.entry))
    entries = tuple(one.entry for one in read)
    size = sum(entry.size for entry in entries)
    if not size:
        causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(skipped.items())) or "nothing in it"
        why = f"all files are empty ({len(entries)})" if entries else f"no file of text there ({causes})"
        raise DataError(f"{', '.join(map(shown, items))}: {why}; name files that hold text")
    paths, stamps = tuple(one.path for one in read), tuple(one.stamp for one in read)
    return Corpus(entries, paths, stamps, dict(sorted(skipped.items())), size, identity_of(entries))


def identity_of(entries: Sequence[Entry]) -> str:
    """Digest a set of files: names, sizes, contents; neither where they are nor when they were touched."""
    digest = blake2b(digest_size=16)
    for name, size, content in sorted(entries):
        digest.update(f"{len(name)} {name} {size} {content}\n".encode())
    return digest.hexdigest()


def differences(old: Sequence[Entry], new: Sequence[Entry]) -> list[str]:
    """Say file by file how two sets differ; an empty list = the same data.

    >>> differences([Entry("a", 1, "x"), Entry("b", 1, "x")], [Entry("a", 2, "y"), Entry("c", 1, "x")])
    ['a: 1 bytes, now 2', 'b: missing', 'c: new']
    """
    before, after = Counter(Entry(*one) for one in old), Counter(Entry(*one) for one in new)
    gone, came = sorted((before - after).elements()), sorted((after - before).elements())
    lines = []
    for name in sorted({one.name for one in gone + came}):
        was, now = [one for one in gone if one.name == name], [one for one in came if one.name == name]
        for a, b in zip(was, now, strict=False):
            lines.append(f"{name}: {a.size} bytes, now {b.size}" if a.size != b.size else f"{name}: content changed")
        lines += [f"{name}: missing"] * (len(was) - len(now)) + [f"{name}: new"] * (len(now) - len(was))
    return lines


def _ticker(total: int, progress: Progress | None) -> Callable[[int], None]:
    done = 0

    def tick(size: int) -> None:
        nonlocal done
        done = min(done + size, total)
        if progress:
            progress(done, total)

    return tick


def _read(found: Found, kind: Kind, skipped: Counter[str], tick: Callable[[int], None]) -> _Read | None:
    """Read a file for its entry; none if it is passed over."""
    if found.path.endswith(SIDE_CAR):
        refuse(found, "describes a token file", "name the token file itself", skipped)
        return None
    digest, size, before = blake2b(digest_size=16), 0, stamp(found.path)
    for number, piece in enumerate(_pieces(found.path)):
        if number == 0 and kind == ("text", "") and _passed(found, piece, skipped):
            return None
        digest.update(piece[len(_BOM) :] if number == 0 and piece.startswith(_BOM) else piece)
        size += len(piece)
        tick(len(piece))
    if kind.format == "bin" and exists(f"{found.path}.json"):  # which says what the bytes are
        for piece in _pieces(f"{found.path}.json"):
            digest.update(piece)
    return _Read(Entry(shown(found.name), size, digest.hexdigest()), found.path, before)


def _passed(found: Found, head: bytes, skipped: Counter[str]) -> bool:
    """Pass over a file that is no text by its first bytes (counted from 0); one that was named is an error."""
    if packed := packing(head):
        name, suffix = packed
        if found.named:
            fix = f"name it {shown(found.path)}.{suffix}" if suffix else "unpack it"
            raise DataError(f"{shown(found.path)}: begins as {name} does, must be plain; {fix}")
        skipped[f"archive, not read: {name}"] += 1
        return True
    if cause := not_text(head):
        what, _, fix = cause.partition("; ")
        refuse(found, what if found.named else what.partition(" (")[0], fix, skipped)
    return cause is not None


def _pieces(path: str) -> Iterator[bytes]:
    if is_remote(path):
        with binary(path) as file:
            while piece := file.read(_PIECE):
                yield piece
        return
    try:  # bare: a corpus may be a million small files
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while piece := os.read(descriptor, _PIECE):
                yield piece
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable(path, error.strerror) from None
