"""Batches as tensors: worked examples, dtypes, cursors, each invariant and its message in full."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lib.data.arrays import arrays_at
from lib.data.batch import batch_at, batch_of, cursor_of, cursor_tree, heldout_batches
from lib.data.invariants import check_arrays
from lib.data.plan import Plan
from lib.data.rows import Cursor
from lib.data.source import Source
from tests.streams import Laid, laid, source_of

THREE = laid([b"abc", b"de", b"fghij"])


def made(stream: Laid, plan: Plan, seed: int = 0, cursor: Cursor | None = None) -> TensorDict:
    return batch_at([Source("text", stream)], plan, seed, {"text": cursor or Cursor(0, 0)}, 0)


def rows(batch: TensorDict, name: str) -> list[list[Any]]:
    return batch[name].flatten(0, 1).tolist()


def test_three_documents_make_one_stream() -> None:
    assert THREE.all.tolist() == [101, 102, 103, 2, 104, 105, 2, 106, 107, 108, 109, 110, 2]
    assert THREE.offsets.tolist() == [0, 4, 7, 13]


def test_empty_documents_are_kept_as_their_end_mark() -> None:
    stream = laid([b"", b"abc", b"", b"de"])
    assert stream.all.tolist() == [2, 101, 102, 103, 2, 2, 104, 105, 2]
    batch = made(stream, Plan(2, 8))
    n = rows(batch, "inputs").index([2, 2, 101, 102, 103, 2, 2, 104])
    assert rows(batch, "segments")[n] == [0, 1, 1, 1, 1, 2, 3, 3]


def test_targets_are_the_inputs_one_further_and_a_document_opens_at_the_end_mark_before_it() -> None:
    batch = made(THREE, Plan(4, 4))
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
    assert cursor_of(batch["cursor"]) == {"text": Cursor(1, 0)}


def test_text_that_holds_the_end_mark_of_another_tokenizer_does_not_split_a_document() -> None:
    stream = Laid(np.array([5, 2, 6, 7, 2], np.uint16), np.array([0, 5]))
    batch = made(stream, Plan(1, 4))
    assert 1 not in batch["segments"] or rows(batch, "inputs")[0][0] == 2
    whole = next(heldout_batches([stream], Plan(1, 4)))
    assert rows(whole, "segments") == [[0, 0, 0, 0]]


def test_shapes_and_dtypes_are_fixed() -> None:
    for micro in (1, 2, 4):
        batch = made(THREE, Plan(4, 6, micro), 3, Cursor(2, 1))
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
    batch = made(THREE, Plan(2, 4))
    before = batch["targets"].clone()
    batch["inputs"].fill_(0)
    assert torch.equal(batch["targets"], before)


def test_documents_with_a_mark_of_their_own_open_at_it_and_it_is_no_target() -> None:
    stream = laid([b"abc", b"de", b""], shared=False)
    assert stream.all.tolist() == [1, 101, 102, 103, 1, 104, 105, 1]
    batch = made(stream, Plan(4, 4))
    n = rows(batch, "inputs").index([1, 101, 102, 103])
    assert rows(batch, "targets")[n] == [101, 102, 103, 1]
    assert rows(batch, "mask")[n] == [True, True, True, False]
    n = rows(batch, "inputs").index([1, 104, 105, 1])
    assert rows(batch, "segments")[n] == [0, 0, 0, 1]
    assert rows(batch, "mask")[n] == [True, True, False, False]
    whole = next(heldout_batches([stream], Plan(1, 8)))
    assert rows(whole, "inputs") == [[1, 101, 102, 103, 1, 104, 105, 0]]
    assert rows(whole, "segments") == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert rows(whole, "mask") == [[True, True, True, False, True, True, False, False]]


def test_what_is_not_to_be_learnt_stays_an_input() -> None:
    stream = THREE._replace(learnt=np.arange(13) % 3 != 1)
    whole = next(heldout_batches([stream], Plan(1, 12)))
    assert rows(whole, "inputs") == [THREE.all[:12].tolist()]
    assert rows(whole, "targets") == [THREE.all[1:].tolist()]
    assert rows(whole, "mask") == [[n % 3 != 1 for n in range(1, 13)]]
    assert whole["bytes"].tolist() == [[5]]


def test_a_cursor_survives_its_tree() -> None:
    for cursor in ({"text": Cursor(0, 0)}, {"web-2": Cursor(3, 2**40), "code": Cursor(0, 5)}, {}):
        assert cursor_of(TensorDict(cursor_tree(cursor))) == cursor


def test_a_batch_has_the_memory_of_its_arrays() -> None:
    plan = Plan(2, 8, mode="pack")
    arrays = arrays_at([source_of("code", THREE, plan)], plan, 0, {"code": Cursor(0, 1)}, 0)
    batch = batch_of(arrays)
    for name in ("inputs", "targets", "segments", "positions", "mask", "bytes"):
        assert batch[name].data_ptr() == arrays[name].ctypes.data
    assert cursor_of(batch["cursor"]) == {"code": Cursor(**arrays["cursor"]["code"])}


def broken(name: str, value: Any, at: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    batch = made(THREE, Plan(2, 4), 0, Cursor(1, 0)).clone()
    if at:
        batch[name][at] = value
    else:
        batch[name] = value
    return {part: array.numpy() for part, array in batch.items() if part != "cursor"}


@pytest.mark.parametrize(("batch", "message"), [
    (broken("inputs", 260, (0, 1, 2)), "batch.inputs[0, 1, 2]=260 must be in [0, 260), the vocabulary"),
    (broken("targets", -100, (0, 0, 3)), "batch.targets[0, 0, 3]=-100 must be in [0, 260), the vocabulary"),
    (broken("segments", 1, (0, 1, 0)), "batch.segments[0, 1, 0]=1 must be 0 where a row begins"),
    (broken("positions", 5, (0, 0, 0)), "batch.positions[0, 0, 0]=5 must be 0 where a row begins"),
    (broken("segments", 7, (0, 0, 1)), "batch.segments[0, 0, 1]=7 must be the segment before or the next one"),
    (broken("positions", 9, (0, 1, 3)),
     "batch.positions[0, 1, 3]=9 must be one more than before, or 0 where a segment begins"),
    (broken("bytes", 5, (0, 1)), "batch.bytes[0, 1]=5 must be between 0 and the valid targets"),
    (broken("mask", torch.ones(1, 2, 4)), "batch.mask=(1, 2, 4) float32 must be (1, 2, 4) bool"),
    (broken("targets", torch.zeros(1, 2, 3, dtype=torch.int64)),
     "batch.targets=(1, 2, 3) int64 must be (1, 2, 4) int64"),
    (broken("inputs", torch.zeros(2, 4, dtype=torch.int64)),
     "batch.inputs=(2, 4) must have three axes: micro-batches, rows, positions"),
])  # fmt: skip
def test_a_batch_that_breaks_an_invariant_is_named_with_its_place(batch: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_arrays(batch, 260)


def test_ids_that_stand_for_several_bytes_are_allowed_for() -> None:
    check_arrays(broken("bytes", 12, (0, 1)), 260, widest=3)
    with pytest.raises(ValueError, match=r"^batch\.bytes\[0, 1\]=13 must be between 0 and 3 times the valid targets$"):
        check_arrays(broken("bytes", 13, (0, 1)), 260, widest=3)
