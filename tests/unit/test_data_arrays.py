"""The batch of one update: worked resumes, the cursor in full, what seeking costs, and each message in full."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from lib.data.arrays import arrays_at, place_at
from lib.data.bytes import EOS, SIZES, VOCAB
from lib.data.plan import Plan
from lib.data.rows import Cursor
from lib.data.share import Share
from lib.data.source import RowTable, Source
from lib.errors import DataError
from tests.streams import after, batches, flat, laid, learnt_ids, numbered, row_keys, same, source_of, start_of

ZERO = {"text": Cursor(0, 0)}
PACK = Plan(4, 8, mode="pack")


def twenty(plan: Plan) -> list[Source]:
    """Twenty documents of one row each."""
    return [source_of("text", numbered([plan.length] * 20), plan)]


def seen(sources: list[Source], plan: Plan, number: int, **at: Any) -> list[list[tuple[int, ...]]]:
    """Targets of the rows of each batch."""
    return [[key for key, _ in row_keys(batch)] for batch in islice(batches(sources, plan, 3, **at), number)]


@pytest.mark.parametrize("plan", [Plan(4, 8), PACK, PACK._replace(mode="pad")], ids=["concat", "pack", "pad"])
def test_twenty_rows_resumed_after_eight_miss_and_repeat_none_in_this_epoch_and_the_next(plan: Plan) -> None:
    rows = [row for batch in seen(twenty(plan), plan, 2) for row in batch]
    rows += [row for batch in seen(twenty(plan), plan, 8, cursor={"text": Cursor(0, 8)}, step=2) for row in batch]
    assert len(set(rows[:20])) == len(set(rows[20:40])) == 20
    assert rows[:20] != rows[20:40]  # each epoch has an order of its own
    assert rows == [row for batch in seen(twenty(plan), plan, 10) for row in batch]


@pytest.mark.parametrize("plan", [Plan(4, 8), PACK], ids=["concat", "pack"])
def test_without_shuffling_every_epoch_is_in_the_order_of_the_text(plan: Plan) -> None:
    told = plan._replace(shuffle=False)
    ids = [one for batch in seen(twenty(told), told, 10) for row in batch for one in row]
    once = [*range(1, 161)] if plan.mode == "pack" else [*range(2, 161), 1]
    assert ids == once + once
    whole = list(islice(batches(twenty(told), told, 3), 7))
    assert same(next(batches(twenty(told), told, 3, after(whole[5]), 6)), whole[6])


def test_five_resumes_with_one_update_each_are_a_straight_run() -> None:
    sources = [source_of("text", numbered([30, 7, 50]), PACK), source_of("code", numbered([90]), PACK, 0.25)]
    straight = list(islice(batches(sources, PACK, 1), 5))
    cursor: dict[str, Cursor] = start_of(sources)
    for step, batch in enumerate(straight):
        at = dict(cursor)
        assert place_at(sources, PACK, 1, at, step, 0) == (cursor, step)  # saved and loaded with nothing between
        made = arrays_at(sources, PACK, 1, at, step)
        assert same(made, batch)
        cursor = after(made)


@pytest.mark.parametrize("mode", ["concat", "pack"])
def test_an_update_holds_the_same_documents_for_every_way_to_cut_it_into_micro_batches(mode: str) -> None:
    stream = numbered([9 + n % 5 for n in range(53)])
    got = []
    for micro in (1, 2, 4):
        plan = Plan(4, 16, micro, mode=mode)
        made = list(islice(batches([source_of("text", stream, plan)], plan, 0), 6))
        resumed = list(islice(batches([source_of("text", stream, plan)], plan, 0, after(made[2]), 3), 3))
        assert all(same(a, b) for a, b in zip(made[3:], resumed, strict=True))
        got.append([([flat(batch, name) for name in ("inputs", "mask")], batch["cursor"]) for batch in made])
    assert got[0] == got[1] == got[2]


@pytest.mark.parametrize("world", [1, 4])
def test_two_ranks_can_become_one_or_four(world: int) -> None:
    plan = Plan(4, 8)
    straight = seen(twenty(plan), plan, 5)
    two = [seen(twenty(plan), plan, 2, share=Share(rank, 2)) for rank in range(2)]
    assert [a + b for a, b in zip(*two, strict=True)] == straight[:2]
    assert all(not set(a) & set(b) for a, b in zip(*two, strict=True))
    at: dict[str, Any] = {"cursor": {"text": Cursor(0, 8)}, "step": 2}
    rest = [seen(twenty(plan), plan, 3, share=Share(rank, world), **at) for rank in range(world)]
    assert [[row for part in parts for row in part] for parts in zip(*rest, strict=True)] == straight[2:]
    assert len({row for batch in straight for row in batch}) == 20


def test_updates_after_a_restart_are_no_copy_of_those_before() -> None:
    plan = Plan(2, 5)
    straight = seen([source_of("text", numbered([100]), plan)], plan, 6)
    again = seen([source_of("text", numbered([100]), plan)], plan, 3, cursor={"text": Cursor(0, 6)}, step=3)
    assert straight[3:] == again
    assert not {row for batch in straight[:3] for row in batch} & {row for batch in again for row in batch}


def test_a_batch_larger_than_an_epoch_wraps_and_counts() -> None:
    plan = Plan(4, 4)
    batch = arrays_at([source_of("text", numbered([4, 4, 4]), plan)], plan, 0, ZERO, 0)
    assert batch["cursor"] == {"text": {"epoch": 1, "row": 1}}
    two = Plan(4, 4, mode="pack")
    made = list(islice(batches([source_of("text", numbered([4] * 8), two)], two, 0), 2))
    assert [batch["cursor"]["text"] for batch in made] == [{"epoch": 0, "row": 4}, {"epoch": 1, "row": 0}]


def test_another_seed_and_another_name_are_other_orders() -> None:
    plan = Plan(20, 8)
    orders = [
        tuple(map(tuple, flat(arrays_at([source_of(name, numbered([160]), plan)], plan, seed, at, 0), "inputs")))
        for seed, name, at in ((0, "text", ZERO), (1, "text", ZERO), (0, "code", {"code": Cursor(0, 0)}))
    ]
    assert len(set(orders)) == 3
    assert all(Counter(order) == Counter(orders[0]) for order in orders)


def test_a_mixture_takes_its_rows_in_the_proportion_of_the_weights() -> None:
    plan = Plan(20, 8)  # nine in ten: blocks of sixty rows
    mixed = [source_of("a", numbered([400]), plan, 0.9), source_of("b", numbered([300]), plan, 0.1)]
    made = list(islice(batches(mixed, plan, 0), 6))
    assert made[2]["cursor"] == {"a": {"epoch": 1, "row": 4}, "b": {"epoch": 0, "row": 6}}
    assert made[5]["cursor"] == {"a": {"epoch": 2, "row": 8}, "b": {"epoch": 0, "row": 12}}


def test_growing_updates_come_from_one_cursor() -> None:
    plan = Plan(2, 8, rows_at=((2, 4),), length_at=((0, 2), (1, 4), (3, 8)))
    made = list(islice(batches(twenty(plan), plan, 0), 5))
    assert [batch["inputs"].shape for batch in made] == [(1, 8, 2), (1, 4, 4), (1, 8, 4), (1, 4, 8), (1, 4, 8)]
    assert [batch["cursor"]["text"]["row"] for batch in made] == [2, 4, 8, 12, 16]
    assert all((batch["positions"][..., 0] == 0).all() and (batch["segments"][..., 0] == 0).all() for batch in made)


def test_repeating_rows_are_told_by_whole_rows_however_they_are_cut() -> None:
    stream = laid([b"a" * 15, bytes(range(15))])
    for cuts in ((), ((0, 4),)):
        plan = Plan(2, 16, mode="pack", repeats=8, length_at=cuts)
        batch = arrays_at([source_of("text", stream, plan)], plan, 0, ZERO, 0)
        assert sorted(learnt_ids(batch)) == sorted([*range(4, 19), EOS])
        assert batch["bytes"].sum() == 15
        assert Counter(batch["targets"].reshape(-1).tolist())[101] == 15


# Refused --------------------------------------------------------------------------------------------------------------


def test_a_cursor_that_these_weights_do_not_lead_to_is_refused() -> None:
    plan = Plan(4, 8)
    mixed = [source_of("a", numbered([400]), plan, 3), source_of("b", numbered([400]), plan, 1)]
    at, step = place_at(mixed, plan, 5, start_of(mixed), 0, 32)
    assert at == {"a": Cursor(1, 46), "b": Cursor(0, 32)}
    arrays_at(mixed, plan, 5, at, step)
    message = (
        "cursor stands after rows a: 96, b: 32, must stand after a: 64, b: 64 with these weights and this seed; "
        "go on with the weights and the seed that the run began with"
    )
    even = [source._replace(weight=1) for source in mixed]
    for call in (lambda: arrays_at(even, plan, 5, at, step), lambda: place_at(even, plan, 5, at, step, 1)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()


def test_a_batch_cannot_be_shared_by_more_ranks_than_it_has_rows() -> None:
    message = "batch.rows=4 must be a multiple of 8: batch.micro=1 on each of 8 ranks"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        arrays_at(twenty(Plan(4, 8)), Plan(4, 8), 0, ZERO, 0, Share(0, 8))


def test_an_id_beyond_the_vocabulary_names_its_place() -> None:
    message = "token store: id 5000 at 9 must be below 4096; it is damaged, remove it to have it built again"
    for plan in (Plan(4, 4), Plan(4, 4, mode="pack")):
        stream = numbered([13])
        damaged = stream._replace(all=np.where(np.arange(13) == 9, 5000, stream.all))
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            arrays_at([source_of("text", damaged, plan)], plan, 0, ZERO, 0)


# What it costs --------------------------------------------------------------------------------------------------------


class Endless(NamedTuple):
    """A corpus of 10^12 ids that exists nowhere; it counts what is read of it."""

    read: list[int]
    size: int = 10**12
    vocab: int = VOCAB
    eos: int = EOS
    shared: bool = True
    sizes: NDArray[np.uint16] = SIZES
    offsets: NDArray[np.int64] = np.arange(10**6 + 1, dtype=np.int64) * 10**6

    def ids(self, start: int, stop: int) -> NDArray[np.uint16]:
        self.read.append(stop - start)
        return np.full(stop - start, 10, np.uint16)

    def mask(self, start: int, stop: int) -> None:
        return None


class Regular(NamedTuple):
    """The rows or the pieces of a table of 10^9 rows of 1000 ids, by arithmetic."""

    pieces: bool

    def __len__(self) -> int:
        return 10**9 + 1

    def __getitem__(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack((index * 1000, np.full_like(index, 1000)), axis=-1) if self.pieces else index


def endless(plan: Plan, read: list[int]) -> list[Source]:
    rows: Any = None if plan.mode == "concat" else RowTable(*map(Regular, (False, True)))  # type: ignore[arg-type]
    return [Source("text", Endless(read), 3, rows), Source("code", Endless(read), 0.123456, rows)]


@pytest.mark.parametrize("plan", [Plan(8, 1000), Plan(8, 1000, mode="pack")], ids=["concat", "pack"])
def test_seeking_to_any_place_of_an_endless_corpus_reads_no_more_than_starting(plan: Plan) -> None:
    read: list[int] = []
    sources = endless(plan, read)
    arrays_at(sources, plan, 0, start_of(sources), 0)
    early = sum(read)
    read.clear()
    at, step = place_at(sources, plan, 0, start_of(sources), 0, 10**12)
    assert read == []
    batch = arrays_at(sources, plan, 0, at, step)
    assert sum(read) <= early <= 8 * 1001
    assert batch["cursor"]["text"]["epoch"] == at["text"].epoch > 7000
    assert sum(len(place) * 8 for place in batch["cursor"].values()) <= 64 * len(sources)


def test_a_batch_is_made_in_two_milliseconds() -> None:
    plan, times = Plan(32, 256), []
    sources = [Source("text", laid([bytes([n % 256]) * 5000 for n in range(200)]))]
    for n in range(30):
        begin = time.perf_counter()
        arrays_at(sources, plan, 0, {"text": Cursor(0, n * 32)}, n)
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3


def test_arrays_are_made_without_torch() -> None:
    program = "import lib.data.arrays, lib.data.heldout, lib.data.pack, sys; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
