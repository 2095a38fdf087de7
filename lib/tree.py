"""Maps over trees of tensors, always by name.

A tree is a nested dict (or TensorDict) with text keys and tensor leaves. Inside the core trees are plain dicts, walked in
sorted order whatever order they were made in; TensorDict is the container at the border. A path is the keys joined with
dots, as in `blocks.attention.wq`. Non-tensor leaves (the recipe) are no part of a tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

__all__ = [
    "Tree",
    "assert_same",
    "flatten",
    "from_leaves",
    "leaves",
    "matching",
    "plain",
    "select",
    "tensordict",
    "tree_map",
    "tree_map_named",
]

Tree = dict[str, Any]


def plain(tree: Any) -> Tree:
    """Turn a TensorDict or nested mapping into nested dicts of its tensors, sorted; non-tensor leaves are left out."""
    result: Tree = {}
    for key in sorted(tree.keys()):
        value = tree.get(key)
        if isinstance(value, Tensor):
            result[key] = value
        elif isinstance(value, (dict, Mapping, TensorDict)):
            result[key] = plain(value)
    return result


def tensordict(tree: Tree) -> TensorDict:
    """Turn nested dicts into a TensorDict of batch size [], made in bulk, sorted: Dynamo guards the order of the keys."""
    return TensorDict(
        {key: tensordict(tree[key]) if isinstance(tree[key], dict) else tree[key] for key in sorted(tree)},
        batch_size=[],
    )


def leaves(tree: Any) -> dict[str, Tensor]:
    """List the leaves by dotted path, sorted.

    >>> list(leaves({"b": torch.ones(1), "a": {"y": torch.ones(1), "x": torch.ones(1)}}))
    ['a.x', 'a.y', 'b']
    """
    found: dict[str, Tensor] = {}
    _gather(plain(tree), "", found)
    return found


def flatten(tree: Tree) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Tree]]:
    """List the leaves in sorted order, with the function that builds the same tree around a list of that order."""
    named = leaves(tree)
    paths = list(named)
    return list(named.values()), lambda values: from_leaves(dict(zip(paths, values, strict=True)))


def from_leaves(named: Mapping[str, Tensor]) -> Tree:
    """Put leaves back under their dotted paths; the inverse of `leaves`.

    Raises:
        ValueError: a path is a leaf and the start of another one.
    """
    tree: Tree = {}
    for path, leaf in named.items():
        node = tree
        *above, last = path.split(".")
        for key in above:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"{path}: must not lie under a leaf; rename one of the two")
        if last in node:
            raise ValueError(f"{path}: must be one leaf, got two or a branch of the same name; rename one")
        node[last] = leaf
    return tree


def tree_map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` to the leaves that stand at the same path in each tree.

    Raises:
        ValueError: a path is in one tree and not in the other; the message names them.
    """
    for other in rest:
        assert_same(tree, other)
    return _map(f, tree, rest)


def tree_map_named(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f(path, leaf, ...)` to the leaves that stand at the same path in each tree."""
    paths = from_leaves({path: path for path in leaves(tree)})  # type: ignore[misc]
    for other in rest:
        assert_same(tree, other)
    return _map(f, paths, (tree, *rest))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def matching(patterns: tuple[str, ...], paths: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the paths that match one of the patterns (`*`, `?`, `[abc]`).

    Paths are known when a step is traced; how `fnmatch` makes a regular expression of a pattern cannot be traced.
    """
    return tuple(path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns))


def select(accept: Tensor, new: Tree, old: Tree) -> Tree:
    """Take every leaf of `new` where `accept` holds, else of `old`: chosen, not multiplied, so no NaN gets through."""
    return tree_map(lambda n, o: torch.where(accept, n, o), new, old)


def assert_same(tree: Tree, other: Tree, *, where: str = "tree") -> None:
    """Check that two trees have the same paths.

    Raises:
        ValueError: names up to eight paths that are missing or extra.
    """
    ours, theirs = set(leaves(tree)), set(leaves(other))
    if ours == theirs:
        return
    missing, extra = sorted(ours - theirs), sorted(theirs - ours)
    listed = [f"missing {path}" for path in missing] + [f"extra {path}" for path in extra]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    raise ValueError(f"{where}: {', '.join(listed[:8])}{more}; both trees must have the same paths")


def _map(f: Callable[..., Any], tree: Tree, rest: tuple[Tree, ...]) -> Tree:
    result: Tree = {}
    for key in sorted(tree):
        value = tree[key]
        others = [other[key] for other in rest]
        result[key] = _map(f, value, tuple(others)) if isinstance(value, dict) else f(value, *others)
    return result


def _gather(tree: Tree, above: str, found: dict[str, Tensor]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            _gather(value, f"{above}{key}.", found)
        else:
            found[above + key] = value
