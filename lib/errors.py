"""The kinds of failure a run can end with, one class for each exit code that is not a config mistake.

`ValueError` stays what it is in Python: the caller's mistake, found when something is built (exit 2). The driver maps the
classes below to exit codes; the core only raises them.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "DataError", "DivergedError"]


class DataError(RuntimeError):
    """The corpus is missing, unreadable, too small, or not the one this state was trained on (exit 3)."""


class DivergedError(RuntimeError):
    """Too many updates in a row were refused (exit 4)."""


class CheckpointError(RuntimeError):
    """A checkpoint is absent, damaged, incomplete, or could not be written (exit 5)."""
