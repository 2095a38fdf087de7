"""Order, rows and cursor, batches of one stream, held-out text: nothing lost or added, whatever is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.data.arrays import arrays_at
from lib.data.bytes import OFFSET, decode, encode
from lib.data.heldout import heldout_arrays
from lib.data.invariants import check_arrays
from lib.data.plan import Plan
from lib.data.rows import Cursor, advance, count, first, ordinal, seek, starts
from lib.data.shuffle import fold, permute, restore
from lib.data.source import Source
from lib.data.split import held_out
from tests.streams import SEEDS, Laid, flat, laid, learnt_ids, possible, streams

TEXTS = st.binary(max_size=24)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Laid, Plan, int]:
    """A stream that is cut as it is, a plan and a seed."""
    length, micro = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return draw(streams(length)), Plan(micro * draw(st.integers(1, 4)), length, micro), draw(SEEDS)


START = Cursor(0, 0)


def made(run: tuple[Laid, Plan, int], cursor: Cursor = START) -> dict[str, Any]:
    source, plan, seed = run
    return arrays_at([Source("text", source)], plan, seed, {"text": cursor}, 0)


def endless(source: Laid, position: int) -> int:
    return int(source.all[position % source.size])


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
    batch, key = made(run, cursor), fold(seed, "source", "text")
    begins = {int(offset) % source.size for offset in source.offsets}
    begin = starts(cursor, plan.rows, size=source.size, length=plan.length, seed=key).tolist()
    for row, start in enumerate(begin):
        at = divmod(row, plan.rows // plan.micro)
        places = [(start + n) % source.size for n in range(plan.length)]
        after = [(place + 1) % source.size for place in places]
        segment, position, segments, positions = 0, 0, [0], [0]
        for place, next_place in zip(places[1:], after[1:], strict=True):
            new = (next_place if source.shared else place) in begins
            segment, position = segment + new, 0 if new else position + 1
            segments.append(segment)
            positions.append(position)
        assert batch["inputs"][at].tolist() == [endless(source, place) for place in places]
        assert batch["targets"][at].tolist() == [endless(source, place) for place in after]
        assert batch["segments"][at].tolist() == segments
        assert batch["positions"][at].tolist() == positions
        assert batch["mask"][at].tolist() == [place in possible(source) for place in after]
        assert batch["bytes"][at] == 3 * batch["mask"][at].sum()
    check_arrays(batch, source.vocab, 3)


@given(run=runs())
def test_micro_batches_do_not_change_which_rows_an_update_has(run: tuple[Laid, Plan, int]) -> None:
    source, plan, seed = run
    one, many = made((source, plan._replace(micro=1), seed), Cursor(0, 1)), made(run, Cursor(0, 1))
    assert one["cursor"] == many["cursor"]
    assert all(flat(one, name) == flat(many, name) for name in one if name != "cursor")


@given(texts=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6), length=st.integers(1, 9), seed=SEEDS)
def test_each_text_is_trained_on_in_full_once_an_epoch(texts: list[bytes], length: int, seed: int) -> None:
    source = laid([*texts, b"x" * length])
    rows = first(length, size=source.size, length=length)  # as many epochs as a row is long end with a whole row
    batch = made((source, Plan(rows, length), seed))
    assert Counter(learnt_ids(batch)) == Counter({one: n * length for one, n in Counter(source.all.tolist()).items()})
    assert batch["bytes"].sum() == length * sum(map(len, [*texts, b"x" * length]))


# Held out -------------------------------------------------------------------------------------------------------------


@given(sides=st.lists(streams(4), min_size=1, max_size=3), length=st.integers(1, 9))
def test_every_held_out_id_but_a_streams_first_is_a_target_once(sides: list[Laid], length: int) -> None:
    batches = list(heldout_arrays(sides, Plan(4, length, 2)))
    assert {batch["inputs"].shape for batch in batches} == {(1, 2, length)}
    wanted = [int(side.all[p]) for side in sides for p in sorted(possible(side)) if p]
    assert [one for batch in batches for one in learnt_ids(batch)] == wanted
    # Rows in order, each of one stream alone; a row that is not full begins nothing of the next stream.
    rows = iter(
        [(i, t) for batch in batches for i, t in zip(flat(batch, "inputs"), flat(batch, "targets"), strict=True)]
    )
    for side in sides:
        for begin in range(0, side.size - 1, length):
            have = min(length, side.size - 1 - begin)
            pad = [0] * (length - have)
            assert next(rows) == (
                [*side.all[begin : begin + have].tolist(), *pad],
                [*side.all[begin + 1 : begin + 1 + have].tolist(), *pad],
            )
    assert all(not any(i) and not any(t) for i, t in rows)
    for batch in batches:
        check_arrays(batch, sides[0].vocab, 3)
        assert batch["bytes"].sum() == 3 * batch["mask"].sum()


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), limit=st.integers(1, 40))
def test_a_limited_evaluation_is_a_part_of_the_whole_one(texts: Sequence[bytes], limit: int) -> None:
    sides, plan = [laid([*texts, b"x"]), laid([b"yy"])], Plan(2, 3, 1)

    def rows(limit: int | None) -> list[tuple[int, ...]]:
        batches = list(heldout_arrays(sides, plan, limit))
        found = [row for batch in batches for row in zip(flat(batch, "targets"), flat(batch, "mask"), strict=True)]
        return [tuple(one for one, good in zip(*row, strict=True) if good) for row in found if any(row[1])]

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


@given(text=st.binary(max_size=200))
def test_bytes_come_back_and_no_text_makes_a_mark(text: bytes) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert len(ids) == len(text)
    assert ids.min(initial=OFFSET) >= OFFSET
