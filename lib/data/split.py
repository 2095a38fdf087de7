"""Which part of a corpus is held out: decided by content, never by order, position in a list or a generator.

`document`: a keyed hash of the document's own digest, so that a document stays on its side for ever, whatever is added,
renamed or reordered, and two equal documents can never end on different sides. A larger share holds out a superset.
`tail`: the last share of the bytes, for a corpus of too few documents to draw from.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil

__all__ = ["HOW", "drawn", "held_out", "limit", "resolve", "tail_cut"]

HOW = ("auto", "document", "tail")

# Below this many documents a share of a few per cent is a matter of luck, so the tail is cut off instead.
FEW_DOCUMENTS = 100

# Changing the key would move documents across the split of every run that exists.
_KEY = b"purestep held-out 1"


def held_out(digest: bytes, share: float) -> bool:
    """Tell whether the document with this content digest is held out.

        u64(blake2b(digest, key)) / 2^64 < share

    Args:
        digest: digest of the document's text.
        share: part of all documents to hold out, in [0, 1).

    Returns:
        True for a share of all documents.
    """
    return drawn(digest) < limit(share)


def drawn(digest: bytes) -> int:
    """Give a document's word, u64(blake2b(digest, key)), which decides on its side at every share."""
    return int.from_bytes(blake2b(digest, digest_size=8, key=_KEY).digest(), "little")


def limit(share: float) -> int:
    """Give the word below which documents are held out at this share."""
    return ceil(share * 2.0**64)


def resolve(how: str, *, documents: int, share: float) -> str:
    """Choose the rule for a corpus; the word returned is what a store records.

    Args:
        how: `auto`, `document` or `tail`.
        documents: how many documents the corpus has.
        share: part to hold out, in [0, 1).

    Returns:
        `document` or `tail`.

    Raises:
        ValueError: the word is unknown or the share is out of range.
    """
    if how not in HOW:
        raise ValueError(f"data.holdout_by={how!r} must be one of {', '.join(HOW)}")
    if not 0.0 <= share < 1.0:
        raise ValueError(f"data.holdout={share} must be in [0, 1)")
    if how == "auto":
        return "document" if documents >= FEW_DOCUMENTS else "tail"
    return how


def tail_cut(total: int, share: float) -> int:
    """Give the byte at which the held-out tail begins, in the documents laid end to end.

    >>> tail_cut(1115394, 0.1)
    1003854
    """
    return int(total * (1 - share))
