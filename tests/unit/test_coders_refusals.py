"""What is no tokenizer, or lacks what is asked of it: each error in full."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import normalizers

from lib.errors import DataError
from lib.store import coders
from lib.store.coders import Coder, TextError, open_coder
from lib.store.foreign import CL100K
from tests.coders import EOT, byte_level, pieced, ranks, saved, unknown, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


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

    opened = coders.ranks_file  # type: ignore[attr-defined]
    monkeypatch.setattr(
        coders, "ranks_file", lambda spec, **marks: opened(spec, **marks)._replace(encode=fail, decode=fail)
    )
    ranks(folder)
    monkeypatch.chdir(folder)
    return open_coder("own.tiktoken")
