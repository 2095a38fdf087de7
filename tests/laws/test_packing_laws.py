"""Planned rows: nothing lost or added, documents apart also for the model, and little padding."""

from __future__ import annotations

import sysconfig
from collections import Counter
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.config import Model, Recipe
from lib.data.batch import batch_of
from lib.data.cut import planned, targets_in
from lib.data.pack import WINDOW, plan_rows
from lib.data.plan import Plan
from lib.data.repeat import repeats
from lib.model.lm import logits
from lib.state import init_state
from tests.strategies import FEW
from tests.streams import SEEDS, Laid, batches, laid, possible, slow_row, source_of, streams, table_of

MODES = st.sampled_from(["pack", "pad"])


def pieces_of(stream: Laid, length: int, mode: str) -> list[list[tuple[int, int]]]:
    table = table_of(stream, length, mode)
    cuts = zip(table.rows[:-1].tolist(), table.rows[1:].tolist(), strict=True)
    return [[(start, count) for start, count in table.pieces[a:b].tolist()] for a, b in cuts]


@given(length=st.integers(1, 9), mode=MODES, data=st.data())
def test_planned_rows_hold_every_target_once_and_no_piece_crosses_a_document(
    length: int, mode: str, data: st.DataObject
) -> None:
    stream = data.draw(streams(length))._replace(learnt=None)
    rows = pieces_of(stream, length, mode)
    found = Counter(at for row in rows for start, count in row for at in range(start, start + count))
    assert found == possible(stream)
    for row in rows:
        assert 1 <= sum(count for _, count in row) <= length
        assert row == sorted(row)
        assert mode == "pack" or len(row) == 1
        for start, count in row:
            assert count >= 1
            assert np.searchsorted(stream.offsets, start, "right") == np.searchsorted(
                stream.offsets, start + count - 1, "right"
            )


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=200), length=st.integers(1, 20), shared=st.booleans())
def test_any_two_packed_rows_of_a_window_hold_more_than_a_row(lengths: list[int], length: int, shared: bool) -> None:
    offsets, met = np.cumsum([0, *lengths]), 0
    for counts, pieces in plan_rows(offsets, length, "pack", shared=shared):
        filled = np.add.reduceat(pieces[:, 1], np.cumsum(counts) - counts)
        assert all(a + b > length for a, b in combinations(filled.tolist(), 2))
        assert len(filled) <= 2 * WINDOW + 1 or set(filled.tolist()) == {length}
        met += int(filled.sum())
    assert met == sum(lengths) - (0 if shared else len(lengths))


@given(length=st.integers(1, 9), mode=MODES, data=st.data())
def test_a_planned_row_is_what_a_slow_reader_makes_of_it(length: int, mode: str, data: st.DataObject) -> None:
    stream = data.draw(streams(length))
    table, pieces = table_of(stream, length, mode), pieces_of(stream, length, mode)
    index = np.array(data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=6)), dtype=np.int64)
    rows = planned(stream, table, index, length)
    column = np.arange(length)
    for n, at in enumerate(index.tolist()):
        wanted = slow_row(stream, pieces[at], length)
        opens = rows.opens[n] & (column > 0)
        assert rows.inputs[n].tolist() == wanted["inputs"]
        assert rows.targets[n].tolist() == wanted["targets"]
        assert rows.mask[n].tolist() == wanted["mask"]
        assert np.cumsum(opens).tolist() == wanted["segments"]
        assert (column - np.maximum.accumulate(np.where(opens, column, 0))).tolist() == wanted["positions"]
        assert rows.used[n].sum() == targets_in(table, index)[n] == sum(count for _, count in pieces[at])


@given(seed=SEEDS, change=st.integers(3, 11), data=st.data())
@FEW
def test_a_packed_document_is_scored_as_if_it_were_alone_in_its_row(
    seed: int, change: int, data: st.DataObject
) -> None:
    texts = data.draw(st.lists(st.binary(min_size=1, max_size=7), min_size=3, max_size=6))
    stream = laid(texts, shared=data.draw(st.booleans()))
    plan = Plan(1, 16, mode="pack")
    batch = batch_of(next(batches([source_of("text", stream, plan)], plan, seed)))
    state = init_state(Recipe(model=Model(width=8, depth=2, heads=2, inner=8)), seed=0)
    row: dict[str, Any] = {name: batch[name][0] for name in ("inputs", "segments", "positions")}
    with torch.no_grad():
        before = logits(state["params"], row, state["recipe"].model)
        at = change % 16
        others = row["segments"][0] != row["segments"][0, at]
        row["inputs"] = row["inputs"].clone()
        row["inputs"][0, ~others] = (row["inputs"][0, ~others] + 7) % 260
        changed = logits(state["params"], row, state["recipe"].model)
    assert torch.equal(before[0, others], changed[0, others])
    assert not torch.equal(before[0, ~others], changed[0, ~others])


def test_padding_of_the_standard_library_is_below_two_hundredths() -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    sizes = np.array([file.stat().st_size + 1 for file in files if "site-packages" not in file.parts])
    offsets = np.cumsum(np.append(0, sizes))
    rows = sum(len(counts) for counts, _ in plan_rows(offsets, 2048, "pack", shared=True))
    assert sizes.sum() / (rows * 2048) > 0.98


def test_a_document_without_end_is_planned_in_parts() -> None:
    parts = plan_rows(np.array([0, 10**13]), 2048, "pack", shared=True)
    for number, (counts, pieces) in enumerate(islice(parts, 3)):
        assert len(counts) == len(pieces) == 1 << 16
        assert pieces[0].tolist() == [number * 2048 << 16, 2048]


@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=30, max_size=30), min_size=1), count=st.integers(2, 6))
def test_a_row_repeats_if_some_run_of_ids_stands_so_often_in_a_row(rows: list[list[int]], count: int) -> None:
    def slow(row: list[int]) -> bool:
        return any(
            row[at : at + period] * count == row[at : at + period * count]
            for period in range(1, 14)
            for at in range(len(row) - period * count + 1)
        )

    assert repeats(np.array(rows), count).tolist() == list(map(slow, rows))


@given(prefix=st.integers(0, 9), period=st.integers(1, 14), times=st.integers(2, 6))
def test_repeats_are_found_wherever_they_begin(prefix: int, period: int, times: int) -> None:
    row = [100 + n for n in range(prefix)] + [n for _ in range(times) for n in range(period)] + [200]
    for count in (2, 3, 5):
        assert bool(repeats(np.array([row]), count)[0]) == (period <= 13 and times >= count)
