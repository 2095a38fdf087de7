"""A record -> a document: its ids, without the marks that whoever lays documents end to end adds.

A text is encoded, a conversation is laid out by its template and says which ids are trained on, and ids are taken as they
are. A bad record is an error that says where it stands, or is counted, as the reading says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.chat import ConversationError, encode_turns, messages_of, render
from lib.errors import DataError
from lib.store.coders import Coder, TextError
from lib.store.faults import REPLACED
from lib.store.formats import Kind, place_of
from lib.store.making import Making
from lib.store.record import Record, Span

__all__ = ["NOT_UTF8", "Document", "Met", "Place", "digest_of", "documents_of", "taken"]

NOT_UTF8 = "not UTF-8"


class Document(NamedTuple):
    """A document.

    Attributes:
        ids: its ids.
        mask: which of them are trained on; none = all.
        own: it may have brought its marks along.
        digest: 16 bytes of what it holds.
        size: bytes of text in it.
    """

    ids: NDArray[np.integer]
    mask: NDArray[np.bool_] | None
    own: bool
    digest: bytes
    size: int


class Place(NamedTuple):
    """What every document of a stretch shares.

    Attributes:
        stretch: its number in the part.
        number: of the file.
        path: where it is.
        span: the stretch.
        kind: what the file is read as.
        first: what to add to the numbers of its records.
        making: how records become ids.
        coder: the tokenizer.
        counts: of documents, ids and bytes, added to.
        found: documents of each stretch, added to.
        skipped: what was passed over or mended by cause, added to.
    """

    stretch: int
    number: int
    path: str
    span: Span
    kind: Kind
    first: int
    making: Making
    coder: Coder
    counts: Counter[str]
    found: Counter[int]
    skipped: Counter[str]

    def of(self, record: Record) -> str:
        """Where a record stands, for an error."""
        return place_of(self.path, self.span, self.kind, record.line)


class Met(NamedTuple):
    """A record where it was met, with its text where it is one."""

    at: Place
    record: Record
    text: bytes


def documents_of(batch: Sequence[Met]) -> Iterator[Document | None]:
    """Turn records into documents; none = one is passed over.

    Args:
        batch: at least one record, all of one part.

    Raises:
        DataError: a record is bad.
    """
    encoded = iter(_encoded([met for met in batch if met.record.text is not None]))
    for at, record, text in batch:
        if record.text is None:
            yield _ready_made(record, at) if record.ids is not None else _conversation(record, at)
        else:
            ids = next(encoded)
            yield None if ids is None else Document(ids, None, False, digest_of(text), len(text))


def taken(record: Record, text: bytes, at: Place, before: int = 0) -> tuple[NDArray[np.integer] | None, str]:
    """Encode a text, or a piece of one that `before` bytes of came earlier.

    Returns:
        The ids, none = the record is passed over; and what is to be counted, "" = nothing.

    Raises:
        DataError: the tokenizer does not take it.
    """
    try:
        return at.coder.encode([text])[0], ""
    except TextError as error:
        if at.making.reading.errors == "skip":
            return None, error.cause
        raise DataError(f"{at.of(record)}: {error}") from None
    except ValueError as error:
        wrong = _no_utf8(text)
        if wrong is None:
            raise DataError(f"{at.of(record)}: {error}") from None
    errors = at.making.reading.errors
    if errors == "stop":
        what = (
            f"byte 0x{text[wrong]:02x} at offset {before + wrong} of the text is not UTF-8, which this tokenizer needs"
        )
        fix = "save the file as UTF-8, set data.errors=replace or data.errors=skip, or data.tokenizer=bytes"
        raise DataError(f"{at.of(record)}: {what}; {fix}")
    if errors == "skip":
        return None, NOT_UTF8
    mended, cause = taken(record, text.decode("utf-8", "replace").encode(), at, before)
    return mended, cause or REPLACED


def digest_of(content: bytes) -> bytes:
    """Digest what a document holds: which side it falls on, and whether it was there before."""
    return blake2b(content, digest_size=16).digest()


def _encoded(texts: Sequence[Met]) -> list[NDArray[np.integer] | None]:
    if not texts:
        return []
    try:
        return [*texts[0].at.coder.encode([met.text for met in texts])]
    except (ValueError, TextError):
        return [_counted(met.record, met.text, met.at) for met in texts]


def _counted(record: Record, text: bytes, at: Place) -> NDArray[np.integer] | None:
    ids, cause = taken(record, text, at)
    at.skipped[cause] += bool(cause)
    return ids


def _no_utf8(text: bytes) -> int | None:
    """Find the first byte that is no UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _ready_made(record: Record, at: Place) -> Document:
    assert record.ids is not None
    size = int(at.coder.sizes[record.ids].sum(dtype=np.int64))
    return Document(record.ids, None, True, digest_of(record.ids.astype("<u4").tobytes()), size)


def _conversation(record: Record, at: Place) -> Document | None:
    assert record.fields is not None
    assert at.making.template is not None
    try:
        turns = render(messages_of(record.fields), at.making.template, at.making.train_on)
        ids, mask = encode_turns(turns, at.coder)
    except (ConversationError, TextError) as error:
        if at.making.reading.errors == "skip":
            at.skipped[error.cause] += 1
            return None
        raise DataError(f"{at.of(record)}: {error}") from None
    except ValueError as error:  # no record's fault
        raise DataError(f"{at.of(record)}: {error}") from None
    if not mask.any():
        at.skipped["conversation with nothing to train on"] += 1
        return None
    size = sum(len(turn.text.encode()) for turn in turns if not turn.marks)
    return Document(ids, mask, True, digest_of(ids.astype("<u4").tobytes() + mask.tobytes()), size)
