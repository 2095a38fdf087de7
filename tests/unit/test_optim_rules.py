"""Rules in the step: those a recipe names, its groups, constants as leaves, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lib.config import Model, Optim, Recipe, Schedule
from lib.optim import (
    Rule,
    adam,
    adamw,
    chain,
    clip_norm,
    clip_value,
    decay,
    descend,
    free,
    freeze,
    hyper,
    lion,
    mask,
    momentum,
    muon,
    orthogonalize,
    partition,
    rule_of,
    scale_by_adam,
    scaled,
    sgd,
)
from lib.recipe import groups_of
from lib.state import abstract_state, init_state
from lib.step import make_train_step, train_step
from lib.store import load, save
from lib.testing.strategies import lm_batch
from lib.testing.trees import from_bytes
from lib.tree import Tree, leaves
from tests.strategies import PLAIN, given_gradients, gradients, now, own, refusal, run, same_bits, tiny

CHOICES: dict[str, dict[str, Any]] = {
    "adamw": {"no_decay": ("*.norm", "embed.*")},
    "adamw in bf16": {"moments": "bf16"},
    "sgd": {"rule": "sgd", "lr": 0.05},
    "sgd without momentum": {"rule": "sgd", "momentum": 0.0, "lr": 0.5},
    "sgd with nesterov": {"rule": "sgd", "nesterov": True, "lr": 0.05},
    "lion": {"rule": "lion", "lr": 1e-3},
    "adafactor": {"rule": "adafactor", "lr": 1e-2},
    "muon": {"rule": "muon"},
    "schedule free": {"rule": "schedule_free", "lr": 1e-2},
    "groups": {"groups": ("embed.*:lr=0.1,decay=0", "blocks.attention.w[qk]:freeze", "norm:decay=2")},
}
TRACED = {
    "adamw",
    "adamw in bf16",
    "adafactor",
    "muon",
    "schedule free",
    "groups",
}  # the others are made of the same parts


def recipe_of(**settings: Any) -> Recipe:
    return tiny(model=Model(width=8, depth=1, heads=2, inner=8, vocab=12), optim=Optim(**settings))


@pytest.mark.filterwarnings("ignore")  # the tracer meets warnings that it hides from whoever runs it
@pytest.mark.parametrize("choice", CHOICES)
def test_a_recipes_rule_learns_is_one_graph_and_comes_back_from_disk(choice: str, tmp_path: Any) -> None:
    recipe = recipe_of(**CHOICES[choice])
    state = init_state(recipe, seed=1)
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in leaves(abstract_state(recipe)).items()} == {
        path: (leaf.shape, leaf.dtype) for path, leaf in leaves(state).items()
    }
    losses = []
    for _ in range(6):
        state, metrics = train_step(state, lm_batch(recipe))
        losses.append(metrics["loss_nats"].item())
    assert losses[-1] < losses[0] - 0.02
    save(tmp_path / "state", state)
    again = load(tmp_path / "state")
    assert same_bits(again, state)
    wanted, _ = train_step(again, lm_batch(recipe))
    assert same_bits(wanted, train_step(state, lm_batch(recipe))[0])
    if choice in TRACED:
        torch._dynamo.reset()
        assert same_bits(torch.compile(train_step, fullgraph=True, backend="eager")(state, lm_batch(recipe))[0], wanted)


# Groups ---------------------------------------------------------------------------------------------------------------

UNUSED: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
FX = Schedule(shape="cosine", warmup=4, length=12, floor=0.1)


def test_groups_have_their_own_rate_and_decay_after_a_resume_too() -> None:
    params = {"one": torch.tensor(1.0), "other": torch.tensor(1.0)}
    settings: dict[str, Any] = {"rule": "sgd", "momentum": 0.0, "lr": 1.0, "decay": 0.1, "no_decay": ()}
    recipe = own(**UNUSED, **settings, groups=("other:lr=0.1,decay=0",), schedule=FX)
    state = init_state(recipe, params=params)
    state, _ = run(PLAIN, state, [gradients({"one": 0.0, "other": 0.0})] * 6)
    state = from_bytes(state)
    before = {path: leaf.item() for path, leaf in leaves(state["params"]).items()}
    state, _ = PLAIN(state, gradients({"one": 1.0, "other": 1.0}))
    rate = 0.722208
    assert state["params", "one"].item() == pytest.approx(before["one"] * (1 - rate * 0.1) - rate, abs=1e-6)
    assert state["params", "other"].item() == pytest.approx(1.0 - rate * 0.1, abs=1e-6)


def test_what_is_frozen_keeps_its_bits_has_no_moments_and_is_no_part_of_the_norm() -> None:
    params = {"a": torch.tensor([1.0, -0.0]), "b": torch.tensor([2.0, 3.0])}
    state = init_state(own(groups=("a:freeze",), decay=0.5, no_decay=()), params=params)
    assert [path for path in leaves(state["optimizer"]) if path.endswith(".a")] == []
    new, metrics = PLAIN(state, gradients({"a": [300.0, -300.0], "b": [3.0, 4.0]}))
    assert same_bits({"a": new["params", "a"]}, {"a": params["a"]})
    assert metrics["grad_norm"].item() == 5.0
    assert (new["params", "b"] < params["b"]).all()


def test_nothing_is_computed_for_what_is_frozen() -> None:
    asked: list[bool] = []

    def seen(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, int]:
        asked.append(params["a"].requires_grad)
        return (params["a"] * params["b"]).sum(), 1

    state = init_state(own(groups=("a:freeze",)), params={"a": torch.ones(2), "b": torch.ones(2)})
    new, _ = make_train_step(seen)(state, gradients({"a": [0.0, 0.0], "b": [0.0, 0.0]}))
    assert asked == [False]
    assert not torch.equal(new["params", "b"], state["params", "b"])


def test_groups_are_read_as_they_are_written() -> None:
    texts = ("a.*:lr=0.5", "b:decay=0,lr=2", "c:d:freeze")
    assert [tuple(group) for group in groups_of(Optim(groups=texts))] == [
        ("a.*", 0.5, 1.0, False),
        ("b", 2.0, 0.0, False),
        ("c:d", 1.0, 1.0, True),
    ]


# Constants as leaves --------------------------------------------------------------------------------------------------


def test_constants_that_are_leaves_give_the_numbers_of_those_that_are_not_and_may_be_changed() -> None:
    params = {"w": torch.linspace(-1, 1, 7), "b": torch.tensor(0.5)}
    rule = chain(decay(), hyper(scale_by_adam, beta1=0.9, beta2=0.999, eps=1e-8), descend())
    plain, held = adamw(), rule.init(params)
    one, two, slot = params, params, plain.init(params)
    for n in range(5):
        grads = {"w": torch.cos(torch.arange(7.0) + n), "b": torch.tensor(float(n))}
        _, one, slot = plain.update(grads, one, slot, now(0.01, 0.1))
        _, two, held = rule.update(grads, two, held, now(0.01, 0.1))
    for path in params:
        # A constant is fp32 there and a double here that is rounded with the product: a unit in the last place each.
        assert torch.allclose(one[path], two[path], rtol=1e-6, atol=1e-7)
    assert held["adam"]["hyper"]["beta1"].dtype == torch.float64
    changed = {
        "adam": {**held["adam"], "hyper": {**held["adam"]["hyper"], "beta1": torch.tensor(0.0, dtype=torch.float64)}}
    }
    _, _, after = rule.update(params, params, changed, now(0.01))
    assert same_bits(after["adam"]["rule"]["first"], params)  # without memory the first moment is the gradient


@pytest.mark.filterwarnings("ignore")  # the tracer meets warnings that it hides from whoever runs it
def test_a_constant_that_changes_is_not_compiled_again() -> None:
    rule = chain(hyper(momentum, beta=0.5), descend())
    state = init_state(own(lr=1.0), params={"w": torch.tensor(1.0)}, rule=rule)
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(
        make_train_step(lambda p, b, k: (p["w"] * b["grads"]["w"], b["count"]), rule=rule), backend=backend
    )
    for beta in (0.5, 0.25, 0.0):
        state["optimizer", "momentum", "hyper", "beta"] = torch.tensor(beta, dtype=torch.float64)
        state, _ = step(state, gradients({"w": 1.0}))
    assert len(graphs) == 1


def test_moments_in_bf16_are_rounded_by_the_updates_own_draws() -> None:
    recipe = own(moments="bf16", beta1=0.9)
    state = init_state(recipe, params={"w": torch.ones(4096)})
    assert {leaf.dtype for leaf in leaves(state["optimizer", "adam", "first"]).values()} == {torch.bfloat16}
    batch = gradients({"w": torch.full((4096,), 0.1234567)})
    one, _ = PLAIN(state, batch)
    kept = one["optimizer", "adam", "first", "w"].float()
    assert len(kept.unique()) == 2
    assert kept.double().mean().item() == pytest.approx(0.01234567, rel=2e-3)
    assert same_bits(PLAIN(state, batch)[0], one)
    other = state.clone()
    other["step"] += 1
    assert not torch.equal(PLAIN(other, batch)[0]["optimizer", "adam", "first", "w"].float(), kept)


# Names, and what is refused -------------------------------------------------------------------------------------------


def test_slots_of_a_chain_are_named_by_its_links() -> None:
    nameless = Rule(lambda params: {"n": torch.zeros(())}, lambda grads, params, slot, now: (grads, params, slot))
    slot = chain(momentum(), nameless, momentum(), nameless, decay(), descend()).init({"w": torch.ones(1)})
    assert list(slot) == ["momentum", "rule", "momentum_2", "rule_2"]
    assert sgd().init({"w": torch.ones(1)}) == {}
    matrices = muon(matrices="w*").init({"w1": torch.ones(2, 2), "b": torch.ones(2)})
    assert list(leaves(matrices)) == [
        "matrices.momentum.buffer.w1",
        "others.count",
        "others.first.b",
        "others.second.b",
    ]


PARAMS = {"a": torch.ones(2, 2), "b": torch.ones(2)}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (mask("x", adam()), "pattern='x' must match a parameter, matches none of a, b; fix or drop the pattern"),
        (scaled(adam(), where=["a", "x"]), "pattern='x' must match a parameter, matches none of a, b"),
        (partition({"x": ("a", adam())}), "partition: b must be in a group; widen a pattern or give rest=freeze()"),
        (
            partition({"x": ("a", adam()), "y": ("*", adam())}, rest=freeze()),
            "partition: a is in 'x' and in 'y', must be in one group; narrow a pattern",
        ),
        (mask(lambda params: ["zz"], adam()), "where: 'zz' is no parameter, must be one of a, b; fix the function"),
        (mask([], adam()), "where: no patterns, must be at least one"),
        (orthogonalize(), "orthogonalize: b has shape [2], must be matrices; mask it out"),
    ],
)
def test_a_rule_that_does_not_fit_its_parameters_says_which(rule: Rule, message: str) -> None:
    def used() -> None:
        rule.update(PARAMS, PARAMS, rule.init(PARAMS), now(1.0))

    assert refusal(used).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": ("x:freeze",)}, "optim.groups='x' must match a parameter, matches none of a, b"),
        ({"groups": ("a:lr=2", "*:freeze")}, "optim.groups: a is in 'a' and in '*', must be in one group"),
        ({"groups": ("*:freeze",)}, "optim.groups=['*:freeze'] freezes all parameters, must leave one to train"),
        ({"rule": "muon", "matrices": ("x",)}, "optim.matrices='x' must match a parameter"),
        ({"rule": "muon", "matrices": ("b",)}, "optim.matrices: b has shape [2], must be matrices"),
    ],
)
def test_patterns_are_held_against_the_parameters_before_the_first_step(settings: Any, message: str) -> None:
    assert refusal(init_state, own(**{**UNUSED, **settings}), params=PARAMS).startswith(message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(moments="fp16"), "adam: moments='fp16' must be 'fp32' or 'bf16'"),
        (lambda: adamw(beta1=1.5), "adam: beta1=1.5 must be in [0, 1)"),
        (lambda: adamw(eps=0.0), "adam: eps=0.0 must be above 0"),
        (lambda: lion(beta2=-0.1), "lion: beta2=-0.1 must be in [0, 1)"),
        (lambda: free(0.0), "free: beta=0.0 must be above 0"),
        (lambda: free(1.0), "free: beta=1.0 must be in [0, 1)"),
        (lambda: momentum(1.0), "momentum: beta=1.0 must be in [0, 1)"),
        (lambda: clip_norm(-1.0), "clip_norm: limit=-1.0 must be above 0"),
        (lambda: clip_value(float("nan")), "clip_value: limit=nan must be above 0"),
        (lambda: scaled(adam(), lr=-1.0), "scaled: lr=-1.0 must be a factor from 0 to 1e6"),
        (lambda: scaled(adam(), decay=float("nan")), "scaled: decay=nan must be a factor from 0 to 1e6"),
        (lambda: hyper(adamw, moments="bf16"), "hyper: moments='bf16' must be a number"),
        (lambda: hyper(sgd, nesterov=True), "hyper: nesterov=True must be a number"),
    ],
)
def test_constants_out_of_range_are_refused(make: Any, message: str) -> None:
    assert refusal(make).startswith(message)


def test_a_constant_of_zero_that_is_a_leaf_has_what_any_other_has() -> None:
    rule = hyper(sgd, beta=0.0)
    slot = rule.init(PARAMS)
    _, _, after = rule.update(PARAMS, PARAMS, slot, now(0.1))
    assert sorted(leaves(after)) == sorted(leaves(slot))


@pytest.mark.filterwarnings("ignore")  # the tracer meets warnings that it hides from whoever runs it
def test_rates_that_are_leaves_compile() -> None:
    rule = hyper(lambda lr: scaled(adamw(), lr=lr), lr=0.5)
    state = init_state(own(lr=0.1, decay=0.1, no_decay=()), params=PARAMS, rule=rule)
    batch = gradients({"a": [[1.0, 2.0], [3.0, 4.0]], "b": [1.0, -1.0]})
    step = make_train_step(given_gradients, rule=rule)
    torch._dynamo.reset()
    assert same_bits(torch.compile(step, fullgraph=True, backend="eager")(state, batch)[0], step(state, batch)[0])
    plain = adamw(beta2=0.999)
    other = init_state(own(lr=0.05, decay=0.1, no_decay=()), params=PARAMS, rule=plain)
    wanted, _ = make_train_step(given_gradients, rule=plain)(other, batch)
    assert torch.allclose(step(state, batch)[0]["params", "a"], wanted["params", "a"], rtol=1e-6)


# Updates that would be no numbers ---------------------------------------------------------------------------------------


def test_a_rule_of_ones_own_that_makes_no_numbers_is_refused_and_leaves_no_trace() -> None:
    def burst(grads: Tree, params: Tree, slot: Tree, now: Any) -> tuple[Tree, Tree, Tree]:
        return grads, {"w": params["w"] * float("inf")}, slot

    rule = chain(momentum(), Rule(lambda params: {}, burst))
    state = init_state(own(), params={"w": torch.tensor([1.0, -0.0])}, rule=rule)
    new, metrics = make_train_step(given_gradients, rule=rule)(state, gradients({"w": [1.0, 1.0]}))
    assert metrics["refused"].item() == 1
    assert new["scale", "skipped"].item() == 1
    assert same_bits(new.select("params", "optimizer"), state.select("params", "optimizer"))


@pytest.mark.parametrize(
    ("leaf", "value"), [("lr", 1e300), ("lr", float("nan")), ("lr", -1e7), ("decay", float("inf"))]
)
def test_a_rate_that_no_step_survives_is_refused(leaf: str, value: float) -> None:
    state = init_state(own(), params={"w": torch.tensor([1.0, 2.0])})
    state["scheduler", leaf] = torch.tensor(value, dtype=torch.float64)
    new, metrics = PLAIN(state, gradients({"w": [1.0, 1.0]}))
    assert metrics["refused"].item() == 1
    assert same_bits(new.select("params", "optimizer"), state.select("params", "optimizer"))


def test_groups_of_a_recipe_are_for_its_own_rule() -> None:
    message = refusal(init_state, own(groups=("a:lr=2",)), params=PARAMS, rule=adam())
    assert message.startswith("optim.groups=['a:lr=2'] must not go with a rule of your own")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "sgd", "beta1": 0.5}, "optim.beta1=0.5 must not go with optim.rule=sgd (it is for adamw, lion, "
         "muon, schedule_free)"),
        ({"rule": "lion", "eps": 1e-3}, "optim.eps=0.001 must not go with optim.rule=lion"),
        ({"momentum": 0.5}, "optim.momentum=0.5 must not go with optim.rule=adamw (it is for sgd, muon)"),
        ({"rule": "sgd", "momentum": 0.0, "nesterov": True}, "optim.nesterov=true must not go with optim.momentum=0"),
        ({"nesterov": False}, "optim.nesterov=False must not go with optim.rule=adamw"),
        ({"rule": "muon", "moments": "bf16"}, "optim.moments=bf16 must not go with optim.rule=muon"),
        (
            {"rule": "schedule_free", "beta1": 0.0},
            "optim.beta1=0 must be above 0 with optim.rule=schedule_free",
        ),
        (
            {"rule": "schedule_free", "average": 0.9},
            "optim.average=0.9 must not go with optim.rule=schedule_free, which keeps a mean of its own; drop one",
        ),
        ({"matrices": ("a",)}, "optim.matrices=['a'] must not go with optim.rule=adamw"),
        *(
            ({"groups": (text,)}, f"optim.groups={text} must be PATTERN:lr=F,decay=F")
            for text in ("", "a", "a:", ":lr=1", "a:lr", "a:lr=x", "a:lr=-1", "a:lr=inf", "a:lr=1,lr=2", "a:beta=1",
                         "a:freeze,lr=1")
        ),
        ({"groups": "a:freeze"}, "optim.groups='a:freeze' must be a list of texts; write ['a:freeze']"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(settings: Any, message: str) -> None:
    assert refusal(Optim, **settings).startswith(message)


def test_muon_is_for_the_matrices_of_the_blocks() -> None:
    recipe = tiny(model=Model(width=8, depth=2, heads=2, vocab=9, tied=False), optim=Optim(rule="muon"))
    slot = init_state(recipe)["optimizer"]
    hidden = {path.removeprefix("matrices.momentum.buffer.") for path in leaves(slot) if path.startswith("matrices.")}
    others = {path.removeprefix("others.first.") for path in leaves(slot) if path.startswith("others.first.")}
    assert hidden | others == set(leaves(init_state(recipe)["params"]))
    assert "blocks.attention.wq" in hidden
    assert {"embed.weight", "norm", "blocks.ffn.norm"} <= others
    own_ = msgspec.structs.replace(recipe, model=None)
    assert set(rule_of(own_).init(PARAMS)["matrices"]["momentum"]["buffer"]) == {"a"}
