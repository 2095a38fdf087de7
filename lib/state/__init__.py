"""The state of training: one value that holds everything that decides the future of a run.

A nested TensorDict of batch size [], one slot for each file of this folder. A slot speaks two words, `init` and `update`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lib.module import trainable
from lib.optim import Rule, rule_of
from lib.optim.named import check_patterns
from lib.recipe import Recipe
from lib.state import average, cursor, key, params, scale, schedule, window
from lib.tree import Tree, assert_same, from_leaves, plain, tensordict, tree_map

__all__ = ["abstract_state", "beginning_at", "init_state", "slots_of"]


def init_state(
    recipe: Recipe,
    *,
    seed: int = 0,
    params: nn.Module | Mapping[str, Any] | TensorDict | None = None,
    cursor: Mapping[str, Any] | None = None,
    rule: Rule | None = None,
) -> TensorDict:
    """Make the state of step 0.

    Args:
        recipe: static choices.
        seed: root of all randomness, in [0, 2**63).
        params: a module, or a tree of tensors, whose values to start from (copied, in fp32); none = the recipe's language
            model, drawn from the seed.
        cursor: where the data stands; none = the start.
        rule: optimizer made by hand; none = the recipe's. Give the same one to `make_train_step`.

    Returns:
        TensorDict with `step params optimizer scheduler cursor scale key recipe`, and by recipe `average` and `window`.

    Raises:
        ValueError: the recipe has no model and no `params` are given, or a setting fits no parameter.

    >>> from lib.config import Model
    >>> state = init_state(Recipe(model=Model(width=8, depth=1, heads=1, vocab=16)))
    >>> state["params", "embed", "weight"].shape
    torch.Size([16, 8])
    """
    tree = _slots(recipe, seed, params, cursor, rule, None)
    return _with_recipe(tree, recipe if params is None else _own(recipe))


def beginning_at(state: TensorDict, weights: Tree) -> TensorDict:
    """The same state of step 0 with other parameters: what begins at the parameters begins at these.

    Args:
        state: of `init_state`, with the recipe's own rule.
        weights: of the same paths, shapes and dtypes as its parameters.
    """
    recipe, begun = state["recipe"], state.clone(recurse=False)
    assert_same(plain(state["params"]), weights, where="params")
    begun["params"] = tensordict(weights)
    begun["optimizer"] = tensordict(rule_of(recipe).init(weights))
    if recipe.optim.average is not None:
        begun["average"] = tensordict(average.init(weights, recipe.optim))
    return begun


def abstract_state(recipe: Recipe) -> TensorDict:
    """The state's shapes and dtypes without its values, as meta tensors: what a checkpoint must hold, at no memory."""
    tree = _slots(recipe, 0, None, None, None, torch.device("meta"))
    return _with_recipe(tree_map(lambda leaf: leaf.to("meta"), tree), recipe)


def slots_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the slots a state of `recipe` has, the recipe's own leaf left out."""
    always = ("step", "params", "optimizer", "scheduler", "cursor", "scale", "key")
    return always + ("average",) * (recipe.optim.average is not None) + ("window",) * (recipe.guard.window > 0)


def _slots(recipe: Recipe, seed: int, given: Any, at: Any, rule: Rule | None, device: torch.device | None) -> Tree:
    own = given is not None
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe={recipe!r} must be a lib.config.Recipe; make one with Recipe(...)")
    if not own and recipe.model is None:
        raise ValueError(
            "recipe.model=none must be a model when params are not given; pass params=... or a recipe with a model"
        )
    root = key.init(seed)
    weights = _copied(given) if own else params.init(recipe.model, root, device=device)  # type: ignore[arg-type]
    used = _own(recipe) if own else recipe
    check_patterns(used, weights)
    if rule is not None and recipe.optim.groups:
        raise ValueError(
            f"optim.groups={list(recipe.optim.groups)} must not go with a rule of your own; use lib.optim.scaled and partition"
        )
    tree: Tree = {
        "step": torch.zeros((), dtype=torch.int64),
        "params": weights,
        "optimizer": (rule or rule_of(used)).init(weights),
        "scheduler": schedule.init(recipe.optim),
        "cursor": cursor.init(at, own=own, sources=[source.name for source in recipe.data.sources]),
        "scale": scale.init(recipe),
        "key": root,
    }
    if recipe.optim.average is not None:
        tree["average"] = average.init(weights, recipe.optim)
    if recipe.guard.window:
        tree["window"] = window.init(recipe.guard)
    return tree


def _copied(given: nn.Module | Mapping[str, Any] | TensorDict) -> Tree:
    """Fp32 copies of the given parameters; a tied parameter of a module is one leaf, under its first name."""
    named = trainable(given) if isinstance(given, nn.Module) else dict(_named(given))
    if not named:
        raise ValueError(
            "params: has no tensors, must have at least one; pass a module or a mapping of names to tensors"
        )
    return tree_map(lambda leaf: leaf.detach().to(torch.float32, copy=True).contiguous(), from_leaves(named))


def _named(tree: Any, above: str = "") -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for name in tree.keys():  # noqa: SIM118 (a TensorDict iterates over its batch)
        value, path = tree.get(name), f"{above}{name}"
        inner = [(path, value)] if isinstance(value, Tensor) else None
        if inner is None and not isinstance(value, (Mapping, TensorDict)):
            raise ValueError(
                f"params.{path}: is {type(value).__name__}, must be a tensor or a mapping; drop or convert it"
            )
        for place, leaf in inner or _named(value, f"{path}."):
            if place in seen:
                raise ValueError(f"params.{place}: is there twice, must be one leaf; rename one")
            if not leaf.is_floating_point():
                raise ValueError(f"params.{place}: is {leaf.dtype}, must be real floating point; drop or convert it")
            seen.add(place)
            yield place, leaf


def _own(recipe: Recipe) -> Recipe:
    return msgspec.structs.replace(recipe, model=None)


def _with_recipe(tree: Tree, recipe: Recipe) -> TensorDict:
    state = tensordict(tree)
    state.set_non_tensor("recipe", recipe)
    return state
