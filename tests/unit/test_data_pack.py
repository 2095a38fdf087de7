"""Planned rows: worked examples, how they are read, and each message in full."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from lib.data.arrays import arrays_at
from lib.data.cut import planned
from lib.data.pack import WINDOW, plan_rows
from lib.data.plan import Plan
from lib.data.rows import Cursor
from lib.data.share import Share
from lib.data.source import RowTable, Source
from lib.errors import DataError
from tests.streams import Laid, batches, flat, laid, numbered, source_of, table_of

FIVE = laid([b"abc", b"de", b"", b"fghij", b"k"])


def plan_of(lengths: list[int], length: int, mode: str, *, shared: bool = True) -> list[list[list[int]]]:
    table = table_of(numbered(lengths, shared=shared), length, mode)
    return [table.pieces[a:b].tolist() for a, b in zip(table.rows[:-1], table.rows[1:], strict=True)]


def test_longest_first_each_into_the_fullest_row_with_room() -> None:
    # 6 opens a row, 5 another; 4 goes to the 6, 3 to the 5, the 2 fits only there.
    assert plan_of([3, 6, 2, 5, 4], 10, "pack") == [[[0, 3], [9, 2], [11, 5]], [[3, 6], [16, 4]]]
    assert plan_of([3, 6, 2, 5, 4], 10, "pad") == [[[0, 3]], [[3, 6]], [[9, 2]], [[11, 5]], [[16, 4]]]


def test_a_document_longer_than_a_row_is_cut_and_loses_nothing() -> None:
    assert plan_of([9, 1], 4, "pack") == [[[0, 4]], [[4, 4]], [[8, 1], [9, 1]]]
    assert plan_of([9, 1], 4, "pad") == [[[0, 4]], [[4, 4]], [[8, 1]], [[9, 1]]]
    assert plan_of([8], 4, "pack") == [[[0, 4]], [[4, 4]]]


def test_a_first_id_that_nothing_stands_before_is_no_target() -> None:
    assert plan_of([4, 1, 3], 4, "pack", shared=False) == [[[1, 3]], [[6, 2]]]
    assert plan_of([1, 1], 4, "pack", shared=False) == []
    assert plan_of([1, 1], 4, "pack") == [[[0, 1], [1, 1]]]


def test_documents_of_different_windows_share_no_row() -> None:
    rows = plan_of([1] * (WINDOW * 4 + 3), 4, "pack")
    assert [sum(count for _, count in row) for row in rows] == [4] * WINDOW + [3]
    assert rows[-1] == [[WINDOW * 4 + n, 1] for n in range(3)]


def test_no_documents_are_no_rows() -> None:
    assert list(plan_rows(np.array([0]), 8, "pack", shared=True)) == []


def test_a_packed_row_reads_documents_from_an_end_mark_each_and_pads_the_rest() -> None:
    plan = Plan(2, 10, mode="pack")
    batch = arrays_at([source_of("text", FIVE, plan)], plan, 0, {"text": Cursor(0, 0)}, 0)
    rows = {tuple(row): n for n, row in enumerate(flat(batch, "inputs"))}
    full, rest = rows[2, 101, 102, 103, 2, 106, 107, 108, 109, 110], rows[2, 104, 105, 2, 2, 111, 0, 0, 0, 0]
    assert flat(batch, "targets")[full] == [101, 102, 103, 2, 106, 107, 108, 109, 110, 2]
    assert flat(batch, "segments")[full] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert flat(batch, "targets")[rest] == [104, 105, 2, 2, 111, 2, 0, 0, 0, 0]
    assert flat(batch, "segments")[rest] == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    assert flat(batch, "positions")[rest] == [0, 1, 2, 0, 0, 1, 0, 1, 2, 3]
    assert flat(batch, "mask")[rest] == [True] * 6 + [False] * 4
    assert flat(batch, "bytes") == [(8, 3)[n == rest] for n in range(2)]
    assert batch["cursor"] == {"text": {"epoch": 1, "row": 0}}


def test_samples_with_loss_masks_have_the_labels_and_positions_of_the_usual_packing() -> None:
    # Three samples and which of their tokens are trained on. Rows hold targets, so a sample of n tokens takes n - 1
    # places: what other packers put in two rows of six fits in one.
    samples = [([11, 12, 13], [0, 1, 1]), ([21, 22], [0, 1]), ([31, 32, 33, 34], [0, 0, 1, 1])]
    ids = np.array([one for tokens, _ in samples for one in tokens])
    learnt = np.array([bool(one) for _, mask in samples for one in mask])
    stream = Laid(ids, np.array([0, 3, 5, 9]), shared=False, learnt=learnt)
    plan = Plan(1, 6, mode="pack")
    batch = arrays_at([source_of("chat", stream, plan)], plan, 0, {"chat": Cursor(0, 0)}, 0)
    assert flat(batch, "inputs") == [[11, 12, 21, 31, 32, 33]]
    labels = np.where(batch["mask"], batch["targets"], -100)[0].tolist()
    assert labels == [[12, 13, 22, -100, 33, 34]]
    assert flat(batch, "positions") == [[0, 1, 0, 0, 1, 2]]
    assert flat(batch, "segments") == [[0, 0, 1, 2, 2, 2]]


def test_a_padded_batch_is_as_long_as_the_least_bucket_that_holds_its_longest_row() -> None:
    stream = numbered([2, 2, 5, 9, 2, 2])
    plan = Plan(1, 16, mode="pad", buckets=(2, 4, 8, 16))
    got = [next(batches([source_of("text", stream, plan)], plan, 0, {"text": Cursor(0, n)})) for n in range(6)]
    assert sorted((batch["targets"].shape[2], int(batch["mask"].sum())) for batch in got) == [
        (2, 2), (2, 2), (2, 2), (2, 2), (8, 5), (16, 9),
    ]  # fmt: skip
    even = plan._replace(buckets=())
    assert next(batches([source_of("text", stream, even)], even, 0))["targets"].shape == (1, 1, 16)


def test_all_ranks_have_batches_of_one_length() -> None:
    stream, plan = numbered([2, 2, 2, 9]), Plan(4, 16, mode="pad", buckets=(2, 16))
    source = source_of("text", stream, plan)
    for rank in range(4):
        part = arrays_at([source], plan, 0, {"text": Cursor(0, 0)}, 0, Share(rank, 4))
        assert part["targets"].shape == (1, 1, 16)


def test_near_pieces_are_read_in_one_go_and_far_ones_apart() -> None:
    offsets = np.array([0, 10, 20, 10_000, 10_010])
    stream = Laid(np.full(10_010, 9), offsets)
    rows = RowTable(np.array([0, 3]), np.array([[0, 10], [10, 10], [10_000, 10]]))
    got = planned(stream, rows, np.array([0]), 30)
    assert stream.read == [20, 11]
    assert got.inputs.tolist() == [[2, *[9] * 9] * 3]


def test_a_table_made_for_longer_rows_is_refused() -> None:
    rows = RowTable(np.array([0, 1, 3]), np.array([[0, 4], [4, 3], [7, 6]]))
    message = "row 1 of the row table: 9 targets, must be at most 8; build it anew"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        planned(FIVE, rows, np.array([0, 1]), 8)
    source: Any = Source("text", FIVE, rows=rows)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        arrays_at([source], Plan(2, 8, mode="pack"), 0, {"text": Cursor(0, 0)}, 0)


@pytest.mark.parametrize(("mode", "length"), [("concat", 8), ("pack", 0)])
def test_what_plans_no_rows_is_refused(mode: str, length: int) -> None:
    message = f"plan_rows: mode={mode!r}, length={length} must be pack or pad, and >= 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        next(plan_rows(np.array([0, 5]), length, mode, shared=True))
