"""The token store: every byte once with one end mark a document, and no document ever changes its side."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import zarr
from hypothesis import given
from hypothesis import strategies as st

from lib.data.bytes import BOS, EOS, decode, encode
from lib.data.chat import TEMPLATES, TRAIN_ON, encode_turns, messages_of, render
from lib.data.split import held_out
from lib.store import parts, sides, stream
from lib.store.coders import open_coder
from lib.store.compressed import packing
from lib.store.corpus import scan
from lib.store.making import Making
from lib.store.tokens import Split, TokenStore, prepare
from tests.stores import contents, ids_of, lay, made, masks_of, origins


def plain(text: bytes) -> bool:
    """Neither binary nor packed, which no text is."""
    return b"\0" not in text and packing(text) is None


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


# Parts ----------------------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A document as it must come out."""

    ids: list[int]
    mask: list[bool]
    origin: tuple[str, int, str]
    digest: bytes


class Drawn(NamedTuple):
    files: dict[str, bytes]
    options: dict[str, Any]
    documents: list[Written]


LINES = st.lists(st.sampled_from([b"", b" ", b"a", b"bc\r", b"some words", b"\xc3\xa9\xff"]), max_size=12)
WORDS = st.text(st.sampled_from('ab\n"\u00e9\U0001f600'), max_size=6)


@st.composite
def corpora(draw: st.DrawFn) -> Drawn:
    """Text by file, line or block, JSONL or conversations, mixed, and every document that is in them."""
    options: dict[str, Any] = {
        "split": draw(st.sampled_from(["file", "line", "block"])),
        "add_bos": draw(st.booleans()),
        "add_eos": draw(st.booleans()),
        "id_key": draw(st.sampled_from([None, "id"])),
        "template": draw(st.sampled_from([None, TEMPLATES["plain"], TEMPLATES["chatml"]])),
        "train_on": draw(st.sampled_from(TRAIN_ON)),
    }
    files, documents = dict[str, bytes](), list[Written]()
    for number in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            name = f"{number}.jsonl"
            files[name], found = draw(records(options))
        else:
            name, text = f"{number}.txt", b"\n".join(draw(LINES))
            files[name], found = text, texts(text, options)
        documents += [one._replace(origin=(name, *one.origin[1:])) for one in found]
    last = b"the last of all"  # so that there always is one
    files["9.txt"] = last
    documents += [one._replace(origin=("9.txt", *one.origin[1:])) for one in texts(last, options)]
    return Drawn(files, options, documents)


def texts(text: bytes, options: dict[str, Any]) -> list[Written]:
    if options["split"] == "file":
        return written(text, 0, "", options)
    lines = text.split(b"\n")
    if options["split"] == "line":
        last = len(lines) - 1
        whole = [line.removesuffix(b"\r") if n < last else line for n, line in enumerate(lines)]
        return [one for n, line in enumerate(whole, 1) if line.strip() for one in written(line, n, "", options)]
    found, block = list[Written](), list[bytes]()
    for n, line in enumerate([*lines, b""], 1):
        if line.strip():
            block.append(line)
        elif block:
            whole = b"\n".join(block)
            whole = whole.removesuffix(b"\r") if n <= len(lines) else whole  # type: ignore[attr-defined]
            found += written(whole, n - len(block), "", options)
            block = []
    return found


@st.composite
def records(draw: st.DrawFn, options: dict[str, Any]) -> tuple[bytes, list[Written]]:
    lines, found = list[bytes](), list[Written]()
    for number in range(1, draw(st.integers(1, 6)) + 1):
        own, line = draw(st.sampled_from(["x", "\u00e9", "long name"])), b""
        if draw(st.integers(0, 4)):
            fields = {"text": draw(WORDS), "prompt": draw(WORDS), "completion": draw(WORDS), "id": own}
            line = json.dumps(fields, ensure_ascii=draw(st.booleans())).encode()
            own = own if options["id_key"] else ""
            if options["template"] is None:
                found += written(fields["text"].encode(), number, own, options)
            else:
                found += talked(fields, number, own, options)
        lines.append(line)
    return b"\n".join(lines) + b"\n" * draw(st.booleans()), found


def written(text: bytes, line: int, own: str, options: dict[str, Any]) -> list[Written]:
    bos, eos = options["add_bos"], options["add_eos"]
    if not (text or bos or eos):
        return []
    ids = [BOS] * bos + encode(text).tolist() + [EOS] * eos
    # Where there are conversations, what is no answer is marked, and so is a begin mark.
    mask = [options["template"] is None] * bos + [True] * (len(ids) - bos)
    return [Written(ids, mask, ("", line, own), blake2b(text, digest_size=16).digest())]


def talked(fields: dict[str, Any], line: int, own: str, options: dict[str, Any]) -> list[Written]:
    turns = render(messages_of(fields), options["template"], options["train_on"])
    ids, mask = encode_turns(turns, open_coder("bytes"))
    if not mask.any():
        return []
    bos, eos = options["add_bos"], options["add_eos"]
    digest = blake2b(ids.astype("<u4").tobytes() + mask.tobytes(), digest_size=16).digest()
    learnt = [False] * bos + mask.tolist() + [bool(mask[-1])] * eos
    return [Written([BOS] * bos + ids.tolist() + [EOS] * eos, learnt, ("", line, own), digest)]


@contextmanager
def cut_at(part: int, chunk: int) -> Iterator[None]:
    with (
        mock.patch.object(parts, "PART_BYTES", part),
        mock.patch.object(sides, "CHUNK_IDS", chunk),
        mock.patch.object(stream, "CHUNK_IDS", chunk),
        mock.patch.object(sides, "_BLOCK_IDS", max(1, chunk // 2)),
        mock.patch("os.fsync"),
    ):
        yield


@given(drawn=corpora(), part=st.integers(1, 200), chunk=st.integers(1, 60), seed=st.integers(0, 99), data=st.data())
def test_a_store_has_the_same_bits_however_it_is_cut_into_parts_and_in_whatever_order_they_are_done(
    drawn: Drawn, part: int, chunk: int, seed: int, data: st.DataObject
) -> None:
    def shuffled(work: Any, jobs: Any) -> Iterator[int]:
        return map(work, random.Random(seed).sample(todo := list(jobs), len(todo)))

    # A split that leaves something on both sides.
    sides_of = [held_out(one.digest, 0.5) for one in drawn.documents]
    shares = [0.0, 0.5] if any(sides_of) and not all(sides_of) else [0.0]
    holdout, how = data.draw(st.sampled_from(shares)), data.draw(st.sampled_from(["document", "auto"]))
    if how == "auto":
        holdout = 0.0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        corpus = scan(lay(root / "text", drawn.files))
        options = {"holdout": holdout, "how": how, **drawn.options}
        with cut_at(1 << 30, chunk):
            whole = made(corpus, root / "whole", **options)
        with cut_at(part, chunk):
            store = made(corpus, root / "parts", doing=shuffled, **options)
            assert store.path.name == whole.path.name
            assert contents(store.path) == contents(whole.path)
            held = [one for one in drawn.documents if holdout and held_out(one.digest, holdout)]
            kept = [one for one in drawn.documents if not (holdout and held_out(one.digest, holdout))]
            for side, wanted in ((store.train, kept), (store.heldout, held)):
                assert ids_of(side) == [one.ids for one in wanted]
                assert origins(side) == [one.origin for one in wanted]
                assert masks_of(side) == [one.mask for one in wanted]
                assert side.masked == (drawn.options["template"] is not None)
        assert store.counts["documents"] == len(drawn.documents)
        assert store.counts["duplicates"] == len(drawn.documents) - len({one.digest for one in drawn.documents})
        assert store.counts["tokens"] == sum(len(one.ids) for one in drawn.documents)
        assert sorted(path.name for path in (root / "parts").iterdir() if path.suffix != ".documents") == [
            store.path.name
        ]
