"""What identifies a tokenizer, and what its ids stand for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Tokenizer", "sizes_of_bytes"]


class Tokenizer(NamedTuple):
    """What identifies a tokenizer; two that differ here never share ids.

    Attributes:
        name: which kind of tokenizer it is, with a digest of its file where it has one.
        vocab: ids are in [0, vocab).
        eos: the id that closes a document; -1 = it has no such mark.
        bos: the id that opens a document where that is asked for; none = it has no such mark.
    """

    name: str
    vocab: int
    eos: int
    bos: int | None = None


def sizes_of_bytes(vocab: int, offset: int) -> NDArray[np.uint16]:
    """Give how many bytes of text each id stands for when marks come first and then one id for each byte."""
    sizes = np.zeros(vocab, dtype=np.uint16)
    sizes[offset : offset + 256] = 1
    return sizes
