"""Who said what: a conversation read from a record, in any of the forms people keep them in.

Source: the rules for roles are those of torchtune's `validate_messages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ROLES", "Message", "messages_of"]

ROLES = ("system", "user", "assistant", "tool")

_ALIASES: Mapping[str, str] = {"human": "user", "gpt": "assistant", "ipython": "tool"}
_FORMS = '"messages", "conversations", "instruction" and "output", or "prompt" and "completion"'


class Message(NamedTuple):
    """What one side said.

    Attributes:
        role: one of system, user, assistant, tool.
        content: its text.
        trained: whether it is trained on; none = as the rule for all messages says.
        context: text an instruction comes with; a template says how the two stand together.
    """

    role: str
    content: str
    trained: bool | None = None
    context: str = ""


def messages_of(fields: Mapping[str, Any]) -> list[Message]:
    """Read a conversation from the fields of a record, in any of the forms people keep them in.

    Args:
        fields: {"messages": [{"role", "content"}, ...]}, where a message may say `"trained": true` or false for itself;
            {"conversations": [{"from", "value"}, ...]}, with a "system" text beside it or not;
            {"instruction", "output"}, with an "input" or not; {"prompt", "completion"}.

    Raises:
        ValueError: it is none of these, or the roles do not follow each other as they must.
    """
    if "messages" in fields:
        found = [_said(one, number, "role", "content") for number, one in _numbered(fields, "messages")]
    elif "conversations" in fields:
        found = [_said(one, number, "from", "value") for number, one in _numbered(fields, "conversations")]
        if fields.get("system"):
            found.insert(0, Message("system", _text(fields, "system")))
    elif "instruction" in fields:
        context = _text(fields, "input") if fields.get("input") is not None else ""
        asked = Message("user", _text(fields, "instruction"), context=context)
        found = [asked, Message("assistant", _text(fields, "output"))]
    elif "prompt" in fields:
        found = [Message("user", _text(fields, "prompt")), Message("assistant", _text(fields, "completion"))]
    else:
        names = ", ".join(sorted(map(str, fields))[:8]) or "none"
        raise ValueError(f"fields={names} must hold {_FORMS}")
    _check_roles(found)
    return found


def _numbered(fields: Mapping[str, Any], key: str) -> list[tuple[int, Any]]:
    if not isinstance(fields[key], list | tuple):
        raise ValueError(f"{key}={_kind(fields[key])} must be a list of messages")
    return list(enumerate(fields[key], 1))


def _said(one: Any, number: int, role_key: str, text_key: str) -> Message:
    if not isinstance(one, Mapping):
        raise ValueError(f'message {number}: {_kind(one)} must be an object with "{role_key}" and "{text_key}"')
    role = one.get(role_key)
    role = _ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise ValueError(f"message {number}: {role_key}={role} must be one of {', '.join((*ROLES, *_ALIASES))}")
    trained = one.get("trained")
    if trained is not None and not isinstance(trained, bool):
        raise ValueError(f"message {number}: trained={trained} must be true or false")
    return Message(role, _content(one.get(text_key), number, text_key), trained)


def _content(value: Any, number: int, key: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(_content(part.get("text"), number, "text") for part in value)
    raise ValueError(f"message {number}: {key}={_kind(value)} must be text")


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key}={_kind(value) if key in fields else 'missing'} must be text")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _check_roles(messages: Sequence[Message]) -> None:
    if len(messages) < 2:
        raise ValueError(f"messages={len(messages)} must be two at least")
    before = ""
    for number, message in enumerate(messages, 1):
        wrong = ""
        if message.role == "system" and number > 1:
            wrong = "must be the first message"
        elif message.role == "assistant" and before not in {"user", "tool"}:
            wrong = "must follow user or tool"
        elif message.role == "user" and before == "user":
            wrong = "must not follow user"
        elif message.role == "tool" and before not in {"assistant", "tool"}:
            wrong = "must follow assistant or tool"
        if wrong:
            follows = f" follows {before} but" if before else " comes first but"
            raise ValueError(f"message {number}: role={message.role}{follows} {wrong}; repair or drop the record")
        before = message.role
