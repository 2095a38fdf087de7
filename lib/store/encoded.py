"""Records -> documents of ids with their marks, written to the files of a part.

Records are encoded in batches, and one too long to hold goes through piece by piece, so memory does not grow with a
document. A bad record is an error that says where it stands, or is counted, as the reading says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.chat import encode_turns, messages_of, render
from lib.data.split import drawn
from lib.errors import DataError
from lib.store.coders import Coder, pieces
from lib.store.formats import Kind, place_of
from lib.store.making import Making, ids_dtype
from lib.store.record import Record, Span

__all__ = ["Files", "Place", "write_records"]

_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 18, 4096  # so many are encoded at once
_REPLACED = "text that is no UTF-8, replaced"


class Files(NamedTuple):
    """The files of a part, open for writing."""

    ids: BinaryIO
    mask: BinaryIO | None
    lengths: BinaryIO
    digests: BinaryIO
    draws: BinaryIO
    origin: BinaryIO
    names: BinaryIO | None
    name_lengths: BinaryIO | None


class _Document(NamedTuple):
    ids: NDArray[np.integer]
    mask: NDArray[np.bool_] | None
    digest: bytes
    size: int  # bytes of text


class Place(NamedTuple):
    """What every document of a stretch shares."""

    number: int
    path: str
    span: Span
    kind: Kind
    making: Making
    coder: Coder
    counts: Counter[str]
    skipped: Counter[str]

    def of(self, record: Record) -> str:
        """Where a record stands, for an error."""
        return place_of(self.path, self.span, self.kind, record.line)


def write_records(files: Files, found: Iterable[Record], at: Place) -> None:
    """Write the documents of a stretch.

    Raises:
        DataError: a record is bad.
    """
    for batch in _batches(found):
        _append(files, batch, at)


def _batches(found: Iterable[Record]) -> Iterator[list[tuple[Record, bytes | Iterator[bytes]]]]:
    """Group records that are small; a long text comes alone, as an iterator over its pieces."""
    batch, size = list[tuple[Record, bytes | Iterator[bytes]]](), 0
    for record in found:
        if record.text is None:
            batch.append((record, b""))
            size += 64 if record.ids is None else record.ids.nbytes
        else:
            text = iter(record.text)
            head = next(text, b"")
            after = next(text, None)
            if after is not None:
                if batch:
                    yield batch
                yield [(record, _chained(head, after, text))]
                batch, size = [], 0
                continue
            batch.append((record, head))
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


def _append(files: Files, batch: list[tuple[Record, bytes | Iterator[bytes]]], at: Place) -> None:
    """Write a batch of records, their marks added."""
    if len(batch) == 1 and not isinstance(batch[0][1], bytes):
        _append_long(files, batch[0][0], batch[0][1], at)
        return
    small = [(record, text) for record, text in batch if isinstance(text, bytes)]  # all of them: long ones come alone
    if at.coder.tokenizer.name == "bytes" and all(record.text is not None for record, _ in small):
        _write(files, _of_bytes([record for record, _ in small], [text for _, text in small], at), at)
        return
    texts = [(record, text) for record, text in small if record.text is not None]
    encoded = iter(_encoded(texts, at))
    kept, documents = list[Record](), list[_Document]()
    for record, text in small:
        made = next(encoded) if record.text is not None else _other(record, at)
        if made is not None:
            kept.append(record)
            documents.append(made if isinstance(made, _Document) else _Document(made, None, _digest(text), len(text)))
    if documents:
        _write(files, _laid(kept, documents), at)


class _Laid(NamedTuple):
    """Documents end to end, without the marks that are still to be added."""

    records: list[Record]
    flat: NDArray[np.integer]
    lengths: NDArray[np.int64]
    trained: NDArray[np.bool_] | None  # none = all of it
    own: NDArray[np.bool_] | bool  # may bring its marks along
    digests: list[bytes]
    size: int


def _of_bytes(records: list[Record], texts: list[bytes], at: Place) -> _Laid:
    """Texts as bytes, all of them in one go."""
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    (flat,) = at.coder.encode([b"".join(texts)])
    return _Laid(records, flat, lengths, None, False, [_digest(text) for text in texts], len(flat))


def _laid(records: list[Record], documents: list[_Document]) -> _Laid:
    masks = [np.ones(len(each.ids), np.bool_) if each.mask is None else each.mask for each in documents]
    return _Laid(
        records,
        np.concatenate([each.ids for each in documents]),
        np.array([len(each.ids) for each in documents], dtype=np.int64),
        np.concatenate(masks),
        np.array([each.mask is not None or record.ids is not None
                  for record, each in zip(records, documents, strict=True)]),
        [each.digest for each in documents],
        sum(each.size for each in documents),
    )  # fmt: skip


def _write(files: Files, laid: _Laid, at: Place) -> None:
    coder, making = at.coder, at.making
    at.counts["empty"] += int((laid.lengths == 0).sum())
    if not (making.add_bos or making.add_eos):
        laid = _without_empty(laid)
    flat, lengths, own, count = laid.flat, laid.lengths, laid.own, len(laid.records)
    ends = np.cumsum(lengths)
    begins = ends - lengths
    # A conversation or a token file may bring its marks along: none is added twice.
    first, last = _ends_of(flat, begins, ends)
    bos = np.full(count, making.add_bos) & ~(
        own & (first == (-1 if coder.tokenizer.bos is None else coder.tokenizer.bos))
    )
    eos = np.full(count, making.add_eos) & ~(own & (last == coder.tokenizer.eos))
    where = np.concatenate([begins[bos], ends[eos]])
    marks = np.concatenate([np.full(bos.sum(), coder.tokenizer.bos or 0), np.full(eos.sum(), coder.tokenizer.eos)])
    # An empty document's begin mark comes before its end mark, and both before the next document.
    order = np.lexsort((np.concatenate([np.zeros(bos.sum()), np.ones(eos.sum())]),
                        np.concatenate([np.flatnonzero(bos), np.flatnonzero(eos)])))  # fmt: skip
    ids = np.insert(flat, where[order], marks[order]).astype(ids_dtype(coder.tokenizer.vocab), copy=False)
    files.ids.write(ids.data)
    if files.mask is not None:
        trained = np.ones(len(flat), np.bool_) if laid.trained is None else laid.trained
        # An end mark that is added is trained on where the last turn is.
        added = np.concatenate([np.zeros(bos.sum(), np.bool_), trained[np.maximum(ends[eos] - 1, 0)]])
        files.mask.write(np.insert(trained, where[order], added[order]).tobytes())
    files.lengths.write((lengths + bos + eos).astype("<i8").tobytes())
    files.digests.write(b"".join(digest[:8] for digest in laid.digests))
    files.draws.write(np.array([drawn(digest) for digest in laid.digests], dtype="<u8").tobytes())
    origin = np.full((count, 2), at.number, dtype="<i8")
    origin[:, 1] = [record.line for record in laid.records]
    files.origin.write(origin.tobytes())
    if files.names is not None and files.name_lengths is not None:
        names = [(record.name or "").encode() for record in laid.records]
        files.names.write(b"".join(names))
        files.name_lengths.write(np.array([len(name) for name in names], dtype="<i8").tobytes())
    at.counts["documents"] += count
    at.counts["ids"] += len(ids)
    at.counts["text_bytes"] += laid.size
    at.counts["counted_bytes"] += int(coder.sizes[flat].sum(dtype=np.int64))


def _without_empty(laid: _Laid) -> _Laid:
    """Without any mark an empty document would be none."""
    some = laid.lengths > 0
    which = np.flatnonzero(some).tolist()
    return laid._replace(
        records=[laid.records[n] for n in which],
        lengths=laid.lengths[some],
        own=laid.own if isinstance(laid.own, bool) else laid.own[some],
        digests=[laid.digests[n] for n in which],
    )


def _ends_of(
    flat: NDArray[np.integer], begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last id of each document; -2 where it has none."""
    some = ends > begins
    first, last = np.full(len(begins), -2), np.full(len(begins), -2)
    first[some], last[some] = flat[begins[some]], flat[ends[some] - 1]
    return first, last


def _append_long(files: Files, record: Record, text: Iterator[bytes], at: Place) -> None:
    """Write a text too long to hold, piece by piece."""
    making, coder = at.making, at.coder
    digest, size, length, dtype = blake2b(digest_size=16), 0, 0, ids_dtype(coder.tokenizer.vocab)
    if making.add_bos and coder.tokenizer.bos is not None:
        files.ids.write(dtype.type(coder.tokenizer.bos).tobytes())
        length += 1
    for piece in pieces(text):
        try:
            (ids,) = coder.encode([piece])
        except ValueError as error:
            if making.reading.errors != "replace":
                raise _not_taken(record, error, at) from None
            at.skipped[_REPLACED] += 1
            (ids,) = coder.encode([piece.decode("utf-8", "replace").encode()])
        files.ids.write(ids.astype(dtype, copy=False).data)
        digest.update(piece)
        size, length = size + len(piece), length + len(ids)
        at.counts["counted_bytes"] += int(coder.sizes[ids].sum(dtype=np.int64))
    if making.add_eos:
        files.ids.write(dtype.type(coder.tokenizer.eos).tobytes())
        length += 1
    files.lengths.write(np.array(length, dtype="<i8").tobytes())
    files.digests.write(digest.digest()[:8])
    files.draws.write(np.array(drawn(digest.digest()), dtype="<u8").tobytes())
    files.origin.write(np.array([at.number, record.line], dtype="<i8").tobytes())
    if files.name_lengths is not None:
        files.name_lengths.write(np.array(0, dtype="<i8").tobytes())
    at.counts["documents"] += 1
    at.counts["ids"] += length
    at.counts["text_bytes"] += size


def _encoded(texts: list[tuple[Record, bytes]], at: Place) -> Iterator[NDArray[np.integer] | None]:
    """Encode the texts of these records; none = the record is passed over."""
    try:
        yield from at.coder.encode([text for _, text in texts])
    except ValueError:
        for record, text in texts:
            yield _encoded_alone(record, text, at)


def _encoded_alone(record: Record, text: bytes, at: Place) -> NDArray[np.integer] | None:
    try:
        return at.coder.encode([text])[0]
    except ValueError as error:
        if at.making.reading.errors == "skip":
            at.skipped["text that the tokenizer does not take"] += 1
            return None
        if at.making.reading.errors == "replace":
            at.skipped[_REPLACED] += 1
            return at.coder.encode([text.decode("utf-8", "replace").encode()])[0]
        raise _not_taken(record, error, at) from None


def _not_taken(record: Record, error: ValueError, at: Place) -> DataError:
    return DataError(f"{at.of(record)}: {error}; repair it, or set data.errors=replace or data.errors=skip")


def _other(record: Record, at: Place) -> _Document | None:
    """A record that is no text: ids, or a conversation."""
    if record.ids is not None:
        body = record.ids.astype("<u4")
        size = int(at.coder.sizes[record.ids].sum(dtype=np.int64))
        return _Document(record.ids, None, _digest(body.tobytes()), size)
    assert record.fields is not None
    assert at.making.template is not None
    try:
        turns = render(messages_of(record.fields), at.making.template, at.making.train_on)
        ids, mask = encode_turns(turns, at.coder)
    except ValueError as error:
        if at.making.reading.errors == "skip":
            at.skipped["conversation that breaks the rules"] += 1
            return None
        raise DataError(f"{at.of(record)}: {error}") from None
    if not mask.any():
        at.skipped["conversation with nothing to train on"] += 1
        return None
    size = sum(len(turn.text.encode()) for turn in turns if not turn.marks)
    return _Document(ids, mask, _digest(ids.astype("<u4").tobytes() + mask.tobytes()), size)


def _digest(text: bytes | bytearray | memoryview) -> bytes:
    return blake2b(text, digest_size=16).digest()
