"""Documents laid end to end with their marks, written to the files of a part.

Records go through in batches, and a text too long to hold piece by piece, so memory does not grow with a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.split import drawn
from lib.store.coders import pieces
from lib.store.documents import Document, Met, Place, digest_of, documents_of, taken
from lib.store.faults import REPLACED
from lib.store.making import ids_dtype
from lib.store.record import Record

__all__ = ["Files", "write_records"]

_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 18, 4096  # so many are encoded at once
_BLOCK_IDS = 1 << 20


class Files(NamedTuple):
    """The files of a part, open for writing."""

    ids: BinaryIO
    lengths: BinaryIO
    digests: BinaryIO
    draws: BinaryIO
    origin: BinaryIO
    mask: BinaryIO | None = None
    names: BinaryIO | None = None
    name_lengths: BinaryIO | None = None


class _Laid(NamedTuple):
    """Documents end to end, without the marks that are still to be added."""

    mets: Sequence[Met]
    flat: NDArray[np.integer]
    lengths: NDArray[np.int64]
    trained: NDArray[np.bool_] | None  # none = all of it
    own: NDArray[np.bool_]  # may have brought its marks along
    digests: list[bytes]
    size: int
    counted: int  # bytes of text that the ids stand for


def write_records(files: Files, found: Iterable[tuple[Place, Record]]) -> None:
    """Write the documents of a part, of whichever of its stretches.

    Raises:
        DataError: a record is bad.
    """
    for batch in _batches(found):
        if isinstance(batch, list):
            if laid := _laid(batch):
                _write(files, laid)
        else:
            _write_long(files, *batch)


def _batches(found: Iterable[tuple[Place, Record]]) -> Iterator[list[Met] | tuple[Met, Iterator[_Block]]]:
    """Group records that are small; a long document comes alone, block by block."""
    batch, size = list[Met](), 0
    for at, record in found:
        if record.ids is not None and len(record.ids) > _BLOCK_IDS:
            if batch:
                yield batch
            met = Met(at, record, b"")
            yield met, _id_blocks(met)
            batch, size = [], 0
            continue
        if record.text is None:
            batch.append(Met(at, record, b""))
            size += 64 if record.ids is None else record.ids.nbytes
        else:
            text = iter(record.text)
            head = next(text, b"")
            after = next(text, None)
            if after is not None:
                if batch:
                    yield batch
                met = Met(at, record, b"")
                yield met, _text_blocks(met, _chained(head, after, text))
                batch, size = [], 0
                continue
            batch.append(Met(at, record, head))
            size += len(head)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _chained(head: bytes, after: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield after
    yield from rest


def _laid(batch: list[Met]) -> _Laid | None:
    """Lay a batch end to end; none = nothing of it is left."""
    at = batch[0].at
    if at.coder.tokenizer.name == "bytes" and all(met.record.text is not None for met in batch):
        laid = _of_bytes(batch)
    else:
        made = [(met, one) for met, one in zip(batch, documents_of(batch), strict=True) if one]
        if not made:
            return None
        laid = _of_documents([met for met, _ in made], [one for _, one in made])
    at.counts["empty"] += int((laid.lengths == 0).sum())
    if not (at.making.add_bos or at.making.add_eos):
        laid = _without_empty(laid)
    return laid if len(laid.lengths) else None


def _of_bytes(batch: list[Met]) -> _Laid:
    """Texts as bytes, all of them in one go."""
    texts = [met.text for met in batch]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(batch))
    (flat,) = batch[0].at.coder.encode([b"".join(texts)])
    return _Laid(
        batch, flat, lengths, None, np.zeros(len(batch), np.bool_), list(map(digest_of, texts)), len(flat), len(flat)
    )


def _of_documents(mets: list[Met], documents: Sequence[Document]) -> _Laid:
    masks = [np.ones(len(one.ids), np.bool_) if one.mask is None else one.mask for one in documents]
    coder = mets[0].at.coder
    flat = np.concatenate([one.ids.astype(ids_dtype(coder.tokenizer.vocab), copy=False) for one in documents])
    return _Laid(
        mets,
        flat,
        np.array([len(one.ids) for one in documents], dtype=np.int64),
        np.concatenate(masks),
        np.array([one.own for one in documents]),
        [one.digest for one in documents],
        sum(one.size for one in documents),
        int(coder.sizes[flat].sum(dtype=np.int64)),
    )


def _without_empty(laid: _Laid) -> _Laid:
    """Without any mark an empty document would be none."""
    some = laid.lengths > 0
    which = np.flatnonzero(some).tolist()
    return laid._replace(
        mets=[laid.mets[n] for n in which],
        lengths=laid.lengths[some],
        own=laid.own[some],
        digests=[laid.digests[n] for n in which],
    )


def _write(files: Files, laid: _Laid) -> None:
    at, flat, lengths = laid.mets[0].at, laid.flat, laid.lengths
    marks = at.coder.tokenizer
    ends = np.cumsum(lengths)
    begins = ends - lengths
    bos, eos = _missing(laid, begins, ends, at)
    where = np.concatenate([begins[bos], ends[eos]])
    added = np.concatenate([np.full(bos.sum(), marks.bos or 0), np.full(eos.sum(), marks.eos)])
    # An empty document's begin mark comes before its end mark, and both before the next document.
    order = np.lexsort((np.concatenate([np.zeros(bos.sum()), np.ones(eos.sum())]),
                        np.concatenate([np.flatnonzero(bos), np.flatnonzero(eos)])))  # fmt: skip
    ids = np.insert(flat, where[order], added[order]).astype(ids_dtype(marks.vocab), copy=False)
    files.ids.write(ids.data)
    if files.mask is not None:
        trained = np.ones(len(flat), np.bool_) if laid.trained is None else laid.trained
        # An end mark that is added is trained on where the last turn is.
        last = np.ones(len(lengths), np.bool_)
        last[lengths > 0] = trained[ends[lengths > 0] - 1]
        learnt = np.concatenate([np.zeros(bos.sum(), np.bool_), last[eos]])
        files.mask.write(np.insert(trained, where[order], learnt[order]).tobytes())
    _note(files, laid.mets, laid.digests, lengths + bos + eos)
    at.counts["text_bytes"] += laid.size
    at.counts["counted_bytes"] += laid.counted


def _missing(
    laid: _Laid, begins: NDArray[np.int64], ends: NDArray[np.int64], at: Place
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which documents still lack their begin mark, and which their end mark: what a document brings is not added twice."""
    making, marks, some = at.making, at.coder.tokenizer, laid.own & (ends > begins)
    begun, ended = np.zeros(len(begins), np.bool_), np.zeros(len(begins), np.bool_)
    if making.add_bos and marks.bos is not None:
        begun[some] = laid.flat[begins[some]] == marks.bos
    some = some & ~(begun & (ends - begins == 1))  # one mark does not stand for both
    ended[some] = laid.flat[ends[some] - 1] == marks.eos
    return making.add_bos & ~begun, making.add_eos & ~ended


def _note(files: Files, mets: Sequence[Met], digests: Sequence[bytes], lengths: NDArray[np.int64]) -> None:
    """Write what there is to know of documents beside their ids."""
    files.lengths.write(lengths.astype("<i8").tobytes())
    files.digests.write(b"".join(digest[:8] for digest in digests))
    files.draws.write(np.array([drawn(digest) for digest in digests], dtype="<u8").tobytes())
    origin = [(at.number, record.line and at.first + record.line) for at, record, _ in mets]
    files.origin.write(np.array(origin, dtype="<i8").tobytes())
    if files.names is not None and files.name_lengths is not None:
        names = [(met.record.name or "").encode() for met in mets]
        files.names.write(b"".join(names))
        files.name_lengths.write(np.array([len(name) for name in names], dtype="<i8").tobytes())
    counts, found = mets[0].at.counts, mets[0].at.found
    counts["documents"] += len(mets)
    counts["ids"] += int(lengths.sum())
    for met in mets:
        found[met.at.stretch] += 1


class _Block(NamedTuple):
    """A block of a document that is too long to hold."""

    ids: NDArray[np.integer] | None  # none = the whole document is passed over
    cause: str  # why it is passed over, or that it was mended; "" = neither
    content: bytes  # what its digest is made of
    size: int  # bytes of text


def _text_blocks(met: Met, text: Iterator[bytes]) -> Iterator[_Block]:
    before = 0
    for piece in pieces(text):
        ids, cause = taken(met.record, piece, met.at, before)
        yield _Block(ids, cause, piece, len(piece))
        before += len(piece)


def _id_blocks(met: Met) -> Iterator[_Block]:
    assert met.record.ids is not None
    for begin in range(0, len(met.record.ids), _BLOCK_IDS):
        ids = met.record.ids[begin : begin + _BLOCK_IDS]
        size = int(met.at.coder.sizes[ids].sum(dtype=np.int64))
        yield _Block(ids, "", ids.astype("<u4").tobytes(), size)


def _write_long(files: Files, met: Met, blocks: Iterator[_Block]) -> None:
    """Write a document too long to hold, block by block; one that turns out to be passed over is cut off again."""
    at, record, _ = met
    making, marks, dtype = at.making, at.coder.tokenizer, ids_dtype(at.coder.tokenizer.vocab)
    start, digest, size, counted, replaced = files.ids.tell(), blake2b(digest_size=16), 0, 0, False
    # Ids may bring their marks along, a text does not.
    begun = record.ids is not None and marks.bos is not None and record.ids[0] == marks.bos
    ended = record.ids is not None and record.ids[-1] == marks.eos
    bos = marks.bos if making.add_bos and not begun else None
    if bos is not None:
        files.ids.write(dtype.type(bos).tobytes())
    for block in blocks:
        if block.ids is None:
            files.ids.seek(start)
            files.ids.truncate()
            at.skipped[block.cause] += 1
            return
        replaced = replaced or block.cause == REPLACED
        files.ids.write(block.ids.astype(dtype, copy=False).data)
        digest.update(block.content)
        size += block.size
        counted += int(at.coder.sizes[block.ids].sum(dtype=np.int64))
    if making.add_eos and not ended:
        files.ids.write(dtype.type(marks.eos).tobytes())
    length = (files.ids.tell() - start) // dtype.itemsize
    if files.mask is not None:
        _write_ones(files.mask, length, first=bos is None)
    _note(files, [met], [digest.digest()], np.array([length]))
    at.skipped[REPLACED] += replaced
    at.counts["text_bytes"] += size
    at.counts["counted_bytes"] += counted


def _write_ones(file: BinaryIO, length: int, *, first: bool) -> None:
    """Write that all of a text is trained on, but for a begin mark."""
    file.write(np.array([first]).tobytes())
    for at in range(1, length, 1 << 20):
        file.write(b"\1" * min(1 << 20, length - at))
