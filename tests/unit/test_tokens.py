"""The token store: what is in it, when it is built anew, and that it is whole or not there; each message in full."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from lib.data.arrays import arrays_at
from lib.data.chat import TEMPLATES
from lib.data.plan import Plan
from lib.data.rows import Cursor
from lib.data.source import Source
from lib.data.split import held_out
from lib.errors import DataError
from lib.store import build, parts, sides, stream, tokens
from lib.store.corpus import scan
from lib.store.stream import open_stream
from lib.store.tokens import key_of, summary
from tests.stores import contents, documents, every, made, making_of, names, origins, ready

SHAKESPEARE = b"First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"

PLAIN = TEMPLATES["plain"]


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a tiny build is waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sides, stream):
        monkeypatch.setattr(module, "CHUNK_IDS", 7)


# What is in it --------------------------------------------------------------------------------------------------------


def test_three_documents_are_one_stream_of_thirteen_ids(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"abc", "2": b"de", "3": b"fghij"})
    assert every(store.train) == [101, 102, 103, 2, 104, 105, 2, 106, 107, 108, 109, 110, 2]
    assert store.train.offsets.tolist() == [0, 4, 7, 13]
    assert [store.train.document(n) for n in (0, 3, 4, 6, 7, 12)] == [0, 0, 1, 1, 2, 2]
    assert (store.train.size, store.train.documents, store.train.vocab, store.train.eos) == (13, 3, 260, 2)
    assert (store.train.shared, store.train.masked, store.train.mask(0, 13)) == (True, False, None)
    assert store.train.sizes.tolist() == [0] * 4 + [1] * 256
    assert origins(store.train) == [("1", 0, ""), ("2", 0, ""), ("3", 0, "")]
    assert (store.heldout.size, store.heldout.documents) == (0, 0)
    assert store.heldout.ids(0, 0).tolist() == []


def test_empty_documents_are_counted_and_kept_as_their_end_mark(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"", "2": b"abc", "3": b"", "4": b"de"})
    assert every(store.train) == [2, 101, 102, 103, 2, 2, 104, 105, 2]
    assert store.train.offsets.tolist() == [0, 1, 5, 6, 9]
    assert store.counts == {
        "files": 4, "documents": 4, "empty": 2, "duplicates": 1, "text_bytes": 5, "counted_bytes": 5, "tokens": 9,
        "skipped": {},
    }  # fmt: skip


def test_each_document_has_one_end_mark_and_no_other_mark(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"a<|eos|>b", "2": b"\xef\xbb\xbf</s>", "3": b"caf\xe9"})
    ids = every(store.train)
    assert [mark for mark in ids if mark < 4] == [2, 2, 2]
    assert len(ids) == 9 + 4 + 4 + 3
    assert ids[:9] == [byte + 4 for byte in b"a<|eos|>b"]
    assert documents(store.train) == [b"a<|eos|>b", b"</s>", b"caf\xe9"]


def test_plain_zarr_reads_it(tmp_path: Path, small_chunks: None) -> None:
    talk = b'{"prompt": "Hi", "completion": "Hello", "id": "x%d"}\n'
    files = {"1": b"abcdefghij", "2.jsonl": b"".join(talk % n for n in range(4)), "3": b"x"}
    store = ready(tmp_path, files, holdout=0.3, how="tail", template=PLAIN, id_key="id")
    group = zarr.open_group(str(store.path), mode="r")
    assert group["sizes"][:].tolist() == store.train.sizes.tolist()
    for side in (store.train, store.heldout):
        assert side.size > 7
        inside = group[side.path.name]
        assert sorted(inside) == ["draws", "ids", "mask", "name_ends", "names", "offsets", "origin"]
        assert dict(inside.attrs) == {"documents": side.documents, "tokens": side.size}
        assert [inside[name].dtype for name in sorted(inside)] == ["<u8", "<u2", "?", "<i8", "u1", "<i8", "<i8"]
        assert inside["ids"][:].tolist() == every(side)
        assert inside["mask"][:].tolist() == side.mask(0, side.size).tolist()
        assert inside["offsets"][:].tolist() == side.offsets.tolist()
        ends, read = [0, *inside["name_ends"][:].tolist()], inside["names"][:].tobytes()
        own = [read[a:b].decode() for a, b in pairwise(ends)]
        entries = store.train.files
        assert [
            (entries[n], line, name) for (n, line), name in zip(inside["origin"][:].tolist(), own, strict=True)
        ] == (origins(side))
    assert own == ["x2", "x3", ""]
    assert len(list((store.path / "train/ids/c").iterdir())) == -(-store.train.size // 7)


def test_it_says_what_it_was_made_of(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"abc", ".hidden": b"x", "2": b"abc"}, holdout=0.4, how="tail")
    told = dict(zarr.open_group(str(store.path), mode="r").attrs)
    assert told == {
        "format": 3,
        "tokenizer": {"name": "bytes", "vocab": 260, "eos": 2, "bos": 1},
        "reading": {
            "format": "auto", "split": "file", "text_key": "text", "id_key": None, "dtype": None, "chat": False,
            "errors": "stop",
        },
        "add_bos": False,
        "add_eos": True,
        "template": None,
        "train_on": "assistant",
        "holdout": 0.4,
        "holdout_by": "tail",
        "counts": {
            "files": 2, "documents": 2, "empty": 0, "duplicates": 1, "text_bytes": 6, "counted_bytes": 6, "tokens": 8,
            "skipped": {},
        },
    }  # fmt: skip
    # What was passed over among the files is of this scan, not of the one that the store was built after.
    assert store.counts == {**told["counts"], "skipped": {"hidden": 1}}
    (tmp_path / "text" / ".hidden").rename(tmp_path / "text" / "image")
    (tmp_path / "text" / "image").write_bytes(b"\0")
    assert ready(tmp_path, {}, holdout=0.4, how="tail").counts["skipped"] == {"binary, not text": 1}
    assert (store.how, store.tokenizer._asdict()) == ("tail", told["tokenizer"])
    line = "2 documents (1 train, 1 held out by tail), 6 bytes, 8 ids; duplicates: 1; skipped, hidden: 1"
    assert summary(store) == line


def test_what_was_mended_is_not_called_skipped(tmp_path: Path) -> None:
    text = b'{"text": "a\\ud800 b"}\n{"text": "caf\xe9"}\n\n'
    store = ready(tmp_path, {"1.jsonl": text, ".x": b""}, errors="replace")
    assert summary(store) == (
        "2 documents (2 train, 0 held out by tail), 12 bytes, 14 ids; skipped, blank line: 1; "
        "bytes that are no UTF-8 replaced: 1; skipped, hidden: 1; lone surrogate replaced: 1"
    )
    one = ready(tmp_path / "one", {"1": b"a"})
    assert summary(one) == "1 document (1 train, 0 held out by tail), 1 byte, 2 ids"


def test_ids_are_read_across_chunks(tmp_path: Path, small_chunks: None) -> None:
    store = ready(tmp_path, {"1": bytes(range(65, 95))})
    whole = [*range(69, 99), 2]
    for start in range(32):
        for stop in range(start, 32):
            assert store.train.ids(start, stop).tolist() == whole[start:stop]
    for start, stop in ((-1, 3), (5, 4), (0, 32)):
        with pytest.raises(ValueError, match=rf"^ids\[{start}:{stop}\] must lie in \[0, 31\)$"):
            store.train.ids(start, stop)
    with pytest.raises(ValueError, match=r"^position=31 must be in \[0, 31\)$"):
        store.train.document(31)


# The split ------------------------------------------------------------------------------------------------------------


def test_the_tail_is_cut_at_a_byte_and_its_document_becomes_two(tmp_path: Path) -> None:
    text = {"1": b"abcd", "2": b"efgh", "3": b"ij"}
    store = ready(tmp_path, text, holdout=0.4)
    assert store.how == "tail"
    assert (documents(store.train), documents(store.heldout)) == ([b"abcd", b"ef"], [b"gh", b"ij"])
    assert store.counts["tokens"] == 10 + 4
    store = ready(tmp_path, text, holdout=0.2)
    assert (documents(store.train), documents(store.heldout)) == ([b"abcd", b"efgh"], [b"ij"])


def test_the_tail_of_one_long_document_is_where_it_would_be_cut_by_hand(tmp_path: Path) -> None:
    text = (SHAKESPEARE * 60_000)[: 4 << 20]  # four pieces of reading
    for share, cut in ((0.1, 3774873), (0.5, 2 << 20)):  # the second where a piece ends
        store = ready(tmp_path, {"1": text}, holdout=share)
        assert documents(store.train) == [text[:cut]]
        assert documents(store.heldout) == [text[cut:]]


def test_by_document_equal_ones_are_on_one_side_whatever_their_name(tmp_path: Path) -> None:
    files = {f"{n}": b"text %d" % (n % 60) for n in range(180)}
    store = ready(tmp_path, files, holdout=0.3)
    assert store.how == "document"
    train, heldout = documents(store.train), documents(store.heldout)
    assert not set(train) & set(heldout)
    assert sorted(train + heldout) == sorted(files.values())
    assert 20 < len(heldout) < 100
    bom = ready(tmp_path, {f"{n}": b"\xef\xbb\xbftext %d" % (n % 60) for n in range(180)}, holdout=0.3)
    assert set(documents(bom.heldout)) == set(heldout)  # a mark that is dropped moves nothing


def test_the_side_is_that_of_the_text_digest(tmp_path: Path) -> None:
    store = ready(tmp_path, {f"{n}": b"text %d" % n for n in range(100)}, holdout=0.2)
    entries = scan(tmp_path / "text").entries
    wanted = [entry.name for entry in entries if held_out(bytes.fromhex(entry.digest), 0.2)]
    assert wanted
    assert sorted(documents(store.heldout)) == sorted(b"text " + name.encode() for name in wanted)


NONE = "1 file read: no document found (blank line: 1), must hold text; give more"


@pytest.mark.parametrize(("files", "holdout", "how", "message"), [
    ({"1": b"a", "2": b"b"}, 0.01, "document",
     "data.holdout=0.01, by document: of 2 documents no text is held out; "
     "raise data.holdout, set it to 0, or give more text"),
    ({"1": b"a"}, 0.99, "tail",
     "data.holdout=0.99, by tail: of 1 document no text is left to train on; lower data.holdout or give more text"),
    ({"1.jsonl": b'{"text": ""}\n\n'}, 0.0, "auto",
     "1 file read: 1 document without any text found (blank line: 1), must hold text; give more"),
    ({"1.jsonl": b'{"text": ""}\n' * 3, "2.jsonl": b"\n\n", "3.jsonl": b""}, 0.01, "auto",
     "3 files read: 3 documents without any text found (blank line: 2, empty file: 1), must hold text; give more"),
    ({"1.jsonl": b"\n"}, 0.0, "auto", NONE), ({"1.jsonl": b"\n"}, 0.01, "auto", NONE),
    ({"1.jsonl": b"\n"}, 0.5, "document", NONE), ({"1.jsonl": b"\n"}, 0.5, "tail", NONE),
])  # fmt: skip
def test_a_side_without_text_is_refused(
    tmp_path: Path, files: dict[str, bytes], holdout: float, how: str, message: str
) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        ready(tmp_path, files, holdout=holdout, how=how)
    assert [name[:10] for name in names(tmp_path / "cache")] == [".building-"]


def test_the_parts_of_a_split_that_was_refused_serve_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no text is left to train on"):
        ready(tmp_path, {"1": b"a"}, holdout=0.99)
    monkeypatch.setattr(tokens, "write_part", None)  # none is written any more
    store = ready(tmp_path, {}, holdout=0.0)
    assert names(tmp_path / "cache") == [store.path.name]


# Building it once -----------------------------------------------------------------------------------------------------


def test_the_same_text_is_never_built_twice(tmp_path: Path) -> None:
    first = ready(tmp_path, {"1": b"abc"})
    before = (first.path.stat().st_ino, contents(first.path))
    shutil.move(tmp_path / "text", tmp_path / "moved")
    os.utime(tmp_path / "moved" / "1", (5, 5))
    again = made(scan(tmp_path / "moved"), tmp_path / "cache", holdout=0.0, how="tail")
    assert (again.path.stat().st_ino, contents(again.path)) == before
    assert again.notes == ()
    assert every(again.train) == every(first.train)


def test_renamed_files_that_stay_in_their_order_build_nothing(tmp_path: Path) -> None:
    first = ready(tmp_path, {"1": b"abc", "2": b"defg"})
    before = first.path.stat().st_ino
    (tmp_path / "text" / "1").rename(tmp_path / "text" / "01.txt")
    again = ready(tmp_path, {})
    assert again.path.stat().st_ino == before
    assert (origins(first.train), origins(again.train)) == (
        [("1", 0, ""), ("2", 0, "")],
        [("01.txt", 0, ""), ("2", 0, "")],
    )
    (tmp_path / "text" / "01.txt").rename(tmp_path / "text" / "3")  # another order is other text
    assert ready(tmp_path, {}).path != first.path


def test_documents_on_both_sides_are_counted_whatever_their_files(tmp_path: Path) -> None:
    one = ready(tmp_path / "a", {"a": b"abc\nde\nfgh\nde\n"}, split="line")
    other = ready(tmp_path / "b", {"x.jsonl": b'{"text": "de"}\n{"text": "other"}\n{"text": ""}\n', "y": b""})
    assert other.train.among(one.train) == 1
    assert one.train.among(other.train) == 2
    assert one.train.among(one.train) == 4


@pytest.mark.parametrize("marks", [(True, False), (False, True), (True, True), (False, False)])
def test_a_document_of_one_byte_counts_whatever_marks_it_has(tmp_path: Path, marks: tuple[bool, bool]) -> None:
    eos, bos = marks
    one = ready(tmp_path / "a", {"a": b"a", "b": b"", "c": b"xyz"}, add_eos=eos, add_bos=bos)
    other = ready(tmp_path / "b", {"a": b"b", "b": b"a", "c": b""}, add_eos=eos, add_bos=bos)
    assert (one.train.among(other.train), other.train.among(one.train)) == (1, 1)


def test_every_option_that_shapes_the_ids_has_a_store_of_its_own(tmp_path: Path) -> None:
    text = {f"{n}.jsonl": b'{"text": "text %d", "title": "t"}' % n for n in range(50)}
    options: list[dict[str, Any]] = [
        {}, {"holdout": 0.2}, {"holdout": 0.3}, {"holdout": 0.2, "how": "document"}, {"text_key": "title"},
        {"add_bos": True}, {"add_eos": False}, {"format": "text"}, {"format": "text", "split": "line"},
        {"id_key": "title"}, {"errors": "skip"},
    ]  # fmt: skip
    found = [ready(tmp_path, text, **some) for some in options]
    found.append(ready(tmp_path, {"7.jsonl": b'{"text": "next"}'}))
    assert len({store.path for store in found}) == len(options) + 1
    assert every(found[0].train) != every(found[-1].train)


def test_a_template_counts_by_what_it_says_and_not_by_its_name(tmp_path: Path) -> None:
    corpus = scan(ready(tmp_path, {"a.jsonl": b'{"prompt": "a", "completion": "b", "text": "c"}'}).path / "COMMIT")
    keys = set()
    for name, on in (("plain", "all"), ("chatml", "all"), ("chatml", "assistant")):
        making = making_of(template=TEMPLATES[name], train_on=on)
        keys.add(key_of(corpus, making, making.coder().tokenizer))
        same = making._replace(template=TEMPLATES[name]._replace())
        assert key_of(corpus, same, same.coder().tokenizer) in keys
    assert len(keys) == 3


def test_a_store_that_was_asked_for_by_auto_is_found_by_what_it_came_to_and_the_other_way(tmp_path: Path) -> None:
    for count_, how in ((3, "tail"), (120, "document")):
        root = tmp_path / how
        store = ready(root, {f"{n}": b"text %d" % n for n in range(count_)}, holdout=0.3, how="auto")
        before = contents(root / "cache")
        again = ready(root, {}, holdout=0.3, how=how)
        assert (store.how, again.path, again.notes) == (how, store.path, ())
        assert contents(root / "cache") == before
        other = made(scan(root / "text"), root / "other", holdout=0.3, how=how)
        assert made(scan(root / "text"), root / "other", holdout=0.3, how="auto").path == other.path
        assert other.path.name == store.path.name


@pytest.mark.parametrize("note", [b"", b"many", b"\xff", b"-7", b"9" * 5000, b"5", None])
def test_how_many_documents_there_were_is_a_hint_that_may_be_anything(tmp_path: Path, note: bytes | None) -> None:
    files = {f"{n}": b"text %d" % n for n in range(120)}
    tail = ready(tmp_path, files, holdout=0.3, how="tail")
    store = ready(tmp_path, {}, holdout=0.3, how="document")
    wanted = contents(store.path)
    (hint,) = (tmp_path / "cache").glob("*.documents")
    assert hint.read_bytes() == b"120"
    hint.unlink()
    if note is not None:
        hint.write_bytes(note)
    again = ready(tmp_path, {}, holdout=0.3, how="auto")  # "5" would lead to the tail
    assert (again.path, again.how, contents(again.path), again.notes) == (store.path, "document", wanted, ())
    assert hint.read_bytes() == b"120"
    assert names(tmp_path / "cache") == sorted([tail.path.name, store.path.name])


def test_a_store_has_the_same_bits_whoever_builds_it(tmp_path: Path) -> None:
    one = ready(tmp_path, {"1": b"abc", "2": b"def"}, holdout=0.4)
    other = made(scan(tmp_path / "text"), tmp_path / "other", holdout=0.4, how="auto")
    assert one.path.name == other.path.name
    assert contents(one.path) == contents(other.path)


def test_a_failed_build_keeps_nothing_but_finished_parts(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"some text")
    corpus = scan(path)
    path.write_bytes(b"some text and more")
    message = f"{path}: changed while it was being read; run again when nothing writes to it"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        made(corpus, tmp_path / "cache")
    (left,) = names(tmp_path / "cache")
    assert left.startswith(".building-")
    assert os.listdir(tmp_path / "cache" / left) == []


def test_marks_that_a_tokenizer_lacks_and_words_that_are_none_are_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    lack = "data.add_bos=true: data.tokenizer=ids:100:7 has no begin mark; set data.bos_token or drop add_bos"
    with pytest.raises(ValueError, match=f"^{re.escape(lack)}$"):
        ready(tmp_path, {"1": b"abc"}, tokenizer="ids:100:7", add_bos=True)
    wrong = "data.holdout_by='tale' must be one of auto, document, tail"
    with pytest.raises(ValueError, match=f"^{re.escape(wrong)}$"):
        ready(tmp_path, {"1": b"abc"}, how="tale")
    with pytest.raises(ValueError, match=re.escape("data.holdout=1.0 must be in [0, 1)")):
        ready(tmp_path, {"1": b"abc"}, holdout=1.0)
    assert not (tmp_path / "cache").exists()


# Damage ---------------------------------------------------------------------------------------------------------------


def test_whatever_is_missing_cut_or_longer_is_built_anew_and_said(tmp_path: Path, small_chunks: None) -> None:
    store = ready(tmp_path, {"1": b"abcdefghij", "2": b"kl"}, holdout=0.4)
    whole = contents(store.path)
    # Chunks of ids, one more of train's, of offsets, origin and draws of both sides; sizes; nine arrays, three groups; COMMIT.
    assert len(whole) == 8 + 1 + 1 + 9 + 3 + 1
    for number, (name, text) in enumerate(whole.items()):
        path = store.path / name
        path.unlink()
        if number % 4:
            path.write_bytes([text[:-1], text + b"\0", b""][number % 4 - 1])
        again = ready(tmp_path, {}, holdout=0.4)
        (note,) = again.notes
        assert note.startswith(f"{store.path}: ")
        assert note.endswith("; built anew")
        assert contents(store.path) == whole
        assert names(tmp_path / "cache") == [store.path.name]


def test_the_note_names_the_file(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"abc"})
    os.truncate(store.path / "train/ids/c/0", 5)
    assert ready(tmp_path, {}).notes == (f"{store.path}: train/ids/c/0 has 5 bytes, must have 8; built anew",)
    (store.path / "train/offsets/c/0").unlink()
    assert ready(tmp_path, {}).notes == (f"{store.path}: train/offsets/c/0 has no bytes, must have 16; built anew",)
    (store.path / "extra").write_bytes(b"x")
    assert ready(tmp_path, {}).notes == (f"{store.path}: its files are not those that were written; built anew",)
    shutil.rmtree(store.path)
    store.path.write_bytes(b"a file")
    (note,) = ready(tmp_path, {}).notes
    assert note == f"{store.path}: cannot be opened ([Errno 20] Not a directory: '{store.path}/COMMIT'); built anew"


def test_edited_metadata_and_a_wrong_index_are_noticed(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"abc", "2": b"def"})
    path = store.path / "train/ids/zarr.json"
    path.write_text(path.read_text().replace("8", "9", 1))
    assert ready(tmp_path, {}).notes == (f"{store.path}: its files are not those that were written; built anew",)
    (store.path / "train/offsets/c/0").write_bytes(np.array([0, 4, 9], "<i8").tobytes())
    why = "cannot be opened (train/offsets must lead from 0 to 8 in 2 documents)"
    assert ready(tmp_path, {}).notes == (f"{store.path}: {why}; built anew",)


@pytest.mark.parametrize("offsets", [[0, 4, 9], [1, 4, 8], [0, 8], [0, 2, 4, 8]])
def test_an_index_that_does_not_fit_its_side_is_refused(tmp_path: Path, offsets: list[int]) -> None:
    store = ready(tmp_path, {"1": b"abc", "2": b"def"})
    (store.path / "train/offsets/c/0").write_bytes(np.array(offsets, "<i8").tobytes())
    with pytest.raises(ValueError, match=r"^train/offsets must lead from 0 to 8 in 2 documents$"):
        open_stream(store.path / "train")


def test_a_store_that_goes_bad_while_it_is_read_is_an_error_with_the_file(tmp_path: Path, small_chunks: None) -> None:
    store = ready(tmp_path, {"1": b"abcdefghijklmnop"})
    os.truncate(store.path / "train/ids/c/1", 2)
    fix = "run again to have the token store built anew"
    message = f"{store.path}/train/ids/c/1: cut short; {fix}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        store.train.ids(5, 12)
    (store.path / "train/ids/c/2").unlink()
    message = f"{store.path}/train/ids/c/2: No such file or directory; {fix}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        store.train.ids(14, 17)


# The cache folder -----------------------------------------------------------------------------------------------------


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "x").write_bytes(b"text")
    cache = tmp_path / "file" / "cache"
    message = f"{cache}: cannot be written (Not a directory); set data.cache to a folder with room"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        made(scan(tmp_path / "x"), cache)


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"text")
    monkeypatch.setattr(tokens.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(99, 84, 15))  # type: ignore[attr-defined]
    cache = tmp_path / "cache"
    message = f"{cache}: 15 bytes are free, the token store needs about 16; set data.cache to a folder with room"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        made(scan(tmp_path / "x"), cache)


def test_a_store_in_a_folder_that_is_read_only_is_opened(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": b"abc"})
    for path in (*store.path.rglob("*"), store.path, tmp_path / "cache"):
        path.chmod(0o555)
    before = (tmp_path / "cache").stat().st_mtime_ns
    assert every(ready(tmp_path, {}).train) == every(store.train)
    assert (tmp_path / "cache").stat().st_mtime_ns == before
    for path in (tmp_path / "cache", store.path, *store.path.rglob("*")):
        path.chmod(0o755)


# Size -----------------------------------------------------------------------------------------------------------------


def test_positions_beyond_2_to_the_31_lead_to_the_right_window(tmp_path: Path) -> None:
    size = 2**31 + 10
    folder = tmp_path / "train"
    for part in ("ids/c", "offsets/c"):
        (folder / part).mkdir(parents=True)
    (tmp_path / "sizes/c").mkdir(parents=True)
    (tmp_path / "sizes/c/0").write_bytes(np.zeros(260, "<u2").tobytes())
    for path, facts in (
        (folder, {"documents": 2, "tokens": size}),
        (tmp_path, {"tokenizer": {"vocab": 260, "eos": 2}, "add_bos": False, "add_eos": True}),
    ):
        (path / "zarr.json").write_text(json.dumps({"attributes": facts}))
    (folder / "offsets/c/0").write_bytes(np.array([0, 2**31 + 6, size], "<i8").tobytes())
    last = folder / "ids" / "c" / str(2**31 // stream.CHUNK_IDS)
    last.write_bytes(np.arange(100, 110, dtype="<u2").tobytes())
    os.truncate(last, stream.CHUNK_IDS * 2)
    with open(last.with_name(str(2**31 // stream.CHUNK_IDS - 1)), "wb") as file:
        file.truncate(stream.CHUNK_IDS * 2 - 2)
        file.seek(0, os.SEEK_END)
        file.write(np.array([99], "<u2").tobytes())
    side = open_stream(folder)
    assert side.ids(size - 11, size).tolist() == list(range(99, 110))
    assert (side.document(2**31 + 5), side.document(2**31 + 6)) == (0, 1)
    # The last row that does not run on into the next epoch.
    wanted = (size - 6) // 5 * 5
    at = {"text": Cursor(0, wanted // 5)}
    batch = arrays_at([Source("text", side)], Plan(1, 5, shuffle=False), 3, at, 0)
    assert batch["inputs"].flatten().tolist() == [100 + n - 2**31 for n in range(wanted, wanted + 5)]
    assert batch["segments"].flatten().tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("split", ["file", "line"])
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    # Of lines, which are many, only so many are looked at together.
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 18)
    monkeypatch.setattr(build, "_AT_ONCE", 1 << 12)

    def peak(pieces: int) -> int:
        with open(tmp_path / "x", "wb") as file:
            for _ in range(pieces):
                file.write((SHAKESPEARE[:50] + b"\n" * (split == "line")) * 5000)
        tracemalloc.start()
        store = made(scan(tmp_path / "x"), tmp_path / "cache", holdout=0.1, split=split)
        for at in range(0, store.train.size - 1000, 100_003):
            store.train.ids(at, at + 1000)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    few, many = (3, 9) if split == "line" else (40, 240)
    peak(1)
    assert peak(many) < 1.1 * peak(few) < 20e6


def test_opening_reads_the_index_alone_and_a_row_takes_microseconds(tmp_path: Path) -> None:
    store = ready(tmp_path, {"1": SHAKESPEARE * 100_000})
    times = []
    for n in range(200):
        begin = time.perf_counter()
        store.train.ids(n * 40_943, n * 40_943 + 512)
        times.append(time.perf_counter() - begin)
    assert min(times) < 50e-6
    begin = time.perf_counter()
    ready(tmp_path, {})
    assert time.perf_counter() - begin < 1


def test_the_standard_library_is_a_store_of_text(tmp_path: Path) -> None:
    store = made(scan("stdlib:"), tmp_path, holdout=0.01, how="auto")
    assert store.how == "document"
    assert store.counts["tokens"] == store.counts["text_bytes"] + store.counts["documents"]
    assert store.train.size + store.heldout.size == store.counts["tokens"]
    assert 0 < store.heldout.size < store.counts["tokens"] / 20
