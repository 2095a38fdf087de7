"""Small tokenizers of each kind, made here."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

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
