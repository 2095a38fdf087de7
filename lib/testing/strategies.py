"""Strategies for hypothesis: recipes, states, batches and masks small enough for hundreds of examples.

@given(data=st.data(), recipe=recipes())
def test_mine(data, recipe):
    state, (batch,) = data.draw(states(recipe)), data.draw(batches(recipe, count=1))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from lib.rates import Schedule
from lib.recipe import Batch, Guard, Loss, Model, Optim, Precision, Recipe, Scale
from lib.state import init_state
from lib.step import train_step
from lib.tree import Tree, tensordict

__all__ = [
    "arrays",
    "batches",
    "fitting",
    "lm_batch",
    "masks",
    "models",
    "optims",
    "recipes",
    "schedules",
    "states",
    "trees",
]

SEEDS = st.integers(0, 2**32 - 1)
_NAMES = st.sampled_from(["a", "b", "c", "w1", "w2"])


# Recipes --------------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn, *, dropout: bool = True, depth: int = 2) -> Model:
    """Language models of a width of 2 to 16: grouped heads or not, tied or not, inside documents or across.

    Args:
        draw: given by hypothesis.
        dropout: whether some have dropout.
        depth: most blocks.
    """
    heads, head_width = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4]))
    return Model(
        width=heads * head_width,
        depth=draw(st.integers(1, depth)),
        heads=heads,
        kv_heads=draw(st.sampled_from([None, *(n for n in (1, 2, 4) if heads % n == 0)])),
        inner=draw(st.sampled_from([None, 4])),
        vocab=draw(st.integers(2, 20)),
        dropout=draw(st.sampled_from([0.0, 0.4])) if dropout else 0.0,
        tied=draw(st.booleans()),
        documents=draw(st.booleans()),
    )


_OF_RULES: dict[str, list[dict[str, Any]]] = {
    "adamw": [{}, {"moments": "bf16"}, {"beta1": 0.0}],
    "sgd": [{}, {"momentum": 0.0}, {"nesterov": True}],
    "lion": [{}],
    "adafactor": [{}],
    "muon": [{}, {"nesterov": False}],
    "schedule_free": [{}],
}
_AVERAGES: list[dict[str, Any]] = [
    {},
    {"average": 0.0},
    {"average": 0.9},
    {"average": "uniform", "average_last": 2, "average_every": 3},
]


@st.composite
def optims(draw: st.DrawFn) -> Optim:
    """Every rule, with and without decay, clipping, averages and groups (for the parameters of the language model)."""
    rule = draw(st.sampled_from(list(_OF_RULES)))
    return Optim(
        rule=rule,  # type: ignore[arg-type]
        lr=draw(st.sampled_from([1e-3, 0.1])),
        decay=draw(st.sampled_from([0.0, 0.1])),
        clip=draw(st.sampled_from([None, 0.01, 1.0])),
        no_decay=draw(st.sampled_from([None, (), ("blocks.*",)])),
        groups=draw(st.sampled_from([(), (), ("embed.*:lr=0.5,decay=0", "blocks.ffn.norm:freeze")])),
        **draw(st.sampled_from(_OF_RULES[rule])),
        **(draw(st.sampled_from(_AVERAGES)) if rule != "schedule_free" else {}),
    )


_SHAPES: list[dict[str, Any]] = [
    {"shape": "constant"},
    {"shape": "linear"},
    {"shape": "cosine"},
    {"shape": "cosine", "cycles": 2},
    {"shape": "half_cosine"},
    {"shape": "polynomial"},
    {"shape": "exponential"},
    {"shape": "inverse_sqrt"},
    {"shape": "power"},
    {"shape": "wsd", "tail": 0.34},
    {"shape": "range"},
    {"shape": "constant", "tail": 0.34, "end": 0.0},
]
_STAGES = ("linear:1:1", "constant:2", "cosine:2:0.1")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Every shape, with and without a warm-up, over 3 to 5 updates or as many applied ones."""
    counts = draw(st.sampled_from(["step", "applied"]))
    if draw(st.integers(0, len(_SHAPES))) == len(_SHAPES):
        return Schedule(shape="stages", stages=_STAGES, counts=counts)  # type: ignore[arg-type]
    shape = draw(st.sampled_from(_SHAPES))
    least, most = {"range": (0, 0), "inverse_sqrt": (1, 2), "power": (1, 2)}.get(shape["shape"], (0, 2))
    warmup = draw(st.integers(least, most))
    return fitting(**shape, warmup=warmup, length=draw(st.integers(3, 5)), floor=0.1, counts=counts)


def fitting(*, length: int, floor: float | None = None, **settings: Any) -> Schedule:
    """A schedule with a length and a floor, where its shape has any use for them."""
    probe = Schedule(**settings)
    if probe.has_length:
        settings["length"] = length
    if probe.has_floor and floor is not None:
        settings["floor"] = floor
    return Schedule(**settings)


_GUARDS = (Guard(), Guard(window=4), Guard(window=4, sigma=0.5), Guard(window=4, sigma=0.5, spikes="count"))
_LOSSES = (Loss(), Loss(z=1e-3, smoothing=0.1), Loss(chunk=3))


@st.composite
def recipes(draw: st.DrawFn, model: st.SearchStrategy[Model] | None = None) -> Recipe:
    """Recipes of the language model: every slot with and without, every rule, dtype and shape of schedule.

    Args:
        draw: given by hypothesis.
        model: which models; none = `models(depth=1)`.
    """
    micro = draw(st.integers(1, 2))
    return Recipe(
        model=draw(models(depth=1) if model is None else model),
        batch=Batch(rows=micro * draw(st.integers(1, 2)), length=draw(st.integers(2, 6)), micro=micro),
        optim=draw(optims()),
        schedule=draw(schedules()),
        precision=Precision(compute=draw(st.sampled_from(["fp32", "bf16", "fp16"]))),
        scale=Scale(every=draw(st.sampled_from([1, 2000]))),
        loss=draw(st.sampled_from(_LOSSES)),
        guard=draw(st.sampled_from(_GUARDS)),
    )


# Batches and states ---------------------------------------------------------------------------------------------------


@st.composite
def masks(draw: st.DrawFn, micro: int, rows: int, length: int) -> Tensor:
    """Which positions are targets, [micro, rows, length] bool: unequal numbers by row, often all or none.

    Args:
        draw: given by hypothesis.
        micro: micro-batches.
        rows: rows of each.
        length: positions of a row.
    """
    count = st.one_of(st.sampled_from([length, 0]), st.integers(0, length))
    counts = torch.tensor(draw(st.lists(count, min_size=micro * rows, max_size=micro * rows)))
    mask = (torch.arange(length) < counts[:, None]).reshape(micro, rows, length)
    return mask.flip(2) if draw(st.booleans()) else mask


@st.composite
def batches(draw: st.DrawFn, recipe: Recipe, *, count: int = 2, begin: int = 0) -> list[TensorDict]:
    """Consecutive batches for a recipe of the language model, with the cursors that they bring.

    Args:
        draw: given by hypothesis.
        recipe: decides on shapes and ids.
        count: how many.
        begin: updates before the first of them.
    """
    shape = (recipe.batch.micro, recipe.batch.rows // recipe.batch.micro, recipe.batch.length)
    found = []
    for number in range(begin + 1, begin + count + 1):
        batch = lm_batch(recipe, draw(SEEDS), number=number)
        batch["mask"] = draw(masks(*shape))
        found.append(batch)
    return found


@st.composite
def states(draw: st.DrawFn, recipe: Recipe, *, updates: int = 2) -> TensorDict:
    """States of a recipe of the language model that training reaches: from a drawn seed, after none or some updates.

    Args:
        draw: given by hypothesis.
        recipe: of the state.
        updates: at most so many.
    """
    state = init_state(recipe, seed=draw(st.integers(0, 2**63 - 1)))
    for batch in draw(batches(recipe, count=draw(st.integers(0, updates)))):
        state, _ = train_step(state, batch)
    return state


def lm_batch(recipe: Recipe, seed: int = 0, *, valid: float = 0.7, number: int = 1) -> TensorDict:
    """A batch for the language model, a function of its arguments: random ids cut into documents.

    Args:
        recipe: decides on shapes and ids.
        seed: of the draws.
        valid: share of positions that are targets.
        number: updates after which its cursor stands.
    """
    draw = np.random.default_rng(seed)
    shape = (recipe.batch.micro, recipe.batch.rows // recipe.batch.micro, recipe.batch.length)
    if recipe.model is None:
        raise ValueError("recipe.model=none must be a model to make batches of ids for; give one")
    opens = draw.random(shape) < 0.2
    place = np.broadcast_to(np.arange(shape[2]), shape)
    opened = np.maximum.accumulate(np.where(opens, place, 0), axis=2)
    ids = draw.integers(0, recipe.model.vocab, (2, *shape))
    data = {
        "inputs": ids[0],
        "targets": ids[1],
        "segments": opens.cumsum(2),
        "positions": place - opened,
        "mask": draw.random(shape) < valid,
        "bytes": draw.integers(1, shape[2] + 1, shape[:2]),
    }
    cursor = {"text": {"epoch": torch.tensor(0), "row": torch.tensor(number * recipe.batch.rows)}}
    return tensordict({**{name: torch.from_numpy(np.array(value)) for name, value in data.items()}, "cursor": cursor})


# Trees ----------------------------------------------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn) -> Tensor:
    """Fp32 tensors of at most two axes of 0 to 3, of values up to 1000."""
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    value = st.floats(-1e3, 1e3, width=32)
    values = draw(st.lists(value, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def trees() -> st.SearchStrategy[Tree]:
    """Nested dicts of fp32 tensors, with at least one leaf, in any order of keys; parameters for a step of one's own."""
    branches = st.recursive(
        arrays(), lambda below: st.dictionaries(_NAMES, below, min_size=1, max_size=3), max_leaves=6
    )
    return st.dictionaries(_NAMES, branches, min_size=1, max_size=3)
