"""Parts -> the files of a token store: raw chunks first, Zarr's metadata over them, COMMIT last.

Plain Zarr reads what comes out. COMMIT holds the size of every file and a digest of all metadata, so that damage is seen
without reading the ids.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.split import resolve, tail_cut
from lib.errors import DataError
from lib.store.corpus import Corpus
from lib.store.disk import sync, temporary
from lib.store.making import Making
from lib.store.parts import Part, Written, part_path, read_part
from lib.store.sides import SIDES, Side, deal, facts_of, new_side

__all__ = ["COMMIT", "Split", "assemble", "state_of", "whole"]

COMMIT = "COMMIT"

_AT_ONCE = 1 << 16  # digests that are compared at once


class Split(NamedTuple):
    """Which part of the documents is held out, and how it is chosen: `auto`, `document` or `tail`."""

    holdout: float
    how: str


def assemble(
    building: Path,
    parts: Sequence[Part],
    folder: Path,
    *,
    corpus: Corpus,
    making: Making,
    split: Split,
    about: Mapping[str, Any],
) -> None:
    """Write a whole store, synced, into a folder that is not there yet.

    Args:
        building: where the parts are.
        parts: all of them.
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
        sides = {side: new_side(folder / side, making, coder.tokenizer.vocab) for side in SIDES}
        for side in sides.values():
            for array in side.arrays.values():
                stack.callback(array.drop)
        content, lines = 0, Counter[int]()
        for part, told in zip(parts, written, strict=True):
            facts = facts_of(building, part, told, lines)
            path = part_path(building, part.number)
            content = deal(path, facts, sides, making, share=split.holdout, cut=cut, content=content)
        arrays = [array for side in sides.values() for array in side.arrays.values()]
        for array in arrays:
            array.shut()
        for array in arrays:
            array.settle()
    counts = _counts(building, written, sides, corpus)
    _check_sides(sides, counts, split, how, making)
    _describe(folder, {**about, "holdout_by": how, "counts": counts}, sides, coder.sizes)
    _commit(folder)


def whole(building: Path, parts: Sequence[Part]) -> list[Written]:
    """Read what all parts say of themselves.

    Raises:
        DataError: one is not whole.
    """
    found = []
    for part in parts:
        if (written := read_part(building, part)) is None:
            raise DataError(f"{part_path(building, part.number)}: is not whole; run again to have it written anew")
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


def _counts(building: Path, written: Sequence[Written], sides: Mapping[str, Side], corpus: Corpus) -> dict[str, Any]:
    skipped = Counter[str]()
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
    """Count documents that were there before; the digests of many are first dealt out by their top bits, to files."""
    total = sum(part.documents for part in written)
    digests = [part_path(building, number) / "digests" for number in range(len(written))]
    if total > _AT_ONCE:
        with temporary(building) as dealt:
            return total - sum(_distinct([path]) for path in _dealt(digests, dealt))
    return total - _distinct(digests)


def _distinct(paths: Sequence[Path]) -> int:
    words = [np.fromfile(path, dtype="<u8") for path in paths]
    return len(np.unique(np.concatenate(words))) if words else 0


def _dealt(digests: Sequence[Path], folder: Path) -> list[Path]:
    """Deal digests out to files, equal ones to the same file."""
    paths = [folder / f"{number:03}" for number in range(256)]
    for digest in digests:
        words = np.fromfile(digest, dtype="<u8")
        words = words[np.argsort(words >> np.uint64(56), kind="stable")]
        stops = np.searchsorted(words >> np.uint64(56), np.arange(257, dtype=np.uint64))
        for path, begin, stop in zip(paths, stops[:-1], stops[1:], strict=True):
            if stop > begin:
                with open(path, "ab") as file:
                    file.write(words[begin:stop].tobytes())
    return [path for path in paths if path.exists()]


def _check_sides(sides: Mapping[str, Side], counts: Mapping[str, Any], split: Split, how: str, making: Making) -> None:
    marks = making.add_bos + making.add_eos
    bare = {name: side.size == marks * side.documents for name, side in sides.items()}
    documents, files = (
        f"{counts[name]} {name[: None if counts[name] != 1 else -1]}" for name in ("documents", "files")
    )
    if all(bare.values()):
        what = f"{documents} without any text" if counts["documents"] else "no document"
        causes = ", ".join(f"{cause}: {count}" for cause, count in counts["skipped"].items())
        raise DataError(
            f"{files} read: {what} found ({causes or 'nothing was passed over'}), must hold text; give more"
        )
    have = f"data.holdout={split.holdout}, by {how}: of {documents}"
    if bare["train"]:
        raise DataError(f"{have} no text is left to train on; lower data.holdout or give more text")
    if split.holdout and bare["heldout"]:
        raise DataError(f"{have} no text is held out; raise data.holdout, set it to 0, or give more text")


def _describe(folder: Path, attributes: dict[str, Any], sides: Mapping[str, Side], sizes: NDArray[np.uint16]) -> None:
    import zarr  # a third of a second, which a run that finds its store in the cache need not pay

    root = zarr.create_group(str(folder), zarr_format=3, attributes=attributes)
    for name, side in sides.items():
        facts = {"documents": side.documents, "tokens": side.size}
        group = root.create_group(name, attributes=facts)
        for key, array in side.arrays.items():
            shape, chunks = (array.size, *array.inner), (max(1, min(array.size, array.most)), *array.inner)
            group.create_array(key, shape=shape, chunks=chunks, dtype=array.dtype, compressors=None, fill_value=0)
    (folder / "sizes" / "c").mkdir(parents=True)
    (folder / "sizes" / "c" / "0").write_bytes(sizes.astype("<u2").tobytes())
    root.create_array("sizes", shape=sizes.shape, chunks=sizes.shape, dtype="uint16", compressors=None, fill_value=0)


def _commit(folder: Path) -> None:
    """Sync what Zarr wrote and all folders, and write COMMIT last."""
    for path in (folder / "sizes" / "c" / "0", *folder.rglob("zarr.json")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    with open(folder / COMMIT, "wb") as file:
        file.write(json.dumps(state_of(folder)).encode())
        file.flush()
        os.fsync(file.fileno())
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)
