"""Tokenizers: identity, round trips, no mark from text, no mark added."""

from __future__ import annotations

import json
import random
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lib.data.bytes import BYTES, SIZES
from lib.store import coders
from lib.store.coders import MOST_IDS, NO_MARK, Coder, open_coder, pieces
from lib.store.foreign import CL100K
from tests.coders import EOT, EXACT, TEXT, byte_level, pieced, ranks, saved, unigram, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="module")
def every(folder: Path) -> dict[str, Coder]:
    made = {make.__name__: open_coder(make(folder)) for make in (byte_level, unigram, words, ranks, pieced)}
    return {"bytes": open_coder("bytes"), **made}


LOSSLESS = ("bytes", "byte_level", "ranks", "pieced")
ALL = (*LOSSLESS, "unigram", "words")


def test_bytes_need_no_file() -> None:
    coder = open_coder("bytes")
    assert coder.tokenizer == BYTES
    assert coder.sizes.tolist() == SIZES.tolist()
    assert [ids.tolist() for ids in coder.encode([b"a", b"", b"\xff"])] == [[101], [], [259]]
    assert coder.decode([1, 101, 2]) == b"a"
    assert coder.marks == {}


def test_ready_made_ids_are_shown_as_numbers_and_take_no_text() -> None:
    coder = open_coder("ids:100:7")
    assert coder.tokenizer == ("ids:100:7", 100, 7, None)
    assert coder.decode([1, 99, 7]) == b"1 99"
    assert coder.sizes.tolist() == [0] * 100
    assert open_coder(f"ids:{MOST_IDS}:2").tokenizer.vocab == 1 << 31
    message = "data.tokenizer=ids:100:7 reads files of ids, must not meet text; name a tokenizer for text"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        coder.encode([b"a"])


@pytest.mark.parametrize("name", LOSSLESS)
def test_text_comes_back_from_its_ids(every: dict[str, Coder], name: str) -> None:
    coder = every[name]
    (ids,) = coder.encode([EXACT.encode()])
    assert coder.decode(ids) == EXACT.encode()
    assert coder.decode(np.append(ids, coder.tokenizer.eos)) == EXACT.encode()


@pytest.mark.parametrize("name", ["bytes", "byte_level", "ranks"])
def test_sizes_add_up_to_the_bytes_of_the_text(every: dict[str, Coder], name: str) -> None:
    coder = every[name]
    (ids,) = coder.encode([EXACT.encode()])
    assert int(coder.sizes[ids].sum()) == len(EXACT.encode())


def test_sizes_of_pieces_count_the_space_that_was_put_in_front(every: dict[str, Coder]) -> None:
    (ids,) = every["pieced"].encode([EXACT.encode()])
    assert int(every["pieced"].sizes[ids].sum()) == len(EXACT.encode()) + 1


@pytest.mark.parametrize("name", ALL)
def test_marks_stand_for_no_bytes_and_ids_stay_in_the_vocabulary(every: dict[str, Coder], name: str) -> None:
    coder = every[name]
    assert coder.sizes.dtype == np.uint16
    assert len(coder.sizes) == coder.tokenizer.vocab
    assert [int(coder.sizes[number]) for number in (*coder.marks.values(), coder.tokenizer.eos)] == [0] * (
        len(coder.marks) + 1
    )
    (ids,) = coder.encode(["".join(TEXT).encode()])
    assert 0 < ids.max() < coder.tokenizer.vocab
    assert coder.decode(list(coder.marks.values())) == b""


@pytest.mark.parametrize("name", ALL)
def test_no_mark_is_added_to_a_document(every: dict[str, Coder], name: str) -> None:
    coder = every[name]
    whole = coder.encode([b"the", b"", b"the"])
    assert len(whole) == 3
    assert whole[0].tolist() == whole[2].tolist()
    assert whole[1].tolist() == []
    assert not set(whole[0].tolist()) & {coder.tokenizer.eos, coder.tokenizer.bos}


def test_a_post_processor_that_would_add_marks_is_not_asked(folder: Path) -> None:
    facts = json.loads(Path(byte_level(folder, marks=("<s>", "</s>"), name="post.json")).read_text())
    pair = {"id": "<s>", "type_id": 0}, {"id": "</s>", "type_id": 0}
    around = [{"SpecialToken": pair[0]}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": pair[1]}]
    tokens = {name: {"id": name, "ids": [number], "tokens": [name]} for number, name in enumerate(("<s>", "</s>"))}
    facts["post_processor"] = {
        "type": "TemplateProcessing", "single": around, "pair": around, "special_tokens": tokens,
    }  # fmt: skip
    facts["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path = folder / "post.json"
    path.write_text(json.dumps(facts))
    coder = open_coder(str(path))
    assert (coder.tokenizer.bos, coder.tokenizer.eos) == (0, 1)
    (ids,) = coder.encode([b"zebra"])
    assert coder.decode(ids) == b"zebra"
    assert not {0, 1} & set(ids.tolist())


@pytest.mark.parametrize("name", ALL)
def test_text_that_spells_a_special_token_stays_text(every: dict[str, Coder], name: str) -> None:
    coder = every[name]
    unknown = {number for text, number in coder.marks.items() if "unk" in text.lower()}
    for text in (*coder.marks, EOT, "</s>"):
        for document in (text, f"a{text}b", f"the {text} the"):
            (ids,) = coder.encode([document.encode()])
            assert not set(ids.tolist()) & (set(coder.marks.values()) - unknown), document
            if name in LOSSLESS:
                assert coder.decode(ids) == document.encode()


def test_text_that_spells_a_special_token_is_encoded_as_if_there_were_no_such_token(tmp_path: Path) -> None:
    coder = open_coder(byte_level(tmp_path, marks=("</s>", "the cat")))
    (ids,) = coder.encode([b"the cat"])
    assert ids.tolist() == [one for part in coder.encode([b"the", b" cat"]) for one in part.tolist()]
    assert coder.marks == {"</s>": 0, "the cat": 1}


@pytest.mark.parametrize(("name", "special"), [
    ("byte_level", {EOT: 0}),
    ("unigram", {"<unk>": 0, "<s>": 1, "</s>": 2}),
    ("words", {"[UNK]": 0, "[EOS]": 1}),
    ("ranks", {EOT: 262}),
    ("pieced", {"<s>": 1, "</s>": 2}),
])  # fmt: skip
def test_a_template_gets_the_special_token_it_asks_for(
    every: dict[str, Coder], name: str, special: dict[str, int]
) -> None:
    coder = every[name]
    assert coder.marks == special


@pytest.mark.parametrize("name", ["byte_level", "unigram", "ranks", "pieced"])
def test_bytes_that_are_no_text_are_refused_with_their_offset(every: dict[str, Coder], name: str) -> None:
    fix = 'set data.errors="replace", or data.tokenizer="bytes", which takes any'
    for text, byte, at in ((b"caf\xe9 x", "e9", 3), (b"x" * (1 << 20) + b"\n\xed\xa0\x80", "ed", (1 << 20) + 1)):
        message = f"byte 0x{byte} at offset {at} is not UTF-8, must be text for this tokenizer; {fix}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            every[name].encode([b"good", text])


def test_the_name_holds_the_files_name_and_a_digest_of_its_content(folder: Path) -> None:
    path = Path(byte_level(folder, name="named.json"))
    digest = blake2b(path.read_bytes(), digest_size=8).hexdigest()
    assert open_coder(str(path)).tokenizer == (f"named.json:{digest}", 293, 0, None)
    path.write_text(path.read_text() + "\n")
    assert open_coder(str(path)).tokenizer.name != f"named.json:{digest}"


def test_whatever_ids_depend_on_is_in_the_identity(folder: Path, tmp_path: Path) -> None:
    assert open_coder("bytes").identity == "bytes, 260 ids, end 2, begin 1"
    assert open_coder("ids:60:2").identity == "ids:60:2, 60 ids, end 2, begin none"
    path, other = ranks(folder), byte_level(tmp_path, marks=("<s>", "</s>", EOT, "<go>"))
    coders_ = [
        open_coder(path),
        open_coder(path, eos="<end>"),  # the same number, but templates that spell it mean another
        open_coder(path, eos="<end>", bos="<go>"),
        *(open_coder(other, eos=eos, bos=bos) for eos in ("</s>", EOT) for bos in (None, "<go>")),
    ]
    assert len({coder.identity for coder in coders_}) == 7
    assert open_coder(other, eos=EOT, bos="<s>").identity == open_coder(other, eos=EOT).identity


def test_ranks_get_their_marks_behind_the_last_rank(folder: Path) -> None:
    path = ranks(folder)
    coder = open_coder(path)
    assert coder.tokenizer[1:] == (263, 262, None)
    assert coder.tokenizer.name.startswith("own.tiktoken:")
    assert coder.tokenizer.name.endswith(":cl100k")
    assert open_coder(path, eos="<end>", bos="<go>").marks == {"<end>": 262, "<go>": 263}
    assert open_coder(path, eos="<end>", bos="<go>").tokenizer[1:] == (264, 262, 263)
    assert [coder.decode([one]) for one in coder.encode([b"the the cat"])[0].tolist()] == [
        b"the", b" the", b" ", b"c", b"at",
    ]  # fmt: skip
    assert "\\p{N}{1,3}" in CL100K


def test_sentencepiece_states_its_own_marks(every: dict[str, Coder]) -> None:
    coder = every["pieced"]
    assert coder.marks == {"<s>": 1, "</s>": 2}
    assert coder.tokenizer[2:] == (2, 1)
    assert coder.decode([0]) == "\ufffd".encode()


def test_lost_text_is_seen_in_what_is_decoded(every: dict[str, Coder]) -> None:
    (ids,) = every["unigram"].encode(["the \u4e16".encode()])
    assert b"the" in every["unigram"].decode(ids)
    assert int(every["unigram"].sizes[0]) == 0


def test_the_same_ids_come_whoever_opens_it_and_in_whatever_company(every: dict[str, Coder], folder: Path) -> None:
    again = open_coder(byte_level(folder, name="again.json"))
    texts = [line.encode() for line in TEXT]
    alone = [every["byte_level"].encode([text])[0].tolist() for text in texts]
    assert [ids.tolist() for ids in every["byte_level"].encode(texts)] == alone
    assert [ids.tolist() for ids in again.encode(texts)] == alone


@pytest.mark.parametrize("line", ["the cat\n", " ", "a", "\n", "\u20ac", "^"])
@pytest.mark.parametrize("name", ["ranks", "byte_level", "pieced"])
def test_long_documents_of_any_kind_are_taken(every: dict[str, Coder], name: str, line: str) -> None:
    text = (line * (1_300_000 // len(line.encode()))).encode()
    (ids,) = every[name].encode([text])
    assert every[name].decode(ids).replace(b" ", b"") == text.replace(b" ", b"")
    if name != "pieced":  # which puts a space before each piece
        assert every[name].decode(ids) == text


@pytest.mark.parametrize("name", LOSSLESS)
@given(document=st.binary(max_size=60) | st.text(max_size=40).map(str.encode), seed=st.integers(0, 99))
def test_ids_do_not_depend_on_how_a_document_comes_in(
    every: dict[str, Coder], name: str, document: bytes, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coders, "PIECE_BYTES", 8)
        draw = random.Random(seed)
        cuts = sorted(draw.choices(range(len(document) + 1), k=3))
        parts = [document[a:b] for a, b in zip([0, *cuts], [*cuts, len(document)], strict=True)]
        got = list(pieces(parts))
        assert b"".join(got) == document
        assert got == list(pieces([document]))
        assert all(0 < len(piece) <= 8 for piece in got)
        try:
            document.decode()
        except UnicodeDecodeError:
            return
        whole = every[name].encode([document])[0].tolist()
        assert [one for piece in got for one in every[name].encode([piece])[0].tolist()] == whole


def test_a_piece_ends_behind_a_line_break_or_else_at_a_whole_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coders, "PIECE_BYTES", 8)
    assert list(pieces([b"ab\ncd\nefgh\ni"])) == [b"ab\ncd\n", b"efgh\ni"]
    assert list(pieces(["abcdef\u20ac\u20ac".encode()])) == [b"abcdef", "\u20ac\u20ac".encode()]
    assert list(pieces([b"12345678"])) == [b"12345678"]
    assert list(pieces([])) == []


@pytest.mark.parametrize(("marks", "options", "eos", "bos"), [
    (["<pad>", "</s>"], {}, 1, None),
    (["<s>", "</s>"], {}, 1, 0),
    ([EOT, "<|end_of_text|>"], {"eos": "<|end_of_text|>"}, 1, None),
    (["<|im_start|>", "<|im_end|>"], {"eos": "<|im_end|>", "bos": "<|im_start|>"}, 1, 0),
    (["<s>", "<bos>", "<eos>"], {}, 2, None),
    (["<pad>", "</s>"], {"closed": False}, 1, None),
    (["<pad>"], {"closed": False}, NO_MARK, None),
    ([], {"closed": False}, NO_MARK, None),
    (["</s>", EOT], {"closed": False}, NO_MARK, None),
    (["<pad>", "<end>"], {"closed": False, "eos": "<end>"}, 1, None),
])  # fmt: skip
def test_marks_are_found_by_their_usual_names_or_named(
    tmp_path: Path, marks: list[str], options: dict[str, Any], eos: int, bos: int | None
) -> None:
    coder = open_coder(byte_level(tmp_path, marks=marks), **options)
    assert coder.tokenizer[2:] == (eos, bos)
    (ids,) = coder.encode([EXACT.encode()])
    assert coder.decode(ids) == EXACT.encode()


def test_an_added_token_can_be_a_mark_though_its_file_does_not_call_it_special(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(byte_level(tmp_path))
    made.add_tokens(["<end>"])
    path = saved(made, tmp_path / "added.json")
    assert open_coder(path).marks == {EOT: 0}
    coder = open_coder(path, eos="<end>")
    assert (coder.tokenizer.eos, coder.marks) == (293, {EOT: 0, "<end>": 293})
    (ids,) = coder.encode([b"the <end> of it<end>"])
    assert 293 not in ids
    assert coder.decode([*ids, 293]) == b"the <end> of it<end>"
