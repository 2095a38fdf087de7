"""The average of the parameters: worked examples, windows against a plain list, and that it stays apart from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lib.config import Optim
from lib.state import average, init_state
from lib.testing.trees import from_bytes
from lib.tree import Tree
from tests.strategies import PLAIN, gradients, memory, own, refusal, same_bits

EVERY_5 = Optim(average="uniform", average_last=3, average_every=5)
AT_4_AND_9 = Optim(average="uniform", average_last=2, average_at=(4, 9))


def followed(
    optim: Optim, values: Sequence[float], slot: Tree | None = None, begun: int = 0
) -> tuple[list[float], Tree]:
    """The average after each update, whose parameter is the value."""
    slot = average.init({"w": torch.tensor(1.0)}, optim) if slot is None else slot
    found = []
    for number, value in enumerate(values, begun + 1):
        slot = average.update(slot, {"w": torch.tensor(value)}, optim, torch.tensor(number))
        found.append(slot["params"]["w"].item())
    return found, slot


def test_a_decay_is_of_what_came_and_not_of_where_it_began() -> None:
    # 0.081 * 2 + 0.09 * 3 + 0.1 * 4 = 0.832, over 0.271 = 1 - 0.9^3
    assert followed(Optim(average=0.9), [2.0, 3.0, 4.0])[0] == pytest.approx([2.0, 0.48 / 0.19, 0.832 / 0.271])


def test_uniform_is_the_mean() -> None:
    assert followed(Optim(average="uniform"), [2.0, 4.0, 0.0, 6.0])[0] == pytest.approx([2.0, 3.0, 2.0, 3.0])


def test_decay_0_is_the_parameters_themselves() -> None:
    params, optim = {"a": torch.tensor([0.1, -0.0, 3e38]), "b": torch.tensor(1e-40)}, Optim(average=0.0)
    slot = average.init({"a": torch.ones(3), "b": torch.ones(())}, optim)
    for number in (1, 2):
        slot = average.update(slot, params, optim, torch.tensor(number))
        assert torch.equal(slot["params"]["a"], params["a"])
        assert torch.equal(slot["params"]["b"], params["b"])


@pytest.mark.parametrize("kind", [0.0, 0.9, 0.999, "uniform"])
def test_constant_parameters_are_their_own_average_to_the_last_bit(kind: Any) -> None:
    params, optim = {"w": torch.tensor([0.1, 7.0, -1e-3, 1e30])}, Optim(average=kind)
    slot = average.init(params, optim)
    for number in range(1, 51):
        slot = average.update(slot, params, optim, torch.tensor(number))
    assert same_bits(slot["params"], params)
    assert slot["count"].item() == 50
    assert not set(memory(slot)) & set(memory(params))


def test_a_window_is_the_mean_of_its_updates_and_is_kept_until_the_next_begins() -> None:
    values = [float(n * n) for n in range(1, 15)]
    # Windows are updates 3-5, 8-10, 13-15. Before the first one the average is where the parameters are.
    want = [1, 4, 9, 12.5, 50 / 3, 50 / 3, 50 / 3, 64, 72.5, 245 / 3, 245 / 3, 245 / 3, 169, 182.5]
    assert followed(EVERY_5, values)[0] == pytest.approx(want)


def test_windows_may_end_where_one_likes() -> None:
    values = [float(n) for n in range(1, 12)]
    assert followed(AT_4_AND_9, values)[0] == pytest.approx([1, 2, 3, 3.5, 3.5, 3.5, 3.5, 8, 8.5, 8.5, 8.5])


@pytest.mark.parametrize(
    "optim", [EVERY_5, AT_4_AND_9, Optim(average=0.9), Optim(average=0.5, average_last=3, average_every=4)]
)
def test_cut_anywhere_the_average_goes_on_with_the_same_bits(optim: Optim) -> None:
    values = [0.1 * n * n for n in range(1, 15)]
    whole, last = followed(optim, values)
    for cut in range(len(values)):
        first, slot = followed(optim, values[:cut])
        rest, end = followed(optim, values[cut:], slot, cut)
        assert first + rest == whole
        assert same_bits(end, last)


def test_a_window_whose_first_update_is_refused_begins_with_the_next() -> None:
    state = init_state(own(average="uniform", average_last=2, average_every=3, rule="sgd", momentum=0.0, beta2=0.95), params={"w":
        torch.tensor(0.0)})  # fmt: skip
    found = []
    for number in range(1, 7):
        state, report = PLAIN(from_bytes(state), gradients({"w": float("nan") if number in (2, 5) else -10.0}))
        assert bool(report["refused"]) == (number in (2, 5))
        found.append(state["average", "params", "w"].item())
    # The parameter is 1 1 2 3 3 4; windows are updates 2-3 and 5-6, of which the first is refused each time.
    assert found == pytest.approx([1, 1, 2, 2, 2, 4])


def test_a_resumed_run_keeps_the_average_apart_from_the_weights() -> None:
    state = init_state(own(average=0.9, lr=1.0, beta1=0.0, beta2=0.0), params={"w": torch.tensor(1.0)})
    for _ in range(3):
        state, _ = PLAIN(from_bytes(state), gradients({"w": -1.0}))  # Adam without memory: lr * sign(g)
    assert abs(state["params", "w"].item() - 4.0) < 1e-6
    assert abs(state["average", "params", "w"].item() - 0.832 / 0.271) < 1e-6


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"average_last": 3}, "optim.average_last=3 must go with optim.average; set both or neither"),
        ({"average": 0.9, "average_last": 3}, "optim.average_last=3 must go with an end, "),
        ({"average": 0.9, "average_every": 3}, "optim.average_last=none must go with an end, "),
        (
            {"average": 0.9, "average_last": 3, "average_every": 2},
            "optim.average_last=3 must be at most optim.average_every=2, windows must not overlap; lower it",
        ),
        (
            {"average": 0.9, "average_last": 3, "average_every": 5, "average_at": (4,)},
            "optim.average_every=5 must not go with optim.average_at=[4], windows must not overlap; drop one",
        ),
        (
            {"average": "uniform", "average_last": 3, "average_at": (4, 6)},
            "optim.average_at=6 must be at least optim.average_last=3 after 4, windows must not overlap; change one",
        ),
        (
            {"average": "uniform", "average_last": 3, "average_at": (2,)},
            "optim.average_at=2 must be at least optim.average_last=3 after 0, windows must not overlap; change one",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(settings: Any, told: str) -> None:
    assert refusal(lambda: Optim(**settings)).startswith(told)
