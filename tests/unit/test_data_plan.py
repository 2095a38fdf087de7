"""The shape of updates: worked examples of growth, and each message in full."""

from __future__ import annotations

import re

import pytest

from lib.data.plan import Plan, check_plan, length_at, rows_at, rows_before

GROWS = Plan(8, 64, 2, rows_at=((10, 16), (20, 32)), length_at=((0, 16), (10, 64)))


def test_a_change_holds_from_its_step_on() -> None:
    assert [rows_at(GROWS, step) for step in (0, 9, 10, 19, 20, 10**9)] == [8, 8, 16, 16, 32, 32]
    assert [length_at(GROWS, step) for step in (0, 9, 10, 10**9)] == [16, 16, 64, 64]
    assert length_at(GROWS._replace(length_at=((5, 16),)), 4) == 64


def test_rows_before_a_step_are_counted_without_the_steps() -> None:
    assert [rows_before(GROWS, step) for step in (0, 1, 10, 11, 20, 21)] == [0, 8, 80, 96, 240, 272]
    assert rows_before(GROWS, 10**15) == 240 + (10**15 - 20) * 32
    assert rows_before(GROWS._replace(rows_at=((0, 6),)), 3) == 18


def test_plans_that_fit_are_let_through() -> None:
    for plan in (
        GROWS,
        Plan(1, 1),
        Plan(4, 8, mode="pad", buckets=(2, 4, 8)),
        Plan(4, 8, mode="pad"),
        Plan(4, 8, repeats=3),
    ):
        check_plan(plan)


@pytest.mark.parametrize(("plan", "message"), [
    (Plan(4, 4, 3), "batch.rows=4 must be a multiple of batch.micro=3, both >= 1"),
    (Plan(0, 4, 1), "batch.rows=0 must be a multiple of batch.micro=1, both >= 1"),
    (Plan(4, 4, 0), "batch.rows=4 must be a multiple of batch.micro=0, both >= 1"),
    (Plan(4, 0), "batch.length=0 must be >= 1"),
    (Plan(4, 8, mode="fit"), "batch.mode='fit' must be one of concat, pack, pad"),
    (Plan(4, 8, repeats=2), "batch.repeats=2 must be >= 3, or none to train on every row"),
    (Plan(4, 8, rows_at=((3, 8), (3, 4))), "batch.rows_at=[(3, 8), (3, 4)] must have rising steps >= 0"),
    (Plan(4, 8, length_at=((-1, 8),)), "batch.length_at=[(-1, 8)] must have rising steps >= 0"),
    (Plan(4, 8, 2, rows_at=((3, 7),)), "batch.rows_at: 7 rows at step 3 must be a multiple of batch.micro=2"),
    (Plan(4, 8, length_at=((3, 3),)), "batch.length_at: 3 at step 3 must divide batch.length=8"),
    (Plan(4, 8, length_at=((3, 0),)), "batch.length_at: 0 at step 3 must divide batch.length=8"),
    (Plan(4, 8, buckets=(8,)), "batch.buckets=[8] must be empty with batch.mode=concat"),
    (Plan(4, 8, mode="pad", length_at=((3, 4),)), "batch.length_at must be empty with batch.mode=pad; set batch.buckets"),
    (Plan(4, 8, mode="pad", buckets=(4, 2, 8)), "batch.buckets=[4, 2, 8] must rise up to batch.length=8"),
    (Plan(4, 8, mode="pad", buckets=(2, 4)), "batch.buckets=[2, 4] must rise up to batch.length=8"),
    (Plan(4, 8, mode="pad", buckets=(0, 8)), "batch.buckets=[0, 8] must rise up to batch.length=8"),
])  # fmt: skip
def test_a_plan_that_no_batch_can_be_made_by_is_refused(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_plan(plan)
