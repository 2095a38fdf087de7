"""What a launch may change of the run it goes on with, and what the clock adds to a row."""

from __future__ import annotations

import re

import msgspec
import pytest
import torch
from tensordict import TensorDict

from lib.config import Config, DataIdentity, SourceIdentity, load_config, recipe_of
from lib.run.launch import Launch
from lib.run.meter import meter
from lib.run.resume import Recorded, Resumed, as_info, compare, recorded_in, with_changes
from lib.state import init_state
from lib.store.coders import open_coder
from lib.tree import leaves, tensordict

HERE = Recorded(2, False, torch.__version__, "cpu")
RUN = load_config(
    *("steps=100", "run.threads=2", "compile=off", "model.depth=4", "batch.length=256", "optim.beta2=0.95"),
    *("schedule.warmup=50", "schedule.shape=cosine", "precision.compute=fp32", "data.holdout=0.01"),
)
SOURCES = (SourceIdentity(digest="d", holdout_by="tail", tokens=9),)
OLD = recipe_of(RUN, DataIdentity(tokenizer=open_coder("bytes").identity, holdout=0.01, sources=SOURCES))
BITS = "; from here on the bits may differ from those of an unbroken run"


def going_on(*words: str, recorded: Recorded = HERE, config: Config = RUN) -> Resumed:
    """As the launcher does it: the run's own config below, then what is named."""
    named = frozenset(word.partition("=")[0] for word in words)
    asked = load_config(msgspec.to_builtins(config), *words)
    return compare(OLD, 0, Launch("train", asked, named), recorded, "cpu")


def test_a_launch_that_names_nothing_changes_nothing() -> None:
    assert going_on() == Resumed(OLD, 2, False, ())


def test_what_lies_around_the_step_is_no_difference() -> None:
    words = ("steps=300", "log.every=1", "eval.rows=none", "checkpoint.keep=9", "sample.length=0", "data.ahead=0")
    assert going_on(*words, "data.path=moved", "data.cache=else", "data.holdout_by=auto") == going_on()


def test_more_steps_do_not_move_the_schedule() -> None:
    assert going_on("steps=300").recipe.schedule.length == 100
    resumed = going_on("schedule.length=300")
    assert resumed.recipe.schedule.length == 300
    assert resumed.notes == ("schedule.length: 100 -> 300 from here on",)


def test_a_schedule_that_is_named_as_left_open_follows_the_steps() -> None:
    config = msgspec.structs.replace(RUN, schedule=msgspec.structs.replace(RUN.schedule, length=100))
    resumed = going_on("steps=300", "schedule.length=none", config=config)
    assert resumed.notes == ("schedule.length: 100 -> 300 from here on",)


@pytest.mark.parametrize(
    ("words", "recorded", "note", "threads", "compiled"),
    [
        (("run.threads=4",), HERE, f"run.threads: 2 -> 4{BITS}", 4, False),
        (("compile=on",), HERE, f"compile: off -> on{BITS}", 2, True),
        ((), HERE._replace(torch="1.0"), f"torch: 1.0 -> {torch.__version__}{BITS}", 2, False),
        ((), HERE._replace(device="cuda"), f"device: cuda -> cpu{BITS}", 2, False),
        (("run.threads=4", "compile=on"), Recorded(None, None, None, None), None, 4, True),
        (("compile=auto", "run.threads=none"), HERE, None, 2, False),
    ],
)
def test_what_bits_depend_on_is_kept_and_a_change_is_said(
    words: tuple[str, ...], recorded: Recorded, note: str | None, threads: int, compiled: bool
) -> None:
    resumed = going_on(*words, recorded=recorded)
    assert resumed == Resumed(OLD, threads, compiled, () if note is None else (note,))


FIXED = {
    "model.depth=2": "model.depth: run has 4, asked for 2",
    "model.layers=scan": "model.layers: run has unroll, asked for scan",
    "batch.length=128": "batch.length: run has 256, asked for 128",
    "batch.micro=2": "batch.micro: run has 1, asked for 2",
    "optim.beta2=0.99": "optim.beta2: run has 0.95, asked for 0.99",
    "optim.average=0.9": "optim.average: run has none, asked for 0.9",
    "schedule.shape=linear": "schedule.shape: run has cosine, asked for linear",
    "schedule.warmup=5": "schedule.warmup: run has 50, asked for 5",
    "precision.compute=bf16": "precision.compute: run has fp32, asked for bf16",
    "scale.dynamic=true": "scale.dynamic: run has none, asked for true",
    "guard.window=8": "guard.window: run has 0, asked for 8",
    "data.holdout=0.5": "data.holdout: run has 0.01, asked for 0.5",
    "data.holdout_by=document": "data.holdout_by: run has tail, asked for document",
    "run.seed=1": "run.seed: run has 0, asked for 1",
}


@pytest.mark.parametrize(("kept", "word", "asked"), [
    ("bytes, 260 ids, end 2, begin 1", "bytes", None),
    ("bytes, 260 ids, end 2, begin 1", "ids:260:2", "ids:260:2"),
    ("ids:60:2, 60 ids, end 2, begin none", "ids:60:2", None),
    ("ids:60:2, 60 ids, end 2, begin none", "ids:60:20", "ids:60:20"),
    ("ids:60:20, 60 ids, end 20, begin none", "ids:60:2", "ids:60:2"),
    ("own.json:ab12, 300 ids, end 0, begin none, special tokens 9f", "moved/own.json", None),
    ("own.json:ab12, 300 ids, end 0, begin none, special tokens 9f", "other.json", "other.json"),
    ("tiktoken:gpt2:ab12, 50257 ids, end 50256, begin none, special tokens 9f", "tiktoken:gpt2", None),
    ("tiktoken:gpt2:ab12, 50257 ids, end 50256, begin none, special tokens 9f", "bytes", "bytes"),
])  # fmt: skip
def test_a_tokenizer_is_told_from_another_by_name_before_it_is_opened(kept: str, word: str, asked: str | None) -> None:
    old = msgspec.structs.replace(OLD, data=msgspec.structs.replace(OLD.data, tokenizer=kept))
    config = load_config(msgspec.to_builtins(RUN), f"data.tokenizer={word}")
    launch = Launch("train", config, frozenset({"data.tokenizer"}))
    if asked is None:
        assert compare(old, 0, launch, HERE, "cpu").recipe == old
        return
    with pytest.raises(ValueError, match=re.escape(f"; data.tokenizer: run has {kept}, asked for {asked}; these must")):
        compare(old, 0, launch, HERE, "cpu")


@pytest.mark.parametrize("word", FIXED)
def test_what_may_not_change_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="another recipe") as caught:
        going_on(word)
    assert str(caught.value) == (
        f"run.dir=runs/default: this run has another recipe; {FIXED[word]}; "
        f"these must stay as they are, set another run.dir for a new run"
    )


def test_a_new_rate_is_a_new_leaf_and_a_new_recipe_and_nothing_else() -> None:
    small = load_config("model.width=16", "model.depth=1", "model.heads=2", "steps=100")
    state = init_state(recipe_of(small), seed=0)
    recipe = recipe_of(load_config(msgspec.to_builtins(small), "optim.lr=0.5", "optim.decay=0.25", "guard.patience=3"))
    before = {path: leaf.clone() for path, leaf in leaves(state).items()}
    changed = with_changes(state, recipe)
    assert changed["recipe"] == recipe
    after = leaves(changed)
    assert (after["scheduler.lr"].item(), after["scheduler.decay"].item()) == (0.5, 0.25)
    assert after["scheduler.lr"].dtype == torch.float64
    for path, leaf in before.items():
        assert torch.equal(leaf, leaves(state)[path])
        assert path in ("scheduler.lr", "scheduler.decay") or torch.equal(leaf, after[path])
    assert with_changes(state, state["recipe"]) is state


def test_what_a_checkpoint_says_of_its_process_comes_back() -> None:
    assert recorded_in(as_info(3, True, "cpu")) == Recorded(3, True, torch.__version__, "cpu")
    assert recorded_in({}) == Recorded(None, None, None, None)


def report(step: int) -> TensorDict:
    values = {"step": step, "loss_nats": 1.0, "bpb": 1.5, "lr": 0.1, "grad_norm": 2.0, "tokens": 100, "bytes": 90}
    counts = {"scale": 1.0, "skipped": 0, "refused": False}
    return tensordict({name: torch.tensor(value) for name, value in {**values, **counts}.items()})


def test_the_clock_counts_steps_and_leaves_out_what_is_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = meter([{"step": 4, "elapsed_s": 50.0}, {"step": 4, "eval/bpb": 1.0}], 4)

    def step(number: int, seconds: float) -> None:
        now[0] += seconds
        clock.tick(number)

    step(5, 30.0)  # the first one compiles
    step(6, 1.0)
    step(7, 1.0)
    row = clock.row(7, report(7))
    assert (row["tokens_per_s"], row["elapsed_s"]) == (100.0, 82.0)
    now[0] += 500.0  # an evaluation
    clock.pause()
    step(8, 0.5)
    row = clock.row(8, report(8))
    assert (row["tokens_per_s"], row["elapsed_s"]) == (200.0, 582.5)


def test_a_first_step_that_is_logged_has_a_pace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = meter([], 0)
    now[0] = 4.0
    clock.tick(1)
    assert clock.row(1, report(1))["tokens_per_s"] == 25.0
