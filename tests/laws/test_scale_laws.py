"""The loss scale: it changes no result, and its trace is that of a plain counter, from any point on."""

from __future__ import annotations

import math

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from lib.config import Guard, Model, Optim, Precision, Recipe, Scale
from lib.state import init_state
from lib.step import make_train_step, train_step
from lib.testing.strategies import lm_batch
from lib.testing.trees import from_bytes
from tests.strategies import FEW, PLAIN, SEEN, bits, given_gradients, gradients, own, run, same_bits, tiny

POWERS = st.integers(-14, 20).map(lambda n: 2.0**n)


def without_scale(tree: TensorDict) -> dict[str, object]:
    return {path: value for path, value in bits(tree).items() if path not in ("scale", "scale.scale")}


def trained(recipe: Recipe, scale: float, updates: int) -> tuple[TensorDict, list[TensorDict]]:
    fixed = msgspec.structs.replace(recipe, scale=Scale(dynamic=False, initial=scale))
    return run(train_step, init_state(fixed), [lm_batch(fixed, n) for n in range(updates)])


def test_five_updates_have_the_same_bits_at_every_power_of_two() -> None:
    recipe = tiny(optim=Optim(lr=1e-2, average=0.9), guard=Guard(window=4))
    one, told = trained(recipe, 1.0, 5)
    for scale in (2.0**10, 2.0**16, 2.0**-10):
        other, told_too = trained(recipe, scale, 5)
        assert without_scale(other) == without_scale(one)
        assert [without_scale(row) for row in told_too] == [without_scale(row) for row in told]
        assert {row["scale"].item() for row in told_too} == {scale}


@FEW
@given(
    scale=POWERS,
    seed=st.integers(0, 2**32),
    compute=st.sampled_from(["fp32", "bf16"]),
    dropout=st.sampled_from([0.0, 0.5]),
)
def test_a_power_of_two_changes_no_bit_of_an_update(scale: float, seed: int, compute: str, dropout: float) -> None:
    model = Model(width=8, depth=1, heads=2, inner=8, vocab=12, dropout=dropout)
    recipe = tiny(model=model, precision=Precision(compute=compute))  # type: ignore[arg-type]
    results = []
    for value in (1.0, scale):
        fixed = msgspec.structs.replace(recipe, scale=Scale(dynamic=False, initial=value))
        new, metrics = train_step(init_state(fixed), lm_batch(fixed, seed))
        results.append((without_scale(new), without_scale(metrics)))
    assert results[0] == results[1]


@given(scale=POWERS, values=st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=4))
def test_dividing_undoes_scaling(scale: float, values: list[float]) -> None:
    """Where neither end of fp32 is met, gradients come back with the bits that they would have had without a scale."""
    step, results = make_train_step(given_gradients, rule=SEEN), []
    kept = [value if abs(value) > 2.0**-60 else 0.0 for value in values]
    for initial in (1.0, scale):
        state = init_state(own(scale=Scale(initial=initial)), params={"w": torch.ones(len(kept))}, rule=SEEN)
        new, metrics = step(state, gradients({"w": kept}, counts=(3,)))
        results.append((bits(new["optimizer"]), metrics["loss_nats"].item(), metrics["grad_norm"].item()))
    assert results[0] == results[1]


@given(
    outcomes=st.lists(st.booleans(), max_size=20),
    every=st.integers(1, 4),
    growth=st.sampled_from([2.0, 4.0]),
    backoff=st.sampled_from([0.5, 0.25]),
    start=st.integers(0, 4).map(lambda n: 2.0**n),
)
def test_the_scale_follows_a_plain_counter(
    outcomes: list[bool], every: int, growth: float, backoff: float, start: float
) -> None:
    choice = Scale(dynamic=True, initial=start, every=every, growth=growth, backoff=backoff, lowest=1.0, highest=64.0)
    state = init_state(own(scale=choice), params={"w": torch.tensor(1.0)})
    scale, good, bad, skipped = start, 0, 0, 0
    for ok in outcomes:
        state, metrics = PLAIN(from_bytes(state), gradients({"w": 1e-3 if ok else math.inf}))
        assert metrics["scale"].item() == scale
        if ok:
            good, bad = good + 1, 0
            if good == every:
                scale, good = min(scale * growth, 64.0), 0
        else:
            scale, good, bad, skipped = max(scale * backoff, 1.0), 0, bad + 1, skipped + 1
        slot = state["scale"]
        assert (slot["scale"].item(), slot["good"].item()) == (scale, good)
        assert (slot["bad"].item(), slot["skipped"].item()) == (bad, skipped)
        assert math.frexp(scale)[0] == 0.5


def test_the_worked_trace_goes_on_from_every_attempt() -> None:
    outcomes = [True, True, False, True, True, True, True]
    wanted = [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1)]
    recipe = own(scale=Scale(dynamic=True, initial=8.0, every=3))
    batches = [gradients({"w": 1.0 if ok else math.nan}) for ok in outcomes]
    start = init_state(recipe, params={"w": torch.tensor(1.0)})
    whole, _ = run(PLAIN, start, batches)
    for stop in range(8):
        state, trace = run(PLAIN, start, batches[:stop])[0], []
        state = from_bytes(state)
        for batch in batches[stop:]:
            state, _ = PLAIN(state, batch)
            trace.append((state["scale", "scale"].item(), state["scale", "good"].item()))
        assert trace == wanted[stop:]
        assert same_bits(state, whole)
