"""The token store: every byte once with one end mark a document, and no document ever changes its side."""

from __future__ import annotations

import tempfile
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import zarr
from hypothesis import given
from hypothesis import strategies as st

from lib.data.bytes import EOS, decode
from lib.data.split import held_out
from lib.store import sides, stream
from lib.store.corpus import scan
from lib.store.making import Making
from lib.store.tokens import Split, TokenStore, prepare


def plain(text: bytes) -> bool:
    """Neither binary nor packed, which no text is."""
    return b"\0" not in text and not text.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")) and b"\x2a\x4d\x18" not in text


TEXTS = st.binary(max_size=24).filter(plain)


def ready(texts: dict[str, bytes], root: Path, *, holdout: float, how: str) -> TokenStore:
    for name, text in texts.items():
        (root / "text").mkdir(exist_ok=True)
        (root / "text" / name).write_bytes(text)
    with mock.patch("os.fsync"):  # most of a tiny build is waiting for the disk
        return prepare(scan(root / "text"), Making(), Split(holdout, how), cache=root / "cache")


def cut(side: stream.Stream) -> list[bytes]:
    return [decode(side.ids(a, b)) for a, b in pairwise(side.offsets.tolist())]


def kept(text: bytes) -> bytes:
    return text.removeprefix(b"\xef\xbb\xbf")


FILES = st.lists(TEXTS, min_size=1, max_size=6)


@given(texts=FILES, holdout=st.sampled_from([0.0, 0.2, 0.5, 0.8]), chunk=st.integers(1, 40))
def test_a_store_holds_every_byte_once_with_one_end_mark_a_document(
    texts: list[bytes], holdout: float, chunk: int
) -> None:
    texts = [*texts, b"some text that is long enough for any cut"]
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch.object(sides, "CHUNK_IDS", chunk),
        mock.patch.object(stream, "CHUNK_IDS", chunk),
    ):
        store = ready({f"{n}": text for n, text in enumerate(texts)}, Path(root), holdout=holdout, how="tail")
        train, heldout = cut(store.train), cut(store.heldout)
        text = b"".join(map(kept, texts))
        assert b"".join(train + heldout) == text
        assert b"".join(train) == text[: int(len(text) * (1 - holdout))]
        assert len(train) + len(heldout) - len(texts) in (0, 1)
        assert store.counts["documents"] == len(texts)
        assert store.counts["tokens"] == len(text) + len(train) + len(heldout)
        for side in (store.train, store.heldout):
            ids = side.ids(0, side.size)
            assert (np.flatnonzero(ids == EOS) + 1).tolist() == side.offsets[1:].tolist()
            assert zarr.open_group(str(side.path), mode="r")["ids"][:].tolist() == ids.tolist()


@given(texts=st.lists(TEXTS, min_size=2, max_size=20), data=st.data())
def test_a_document_stays_on_its_side_when_others_come_and_names_change(
    texts: list[bytes], data: st.DataObject
) -> None:
    share = 0.5
    drawn = {held_out(blake2b(text, digest_size=16).digest(), share): text for text in (b"a", b"b", b"c", b"d", b"e")}
    fixed = [drawn[True], drawn[False]]  # so that no side is ever empty
    more = data.draw(st.lists(TEXTS, max_size=5))
    renamed = data.draw(st.permutations([*texts, *fixed, *more]))
    splits = []
    for some in ([*texts, *fixed], renamed):
        with tempfile.TemporaryDirectory() as root:
            store = ready({f"{n:03}": text for n, text in enumerate(some)}, Path(root), holdout=share, how="document")
            train, heldout = set(cut(store.train)), set(cut(store.heldout))
            assert not train & heldout
            splits.append((train, heldout))
    assert splits[0][0] <= splits[1][0]
    assert splits[0][1] <= splits[1][1]
