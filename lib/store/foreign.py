"""Other people's tokenizers, each through its own library: Hugging Face `tokenizers`, tiktoken, SentencePiece.

All become one value, a `Model`. Where the libraries differ on text that spells a special token, what is done here makes
it text: Hugging Face's word and unigram models would give the token itself, so such text is encoded in two parts.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.errors import DataError

__all__ = ["Model", "TextError", "flat", "huggingface", "ranks_file", "sentencepiece_file", "tiktoken_named"]

# Splits text before its parts are merged: that of OpenAI's cl100k_base, taken over from tiktoken 0.9.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Longer runs without a change between white space and other text overflow the stack of tiktoken's regular expressions,
# which ends as an error that no caller can catch (openai/tiktoken#15, #400); Llama 3's tokenizer cuts at the same length.
_RUN = 25_000
_RUNS = re.compile(rf"\s{{1,{_RUN}}}+|\S{{1,{_RUN}}}+")

_ESCAPED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LOST = "\N{REPLACEMENT CHARACTER}".encode()


class TextError(DataError):
    """A text is none that this tokenizer can encode; `cause` is what to count it by."""

    cause = "text the tokenizer cannot encode"


class Model(NamedTuple):
    """A tokenizer as its library gives it.

    Attributes:
        name: the file's name and a digest of its content.
        table: what each id stands for; marks, the unknown token and numbers without a token stand for nothing.
        marks: special tokens by their spelling.
        encode: strings to ids, without marks.
        decode: ids, none of them a mark, to bytes.
        eos: the end mark that the file itself states.
        bos: the opening mark that the file itself states.
    """

    name: str
    table: Sequence[bytes]
    marks: Mapping[str, int]
    encode: Callable[[list[str]], list[list[int]]]
    decode: Callable[[list[int]], bytes]
    eos: int | None = None
    bos: int | None = None


def huggingface(spec: str, *, named: Sequence[str]) -> Model:
    """Open a `tokenizer.json`; `named` are added tokens that are to be marks though the file does not call them special."""
    raw = _read(spec)
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise _absent(spec, "tokenizers") from None
    try:
        text = raw.decode()
        facts: dict[str, Any] = json.loads(text)
        whole = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise _unreadable(spec, "a Hugging Face tokenizer", error) from None
    whole.no_truncation()
    whole.no_padding()
    whole.encode_special_tokens = True  # that is: as text
    added = whole.get_added_tokens_decoder()
    vocab = whole.get_vocab(with_added_tokens=True)
    marks = {token.content: number for number, token in added.items() if token.special or token.content in named}
    unknown = _unknown(facts["model"], vocab)
    exact = "ByteLevel" in (_kinds(facts.get("decoder")) or _kinds(facts.get("pre_tokenizer")))
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, number in vocab.items():
        if number in added:
            table[number] = token.encode()
        else:
            table[number] = _bytes_of(token) if exact else _spelled(token, facts["model"])
    for number in (*marks.values(), *unknown):
        table[number] = b""
    guarded = {text: number for text, number in marks.items() if number not in unknown}

    def encode(texts: list[str]) -> list[list[int]]:
        return [found.ids for found in whole.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(ids: list[int]) -> bytes:
        if exact:
            return b"".join(table[one] for one in ids)
        return bytes(whole.decode(ids, skip_special_tokens=False).encode())

    return Model(_named(spec, raw), table, marks, _as_text(encode, guarded), decode)


def ranks_file(spec: str, *, eos: str | None, bos: str | None) -> Model:
    """Open a file of tiktoken ranks, whose marks are not in it: they get the numbers behind the last rank."""
    raw = _read(spec)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{spec}:{number}: {line[:40]!r} must be a token in base64 and its rank") from None
        if len(ranks) != number:
            raise DataError(f"{spec}:{number}: token {line.split()[0].decode()} must stand there once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        what = f"byte 0x{missing[0]:02x} has no rank" if missing else f"ranks must be 0 to {len(ranks) - 1}, each once"
        raise DataError(f"{spec}: {what}; it is cut short or no file of ranks")
    marks = {eos or "<|endoftext|>": len(ranks)}
    if bos is not None:
        marks.setdefault(bos, len(ranks) + 1)
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise _absent(spec, "tiktoken") from None
    made = tiktoken.Encoding(Path(spec).name, pat_str=CL100K, mergeable_ranks=ranks, special_tokens=marks)
    return _tiktoken(f"{_named(spec, raw)}:cl100k", made)


def tiktoken_named(spec: str) -> Model:
    """Open one of tiktoken's own encodings, which that library fetches and keeps."""
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise _absent(spec, "tiktoken") from None
    known = tiktoken.list_encoding_names()
    name = spec.removeprefix("tiktoken:")
    if name not in known:
        raise ValueError(f"data.tokenizer={spec} must be one of {', '.join(sorted(known))}")
    try:
        made = tiktoken.get_encoding(name)
    except Exception as error:  # noqa: BLE001 - whatever the library's own download raises
        raise DataError(f"{spec}: tiktoken cannot fetch it ({flat(error)}); give its ranks as a file") from None
    model = _tiktoken(spec, made)
    digest = blake2b(repr((model.table, sorted(model.marks.items()))).encode(), digest_size=8).hexdigest()
    return model._replace(name=f"{spec}:{digest}")


def sentencepiece_file(spec: str) -> Model:
    """Open a SentencePiece model; it states its marks itself and never gives them for text."""
    raw = _read(spec)
    try:
        import sentencepiece
    except ModuleNotFoundError:
        raise _absent(spec, "sentencepiece") from None
    try:
        whole = sentencepiece.SentencePieceProcessor(model_proto=raw)
        count = whole.get_piece_size()
        if not count:
            raise ValueError("it has no pieces")
    except Exception as error:  # noqa: BLE001 - the library's own kinds
        raise _unreadable(spec, "a SentencePiece model", error) from None
    names = [whole.id_to_piece(number) for number in range(count)]
    table = [b""] * count
    for number, piece in enumerate(names):
        if whole.is_byte(number):
            table[number] = bytes([int(piece[3:5], 16)])
        elif not (whole.is_control(number) or whole.is_unknown(number) or whole.is_unused(number)):
            table[number] = piece.replace("\u2581", " ").encode()
    # Text gets a space in front, unless the model was told not to; what is decoded is to be the text.
    opens = whole.encode("a", out_type=str)[0].startswith("\u2581")

    def decode(ids: list[int]) -> bytes:
        text = b"".join(_LOST if whole.is_unknown(one) else table[one] for one in ids)
        return text.removeprefix(b" ") if opens else text

    marks = {names[number]: number for number in range(count) if whole.is_control(number)}
    eos, bos = (number if number >= 0 else None for number in (whole.eos_id(), whole.bos_id()))
    return Model(_named(spec, raw), table, marks, whole.encode, decode, eos, bos)


def _tiktoken(name: str, made: Any) -> Model:
    table = [b""] * made.n_vocab
    marks = {text: made.encode_single_token(text) for text in sorted(made.special_tokens_set)}
    for number in sorted(set(range(made.n_vocab)) - set(marks.values())):
        try:
            table[number] = made.decode_single_token_bytes(number)
        except KeyError:  # a number that no token has
            continue

    def encode(texts: list[str]) -> list[list[int]]:
        return [[one for part in _short_runs(text) for one in made.encode_ordinary(part)] for text in texts]

    return Model(name, table, marks, encode, lambda ids: b"".join(table[one] for one in ids))


def _short_runs(text: str) -> list[str]:
    if len(text) < _RUN:
        return [text]
    cuts = [0, *(run.end() for run in _RUNS.finditer(text) if run.end() - run.start() == _RUN), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts)]


def _as_text(encode: Callable[[list[str]], list[list[int]]], marks: Mapping[str, int]) -> Any:
    """Make an encoder that gives no mark: where the library gives one, the text that spells it is cut in two."""
    if not marks:
        return encode
    guarded = np.zeros(max(marks.values()) + 1, dtype=np.bool_)
    guarded[list(marks.values())] = True
    spelled = re.compile("|".join(re.escape(text) for text in sorted(marks, key=len, reverse=True)))

    def holds(ids: list[int]) -> bool:
        known: NDArray[np.int64] = np.asarray(ids, dtype=np.int64)
        return bool(guarded[known[known < len(guarded)]].any())

    def apart(text: str) -> list[int]:
        cuts = [0, *(found.start() + 1 for found in spelled.finditer(text)), len(text)]
        parts = encode([text[start:stop] for start, stop in pairwise(cuts)])
        ids = [one for part in parts for one in part]
        if holds(ids):
            number = next(one for one in ids if one < len(guarded) and guarded[one])
            mark = next(name for name, value in marks.items() if value == number)
            what = f"the text spells the mark {mark}, must be text that this tokenizer can tell from it"
            raise TextError(f"{what}; change it or set data.errors=skip")
        return ids

    def safe(texts: list[str]) -> list[list[int]]:
        return [apart(text) if holds(ids) else ids for text, ids in zip(texts, encode(texts), strict=True)]

    return safe


def _unknown(model: Mapping[str, Any], vocab: Mapping[str, int]) -> set[int]:
    found = {vocab.get(model.get("unk_token") or ""), model.get("unk_id")}
    return {number for number in found if number is not None}


def _kinds(part: Mapping[str, Any] | None) -> list[str]:
    """Name the kinds of the steps that a decoder or a pre-tokenizer consists of."""
    if part is None:
        return []
    inner = part.get("decoders") or part.get("pretokenizers") or []
    return [part["type"], *(kind for one in inner for kind in _kinds(one))]


def _bytes_of(token: str) -> bytes:
    """Undo GPT-2's way of writing bytes as letters; a token that is not written so is its own text."""
    letters = _letters()
    return bytes(letters[letter] for letter in token) if all(one in letters for one in token) else token.encode()


def _letters() -> dict[str, int]:
    # Printable bytes are themselves; the others follow from 256 on, in order (openai/gpt-2, encoder.py).
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + nth): byte for nth, byte in enumerate(hidden)}


def _spelled(token: str, model: Mapping[str, Any]) -> bytes:
    if model.get("byte_fallback") and (found := _ESCAPED_BYTE.fullmatch(token)):
        return bytes([int(found[1], 16)])
    prefix = model.get("continuing_subword_prefix")
    return (token.removeprefix(prefix) if prefix else token).replace("\u2581", " ").encode()


def _read(spec: str) -> bytes:
    try:
        return Path(spec).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"data.tokenizer={spec} must be a file, there is none") from None
    except OSError as error:
        raise DataError(f"{spec}: cannot be read ({error.strerror})") from None


def _named(spec: str, raw: bytes) -> str:
    return f"{Path(spec).name}:{blake2b(raw, digest_size=8).hexdigest()}"


def _absent(spec: str, library: str) -> DataError:
    return DataError(
        f"{spec}: {library} is not installed, must be there to read it; pip install 'purestep[tokenizers]'"
    )


def _unreadable(spec: str, what: str, error: Exception) -> DataError:
    return DataError(f"{spec}: cannot be read as {what} ({flat(error)}); restore the file")


def flat(error: BaseException) -> str:
    """Say what a library said, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
