"""Parts -> the files of a token store: raw chunks first, Zarr's metadata over them, COMMIT last.

Which side of the split a document falls on is decided here, when all of them are known; parts do not depend on it. Ids
go through in blocks, so memory does not grow with the corpus or with a document. The chunks are written by hand, since
an uncompressed Zarr chunk is its bytes and nothing else; plain Zarr reads what comes out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.split import limit, resolve, tail_cut
from lib.errors import DataError
from lib.store.corpus import Corpus
from lib.store.disk import sync
from lib.store.making import Making, ids_dtype
from lib.store.parts import Written, part_path, read_part
from lib.store.stream import CHUNK_IDS

__all__ = ["COMMIT", "SIDES", "Split", "assemble", "state_of", "whole"]

SIDES = ("train", "heldout")
COMMIT = "COMMIT"

_BUFFER = 1 << 20  # many documents are shorter than a page
_BLOCK_IDS = 1 << 21
_BUCKET = 1 << 20  # digests compared at once, about


class Split(NamedTuple):
    """Which part of the documents is held out, and how it is chosen: `auto`, `document` or `tail`."""

    holdout: float
    how: str


class _Facts(NamedTuple):
    """Some documents of a part."""

    lengths: NDArray[np.int64]
    draws: NDArray[np.uint64]
    origin: NDArray[np.int64]  # [documents, 2]
    name_lengths: NDArray[np.int64] | None

    def of(self, which: slice | NDArray[np.bool_]) -> _Facts:
        """Some of them."""
        names = None if self.name_lengths is None else self.name_lengths[which]
        return _Facts(self.lengths[which], self.draws[which], self.origin[which], names)


@dataclass
class _Array:
    """A flat Zarr array while it is written: chunks of `most` items, one after the other."""

    folder: Path
    dtype: np.dtype[Any]
    most: int
    size: int = 0
    chunk: BinaryIO | None = None

    def append(self, items: NDArray[Any]) -> None:
        while len(items):
            number, inside = divmod(self.size, self.most)
            if self.chunk is None:
                self.chunk = open(self.folder / "c" / str(number), "wb", _BUFFER)  # noqa: SIM115 - shut when full
            part = items[: self.most - inside]
            self.chunk.write(part.astype(self.dtype, copy=False).data)
            self.size += len(part)
            items = items[len(part) :]
            if self.size % self.most == 0:
                self.shut()

    def drop(self) -> None:
        """Let go of what is not finished."""
        if self.chunk is not None:
            self.chunk.close()

    def shut(self) -> None:
        if self.chunk is not None:
            if self.size > self.most:  # Zarr wants chunks in full; what is missing is a hole in the file, without room
                self.chunk.truncate(self.most * self.dtype.itemsize)
            self.chunk.flush()
            os.fsync(self.chunk.fileno())
            self.chunk.close()
            self.chunk = None


@dataclass
class _Side:
    """One side while it is written."""

    arrays: dict[str, _Array] = field(default_factory=dict)
    documents: int = 0

    @property
    def size(self) -> int:
        return self.arrays["ids"].size


def assemble(
    building: Path, parts: int, folder: Path, *, corpus: Corpus, making: Making, split: Split, about: Mapping[str, Any]
) -> None:
    """Write a whole store, synced, into a folder that is not there yet.

    Args:
        building: where the parts are.
        parts: how many.
        folder: where to.
        corpus: the files that the parts are of.
        making: how the parts were made.
        split: what is held out.
        about: what the group is to say of itself, beside its counts.

    Raises:
        DataError: a side is left without text.
        OSError: the disk would not take it.
    """
    coder = making.coder()
    written = whole(building, parts)
    documents = sum(part.documents for part in written)
    how = resolve(split.how, documents=documents, share=split.holdout)
    marks = making.add_bos + making.add_eos
    cut = None
    if how == "tail" and split.holdout:
        cut = tail_cut(sum(part.ids - marks * part.documents for part in written), split.holdout)
    with ExitStack() as stack:
        sides = {side: _side(folder / side, making, coder.tokenizer.vocab) for side in SIDES}
        for side in sides.values():
            for array in side.arrays.values():
                stack.callback(array.drop)
            side.arrays["offsets"].append(np.zeros(1, np.int64))
        content, lines = 0, Counter[int]()
        for number, part in enumerate(written):
            facts = _facts(part_path(building, number), part, lines)
            content = _deal(part_path(building, number), facts, sides, making, split, cut, content)
        for side in sides.values():
            for array in side.arrays.values():
                array.shut()
    counts = _counts(building, written, sides, corpus)
    _check_sides(sides, counts, split, how, making)
    _describe(folder, {**about, "holdout_by": how, "counts": counts}, sides, coder.sizes)
    _commit(folder, corpus)


def whole(building: Path, parts: int) -> list[Written]:
    """Read what all parts say of themselves.

    Raises:
        DataError: one is not whole.
    """
    found = []
    for number in range(parts):
        path = part_path(building, number)
        if (written := read_part(path)) is None:
            raise DataError(f"{path}: is not whole; run again to have it written anew")
        found.append(written)
    return found


def state_of(folder: Path) -> dict[str, Any]:
    """Describe what is in a store's folder: the size of each file, and a digest of all metadata."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMMIT)
    digest = blake2b(digest_size=16)
    for path in files:
        if path.name == "zarr.json":
            digest.update(path.read_bytes())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    return {"files": sizes, "zarr": digest.hexdigest()}


def _facts(path: Path, part: Written, lines: Counter[int]) -> _Facts:
    """Read what a part says of its documents; `lines` counts those of each file that came before, and so many more."""

    def read(name: str, dtype: str) -> NDArray[Any]:
        return np.fromfile(path / name, dtype=dtype)

    named = (path / "name_lengths").exists()
    origin, at = read("origin", "<i8").reshape(-1, 2), 0
    for number, documents, more in part.stretches:
        some = origin[at : at + documents, 1]
        some += lines[number] * (some > 0)
        lines[number] += more
        at += documents
    return _Facts(
        read("lengths", "<i8"),
        read("draws", "<u8"),
        origin,
        read("name_lengths", "<i8") if named else None,
    )


def _deal(
    path: Path, facts: _Facts, sides: Mapping[str, _Side], making: Making, split: Split, cut: int | None, content: int
) -> int:
    """Deal the documents of a part out to both sides; `content` ids without marks came before, and so many after."""
    inner = facts.lengths - (making.add_bos + making.add_eos)
    begins = content + np.cumsum(inner) - inner
    late = facts.draws < np.uint64(limit(split.holdout)) if cut is None else begins >= cut
    across = np.flatnonzero((begins < cut) & (begins + inner > cut)) if cut is not None else np.empty(0, np.int64)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open(path / name, "rb"))
            for name in ("ids", "mask", "names")
            if (path / name).exists()
        }
        for begin, stop in _blocks(facts.lengths, across):
            here, some = late[begin:stop], facts.of(slice(begin, stop))
            if begin in across:
                assert cut is not None
                _across(files, sides, some, making, int(cut - begins[begin]))
            elif here.all() or not here.any():
                side = sides["heldout" if here[0] else "train"]
                _copy(files, side, int(some.lengths.sum()))
                _note(files, side, some)
            else:
                _parted(files, sides, some, here)
    return content + int(inner.sum())


def _blocks(lengths: NDArray[np.int64], across: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches of documents of about `_BLOCK_IDS` ids; a document that lies across the cut is one of its own."""
    ends, at, alone = np.cumsum(lengths), 0, set(across.tolist())
    while at < len(lengths):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + _BLOCK_IDS, side="right")))
        for number in alone:
            stop = at + 1 if number == at else min(stop, number) if number > at else stop
        yield at, stop
        at = stop


def _copy(files: Mapping[str, BinaryIO], side: _Side, count: int) -> None:
    """Copy the next ids of a part, and whether each is trained on, to a side."""
    for name in ("ids", "mask"):
        if name not in files:
            continue
        array, left = side.arrays[name], count
        while left:
            some = np.frombuffer(files[name].read(min(left, _BLOCK_IDS) * array.dtype.itemsize), dtype=array.dtype)
            array.append(some)
            left -= len(some)


def _parted(files: Mapping[str, BinaryIO], sides: Mapping[str, _Side], some: _Facts, late: NDArray[np.bool_]) -> None:
    """Deal out documents of both sides at once."""
    of_ids, count = np.repeat(late, some.lengths), int(some.lengths.sum())
    for name in ("ids", "mask"):
        if name in files:
            dtype = sides["train"].arrays[name].dtype
            items = np.frombuffer(files[name].read(count * dtype.itemsize), dtype=dtype)
            sides["train"].arrays[name].append(items[~of_ids])
            sides["heldout"].arrays[name].append(items[of_ids])
    named = some.name_lengths
    names = np.frombuffer(files["names"].read(int(named.sum())), dtype=np.uint8) if named is not None else None
    for side, here in ((sides["train"], ~late), (sides["heldout"], late)):
        own = None if names is None or named is None else names[np.repeat(here, named)]
        _note(files, side, some.of(here), own)


def _note(files: Mapping[str, BinaryIO], side: _Side, some: _Facts, names: NDArray[np.uint8] | None = None) -> None:
    """Note where documents end, where they come from and what they are called."""
    ends = side.size - int(some.lengths.sum()) + np.cumsum(some.lengths)
    side.arrays["offsets"].append(ends)
    side.arrays["origin"].append(some.origin.reshape(-1))
    if some.name_lengths is not None:
        if names is None:
            names = np.frombuffer(files["names"].read(int(some.name_lengths.sum())), dtype=np.uint8)
        before = side.arrays["names"].size
        side.arrays["names"].append(names)
        side.arrays["name_ends"].append(before + np.cumsum(some.name_lengths))
    side.documents += len(some.lengths)


def _across(files: Mapping[str, BinaryIO], sides: Mapping[str, _Side], one: _Facts, making: Making, room: int) -> None:
    """Copy a document that lies across the cut: it becomes two, each with its marks."""
    marks, (whole,) = making.coder().tokenizer, one.lengths.tolist()
    head, tail = room + making.add_bos, whole - room - making.add_bos
    train, heldout = sides["train"], sides["heldout"]
    _copy(files, train, head)
    _mark(train, marks.eos, making.add_eos)
    _mark(heldout, marks.bos or 0, making.add_bos)
    _copy(files, heldout, tail)
    name = None
    if one.name_lengths is not None:
        name = np.frombuffer(files["names"].read(int(one.name_lengths[0])), dtype=np.uint8)
    for side, length in ((train, head + making.add_eos), (heldout, tail + making.add_bos)):
        _note(files, side, one._replace(lengths=np.array([length])), name)


def _mark(side: _Side, mark: int, wanted: bool) -> None:
    if wanted:
        side.arrays["ids"].append(np.array([mark]))
        if "mask" in side.arrays:
            side.arrays["mask"].append(np.ones(1, np.bool_))


def _side(folder: Path, making: Making, vocab: int) -> _Side:
    kinds: dict[str, np.dtype[Any]] = {"ids": ids_dtype(vocab), "offsets": np.dtype("<i8"), "origin": np.dtype("<i8")}
    if making.template is not None:
        kinds["mask"] = np.dtype("?")
    if making.reading.id_key is not None:
        kinds |= {"names": np.dtype("u1"), "name_ends": np.dtype("<i8")}
    side = _Side()
    for name, dtype in kinds.items():
        (folder / name / "c").mkdir(parents=True)
        # The index is one chunk, so that it can be mapped as it is.
        side.arrays[name] = _Array(folder / name, dtype, CHUNK_IDS if name in ("ids", "mask") else 1 << 62)
    return side


def _counts(building: Path, written: Sequence[Written], sides: Mapping[str, _Side], corpus: Corpus) -> dict[str, Any]:
    skipped = Counter(dict(corpus.skipped))
    for part in written:
        skipped.update(part.skipped)
    return {
        "files": len(corpus.entries),
        "documents": sum(part.documents for part in written),
        "empty": sum(part.empty for part in written),
        "duplicates": _duplicates(building, written),
        "text_bytes": sum(part.text_bytes for part in written),
        "counted_bytes": sum(part.counted_bytes for part in written),
        "tokens": sum(side.size for side in sides.values()),
        "skipped": dict(sorted(skipped.items())),
    }


def _duplicates(building: Path, written: Sequence[Written]) -> int:
    """Count documents that were there before, a share of all digests at a time: memory does not grow with the corpus."""
    total = sum(part.documents for part in written)
    buckets, distinct = max(1, -(-total // _BUCKET)), 0
    for bucket in range(buckets):
        some = []
        for number in range(len(written)):
            words = np.fromfile(part_path(building, number) / "digests", dtype="<u8")
            some.append(words[words % np.uint64(buckets) == bucket])
        distinct += len(np.unique(np.concatenate(some))) if some else 0
    return total - distinct


def _check_sides(sides: Mapping[str, _Side], counts: Mapping[str, Any], split: Split, how: str, making: Making) -> None:
    marks = making.add_bos + making.add_eos
    have = f"data.holdout={split.holdout}, by {how}: of {counts['documents']} documents"
    if sides["train"].size == marks * sides["train"].documents:
        raise DataError(f"{have} no text is left to train on; lower data.holdout or give more text")
    if split.holdout and sides["heldout"].size == marks * sides["heldout"].documents:
        raise DataError(f"{have} no text is held out; raise data.holdout, set it to 0, or give more text")


def _describe(folder: Path, attributes: dict[str, Any], sides: Mapping[str, _Side], sizes: NDArray[np.uint16]) -> None:
    import zarr  # a third of a second, which a run that finds its store in the cache need not pay

    root = zarr.create_group(str(folder), zarr_format=3, attributes=attributes)
    for name, side in sides.items():
        facts = {"documents": side.documents, "tokens": side.size}
        group = root.create_group(name, attributes=facts)
        for key, array in side.arrays.items():
            inner = (2,) if key == "origin" else ()
            length, most = ((array.size, array.most), (array.size // 2, array.most // 2))[len(inner)]
            chunks = (max(1, min(length, most)), *inner)
            group.create_array(
                key, shape=(length, *inner), chunks=chunks, dtype=array.dtype, compressors=None, fill_value=0
            )
    (folder / "sizes" / "c").mkdir(parents=True)
    (folder / "sizes" / "c" / "0").write_bytes(sizes.astype("<u2").tobytes())
    root.create_array("sizes", shape=sizes.shape, chunks=sizes.shape, dtype="uint16", compressors=None, fill_value=0)


def _commit(folder: Path, corpus: Corpus) -> None:
    """Sync what Zarr wrote and all folders, and write COMMIT last."""
    entries = ",\n".join(json.dumps(list(entry)) for entry in corpus.entries)
    (folder / "files.json").write_bytes(f"[{entries}]\n".encode())
    for path in (folder / "files.json", folder / "sizes" / "c" / "0", *folder.rglob("zarr.json")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    with open(folder / COMMIT, "wb") as file:
        file.write(json.dumps(state_of(folder)).encode())
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)
