"""The form of a batch: every misfit is named before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from bench.step import batch_of
from lib.config import Batch, Model, Recipe
from lib.metrics import as_row
from lib.state import init_state
from lib.step import eval_step, train_step
from lib.tree import leaves

RECIPE = Recipe(model=Model(width=16, depth=1, heads=2), batch=Batch(rows=2, length=8))
ALL = "inputs, targets, segments, positions, mask, bytes"


def batch(**changed: Any) -> TensorDict:
    made = batch_of(RECIPE, 0)
    for name, change in changed.items():
        made = made.exclude(name) if change is None else made.set(name, change(made[name]))
    return made


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"targets": None}, f"batch: missing targets, must have {ALL}, cursor; see lib.step.train_step"),
        (
            {"cursor": None, "bytes": None},
            f"batch: missing bytes, cursor, must have {ALL}, cursor; see lib.step.train_step",
        ),
        (
            {"inputs": lambda x: x[0]},
            "batch.inputs: shape (2, 8) must be [micro-batches, rows, positions], none of them 0; "
            "for one micro-batch add a leading axis with unsqueeze(0)",
        ),
        (
            {"mask": lambda x: x.long()},
            "batch.mask: is torch.int64 (1, 2, 8), must be torch.bool (1, 2, 8); convert it",
        ),
        (
            {"targets": lambda x: x[..., :-1]},
            "batch.targets: is torch.int64 (1, 2, 7), must be torch.int64 (1, 2, 8); convert it",
        ),
        (
            {"cursor": lambda x: x.clone().set("text", {"epoch": torch.tensor(0), "row": torch.tensor(4.5)})},
            "batch.cursor.text.row: is torch.float32 (), must be torch.int64 (); convert it",
        ),
    ],
)
def test_a_misfit_is_named(changed: dict[str, Callable[[Any], Any] | None], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        train_step(init_state(RECIPE), batch(**changed))
    assert str(caught.value) == message


def test_an_evaluation_needs_no_cursor() -> None:
    eval_step(init_state(RECIPE), batch(cursor=None))
    with pytest.raises(
        ValueError, match="batch: missing mask, must have inputs, targets, segments, positions, mask, bytes; "
    ):
        eval_step(init_state(RECIPE), batch(mask=None))


def test_targets_marked_as_ignored_are_no_targets() -> None:
    """-100 with the mask left on is the same as the mask off: never in the sum, never in the denominator."""
    dropped = torch.zeros(1, 2, 8, dtype=torch.bool)
    dropped[..., 3:6] = True
    marked = batch(targets=lambda x: torch.where(dropped, -100, x))
    masked = batch(mask=lambda x: x & ~dropped)
    (one, a), (other, b) = (train_step(init_state(RECIPE), made) for made in (marked, masked))
    assert as_row(a) == as_row(b)
    assert as_row(a)["tokens"] == 10
    assert all(torch.equal(leaf, leaves(other)[path]) for path, leaf in leaves(one).items())


def test_a_state_that_asks_for_gradients_gives_one_that_does_not() -> None:
    state = init_state(RECIPE)
    for leaf in leaves(state["params"]).values():
        leaf.requires_grad_()
    new, metrics = train_step(state, batch())
    assert not any(leaf.requires_grad for leaf in (*leaves(new).values(), *leaves(metrics).values()))
