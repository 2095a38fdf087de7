"""Streams, sources and plans that the index is tried on, and a slow reader that it is held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from lib.data.arrays import arrays_at
from lib.data.bytes import BOS, EOS, SIZES, VOCAB, encode
from lib.data.pack import plan_rows
from lib.data.plan import MODES, Plan
from lib.data.rows import Cursor
from lib.data.share import Share
from lib.data.source import RowTable, Source, Stream

SEEDS = st.integers(-(2**63), 2**63 - 1)
NUMBERED = 4096
"""Vocabulary of streams whose ids say where they stand."""

Ints = NDArray[np.int64]
_ALL = Share(0, 1)


class _Laid(NamedTuple):
    all: NDArray[np.integer]
    offsets: Ints
    vocab: int = VOCAB
    eos: int = EOS
    shared: bool = True
    learnt: NDArray[np.bool_] | None = None


class Laid(_Laid):
    """Documents laid end to end in memory; `read` counts the ids that were asked for."""

    @cached_property
    def read(self) -> list[int]:
        return []

    @property
    def size(self) -> int:
        return len(self.all)

    @property
    def sizes(self) -> NDArray[np.uint16]:
        return SIZES if self.vocab == VOCAB else np.full(self.vocab, 3, np.uint16)

    def ids(self, start: int, stop: int) -> NDArray[np.integer]:
        assert 0 <= start <= stop <= self.size
        self.read.append(stop - start)
        return self.all[start:stop]

    def mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        return None if self.learnt is None else self.learnt[start:stop]


def laid(documents: Sequence[bytes], *, shared: bool = True) -> Laid:
    """Documents of bytes: each closed by an end mark, or each opened by a mark of its own."""
    parts = [[*encode(text), EOS] if shared else [BOS, *encode(text)] for text in documents]
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64)
    return Laid(np.array([one for part in parts for one in part], np.uint16), offsets, shared=shared)


def numbered(lengths: Sequence[int], *, shared: bool = True, learnt: NDArray[np.bool_] | None = None) -> Laid:
    """Documents whose id at position p is p + 1, so that a batch tells what it holds."""
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return Laid(np.arange(1, offsets[-1] + 1), offsets, NUMBERED, 0, shared, learnt)


def table_of(stream: Stream, length: int, mode: str) -> RowTable:
    parts = list(plan_rows(stream.offsets, length, mode, shared=stream.shared))
    counts = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in parts)])
    pieces = np.concatenate([np.empty((0, 2), np.int64), *(pieces for _, pieces in parts)])
    return RowTable(np.append(0, np.cumsum(counts)), pieces)


def source_of(name: str, stream: Stream, plan: Plan, weight: Any = 1) -> Source:
    rows = None if plan.mode == "concat" else table_of(stream, plan.length, plan.mode)
    return Source(name, stream, weight, rows)


def start_of(sources: Sequence[Source]) -> dict[str, Cursor]:
    return {source.name: Cursor(0, 0) for source in sources}


def after(arrays: Mapping[str, Any]) -> dict[str, Cursor]:
    return {name: Cursor(**at) for name, at in arrays["cursor"].items()}


def batches(
    sources: Sequence[Source],
    plan: Plan,
    seed: int,
    cursor: Mapping[str, Cursor] | None = None,
    step: int = 0,
    share: Share = _ALL,
) -> Iterator[dict[str, Any]]:
    """The endless sequence of batches from a cursor on."""
    cursor = start_of(sources) if cursor is None else cursor
    while True:
        made = arrays_at(sources, plan, seed, cursor, step, share)
        yield made
        cursor, step = after(made), step + 1


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two batches have the same bits and the same cursor after them."""
    names = [name for name in a if name != "cursor"]
    bits = all(a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n]) for n in names)
    return bits and list(a) == list(b) and a["cursor"] == b["cursor"]


def flat(batch: Mapping[str, Any], name: str) -> list[Any]:
    """The rows of a batch, in order, as lists."""
    rows: list[Any] = batch[name].reshape(-1, *batch[name].shape[2:]).tolist()
    return rows


def learnt_ids(batch: Mapping[str, Any]) -> list[int]:
    """The targets that are learnt, row after row."""
    ids: list[int] = batch["targets"][batch["mask"]].tolist()
    return ids


def row_keys(batch: Mapping[str, Any]) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """What tells rows apart: their targets and which of them are learnt."""
    return [(tuple(a), tuple(b)) for a, b in zip(flat(batch, "targets"), flat(batch, "mask"), strict=True)]


def possible(stream: Laid) -> Counter[int]:
    """Every position whose id can be a target, once."""
    begins = set() if stream.shared else set(stream.offsets[:-1].tolist())
    return Counter(p for p in range(stream.size) if p not in begins and (stream.learnt is None or stream.learnt[p]))


def slow_row(stream: Laid, pieces: Sequence[tuple[int, int]], length: int) -> dict[str, list[Any]]:
    """A planned row made id by id."""
    row: dict[str, list[Any]] = {name: [] for name in ("inputs", "targets", "segments", "positions", "mask")}
    begins = set(stream.offsets[:-1].tolist())
    for segment, (start, count) in enumerate(pieces):
        for position in range(count):
            at = start + position
            opening = stream.shared and at in begins
            row["inputs"].append(stream.eos if opening else int(stream.all[at - 1]))
            row["targets"].append(int(stream.all[at]))
            row["segments"].append(segment)
            row["positions"].append(position)
            row["mask"].append(stream.learnt is None or bool(stream.learnt[at]))
    missing = length - len(row["inputs"])
    row["positions"] += range(missing)
    row["segments"] += [len(pieces)] * missing
    for name in ("inputs", "targets"):
        row[name] += [0] * missing
    row["mask"] += [False] * missing
    return row


# Strategies -----------------------------------------------------------------------------------------------------------


@st.composite
def streams(draw: st.DrawFn, length: int) -> Laid:
    """Documents of 0 to 3 windows and one end mark; long enough for a row, and with something to learn."""
    texts = draw(st.lists(st.integers(0, 3 * length), min_size=1, max_size=8))
    lengths = [count + 1 for count in texts]
    if sum(lengths) < length + 2 or max(lengths) < 2:
        lengths.append(length + 2)
    size = sum(lengths)
    learnt = draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size).map(np.array))
    return numbered(lengths, shared=draw(st.booleans()), learnt=learnt)


@st.composite
def plans(draw: st.DrawFn, *, unit: int = 1, growth: bool = True) -> Plan:
    """Plans of every mode; rows are multiples of `unit` in each micro-batch."""
    mode = draw(st.sampled_from(MODES))
    length, micro = draw(st.sampled_from([1, 2, 4, 6, 8])), draw(st.integers(1, 2))
    counts = st.integers(1, 4).map(lambda rows: rows * micro * unit)
    steps = st.lists(st.integers(0, 5), unique=True, max_size=3 if growth else 0).map(sorted)
    divisors = st.sampled_from([n for n in range(1, length + 1) if length % n == 0])
    lower = draw(st.lists(st.integers(1, length - 1), unique=True, max_size=2)) if length > 1 and mode == "pad" else []
    return Plan(
        rows=draw(counts),
        length=length,
        micro=micro,
        mode=mode,
        buckets=(*sorted(lower), length) if lower else (),
        rows_at=tuple((step, draw(counts)) for step in draw(steps)),
        length_at=() if mode == "pad" else tuple((step, draw(divisors)) for step in draw(steps)),
        shuffle=draw(st.booleans()),
    )


WEIGHTS = st.sampled_from([1, 2, "1/3", "0.05", 0.37, 10])


@st.composite
def runs(draw: st.DrawFn, *, unit: int = 1, growth: bool = True, most: int = 3) -> tuple[list[Source], Plan, int]:
    """Sources, a plan and a seed."""
    plan = draw(plans(unit=unit, growth=growth))
    names = draw(st.lists(st.sampled_from(["text", "code", "web-2"]), min_size=1, max_size=most, unique=True))
    sources = [source_of(name, draw(streams(plan.length)), plan, draw(WEIGHTS)) for name in names]
    return sources, plan, draw(SEEDS)
