"""`loss.*` in a recipe: what is descended changes, what is reported does not; the head by chunks; its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from lib.config import Loss, Model, Optim, Precision, Recipe, Scale
from lib.loss import penalised
from lib.state import init_state
from lib.step import eval_step, train_step
from lib.testing.strategies import lm_batch
from tests.strategies import largest_gap, same_bits, tiny

ROOT = Path(__file__).parent.parent.parent
MODEL = Model(width=8, depth=1, heads=2, inner=8, vocab=12, tied=False, dropout=0.2)


def recipe(**choice: object) -> Recipe:
    return tiny(model=MODEL, loss=Loss(**choice))  # type: ignore[arg-type]


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothing_is_torchs(smoothing: float) -> None:
    logits, targets = torch.randn(2, 3, 7), torch.tensor([[0, 1, 2], [3, 4, 6]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    found, _, _ = penalised(logits, targets, mask, smoothing=smoothing)
    wanted = F.cross_entropy(logits[mask], targets[mask], label_smoothing=smoothing, reduction="sum")
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_penalties_change_the_update_and_not_the_report() -> None:
    plain, batch = recipe(), lm_batch(recipe())
    states = {name: init_state(choice, seed=1) for name, choice in
              (("plain", plain), ("z", recipe(z=0.1)), ("smooth", recipe(smoothing=0.2)))}  # fmt: skip
    found = {name: train_step(state, batch) for name, state in states.items()}
    for name in ("z", "smooth"):
        assert found[name][1]["loss_nats"].item() == pytest.approx(found["plain"][1]["loss_nats"].item(), rel=1e-6)
        assert found[name][1]["bpb"].item() == pytest.approx(found["plain"][1]["bpb"].item(), rel=1e-6)
        assert largest_gap(found[name][0]["params"], found["plain"][0]["params"]) > 1e-4
        assert same_bits(eval_step(states[name], batch), eval_step(states["plain"], batch))


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_a_head_by_chunks_trains_like_the_head_at_once(compute: Any) -> None:
    # By SGD, so that parameters differ as gradients do; Adam's first steps are as large as the rate whatever these are.
    whole = tiny(
        model=MODEL,
        optim=Optim(rule="sgd", lr=0.3, decay=0.0),
        loss=Loss(z=1e-3, smoothing=0.1),
        precision=Precision(compute=compute),
        scale=Scale(initial=256.0),
    )
    chunked = msgspec.structs.replace(whole, loss=msgspec.structs.replace(whole.loss, chunk=5))
    begun = init_state(whole, seed=1)
    one, two = begun, init_state(chunked, seed=1)
    for number in range(3):
        batch = lm_batch(whole, seed=number)
        one, told = train_step(one, batch)
        two, also = train_step(two, batch)
        assert also["loss_nats"].item() == pytest.approx(
            told["loss_nats"].item(), rel=1e-6 if compute == "fp32" else 1e-2
        )
    assert two["scale", "skipped"].item() == one["scale", "skipped"].item() == 0
    moved = largest_gap(one["params"], begun["params"])
    assert moved > 0.1
    assert largest_gap(one["params"], two["params"]) < (1e-5 if compute == "fp32" else 2e-2) * moved
    assert eval_step(two, batch)["loss_nats"].item() == pytest.approx(
        eval_step(one, batch)["loss_nats"].item(), rel=1e-3
    )


@pytest.mark.filterwarnings("ignore")  # the tracer meets warnings that it hides from whoever runs it
def test_a_head_by_chunks_is_one_graph_with_the_eager_bits() -> None:
    choice = recipe(chunk=5, z=1e-3)
    state, batch = init_state(choice, seed=1), lm_batch(choice)
    torch._dynamo.reset()
    traced = torch.compile(train_step, fullgraph=True, backend="aot_eager")
    assert same_bits(traced(state, batch)[0], train_step(state, batch)[0])


PEAK = """
import sys, torch
from lib.loss import by_chunks, penalised
hidden = torch.randn(1, 4096, 32, requires_grad=True)
weight = torch.randn(131072, 32, requires_grad=True)
targets, mask = torch.randint(131072, (1, 4096)), torch.ones(1, 4096, dtype=torch.bool)
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
before = peak()
if sys.argv[1] == "chunks":
    descended, _, _ = by_chunks(hidden, weight, targets, mask, 256)
else:
    descended, _, _ = penalised(hidden @ weight.T, targets, mask)
torch.autograd.grad(descended, (hidden, weight))
print((peak() - before) / 1e6)
"""


@pytest.mark.slow
def test_a_head_by_chunks_takes_at_most_a_quarter_of_the_memory() -> None:
    def gigabytes(way: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", PEAK, way], cwd=ROOT, capture_output=True, text=True, timeout=280, check=True
        )
        return float(done.stdout)

    whole, chunks = gigabytes("whole"), gigabytes("chunks")
    assert whole > 4.0  # scores of 2.1 GB and their gradient
    assert chunks <= 0.25 * whole, (chunks, whole)
