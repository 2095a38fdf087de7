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
from lib.store.disk import sync
from lib.store.making import Making
from lib.store.parts import Part, Written, part_path, read_part
from lib.store.sides import SIDES, Side, deal, facts_of, new_side

__all__ = ["COMMIT", "Split", "assemble", "state_of", "whole"]

COMMIT = "COMMIT"

_BUCKET = 1 << 20  # digests compared at once, about


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
    _commit(folder, corpus)


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


def _check_sides(sides: Mapping[str, Side], counts: Mapping[str, Any], split: Split, how: str, making: Making) -> None:
    marks = making.add_bos + making.add_eos
    have = f"data.holdout={split.holdout}, by {how}: of {counts['documents']} documents"
    if not split.holdout and sides["train"].size == marks * sides["train"].documents:
        causes = (
            ", ".join(f"{cause}: {count}" for cause, count in counts["skipped"].items()) or "nothing was passed over"
        )
        raise DataError(
            f"data.path: {counts['documents']} documents hold no text to train on ({causes}); give more text"
        )
    if sides["train"].size == marks * sides["train"].documents:
        raise DataError(f"{have} no text is left to train on; lower data.holdout or give more text")
    if split.holdout and sides["heldout"].size == marks * sides["heldout"].documents:
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
