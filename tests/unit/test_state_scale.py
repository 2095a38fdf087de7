"""The loss scale: the worked trace, its bounds, and what counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.config import Precision, Recipe, Scale
from lib.state import scale
from tests.strategies import memory, same_bits


def dynamic(**settings: Any) -> Recipe:
    return Recipe(scale=Scale(dynamic=True, **settings))


def after(slot: Any, recipe: Recipe, *, finite: bool = True, refused: bool | None = None, some: bool = True) -> Any:
    flags = {"finite": finite, "refused": (not finite) if refused is None else refused, "some": some}
    return scale.update(slot, recipe, **{name: torch.tensor(value) for name, value in flags.items()})


def shown(slot: Any) -> tuple[float, int]:
    return slot["scale"].item(), slot["good"].item()


def test_the_scale_grows_after_three_good_updates_in_a_row_and_backs_off_after_a_bad_one() -> None:
    recipe = dynamic(initial=8.0, every=3)
    slot, trace = scale.init(recipe), []
    for finite in (True, True, False, True, True, True, True):
        slot = after(slot, recipe, finite=finite)
        trace.append(shown(slot))
    assert trace == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1)]
    assert (slot["skipped"].item(), slot["bad"].item()) == (1, 0)


def test_the_scale_stays_between_its_bounds() -> None:
    recipe = dynamic(initial=2.0, lowest=1.0, highest=4.0, every=1, growth=8.0, backoff=0.125)
    slot = after(scale.init(recipe), recipe)
    assert shown(slot) == (4.0, 0)
    assert shown(after(slot, recipe)) == (4.0, 0)
    slot = after(slot, recipe, finite=False)
    assert shown(slot) == (1.0, 0)
    assert shown(after(slot, recipe, finite=False)) == (1.0, 0)


def test_bad_updates_in_a_row_are_counted_and_one_good_update_ends_the_row() -> None:
    recipe = dynamic()
    slot, rows = scale.init(recipe), []
    for finite in (True, False, True, False, True, False, False):
        slot = after(slot, recipe, finite=finite)
        rows.append((slot["bad"].item(), slot["skipped"].item()))
    assert rows == [(0, 0), (1, 1), (0, 1), (1, 2), (0, 2), (1, 3), (2, 4)]


def test_a_spike_is_refused_and_counted_but_is_no_overflow() -> None:
    recipe = dynamic(initial=8.0, every=3)
    slot = after(scale.init(recipe), recipe, finite=True, refused=True)
    assert shown(slot) == (8.0, 1)
    assert (slot["bad"].item(), slot["skipped"].item()) == (1, 1)


def test_a_batch_without_targets_counts_for_nothing() -> None:
    recipe = dynamic(initial=8.0, every=3)
    slot = after(after(scale.init(recipe), recipe), recipe, finite=False)
    assert same_bits(after(slot, recipe, some=False, refused=False), slot)
    slot = after(after(scale.init(recipe), recipe), recipe)
    assert same_bits(after(slot, recipe, some=False, refused=False), slot)


@pytest.mark.parametrize("finite", [True, False])
def test_a_fixed_scale_stays_and_its_counts_move(finite: bool) -> None:
    recipe = Recipe(scale=Scale(initial=8.0, every=1))
    slot = after(scale.init(recipe), recipe, finite=finite)
    assert slot["scale"].item() == 8.0
    assert slot["bad"].item() == (not finite)


@pytest.mark.parametrize(
    ("compute", "choice", "initial", "moves"),
    [
        ("fp32", Scale(), 1.0, False),
        ("bf16", Scale(), 1.0, False),
        ("fp16", Scale(), 65536.0, True),
        ("fp32", Scale(dynamic=True), 65536.0, True),
        ("fp16", Scale(initial=4.0), 4.0, True),
        ("fp32", Scale(initial=4.0), 4.0, False),
    ],
)
def test_the_scale_is_dynamic_where_fp16_needs_it(compute: Any, choice: Scale, initial: float, moves: bool) -> None:
    recipe = Recipe(precision=Precision(compute=compute), scale=choice)
    slot = scale.init(recipe)
    assert slot["scale"].item() == initial
    assert slot["scale"].dtype == torch.float32
    assert (after(slot, recipe, finite=False)["scale"].item() < initial) is moves


def test_an_update_shares_no_memory_with_the_slot_before() -> None:
    for recipe in (dynamic(), Recipe()):
        slot = scale.init(recipe)
        for finite in (True, False):
            places = memory(slot, after(slot, recipe, finite=finite))
            assert len(set(places)) == len(places)
