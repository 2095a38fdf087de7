"""The index: batch n is the same after any stop and for any number of ranks, and nothing is lost, repeated or mixed up.

Held for streams of all shapes in every mode, for mixtures and for growing updates.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lib.data.arrays import arrays_after, arrays_at, place_at, positions_at
from lib.data.invariants import check_arrays
from lib.data.mix import Mix, counts, deal, mix_of
from lib.data.plan import Plan, length_at, rows_at, rows_before
from lib.data.rows import Cursor
from lib.data.share import Share
from lib.data.source import Source, extent
from tests.streams import (
    NUMBERED,
    SEEDS,
    WEIGHTS,
    after,
    batches,
    flat,
    learnt_ids,
    numbered,
    plans,
    possible,
    row_keys,
    runs,
    same,
    source_of,
    start_of,
    streams,
)

Run = tuple[list[Source], Plan, int]
WORLDS = (1, 2, 3, 4, 8)
FULL = {"rows_at": (), "length_at": ()}


def first(run: Run, number: int) -> list[dict[str, Any]]:
    return list(islice(batches(*run), number))


# Any stop -------------------------------------------------------------------------------------------------------------


@given(run=runs(), stops=st.lists(st.integers(0, 7), min_size=2, max_size=2).map(sorted))
def test_a_run_stopped_twice_has_the_batches_of_an_unbroken_one(run: Run, stops: list[int]) -> None:
    whole = first(run, 8)
    got: list[dict[str, Any]] = []
    cursor, step = start_of(run[0]), 0
    for stop in (*stops, 8):
        got += islice(batches(*run, cursor, step), stop - step)
        step, cursor = stop, after(got[-1]) if got else cursor
    assert all(same(a, b) for a, b in zip(whole, got, strict=True))


@given(run=runs(), a=st.integers(0, 6), b=st.integers(0, 6))
def test_taking_batches_is_seeking(run: Run, a: int, b: int) -> None:
    sources, plan, seed = run
    made = first(run, a + b)
    at = after(made[a - 1]) if a else start_of(sources)
    end = after(made[-1]) if made else start_of(sources)
    assert place_at(sources, plan, seed, start_of(sources), 0, a) == (at, a)
    assert place_at(sources, plan, seed, at, a, b) == (end, a + b)
    assert place_at(sources, plan, seed, end, a + b, 0) == (end, a + b)


@given(run=runs(), far=st.integers(10**6, 10**15), more=st.integers(0, 10**9))
def test_far_places_add_up(run: Run, far: int, more: int) -> None:
    sources, plan, seed = run
    at, step = place_at(sources, plan, seed, start_of(sources), 0, far)
    assert place_at(sources, plan, seed, at, step, more) == place_at(
        sources, plan, seed, start_of(sources), 0, far + more
    )
    made = arrays_at(sources, plan, seed, at, step)
    assert after(made) == place_at(sources, plan, seed, at, step, 1)[0]


@given(run=runs(), far=st.integers(0, 10**6))
def test_a_cursor_has_one_normal_form_and_any_form_gives_the_same_batch(run: Run, far: int) -> None:
    sources, plan, seed = run
    at, step = place_at(sources, plan, seed, start_of(sources), 0, far)
    visited = {}
    for source in sources:
        size, length = extent(source, plan.length)
        e, row = at[source.name]
        visited[source.name] = Cursor(0, -(-e * size // length) + row)
        assert e == visited[source.name].row * length // size
    assert same(arrays_at(sources, plan, seed, at, step), arrays_at(sources, plan, seed, visited, step))


# Any number of ranks --------------------------------------------------------------------------------------------------


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The shares of all ranks laid side by side along the axis of rows."""
    assert all(part["cursor"] == parts[0]["cursor"] for part in parts)
    names = [name for name in parts[0] if name != "cursor"]
    return {**{n: np.concatenate([part[n] for part in parts], axis=1) for n in names}, "cursor": parts[0]["cursor"]}


@given(run=runs(unit=24), change=st.integers(0, 3), worlds=st.lists(st.sampled_from(WORLDS), min_size=2, max_size=2))
def test_ranks_share_the_batches_of_one_whatever_their_number_and_when_it_changes(
    run: Run, change: int, worlds: list[int]
) -> None:
    whole, cursor = first(run, 3), start_of(run[0])
    for step, batch in enumerate(whole):
        world = worlds[step >= change]
        parts = [arrays_at(*run, cursor, step, Share(rank, world)) for rank in range(world)]
        assert same(joined(parts), batch)
        cursor = after(parts[0])


@given(run=runs(unit=8, most=1), world=st.sampled_from(WORLDS[1:2] + WORLDS[3:]))
def test_a_rank_reads_no_more_than_its_rows(run: Run, world: int) -> None:
    sources, plan, seed = run
    if plan.mode != "concat":
        return
    stream: Any = sources[0].stream
    stream.read.clear()
    arrays_at(sources, plan, seed, start_of(sources), 0, Share(world - 1, world))
    assert sum(stream.read) == rows_at(plan, 0) // world * (plan.length + 1)


# Each document once an epoch ------------------------------------------------------------------------------------------


@given(data=st.data(), seed=SEEDS)
def test_every_id_that_can_be_a_target_is_one_once_an_epoch(data: st.DataObject, seed: int) -> None:
    plan = data.draw(plans(growth=False))._replace(rows=1, micro=1)
    stream = data.draw(streams(plan.length))
    source = source_of("text", stream, plan)
    size, length = extent(source, plan.length)
    epochs = length if plan.mode == "concat" else 2  # so many, that rows and epochs end together
    found: Counter[int] = Counter()
    for batch in islice(batches([source], plan, seed), epochs * size // length):
        found.update(one - 1 for one in learnt_ids(batch))
    assert found == Counter(dict.fromkeys(possible(stream), epochs))
    assert after(batch) == {"text": Cursor(epochs, 0)}


@given(data=st.data(), seed=SEEDS)
def test_each_epoch_of_planned_rows_has_each_row_once_in_an_order_of_its_own(data: st.DataObject, seed: int) -> None:
    plan = data.draw(plans(growth=False).filter(lambda plan: plan.mode != "concat"))._replace(
        rows=1, micro=1, buckets=()
    )
    stream = data.draw(streams(plan.length))
    source = source_of("text", stream, plan)
    number, _ = extent(source, plan.length)
    rows = [row_keys(batch)[0] for batch in islice(batches([source], plan, seed), 4 * number)]
    epochs = [rows[n : n + number] for n in range(0, 4 * number, number)]
    assert all(Counter(epoch) == Counter(epochs[0]) for epoch in epochs)
    if number > 10 or not plan.shuffle:
        assert len({tuple(epoch) for epoch in epochs}) == (4 if plan.shuffle else 1)


@given(run=runs())
def test_every_batch_keeps_documents_apart_and_its_invariants(run: Run) -> None:
    sources, _, _ = run
    documents = {}
    for source in sources:
        stream: Any = source.stream
        begins = np.searchsorted(stream.offsets, np.arange(stream.size), side="right") - 1
        documents[source.name] = {p + 1: int(document) for p, document in enumerate(begins)}
    only: Any = sources[0].stream
    for batch in first(run, 3):
        check_arrays(batch, NUMBERED, 3)
        assert (batch["bytes"] == 3 * batch["mask"].sum(-1)).all()
        if len(sources) > 1:
            continue
        of = documents[sources[0].name]
        for inputs, targets, segments, mask in zip(
            *(flat(batch, name) for name in ("inputs", "targets", "segments", "mask")), strict=True
        ):
            met: dict[int, set[int]] = {}
            for here, there, segment, good in zip(inputs, targets, segments, mask, strict=True):
                if not good:
                    continue
                # In a shared stream the document is that of the target: its first id is predicted from an end mark.
                met.setdefault(segment, set()).add(of[there])
                if not only.shared:
                    assert of[here] == of[there]
            assert all(len(some) == 1 for some in met.values())


# Mixtures -------------------------------------------------------------------------------------------------------------


def mixes(weights: list[Any]) -> Mix:
    return mix_of([Source(f"s{n}", numbered([4]), weight) for n, weight in enumerate(weights)])


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=6), block=st.integers(0, 10**12), seed=SEEDS)
def test_a_mixture_is_exact_in_every_block(weights: list[Any], block: int, seed: int) -> None:
    mix = mixes(weights)
    dealt = deal(mix, block * mix.block, mix.block, seed)
    assert tuple(np.bincount(dealt, minlength=len(weights)).tolist()) == mix.shares
    total = sum(Fraction(str(weight)) for weight in weights)
    for share, weight in zip(mix.shares, weights, strict=True):
        assert abs(share - mix.block * Fraction(str(weight)) / total) < 1
    assert counts(mix, block * mix.block, seed) == tuple(block * share for share in mix.shares)


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=4), a=st.integers(0, 300), b=st.integers(0, 300), seed=SEEDS)
def test_what_a_mixture_deals_does_not_depend_on_where_it_is_cut(weights: list[Any], a: int, b: int, seed: int) -> None:
    mix = mixes(weights)
    whole = deal(mix, 0, a + b, seed)
    assert whole.tolist() == [*deal(mix, 0, a, seed).tolist(), *deal(mix, a, b, seed).tolist()]
    assert counts(mix, a + b, seed) == tuple(np.bincount(whole, minlength=len(weights)).tolist())


@given(run=runs(growth=False), data=st.data())
def test_a_source_has_its_rows_in_the_order_it_has_them_alone(run: Run, data: st.DataObject) -> None:
    sources, plan, seed = run
    plan = plan._replace(buckets=())
    order = data.draw(st.permutations(sources))
    mix, rows = mix_of(order), plan.rows * 6
    dealt = deal(mix, 0, rows, seed)
    mixed = [key for batch in first((order, plan, seed), 6) for key in row_keys(batch)]
    for n, source in enumerate(order):
        own = [key for key, whose in zip(mixed, dealt.tolist(), strict=True) if whose == n]
        alone = (key for batch in batches([source], plan, seed) for key in row_keys(batch))
        assert own == list(islice(alone, len(own)))
        assert len(own) == counts(mix, rows, seed)[n]


# Growth ---------------------------------------------------------------------------------------------------------------


@given(plan=plans(), step=st.integers(0, 20))
def test_rows_before_a_step_are_those_of_the_steps_before_it(plan: Plan, step: int) -> None:
    assert rows_before(plan, step) == sum(rows_at(plan, n) for n in range(step))


@given(run=runs())
def test_growing_updates_have_the_same_rows_in_the_same_order_however_they_are_cut(run: Run) -> None:
    sources, plan, seed = run
    plan = plan._replace(buckets=())
    even = plan._replace(rows=1, micro=1, **FULL)
    small = (
        row
        for batch in batches(sources, even, seed)
        for row in zip(flat(batch, "targets"), flat(batch, "mask"), strict=True)
    )
    for step, batch in enumerate(first((sources, plan, seed), 7)):
        length = length_at(plan, step)
        rows = rows_at(plan, step)
        assert batch["targets"].shape == (plan.micro, rows * plan.length // length // plan.micro, length)
        wanted = list(islice(small, rows))
        for name, column in (("targets", 0), ("mask", 1)):
            assert batch[name].reshape(rows, plan.length).tolist() == [row[column] for row in wanted]


@given(run=runs(), repeats=st.integers(3, 5))
def test_rows_that_repeat_stay_and_are_not_learnt(run: Run, repeats: int) -> None:
    sources, plan, seed = run
    stream: Any = sources[0].stream
    loud = stream._replace(all=np.ones_like(stream.all))  # the same id over and over
    told = plan._replace(repeats=repeats, length_at=())
    batch = first(([sources[0]._replace(stream=loud)], told, seed), 1)[0]
    plain = first(([sources[0]._replace(stream=loud)], told._replace(repeats=None), seed), 1)[0]
    text = (plain["targets"] == 1).sum(-1)
    assert (batch["mask"] == plain["mask"] & (text < repeats)[..., None]).all()
    assert all((batch[name] == plain[name]).all() for name in ("inputs", "targets", "segments", "positions"))


# Looking back ---------------------------------------------------------------------------------------------------------


@given(run=runs(), step=st.integers(0, 5))
def test_every_target_is_found_again_where_it_is_said_to_come_from(run: Run, step: int) -> None:
    sources, plan, seed = run
    at, then = place_at(sources, plan, seed, start_of(sources), 0, step)
    batch = arrays_at(sources, plan, seed, at, then)
    whose, places = positions_at(sources, plan, seed, at, then)
    targets, mask = (batch[name].reshape(-1, batch[name].shape[-1]) for name in ("targets", "mask"))
    assert places.shape == targets.shape
    for row, source in enumerate(whose.tolist()):
        ids, known = sources[source].stream.ids(0, sources[source].stream.size), places[row] >= 0
        assert (ids[places[row][known]] == targets[row][known]).all()
        assert not mask[row][~known].any()


@given(run=runs(), updates=st.integers(0, 6))
def test_a_later_batch_can_be_made_without_those_before_it(run: Run, updates: int) -> None:
    sources, plan, seed = run
    made = arrays_after(sources, plan, seed, start_of(sources), 0, Share(), updates)
    assert same(made, first(run, updates + 1)[-1])
