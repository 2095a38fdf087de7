"""The laws as a tool: a sound step passes all, and each planted fault is named by its law and by its smallest input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lib.config import Guard, Optim
from lib.state import init_state
from lib.step import make_train_step, train_step
from lib.testing import LAWS, LawError, check_step
from tests.planted import FAULTS, batches, planted, sound, state
from tests.strategies import given_gradients, gradients, lm_batch, own, refusal, tiny

# The tracer meets warnings that it hides from whoever runs it, but not from pytest; torch says that DTensors are new.
pytestmark = pytest.mark.filterwarnings("ignore")

EAGER = tuple(name for name in LAWS if name not in ("compilation", "recompilation"))
RULES = (
    Optim(average=0.9),
    Optim(moments="bf16"),
    Optim(rule="sgd", nesterov=True),
    Optim(rule="lion"),
    Optim(rule="adafactor"),
    Optim(rule="muon"),
    Optim(groups=("embed.*:freeze", "blocks.*:lr=0.5"), average="uniform", average_last=2, average_every=3),
)


def test_a_sound_step_holds_every_law() -> None:
    assert [(verdict.law, verdict.kind) for verdict in check_step(sound, state(), batches())] == [
        (name, "held") for name in LAWS
    ]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_its_law(fault: str) -> None:
    with pytest.raises(LawError) as caught:
        check_step(*planted(fault))
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
    recipe = tiny(optim=optim, guard=Guard(window=4))
    some = [lm_batch(recipe, n, number=n + 1) for n in range(2)]
    verdicts = check_step(train_step, init_state(recipe), some, laws=EAGER)
    assert [(verdict.law, verdict.kind) for verdict in verdicts] == [(name, "held") for name in EAGER]


def test_the_language_model_holds_the_laws_of_compilation() -> None:
    recipe = tiny()
    check_step(train_step, init_state(recipe), [lm_batch(recipe)], laws=["compilation", "recompilation"])


def test_a_law_that_says_nothing_of_a_case_is_not_passed_in_silence() -> None:
    begun = init_state(own(), params={"w": torch.tensor(1.0)})
    verdicts = check_step(make_train_step(given_gradients), begun, gradients({"w": 1.0}), laws=["accumulation"])
    assert [str(verdict) for verdict in verdicts] == [
        "accumulation: not checked: the leaves of the batch have no axes [micro-batches, rows, ...] in common"
    ]


def test_laws_and_batches_that_are_not_there_are_refused() -> None:
    assert refusal(check_step, sound, state(), []) == "batches=() must have at least one; make one"
    told = f"laws=purty must be one of {', '.join(LAWS)}; change it"
    assert refusal(check_step, sound, state(), batches(), laws=["purty"]) == told
