"""Text to ids and back, by the name of a tokenizer: bytes, ready-made ids, or a tokenizer's own file.

What every coder keeps to: it adds no mark of its own (whoever lays documents end to end does that, once); text that
spells a special token stays text; bytes that it cannot take are an error with their offset, never dropped; what a
library throws is an error of one line; and its identity holds a digest of the file it comes from and of its special
tokens, so that two tokenizers never share ids.

A coder is functions closed over a library's object: it is not sent to another process but opened there again, from
the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data import bytes as plain
from lib.data.tokenizer import Tokenizer
from lib.errors import DataError
from lib.store.foreign import Model, TextError, flat, huggingface, ranks_file, sentencepiece_file, tiktoken_named

__all__ = ["MOST_IDS", "NO_MARK", "PIECE_BYTES", "Coder", "TextError", "open_coder", "pieces"]

# The most bytes that are encoded at once: libraries take many times the memory of their text. A token that would cross
# the cut is lost, which is why it falls behind a line break where there is one.
PIECE_BYTES = 1 << 20

# The largest vocabulary: ids are kept in four bytes, and there is a table with one entry for each.
MOST_IDS = 1 << 31

# The end mark of a tokenizer that has none.
NO_MARK = -1

# Spellings that end or open a document in the tokenizers people use.
_EOS = ("</s>", "<eos>", "<|eos|>", "[EOS]", "<|endoftext|>", "<|end_of_text|>")
_BOS = ("<s>", "<bos>", "<|bos|>", "[BOS]", "<|startoftext|>", "<|begin_of_text|>")


class Coder(NamedTuple):
    """A tokenizer at work.

    Attributes:
        tokenizer: its identity.
        sizes: uint16 [vocab], how many bytes of text each id stands for; marks and the unknown token stand for none.
            Exact for bytes, tiktoken and byte-level Hugging Face tokenizers; else the length of the token as it is
            written, which leaves out what a normaliser took away.
        encode: documents to ids, one array for each, no marks added. Raises ValueError with the byte offset where a
            document is not UTF-8 and the tokenizer wants text, and TextError where it is text that the library refuses.
        decode: ids to bytes; marks give nothing. Raises ValueError for a number that is no id, and DataError with what
            the library says of ids that it refuses.
        marks: special tokens by their spelling. No text becomes one by itself; templates ask for them.
    """

    tokenizer: Tokenizer
    sizes: NDArray[np.uint16]
    encode: Callable[[Sequence[bytes]], list[NDArray[np.integer]]]
    decode: Callable[[Any], bytes]
    marks: Mapping[str, int]

    @property
    def identity(self) -> str:
        """All that ids depend on, in one line, for a recipe to keep."""
        name, vocab, eos, bos = self.tokenizer
        ends = f"end {'none' if eos == NO_MARK else eos}, begin {'none' if bos is None else bos}"
        spelled = blake2b(repr(sorted(self.marks.items())).encode(), digest_size=8).hexdigest()
        return f"{name}, {vocab} ids, {ends}" + (f", special tokens {spelled}" if self.marks else "")


def open_coder(spec: str, *, eos: str | None = None, bos: str | None = None, closed: bool = True) -> Coder:
    """Open a tokenizer.

    Args:
        spec: "bytes"; "ids:VOCAB:EOS" for files that hold ids already; a file NAME.json (Hugging Face tokenizers),
            NAME.tiktoken (ranks) or NAME.model (SentencePiece); or "tiktoken:NAME", which that library may fetch.
        eos: spelling of the special token that closes a document; none = found by its usual names.
        bos: spelling of the special token that opens one; none = found by its usual names, and when there is not
            exactly one such token the tokenizer counts as having none.
        closed: documents end with an end mark. Without, a tokenizer whose end mark cannot be told is taken as well; its
            `Tokenizer.eos` is `NO_MARK`, which no id equals.

    Raises:
        ValueError: there is no such tokenizer, or an end mark is needed and cannot be told.
        DataError: the library it needs is not installed, or its file is damaged.
    """
    if spec == "bytes":
        _refuse_marks(spec, eos, bos)
        return Coder(plain.BYTES, plain.SIZES, _encode_bytes, plain.decode, {})
    if spec.startswith("ids:"):
        _refuse_marks(spec, eos, bos)
        return _ids_only(spec)
    return _coder(spec, _model(spec, eos, bos), eos, bos, closed)


def pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a document into the pieces that are encoded one by one, however its bytes come in.

    A piece has at most `PIECE_BYTES` and ends behind a line break, or, in a line longer than that, at a whole character.
    The ids of a document are those of its pieces, one after the other.
    """
    held = bytearray()
    for part in parts:
        held += part
        while len(held) > PIECE_BYTES:
            stop = _cut(held)
            yield bytes(held[:stop])
            del held[:stop]
    if held:
        yield bytes(held)


def _cut(text: bytearray) -> int:
    stop = text.rfind(b"\n", 0, PIECE_BYTES) + 1
    if stop:
        return stop
    stop = PIECE_BYTES
    while stop > PIECE_BYTES - 4 and text[stop] & 0xC0 == 0x80:  # inside a character of UTF-8
        stop -= 1
    return stop


def _encode_bytes(texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
    return [plain.encode(text) for text in texts]


def _refuse_marks(spec: str, eos: str | None, bos: str | None) -> None:
    for name, value in (("eos", eos), ("bos", bos)):
        if value is not None:
            raise ValueError(f"data.{name}_token={value} must be left out: {spec} has marks that no text can spell")


def _ids_only(spec: str) -> Coder:
    _, *numbers = spec.split(":")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f'data.tokenizer={spec} must be "ids:VOCAB:EOS" with two whole numbers, as "ids:50257:50256"')
    # Ten digits are enough; Python refuses to read thousands of them.
    vocab, eos = (int(number) if len(number) <= 10 else MOST_IDS + 1 for number in numbers)
    if vocab > MOST_IDS:
        what = f"the vocabulary {numbers[0][:40]} must be at most {MOST_IDS}"
        raise ValueError(f"data.tokenizer={spec[:80]}: {what}; give the number of ids that the files' tokenizer has")
    if not eos < vocab:
        raise ValueError(f"data.tokenizer={spec}: the end mark {numbers[1]} must be below the vocabulary {vocab}")

    def encode(_texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        raise ValueError(f"data.tokenizer={spec} reads files of ids, must not meet text; name a tokenizer for text")

    def decode(ids: Any) -> bytes:
        shown = np.asarray(ids, dtype=np.int64).reshape(-1)
        return " ".join(str(one) for one in shown.tolist() if one != eos).encode()

    tokenizer = Tokenizer(name=spec, vocab=vocab, eos=eos)
    return Coder(tokenizer, np.zeros(vocab, dtype=np.uint16), encode, decode, {})


def _model(spec: str, eos: str | None, bos: str | None) -> Model:
    kind = spec.lower().rpartition(".")[2]
    if spec.startswith("tiktoken:"):
        return tiktoken_named(spec)
    if kind == "json":
        return huggingface(spec, named=[name for name in (eos, bos) if name is not None])
    if kind == "tiktoken":
        return ranks_file(spec, eos=eos, bos=bos)
    if kind == "model":
        return sentencepiece_file(spec)
    known = '"bytes", "ids:VOCAB:EOS", "tiktoken:NAME", or a file NAME.json, NAME.tiktoken or NAME.model'
    raise ValueError(f"data.tokenizer={spec} must be {known}")


def _coder(spec: str, model: Model, eos: str | None, bos: str | None, closed: bool) -> Coder:
    close = _mark("eos", eos, _EOS, spec, model)
    if close is None:
        if closed:
            raise ValueError(_unclosed(spec, model))
        close = NO_MARK
    vocab = len(model.table)
    tokenizer = Tokenizer(model.name, vocab, close, _mark("bos", bos, _BOS, spec, model))
    dtype = np.dtype(np.uint16 if vocab <= 1 << 16 else np.uint32)
    nothing = np.empty(0, dtype=dtype)
    silent = frozenset(model.marks.values()) | {tokenizer.eos}

    def encode(texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        parts = [_strings(text) for text in texts]
        try:
            found = model.encode([one for part in parts for one in part])
        except BaseException as error:
            if isinstance(error, TextError) or not _of_library(error):
                raise
            fix = "name a tokenizer that takes any text, or set data.errors=skip"
            raise TextError(f"{spec}: cannot encode the text ({flat(error)}); {fix}") from None
        ids = (np.array(one, dtype=dtype) for one in found)
        return [np.concatenate([nothing, *islice(ids, len(part))]) for part in parts]

    def decode(ids: Any) -> bytes:
        numbers = np.asarray(ids, dtype=np.int64).reshape(-1).tolist()
        for at, one in enumerate(numbers):
            if not 0 <= one < vocab:
                raise ValueError(f"ids[{at}]={one} must be in [0, {vocab})")
        try:
            return model.decode([one for one in numbers if one not in silent])
        except BaseException as error:
            if not _of_library(error):
                raise
            raise DataError(f"{spec}: cannot decode ids ({flat(error)}); restore the file") from None

    sizes = np.array([min(len(text), 0xFFFF) for text in model.table], dtype=np.uint16)
    return Coder(tokenizer, sizes, encode, decode, model.marks)


def _unclosed(spec: str, model: Model) -> str:
    usual, fix = [name for name in _EOS if name in model.marks], "name one of these or set data.add_eos=false"
    if usual:
        what = f"has {' and '.join(usual)}"
    elif model.marks:
        what = f"has none of the usual end marks, only {_shown(model)}"
    else:
        what, fix = "has no special tokens", "add one to the tokenizer or set data.add_eos=false"
    return f"data.eos_token must say which token closes a document: {spec} {what}; {fix}"


def _of_library(error: BaseException) -> bool:
    """Tell what a library says from what befalls the process; Rust's panics come as no `Exception`."""
    return (isinstance(error, Exception) and not isinstance(error, MemoryError)) or (
        type(error).__name__ == "PanicException"
    )


def _mark(kind: str, given: str | None, usual: Sequence[str], spec: str, model: Model) -> int | None:
    if given is not None:
        if given not in model.marks:
            what = f"must be a special token of {spec}, which has {_shown(model)}"
            fix = "name one of these or add it to the tokenizer" if model.marks else "add it to the tokenizer"
            raise ValueError(f"data.{kind}_token={given} {what}; {fix}")
        return model.marks[given]
    stated = model.eos if kind == "eos" else model.bos
    if stated is not None:
        return stated
    found = {model.marks[name] for name in usual if name in model.marks}
    return found.pop() if len(found) == 1 else None


def _shown(model: Model) -> str:
    names = sorted(model.marks, key=lambda name: model.marks[name])
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def _strings(text: bytes) -> list[str]:
    parts, begin = [], 0
    for piece in pieces([text]):
        try:
            parts.append(piece.decode())
        except UnicodeDecodeError as error:
            where = f"byte 0x{piece[error.start]:02x} at offset {begin + error.start}"
            fix = 'set data.errors="replace", or data.tokenizer="bytes", which takes any'
            raise ValueError(f"{where} is not UTF-8, must be text for this tokenizer; {fix}") from None
        begin += len(piece)
    return parts
