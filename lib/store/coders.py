"""Text to ids and back, by the name of a tokenizer: bytes, ready-made ids, or a tokenizer's own file.

What every coder keeps to: it adds no mark of its own (whoever lays documents end to end does that, once); text that
spells a special token stays text; bytes that it cannot take are an error with their offset, never dropped; and its
name holds a digest of the file it comes from, so that two tokenizers never share ids.

A coder is functions closed over a library's object: it is not sent to another process but opened there again, from
the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data import bytes as plain
from lib.data.tokenizer import Tokenizer

__all__ = ["PIECE_BYTES", "Coder", "open_coder", "pieces"]

# The most bytes that are encoded at once: libraries take several times the memory of their text, and some grow faster
# than the text. The cut falls behind a line break, where no tokenizer in use joins what stands on both sides.
PIECE_BYTES = 1 << 20


class Coder(NamedTuple):
    """A tokenizer at work.

    Attributes:
        tokenizer: its identity.
        sizes: uint16 [vocab], how many bytes of text each id stands for; marks and the unknown token stand for none.
            Exact for bytes, tiktoken and byte-level Hugging Face tokenizers; else the length of the token as it is
            written, which leaves out what a normaliser took away.
        encode: documents to ids, one array for each, no marks added. Raises ValueError with the byte offset where a
            document is not UTF-8 and the tokenizer wants text.
        decode: ids to bytes; marks give nothing.
        marks: special tokens by their spelling.
        special: the id of exactly this special token, or none. No text becomes one by itself; templates ask for them.
    """

    tokenizer: Tokenizer
    sizes: NDArray[np.uint16]
    encode: Callable[[Sequence[bytes]], list[NDArray[np.integer]]]
    decode: Callable[[Any], bytes]
    marks: Mapping[str, int]
    special: Callable[[str], int | None]


def open_coder(spec: str, *, eos: str | None = None, bos: str | None = None) -> Coder:
    """Open a tokenizer.

    Args:
        spec: "bytes"; "ids:VOCAB:EOS" for files that hold ids already; a file NAME.json (Hugging Face tokenizers),
            NAME.tiktoken (ranks) or NAME.model (SentencePiece); or "tiktoken:NAME", which that library may fetch.
        eos: spelling of the special token that closes a document; none = found by its usual names.
        bos: spelling of the special token that opens one; none = found by its usual names, or it has none.

    Raises:
        ValueError: there is no such tokenizer, or its end mark cannot be told.
        DataError: the library it needs is not installed, or its file is damaged.
    """
    if spec == "bytes":
        _refuse_marks(spec, eos, bos)
        return Coder(plain.BYTES, plain.SIZES, _encode_bytes, plain.decode, {}, lambda _text: None)
    if spec.startswith("ids:"):
        _refuse_marks(spec, eos, bos)
        return _ids_only(spec)
    raise ValueError(f'data.tokenizer={spec} must be "bytes" or "ids:VOCAB:EOS"')


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
            raise ValueError(f"data.{name}={value} must be left out: {spec} has marks that no text can spell")


def _ids_only(spec: str) -> Coder:
    _, *numbers = spec.split(":")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f'data.tokenizer={spec} must be "ids:VOCAB:EOS" with two whole numbers, as "ids:50257:50256"')
    vocab, eos = (int(number) for number in numbers)
    if not eos < vocab:
        raise ValueError(f"data.tokenizer={spec}: the end mark {eos} must be below the vocabulary {vocab}")

    def encode(_texts: Sequence[bytes]) -> list[NDArray[np.integer]]:
        raise ValueError(f"data.tokenizer={spec} reads files of ids, must not meet text; name a tokenizer for text")

    def decode(ids: Any) -> bytes:
        shown = np.asarray(ids, dtype=np.int64).reshape(-1)
        return " ".join(str(one) for one in shown.tolist() if one != eos).encode()

    tokenizer = Tokenizer(name=spec, vocab=vocab, eos=eos)
    return Coder(tokenizer, np.zeros(vocab, dtype=np.uint16), encode, decode, {}, lambda _text: None)
