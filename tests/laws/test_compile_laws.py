"""Compiled steps: the eager step's bits where the arithmetic is the same, one compilation for all values, donation unseen.

`aot_eager` traces the whole step, gradients included, and runs the same operations: its bits are the eager ones. Inductor
fuses operations, so that sums of a row are taken in another order and products are added without rounding in between: each
value differs by a few units of its last place, which Adam's division by the root of a small second moment can enlarge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lib.config import Batch, Guard, Model, Optim, Precision, Recipe, Scale, Schedule
from lib.optim import Now, Rule
from lib.run.compile import decide, faster
from lib.state import init_state
from lib.step import Step, eval_step, make_train_step, train_step
from lib.store import load, save
from lib.testing.strategies import lm_batch
from lib.testing.trees import from_bytes
from lib.tree import Tree, leaves, tensordict, tree_map
from tests.strategies import (
    bits,
    changed,
    form,
    given_gradients,
    gradients,
    largest_gap,
    memory,
    own,
    same_bits,
    tiny,
    with_leaves,
)

# The tracer meets warnings that it hides from whoever runs it, but not from pytest, for which they are errors before that.
pytestmark = pytest.mark.filterwarnings("ignore")

FULL = tiny(
    model=Model(width=8, depth=1, heads=2, kv_heads=1, inner=8, vocab=12, dropout=0.3),
    batch=Batch(rows=2, length=6),
    optim=Optim(lr=1e-2, average=0.9),
    schedule=Schedule(shape="cosine", warmup=2, length=5),
    scale=Scale(dynamic=True, initial=4.0, every=3),
    guard=Guard(window=4, sigma=2.0),
)


def by_tracing(step: Callable[..., Any]) -> Step:
    traced: Step = torch.compile(step, fullgraph=True, backend="aot_eager")
    return traced


@contextmanager
def no_other_compilation() -> Iterator[None]:
    """A compilation in here is an error; the first one of a function is before."""
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.fixture(scope="module")
def whole() -> Step:
    """`train_step` compiled once for all tests of this file that use FULL."""
    traced = by_tracing(train_step)
    traced(*states()["the first step"])
    return traced


@pytest.fixture
def traced_faster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Step]:
    """`faster` with the tracing backend in place of Inductor."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    return faster


def states() -> dict[str, tuple[TensorDict, TensorDict]]:
    """States and batches of one recipe that differ in every value a run can change."""
    start = init_state(FULL, seed=1)
    first, _ = train_step(start, lm_batch(FULL))
    broken = start.clone()
    broken["params", "norm"][0] = float("nan")
    far = changed(first, step=2**40, scheduler__position=10**9, cursor__text__epoch=7, cursor__text__row=2**50)
    return {
        "the first step": (start, lm_batch(FULL)),
        "another seed": (init_state(FULL, seed=2**40), lm_batch(FULL, 5)),
        "a later step": (first, lm_batch(FULL, 1, number=2)),
        "another learning rate": (changed(first, scheduler__lr=0.5), lm_batch(FULL, 1)),
        "another decay": (changed(first, scheduler__decay=0.0), lm_batch(FULL, 1)),
        "far beyond the end": (far, lm_batch(FULL, 2, number=10**6)),
        "a state from bytes": (from_bytes(first), lm_batch(FULL, 1)),
        "no targets": (first, lm_batch(FULL, 3, valid=0.0)),
        "a refused update": (broken, lm_batch(FULL)),
    }


# The same bits, one compilation ---------------------------------------------------------------------------------------


def test_a_traced_step_has_the_bits_of_the_eager_one_and_is_traced_once_for_all_values(whole: Step) -> None:
    for name, (state, batch) in states().items():
        before = bits(state), bits(batch)
        with no_other_compilation():
            new, metrics = whole(state, batch)
        wanted, told = train_step(state, batch)
        assert same_bits(new, wanted), name
        assert same_bits(metrics, told), name
        assert new["recipe"] == FULL
        assert (bits(state), bits(batch)) == before, name
        assert not {*memory(new), *memory(metrics)} & {*memory(state), *memory(batch)}, name


def test_a_state_that_has_been_on_disk_needs_no_other_compilation(whole: Step, tmp_path: Path) -> None:
    state, _ = states()["a later step"]
    save(tmp_path / "c", state)
    again, batch = load(tmp_path / "c"), lm_batch(FULL, number=2)
    with no_other_compilation():
        assert same_bits(whole(again, batch)[0], whole(state, batch)[0])


def test_evaluation_is_compiled_too() -> None:
    traced = by_tracing(eval_step)
    pairs = list(states().values())[:3]
    traced(*pairs[0])
    with no_other_compilation():
        for state, batch in pairs:
            assert same_bits(traced(state, batch), eval_step(state, batch))


# Steps of one's own ---------------------------------------------------------------------------------------------------


def descend(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
    moved = tree_map(lambda p, g: (p - now.lr * g).to(torch.float32), params, grads)
    return grads, moved, {"count": slot["count"] + 1}


def fit(call: Any, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
    error = call(batch["x"])[..., 0] - batch["y"]
    return error.square().sum(), torch.tensor(error.numel())


def test_a_step_of_ones_own_module_and_rule_is_one_graph_with_the_eager_bits() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    rule = Rule(init=lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update=descend)
    step = make_train_step(fit, module, rule=rule)
    traced, state = by_tracing(step), init_state(own(clip=0.5), params=module, rule=rule)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        batch = tensordict({"x": torch.randn(2, 5, 3, generator=draw), "y": torch.randn(2, 5, generator=draw)})
        new, metrics = traced(state, batch)
        state, told = step(state, batch)
        assert same_bits(new, state)
        assert same_bits(metrics, told)


def test_the_rates_of_a_schedule_are_right_in_one_graph_and_a_short_batch_is_one_more() -> None:
    step = make_train_step(given_gradients)
    recipe = own(lr=1.0, schedule=Schedule(shape="cosine", warmup=4, length=12, floor=0.1))
    traced, state = by_tracing(step), init_state(recipe, params={"w": torch.tensor(1.0)})
    traced(state, gradients({"w": 1.0}, {"w": 1.0}))
    rates = []
    with no_other_compilation():
        for n in range(13):
            batch = gradients(*({"w": 1.0 + n},) * 2)
            new, metrics = traced(state, batch)
            state, _ = step(state, batch)
            assert same_bits(new, state)
            rates.append(metrics["lr"].item())
    wanted = [0.25, 0.5, 0.75, 1, 0.965746, 0.868198, 0.722208, 0.55, 0.377792, 0.231802, 0.134254, 0.1, 0.1]
    assert rates == pytest.approx(wanted, abs=1e-6)
    short = gradients({"w": 3.0})
    assert same_bits(traced(state, short)[0], step(state, short)[0])


# Donation -------------------------------------------------------------------------------------------------------------


def own_state() -> TensorDict:
    params = {"w": torch.tensor([1.0, -2.0]), "v": torch.ones(2, 2)}
    return init_state(own(average=0.5, guard=Guard(window=4), decay=0.1), params=params)


def own_batches() -> list[TensorDict]:
    values = (1.0, 2.0, float("nan"), -1.0)
    return [gradients({"w": [x, 1.0], "v": torch.full((2, 2), x)}) for x in values]


def test_a_donated_step_has_the_bits_of_one_that_is_not(traced_faster: Callable[..., Step]) -> None:
    step = make_train_step(given_gradients)
    donated, kept = traced_faster(step, compile=True), traced_faster(step, compile=True, donate=False)
    given, eager, left = own_state(), own_state(), own_state()
    for batch in own_batches():
        places, before = memory(given), (bits(left), bits(batch))
        given, metrics = donated(given, batch)
        assert memory(given) == places  # the new state lies where the old one lay
        assert not set(memory(metrics)) & {*memory(given), *memory(batch)}
        new, told = kept(left, batch)
        assert (bits(left), bits(batch)) == before
        assert not set(memory(new, told)) & {*memory(left), *memory(batch)}
        left = new
        eager, wanted = step(eager, batch)
        assert same_bits(given, eager)
        assert same_bits(left, eager)
        assert same_bits(metrics, wanted)
        assert same_bits(told, wanted)
        assert given["recipe"] == eager["recipe"]


def test_not_compiling_is_the_step_itself() -> None:
    assert faster(train_step, compile=False) is train_step
    assert faster(train_step, compile=False, donate=True) is train_step


def test_a_fast_step_serves_more_recipes_and_shapes_than_the_tracer_keeps_of_one_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    step = make_train_step(given_gradients)
    fast = faster(step, compile=True, donate=False)
    for n in range(1, 10):
        state = init_state(own(lr=n / 10), params={"w": torch.tensor(1.0)})
        batch = gradients(*({"w": 2.0},) * (2 if n == 9 else 1))
        assert same_bits(fast(state, batch)[0], step(state, batch)[0])
    state = init_state(own(lr=0.5), params={"w": torch.tensor(1.0)})
    for n in range(1, 13):  # as updates that grow have it
        batch = gradients(*({"w": 2.0},) * n)
        assert same_bits(fast(state, batch)[0], step(state, batch)[0])


def test_a_run_of_many_shapes_is_compiled_only_if_it_earns_all_of_them_back() -> None:
    def compiled(steps: int, **batch: Any) -> bool:
        return decide(Recipe(batch=Batch(**batch)), steps)

    grown = {"rows_at": ("9:32", "99:48")}
    assert [compiled(1000), compiled(1000, **grown), compiled(3000, **grown)] == [True, False, True]
    assert [compiled(1000, mode="pad"), compiled(1000, mode="pad", buckets=(256,))] == [False, True]


# Inductor -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fast() -> Step:
    """The step as the driver runs it; a minute or so where `.cache/inductor` is empty."""
    return faster(train_step, compile=True)


def close(compiled: Step, recipe: Recipe, tolerance: float, updates: int = 3) -> TensorDict:
    """Run both, each from its own last state, and hold them together at every update."""
    mine, theirs = init_state(recipe, seed=1), init_state(recipe, seed=1)
    for n in range(updates):
        batch = lm_batch(recipe, n, number=n + 1)
        mine, told = compiled(mine.clone(), batch)
        theirs, wanted = train_step(theirs, batch)
        assert form(mine) == form(theirs)
        assert form(told) == form(wanted)
        for name in ("step", "tokens", "bytes", "skipped", "refused", "scale"):
            assert torch.equal(told[name], wanted[name]), name
        for name in ("loss_nats", "grad_norm", "lr", "bpb"):
            assert told[name].item() == pytest.approx(wanted[name].item(), rel=tolerance), name
        # per update no weight moves by more than lr, whatever its gradient
        for slot in ("params", "average"):
            assert slot not in mine or largest_gap(mine[slot], theirs[slot]) < 20 * tolerance, slot
        assert largest_gap(mine["optimizer", "adam", "first"], theirs["optimizer", "adam", "first"]) < tolerance
        assert same_bits(mine["cursor"], theirs["cursor"])
    return mine


def test_the_step_compiled_by_inductor_is_close_to_the_eager_one(fast: Step) -> None:
    close(fast, FULL, 2e-5)


def test_the_step_compiled_by_inductor_has_the_same_bits_each_time_and_is_compiled_once(fast: Step) -> None:
    fast(init_state(FULL), lm_batch(FULL))
    with no_other_compilation():
        for name, (state, batch) in states().items():
            one, told = fast(state.clone(), batch)
            two, told_too = fast(state.clone(), batch)
            assert same_bits(one, two), name
            assert same_bits(told, told_too), name


def test_what_is_refused_keeps_its_bits_by_inductor_too(fast: Step) -> None:
    state, batch = states()["a refused update"]
    new, metrics = fast(state.clone(), batch)
    assert metrics["refused"].item()
    for slot in ("params", "optimizer", "average", "window", "key"):
        assert bits({"x": new[slot]}) == bits({"x": state[slot]}), slot
    assert same_bits(new["cursor"], batch["cursor"])
    state, batch = states()["no targets"]
    new, metrics = fast(state.clone(), batch)
    for slot in ("params", "optimizer", "average", "window", "scale", "key"):
        assert bits({"x": new[slot]}) == bits({"x": state[slot]}), slot


def test_masked_targets_have_no_effect_by_inductor(fast: Step) -> None:
    state, batch = init_state(FULL), lm_batch(FULL)
    other = with_leaves(batch, targets=torch.where(batch["mask"], batch["targets"], 5))
    assert same_bits(fast(state.clone(), batch)[0], fast(state.clone(), other)[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("donate", [True, False])
def test_a_larger_step_is_close_with_and_without_donation(donate: bool) -> None:
    model = Model(width=32, depth=2, heads=4, kv_heads=2, inner=48, vocab=260, dropout=0.1)
    recipe = tiny(model=model, batch=Batch(rows=4, length=64, micro=2), optim=Optim(average=0.9), guard=Guard(window=4))
    step = faster(train_step, compile=True, donate=donate)
    assert close(step, recipe, 2e-5)["step"].item() == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layers", ["unroll", "scan"])
def test_several_micro_batches_and_layers_are_traced_with_the_eager_bits(layers: Any) -> None:
    model = Model(width=8, depth=3, heads=2, kv_heads=1, inner=8, vocab=12, dropout=0.3, layers=layers)
    recipe = tiny(model=model, batch=Batch(rows=4, length=6, micro=2), optim=Optim(average=0.9), guard=Guard(window=4))
    traced, state = by_tracing(train_step), init_state(recipe)
    for n in range(2):
        batch = lm_batch(recipe, n, number=n + 1)
        new, metrics = traced(state, batch)
        state, told = train_step(state, batch)
        assert same_bits(new, state)
        assert same_bits(metrics, told)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_step_may_be_compiled_whole_without_the_driver() -> None:
    compiled = torch.compile(train_step, fullgraph=True)
    state = close(compiled, FULL, 2e-5)
    with no_other_compilation():
        compiled(changed(state, scheduler__lr=0.5), lm_batch(FULL, 9))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("compute", "layers", "tolerance"), [("bf16", "unroll", 0.03), ("fp32", "scan", 2e-5)])
def test_other_dtypes_and_layers_by_scan_are_close_too(compute: Any, layers: Any, tolerance: float) -> None:
    model = Model(width=32, depth=3, heads=4, inner=48, vocab=260, dropout=0.1, layers=layers)
    recipe = tiny(model=model, batch=Batch(rows=2, length=32), precision=Precision(compute=compute))
    close(faster(train_step, compile=True), recipe, tolerance)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_module_of_ones_own_is_close_by_inductor() -> None:
    module = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1))
    step = make_train_step(fit, module)
    compiled = faster(step, compile=True, donate=False)
    mine = theirs = init_state(own(clip=1.0, lr=1e-2), params=module)
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        batch = tensordict({"x": torch.randn(2, 16, 3, generator=draw), "y": torch.randn(2, 16, generator=draw)})
        mine, told = compiled(mine, batch)
        theirs, wanted = step(theirs, batch)
        assert told["loss_nats"].item() == pytest.approx(wanted["loss_nats"].item(), rel=1e-5)
    assert largest_gap(mine["params"], theirs["params"]) < 1e-4
    assert list(leaves(mine)) == list(leaves(theirs))
