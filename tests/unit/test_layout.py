"""Layouts: which rule decides, what goes along with a parameter, and rules that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lib.config import Model, Optim, Recipe
from lib.shard.layout import PRESETS, layout_of, placements
from lib.state import abstract_state, init_state
from tests.strategies import own, refusal

RECIPE = Recipe(model=Model(width=8, depth=2, heads=2, vocab=12), optim=Optim(average=0.9))
R = Replicate()


@pytest.fixture
def world() -> Iterator[None]:
    """Eight ranks of which this is one; nothing is ever sent."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@pytest.mark.usefixtures("world")
def test_fsdp_cuts_all_that_is_learnt_and_never_the_axis_of_layers() -> None:
    state, mesh = abstract_state(RECIPE), mesh_of(shard=8)
    at = placements(state, mesh, "fsdp")
    assert at["params.embed.weight"] == at["average.params.embed.weight"] == [Shard(0)]
    assert at["params.norm"] == [Shard(0)]
    assert at["params.blocks.attention.wq"] == at["optimizer.adam.second.blocks.attention.wq"] == [Shard(1)]
    assert at["params.blocks.ffn.norm"] == [Shard(1)]
    assert all(path.split(".")[0] in ("params", "optimizer", "average") for path in at)
    assert "optimizer.adam.count" not in at
    assert "average.count" not in at
    assert placements(state, mesh, "ddp") == {}


@pytest.mark.usefixtures("world")
def test_axes_that_the_mesh_does_not_have_cut_nothing_in_a_preset() -> None:
    state = abstract_state(RECIPE)
    assert placements(state, mesh_of(replicate=2, shard=4), "fsdp")["params.norm"] == [R, Shard(0)]
    assert placements(state, mesh_of(replicate=8), "fsdp") == {}


@pytest.mark.usefixtures("world")
def test_the_first_rule_that_fits_decides_and_a_dim_may_be_cut_twice() -> None:
    state, mesh = abstract_state(RECIPE), mesh_of(replicate=2, shard=4)
    rules: dict[str, Any] = {
        "embed.*": (("replicate", "shard"),),
        "*.norm": (),
        "norm": (),
        "*.w?": (None, None, "shard"),
        "*": (),
    }
    at = placements(state, mesh, rules)
    assert at["params.embed.weight"] == [Shard(0), Shard(0)]
    assert at["params.blocks.attention.wo"] == [R, Shard(2)]
    assert "params.blocks.ffn.norm" not in at
    assert "params.head.weight" not in at


@pytest.mark.usefixtures("world")
def test_what_is_shaped_otherwise_than_its_parameter_is_whole() -> None:
    recipe = own(rule="adafactor", beta1=0.9, beta2=0.95, eps=1e-8)
    state = init_state(recipe, params={"w": torch.ones(8, 4), "b": torch.ones(8)})
    at = placements(state, mesh_of(shard=8), "fsdp")
    assert at["params.w"] == at["params.b"] == [Shard(0)]
    rest = {path for path in at if path.startswith("optimizer.")}
    assert all(path.endswith(".b") for path in rest)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("zero", "layout=zero must be one of ddp, fsdp, or rules by pattern; change it"),
        (
            {"w": ("shard",), "x": (), "*": ()},
            "layout['x'] must match a parameter, matches none of b, w; fix or drop it",
        ),
        ({"w": ("tensor",), "*": ()}, "layout['w']: 'tensor' must be an axis of the mesh, ['shard']; name one"),
        ({"*": (None, "shard")}, "layout['*'] names 2 dims, b has 1, must be at most that; give b a rule of its own"),
        ({"w": ("shard", "shard"), "*": ()}, "layout['w']: 'shard' must cut one dim only; drop one"),
        ({"w": ("shard",)}, "layout: b must have a rule; add '*': () to leave the rest whole on each rank"),
    ],
    ids=["no preset", "matches nothing", "no axis", "too many dims", "twice", "no rule"],
)
def test_rules_that_do_not_fit_are_named(layout: Any, message: str) -> None:
    state = init_state(own(), params={"w": torch.ones(8, 4), "b": torch.ones(8)})
    assert refusal(placements, state, mesh_of(shard=8), layout).startswith(message)


def test_presets_are_read_only_and_named() -> None:
    assert layout_of("fsdp") is PRESETS["fsdp"]
    assert list(PRESETS) == ["ddp", "fsdp"]
