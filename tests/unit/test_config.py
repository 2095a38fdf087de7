"""Configs: every key in every way of saying it, and what is no value for it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import tomli_w
import yaml

import lib.config
from lib.config import (
    Config,
    DataIdentity,
    Model,
    Optim,
    Recipe,
    SourceIdentity,
    load_config,
    recipe_of,
    run_steps,
)
from lib.settings import field_paths
from tests.strategies import refusal

ROOT = Path(__file__).parent.parent.parent
STRUCTS = [kind for _, kind in inspect.getmembers(lib.config, inspect.isclass) if issubclass(kind, msgspec.Struct)]

# A value for each key that is not its default, as (what is written, what is read): a new key needs its line here.
OTHER: dict[str, tuple[Any, Any]] = {
    "run.dir": ("runs/x=1", "runs/x=1"),
    "run.seed": (2**62 + 1, 2**62 + 1),
    "run.threads": (3, 3),
    "steps": (1000, 1000),
    "tokens": (10**7, 10**7),
    "stop": (0, 0),
    "load": (1200, 1200),
    "resume": ("never", "never"),
    "init.path": ("runs/old", "runs/old"),
    "init.take": ("all", "all"),
    "init.names": (["a.**=b.**"], ("a.**=b.**",)),
    "compile": ("off", "off"),
    "model.width": (64, 64),
    "model.depth": (7, 7),
    "model.heads": (8, 8),
    "model.kv_heads": (2, 2),
    "model.inner": (33, 33),
    "model.vocab": (300, 300),
    "model.dropout": (0.1, 0.1),
    "model.tied": (not Model().tied, not Model().tied),
    "model.theta": (500_000, 500_000.0),
    "model.eps": (1e-6, 1e-6),
    "model.documents": (False, False),
    "model.layers": ("scan", "scan"),
    "batch.rows": (6, 6),
    "batch.length": (7, 7),
    "batch.micro": (4, 4),
    "batch.mode": ("pack", "pack"),
    "batch.buckets": ([128, 256], (128, 256)),
    "batch.rows_at": (["100:32"], ("100:32",)),
    "batch.length_at": (["0:64", "100:128"], ("0:64", "100:128")),
    "batch.shuffle": (False, False),
    "batch.repeats": (32, 32),
    "data.path": (["a b", "c"], ("a b", "c")),
    "data.sources.NAME.path": ("books/", "books/"),
    "data.sources.NAME.weight": (0.1, 0.1),
    "data.sources.NAME.repeat": (4, 4.0),
    "data.sources.NAME.format": ("jsonl", "jsonl"),
    "data.sources.NAME.split": ("block", "block"),
    "data.sources.NAME.text_key": ("body", "body"),
    "data.sources.NAME.id_key": ("url", "url"),
    "data.sources.NAME.dtype": ("<u2", "<u2"),
    "data.sources.NAME.template": ("chatml", "chatml"),
    "data.sources.NAME.train_on": ("all", "all"),
    "data.holdout": (0.25, 0.25),
    "data.holdout_by": ("tail", "tail"),
    "data.heldout": ("valid.jsonl", "valid.jsonl"),
    "data.format": ("text", "text"),
    "data.split": ("line", "line"),
    "data.text_key": ("content", "content"),
    "data.id_key": ("id", "id"),
    "data.dtype": (">u4", ">u4"),
    "data.template": ("llama3", "llama3"),
    "data.train_on": ("last", "last"),
    "data.errors": ("skip", "skip"),
    "data.tokenizer": ("tokenizer.json", "tokenizer.json"),
    "data.eos_token": ("</s>", "</s>"),
    "data.bos_token": ("<s>", "<s>"),
    "data.add_bos": (True, True),
    "data.add_eos": (False, False),
    "data.cache": ("somewhere", "somewhere"),
    "data.processes": (3, 3),
    "data.workers": (2, 2),
    "data.ahead": (0, 0),
    "optim.rule": ("lion", "lion"),
    "optim.lr": (1e-4, 1e-4),
    "optim.decay": (0, 0.0),
    "optim.beta1": (0.0, 0.0),
    "optim.beta2": (0.999, 0.999),
    "optim.eps": (1e-15, 1e-15),
    "optim.momentum": (0.8, 0.8),
    "optim.nesterov": (False, False),
    "optim.moments": ("bf16", "bf16"),
    "optim.matrices": (["blocks.ffn.up"], ("blocks.ffn.up",)),
    "optim.groups": (["embed.*:lr=0.1", "norm:freeze"], ("embed.*:lr=0.1", "norm:freeze")),
    "optim.clip": (None, None),
    "optim.no_decay": (["*.norm", "embed.*"], ("*.norm", "embed.*")),
    "optim.average": (0.999, 0.999),
    "schedule.shape": ("linear", "linear"),
    "schedule.warmup": (0, 0),
    "schedule.length": (123, 123),
    "schedule.floor": (0, 0.0),
    "schedule.start": (0.1, 0.1),
    "schedule.exponent": (2, 2.0),
    "schedule.cycles": (2, 2),
    "schedule.tail": (0.2, 0.2),
    "schedule.tail_shape": ("sqrt", "sqrt"),
    "schedule.end": (0, 0.0),
    "schedule.stages": (["linear:10:1", "constant:90"], ("linear:10:1", "constant:90")),
    "schedule.counts": ("applied", "applied"),
    "precision.compute": ("bf16", "bf16"),
    "scale.dynamic": (True, True),
    "scale.initial": (1024, 1024.0),
    "scale.growth": (4, 4.0),
    "scale.backoff": (0.25, 0.25),
    "scale.every": (100, 100),
    "scale.lowest": (0.5, 0.5),
    "scale.highest": (2**20, 2.0**20),
    "loss.z": (1e-5, 1e-5),
    "loss.smoothing": (0.1, 0.1),
    "loss.chunk": (128, 128),
    "guard.patience": (3, 3),
    "guard.window": (128, 128),
    "guard.sigma": (4.5, 4.5),
    "checkpoint.dir": ("s3://bucket/run", "s3://bucket/run"),
    "checkpoint.every": (17, 17),
    "checkpoint.at": ([5, 70], (5, 70)),
    "checkpoint.temporary": (10, 10),
    "checkpoint.keep": (None, None),
    "checkpoint.keep_every": (1000, 1000),
    "checkpoint.keep_every_s": (3600, 3600.0),
    "checkpoint.keep_best": (2, 2),
    "checkpoint.best_by": ("eval/bpb", "eval/bpb"),
    "checkpoint.async": (False, False),
    "checkpoint.busy": ("skip", "skip"),
    "checkpoint.on_error": ("go_on", "go_on"),
    "eval.every": (0, 0),
    "eval.rows": (None, None),
    "eval.weights": ("params", "params"),
    "log.every": (1, 1),
    "sample.prompt": ("yes 1e-4 # no", "yes 1e-4 # no"),
    "sample.length": (0, 0),
    "sample.temperature": (0, 0.0),
    "sample.top_k": (None, None),
    "sample.seed": (5, 5),
    "inspect.rows": (4, 4),
    "inspect.path": ("runs/other", "runs/other"),
    "convert.source": (["a", "b"], ("a", "b")),
    "convert.target": ("model.safetensors", "model.safetensors"),
    "convert.what": ("all", "all"),
    "convert.names": (["a=b"], ("a=b",)),
    "convert.most_mb": (500, 500),
}
BELOW: dict[str, Any] = {  # what a key needs beside it
    "batch.buckets": {"batch": {"mode": "pad"}},
    "data.sources": {"data": {"sources": {"NAME": {"path": "here"}}}},
    "data.train_on": {"data": {"template": "chatml"}},
    "init.take": {"init": {"path": "runs/old"}},
    "init.names": {"init": {"path": "runs/old"}},
    "checkpoint.best_by": {"checkpoint": {"keep_best": 2}},
    "optim.momentum": {"optim": {"rule": "muon"}},
    "optim.nesterov": {"optim": {"rule": "muon"}},
    "optim.matrices": {"optim": {"rule": "muon"}},
    "schedule.tail_shape": {"schedule": {"tail": 0.2}},
    "schedule.end": {"schedule": {"tail": 0.2}},
    "schedule.stages": {"schedule": {"shape": "stages", "stages": ["cosine:5:0.5"]}},
}
NEEDED = {"data.sources.NAME.path", "schedule.stages"}  # there is no default that could stand where these are asked for
ONE_CHOICE = {"eval.weights"}  # no other value that could stand alone


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[key] if isinstance(config, dict) else getattr(config, key)
    return config


def spoken(value: Any) -> str:
    """As one types it on a command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, list) else str(value)


def test_every_key_has_its_line_in_this_table() -> None:
    assert list(OTHER) == list(field_paths(Config))


@pytest.mark.parametrize("path", OTHER)
def test_every_key_says_the_same_in_every_form(path: str, tmp_path: Path) -> None:
    written, read = OTHER[path]
    toml, json_, yaml_ = (tmp_path / f"c.{kind}" for kind in ("toml", "json", "yaml"))
    toml.write_text(tomli_w.dumps(nested(path, "none" if written is None else written)))
    json_.write_text(json.dumps(nested(path, written)))
    yaml_.write_text(yaml.safe_dump(nested(path, written)))
    below = next((layer for start, layer in BELOW.items() if path.startswith(start)), {})
    by_hand = load_config(below, nested(path, written))
    assert at(by_hand, path) == read
    assert type(at(by_hand, path)) is type(read)
    assert (at(load_config(below), path) != read) is (path not in ONE_CHOICE)
    for layer in (toml, json_, yaml_, f"{path}={spoken(written)}"):
        assert load_config(below, layer) == by_hand, layer
    assert load_config(msgspec.to_builtins(by_hand)) == by_hand
    if path not in NEEDED:
        assert load_config(below, nested(path, written), f"~{path}") == load_config(below)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_described_in_its_struct(kind: Any) -> None:
    text = inspect.getdoc(kind) or ""
    described = [line.split(":")[0].strip() for line in text.split("Attributes:")[-1].splitlines() if ": " in line]
    missing = set(kind.__struct_fields__) - set(described)
    assert not missing


def test_reading_a_config_costs_no_torch() -> None:
    code = "import lib.config, lib.settings, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# Unknown keys ---------------------------------------------------------------------------------------------------------

UNKNOWN = "{}: unknown key, must be one of the config's; {}"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optim.lrr", "optim.lr"),
        ("lr", "optim.lr"),
        ("heads", "model.heads"),
        ("batch-rows", "batch.rows"),
        ("batch_rows", "batch.rows"),
        ("optim.no-decay", "optim.no_decay"),
        ("model.kv-heads", "model.kv_heads"),
        ("step", "steps"),
        ("steps.x", "steps"),
        ("model.width.x", "model.width"),
        ("run.sed", "run.seed"),
        ("widht", "model.width"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, near: str, tmp_path: Path) -> None:
    message = UNKNOWN.format(key, f"did you mean `{near}`?")
    assert refusal(load_config, f"{key}=1") == message
    assert refusal(load_config, nested(key, 1)) == message
    for kind, text in (("json", json.dumps(nested(key, 1))), ("toml", tomli_w.dumps(nested(key, 1)))):
        (tmp_path / f"c.{kind}").write_text(text)
        assert refusal(load_config, tmp_path / f"c.{kind}") == message
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(nested(key, 1)))
    assert refusal(load_config, tmp_path / "c.yaml") == message
    assert refusal(load_config, f"~{key}") == message


@pytest.mark.parametrize(
    ("key", "near"), [("optm.lr", "optim.lr"), ("Optim.beta1", "optim.beta1"), ("bath.rows", "batch.rows")]
)
def test_a_misspelt_section_is_found_too(key: str, near: str) -> None:
    assert refusal(load_config, f"{key}=1") == UNKNOWN.format(key, f"did you mean `{near}`?")
    assert refusal(load_config, nested(key, 1)).startswith(
        UNKNOWN.format(key.split(".", maxsplit=1)[0], "did you mean")
    )


def test_an_unknown_key_like_no_other_points_to_the_help() -> None:
    assert refusal(load_config, "zzz=1") == UNKNOWN.format("zzz", "see --help for all keys")
    assert refusal(load_config, {1: 2}) == UNKNOWN.format("1", "see --help for all keys")


def test_a_recipe_read_from_a_checkpoint_refuses_unknown_keys_too() -> None:
    good = msgspec.json.encode(Recipe())
    assert msgspec.json.decode(good, type=Recipe) == Recipe()
    bad = good.replace(b'"width"', b'"widht"')
    with pytest.raises(msgspec.ValidationError, match="widht"):
        msgspec.json.decode(bad, type=Recipe)


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3e-4", 3e-4),
        ("1.0e-4", 1e-4),
        ("1E4", 1e4),
        ("+.5", 0.5),
        ("2.", 2.0),
        ("10", 10.0),
        ("0.1", 0.1),
        (" 0.5 ", 0.5),
    ],
)
def test_a_number_reads_as_it_is_written(text: str, value: float, tmp_path: Path) -> None:
    assert load_config(f"optim.lr={text}").optim.lr == value
    (tmp_path / "c.yaml").write_text(f"optim:\n  lr: {text}\n")
    assert load_config(tmp_path / "c.yaml").optim.lr == value


NO_NUMBER = [
    "1_000",
    "010",
    "1:30",
    ".nan",
    "nan",
    "inf",
    "-inf",
    "yes",
    "off",
    "true",
    "2024-01-01",
    "0x10",
    "1e",
    "1,5",
]


@pytest.mark.parametrize("text", NO_NUMBER)
def test_what_is_no_number_is_refused_for_a_number(text: str, tmp_path: Path) -> None:
    message = f"optim.lr={text} must be a number; change the value"
    assert refusal(load_config, f"optim.lr={text}") == message
    (tmp_path / "c.yaml").write_text(f"optim:\n  lr: {text}\n")
    assert refusal(load_config, tmp_path / "c.yaml") == message


@pytest.mark.parametrize(
    ("text", "value"), [("1e3", 1000), ("100.0", 100), ("+7", 7), ("0", 0), ("12345678901", 12345678901)]
)
def test_a_whole_number_may_be_written_as_any_number_that_is_whole(text: str, value: int, tmp_path: Path) -> None:
    assert load_config(f"eval.every={text}").eval.every == value
    (tmp_path / "c.yaml").write_text(f"eval:\n  every: {text}\n")
    read = load_config(tmp_path / "c.yaml").eval.every
    assert read == value
    assert type(read) is int


@pytest.mark.parametrize("text", ["1.5", "true", "010", "1_000", "1e-3", "\u0663", "0x1", "", "1 000"])
def test_what_is_not_whole_is_refused_for_a_whole_number(text: str) -> None:
    assert refusal(load_config, f"eval.every={text}") == f"eval.every={text} must be a whole number; change the value"


@pytest.mark.parametrize("value", [True, "5", 1.5, [1], None])
def test_typed_values_are_held_to_the_type(value: Any) -> None:
    wanted = f"eval.every={value} must be a whole number; change the value"
    assert refusal(load_config, {"eval": {"every": value}}) == wanted


@pytest.mark.parametrize("text", ["False", "yes", "off", "0", "no", ""])
def test_only_true_and_false_are_truth_values(text: str) -> None:
    assert refusal(load_config, f"model.tied={text}") == f"model.tied={text} must be true or false; change the value"
    assert load_config("model.tied=false").model.tied is False
    assert load_config("model.tied=true").model.tied is True


def test_seed_0_is_a_seed() -> None:
    assert load_config("run.seed=7", "run.seed=0").run.seed == 0
    assert load_config({"run": {"seed": 7}}, {"run": {"seed": 0}}).run.seed == 0


def test_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("sample:\n  prompt: 010\nrun:\n  dir: off\n")
    config = load_config(tmp_path / "c.yaml")
    assert (config.sample.prompt, config.run.dir) == ("010", "off")
    assert load_config("sample.prompt=1e-4").sample.prompt == "1e-4"
    assert load_config("sample.prompt= a=b ").sample.prompt == " a=b "
    assert load_config("run.dir=none").run.dir == "none"


def test_compile_takes_truth_values_for_on_and_off(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("compile = false")
    assert load_config(tmp_path / "c.toml").compile == "off"
    assert load_config("compile=true").compile == "on"
    assert load_config({"compile": True}).compile == "on"


def test_a_list_is_json_or_bare_words_in_brackets() -> None:
    assert load_config('data.path=["a,b", "c"]').data.path == ("a,b", "c")
    assert load_config("data.path=[a, b c]").data.path == ("a", "b c")
    assert load_config("optim.no_decay=[]").optim.no_decay == ()
    assert load_config("batch.mode=pad", "batch.length=64", "batch.buckets=[16, 64]").batch.buckets == (16, 64)
    assert load_config("data.path=a,b").data.path == "a,b"
    assert load_config("optim.no_decay=[*.norm]").optim.no_decay == ("*.norm",)
    wanted = "optim.no_decay=*.norm must be list of texts or none; change the value"
    assert refusal(load_config, "optim.no_decay=*.norm") == wanted
    assert (
        refusal(load_config, {"optim": {"no_decay": [1]}})
        == "optim.no_decay=[1] must be list of texts or none; change the value"
    )


def test_values_are_frozen() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.steps = 5  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.optim.lr = 5.0  # type: ignore[misc]
    assert hash(Recipe()) == hash(Recipe(model=Model()))


# Layers ---------------------------------------------------------------------------------------------------------------


def test_later_layers_win_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim:\n  lr: 1e-3\n  decay: 0.5\nsteps: 300\n")
    (tmp_path / "b.toml").write_text("steps = 400\n[optim]\nlr = 2e-3\n")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.toml"], ["optim.decay=0.25", {"optim": {"eps": 1e-6}}])
    assert (config.optim.lr, config.optim.decay, config.optim.eps, config.steps) == (2e-3, 0.25, 1e-6, 400)
    assert load_config(tmp_path / "b.toml", tmp_path / "a.yaml").optim.lr == 1e-3


def test_a_tilde_takes_a_key_or_a_section_back_to_its_default() -> None:
    changed: dict[str, Any] = {"optim": {"lr": 1.0, "decay": 0.5}, "steps": 300}
    assert load_config(changed, "~optim.lr") == load_config({"optim": {"decay": 0.5}, "steps": 300})
    assert load_config(changed, "~optim") == load_config({"steps": 300})
    assert load_config(changed, "~steps").steps is None
    assert load_config(changed, "~optim", "optim.lr=3").optim == Optim(lr=3.0)
    assert load_config(changed, "~schedule").schedule == Config().schedule


def test_layers_are_left_as_they_are() -> None:
    layer: dict[str, Any] = {"optim": {"lr": 1.0}}
    load_config(layer, "optim.lr=2", {"optim": {"decay": 0.5}})
    assert layer == {"optim": {"lr": 1.0}}


# The recipe -----------------------------------------------------------------------------------------------------------


def test_the_schedule_is_as_long_as_the_run_unless_told_otherwise() -> None:
    assert recipe_of(load_config()).schedule.length == lib.config.DEFAULT_STEPS
    assert recipe_of(load_config("steps=300")).schedule.length == 300
    assert recipe_of(load_config("steps=300", "schedule.length=200")).schedule.length == 200
    assert recipe_of(load_config("stop=100")).schedule.length == lib.config.DEFAULT_STEPS


def test_tokens_are_rounded_up_to_whole_updates() -> None:
    small = ["batch.rows=3", "batch.length=7", "schedule.warmup=0"]
    assert run_steps(load_config("tokens=42", *small)) == 2
    assert run_steps(load_config("tokens=43", *small)) == 3
    assert run_steps(load_config("tokens=1", *small)) == 1


def test_everything_static_reaches_the_recipe() -> None:
    identity = DataIdentity(sources=(SourceIdentity(digest="d", tokens=9),))
    config = load_config("model.width=64", "batch.rows=6", "optim.lr=1", "precision.compute=bf16", "guard.window=8")
    recipe = recipe_of(config, identity)
    assert recipe.data == identity
    for name in set(get_type_hints(Recipe)) - {"data", "schedule"}:
        assert getattr(recipe, name) == getattr(config, name)
    assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe
