"""Texts into typed values: files of each kind, what they may hold, and each error in full."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct

from lib.config import Config, load_config
from lib.settings import as_struct, check_ranges, field_paths, layered, parse_text, type_name
from tests.strategies import refusal


class Inner(Struct, frozen=True):
    count: int = 1
    share: float | None = None


class Outer(Struct, frozen=True):
    inner: Inner = Inner(count=2)
    name: str = "n"
    kinds: tuple[str, ...] | None = None


def test_paths_of_a_struct_are_dotted_and_in_order() -> None:
    assert list(field_paths(Outer)) == ["inner.count", "inner.share", "name", "kinds"]


def test_a_section_given_in_part_keeps_the_rest_of_its_own_default() -> None:
    # `Outer` has another default for `inner.count` than `Inner` has
    assert as_struct(Outer, {"inner": {"share": 1}}).inner == Inner(count=2, share=1.0)
    assert as_struct(Outer, layered(Outer, [{"inner": {"count": 5}}, "~inner.count"])).inner == Inner(count=2)


def test_types_are_named_in_plain_words() -> None:
    assert type_name(int) == "a whole number"
    assert type_name(float | None) == "a number or none"
    assert type_name(bool) == "true or false"
    assert type_name(str | tuple[str, ...]) == "text or list of texts"
    assert type_name(Literal["a", "b"]) == "one of a, b"


def test_ranges_are_checked_with_their_place() -> None:
    class Bounded(Struct, frozen=True):
        low: Annotated[int, Meta(ge=0, le=3)] = 0
        none: Annotated[float, Meta(gt=0)] | None = None

    check_ranges(Bounded(), "x.")
    check_ranges(Bounded(low=3, none=0.1), "x.")
    assert refusal(check_ranges, Bounded(low=4), "x.") == "x.low=4 must be >= 0 and <= 3; give one in range"
    assert refusal(check_ranges, Bounded(none=0.0), "x.") == "x.none=0.0 must be > 0; give one in range"
    assert refusal(check_ranges, Bounded(none=float("nan")), "x.") == "x.none=nan must be a finite number; give one"


def test_an_empty_file_changes_nothing_where_the_form_allows_it(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yml", "c.toml"):
        (tmp_path / name).write_text("")
        assert load_config(tmp_path / name) == Config()
    (tmp_path / "d.yaml").write_text("# only a comment\n")
    assert load_config(tmp_path / "d.yaml") == Config()


@pytest.mark.parametrize("text", ["none", "null", "~", ""])
def test_yaml_says_none_in_four_ways(text: str) -> None:
    table = parse_text(f"optim:\n  clip: {text}\n", ".yaml", "c.yaml")
    assert load_config(table).optim.clip is None


def test_none_in_a_file_that_has_no_none_is_the_word(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[optim]\nclip = "none"\n[sample]\nprompt = "none"\n')
    config = load_config(tmp_path / "c.toml")
    assert config.optim.clip is None
    assert config.sample.prompt == "none"
    assert load_config({"optim": {"clip": "null"}}).optim.clip is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.ini", "a=1", "suffix='.ini' must be .toml, .yaml, .yml or .json; rename the file"),
        ("c", "a=1", "suffix='' must be .toml, .yaml, .yml or .json; rename the file"),
        ("c.toml", "a = ", "must parse as toml, Invalid value (at end of document); fix the file"),
        ("c.toml", "a = 1\na = 2", "must parse as toml, Cannot overwrite a value (at end of document); fix the file"),
        ("c.json", '{"a": x}', "must parse as json, Expecting value: line 1 column 7 (char 6); fix the file"),
        ("c.json", "", "must parse as json, Expecting value: line 1 column 1 (char 0); fix the file"),
        ("c.json", "[1]", "top level is list, must be a table of keys; write `key: value` lines"),
        ("c.yaml", "- a", "top level is list, must be a table of keys; write `key: value` lines"),
        ("c.yaml", "words", "top level is _Text, must be a table of keys; write `key: value` lines"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_named_with_its_fault(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert refusal(load_config, file) == f"{file}: {message}"


def test_a_yaml_mistake_keeps_its_place_on_one_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n\tlr: 1\n")
    message = refusal(load_config, file)
    assert message.startswith(f"{file}: must parse as yaml, ")
    assert "line 2, column 1" in message


def test_yaml_runs_no_code_and_makes_no_objects(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"run:\n  dir: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    assert refusal(load_config, file).startswith("run.dir=['")
    assert not (tmp_path / "made").exists()


def test_a_file_that_cannot_be_read_is_named_with_the_cause(tmp_path: Path) -> None:
    gone = tmp_path / "gone.toml"
    fix = "must be a readable config file; give the path of one"
    assert refusal(load_config, gone) == f"{gone}: No such file or directory, {fix}"
    (tmp_path / "d.toml").mkdir()
    assert refusal(load_config, tmp_path / "d.toml") == f"{tmp_path / 'd.toml'}: Is a directory, {fix}"
    (tmp_path / "b.toml").write_bytes(b"a = '\xff'")
    assert refusal(load_config, tmp_path / "b.toml") == f"{tmp_path / 'b.toml'}: is not UTF-8 text, {fix}"


@pytest.mark.parametrize("layer", [5, None, 1.5, object])
def test_a_layer_of_no_known_form_is_refused(layer: object) -> None:
    message = f"config layer={layer!r} must be a mapping, a `key=value` text or a path; convert it"
    assert refusal(load_config, layer) == message


@pytest.mark.parametrize(("value", "shown"), [(None, "None"), ([1], "[1]"), ("x", "x")])
def test_a_section_must_be_a_table(value: object, shown: str) -> None:
    message = f"optim={shown} must be a section of keys; write optim.rule=... or another key of it"
    assert refusal(load_config, {"optim": value}) == message
