"""The cursor: the start, the place the batch brings, and what is refused."""

from __future__ import annotations

import torch

from lib.state import cursor
from lib.tree import leaves
from tests.strategies import memory, refusal, same_bits


def ints(**values: int) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_the_start() -> None:
    assert {path: leaf.item() for path, leaf in leaves(cursor.init(None)).items()} == {"text.epoch": 0, "text.row": 0}
    assert {path: leaf.item() for path, leaf in leaves(cursor.init(None, own=True)).items()} == {"batch": 0}


def test_a_cursor_given_is_copied() -> None:
    given = {"books": ints(row=7), "code": ints(row=2**62)}
    slot = cursor.init(given)
    assert same_bits(slot, given)
    assert not set(memory(slot)) & set(memory(given))


def test_whole_numbers_become_leaves_and_nothing_is_left_out() -> None:
    slot = cursor.init({"text": {"row": 3, "epoch": torch.tensor(1)}})
    assert {path: (leaf.item(), leaf.dtype) for path, leaf in leaves(slot).items()} == {
        "text.row": (3, torch.int64),
        "text.epoch": (1, torch.int64),
    }
    for value in (1.5, True, "3", None, 2**63):
        message = f"cursor.text.row={value!r} must be a whole number within int64; convert it"
        assert refusal(cursor.init, {"text": {"row": value}}) == message


def test_the_cursor_becomes_the_one_the_batch_brought() -> None:
    slot = {"text": ints(epoch=0, row=5)}
    batch = {"cursor": {"text": ints(row=3, epoch=2**53 + 1)}, "x": torch.zeros(1)}
    new = cursor.update(slot, batch)
    assert {path: leaf.item() for path, leaf in leaves(new).items()} == {"text.epoch": 2**53 + 1, "text.row": 3}
    assert not set(memory(new)) & {*memory(slot), *memory(batch)}


def test_a_batch_without_a_cursor_is_the_next_one() -> None:
    assert cursor.update(ints(batch=2**53), {"x": torch.zeros(1)})["batch"].item() == 2**53 + 1


def test_a_cursor_of_other_sources_is_refused() -> None:
    message = "batch.cursor: missing text.epoch, extra code.row; both trees must have the same paths"
    batch = {"cursor": {"text": ints(row=1), "code": ints(row=1)}}
    assert refusal(cursor.update, {"text": ints(epoch=0, row=0)}, batch) == message


def test_a_cursor_that_is_not_int64_is_refused() -> None:
    given = {"a": torch.tensor(1.0), "b": torch.tensor(1), "c": torch.tensor(True)}
    message = "cursor: leaves are ['torch.bool', 'torch.float32', 'torch.int64'], must all be torch.int64; convert them"
    assert refusal(cursor.init, given) == message
