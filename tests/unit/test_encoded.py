"""Records to documents: marks exactly once, what is trained on, bytes that are no UTF-8; each message in full."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.data.chat import TEMPLATES, Template, encode_turns, messages_of, render
from lib.errors import DataError
from lib.store import coders, compressed
from lib.store.coders import open_coder
from lib.store.tokens import TokenStore
from tests.coders import byte_level, unknown
from tests.stores import documents, every, ids_of, masks_of, names, origins, ready

MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TALK = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is long as soon as it has more than these bytes."""
    monkeypatch.setattr(compressed, "PIECE", 20)
    monkeypatch.setattr(coders, "PIECE_BYTES", 8)


@pytest.fixture(scope="module")
def level(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_level(tmp_path_factory.mktemp("tokenizer"), marks=MARKS)


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refused(root: Path, files: dict[str, bytes], message: str, **options: Any) -> None:
    """Hold what stops a build to this, `@` standing for the folder of text."""
    with pytest.raises(DataError, match=f"^{re.escape(message.replace('@', str(root / 'text')))}$"):
        ready(root, files, **options)


# Marks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("add_bos", "add_eos", "ids"), [
    (False, False, [97 + 4]), (True, False, [1, 97 + 4]), (False, True, [97 + 4, 2]), (True, True, [1, 97 + 4, 2]),
])  # fmt: skip
def test_marks_are_added_exactly_as_asked(tmp_path: Path, add_bos: bool, add_eos: bool, ids: list[int]) -> None:
    store = ready(tmp_path, {"1": b"a", "2": b"a"}, add_bos=add_bos, add_eos=add_eos)
    assert every(store.train) == ids * 2
    assert store.train.offsets.tolist() == [0, len(ids), 2 * len(ids)]
    assert store.train.shared == (add_eos and not add_bos)
    assert store.counts["counted_bytes"] == 2


def test_marks_of_a_tokenizer_are_added_exactly_as_asked(tmp_path: Path, level: str) -> None:
    bos, eos = (open_coder(level).marks[mark] for mark in ("<s>", "</s>"))
    (a,) = open_coder(level).encode([b"a"])[0].tolist()
    for add_bos, add_eos in ((False, False), (True, False), (False, True), (True, True)):
        store = ready(tmp_path, {"1": b"a"}, tokenizer=level, add_bos=add_bos, add_eos=add_eos)
        assert every(store.train) == [bos] * add_bos + [a] + [eos] * add_eos


def test_an_empty_document_is_its_marks_and_without_any_it_is_none(tmp_path: Path) -> None:
    files = {"1": b"", "2": b"a", "3": b"", "4": b""}
    assert ids_of(ready(tmp_path, files, add_bos=True).train) == [[1, 2], [1, 101, 2], [1, 2], [1, 2]]
    assert ids_of(ready(tmp_path, files, add_bos=True, add_eos=False).train) == [[1], [1, 101], [1], [1]]
    store = ready(tmp_path, files, add_eos=False)
    assert ids_of(store.train) == [[101]]
    assert origins(store.train) == [("2", 0, "")]
    assert (store.counts["documents"], store.counts["empty"], store.counts["duplicates"]) == (1, 3, 0)


def test_a_conversation_that_brings_its_marks_gets_no_second_ones(tmp_path: Path, level: str) -> None:
    coder = open_coder(level)
    bos, eos = coder.marks["<s>"], coder.marks["</s>"]
    own, mask = encode_turns(render(messages_of(TALK), TEMPLATES["mistral"]), coder)
    assert (own[0], own[-1], mask.tolist().count(True) > 1, mask[-1]) == (bos, eos, True, True)
    for add_bos in (False, True):
        for add_eos in (False, True):
            options = {"tokenizer": level, "template": TEMPLATES["mistral"], "add_bos": add_bos, "add_eos": add_eos}
            store = ready(tmp_path, {"1.jsonl": lines(TALK, TALK)}, **options)
            assert ids_of(store.train) == [own.tolist()] * 2
            assert masks_of(store.train) == [mask.tolist()] * 2
    without = TEMPLATES["chatml"]
    body, learnt = encode_turns(render(messages_of(TALK), without), coder)
    store = ready(tmp_path, {}, tokenizer=level, template=without, add_bos=True, eos_token="</s>")
    assert ids_of(store.train) == [[bos, *body.tolist(), eos]] * 2
    assert masks_of(store.train) == [[False, *learnt.tolist(), True]] * 2


def test_one_mark_of_its_own_does_not_stand_for_both(tmp_path: Path, level: str) -> None:
    eos = open_coder(level).marks["</s>"]
    template = Template(user=("", ""), assistant=("", "</s>"))
    options = {"template": template, "tokenizer": level, "eos_token": "</s>", "bos_token": "</s>", "add_bos": True}
    store = ready(tmp_path, {"1.jsonl": lines({"prompt": "", "completion": ""}), "2": b"the"}, **options)
    assert ids_of(store.train)[0] == [eos, eos]


def test_a_token_file_that_brings_its_marks_gets_no_second_ones(tmp_path: Path, level: str) -> None:
    bos, eos = (open_coder(level).marks[mark] for mark in ("<s>", "</s>"))
    (tmp_path / "text").mkdir()
    np.save(tmp_path / "text" / "1.npy", np.array([bos, 10, 11, eos, 12, eos, eos, bos, 13], np.int64))
    store = ready(tmp_path, {}, tokenizer=level)
    assert ids_of(store.train) == [[bos, 10, 11, eos], [12, eos], [eos], [bos, 13, eos]]
    store = ready(tmp_path, {}, tokenizer=level, add_bos=True)
    assert ids_of(store.train) == [[bos, 10, 11, eos], [bos, 12, eos], [bos, eos], [bos, 13, eos]]
    assert origins(store.train) == [("1.npy", number, "") for number in (1, 2, 3, 4)]


# Ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "dtype"), [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4"), (1 << 20, "<u4")])
def test_ids_take_four_bytes_where_two_are_too_few(tmp_path: Path, vocab: int, dtype: str) -> None:
    (tmp_path / "text").mkdir()
    ids = np.array([0, 5, vocab - 2, vocab - 1, 7], "<i8")
    np.save(tmp_path / "text" / "1.npy", ids)
    store = ready(tmp_path, {}, tokenizer=f"ids:{vocab}:{vocab - 1}")
    assert store.train.ids(0, 6).dtype == dtype
    assert every(store.train) == [0, 5, vocab - 2, vocab - 1, 7, vocab - 1]
    assert (store.path / "train/ids/c/0").stat().st_size == 6 * np.dtype(dtype).itemsize


def test_an_end_mark_wider_than_the_file_it_is_added_to_keeps_its_value(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    np.save(tmp_path / "text" / "1.npy", np.array([1, 255], np.uint8))
    assert every(ready(tmp_path, {}, tokenizer="ids:70000:65900").train) == [1, 255, 65900]


def test_a_tokenizer_for_ids_meets_no_text(tmp_path: Path) -> None:
    why = "data.tokenizer=ids:100:7 reads files of ids, must not meet text; name a tokenizer for text"
    for errors in ("stop", "skip", "replace"):
        refused(tmp_path, {"1.txt": b"text"}, f"@/1.txt: {why}", tokenizer="ids:100:7", errors=errors)


# Bytes that are no UTF-8 ----------------------------------------------------------------------------------------------


BAD = b"the cat\n\xe9 sat"
FIX = "save the file as UTF-8, set data.errors=replace or data.errors=skip, or data.tokenizer=bytes"


def test_bytes_keep_what_is_no_utf8(tmp_path: Path) -> None:
    assert documents(ready(tmp_path, {"1": BAD}).train) == [BAD]


def check_bad(root: Path, level: str, text: bytes, at: int) -> None:
    coder = open_coder(level)
    files = {"1": b"the mat", "2": text, "3": b"the dog"}
    wrong = f"byte 0xe9 at offset {at} of the text is not UTF-8, which this tokenizer needs"
    refused(root, files, f"@/2: {wrong}; {FIX}", tokenizer=level)
    skipped = ready(root, {}, tokenizer=level, errors="skip")
    assert [coder.decode(ids) for ids in ids_of(skipped.train)] == [b"the mat", b"the dog"]
    assert skipped.counts["skipped"] == {"not UTF-8": 1}
    assert (skipped.counts["text_bytes"], skipped.counts["counted_bytes"]) == (14, 14)
    assert skipped.counts["tokens"] == len(every(skipped.train))
    mended = ready(root, {}, tokenizer=level, errors="replace")
    wanted = text.replace(b"\xe9", "\ufffd".encode())
    assert [coder.decode(ids) for ids in ids_of(mended.train)] == [b"the mat", wanted, b"the dog"]
    assert mended.counts["skipped"] == {"bytes that are no UTF-8 replaced": 1}
    assert mended.counts["text_bytes"] == 14 + len(text)
    assert mended.counts["counted_bytes"] == 14 + len(wanted)


def test_bytes_that_are_no_utf8_stop_or_are_counted(tmp_path: Path, level: str) -> None:
    check_bad(tmp_path, level, BAD, 8)


def test_in_a_long_text_too_and_the_offset_is_that_of_the_whole(tmp_path: Path, level: str, in_pieces: None) -> None:
    check_bad(tmp_path, level, b"cat\n" * 20 + b"a cat\xe9 and \xe9" + b"\nmat" * 9, 85)


def test_a_line_that_is_no_utf8_is_named_by_its_number(tmp_path: Path, level: str) -> None:
    files = {"1": b"good\n\nalso good\nba\xe9d\n"}
    wrong = "byte 0xe9 at offset 2 of the text is not UTF-8, which this tokenizer needs"
    refused(tmp_path, files, f"@/1:4: {wrong}; {FIX}", tokenizer=level, split="line")
    store = ready(tmp_path, {}, tokenizer=level, split="line", errors="skip")
    assert origins(store.train) == [("1", 1, ""), ("1", 3, "")]
    assert store.counts["skipped"] == {"blank line": 1, "not UTF-8": 1}


def test_a_long_text_is_the_same_ids_as_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"1": b"a", "2": bytes(range(1, 256)), "3": b"b"}
    options = {"add_bos": True, "template": TEMPLATES["plain"]}
    short = ready(tmp_path / "short", files, **options)
    monkeypatch.setattr(compressed, "PIECE", 10)
    monkeypatch.setattr(coders, "PIECE_BYTES", 7)
    long = ready(tmp_path / "long", files, **options)
    assert ids_of(long.train) == ids_of(short.train)
    assert masks_of(long.train) == masks_of(short.train) == [[False] + [True] * (n + 1) for n in (1, 255, 1)]
    assert long.counts == short.counts


# Conversations --------------------------------------------------------------------------------------------------------


LONG = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"},
                          {"from": "gpt", "value": "d"}], "system": "s"}  # fmt: skip


@pytest.mark.parametrize("train_on", ["all", "assistant", "last"])
@pytest.mark.parametrize("template", ["plain", "chatml", "alpaca"])
def test_masks_are_what_the_conversation_renders_to(tmp_path: Path, template: str, train_on: str) -> None:
    rows = [TALK, LONG, {"instruction": "do", "input": "x", "output": "y"}, {"prompt": "p", "completion": "q"}]
    options = {"template": TEMPLATES[template], "train_on": train_on}
    store = ready(tmp_path, {"1.jsonl": lines(*rows)}, **options)
    for row, ids, mask in zip(rows, ids_of(store.train), masks_of(store.train), strict=True):
        turns = render(messages_of(row), TEMPLATES[template], train_on)
        body, learnt = encode_turns(turns, open_coder("bytes"))
        assert ids == [*body.tolist(), 2]
        assert mask == [*learnt.tolist(), bool(learnt[-1])]
    said = sum(len(text) for text in ("the cat", "sat", "abcd", "s", "dox", "y", "pq"))
    assert store.counts["text_bytes"] == said


def test_records_that_break_the_rules_stop_or_are_counted(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    files = {"1.jsonl": lines(TALK, TALK, bad, TALK)}
    options = {"template": TEMPLATES["plain"]}
    why = (
        "message 2: role=user follows user but must follow system, assistant or tool, or come first; repair it or set "
        "data.errors=skip"
    )
    refused(tmp_path, files, f"@/1.jsonl:3: {why}", **options)
    store = ready(tmp_path, {}, errors="skip", **options)
    assert origins(store.train) == [("1.jsonl", line, "") for line in (1, 2, 4)]
    assert store.counts["skipped"] == {"roles out of order": 1}


def test_conversations_that_are_none_are_counted_each_by_its_cause(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    rows = [
        TALK,
        {"messages": [{"role": "user", "content": "a"}, call]},
        {"messages": [call, call]},
        TALK | {"prompt": "p", "completion": "q"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]},
        {"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"text": "a"},
        {"conversations": [{"from": "system", "value": "a"}, {"from": "gpt", "value": "b"}]},
    ]
    store = ready(tmp_path, {"1.jsonl": lines(*rows)}, template=TEMPLATES["alpaca"], errors="skip")
    assert origins(store.train) == [("1.jsonl", 1, "")]
    assert store.counts["skipped"] == {
        "content beside the text": 2,
        "no conversation": 1,
        "roles out of order": 2,
        "two conversations in one record": 1,
        "weight is neither 0 nor 1": 1,
    }


def test_a_role_without_a_place_stops_or_is_counted(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "s"}, *TALK["messages"]]}
    files = {"1.jsonl": lines(TALK, row)}
    what = "role=system must be one of user, assistant, which the template has"
    fix = "choose another data.template, take the message out, or set data.errors=skip"
    refused(tmp_path, files, f"@/1.jsonl:2: {what}; {fix}", template=TEMPLATES["mistral"])
    store = ready(tmp_path, {}, template=TEMPLATES["mistral"], errors="skip")
    assert store.counts["skipped"] == {"role without a place in the template": 1}


def test_a_message_of_weight_nought_is_not_trained_on(tmp_path: Path) -> None:
    talk = [("user", "a", 1), ("assistant", "bc", 0), ("user", "d", None), ("assistant", "ef", None)]
    row = {"messages": [{"role": role, "content": text, "weight": weight} for role, text, weight in talk]}
    store = ready(tmp_path, {"1.jsonl": lines(row)}, template=TEMPLATES["plain"])
    assert masks_of(store.train) == [[True, False, False, False, True, True, True]]


def test_text_that_the_tokenizer_s_library_refuses_stops_or_is_counted(tmp_path: Path) -> None:
    path = unknown(tmp_path)
    talk = lines({"prompt": "the", "completion": " cat"}, {"prompt": "a", "completion": " dog"})
    files = {"1.txt": b"the cat\nthe dog\nthe\n", "2.jsonl": talk}
    why = f"{path}: cannot encode the text (WordLevel error: Missing [UNK] token from the vocabulary)"
    fix = "name a tokenizer that takes any text, or set data.errors=skip"
    options = {"tokenizer": path, "split": "line", "template": TEMPLATES["plain"]}
    refused(tmp_path, files, f"@/1.txt:2: {why}; {fix}", **options)
    store = ready(tmp_path, {}, errors="skip", **options)
    assert origins(store.train) == [("1.txt", 1, ""), ("1.txt", 3, ""), ("2.jsonl", 1, "")]
    assert store.counts["skipped"] == {"text the tokenizer cannot encode": 2}
    refused(tmp_path, {"1.txt": b"the cat\n"}, f"@/2.jsonl:2: {why}; {fix}", **options)


def test_a_conversation_with_nothing_to_train_on_is_dropped_and_counted(tmp_path: Path) -> None:
    mute = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "trained": False}]}
    store = ready(tmp_path, {"1.jsonl": lines(mute, TALK, mute)}, template=TEMPLATES["plain"])
    assert origins(store.train) == [("1.jsonl", 2, "")]
    assert store.counts["skipped"] == {"conversation with nothing to train on": 2}
    assert (store.counts["documents"], store.counts["duplicates"]) == (1, 0)


def test_text_among_conversations_is_trained_on_whole_also_when_it_is_empty_or_long(
    tmp_path: Path, in_pieces: None
) -> None:
    files = {"1.txt": b"", "2.txt": b"text", "3.txt": b"long text " * 5, "4.jsonl": lines(TALK)}
    store = ready(tmp_path, files, template=TEMPLATES["plain"], train_on="last")
    assert masks_of(store.train)[:3] == [[True], [True] * 5, [True] * 51]
    assert masks_of(store.train)[3] == [False] * 7 + [True] * 4


def test_a_cut_within_a_conversation_keeps_what_is_trained_on(tmp_path: Path) -> None:
    row = {"prompt": "abcdef", "completion": "ghij"}
    for holdout, first, second in (
        (0.3, [False] * 6 + [True] * 2, [True] * 4),
        (0.6, [False] * 5, [False] * 2 + [True] * 5),
    ):
        store = ready(tmp_path, {"1.jsonl": lines(row)}, template=TEMPLATES["plain"], holdout=holdout, add_bos=True)
        assert documents(store.train) + documents(store.heldout) == [b"abcdefghij"[: (k := len(first) - 1)],
                                                                     b"abcdefghij"[k:]]  # fmt: skip
        # A begin mark is never trained on; an end mark where what it ends is.
        assert masks_of(store.train) == [[False, *first]]
        assert masks_of(store.heldout) == [[False, *second]]


def test_bits_of_names_reach_the_store(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "id": own} for n, own in enumerate(["a", "\u00e9\n", "", None, 7])]
    store = ready(tmp_path, {"1.jsonl": lines(*rows), "2.txt": b"x"}, id_key="id")
    assert [own for _, _, own in origins(store.train)] == ["a", "\u00e9\n", "", "", "7", ""]
    cut: TokenStore = ready(tmp_path, {}, id_key="id", holdout=0.3, how="tail")
    both = [one for side in (cut.train, cut.heldout) for one in origins(side)]
    assert both[3] == both[4] == ("1.jsonl", 4, "")  # which the cut made two of
    assert [*both[:3], *both[4:]] == origins(store.train)
    assert all(a < b for a, b in pairwise(store.train.offsets.tolist()))
    assert len(names(tmp_path / "cache")) == 2
