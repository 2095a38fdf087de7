"""The verb `check`: the laws against a step that a function gives, and every way in which it may give none."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from lib.config import LawName
from lib.run.cli import main
from lib.testing import LAWS

STEPS = """
import torch
from tensordict import TensorDict
from lib.config import Recipe
from lib.state import init_state
from lib.step import make_train_step

def loss(params, batch, key):
    return (batch["x"] * params["w"]).sum(), batch["x"].numel()

sound = make_train_step(loss)
state = init_state(Recipe(), params={"w": torch.ones(3)})
batch = TensorDict({"x": torch.ones(2, 4, 3)})
number = 3

def case():
    return sound, state, batch

def noisy():
    def step(state, batch):
        new, metrics = sound(state, batch)
        new["params", "w"] += torch.randn(3)
        return new, metrics
    return step, state, [batch]

def two():
    return 1, 2

def no_step():
    return 1, state, batch

def no_state():
    return sound, 3.0, batch

def no_batch():
    return sound, state, []

def list_of_numbers():
    return sound, state, [1, 2]

def failing():
    raise KeyError("mine")
"""


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_own_steps.py").write_text(STEPS)
    Path("needs_more.py").write_text("import not_installed_at_all")


@pytest.mark.parametrize("word", ["my_own_steps:case", "my_own_steps.py:case", "check.case=my_own_steps:case"])
def test_a_step_that_holds_them_is_told_so_law_by_law(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", word, "check.laws=[resume,purity]"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["purity: held", "resume: held"]
    assert said.err == ""


def test_a_broken_law_is_named_and_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "my_own_steps:noisy"]) == 1
    said = capsys.readouterr()
    assert said.err == "error: my_own_steps:noisy: breaks purity\n"
    first, *rest = said.out.splitlines()
    assert first == (
        "purity: broken: update 1 moves torch's global generator; draw from a key in the state "
        "(smallest input: 1 batch of 1 micro-batch of 1 row)"
    )
    assert rest == [f"{name}: not checked: purity is broken" for name in list(LAWS)[1:]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "check.case='' must be module:function or FILE.py:function; write it like: check my_steps:case"),
        (["check.case=steps"], "check.case='steps' must be module:function or FILE.py:function"),
        (["steps"], "'steps' must be module:function or FILE.py:function, a config file, key=value or ~key; see --help"),
        (["nosuch:case"], "check.case=nosuch:case: there is no module nosuch here, must be"),
        (["my_own_steps.more:case"], "check.case=my_own_steps.more:case: there is no module my_own_steps.more here"),
        (["nosuch.py:case"], "check.case=nosuch.py:case: there is no file nosuch.py, must be"),
        (["my_own_steps:cas"], "check.case=my_own_steps:cas: cas is not in my_own_steps, must be a function of no "
         "arguments; did you mean case?"),
        (["my_own_steps:number"], "check.case=my_own_steps:number: is int, must be a function of no arguments"),
        (["my_own_steps:two"], "check.case=my_own_steps:two: gives 2 values, must give (step, state, batches)"),
        (["my_own_steps:no_step"], "check.case=my_own_steps:no_step: its step is int, must be a function"),
        (["my_own_steps:no_state"], "check.case=my_own_steps:no_state: its state is float, must be a TensorDict"),
        (["my_own_steps:no_batch"], "check.case=my_own_steps:no_batch: gives no batches, must give at least one"),
        (["my_own_steps:list_of_numbers"], "check.case=my_own_steps:list_of_numbers: its batch is int, must be"),
        (["my_own_steps:case", "check.laws=[purty]"], "check.laws=[purty] must be list of purity, determinism"),
        (["my_own_steps:case", "check.laws=[]"], "check.laws=[] must name a law or be none; drop it"),
        (["my_own_steps:case", "steps=3"], "steps: has no effect in check"),
    ],
)  # fmt: skip
def test_what_gives_no_step_is_told_in_a_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {message}")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "last"), [("my_own_steps:failing", "KeyError: 'mine'"), ("needs_more:case", "not_installed")]
)
def test_a_fault_of_the_users_own_code_shows_where_it_is(
    word: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", word]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert last in said.splitlines()[-1]


def test_the_names_that_may_be_given_are_those_of_the_laws() -> None:
    assert get_args(LawName) == tuple(LAWS)
