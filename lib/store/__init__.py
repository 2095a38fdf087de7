"""Disk: corpora and checkpoints. Everything a run reads or writes but its logs goes through here.

`load` and `save` are fetched when they are asked for: processes that only read text need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lib.store.checkpoint import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lib.store import checkpoint

    return getattr(checkpoint, name)
