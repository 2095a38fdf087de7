"""The state: its slots, dtypes and shapes, from a recipe or from one's own parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from lib.config import Batch, DataIdentity, Guard, Model, Optim, Recipe, Scale, SourceIdentity
from lib.optim import adamw
from lib.state import abstract_state, beginning_at, init_state, slots_of
from lib.tree import leaves, plain
from tests.strategies import SEEN, form, memory, own, refusal, same_bits, tiny

FULL = tiny(optim=Optim(average=0.9), guard=Guard(window=4))


def test_the_slots_are_those_of_the_recipe() -> None:
    always = ["cursor", "key", "optimizer", "params", "recipe", "scale", "scheduler", "step"]
    assert sorted(init_state(tiny()).keys()) == always
    assert sorted(init_state(FULL).keys()) == sorted([*always, "average", "window"])
    for recipe in (tiny(), FULL, tiny(guard=Guard(window=4)), tiny(optim=Optim(average=0.0))):
        assert {*slots_of(recipe), "recipe"} == set(init_state(recipe).keys())


def test_a_state_that_begins_at_other_parameters_has_all_that_begins_at_them() -> None:
    state, other = init_state(FULL, seed=1), init_state(FULL, seed=2)
    begun = beginning_at(state, plain(other["params"]))
    for slot in ("params", "optimizer", "average"):
        assert same_bits(begun[slot], other[slot])
    for slot in ("step", "cursor", "key", "scale", "scheduler", "window"):
        assert same_bits(begun.select(slot), state.select(slot))
    assert not same_bits(state["params"], other["params"])
    assert "missing blocks.attention.norm" in refusal(beginning_at, state, {"x": torch.ones(1)})


def test_the_cursor_begins_at_the_start_of_each_source_of_the_recipe() -> None:
    data = DataIdentity(sources=(SourceIdentity(name="b"), SourceIdentity(name="a")))
    recipe = msgspec.structs.replace(tiny(), data=data)
    want = {"cursor.a.epoch", "cursor.a.row", "cursor.b.epoch", "cursor.b.row"}
    for state in (init_state(recipe), abstract_state(recipe)):
        assert {path for path in leaves(state) if path.startswith("cursor")} == want


def test_every_leaf_has_the_dtype_of_its_slot() -> None:
    state = init_state(FULL)
    assert state.batch_size == torch.Size([])
    assert state["recipe"] is FULL
    for path, leaf in leaves(state).items():
        slot = path.split(".", maxsplit=1)[0]
        if path.startswith(("params", "average.params", "optimizer.adam.first", "optimizer.adam.second")):
            assert leaf.dtype == torch.float32, path
        elif slot in ("step", "cursor", "key") or path.endswith((".count", ".position", ".good", ".bad", ".skipped")):
            assert (leaf.dtype, leaf.shape) == (torch.int64, ()), path
    assert form(state["scale"])["scale"] == (torch.float32, ())
    assert form(state["scheduler"])["lr"] == form(state["scheduler"])["decay"] == (torch.float64, ())
    assert state["window", "loss"].shape == state["window", "norm"].shape == (4,)


def test_every_setting_shows_in_the_shapes() -> None:
    recipe = Recipe(
        model=Model(width=12, depth=3, heads=3, kv_heads=1, inner=20, vocab=300, tied=False),
        batch=Batch(rows=3, length=7),
    )
    shapes = {path: shape for path, (_, shape) in form(init_state(recipe)["params"]).items()}
    assert shapes == {
        "embed.weight": (300, 12),
        "blocks.attention.norm": (3, 12),
        "blocks.attention.wq": (3, 12, 12),
        "blocks.attention.wk": (3, 4, 12),
        "blocks.attention.wv": (3, 4, 12),
        "blocks.attention.wo": (3, 12, 12),
        "blocks.ffn.norm": (3, 12),
        "blocks.ffn.gate": (3, 20, 12),
        "blocks.ffn.up": (3, 20, 12),
        "blocks.ffn.down": (3, 12, 20),
        "norm": (12,),
        "head.weight": (300, 12),
    }


@pytest.mark.parametrize("recipe", [tiny(), FULL, tiny(model=Model(width=8, depth=1, heads=2, vocab=9, tied=False))])
def test_the_abstract_state_has_the_form_of_the_state_and_no_memory(recipe: Recipe) -> None:
    abstract = abstract_state(recipe)
    assert form(abstract) == form(init_state(recipe))
    assert abstract["recipe"] == recipe
    assert {leaf.device.type for leaf in leaves(abstract).values()} == {"meta"}


def test_a_huge_abstract_state_costs_nothing() -> None:
    recipe = Recipe(model=Model(width=16384, depth=128, heads=128))
    assert leaves(abstract_state(recipe))["params.blocks.ffn.up"].numel() > 9 * 10**10


def test_the_same_seed_gives_the_same_state_and_another_seed_other_weights() -> None:
    assert same_bits(init_state(FULL, seed=3), init_state(FULL, seed=3))
    one, other = init_state(FULL, seed=0), init_state(FULL, seed=1)
    assert one["key"].item() == 0
    assert not torch.equal(one["params", "embed", "weight"], other["params", "embed", "weight"])
    assert torch.equal(one["params", "norm"], other["params", "norm"])


def test_no_two_leaves_share_memory() -> None:
    places = memory(init_state(FULL))
    assert len(set(places)) == len(places)
    module = nn.Linear(2, 2)
    state = init_state(own(average=0.5), params=module)
    places = [*memory(state), *(p.untyped_storage().data_ptr() for p in module.parameters())]
    assert len(set(places)) == len(places)


# Own parameters -------------------------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
        self.gain = nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize("kind", ["module", "names", "nested", "tensordict"])
def test_parameters_may_be_given_in_every_form(kind: str) -> None:
    module = Pair()
    named: dict[str, Any] = dict(module.named_parameters())
    net = {"0": {"weight": named["net.0.weight"], "bias": named["net.0.bias"]}, "1": {"weight": named["net.1.weight"]}}
    nested = {"net": net, "gain": module.gain}
    given = {"module": module, "names": named, "nested": nested, "tensordict": TensorDict(nested)}[kind]
    state = init_state(own(), params=given)
    assert list(leaves(state["params"])) == ["gain", "net.0.bias", "net.0.weight", "net.1.weight"]
    assert torch.equal(state["params", "net", "0", "weight"], module.net[0].weight)
    assert not any(leaf.requires_grad for leaf in leaves(state).values())
    assert state["cursor", "batch"].item() == 0


def test_parameters_of_other_dtypes_become_fp32_masters() -> None:
    given = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2, dtype=torch.float64)}
    assert {dtype for dtype, _ in form(init_state(own(), params=given)["params"]).values()} == {torch.float32}


def test_parameters_of_any_layout_become_contiguous() -> None:
    state = init_state(own(), params={"a": torch.arange(6.0).view(2, 3).T, "b": torch.ones(1).expand(4)})
    assert state["params", "a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert all(leaf.is_contiguous() for leaf in leaves(state).values())


def test_a_state_of_ones_own_parameters_has_no_language_model() -> None:
    state = init_state(Recipe(), params={"w": torch.ones(1)})
    assert state["recipe"] == msgspec.structs.replace(Recipe(), model=None)


def test_a_rule_made_by_hand_brings_its_own_slot() -> None:
    params = {"w": torch.ones(3)}
    assert list(leaves(init_state(own(), params=params, rule=SEEN)["optimizer"])) == ["grads.w"]
    assert sorted(init_state(own(), params=params, rule=adamw())["optimizer", "adam"].keys()) == [
        "count",
        "first",
        "second",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: init_state(Recipe(model=None)),
            "recipe.model=none must be a model when params are not given; pass params=... or a recipe with a model",
        ),
        (
            lambda: abstract_state(Recipe(model=None)),
            "recipe.model=none must be a model when params are not given; pass params=... or a recipe with a model",
        ),
        (
            lambda: init_state(own(), params={}),
            "params: has no tensors, must have at least one; pass a module or a mapping of names to tensors",
        ),
        (
            lambda: init_state(own(), params=nn.ReLU()),
            "params: has no tensors, must have at least one; pass a module or a mapping of names to tensors",
        ),
        (lambda: init_state(tiny(), seed=-1), "seed=-1 must be a whole number in [0, 2**63); give one"),
        (
            lambda: init_state(tiny(optim=Optim(no_decay=("norm", "blocks.*.bias")))),
            (
                "optim.no_decay='blocks.*.bias' must match a parameter, matches none of blocks.attention.norm, "
                "blocks.attention.wk, blocks.attention.wo, blocks.attention.wq, blocks.attention.wv, blocks.ffn.down, ...; "
                "fix or drop the pattern"
            ),
        ),
        (
            lambda: init_state(tiny(), cursor={"text": {"row": torch.tensor(1, dtype=torch.int32)}}),
            "cursor: leaves are ['torch.int32'], must all be torch.int64; convert them",
        ),
        (
            lambda: init_state(own(), params={"a": torch.ones(1), "a.b": torch.ones(1)}),
            "a.b: must not lie under a leaf; rename one of the two",
        ),
    ],
    ids=range(8),
)
def test_what_makes_no_state_is_refused(make: Any, message: str) -> None:
    assert refusal(make) == message


def test_the_loss_scale_of_a_new_state() -> None:
    assert init_state(tiny())["scale", "scale"].item() == 1.0
    assert init_state(tiny(scale=Scale(initial=8.0)))["scale", "scale"].item() == 8.0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"w": torch.ones(2), "n": 3}, "params.n: is int, must be a tensor or a mapping; drop or convert it"),
        (
            {"w.a": torch.ones(1), "w": {"a": torch.zeros(1)}},
            "params.w.a: is there twice, must be one leaf; rename one",
        ),
        ({"w": torch.arange(3)}, "params.w: is torch.int64, must be real floating point; drop or convert it"),
    ],
)
def test_parameters_are_never_dropped_or_changed_in_silence(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        init_state(own(), params=params)
    assert str(caught.value) == message


def test_a_recipe_has_to_be_one() -> None:
    with pytest.raises(ValueError, match="recipe=None must be a lib.config.Recipe; make one with Recipe"):
        init_state(None)  # type: ignore[arg-type]
