"""The same for each of many files, several at once: reading and writing wait, on a disk or for an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["each"]

T = TypeVar("T")


def each(act: Callable[[T], None], items: Sequence[T], threads: int) -> None:
    """Do it for each; the first failure in their order is raised, and what has not begun by then never begins."""
    if threads == 1 or len(items) < 2:
        for item in items:
            act(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(act, items):
            pass
