"""What is held out: fixed values, shares, the tail's cut, each error in full."""

from __future__ import annotations

import re
from hashlib import blake2b
from itertools import pairwise

import pytest

from lib.data.split import held_out, resolve, tail_cut


def digests(count: int) -> list[bytes]:
    return [blake2b(str(n).encode(), digest_size=16).digest() for n in range(count)]


def test_the_side_of_a_document_is_fixed_for_ever() -> None:
    assert [n for n, digest in enumerate(digests(100)) if held_out(digest, 0.05)] == [8, 22, 34]


def test_a_share_of_the_documents_is_held_out() -> None:
    assert not any(held_out(digest, 0.0) for digest in digests(1000))
    for share in (0.01, 0.1, 0.5, 0.9):
        assert abs(sum(held_out(digest, share) for digest in digests(10000)) / 10000 - share) < 0.015


def test_a_larger_share_holds_out_a_superset() -> None:
    sides = [{digest for digest in digests(500) if held_out(digest, share)} for share in (0.01, 0.1, 0.3, 0.99)]
    assert all(a <= b for a, b in pairwise(sides))


def test_auto_takes_the_tail_of_a_few_documents() -> None:
    assert resolve("auto", documents=99, share=0.1) == "tail"
    assert resolve("auto", documents=100, share=0.1) == "document"
    assert resolve("document", documents=1, share=0.1) == "document"
    assert resolve("tail", documents=1000, share=0.1) == "tail"


def test_the_tail_is_the_last_share_of_the_bytes() -> None:
    assert tail_cut(1115394, 0.1) == 1003854
    assert tail_cut(10, 0.0) == 10
    assert tail_cut(3, 0.5) == 1
    assert tail_cut(10**15, 0.1) == 9 * 10**14


@pytest.mark.parametrize(("how", "share", "message"), [
    ("random", 0.1, "data.holdout_by='random' must be one of auto, document, tail"),
    ("auto", 1.0, "data.holdout=1.0 must be in [0, 1)"),
    ("tail", -0.1, "data.holdout=-0.1 must be in [0, 1)"),
    ("tail", float("nan"), "data.holdout=nan must be in [0, 1)"),
])  # fmt: skip
def test_what_is_no_split_is_refused(how: str, share: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolve(how, documents=10, share=share)
