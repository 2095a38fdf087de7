"""How a corpus becomes ids: the choices that, with the corpus, decide every one of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lib.data.chat import Template
from lib.store.coders import Coder, open_coder
from lib.store.record import Reading

__all__ = ["Making", "ids_dtype"]


class Making(NamedTuple):
    """How a corpus becomes ids; together with the corpus' identity it decides every one of them.

    Attributes:
        reading: how files become documents.
        tokenizer: see `lib.store.coders.open_coder`.
        eos_token: spelling of the end mark; none = the tokenizer says.
        bos_token: spelling of the begin mark; none = the tokenizer says.
        add_bos: documents begin with the begin mark.
        add_eos: documents end with the end mark.
        template: how conversations are written; none = records are texts.
        train_on: which messages of a conversation are trained on.
    """

    reading: Reading = Reading()
    tokenizer: str = "bytes"
    eos_token: str | None = None
    bos_token: str | None = None
    add_bos: bool = False
    add_eos: bool = True
    template: Template | None = None
    train_on: str = "assistant"

    def coder(self) -> Coder:
        """Open the tokenizer."""
        return open_coder(self.tokenizer, eos=self.eos_token, bos=self.bos_token, closed=self.add_eos)


def ids_dtype(vocab: int) -> np.dtype[np.integer]:
    """The dtype that a store keeps ids in."""
    return np.dtype("<u2" if vocab <= 1 << 16 else "<u4")
