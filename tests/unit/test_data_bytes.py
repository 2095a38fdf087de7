"""Bytes as ids: worked examples, the marks that text cannot spell, each error in full."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from lib.data.bytes import BOE, BOS, BYTES, DELIMITER, EOS, OFFSET, SIZES, VOCAB, decode, encode


def test_the_layout_is_four_marks_and_256_bytes() -> None:
    assert (BOE, BOS, EOS, DELIMITER, OFFSET, VOCAB) == (0, 1, 2, 3, 4, 260)
    assert BYTES == ("bytes", 260, 2, 1)
    assert BYTES._fields == ("name", "vocab", "eos", "bos")  # type: ignore[attr-defined]
    assert SIZES.tolist() == [0, 0, 0, 0] + [1] * 256


def test_every_byte_has_its_own_id_and_comes_back() -> None:
    every = bytes(range(256))
    ids = encode(every)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(range(4, 260))
    assert decode(ids) == every


def test_encoding_adds_no_mark() -> None:
    assert encode(b"a").tolist() == [101]
    assert encode(b"").tolist() == []


def test_text_that_looks_like_a_mark_stays_text() -> None:
    assert encode(b"a<|eos|>b").tolist() == [byte + 4 for byte in b"a<|eos|>b"]
    assert not set(encode(b"\x00\x01\x02\x03<s></s><pad>").tolist()) & {BOE, BOS, EOS, DELIMITER}


def test_invalid_utf8_is_bytes_like_any_other() -> None:
    assert decode(encode(b"caf\xe9 \xed\xa0\x80")) == b"caf\xe9 \xed\xa0\x80"


def test_composed_and_decomposed_letters_stay_apart() -> None:
    assert encode("\u00e9".encode()).tolist() != encode("e\u0301".encode()).tolist()


def test_marks_decode_to_nothing() -> None:
    assert decode([1, 101, 2, 3, 102, 0]) == b"ab"
    assert decode([]) == b""
    assert decode(torch.tensor([[101, 2], [102, 2]])) == b"ab"
    assert decode(np.empty((0,), dtype=np.float64)) == b""


@pytest.mark.parametrize(("ids", "message"), [
    ([101, 260], "ids[1]=260 must be in [0, 260)"),
    ([101, 4, -1], "ids[2]=-1 must be in [0, 260)"),
    ([1.5], "ids=float64 must be whole numbers"),
])  # fmt: skip
def test_what_is_no_id_is_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode(ids)
