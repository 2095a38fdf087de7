"""What laws are held against: a step, a state and batches; and smaller ones of the same kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from lib.testing.trees import extras, rebuilt_like
from lib.tree import leaves

__all__ = ["Case", "UncheckedError", "Verdict", "axes_of", "outcome", "reshaped", "said", "smaller", "stays"]


class UncheckedError(Exception):
    """A law says nothing of a case; the text says why."""


class Case(NamedTuple):
    """A step, a state that it takes, and batches in order.

    Attributes:
        step: `step(state, batch) -> (state, metrics)`.
        state: a TensorDict or nested dict of tensors.
        batches: one or more; the axes of their leaves are [micro-batches, rows, ...], but for those of `cursor`.
    """

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batches: tuple[Any, ...]

    def chain(self, updates: int) -> list[Any]:
        """So many batches, from the first on and round again."""
        return [self.batches[number % len(self.batches)] for number in range(updates)]

    def __str__(self) -> str:
        size = f"{len(self.batches)} batch{'es' if len(self.batches) > 1 else ''}"
        axes = axes_of(self.batches[0])
        if axes is None:
            return size
        micro, rows = axes
        return f"{size} of {micro} micro-batch{'es' if micro > 1 else ''} of {rows} row{'s' if rows > 1 else ''}"


class Verdict(NamedTuple):
    """What came of one law.

    Attributes:
        law: its name.
        kind: "held", "broken" or "not checked".
        said: why it is broken or was not checked, and where.
    """

    law: str
    kind: str
    said: str = ""

    def __str__(self) -> str:
        return f"{self.law}: {self.kind}" + (f": {self.said}" if self.said else "")


def outcome(after: tuple[Any, Any]) -> dict[str, Tensor]:
    """The leaves of what a step returns, `state.PATH` and `metrics.PATH`."""
    new, metrics = after
    return leaves({"state": new, "metrics": metrics})


def said(error: Exception) -> str:
    """The kind of an error and the beginning of its text, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def axes_of(batch: Any) -> tuple[int, int] | None:
    """Micro-batches and rows of a batch; none where its leaves have no such axes in common."""
    shapes = {leaf.shape[:2] for path, leaf in leaves(batch).items() if not stays(path)}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    return (shape[0], shape[1]) if len(shape) == 2 and min(shape) > 0 else None


def smaller(case: Case) -> Iterator[Case]:
    """Cases of fewer updates, micro-batches and rows, the smallest first."""
    axes = axes_of(case.batches[0])
    all_alike = axes is not None and all(axes_of(batch) == axes for batch in case.batches)
    micro, rows = axes if axes is not None and all_alike else (1, 1)
    sizes = {
        (updates, parts, lines)
        for updates in {1, min(2, len(case.batches)), len(case.batches)}
        for parts in {1, min(2, micro), micro}
        for lines in {1, min(2, rows), rows}
    }
    for updates, parts, lines in sorted(sizes, key=lambda size: (size[0] * size[1] * size[2], size)):
        batches = case.batches[:updates]
        if all_alike:
            batches = tuple(_cut(batch, parts, lines) for batch in batches)
        yield case._replace(batches=batches)


def reshaped(batch: Any, micro: int) -> Any:
    """The same rows, in the same order, in another number of micro-batches."""

    def one(path: str, leaf: Tensor) -> Tensor:
        return leaf if stays(path) else leaf.reshape(micro, -1, *leaf.shape[2:])

    return rebuilt_like(batch, {path: one(path, leaf) for path, leaf in leaves(batch).items()}, extras(batch))


def _cut(batch: Any, micro: int, rows: int) -> Any:
    named = {path: leaf if stays(path) else leaf[:micro, :rows].contiguous() for path, leaf in leaves(batch).items()}
    return rebuilt_like(batch, named, extras(batch))


def stays(path: str) -> bool:
    """Whether a leaf of a batch belongs to all of it and has no rows."""
    return path == "cursor" or path.startswith("cursor.")
