"""What rows are made of: streams of ids, and sources, which are streams with a name, a weight and a row plan.

Nothing here or below is a file: whoever opens one gives a `Stream`, and row tables are arrays wherever they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lib.data.plan import Plan
from lib.data.rows import Cursor, ordinal, require
from lib.errors import DataError

__all__ = ["Planned", "RowTable", "Source", "Stream", "check_sources", "extent", "ordinals"]


class Stream(Protocol):
    """Documents laid end to end."""

    @property
    def size(self) -> int:
        """How many ids there are."""

    @property
    def vocab(self) -> int:
        """Ids are in [0, vocab)."""

    @property
    def eos(self) -> int:
        """The id that closes a document."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each document begins, and last the size: strictly rising."""

    @property
    def sizes(self) -> NDArray[np.uint16]:
        """How many bytes of text each id of the vocabulary stands for."""

    @property
    def shared(self) -> bool:
        """Whether the end mark of a document is what the first id of the next one is predicted from.

        If not, documents begin with a mark of their own or have no end mark: their first id is predicted from nothing.
        """

    def ids(self, start: int, stop: int) -> NDArray[np.integer]:
        """Read the ids at [start, stop), 0 <= start <= stop <= size."""

    def mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Say which of the ids at [start, stop) may be targets; none = all of them."""


class Planned(Protocol):
    """Rows that were planned ahead, wherever they lie; see `RowTable`."""

    @property
    def rows(self) -> NDArray[np.int64]:
        """Where the pieces of each row begin, and last how many there are."""

    @property
    def pieces(self) -> NDArray[np.int64]:
        """The pieces of all rows, (start, count) each."""


class RowTable(NamedTuple):
    """Rows that were planned ahead, as from `lib.data.pack.plan_rows`; arrays in memory or memory maps.

    Attributes:
        rows: int64 [rows + 1], where the pieces of each row begin in `pieces`, and last how many there are.
        pieces: int64 [pieces, 2], (start, count): the targets ids[start : start + count] of a row.
    """

    rows: NDArray[np.int64]
    pieces: NDArray[np.int64]


class Source(NamedTuple):
    """A stream that a run reads.

    Attributes:
        name: names its cursor and keys its order, so that other sources can come and go.
        stream: its ids.
        weight: its part of the rows, in any unit; a float counts as the decimal number that it is written as.
        rows: its rows where they are planned ahead; none = the stream is cut into rows as it is.
    """

    name: str
    stream: Stream
    weight: Fraction | float | str = Fraction(1)
    rows: Planned | None = None


def extent(source: Source, length: int) -> tuple[int, int]:
    """Give the (size, length) that the arithmetic of `lib.data.rows` counts this source in.

    A table of R rows counts like a stream of R ids that is cut into rows of one.
    """
    return (source.stream.size, length) if source.rows is None else (len(source.rows.rows) - 1, 1)


def ordinals(sources: Sequence[Source], length: int, cursor: Mapping[str, Cursor]) -> tuple[int, ...]:
    """Give how many rows of each source have been visited.

    Raises:
        ValueError: the cursor is not one of these sources.
    """
    names = [source.name for source in sources]
    if sorted(cursor) != sorted(names):
        raise ValueError(f"cursor={sorted(cursor)} must be of the sources {sorted(names)}; go on with the same sources")
    sizes = [extent(source, length) for source in sources]
    return tuple(ordinal(cursor[name], size=size, length=step) for name, (size, step) in zip(names, sizes, strict=True))


def check_sources(sources: Sequence[Source], plan: Plan) -> None:
    """Refuse sources that rows cannot be made of.

    Raises:
        ValueError: none, a name that is twice or no name, several vocabularies, or rows not planned as the plan says.
        DataError: a source is shorter than one row.
    """
    names = [source.name for source in sources]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"data.sources={names} must be at least one, each with its own name")
    for name in names:
        if not name or not all(letter.isalnum() or letter in "_-" for letter in name):
            raise ValueError(f"data.sources.{name} must be named by letters, digits, `_` and `-`; rename it")
    vocabs = {source.stream.vocab for source in sources}
    if len(vocabs) > 1:
        each = ", ".join(f"{source.name}: {source.stream.vocab}" for source in sources)
        raise ValueError(f"data.sources have several vocabularies ({each}), must have one; use one tokenizer for all")
    for source in sources:
        if (source.rows is None) != (plan.mode == "concat"):
            have = "no" if source.rows is None else "a"
            raise ValueError(
                f"data.sources.{source.name} has {have} row table, must fit batch.mode={plan.mode}; "
                f"make one with lib.store.plans.row_table, or leave it out for concat"
            )
        if source.rows is None:
            require(source.stream.size, plan.length, None if len(names) == 1 else source.name)
        elif len(source.rows.rows) < 2:
            raise DataError(f"data.sources.{source.name}: no document has a target to train on; give more text")
