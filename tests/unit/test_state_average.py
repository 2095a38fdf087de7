"""The average of the parameters: a worked example, and that it stays apart from them."""

from __future__ import annotations

import torch

from lib.state import average, init_state
from tests.strategies import PLAIN, gradients, memory, own, rebuilt


def test_the_average_of_1_2_3_4_is_1_561() -> None:
    slot = average.init({"w": torch.tensor(1.0)})
    for raw in (2.0, 3.0, 4.0):
        slot = average.update(slot, {"w": torch.tensor(raw)}, 0.9)
    assert abs(slot["w"].item() - 1.561) < 1e-6


def test_a_resumed_run_keeps_the_average_apart_from_the_weights() -> None:
    # raw weights 1 2 3 4: the rule adds one, the average starts at 1
    state = init_state(own(average=0.9, lr=1.0, beta1=0.0, beta2=0.0), params={"w": torch.tensor(1.0)})
    for _ in range(3):
        state, _ = PLAIN(rebuilt(state), gradients({"w": -1.0}))  # Adam without memory: lr * sign(g)
    assert abs(state["params", "w"].item() - 4.0) < 1e-6
    assert abs(state["average", "w"].item() - 1.561) < 1e-6


def test_decay_0_is_the_parameters_themselves() -> None:
    params = {"a": torch.tensor([0.1, -0.0, 3e38]), "b": torch.tensor(1e-40)}
    slot = average.update({"a": torch.ones(3), "b": torch.ones(())}, params, 0.0)
    assert torch.equal(slot["a"], params["a"])
    assert torch.equal(slot["b"], params["b"])


def test_constant_parameters_are_their_own_average() -> None:
    params = {"w": torch.tensor([0.1, 7.0, -1e-3])}
    slot = average.init(params)
    for _ in range(50):
        slot = average.update(slot, params, 0.99)
    assert torch.allclose(slot["w"], params["w"], rtol=1e-5)
    assert not set(memory(slot)) & set(memory(params))
