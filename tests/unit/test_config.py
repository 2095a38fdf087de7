"""Configs: unknown keys, values and what is no value, layers, and the recipe that comes of them."""

from __future__ import annotations

import json
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
from tests.strategies import nested, refusal

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
