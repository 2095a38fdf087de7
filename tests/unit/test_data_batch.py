"""Batches: worked examples, padding of the held-out rows, each invariant and its message in full."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from lib.data.batch import Plan, batch_at, check_batch, cursor_of, cursor_tree, heldout_batches
from lib.data.bytes import EOS, encode
from lib.data.rows import Cursor, seek
from lib.errors import DataError


class Laid(NamedTuple):
    """Documents laid end to end in memory."""

    all: NDArray[np.uint16]
    offsets: NDArray[np.int64]
    vocab: int = 260

    @property
    def size(self) -> int:
        return len(self.all)

    def ids(self, start: int, stop: int) -> NDArray[np.uint16]:
        assert 0 <= start <= stop <= self.size
        return self.all[start:stop]


def laid(documents: Sequence[bytes]) -> Laid:
    parts = [np.append(encode(text), np.uint16(EOS)) for text in documents]
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64)
    return Laid(np.concatenate([*parts, np.empty(0, np.uint16)]).astype(np.uint16), offsets)


THREE = laid([b"abc", b"de", b"fghij"])


def rows(batch: TensorDict, name: str) -> list[list[Any]]:
    return batch[name].flatten(0, 1).tolist()


def test_three_documents_make_one_stream() -> None:
    assert THREE.all.tolist() == [101, 102, 103, 2, 104, 105, 2, 106, 107, 108, 109, 110, 2]
    assert THREE.offsets.tolist() == [0, 4, 7, 13]


def test_empty_documents_are_kept_as_their_end_mark() -> None:
    stream = laid([b"", b"abc", b"", b"de"])
    assert stream.all.tolist() == [2, 101, 102, 103, 2, 2, 104, 105, 2]
    batch = batch_at(stream, Plan(1, 8), 0, Cursor(0, 0))
    begin = [0, 8][batch["inputs"][0, 0, 0] == 2 and batch["inputs"][0, 0, 1] == 2]
    assert begin == 8
    assert rows(batch, "inputs") == [[2, 2, 101, 102, 103, 2, 2, 104]]
    assert rows(batch, "segments") == [[0, 1, 1, 1, 1, 2, 3, 3]]


def test_targets_are_the_inputs_one_further_and_a_document_opens_at_the_end_mark_before_it() -> None:
    batch = batch_at(THREE, Plan(4, 4), 0, Cursor(0, 0))
    got = {tuple(row): n for n, row in enumerate(rows(batch, "inputs"))}
    assert set(got) == {(101, 102, 103, 2), (104, 105, 2, 106), (107, 108, 109, 110), (2, 101, 102, 103)}
    first, second, last = got[101, 102, 103, 2], got[104, 105, 2, 106], got[2, 101, 102, 103]
    assert rows(batch, "targets")[first] == [102, 103, 2, 104]
    assert rows(batch, "segments")[first] == [0, 0, 0, 1]
    assert rows(batch, "positions")[first] == [0, 1, 2, 0]
    assert rows(batch, "segments")[second] == [0, 0, 1, 1]
    assert rows(batch, "positions")[second] == [0, 1, 0, 1]
    assert rows(batch, "targets")[last] == [101, 102, 103, 2]
    assert rows(batch, "segments")[last] == [0, 0, 0, 0]
    assert batch["mask"].all()
    assert [batch["bytes"][0, n].item() for n in (first, second, last)] == [3, 3, 3]
    assert cursor_of(batch["cursor"]) == Cursor(1, 0)


def test_text_that_holds_the_end_mark_of_another_tokenizer_does_not_split_a_document() -> None:
    stream = Laid(np.array([5, 2, 6, 7, 2], np.uint16), np.array([0, 5]))
    batch = batch_at(stream, Plan(1, 4), 0, Cursor(0, 0))
    assert 1 not in batch["segments"] or rows(batch, "inputs")[0][0] == 2
    whole = next(heldout_batches(stream, Plan(1, 4)))
    assert rows(whole, "segments") == [[0, 0, 0, 0]]


def test_shapes_and_dtypes_are_fixed() -> None:
    for micro in (1, 2, 4):
        batch = batch_at(THREE, Plan(4, 6, micro), 3, Cursor(2, 1))
        assert batch.batch_size == torch.Size([])
        assert set(batch.keys()) == {"inputs", "targets", "segments", "positions", "mask", "bytes", "cursor"}
        for name in ("inputs", "targets", "segments", "positions"):
            assert batch[name].shape == (micro, 4 // micro, 6)
            assert batch[name].dtype == torch.int64
            assert batch[name].is_contiguous()
        assert (batch["mask"].shape, batch["mask"].dtype) == ((micro, 4 // micro, 6), torch.bool)
        assert (batch["bytes"].shape, batch["bytes"].dtype) == ((micro, 4 // micro), torch.int64)
        for name in ("epoch", "row"):
            assert (batch["cursor", "text", name].shape, batch["cursor", "text", name].dtype) == ((), torch.int64)


def test_inputs_and_targets_share_no_memory() -> None:
    batch = batch_at(THREE, Plan(2, 4), 0, Cursor(0, 0))
    before = batch["targets"].clone()
    batch["inputs"].fill_(0)
    assert torch.equal(batch["targets"], before)


def test_a_cursor_survives_its_tree() -> None:
    for cursor in (Cursor(0, 0), Cursor(3, 2**40)):
        assert cursor_of(TensorDict(cursor_tree(cursor))) == cursor


def test_held_out_rows_come_in_order_and_the_last_is_padded() -> None:
    batches = list(heldout_batches(THREE, Plan(4, 5, 2)))
    assert [batch["inputs"].shape for batch in batches] == [(1, 2, 5), (1, 2, 5)]
    assert rows(batches[0], "inputs") == [[101, 102, 103, 2, 104], [105, 2, 106, 107, 108]]
    assert rows(batches[1], "inputs") == [[109, 110, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert rows(batches[1], "mask") == [[True, True, False, False, False], [False] * 5]
    assert rows(batches[1], "segments") == [[0, 0, 1, 1, 1], [0] * 5]
    assert batches[1]["bytes"].tolist() == [[1, 0]]
    assert cursor_of(batches[1]["cursor"]) == Cursor(0, 0)


def test_a_limit_takes_rows_spread_evenly_the_same_each_time() -> None:
    stream = laid([bytes(range(100))])
    few = [list(heldout_batches(stream, Plan(3, 10), limit=4)) for _ in range(2)]
    first = [
        row[0] - 4
        for batch in few[0]
        for row, mask in zip(rows(batch, "inputs"), rows(batch, "mask"), strict=True)
        if mask[0]
    ]
    assert first == [0, 20, 50, 70]
    for a, b in zip(*few, strict=True):
        assert (a == b).all()
    assert len(list(heldout_batches(stream, Plan(3, 10), limit=1000))) == len(
        list(heldout_batches(stream, Plan(3, 10)))
    )


def test_what_cannot_be_evaluated_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^limit=0 must be >= 1 rows, or none for all$"):
        next(heldout_batches(THREE, Plan(1, 4), limit=0))
    message = "held-out text: have 1 ids, need 2; raise data.holdout or give more text"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        next(heldout_batches(laid([b""]), Plan(1, 4)))


@pytest.mark.parametrize("plan", [Plan(4, 4, 3), Plan(0, 4, 1), Plan(4, 4, 0)])
def test_rows_that_cannot_be_dealt_out_are_refused(plan: Plan) -> None:
    message = f"batch.rows={plan.rows} must be a multiple of batch.micro={plan.micro}, both >= 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        batch_at(THREE, plan, 0, Cursor(0, 0))


def test_data_shorter_than_a_window_is_refused_not_trained_on_nothing() -> None:
    message = "training text: have 13 ids, need batch.length+1=14; give more text or lower batch.length"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        batch_at(THREE, Plan(1, 13), 0, Cursor(0, 0))
    batch_at(THREE, Plan(1, 12), 0, Cursor(0, 0))


def test_a_batch_larger_than_an_epoch_wraps() -> None:
    batch = batch_at(THREE, Plan(9, 4), 0, Cursor(0, 0))
    assert cursor_of(batch["cursor"]) == Cursor(2, 2)


def test_an_id_beyond_the_vocabulary_names_its_place() -> None:
    damaged = THREE._replace(all=np.where(np.arange(13) == 9, 300, THREE.all).astype(np.uint16))
    message = "token store: id 300 at 9 must be below 260; it is damaged, remove it to have it built again"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        batch_at(damaged, Plan(4, 4), 0, Cursor(0, 0))


def broken(name: str, value: Any, at: tuple[int, ...] = ()) -> TensorDict:
    batch = batch_at(THREE, Plan(2, 4), 0, Cursor(1, 0)).clone()
    if at:
        batch[name][at] = value
    else:
        batch[name] = value
    return batch


@pytest.mark.parametrize(("batch", "message"), [
    (broken("inputs", 260, (0, 1, 2)), "batch.inputs[0, 1, 2]=260 must be in [0, 260), the vocabulary"),
    (broken("targets", -100, (0, 0, 3)), "batch.targets[0, 0, 3]=-100 must be in [0, 260), the vocabulary"),
    (broken("segments", 1, (0, 1, 0)), "batch.segments[0, 1, 0]=1 must be 0 where a row begins"),
    (broken("positions", 5, (0, 0, 0)), "batch.positions[0, 0, 0]=5 must be 0 where a row begins"),
    (broken("segments", 7, (0, 0, 1)), "batch.segments[0, 0, 1]=7 must be the segment before or the next one"),
    (broken("positions", 9, (0, 1, 3)),
     "batch.positions[0, 1, 3]=9 must be one more than before, or 0 where a segment begins"),
    (broken("bytes", 5, (0, 1)), "batch.bytes[0, 1]=5 must be between 0 and the valid targets"),
    (broken("mask", torch.ones(1, 2, 4)), "batch.mask=(1, 2, 4) torch.float32 must be (1, 2, 4) torch.bool"),
    (broken("targets", torch.zeros(1, 2, 3, dtype=torch.int64)),
     "batch.targets=(1, 2, 3) torch.int64 must be (1, 2, 4) torch.int64"),
    (broken("inputs", torch.zeros(2, 4, dtype=torch.int64)),
     "batch.inputs=(2, 4) must have three axes: micro-batches, rows, positions"),
])  # fmt: skip
def test_a_batch_that_breaks_an_invariant_is_named_with_its_place(batch: TensorDict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_batch(batch, 260)


class Endless(NamedTuple):
    """A corpus of 10^12 ids that exists nowhere; it counts what is read of it."""

    read: list[int]
    size: int = 10**12
    vocab: int = 260
    offsets: NDArray[np.int64] = np.arange(10**6 + 1, dtype=np.int64) * 10**6

    def ids(self, start: int, stop: int) -> NDArray[np.uint16]:
        self.read.append(stop - start)
        return np.full(stop - start, 10, np.uint16)


def test_seeking_reads_no_more_than_starting() -> None:
    stream, plan = Endless([]), Plan(8, 256)
    batch_at(stream, plan, 0, Cursor(0, 0))
    early = sum(stream.read)
    stream.read.clear()
    batch = batch_at(stream, plan, 0, seek(10**13, size=stream.size, length=256))
    assert sum(stream.read) == early == 8 * 257
    assert cursor_of(batch["cursor"]).epoch == 10**13 * 256 // 10**12


def test_a_batch_is_made_in_two_milliseconds() -> None:
    stream = laid([bytes([n % 256]) * 5000 for n in range(200)])
    times = []
    for n in range(30):
        begin = time.perf_counter()
        batch_at(stream, Plan(32, 256), 0, Cursor(0, n * 32))
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3
