"""Bytes as tokens: an id is a byte plus four, and below four stand the marks that no text can spell.

Text that looks like a mark ("<|eos|>") stays plain bytes, since marks have no spelling; invalid UTF-8 is bytes like
any other.

Source: the id layout is that of the Byte Latent Transformer, arXiv:2412.09871.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lib.data.tokenizer import Tokenizer, sizes_of_bytes

if TYPE_CHECKING:  # those who make batches in other processes need no torch
    from torch import Tensor

__all__ = ["BOE", "BOS", "BYTES", "DELIMITER", "EOS", "OFFSET", "SIZES", "VOCAB", "decode", "encode"]

BOE, BOS, EOS, DELIMITER = 0, 1, 2, 3
OFFSET = 4
VOCAB = OFFSET + 256


BYTES = Tokenizer(name="bytes", vocab=VOCAB, eos=EOS, bos=BOS)
SIZES = sizes_of_bytes(VOCAB, OFFSET)
SIZES.setflags(write=False)


def encode(text: bytes | bytearray | memoryview) -> NDArray[np.uint16]:
    """Turn text into ids, one for each byte, with no mark before or after.

    >>> encode(b"ab").tolist()
    [101, 102]
    """
    return np.add(np.frombuffer(text, dtype=np.uint8), OFFSET, dtype=np.uint16)


def decode(ids: Sequence[int] | NDArray[np.integer] | Tensor) -> bytes:
    """Turn ids back into text; marks give nothing.

    Args:
        ids: whole numbers in [0, 260), in any shape.

    Returns:
        The bytes that the ids stand for, marks left out.

    Raises:
        ValueError: an id is outside the vocabulary.

    >>> decode([101, 2, 102])
    b'ab'
    """
    flat = np.asarray(ids, dtype=None if len(ids) else np.int64).reshape(-1)
    if flat.dtype.kind not in "iu":
        raise ValueError(f"ids={flat.dtype} must be whole numbers")
    wrong = np.flatnonzero((flat < 0) | (flat >= VOCAB))
    if wrong.size:
        raise ValueError(f"ids[{wrong[0]}]={flat[wrong[0]]} must be in [0, {VOCAB})")
    return (flat[flat >= OFFSET] - OFFSET).astype(np.uint8).tobytes()
