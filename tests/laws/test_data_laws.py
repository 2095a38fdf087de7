"""Data: each document once an epoch, nothing lost or added, batch n the same after any stop and however far ahead."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice, pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from lib.data.batch import Plan, batch_at, check_batch, cursor_of, heldout_batches
from lib.data.bytes import EOS, OFFSET, decode, encode
from lib.data.rows import Cursor, advance, count, first, ordinal, seek, starts
from lib.data.shuffle import permute, restore
from lib.data.split import held_out
from lib.run.feed import feed
from lib.store import build, stream
from lib.store.corpus import documents, scan
from lib.store.tokens import TokenStore, prepare
from tests.unit.test_data_batch import Laid, laid

SEEDS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.binary(max_size=24)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Laid, int]:
    """Documents of 0 to 3 windows, also empty ones, and a window that fits."""
    length = draw(st.integers(1, 9))
    texts = draw(st.lists(st.binary(max_size=3 * length), min_size=1, max_size=8))
    missing = length + 1 - sum(len(text) + 1 for text in texts)
    return laid([*texts, b"x" * missing] if missing > 0 else texts), length


@st.composite
def runs(draw: st.DrawFn) -> tuple[Laid, Plan, int]:
    """A stream, a plan and a seed."""
    source, length = draw(streams())
    micro = draw(st.integers(1, 4))
    return source, Plan(micro * draw(st.integers(1, 4)), length, micro), draw(SEEDS)


def endless(source: Laid, position: int) -> int:
    return int(source.all[position % source.size])


def flat(batch: TensorDict) -> dict[str, torch.Tensor]:
    return {str(name): value for name, value in batch.flatten_keys(".").items()}


def same(a: TensorDict, b: TensorDict) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(flat(a).values(), flat(b).values(), strict=True)
    )


# Order ----------------------------------------------------------------------------------------------------------------


@given(seed=SEEDS, epoch=st.integers(0, 2**40))
@settings(max_examples=5)
def test_the_order_is_a_bijection_of_every_small_size_with_an_inverse(seed: int, epoch: int) -> None:
    for size in range(1, 301):
        every = np.arange(size)
        order = permute(every, size, seed=seed, epoch=epoch)
        assert sorted(order.tolist()) == every.tolist(), size
        assert restore(order, size, seed=seed, epoch=epoch).tolist() == every.tolist(), size


@given(size=st.integers(1, 2**62), seed=SEEDS, epoch=st.integers(0, 2**40), data=st.data())
def test_one_place_is_found_without_the_others_in_both_directions(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    elements = permute(np.array(places), size, seed=seed, epoch=epoch).tolist()
    assert len(set(elements)) == len(places)
    assert all(0 <= element < size for element in elements)
    assert restore(np.array(elements), size, seed=seed, epoch=epoch).tolist() == places
    assert permute(np.array(places[:1]), size, seed=seed, epoch=epoch).tolist() == elements[:1]


# Rows and the cursor --------------------------------------------------------------------------------------------------


@given(size=st.integers(2, 10**12), data=st.data())
def test_moving_on_is_seeking_and_can_be_taken_back(size: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, min(size - 1, 10**4)))
    a, b = data.draw(st.integers(0, 10**12)), data.draw(st.integers(0, 10**12))
    at = seek(a, size=size, length=length)
    assert 0 <= at.row < count(at.epoch, size=size, length=length)
    assert ordinal(at, size=size, length=length) == a
    assert advance(at, b, size=size, length=length) == seek(a + b, size=size, length=length)
    assert advance(seek(a + b, size=size, length=length), -b, size=size, length=length) == at


@given(size=st.integers(2, 60), data=st.data())
def test_one_step_at_a_time_is_seeking(size: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, size - 1))
    at = Cursor(0, 0)
    for rows in range(80):
        assert at == seek(rows, size=size, length=length)
        at = advance(at, 1, size=size, length=length)


@given(size=st.integers(2, 60), seed=SEEDS, data=st.data())
def test_every_position_is_an_input_once_an_epoch_and_the_carried_row_goes_on(
    size: int, seed: int, data: st.DataObject
) -> None:
    length, epochs = data.draw(st.integers(1, size - 1)), 4
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        rows = count(epoch, size=size, length=length)
        for start in starts(Cursor(epoch, 0), rows, size=size, length=length, seed=seed).tolist():
            assert 0 <= start < size
            seen.update(range(epoch * size + start, epoch * size + start + length))
    covered = first(epochs, size=size, length=length) * length
    assert seen == Counter(range(covered))
    assert epochs * size <= covered < epochs * size + length


# Batches --------------------------------------------------------------------------------------------------------------


@given(run=runs(), skip=st.integers(0, 30))
def test_a_batch_is_what_a_slow_reader_makes_of_the_stream(run: tuple[Laid, Plan, int], skip: int) -> None:
    source, plan, seed = run
    cursor = seek(skip, size=source.size, length=plan.length)
    batch = batch_at(source, plan, seed, cursor)
    opens = {int(offset) - 1 for offset in source.offsets[1:]}
    begin = starts(cursor, plan.rows, size=source.size, length=plan.length, seed=seed).tolist()
    for row, start in enumerate(begin):
        at = divmod(row, plan.rows // plan.micro)
        inputs = [endless(source, start + n) for n in range(plan.length)]
        targets = [endless(source, start + n + 1) for n in range(plan.length)]
        segment, position, segments, positions = 0, 0, [0], [0]
        for n in range(1, plan.length):
            new = (start + n) % source.size in opens
            segment, position = segment + new, 0 if new else position + 1
            segments.append(segment)
            positions.append(position)
        assert batch["inputs"][at].tolist() == inputs
        assert batch["targets"][at].tolist() == targets
        assert batch["segments"][at].tolist() == segments
        assert batch["positions"][at].tolist() == positions
        assert batch["bytes"][at].item() == sum(target >= OFFSET for target in targets)
    assert batch["mask"].all()
    check_batch(batch, source.vocab)


@given(run=runs(), stop=st.integers(0, 6), ahead=st.integers(0, 3))
def test_a_resumed_run_gets_the_batches_of_an_unbroken_one(run: tuple[Laid, Plan, int], stop: int, ahead: int) -> None:
    source, plan, seed = run

    def make(cursor: Cursor) -> TensorDict:
        return batch_at(source, plan, seed, cursor)

    whole, cursor = [], Cursor(0, 0)
    for _ in range(7):
        whole.append(make(cursor))
        cursor = cursor_of(whole[-1]["cursor"])
    at = cursor_of(whole[stop - 1]["cursor"]) if stop else Cursor(0, 0)
    assert at == seek(stop * plan.rows, size=source.size, length=plan.length)
    for _ in range(2):  # also resumed at once after a resume, with nothing read between
        with feed(make, at, ahead=ahead) as batches:
            rest = list(islice(batches, 7 - stop))
        assert all(same(a, b) for a, b in zip(whole[stop:], rest, strict=True))


@given(run=runs())
def test_micro_batches_do_not_change_which_rows_an_update_has(run: tuple[Laid, Plan, int]) -> None:
    source, plan, seed = run
    one, many = batch_at(source, plan._replace(micro=1), seed, Cursor(0, 1)), batch_at(source, plan, seed, Cursor(0, 1))
    for name, value in flat(many).items():
        shape = value.shape if name.startswith("cursor") else (1, plan.rows, *value.shape[2:])
        assert torch.equal(value.reshape(shape), flat(one)[name])


@given(run=runs(), parts=st.integers(1, 4))
def test_smaller_updates_get_the_same_rows_in_the_same_order(run: tuple[Laid, Plan, int], parts: int) -> None:
    source, plan, seed = run
    rows = plan.rows * parts
    large = batch_at(source, Plan(rows, plan.length), seed, Cursor(0, 0))
    cursor, small = Cursor(0, 0), []
    for _ in range(parts):
        small.append(batch_at(source, plan, seed, cursor))
        cursor = cursor_of(small[-1]["cursor"])
    assert same(large["cursor"], small[-1]["cursor"])
    for name in ("inputs", "targets", "segments", "positions"):
        assert torch.equal(torch.cat([batch[name].flatten(0, 1) for batch in small]), large[name][0])


@given(run=runs())
def test_each_text_is_trained_on_in_full_once_an_epoch(run: tuple[Laid, Plan, int]) -> None:
    source, plan, seed = run
    size, length = source.size, plan.length
    rows = first(3, size=size, length=length)
    targets = batch_at(source, Plan(rows, length), seed, Cursor(0, 0))["targets"]
    found = Counter(targets.flatten().tolist())
    wanted = Counter(endless(source, position + 1) for position in range(rows * length))
    assert found == wanted


# Held out -------------------------------------------------------------------------------------------------------------


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), plan=st.builds(Plan, st.just(4), st.integers(1, 9), st.just(2)))
def test_every_held_out_id_but_the_first_is_a_target_once(texts: Sequence[bytes], plan: Plan) -> None:
    source = laid([*texts, b"x"])
    batches = list(heldout_batches(source, plan))
    assert {batch["inputs"].shape for batch in batches} == {(1, 2, plan.length)}
    mask = torch.cat([batch["mask"][0] for batch in batches])
    for name, begin in (("inputs", 0), ("targets", 1)):
        ids = torch.cat([batch[name][0] for batch in batches])
        assert ids[mask].tolist() == source.all[begin : source.size - 1 + begin].tolist()
        assert not ids[~mask].any()
    assert sum(int(batch["bytes"].sum()) for batch in batches) == sum(map(len, [*texts, b"x"])) - (source.all[0] != EOS)
    for batch in batches:
        check_batch(batch, source.vocab)


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), limit=st.integers(1, 40))
def test_a_limited_evaluation_is_a_part_of_the_whole_one(texts: Sequence[bytes], limit: int) -> None:
    source, plan = laid([*texts, b"x"]), Plan(2, 3, 1)

    def rows(limit: int | None) -> list[tuple[int, ...]]:
        batches = list(heldout_batches(source, plan, limit))
        targets, mask = (torch.cat([batch[name][0] for batch in batches]) for name in ("targets", "mask"))
        return [tuple(row[valid].tolist()) for row, valid in zip(targets, mask, strict=True) if valid.any()]

    whole, part = rows(None), rows(limit)
    assert len(part) == min(limit, len(whole))
    remaining = iter(whole)
    assert all(row in remaining for row in part)  # in order


@given(
    digests=st.lists(st.binary(min_size=16, max_size=16), max_size=20),
    share=st.floats(0, 0.99),
    more=st.floats(0, 0.99),
)
def test_a_larger_share_keeps_what_a_smaller_one_held_out(digests: list[bytes], share: float, more: float) -> None:
    small, large = sorted((share, more))
    assert all(held_out(digest, large) for digest in digests if held_out(digest, small))


# The store ------------------------------------------------------------------------------------------------------------


def ready(texts: dict[str, bytes], root: Path, *, holdout: float, how: str) -> TokenStore:
    for name, text in texts.items():
        (root / "text").mkdir(exist_ok=True)
        (root / "text" / name).write_bytes(text)
    return prepare(scan(root / "text"), holdout=holdout, how=how, cache=root / "cache")


def cut(side: stream.Stream) -> list[bytes]:
    return [decode(side.ids(a, b)) for a, b in pairwise(side.offsets.tolist())]


def kept(text: bytes) -> bytes:
    return text.removeprefix(b"\xef\xbb\xbf")


FILES = st.lists(TEXTS.filter(lambda text: b"\0" not in text), min_size=1, max_size=6)


@given(texts=FILES, holdout=st.sampled_from([0.0, 0.2, 0.5, 0.8]), chunk=st.integers(1, 40))
def test_a_store_holds_every_byte_once_with_one_end_mark_a_document(
    texts: list[bytes], holdout: float, chunk: int
) -> None:
    texts = [*texts, b"some text that is long enough for any cut"]
    with (
        tempfile.TemporaryDirectory() as root,
        mock.patch.object(build, "CHUNK_IDS", chunk),
        mock.patch.object(stream, "CHUNK_IDS", chunk),
    ):
        store = ready({f"{n}": text for n, text in enumerate(texts)}, Path(root), holdout=holdout, how="tail")
        train, heldout = cut(store.train), cut(store.heldout)
        text = b"".join(map(kept, texts))
        assert b"".join(train + heldout) == text
        assert b"".join(train) == text[: int(len(text) * (1 - holdout))]
        assert len(train) + len(heldout) - len(texts) in (0, 1)
        assert store.counts["documents"] == len(texts)
        assert store.counts["tokens"] == len(text) + len(train) + len(heldout)
        assert [b"".join(document.pieces) for document in documents(scan(Path(root) / "text"))] == list(
            map(kept, texts)
        )
        for side in (store.train, store.heldout):
            ids = side.ids(0, side.size)
            assert (np.flatnonzero(ids == EOS) + 1).tolist() == side.offsets[1:].tolist()
            assert zarr.open_group(str(side.path), mode="r")["ids"][:].tolist() == ids.tolist()


@given(texts=st.lists(TEXTS.filter(lambda text: b"\0" not in text), min_size=2, max_size=20), data=st.data())
def test_a_document_stays_on_its_side_when_others_come_and_names_change(
    texts: list[bytes], data: st.DataObject
) -> None:
    share = 0.5
    sides = {held_out(blake2b(text, digest_size=16).digest(), share): text for text in (b"a", b"b", b"c", b"d", b"e")}
    fixed = [sides[True], sides[False]]  # so that no side is ever empty
    more = data.draw(st.lists(TEXTS.filter(lambda text: b"\0" not in text), max_size=5))
    renamed = data.draw(st.permutations([*texts, *fixed, *more]))
    splits = []
    for some in ([*texts, *fixed], renamed):
        with tempfile.TemporaryDirectory() as root:
            store = ready({f"{n:03}": text for n, text in enumerate(some)}, Path(root), holdout=share, how="document")
            train, heldout = set(cut(store.train)), set(cut(store.heldout))
            assert not train & heldout
            splits.append((train, heldout))
    assert splits[0][0] <= splits[1][0]
    assert splits[0][1] <= splits[1][1]


@given(text=st.binary(max_size=200))
def test_bytes_come_back_and_no_text_makes_a_mark(text: bytes) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert len(ids) == len(text)
    assert ids.min(initial=OFFSET) >= OFFSET
