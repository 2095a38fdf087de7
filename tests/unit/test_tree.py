"""Trees: worked examples, order, and each error in full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from lib.config import Recipe
from lib.tree import assert_same, flatten, from_leaves, leaves, plain, select, tensordict, tree_map, tree_map_named
from tests.strategies import refusal, same_bits

ONE, TWO, THREE = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)


def test_plain_walks_a_tensordict_in_sorted_order_and_leaves_the_recipe_out() -> None:
    state = TensorDict({"b": {"y": TWO, "x": ONE}, "a": THREE, "recipe": NonTensorData(Recipe())}, batch_size=[])
    tree = plain(state)
    assert list(tree) == ["a", "b"]
    assert list(tree["b"]) == ["x", "y"]
    assert type(tree["b"]) is dict
    assert tree["b"]["x"] is state["b", "x"]


def test_a_tree_becomes_a_tensordict_of_no_batch_size() -> None:
    td = tensordict({"b": {"x": torch.ones(3)}, "a": torch.ones(2, 2)})
    assert td.batch_size == torch.Size([])
    assert td["b"].batch_size == torch.Size([])
    assert td["b", "x"].shape == (3,)


def test_paths_are_keys_joined_with_dots_in_the_order_of_the_keys() -> None:
    tree = {"b": ONE, "a-c": TWO, "a": {"z": THREE, "b": ONE}}
    assert list(leaves(tree)) == ["a.b", "a.z", "a-c", "b"]  # as text "a-c" would come before "a.b"
    assert leaves(tree)["a.z"] is THREE


def test_a_list_of_leaves_goes_back_where_it_came_from() -> None:
    values, rebuild = flatten({"b": TWO, "a": {"y": ONE}})
    assert values == [ONE, TWO]
    again = rebuild([value * 10 for value in values])
    assert {path: leaf.item() for path, leaf in leaves(again).items()} == {"a.y": 10.0, "b": 20.0}
    with pytest.raises(ValueError, match="zip"):
        rebuild([ONE])


def test_two_paths_cannot_be_a_leaf_and_a_branch() -> None:
    under = "a.b: must not lie under a leaf; rename one of the two"
    assert refusal(from_leaves, {"a": ONE, "a.b": ONE}) == under
    twice = "a: must be one leaf, got two or a branch of the same name; rename one"
    assert refusal(from_leaves, {"a.b": ONE, "a": ONE}) == twice


def test_maps_go_by_name_and_not_by_order() -> None:
    left = {"a": ONE, "b": {"c": TWO, "d": THREE}}
    right = {"b": {"d": THREE * 10, "c": TWO * 10}, "a": ONE * 10}
    summed = tree_map(lambda x, y: (x + y).item(), left, right)
    assert summed == {"a": 11.0, "b": {"c": 22.0, "d": 33.0}}
    named = tree_map_named(lambda path, x, y: (path, (y - x).item()), left, right)
    assert named == {"a": ("a", 9.0), "b": {"c": ("b.c", 18.0), "d": ("b.d", 27.0)}}


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ({"a": ONE, "b": ONE}, {"a": ONE}, "tree: missing b; both trees must have the same paths"),
        ({"a": ONE}, {"a": ONE, "c": ONE}, "tree: extra c; both trees must have the same paths"),
        ({"a": ONE}, {"a": {"b": ONE}}, "tree: missing a, extra a.b; both trees must have the same paths"),
        (
            {"a": {str(n): ONE for n in range(7)}},
            {"b": {str(n): ONE for n in range(7)}},
            f"tree: {', '.join(f'missing a.{n}' for n in range(7))}, extra b.0 and 6 more; both trees must have the same paths",
        ),
    ],
)
def test_trees_of_other_paths_are_refused_by_name(left: Any, right: Any, message: str) -> None:
    assert refusal(assert_same, left, right) == message
    assert refusal(tree_map, torch.add, left, right) == message
    assert refusal(tree_map_named, lambda path, x, y: x, left, right) == message
    assert refusal(select, torch.tensor(True), left, right) == message
    assert refusal(assert_same, left, right, where="batch.cursor") == message.replace("tree:", "batch.cursor:", 1)


def test_choosing_lets_no_nan_through() -> None:
    new = {"a": torch.tensor([float("nan"), 1.0]), "n": torch.tensor(7)}
    old = {"a": torch.tensor([-0.0, 2.0]), "n": torch.tensor(2**53 + 1)}
    kept = select(torch.tensor(False), new, old)
    assert same_bits({"a": kept["a"]}, {"a": old["a"]})
    assert kept["n"].item() == 2**53 + 1
    assert kept["a"].untyped_storage().data_ptr() != old["a"].untyped_storage().data_ptr()
    taken = select(torch.tensor(True), new, old)
    assert torch.isnan(taken["a"][0])
    assert taken["n"].item() == 7
