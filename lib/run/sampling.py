"""Text that the model writes: at the end of a run, and as the verb `sample`."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict

from lib.config import Sample
from lib.model.sample import sample
from lib.run.evals import weights_of
from lib.run.launch import Launch
from lib.run.making import coder_of
from lib.run.newest import newest_state
from lib.run.progress import Progress
from lib.run.reading import check_tokenizer
from lib.run.signals import Signals
from lib.store.coders import Coder
from lib.tree import plain

__all__ = ["sample_verb", "written"]


def sample_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Write text with the newest checkpoint.

    Raises:
        ValueError: there is no such run.
        DataError: its tokenizer is gone or another.
        CheckpointError: its newest checkpoint is absent or damaged.
    """
    with signals.at_once():
        state = newest_state(told.config, voice)
        coder = coder_of(told.config.data)
        check_tokenizer(coder, state["recipe"].data, told.config)
        voice.say(written(state, told.config.sample, told.config.eval.weights, coder))
    return 0


def written(state: TensorDict, choice: Sample, weights: Literal["params", "average"] | None, coder: Coder) -> str:
    """The prompt and what the model goes on with, up to the end of the document; bytes that are no UTF-8 are marked."""
    # Without a prompt the model begins a document: its first byte is predicted from an end mark.
    eos = coder.tokenizer.eos
    prompt = coder.encode([choice.prompt.encode()])[0].tolist() if choice.prompt else []
    if not prompt and eos < 0:
        raise ValueError(
            "sample.prompt='' must be some text, for the tokenizer has no end mark to begin from; give one"
        )
    prompt = prompt or [eos]
    ids = sample(
        plain(weights_of(state, weights)["params"]),
        state["recipe"].model,
        torch.tensor(prompt, dtype=torch.int64),
        length=choice.length,
        context=state["recipe"].batch.length,
        temperature=choice.temperature,
        top_k=choice.top_k,
        key=torch.tensor(choice.seed, dtype=torch.int64),
    ).tolist()
    ended = ids.index(eos) if eos in ids else len(ids)
    # A vocabulary may be larger than its tokenizer's, rounded up; such ids stand for nothing.
    known = [n for n in ids[:ended] if n < coder.tokenizer.vocab]
    return choice.prompt + coder.decode(known).decode("utf-8", "replace")
