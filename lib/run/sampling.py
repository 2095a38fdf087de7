"""Text that the model writes: at the end of a run, and as the verb `sample`."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDict

from lib.config import Sample
from lib.data.bytes import EOS, decode, encode
from lib.model.sample import sample
from lib.run.evals import weights_of
from lib.run.launch import Launch
from lib.run.newest import newest_state
from lib.run.progress import Progress
from lib.run.signals import Signals
from lib.tree import plain

__all__ = ["sample_verb", "written"]


def sample_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Write text with the newest checkpoint.

    Raises:
        ValueError: there is no such run.
        CheckpointError: its newest checkpoint is absent or damaged.
    """
    with signals.at_once():
        state = newest_state(told.config, voice)
        voice.say(written(state, told.config.sample, told.config.eval.weights))
    return 0


def written(state: TensorDict, choice: Sample, weights: Literal["params", "average"]) -> str:
    """The prompt and what the model goes on with, up to the end of the document; bytes that are no UTF-8 are marked."""
    # Without a prompt the model begins a document: its first byte is predicted from an end mark.
    prompt = encode(choice.prompt.encode()).tolist() or [EOS]
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
    ended = ids.index(EOS) if EOS in ids else len(ids)
    return choice.prompt + decode(ids[:ended]).decode("utf-8", "replace")
