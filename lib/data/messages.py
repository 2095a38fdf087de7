"""Who said what: a conversation read from a record, in any of the forms people keep them in.

What a record says is laid out or refused, never dropped: a conversation that lost its tool calls would teach empty answers.

Source: the rules for roles are those of torchtune's `validate_messages`; `weight` is that of OpenAI's chat format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["ROLES", "ConversationError", "Message", "messages_of"]

ROLES = ("system", "user", "assistant", "tool")

_ALIASES: Mapping[str, str] = {"human": "user", "gpt": "assistant", "ipython": "tool"}

# What holds a conversation: the fields that must be there.
_FORMS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
}

# Content beside the text, for which templates have no place: of a record, and of a message.
_TOOLS = ("tools", "functions")
_BESIDE = ("tool_calls", "function_call", "reasoning_content", "thinking", "refusal", "audio")

_REPAIR = "repair it or set data.errors=skip"
_NO_TEXT, _MALFORMED, _MORE = "content is no text", "malformed message", "content beside the text"


class ConversationError(ValueError):
    """A record is no conversation, or none that a template can lay out.

    Attributes:
        cause: a few words to count it by.
    """

    def __init__(self, cause: str, says: str) -> None:
        super().__init__(cause, says)  # both, so that it can be sent between processes
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[1])


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
        fields: {"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]}, where a message
            may say for itself whether it is trained on, by `"trained"`: true or false or by `"weight"`: 0 or 1;
            {"instruction", "output"}, with an "input" or not; {"prompt", "completion"}. Each with a "system" text
            beside it or not. A field that is null counts as absent.

    Raises:
        ConversationError: it is none of these or two at once, it holds content that is no text, or the roles do not
            follow each other as they must.
    """
    form = _form(fields)
    _refuse(fields, _TOOLS, "")
    if form == "messages":
        found = [_said(one, number, "role", "content") for number, one in _numbered(fields, form)]
    elif form == "conversations":
        found = [_said(one, number, "from", "value") for number, one in _numbered(fields, form)]
    elif form == "instruction":
        context = _text(fields, "input") if fields.get("input") is not None else ""
        asked = Message("user", _text(fields, "instruction"), context=context)
        found = [asked, Message("assistant", _text(fields, "output"))]
    else:
        found = [Message("user", _text(fields, "prompt")), Message("assistant", _text(fields, "completion"))]
    system = [Message("system", _text(fields, "system"))] if fields.get("system") else []
    if len(system) + len(found) < 2:
        raise _wrong("fewer than two messages", f"{form}={len(found)} must be two messages or more")
    _check_roles([*system, *found], first=1 - len(system))
    return [*system, *found]


def _form(fields: Mapping[str, Any]) -> str:
    """Tell which form a record has; of one that is incomplete, the nearest."""
    given = {name for name, value in fields.items() if value is not None}
    whole = [form for form, keys in _FORMS.items() if given.issuperset(keys)]
    if len(whole) > 1:
        both = " beside ".join(_quoted(form) for form in whole)
        fix = "leave one out or set data.errors=skip"
        raise _wrong("two conversations in one record", f"fields={both} must be one conversation", fix)
    some = [form for form in _FORMS if form in given] or [form for form in _FORMS if form in fields]
    if not (whole or some):
        names = _shown(", ".join(sorted(map(str, fields))[:8])) or "none"
        forms = ", ".join(_quoted(form) for form in _FORMS)
        fix = "leave data.template out where records are texts, or set data.errors=skip"
        raise _wrong("no conversation", f"fields={names} must hold one of {forms}", fix)
    return (whole or some)[0]


def _quoted(form: str) -> str:
    return " and ".join(f'"{key}"' for key in _FORMS[form])


def _numbered(fields: Mapping[str, Any], key: str) -> list[tuple[int, Any]]:
    if not isinstance(fields[key], list | tuple):
        raise _wrong(_MALFORMED, f"{key}={_kind(fields[key])} must be a list of messages")
    return list(enumerate(fields[key], 1))


def _said(one: Any, number: int, role_key: str, text_key: str) -> Message:
    at = f"message {number}: "
    if not isinstance(one, Mapping):
        raise _wrong(_MALFORMED, f'{at}{_kind(one)} must be an object with "{role_key}" and "{text_key}"')
    role = one.get(role_key)
    role = _ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        got = _shown(role) if role_key in one else "missing"
        raise _wrong("unknown role", f"{at}{role_key}={got} must be one of {', '.join((*ROLES, *_ALIASES))}")
    _refuse(one, _BESIDE, at)
    return Message(role, _content(one, text_key, at), _trained(one, at))


def _refuse(fields: Mapping[str, Any], keys: Sequence[str], at: str) -> None:
    for key in keys:
        if fields.get(key):
            what = f"{at}{key}={_kind(fields[key])} must be absent or empty, for templates lay out text alone"
            raise _wrong(_MORE, what, "write it into a message's text, take it out, or set data.errors=skip")


def _trained(one: Mapping[str, Any], at: str) -> bool | None:
    trained, weight = one.get("trained"), one.get("weight")
    if trained is not None and not isinstance(trained, bool):
        raise _wrong(_MALFORMED, f"{at}trained={_shown(trained)} must be true or false")
    if weight is None:
        return trained
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        fix = "round it, for a message is trained on or not, or set data.errors=skip"
        raise _wrong("weight is neither 0 nor 1", f"{at}weight={_shown(weight)} must be 0 or 1", fix)
    if trained is not None and trained != weight:
        raise _wrong(_MALFORMED, f"{at}weight={weight} must be {int(trained)} as trained={_shown(trained)} says")
    return bool(weight)


def _content(one: Mapping[str, Any], key: str, at: str) -> str:
    value = one.get(key)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(_NO_TEXT, f"{at}{key}={_kind(value) if key in one else 'missing'} must be text")
    for number, part in enumerate(value):
        if not isinstance(part, Mapping):
            raise _wrong(_MALFORMED, f'{at}{key}[{number}]={_kind(part)} must be an object with "type" and "text"')
        if part.get("type") != "text":
            raise _wrong(_NO_TEXT, f"{at}{key}[{number}].type={_shown(part.get('type'))} must be text")
    return "".join(_content(part, "text", at) for part in value)


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise _wrong(_NO_TEXT, f"{key}={_kind(value) if key in fields else 'missing'} must be text")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a truth value", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    """Show a value in a few letters of one line."""
    if isinstance(value, str):
        return repr(value[:80])[1:-1]
    return str(value).lower() if isinstance(value, bool | int | float) else _kind(value)


def _wrong(cause: str, says: str, fix: str = _REPAIR) -> ConversationError:
    return ConversationError(cause, f"{says}; {fix}")


def _check_roles(messages: Sequence[Message], *, first: int) -> None:
    before = ""
    for number, message in enumerate(messages, first):
        wrong = ""
        if message.role == "system" and before:
            wrong = "must be the first message"
        elif message.role == "assistant" and before not in {"user", "tool"}:
            wrong = "must follow user or tool"
        elif message.role == "user" and before == "user":
            wrong = "must follow system, assistant or tool, or come first"
        elif message.role == "tool" and before not in {"assistant", "tool"}:
            wrong = "must follow assistant or tool"
        if wrong:
            follows = f" follows {before} but" if before else " comes first but"
            raise _wrong("roles out of order", f"message {number}: role={message.role}{follows} {wrong}")
        before = message.role
