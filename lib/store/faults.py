"""What is wrong with a record, and what that does: stop the run, or count it and go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lib.errors import DataError

__all__ = [
    "NOTES",
    "REPAIR",
    "REPLACED",
    "SURROGATE",
    "Fault",
    "kind_name",
    "missing",
    "not_utf8",
    "settle",
    "wrong_kind",
]

REPAIR = "repair it or set data.errors=skip"

_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bytes: "bytes",
    bool: "a truth value",
    type(None): "null",
}
REPLACED = "bytes that are no UTF-8 replaced"
"""What is counted when `errors="replace"` has mended a record."""
SURROGATE = "lone surrogate replaced"
"""What is counted when a surrogate without its partner was mended."""
NOTES = frozenset({REPLACED, SURROGATE})
"""What is counted of records that were mended and kept; all other causes are of what was passed over."""

_LISTED = 8  # names that an error lists


class Fault(NamedTuple):
    """What is wrong with a record.

    Attributes:
        cause: a few words to count it by.
        says: what was found, what must be there, and what to do.
        column: where in its line, bytes from 1.
    """

    cause: str
    says: str
    column: int = 1


def settle(fault: Fault, errors: str, skipped: Counter[str], where: Callable[[], str]) -> None:
    """Count a fault where bad records are skipped; elsewhere raise it, at a place that is only now looked for."""
    if errors != "skip":
        raise DataError(f"{where()}: {fault.says}")
    skipped[fault.cause] += 1


def kind_name(value: Any) -> str:
    """Say of what kind a parsed value is.

    >>> kind_name(None), kind_name(3.5)
    ('null', 'a number')
    """
    return _KINDS.get(type(value), "a number")


def wrong_kind(value: Any, key: str) -> Fault:
    """Describe a value that stands where a text must be."""
    kind = kind_name(value)
    return Fault(f"text is {kind}", f"field {key!r} is {kind}, must be a string; {REPAIR}")


def not_utf8(error: UnicodeDecodeError) -> Fault:
    """Describe bytes that are no UTF-8."""
    byte, fix = f"byte {error.object[error.start]:02x}", "save the file as UTF-8 or set data.errors=replace"
    return Fault("not UTF-8", f"{byte} is not UTF-8; {fix}", error.start + 1)


def missing(key: str, names: Iterable[str]) -> Fault:
    """Describe a record that lacks its text."""
    listed = [repr(name[:40]) for name in names]
    have = ", ".join(listed[:_LISTED]) + ", ..." * (len(listed) > _LISTED) or "none"
    return Fault(
        "text is missing", f"no field {key!r} (fields: {have}), must be there; set data.text_key or data.errors=skip"
    )
