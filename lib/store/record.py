"""What a file is read as: options, a stretch of a file, a record; and where a record stands, for errors and for people.

No format is known here; `lib.store.formats` chooses one for a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMATS", "Reading", "Record", "Span"]

FORMATS = ("auto", "text", "jsonl", "parquet", "arrow", "npy", "bin")


class Reading(NamedTuple):
    """How files become documents.

    Attributes:
        format: one of `FORMATS`; `auto` = by the file's name.
        split: a plain text file is one document ("file"), or one for each line ("line"), or one for each block of lines
            between blank ones ("block").
        text_key: field that holds the text, in JSONL, Parquet and Arrow.
        id_key: field that names a record; none = records have no name.
        dtype: NumPy dtype of raw `.bin` files without a side-car ("<u2"); none = a side-car must say.
        chat: records are conversations: their fields are given instead of a text.
        errors: what a bad record does: "stop", "skip" (counted), or "replace" (bytes that are no UTF-8 become U+FFFD,
            counted; everything else stops).
    """

    format: str = "auto"
    split: str = "file"
    text_key: str = "text"
    id_key: str | None = None
    dtype: str | None = None
    chat: bool = False
    errors: str = "stop"


class Span(NamedTuple):
    """A stretch of one file that can be read on its own: bytes, row groups or batches [start, stop), by its format."""

    start: int
    stop: int


class Record(NamedTuple):
    """One document as a file holds it; exactly one of `text`, `ids`, `fields` is given.

    Attributes:
        line: line of the file, row of the table, or number of the document in a token file, from 1; 0 = the whole file.
        text: its bytes, piece by piece, to be read once, before the next record is asked for.
        ids: token ids, without the end mark.
        fields: a conversation's fields (`Reading.chat`).
        name: what `id_key` gives.
    """

    line: int
    text: Iterable[bytes] | None = None
    ids: NDArray[np.integer] | None = None
    fields: Mapping[str, Any] | None = None
    name: str | None = None
