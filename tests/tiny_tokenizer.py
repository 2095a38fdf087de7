"""A small byte-level tokenizer as Hugging Face writes it, trained in a moment."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["tiny_tokenizer"]

TEXT = ["the cat sat on the mat and looked at what there was to see of it all"] * 20


def tiny_tokenizer(path: Path, vocab: int, *, marks: tuple[str, ...] = ("</s>",)) -> None:
    """Write one with so many ids, the marks among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(marks),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(path))
