"""Loading what is expected: like another state, under other names, in part; everything that differs is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from lib.config import Model, Recipe
from lib.state import abstract_state, init_state
from lib.store import load, save
from lib.store.bucket import Bucket, bucket_of
from lib.store.checkpoint import has_recipe, resolve
from lib.store.folder import at_step, step_name
from tests.checkpoints import assert_same, bits, example, flip, refused, td
from tests.strategies import refusal

FIX = "take a checkpoint of the same model, or name what to read with keys and rename"
RECIPE = Recipe(model=Model(width=16, depth=2, heads=2))


def test_a_state_is_loaded_like_its_abstract_one(tmp_path: Path) -> None:
    state = init_state(RECIPE)
    path = save(tmp_path / "a", state)
    assert_same(load(path, like=abstract_state(RECIPE)), state)
    assert_same(load(path, like=state), state)
    assert_same(load(path, like=state, keys=["params", "step"]), td(params=state["params"], step=state["step"]))


def test_all_differences_are_listed_and_nothing_is_cast(tmp_path: Path) -> None:
    state = td(
        a=torch.ones(3), b=torch.ones(2, 2), c=torch.ones(1, dtype=torch.float64), inner=td(d=torch.tensor(True))
    )
    path = save(tmp_path / "a", state)
    like = td(
        a=torch.ones(4),
        b=torch.ones(2, 2).bfloat16(),
        c=torch.ones(1, dtype=torch.float64),
        inner=td(e=torch.tensor(1)),
    )
    like.set("recipe", NonTensorData(Recipe()))
    assert refused(lambda: load(path, like=like)) == (
        f"{path}: missing state.inner.e (int64 ()); missing state.recipe (a recipe); extra state.inner.d (bool ()); "
        f"state.a: is float32 (3,), must be float32 (4,); state.b: is float32 (2, 2), must be bfloat16 (2, 2); {FIX}"
    )
    many = td(**{f"x{number:02}": torch.tensor(0) for number in range(40)})
    message = refused(lambda: load(path, like=many))
    assert message.count("missing state.x") == 20
    assert message.endswith(f" and 24 more; {FIX}")


def test_a_part_is_compared_with_the_same_part(tmp_path: Path) -> None:
    path = save(tmp_path / "a", td(params=td(w=torch.ones(2)), other=torch.ones(1)))
    like = td(params=td(w=torch.zeros(2)), optimizer=td(x=torch.zeros(1)))
    assert_same(load(path, keys=["params"], like=like), td(params=td(w=torch.ones(2))))
    assert like["params", "w"].sum() == 0
    assert "state.optimiser is not in this checkpoint" in refused(lambda: load(path, keys=["optimiser"], like=like))


def test_leaves_and_branches_can_have_other_names(tmp_path: Path) -> None:
    state = td(params=td(body=td(w=torch.ones(2), v=torch.zeros(1)), head=torch.ones(3)), step=torch.tensor(1))
    path = save(tmp_path / "a", state)
    body = state["params", "body"]
    renamed = load(path, rename={"params.body": "params.blocks", "params.body.v": "bias", "step": "old/step"})
    assert sorted(renamed.keys(include_nested=True, leaves_only=True), key=str) == [
        ("old", "step"),
        ("params", "blocks", "w"),
        ("params", "head"),
        "bias",
    ]
    assert bits(renamed["params", "blocks", "w"]) == bits(body["w"])
    assert bits(renamed["bias"]) == bits(body["v"])
    like = td(params=td(blocks=td(w=torch.zeros(2))))
    part = load(path, rename={"params.body": "params.blocks"}, keys=["params.blocks.w"], like=like)
    assert bits(part["params", "blocks", "w"]) == bits(body["w"])
    assert refusal(lambda: load(path, rename={"params.bdy": "x"})) == (
        f"rename: state.params.bdy is not in {path}, must be; see describe(path) for what is"
    )
    assert refusal(lambda: load(path, rename={"params.body.w": "params.head"})) == (
        "rename: state.params.body.w and state.params.head would both be state.params.head, must differ; change one"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": {"params.*": []}}, "layout: given without a mesh, must go with one; pass mesh=..."),
        ({"like": 3}, "like: a int must be a TensorDict; make it one with lib.tree.tensordict"),
        ({"rename": ["a"]}, "rename: a list must be a mapping {stored: wanted}; make it one"),
        ({"rename": {"step": ""}}, "rename: 'step' -> '' must be two names; correct it"),
        ({"keys": "params"}, "keys='params' must be a list of names; write keys=['params']"),
        ({"keys": [3]}, "keys: 3 must be the name of a leaf or branch; give text"),
        ({"mesh": "cpu"}, "mesh: a str must be a DeviceMesh; make one with torch.distributed.device_mesh"),
    ],
)
def test_arguments_of_other_kinds_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    path = save(tmp_path / "a", example())
    assert refusal(lambda: load(path, **arguments)) == message


@pytest.mark.parametrize(
    ("rename", "lost"),
    [
        ({"x": "g"}, "state.x would be state.g, and state.g lie there or below"),
        ({"x": "g.p.z"}, "state.g.p would be state.g.p, and state.x lie there or below"),
        ({"g": "x"}, "state.x would be state.x, and state.g lie there or below"),
        ({"e": "x"}, "state.x would be state.x, and state.e lie there or below"),
        ({"x": "e"}, "state.x would be state.e, and state.e lie there or below"),
        ({"e": "g.p"}, "state.g.p would be state.g.p, and state.e lie there or below"),
        ({"g.p": "x.q"}, "state.x would be state.x, and state.g.p lie there or below"),
    ],
)
def test_no_name_loses_a_leaf(tmp_path: Path, rename: dict[str, str], lost: str) -> None:
    path = save(tmp_path / "a", td(x=torch.ones(1), g=td(p=torch.ones(2)), e=td()))
    assert refusal(lambda: load(path, rename=rename)) == f"rename: {lost}, must not; change one"


def test_a_name_with_a_dot_is_meant_before_a_path_in_keys_and_rename(tmp_path: Path) -> None:
    path = save(tmp_path / "a", td(**{"a.b": torch.ones(1), "a": td(b=torch.zeros(2))}))
    assert list(load(path, keys=["a.b"]).keys()) == ["a.b"]
    assert sorted(load(path, rename={"a.b": "z"}).keys()) == ["a", "z"]
    assert load(path, rename={"a/b": "z"})["z"].shape == (2,)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    state = td(x=torch.ones(1))
    assert save(f"file://{tmp_path}/new/a", state) == tmp_path / "new" / "a"
    assert_same(load(f"local://{tmp_path}/new/a"), state)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: save(p, example(), info=5), "info: a int must be a mapping of texts to JSON values; make it one"),
        (lambda p: save(p, example(), ranks=3), "ranks: a int must be made by lib.store.ranks.over; make it so"),
        (lambda p: save("dir::memory://a", example()),
         "dir::memory://a: one URL within another, must be one alone; name the place itself"),
    ],
)  # fmt: skip
def test_arguments_of_a_save_of_other_kinds_are_refused(tmp_path: Path, act: Any, message: str) -> None:
    assert refusal(lambda: act(tmp_path / "a")) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [3, None, b"a", ""])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    for act in (load, resolve, lambda place: save(place, example())):
        assert refusal(lambda act=act: act(path)) == (
            f"path: {path!r} must be a path, a URL or a lib.store.place.Place; give one"
        )


def test_a_step_is_found_by_its_number(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        save(tmp_path / step_name(step), td(step=torch.tensor(step)))
    assert at_step(tmp_path, 2) == tmp_path / step_name(2)
    assert refused(lambda: at_step(tmp_path, 3)) == (
        f"{tmp_path}: no checkpoint of step 3 is there, must be one of 1, 2, 30; name one of them"
    )


def test_a_damaged_checkpoint_of_a_run_names_the_nearest_good_one_an_older_one_first(tmp_path: Path) -> None:
    places = {step: save(tmp_path / step_name(step), td(step=torch.tensor(step))) for step in (1, 2, 3, 30)}

    def nearest(step: int) -> str:
        return refused(lambda: load(places[step])).rpartition("; ")[2]

    flip(places[2] / "step/c")
    assert nearest(2) == f"the nearest good one is {places[1]}"
    flip(places[30] / "step/c")
    assert nearest(30) == f"the nearest good one is {places[3]}, load=older takes it"
    flip(places[1] / "step/c")
    assert nearest(2) == f"the nearest good one is {places[3]}"
    flip(places[3] / "step/c")
    assert nearest(2) == "no other checkpoint here verifies, so start anew in another run.dir"
    assert nearest(30) == "no older checkpoint here verifies, so start anew in another run.dir"
    # What is asked for wrongly is no damage.
    assert "nearest" not in refused(lambda: load(save(tmp_path / step_name(40), td(x=torch.ones(1))), keys=["y"]))


def test_what_holds_a_recipe_says_so(tmp_path: Path) -> None:
    assert has_recipe(save(tmp_path / "a", example()))
    assert not has_recipe(save(tmp_path / "b", td(x=torch.ones(1))))


def test_an_empty_folder_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "a", td(x=torch.ones(1)))
    (path / "x" / "more").mkdir()
    assert "x/more/ (state.x) is unexpected" in refused(lambda: load(path))


def test_a_checkpoint_in_memory_is_one_in_a_bucket() -> None:
    state = td(params=td(w=torch.randn(3)), step=torch.tensor(5))
    place = bucket_of("memory://run/checkpoints")
    assert isinstance(place, Bucket)
    where = save("memory://run/checkpoints/step_0000000005", state)
    assert where == f"memory://run/checkpoints/{step_name(5)}" == resolve("memory://run")
    assert_same(load("memory://run"), state)
    assert isinstance(load(place), TensorDict)
    place.discard()
    assert "must be a folder that is there" in refused(lambda: load("memory://run/checkpoints"))
