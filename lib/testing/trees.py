"""Trees seen from outside: their bits, forms and memory, how two differ, and the same tree made anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from tensordict import TensorDict
from torch import Tensor

from lib.recipe import Recipe
from lib.tree import from_leaves, leaves

__all__ = ["bits", "difference", "extras", "forms", "from_bytes", "memory", "rebuilt_like", "snapshot"]


def bits(leaf: Tensor) -> Tensor:
    """The bytes of a leaf; NaN is itself, and -0.0 is not 0.0."""
    return leaf.detach().contiguous().reshape(-1).view(torch.uint8)


def snapshot(tree: Any) -> dict[str, Tensor]:
    """Copies of the leaves by path."""
    return {path: leaf.detach().clone() for path, leaf in leaves(tree).items()}


def forms(tree: Any) -> dict[str, str]:
    """Dtype, shape and device of each leaf, in words."""
    return {path: f"{str(x.dtype)[6:]}{list(x.shape)} on {x.device}" for path, x in leaves(tree).items()}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """The first leaf in which two trees differ, in words; none where all bits are the same."""
    for path in sorted({*one, *other}):
        if path not in one or path not in other:
            return f"{path} is only in one of the two"
        a, b = one[path], other[path]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{path} is {forms({'x': a})['x']} and {forms({'x': b})['x']}"
        apart = (bits(a) != bits(b)).nonzero()
        if apart.numel():
            at = int(apart[0]) // a.element_size()
            place = "" if a.ndim == 0 else f" at {[int(n) for n in torch.unravel_index(torch.tensor(at), a.shape)]}"
            return f"{path} differs{place}: {a.reshape(-1)[at].item()!r} and {b.reshape(-1)[at].item()!r}"
    return None


def memory(tree: Any) -> dict[int, str]:
    """Where the leaves' storages lie; of two leaves in one storage the last."""
    return {leaf.untyped_storage().data_ptr(): path for path, leaf in leaves(tree).items() if leaf.numel()}


def extras(tree: Any, at: str = "") -> dict[str, Any]:
    """What a tree holds beside tensors, by path."""
    found: dict[str, Any] = {}
    for key in tree.keys():  # noqa: SIM118 (a TensorDict iterates over its batch)
        value = tree[key]
        if isinstance(value, (TensorDict, Mapping)):
            found |= extras(value, f"{at}{key}.")
        elif not isinstance(value, Tensor):
            found[f"{at}{key}"] = value
    return found


def rebuilt_like(tree: Any, named: Mapping[str, Tensor], others: Mapping[str, Any]) -> Any:
    """A tree of the same kind and form, with other leaves; empty branches stay."""
    nested = _with_branches(tree, from_leaves(named))
    if not isinstance(tree, TensorDict):
        for path, value in others.items():
            *above, last = path.split(".")
            node = nested
            for key in above:
                node = node.setdefault(key, {})
            node[last] = value
        return nested
    fresh = _in_order(nested)
    for path, value in others.items():
        fresh.set_non_tensor(tuple(path.split(".")), value)
    return fresh


def from_bytes(tree: Any) -> Any:
    """The same tree made of nothing but what a checkpoint holds: the bytes of its leaves, and the recipe as JSON.

    Raises:
        ValueError: it holds something else.
    """
    others: dict[str, Any] = {}
    for path, value in extras(tree).items():
        if not isinstance(value, Recipe):
            raise ValueError(f"{path} is a {type(value).__name__}, which no checkpoint holds")
        others[path] = msgspec.json.decode(msgspec.json.encode(value), type=Recipe)
    named = {
        path: bits(leaf).clone().view(leaf.dtype).reshape(leaf.shape) if leaf.numel() else torch.empty_like(leaf)
        for path, leaf in leaves(tree).items()
    }
    return rebuilt_like(tree, named, others)


def _in_order(nested: Mapping[str, Any]) -> TensorDict:
    return TensorDict(
        {key: _in_order(value) if isinstance(value, dict) else value for key, value in nested.items()}, batch_size=[]
    )


def _with_branches(tree: Any, made: dict[str, Any]) -> dict[str, Any]:
    """With empty branches, and keys in the order of the tree, which compiled code is guarded by."""
    ordered: dict[str, Any] = {}
    for key in tree.keys():  # noqa: SIM118
        value = tree[key]
        if isinstance(value, (TensorDict, Mapping)):
            ordered[key] = _with_branches(value, made.get(key, {}))
        elif key in made:
            ordered[key] = made[key]
    return ordered
