"""Documents -> the files of a token store: raw chunks first, Zarr's metadata over them, COMMIT last.

Text goes through in pieces, so memory does not grow with the corpus or with a document. The chunks are written by
hand, since an uncompressed Zarr chunk is its bytes and nothing else; plain Zarr reads what comes out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lib.data.bytes import BYTES, encode
from lib.data.split import held_out, tail_cut
from lib.errors import DataError
from lib.store.corpus import Corpus, Document, Progress, documents
from lib.store.disk import sync
from lib.store.stream import CHUNK_IDS, ID_BYTES

__all__ = ["COMMIT", "SIDES", "state_of", "write_store"]

SIDES = ("train", "heldout")
COMMIT = "COMMIT"

_BUFFER = 1 << 20  # many documents are shorter than a page


@dataclass
class _Sink:
    """One side while it is written."""

    folder: Path
    offsets: BinaryIO
    chunk: BinaryIO | None = None
    size: int = 0
    documents: int = 0


def write_store(
    folder: Path, corpus: Corpus, *, holdout: float, how: str, attributes: Mapping[str, Any], progress: Progress | None
) -> None:
    """Write a whole store, synced, into a folder that is not there yet.

    Args:
        folder: where.
        corpus: the scanned files.
        holdout: share held out.
        how: `document` or `tail`.
        attributes: what the group is to say of itself, beside its counts.
        progress: told how far the writing is.

    Raises:
        DataError: a side is left without text, or a file changed since the scan.
        OSError: the disk would not take it.
    """
    with ExitStack() as stack:
        sides = {side: _sink(folder / side, stack) for side in SIDES}
        counts = _write_sides(sides, corpus, holdout=holdout, how=how, progress=progress)
        for sink in sides.values():
            _close(sink)
    have = f"data.holdout={holdout}, by {how}: of {counts['documents']} documents"
    if sides["train"].size == sides["train"].documents:
        raise DataError(f"{have} no text is left to train on; lower data.holdout or give more text")
    if holdout and sides["heldout"].size == sides["heldout"].documents:
        raise DataError(f"{have} no text is held out; raise data.holdout, set it to 0, or give more text")
    _describe(folder, {**attributes, "counts": counts}, sides)
    _commit(folder)


def state_of(folder: Path) -> dict[str, Any]:
    """Describe what is in a store's folder: the size of each file, and a digest of all metadata."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMMIT)
    digest = blake2b(digest_size=16)
    for path in files:
        if path.name == "zarr.json":
            digest.update(path.read_bytes())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    return {"files": sizes, "zarr": digest.hexdigest()}


def _write_sides(
    sides: Mapping[str, _Sink], corpus: Corpus, *, holdout: float, how: str, progress: Progress | None
) -> dict[str, int]:
    """Deal the documents out to both sides; return the counts of the corpus."""
    by_tail = how == "tail" and holdout > 0
    cut = tail_cut(corpus.text_bytes, holdout) if by_tail else 0
    counts = {"documents": 0, "empty": 0, "duplicates": 0, "text_bytes": 0}
    seen = set[bytes]()
    for document in documents(corpus):
        at = counts["text_bytes"]
        late = at >= cut if by_tail else held_out(document.digest, holdout)
        sink = sides["heldout" if late else "train"]
        size = 0
        for piece in document.pieces:
            room = cut - at - size
            if by_tail and sink is sides["train"] and room < len(piece):
                # The document that lies across the cut becomes two, each with its end mark.
                _append(sink, encode(piece[:room]))
                _end(sink)
                sink = sides["heldout"]
                _append(sink, encode(piece[room:]))
            else:
                _append(sink, encode(piece))
            size += len(piece)
            if progress:
                progress(at + size, corpus.text_bytes)
        _end(sink)
        _count(counts, document, size, seen)
    counts["tokens"] = sum(sink.size for sink in sides.values())
    return counts


def _count(counts: dict[str, int], document: Document, size: int, seen: set[bytes]) -> None:
    counts["documents"] += 1
    counts["empty"] += not size
    counts["duplicates"] += document.digest in seen
    counts["text_bytes"] += size
    seen.add(document.digest)


def _sink(folder: Path, stack: ExitStack) -> _Sink:
    for part in ("ids/c", "offsets/c"):
        (folder / part).mkdir(parents=True)
    offsets = stack.enter_context(open(folder / "offsets" / "c" / "0", "wb"))  # noqa: SIM115 - the stack shuts it
    sink = _Sink(folder, offsets)
    sink.offsets.write(np.array(0, dtype="<i8").tobytes())
    stack.callback(lambda: sink.chunk and sink.chunk.close())
    return sink


def _append(sink: _Sink, ids: NDArray[np.uint16]) -> None:
    while len(ids):
        number, inside = divmod(sink.size, CHUNK_IDS)
        if sink.chunk is None:
            path = sink.folder / "ids" / "c" / str(number)
            sink.chunk = open(path, "wb", _BUFFER)  # noqa: SIM115 - shut when it is full, or at the end
        part = ids[: CHUNK_IDS - inside]
        sink.chunk.write(part.astype("<u2", copy=False).data)
        sink.size += len(part)
        ids = ids[len(part) :]
        if sink.size % CHUNK_IDS == 0:
            _shut(sink.chunk)
            sink.chunk = None


def _end(sink: _Sink) -> None:
    _append(sink, np.array([BYTES.eos], dtype=np.uint16))
    sink.documents += 1
    sink.offsets.write(np.array(sink.size, dtype="<i8").tobytes())


def _close(sink: _Sink) -> None:
    if sink.chunk is not None:
        if sink.size > CHUNK_IDS:  # Zarr wants each chunk in full; the rest is a hole in the file, which takes no room
            sink.chunk.truncate(CHUNK_IDS * ID_BYTES)
        _shut(sink.chunk)
        sink.chunk = None
    _shut(sink.offsets)


def _shut(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _describe(folder: Path, attributes: dict[str, Any], sides: Mapping[str, _Sink]) -> None:
    import zarr  # a third of a second, which a run that finds its store in the cache need not pay

    root = zarr.create_group(str(folder), zarr_format=3, attributes=attributes)
    for side, sink in sides.items():
        facts = {"documents": sink.documents, "tokens": sink.size, "text_bytes": sink.size - sink.documents}
        group = root.create_group(side, attributes=facts)
        for name, dtype, length, most in (
            ("ids", "uint16", sink.size, CHUNK_IDS),
            ("offsets", "int64", sink.documents + 1, sink.documents + 1),
        ):
            chunk = max(1, min(length, most))
            group.create_array(name, shape=(length,), chunks=(chunk,), dtype=dtype, compressors=None, fill_value=0)


def _commit(folder: Path) -> None:
    """Sync what Zarr wrote and all folders, and write COMMIT last."""
    for path in folder.rglob("zarr.json"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    with open(folder / COMMIT, "wb") as file:
        file.write(json.dumps(state_of(folder)).encode())
        _shut(file)
    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(path)
