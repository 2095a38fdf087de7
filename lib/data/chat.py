"""Conversations as ids: who said what, laid out by a template that is data, and which ids are trained on.

A template's own text may spell special tokens and then means them; what people wrote never does, whatever it spells.
Of a template's own text only what ends an assistant's message is trained on, since that is how an answer learns to end;
all else of it ("assistant:", "[/INST]", the end of a user's turn) is given to whoever writes the answer.

Source: the templates are those that the models named were published with.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lib.data.messages import ROLES, ConversationError, Message, messages_of

__all__ = [
    "TEMPLATES", "TRAIN_ON", "Coder", "ConversationError", "Message", "Template", "Turn", "encode_turns", "messages_of",
    "render", "template_of",
]  # fmt: skip

TRAIN_ON = ("all", "assistant", "last")


class Template(NamedTuple):
    """How messages become text: all of it is data.

    Attributes:
        user: what stands before and after a message of this role.
        assistant: likewise.
        system: likewise; none = the role has no place.
        tool: likewise.
        begin: what a conversation begins with.
        after_system: what stands before a user's message right behind a system message; none = the same as elsewhere.
        context: what stands between an instruction and its context.
        begin_context: what a conversation begins with when its first instruction has a context; none = `begin`.
        begin_system: what it begins with when a system message with a text opens it; none = the same as elsewhere.
    """

    user: tuple[str, str]
    assistant: tuple[str, str]
    system: tuple[str, str] | None = None
    tool: tuple[str, str] | None = None
    begin: str = ""
    after_system: str | None = None
    context: str = "\n\n"
    begin_context: str | None = None
    begin_system: str | None = None


class Turn(NamedTuple):
    """A stretch of text.

    Attributes:
        text: as it is to be encoded.
        trained: whether its ids are trained on.
        marks: special tokens that it spells are meant; without it they are text.
    """

    text: str
    trained: bool
    marks: bool


class Coder(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def marks(self) -> Mapping[str, int]:
        """Special tokens by their spelling."""

    @property
    def encode(self) -> Any:
        """Texts, each as bytes, to arrays of ids without marks."""


_ALPACA = "Below is an instruction that describes a task"
_ALPACA_END = "Write a response that appropriately completes the request."

TEMPLATES: Mapping[str, Template] = {
    "chatml": Template(
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant=("<|im_start|>assistant\n", "<|im_end|>\n"),
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        tool=("<|im_start|>tool\n", "<|im_end|>\n"),
    ),
    "llama2": Template(
        user=("<s>[INST] ", " [/INST] "),
        assistant=("", " </s>"),
        system=("<s>[INST] <<SYS>>\n", "\n<</SYS>>\n\n"),
        after_system="",
    ),
    "llama3": Template(
        user=("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        assistant=("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        system=("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        tool=("<|start_header_id|>ipython<|end_header_id|>\n\n", "<|eot_id|>"),
        begin="<|begin_of_text|>",
    ),
    "mistral": Template(user=("[INST] ", " [/INST] "), assistant=("", "</s>"), begin="<s>"),
    "alpaca": Template(
        user=("\n\n### Instruction:\n", "\n\n### Response:\n"),
        assistant=("", ""),
        system=("", ""),
        begin=f"{_ALPACA}. {_ALPACA_END}",
        context="\n\n### Input:\n",
        begin_context=f"{_ALPACA}, paired with an input that provides further context. {_ALPACA_END}",
        begin_system="",  # it was trained without any: what a system message says takes the place of the preamble
    ),
    "plain": Template(user=("", ""), assistant=("", ""), system=("", ""), tool=("", "")),
}


def template_of(value: str | Mapping[str, Sequence[str]]) -> Template:
    """Give a template by its name, or one of a user's own: what stands before and after each role's messages.

    >>> template_of({"user": ["Q: ", " "], "assistant": ["A: ", "."]}).user
    ('Q: ', ' ')
    """
    if isinstance(value, str):
        if value in TEMPLATES:
            return TEMPLATES[value]
        near = difflib.get_close_matches(value, TEMPLATES, 1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ValueError(f"data.template={value} must be one of {', '.join(TEMPLATES)}{hint}")
    roles = {}
    for role, around in value.items():
        if role not in ROLES:
            raise ValueError(f"data.template.{role} must be one of {', '.join(ROLES)}")
        if not isinstance(around, list | tuple) or len(around) != 2 or not all(isinstance(one, str) for one in around):
            raise ValueError(f"data.template.{role}={around!r} must be two texts, before and after a message")
        roles[role] = (around[0], around[1])
    for role in ("user", "assistant"):
        if role not in roles:
            raise ValueError(f"data.template.{role} is missing, must be two texts, before and after a message")
    return Template(roles["user"], roles["assistant"], roles.get("system"), roles.get("tool"))


def render(messages: Sequence[Message], template: Template, train_on: str = "assistant") -> list[Turn]:
    """Lay a conversation out as text.

    Args:
        messages: as from `messages_of`.
        template: how.
        train_on: "all" = every message, "assistant" = those of the assistant, "last" = the assistant's last one; what a
            message says for itself comes first.

    Returns:
        Its stretches in order. What is trained on is what the chosen messages say and, behind an assistant's, the suffix
        that ends it. The suffix of any other message belongs to the prompt (in some templates it is what opens the
        answer: " [/INST] ", "### Response:"), as all prefixes do, so it is not trained on, with "all" neither.

    Raises:
        ConversationError: a message's role has no place in the template.
        ValueError: there is no such rule.

    >>> talk = [Message("user", "Hi"), Message("assistant", "Hello")]
    >>> "".join(turn.text for turn in render(talk, TEMPLATES["mistral"]))
    '<s>[INST] Hi [/INST] Hello</s>'
    """
    if train_on not in TRAIN_ON:
        raise ValueError(f"data.train_on={train_on} must be one of {', '.join(TRAIN_ON)}")
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    turns = [Turn(_begin(messages, template), trained=False, marks=True)]
    before = ""
    for at, message in enumerate(messages):
        around = getattr(template, message.role)
        if around is None:
            known = ", ".join(role for role in ROLES if getattr(template, role) is not None)
            what = f"role={message.role} must be one of {known}, which the template has"
            fix = "choose another data.template, take the message out, or set data.errors=skip"
            raise ConversationError("role without a place in the template", f"{what}; {fix}")
        prefix, suffix = around
        if (before, message.role) == ("system", "user") and template.after_system is not None:
            prefix = template.after_system
        trained = message.trained
        if trained is None:
            trained = train_on == "all" or (message.role == "assistant" and train_on == "assistant") or at == last
        turns += [Turn(prefix, trained=False, marks=True), Turn(message.content, trained, marks=False)]
        if message.context:
            turns += [Turn(template.context, trained=False, marks=True), Turn(message.context, trained, marks=False)]
        turns.append(Turn(suffix, trained and message.role == "assistant", marks=True))
        before = message.role
    return [turn for turn in turns if turn.text]


def _begin(messages: Sequence[Message], template: Template) -> str:
    first = messages[0] if messages else Message("user", "")
    if template.begin_system is not None and first.role == "system" and first.content:
        return template.begin_system
    asked = next((one for one in messages if one.role == "user"), first)
    return template.begin_context if asked.context and template.begin_context is not None else template.begin


def encode_turns(turns: Sequence[Turn], coder: Coder) -> tuple[NDArray[np.integer], NDArray[np.bool_]]:
    """Turn a conversation into ids.

    Text between special tokens is encoded in one go as far as it is trained on alike, as tokenizers expect it.

    Args:
        turns: as from `render`.
        coder: the tokenizer.

    Returns:
        The ids, with no mark but those that the template spells, and for each whether it is trained on.
    """
    parts: list[tuple[str | int, bool]] = []
    for turn in turns:
        for part in _split(turn.text, coder.marks) if turn.marks else [turn.text]:
            if isinstance(part, str) and parts and isinstance(parts[-1][0], str) and parts[-1][1] == turn.trained:
                parts[-1] = (parts[-1][0] + part, turn.trained)
            else:
                parts.append((part, turn.trained))
    texts = coder.encode([part.encode() for part, _ in parts if isinstance(part, str)])
    encoded = iter(texts)
    dtype = (texts or coder.encode([b""]))[0].dtype
    ids = [next(encoded) if isinstance(part, str) else np.array([part], dtype=dtype) for part, _ in parts]
    mask = np.repeat([trained for _, trained in parts], [len(one) for one in ids]).astype(np.bool_)
    return np.concatenate([np.empty(0, dtype=dtype), *ids]), mask


def _split(text: str, marks: Mapping[str, int]) -> list[str | int]:
    """Cut a template's text at the special tokens it spells."""
    return [marks.get(part, part) for part in _spelled(tuple(marks)).split(text) if part] if marks else [text]


@lru_cache(maxsize=8)  # there may be hundreds of them, and a template asks at every turn
def _spelled(marks: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
