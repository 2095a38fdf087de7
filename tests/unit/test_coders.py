"""Tokenizers: identity, round trips, no mark from text, no mark added, and each error in full."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from lib.data.bytes import BYTES, SIZES
from lib.errors import DataError
from lib.store import coders
from lib.store.coders import MOST_IDS, NO_MARK, Coder, TextError, open_coder, pieces
from lib.store.foreign import CL100K

TEXT = ["the cat sat on the mat, and the dog sat on the log.\n"] * 40 + ["a caf\u00e9 costs 3 \u20ac \U0001f600\n"]
EXACT = "caf\u00e9 \u20ac5 \U0001f600\n\n  two  spaces\tand a tab\r\n\x00\x7f"
EOT = "<|endoftext|>"


def byte_level(folder: Path, *, marks: Sequence[str] = (EOT,), name: str = "gpt.json") -> str:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(marks), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return saved(made, folder / name)


def unigram(folder: Path) -> str:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([*TEXT, "< / s >"], trainer)
    return saved(made, folder / "unigram.json")


def words(folder: Path) -> str:
    made = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "[EOS]": 1, "the": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["[UNK]", "[EOS]"])
    return saved(made, folder / "words.json")


def unknown(folder: Path) -> str:
    """A tokenizer that knows two words and has nothing for any other."""
    made = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    return saved(made, folder / "unknown.json")


def saved(made: tokenizers.Tokenizer, path: Path) -> str:
    made.save(str(path))
    return str(path)


def ranks(folder: Path) -> str:
    known = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" t", b" th", b" the", b"at"]
    path = folder / "own.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(known)))
    return str(path)


def pieced(folder: Path) -> str:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=out,
        vocab_size=310,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "own.model").write_bytes(out.getvalue())
    return str(folder / "own.model")


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


CLOSES = "data.eos_token must say which token closes a document: {}"
ONE_OF = "name one of these or set data.add_eos=false"
ADD = "name one of these or add it to the tokenizer"


@pytest.mark.parametrize(("marks", "options", "message"), [
    (["<pad>"], {}, f"{CLOSES} has none of the usual end marks, only <pad>; {ONE_OF}"),
    ([], {}, f"{CLOSES} has no special tokens; add one to the tokenizer or set data.add_eos=false"),
    (["</s>", EOT], {}, f"{CLOSES} has </s> and <|endoftext|>; {ONE_OF}"),
    ([f"<{n}>" for n in range(10)], {}, f"{CLOSES} has none of the usual end marks, only <0>, <1>, <2>, <3>, <4>, <5>, "
     f"<6>, <7> and 2 more; {ONE_OF}"),
    ([EOT], {"eos": "<end>"}, f"data.eos_token=<end> must be a special token of {{}}, which has <|endoftext|>; {ADD}"),
    ([EOT], {"bos": "<go>"}, f"data.bos_token=<go> must be a special token of {{}}, which has <|endoftext|>; {ADD}"),
    (["</s>"], {"eos": "x"}, f"data.eos_token=x must be a special token of {{}}, which has </s>; {ADD}"),
    (["</s>"], {"bos": "the"}, f"data.bos_token=the must be a special token of {{}}, which has </s>; {ADD}"),
    ([], {"eos": "<end>", "closed": False},
     "data.eos_token=<end> must be a special token of {}, which has none; add it to the tokenizer"),
])  # fmt: skip
def test_a_mark_that_cannot_be_told_is_asked_for(
    tmp_path: Path, marks: list[str], options: dict[str, Any], message: str
) -> None:
    path = byte_level(tmp_path, marks=marks)
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(path))}$"):
        open_coder(path, **options)


@pytest.mark.parametrize(("spec", "options", "message"), [
    ("gpt2", {}, 'data.tokenizer=gpt2 must be "bytes", "ids:VOCAB:EOS", "tiktoken:NAME", or a file NAME.json, '
     "NAME.tiktoken or NAME.model"),
    ("ids:5", {}, 'data.tokenizer=ids:5 must be "ids:VOCAB:EOS" with two whole numbers, as "ids:50257:50256"'),
    ("ids:5:x", {}, 'data.tokenizer=ids:5:x must be "ids:VOCAB:EOS" with two whole numbers, as "ids:50257:50256"'),
    ("ids:5:5", {}, "data.tokenizer=ids:5:5: the end mark 5 must be below the vocabulary 5"),
    ("ids:5:99999999999", {}, "data.tokenizer=ids:5:99999999999: the end mark 99999999999 must be below the vocabulary 5"),
    *((f"ids:{vocab}:2", {}, f"data.tokenizer=ids:{vocab}:2: the vocabulary {vocab} must be at most 2147483648; give the "
       "number of ids that the files' tokenizer has") for vocab in (2**31 + 1, 99999999999999)),
    (f"ids:{'9' * 5000}:2", {}, f"data.tokenizer=ids:{'9' * 76}: the vocabulary {'9' * 40} must be at most 2147483648; "
     "give the number of ids that the files' tokenizer has"),
    ("bytes", {"eos": "</s>"}, "data.eos_token=</s> must be left out: bytes has marks that no text can spell"),
    ("ids:5:4", {"bos": "<s>"}, "data.bos_token=<s> must be left out: ids:5:4 has marks that no text can spell"),
    ("absent.json", {}, "data.tokenizer=absent.json must be a file, there is none"),
    ("absent.tiktoken", {}, "data.tokenizer=absent.tiktoken must be a file, there is none"),
    ("absent.model", {}, "data.tokenizer=absent.model must be a file, there is none"),
    ("tiktoken:own", {}, "data.tokenizer=tiktoken:own must be one of cl100k_base, gpt2, o200k_base, o200k_harmony, "
     "p50k_base, p50k_edit, r50k_base"),
])  # fmt: skip
def test_a_tokenizer_that_is_none_is_refused(spec: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        open_coder(spec, **options)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("x.json", b"{}", "{}: cannot be read as a Hugging Face tokenizer (Model missing. at line 1 column 2); "
     "restore the file"),
    ("x.json", b"\xff", "{}: cannot be read as a Hugging Face tokenizer ('utf-8' codec can't decode byte 0xff in "
     "position 0: invalid start byte); restore the file"),
    ("x.tiktoken", b"YQ== 0\nnonsense\n", "{}:2: b'nonsense' must be a token in base64 and its rank"),
    ("x.tiktoken", b"YQ== 0\nYQ== 1\n", "{}:2: token YQ== must stand there once"),
    ("x.tiktoken", b"YQ== 0\n", "{}: byte 0x00 has no rank; it is cut short or no file of ranks"),
    ("x.model", b"", "{}: cannot be read as a SentencePiece model (it has no pieces); restore the file"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^{re.escape(message.format(path))}$"):
        open_coder(str(path))


def test_ranks_with_a_hole_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % (b + (b > 9)) for b in range(256)))
    message = f"{path}: ranks must be 0 to 255, each once; it is cut short or no file of ranks"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_coder(str(path))


@pytest.mark.parametrize(("make", "library"), [
    (byte_level, "tokenizers"), (ranks, "tiktoken"), (pieced, "sentencepiece"), (lambda _: "tiktoken:gpt2", "tiktoken"),
])  # fmt: skip
def test_a_library_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str], library: str
) -> None:
    spec = make(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    message = f"{spec}: {library} is not installed, must be there to read it; pip install 'purestep[tokenizers]'"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_coder(spec)


def test_an_encoding_that_cannot_be_fetched_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("tiktoken.get_encoding", refuse)
    message = "tiktoken:gpt2: tiktoken cannot fetch it (no route to host); give its ranks as a file"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        open_coder("tiktoken:gpt2")


def test_tiktokens_own_encodings_are_opened_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken

    known = {bytes([byte]): byte for byte in range(256)}
    made = tiktoken.Encoding("gpt2", pat_str=CL100K, mergeable_ranks=known, special_tokens={EOT: 300})
    monkeypatch.setattr("tiktoken.get_encoding", lambda _name: made)
    coder = open_coder("tiktoken:gpt2")
    assert re.fullmatch(r"tiktoken:gpt2:[0-9a-f]{16}", coder.tokenizer.name)
    assert coder.tokenizer[1:] == (301, 300, None)
    assert coder.sizes.tolist() == [1] * 256 + [0] * 45
    with pytest.raises(ValueError, match=r"^ids\[1\]=301 must be in \[0, 301\)$"):
        coder.decode([0, 301])


def test_a_normaliser_that_makes_a_mark_is_caught(tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(words(tmp_path))
    made.normalizer = normalizers.Replace("{", "[")
    coder = open_coder(saved(made, tmp_path / "sly.json"))
    message = "the text spells the mark [EOS], must be text that this tokenizer can tell from it"
    with pytest.raises(TextError, match=f"^{re.escape(message)}; change it or set data.errors=skip$"):
        coder.encode([b"{EOS]"])


def test_text_that_a_library_refuses_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = unknown(tmp_path)
    coder = open_coder(path)
    assert [ids.tolist() for ids in coder.encode([b"the cat", b""])] == [[1, 2], []]
    said = "WordLevel error: Missing [UNK] token from the vocabulary"
    fix = "name a tokenizer that takes any text, or set data.errors=skip"
    with pytest.raises(TextError, match=f"^{re.escape(f'{path}: cannot encode the text ({said}); {fix}')}$") as caught:
        coder.encode([b"the cat", b"the dog"])
    assert isinstance(caught.value, DataError)
    assert caught.value.cause == "text the tokenizer cannot encode"


class PanicException(BaseException):
    """As Rust's panics come through."""


@pytest.mark.parametrize("error", [RuntimeError("it\nbroke"), PanicException("it broke"), KeyError("it broke")])
def test_whatever_a_library_throws_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    coder = broken(tmp_path, monkeypatch, error)
    said = "it broke" if not isinstance(error, KeyError) else "'it broke'"
    fix = "name a tokenizer that takes any text, or set data.errors=skip"
    with pytest.raises(TextError, match=f"^own.tiktoken: cannot encode the text \\({said}\\); {fix}$"):
        coder.encode([b"the"])
    with pytest.raises(DataError, match=f"^own.tiktoken: cannot decode ids \\({said}\\); restore the file$") as caught:
        coder.decode([1])
    assert not isinstance(caught.value, TextError)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), SystemExit(3)])
def test_what_befalls_the_process_is_not_blamed_on_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    coder = broken(tmp_path, monkeypatch, error)
    for work in (lambda: coder.encode([b"the"]), lambda: coder.decode([1])):
        with pytest.raises(type(error)) as caught:
            work()
        assert caught.value is error


def broken(folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Coder:
    """A tokenizer whose library fails."""

    def fail(_: object) -> Any:
        raise error

    opened = coders.ranks_file
    monkeypatch.setattr(
        coders, "ranks_file", lambda spec, **marks: opened(spec, **marks)._replace(encode=fail, decode=fail)
    )
    ranks(folder)
    monkeypatch.chdir(folder)
    return open_coder("own.tiktoken")
