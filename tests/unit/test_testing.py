"""The laws as a tool: a sound step passes all, and each planted fault is named by its law and by its smallest input."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from lib.config import Batch, Guard, Model, Optim, Precision, Recipe, Scale
from lib.shard.words import gather, local, place, split
from lib.state import init_state
from lib.step import make_train_step, train_step
from lib.testing import LAWS, LawError, check_step
from lib.testing.strategies import lm_batch
from lib.testing.world import moved, positions
from tests.planted import FAULTS, batches, loss, planted, sound, state
from tests.strategies import given_gradients, gradients, own, refusal, tiny

# The tracer meets warnings that it hides from whoever runs it, but not from pytest; torch says that DTensors are new.
pytestmark = pytest.mark.filterwarnings("ignore")

EAGER = tuple(name for name in LAWS if name not in ("compilation", "recompilation"))
ROUNDED = ("accumulation", "refusal")
MODEL = Model(width=8, depth=1, heads=2, inner=8, vocab=12, tied=True)  # over three ranks two hold none of the block
RULES = (
    Optim(average=0.9),
    Optim(moments="bf16"),
    Optim(rule="sgd", nesterov=True),
    Optim(rule="lion"),
    Optim(rule="adafactor"),
    Optim(rule="muon"),
    Optim(rule="schedule_free", groups=("norm:freeze",)),
    Optim(groups=("embed.*:freeze", "blocks.*:lr=0.5"), average="uniform", average_last=2, average_every=3),
)


def test_a_sound_step_holds_every_law() -> None:
    assert [(verdict.law, verdict.kind) for verdict in check_step(sound, state(), batches())] == [
        (name, "held") for name in LAWS
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_its_law(fault: str) -> None:
    # Up to the law that is to find it: none before may be broken.
    upto = list(LAWS)[: list(LAWS).index(FAULTS[fault]) + 1]
    with pytest.raises(LawError) as caught:
        check_step(*planted(fault), laws=EAGER if FAULTS[fault] in ("mesh", "ranks") else upto)
    broken = [verdict for verdict in caught.value.verdicts if verdict.kind == "broken"]
    assert broken[0].law == FAULTS[fault], str(caught.value)
    assert "smallest input: 1 batch of 1 micro-batch of" in str(caught.value).splitlines()[0]


def test_what_is_said_of_a_fault() -> None:
    with pytest.raises(LawError) as caught:
        check_step(*planted("noise of torch's generator"))
    assert str(caught.value) == (
        "purity: broken: update 1 moves torch's global generator; draw from a key in the state "
        "(smallest input: 1 batch of 1 micro-batch of 1 row)"
    )
    rest = [str(verdict) for verdict in caught.value.verdicts[1:]]
    assert rest == [f"{name}: not checked: purity is broken" for name in list(LAWS)[1:]]


@pytest.mark.parametrize("optim", RULES, ids=lambda optim: f"{optim.rule} {optim.moments} {optim.average}")
def test_every_rule_here_holds_the_laws_on_the_language_model(optim: Any) -> None:
    recipe = tiny(model=MODEL, optim=optim, guard=Guard(window=4))
    some = [lm_batch(recipe, n, number=n + 1) for n in range(2)]
    verdicts = check_step(train_step, init_state(recipe), some, laws=EAGER)
    assert [(verdict.law, verdict.kind) for verdict in verdicts] == [(name, "held") for name in EAGER]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_short_dtypes_hold_them_too(compute: Any) -> None:
    precision, scale = Precision(compute=compute), Scale(initial=256.0)
    recipe = tiny(model=MODEL, precision=precision, scale=scale, batch=Batch(rows=6, length=9, micro=2))
    for seed in range(3):
        verdicts = check_step(train_step, init_state(recipe, seed=seed), lm_batch(recipe, seed), laws=ROUNDED)
        assert [verdict.kind for verdict in verdicts] == ["held"] * len(ROUNDED)


def test_the_language_model_holds_the_laws_of_compilation() -> None:
    recipe = tiny(model=MODEL)
    check_step(train_step, init_state(recipe), [lm_batch(recipe)], laws=["compilation", "recompilation"])


def test_a_law_that_says_nothing_of_a_case_is_not_passed_in_silence() -> None:
    begun = init_state(own(), params={"w": torch.tensor(1.0)})
    verdicts = check_step(make_train_step(given_gradients), begun, gradients({"w": 1.0}), laws=["accumulation"])
    assert [str(verdict) for verdict in verdicts] == [
        "accumulation: not checked: the leaves of the batch have no axes [micro-batches, rows, ...] in common"
    ]


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_a_mean_of_means_is_found_in_every_dtype_and_under_rules_that_take_signs(compute: Any, rule: Any) -> None:
    def means(params: Any, part: Any, key: Any) -> tuple[torch.Tensor, torch.Tensor]:
        total, count = loss(params, part)
        return total / count.clamp(min=1), torch.tensor(1)

    optim = Optim(rule=rule)
    recipe = Recipe(model=None, optim=optim, precision=Precision(compute=compute), scale=Scale(initial=16.0))
    begun = init_state(recipe, params=state()["params"], cursor=state()["cursor"])
    told = check_step(make_train_step(lambda p, part, key: loss(p, part)), begun, batches(), laws=["accumulation"])
    assert [verdict.kind for verdict in told] == ["held"]
    with pytest.raises(LawError, match="accumulation: broken"):
        check_step(make_train_step(means), begun, batches(), laws=["accumulation"])


def test_states_and_batches_may_be_plain_dicts() -> None:
    def step(old: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        grad = (batch["x"] * (batch["x"] * old["params"]["w"] - batch["y"])).sum()
        accept = torch.isfinite(grad)
        w = torch.where(accept, old["params"]["w"] - 0.1 * grad / batch["x"].numel(), old["params"]["w"])
        return {"params": {"w": w}, "step": old["step"] + 1}, {"grad": grad.clone()}

    def hidden(old: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        new, metrics = step(old, batch)
        return {**new, "times": float(old["times"]) + 1}, metrics

    begun = {"params": {"w": torch.tensor(2.0)}, "step": torch.tensor(0)}
    batch = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.ones(2, 3)}
    assert {(verdict.law, verdict.kind) for verdict in check_step(step, begun, batch)} == {
        (law, "held") for law in LAWS
    }
    with pytest.raises(LawError, match="state.times is no tensor, and changes from 0.0 to 1.0"):
        check_step(hidden, {**begun, "times": 0.0}, batch)


def by_hand(old: dict[str, Any], batch: dict[str, Any], *, compute: torch.dtype = torch.float32) -> Any:
    """Adam as one writes it for a line, with no word of this library; keys stand in an order of their own."""
    params = {name: leaf.detach().requires_grad_() for name, leaf in old["params"].items()}
    x, y = batch["x"].flatten(0, 1).to(compute), batch["y"].flatten(0, 1)
    with torch.enable_grad():
        loss = ((x @ params["w"].to(compute) + params["b"].to(compute)).float() - y).square().mean()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    accept = torch.isfinite(loss.detach()) & torch.stack([g.isfinite().all() for g in grads.values()]).all()
    kept = {name: {"m": 0.9 * s["m"] + 0.1 * grads[name], "v": 0.99 * s["v"] + 0.01 * grads[name] ** 2}
            for name, s in old["optimizer"].items()}  # fmt: skip
    moved = {
        name: leaf - 0.01 * kept[name]["m"] / (kept[name]["v"].sqrt() + 1e-8) for name, leaf in old["params"].items()
    }
    new = {name: torch.where(accept, leaf, old["params"][name]) for name, leaf in moved.items()}
    slots = {
        name: {key: torch.where(accept, s[key], old["optimizer"][name][key]) for key in s} for name, s in kept.items()
    }
    return {"params": new, "optimizer": slots, "step": old["step"] + 1}, {"loss": loss.detach()}


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_by_hand_holds_them_in_whatever_dtype_it_computes(compute: torch.dtype) -> None:
    params = {"w": torch.ones(3), "b": torch.zeros(())}
    begun = {
        "params": params,
        "optimizer": {name: {key: torch.zeros_like(leaf) for key in "mv"} for name, leaf in params.items()},
        "step": torch.tensor(0),
    }
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(2, 4, 3, generator=draw), "y": torch.randn(2, 4, generator=draw)}
    laws = LAWS if compute == torch.float32 else EAGER
    verdicts = check_step(partial(by_hand, compute=compute), begun, batch, laws=list(laws))
    assert [(verdict.law, verdict.kind) for verdict in verdicts] == [(law, "held") for law in laws]


def test_an_update_that_is_refused_is_no_witness() -> None:
    recipe = tiny(model=MODEL, precision=Precision(compute="fp16"), scale=Scale(initial=2.0**30))
    verdicts = check_step(train_step, init_state(recipe), lm_batch(recipe), laws=["accumulation", "mesh", "ranks"])
    assert all(verdict.kind == "not checked" for verdict in verdicts)
    assert all("the update changes nothing that is learnt (metrics." in verdict.said for verdict in verdicts)


def test_a_cut_leaf_that_meets_plain_tensors_alone_is_told_how() -> None:
    def step(old: Any, batch: Any) -> Any:
        w = old["params"]["w"]
        grad = torch.outer(torch.arange(4.0), torch.ones(3)) * (torch.eye(4) @ w).sum()
        accept = torch.isfinite(grad).all()
        return {"params": {"w": torch.where(accept, w - 0.1 * grad, w)}, "step": old["step"] + 1}, {"g": grad.sum()}

    begun = {"params": {"w": torch.ones(4, 3)}, "step": torch.tensor(0)}
    with pytest.raises(LawError, match="what is cut is a DTensor: bring it together by lib.shard.words.gather"):
        check_step(step, begun, {"x": torch.ones(1, 3)}, laws=["mesh"])


def test_a_broken_step_that_draws_by_micro_batch_is_not_called_sound() -> None:
    verdicts = check_step(*planted("draws by micro-batch"), laws=["purity", "accumulation"])
    assert verdicts[0].kind == "held"
    assert verdicts[1].kind == "not checked"
    assert "random numbers hang on the micro-batch, or else it is broken: " in verdicts[1].said


def test_a_spoilt_parameter_without_a_part_in_the_loss_is_no_matter() -> None:
    begun = init_state(own(), params={"w": torch.tensor(1.0), "unused": torch.ones(2)})
    step = make_train_step(lambda params, part, key: ((params["w"] * part["x"]).sum(), torch.tensor(3)))
    batch = {"x": torch.ones(1, 3)}
    assert [verdict.kind for verdict in check_step(step, begun, TensorDict(batch), laws=["refusal"])] == ["held"]


def test_the_generators_of_the_world_stand_where_they_stood() -> None:
    before = positions()
    check_step(sound, state(), batches(), laws=["purity"])
    with pytest.raises(LawError):
        check_step(*planted("noise of numpy's generator"), laws=["purity"])
    assert moved(before) is None


@pytest.mark.parametrize("word", [gather, local])
def test_on_one_device_the_words_are_the_identity(word: Any) -> None:
    leaf = torch.ones(3)
    assert word(leaf) is leaf
    assert place(leaf, torch.zeros(3)) is leaf
    assert split(leaf, torch.zeros(3)) is leaf


def test_laws_and_batches_that_are_not_there_are_refused() -> None:
    assert refusal(check_step, sound, state(), []) == "batches=() must have at least one; make one"
    told = f"laws=purty must be one of {', '.join(LAWS)}; change it"
    assert refusal(check_step, sound, state(), batches(), laws=["purty"]) == told
