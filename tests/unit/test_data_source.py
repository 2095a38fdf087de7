"""Sources: what they are counted in, and each message in full."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lib.data.plan import Plan
from lib.data.rows import Cursor
from lib.data.source import RowTable, Source, check_sources, extent, ordinals
from lib.errors import DataError
from tests.streams import laid, numbered, source_of

PLAN, PACK = Plan(2, 4), Plan(2, 4, mode="pack")
ROWS = RowTable(np.array([0, 1]), np.array([[0, 3]]))
NONE = RowTable(np.array([0]), np.empty((0, 2), np.int64))


def test_a_table_counts_like_a_stream_of_rows() -> None:
    assert extent(Source("a", numbered([13])), 4) == (13, 4)
    assert extent(source_of("a", numbered([13]), PACK), 4) == (4, 1)
    mixed = [source_of("a", numbered([13]), PACK), Source("b", numbered([13]))]
    assert ordinals(mixed, 4, {"b": Cursor(1, 0), "a": Cursor(2, 3)}) == (11, 4)


@pytest.mark.parametrize(("sources", "plan", "message"), [
    ([], PLAN, "data.sources=[] must be at least one, each with its own name"),
    ([Source("a", numbered([9])), Source("a", numbered([9]))], PLAN,
     "data.sources=['a', 'a'] must be at least one, each with its own name"),
    ([Source("a.b", numbered([9]))], PLAN,
     "data.sources.a.b must be named by letters, digits, `_` and `-`; rename it"),
    ([Source("", numbered([9]))], PLAN, "data.sources. must be named by letters, digits, `_` and `-`; rename it"),
    ([Source("a", numbered([9])), Source("b", laid([b"123456789"]))], PLAN,
     "data.sources have several vocabularies (a: 4096, b: 260), must have one; use one tokenizer for all"),
    ([Source("a", numbered([9]), rows=ROWS)], PLAN, "data.sources.a has a row table, must fit batch.mode=concat; "
         "make one with lib.store.plans.row_table, or leave it out for concat"),
    ([Source("a", numbered([9]))], PACK, "data.sources.a has no row table, must fit batch.mode=pack; "
         "make one with lib.store.plans.row_table, or leave it out for concat"),
])  # fmt: skip
def test_sources_that_do_not_fit_are_refused(sources: list[Source], plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_sources(sources, plan)


@pytest.mark.parametrize(("sources", "plan", "message"), [
    ([Source("a", numbered([4]))], PLAN,
     "training text: have 4 ids, need batch.length+1=5; give more text or lower batch.length"),
    ([Source("a", numbered([9])), Source("b", numbered([4]))], PLAN,
     "data.sources.b: have 4 ids, need batch.length+1=5; give more text or lower batch.length"),
    ([Source("a", numbered([1], shared=False), rows=NONE)], PACK,
     "data.sources.a: no document has a target to train on; give more text"),
])  # fmt: skip
def test_sources_without_a_row_are_refused(sources: list[Source], plan: Plan, message: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        check_sources(sources, plan)


def test_a_cursor_of_other_sources_is_refused() -> None:
    message = "cursor=['a', 'c'] must be of the sources ['a', 'b']; go on with the same sources"
    mixed = [Source("b", numbered([9])), Source("a", numbered([9]))]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ordinals(mixed, 4, {"c": Cursor(0, 0), "a": Cursor(0, 0)})
