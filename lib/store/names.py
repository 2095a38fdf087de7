"""Names of files: how they are written in messages, and which are passed over wherever files are looked for."""

from __future__ import annotations

import os

from lib.errors import DataError

__all__ = ["HIDDEN", "passed_over", "shown", "unreadable"]

HIDDEN = "hidden"
"""Why a name that begins with a dot is passed over; of folders it is the only cause."""

_LEFTOVERS = ("~", ".tmp", ".crc")


def passed_over(name: str) -> str | None:
    """Say why a file that was met is not taken, by its own name; none = it is.

    >>> passed_over(".x"), passed_over("x~"), passed_over("x")
    ('hidden', 'leftover of an editor or a download', None)
    """
    if name.startswith("."):
        return HIDDEN
    return "leftover of an editor or a download" if name.endswith(_LEFTOVERS) else None


def shown(path: str) -> str:
    """Write a path so that it fits on one line and into any log, whatever bytes it is made of."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unreadable(path: str, why: str | None) -> DataError:
    """Make the error of a local file that cannot be read."""
    return DataError(f"{shown(path)}: cannot be read ({why}); allow reading or remove it")
