"""Trees: mapping is a functor, lists and paths round-trip, order of keys never shows."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lib.testing.strategies import trees
from lib.tree import Tree, flatten, from_leaves, leaves, plain, select, tensordict, tree_map, tree_map_named
from tests.strategies import bits, same_bits


def shuffled(tree: Tree, draw: st.DataObject) -> Tree:
    keys = draw.draw(st.permutations(sorted(tree)))
    return {key: shuffled(tree[key], draw) if isinstance(tree[key], dict) else tree[key] for key in keys}


@given(tree=trees())
def test_mapping_the_identity_changes_nothing(tree: Tree) -> None:
    assert same_bits(tree_map(lambda leaf: leaf, tree), tree)


@given(tree=trees())
def test_mapping_twice_is_mapping_the_composition(tree: Tree) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def g(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert same_bits(tree_map(f, tree_map(g, tree)), tree_map(lambda x: f(g(x)), tree))


@given(tree=trees())
def test_lists_paths_and_tensordicts_all_come_back_as_the_same_tree(tree: Tree) -> None:
    values, rebuild = flatten(tree)
    assert same_bits(rebuild(values), tree)
    assert same_bits(from_leaves(leaves(tree)), tree)
    assert same_bits(plain(tensordict(tree)), tree)
    assert list(leaves(tensordict(tree))) == list(leaves(tree))


@given(tree=trees(), data=st.data())
def test_the_order_in_which_a_tree_was_made_never_shows(tree: Tree, data: st.DataObject) -> None:
    other = shuffled(tree, data)
    assert list(bits(other)) == list(bits(tree))
    assert [v.tolist() for v in flatten(other)[0]] == [v.tolist() for v in flatten(tree)[0]]
    doubled = tree_map(torch.add, tree, other)
    assert same_bits(doubled, tree_map(lambda leaf: leaf + leaf, tree))


@given(tree=trees())
def test_named_maps_see_each_path_once_with_its_own_leaf(tree: Tree) -> None:
    seen: dict[str, torch.Tensor] = {}

    def note(path: str, leaf: torch.Tensor) -> torch.Tensor:
        assert path not in seen
        seen[path] = leaf
        return leaf

    tree_map_named(note, tree)
    assert same_bits(from_leaves(seen), tree)
    assert list(seen) == list(leaves(tree))


@given(tree=trees(), data=st.data())
def test_choosing_gives_the_bits_of_one_side_whatever_the_other_holds(tree: Tree, data: st.DataObject) -> None:
    spoil = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    spoilt = tree_map(lambda leaf: torch.full_like(leaf, spoil), tree)
    assert same_bits(select(torch.tensor(False), spoilt, tree), tree)
    assert same_bits(select(torch.tensor(True), tree, spoilt), tree)
