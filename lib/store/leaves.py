"""What a state is made of on disk: its nodes by path, and the dtype each leaf is stored as.

Guarantees: a path on disk names one node and no other (names that could collide, on any usual file system, are
refused); the bits of a tensor are those of its stored array. bf16 and fp8 are no Zarr dtypes: they are stored as
unsigned integers of the same width, with the logical dtype beside them. Nothing here opens a file.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.errors import CheckpointError
from lib.recipe import Recipe
from lib.tree import Tree

__all__ = [
    "RECIPE",
    "STORED",
    "Leaf",
    "array_of",
    "assemble",
    "bits_of",
    "check_names",
    "dtype_name",
    "empty",
    "nodes",
    "state_path",
    "too_large",
]

RECIPE = "recipe"

Leaf = Tensor | Recipe | None  # None = a branch

STORED: Mapping[str, tuple[torch.dtype, np.dtype[Any]]] = {
    "bool": (torch.bool, np.dtype("bool")),
    "uint8": (torch.uint8, np.dtype("u1")),
    "uint16": (torch.uint16, np.dtype("u2")),
    "uint32": (torch.uint32, np.dtype("u4")),
    "uint64": (torch.uint64, np.dtype("u8")),
    "int8": (torch.int8, np.dtype("i1")),
    "int16": (torch.int16, np.dtype("i2")),
    "int32": (torch.int32, np.dtype("i4")),
    "int64": (torch.int64, np.dtype("i8")),
    "float16": (torch.float16, np.dtype("f2")),
    "float32": (torch.float32, np.dtype("f4")),
    "float64": (torch.float64, np.dtype("f8")),
    "bfloat16": (torch.bfloat16, np.dtype("u2")),
    "float8_e4m3fn": (torch.float8_e4m3fn, np.dtype("u1")),
    "float8_e5m2": (torch.float8_e5m2, np.dtype("u1")),
}
_VIEWED: Mapping[str, torch.dtype] = {
    "bfloat16": torch.uint16,
    "float8_e4m3fn": torch.uint8,
    "float8_e5m2": torch.uint8,
}


def state_path(path: str) -> str:
    """Name a node for a person: `params/blocks/wq` on disk is `state.params.blocks.wq`."""
    return "state." + path.replace("/", ".")


def nodes(state: TensorDict, above: str = "", *, abstract: bool = False) -> dict[str, Leaf]:
    """List the nodes of a state by path, branches before what they hold, in the state's own order.

    Args:
        state: the state, or a branch of it.
        above: path of the branch, with a slash at its end.
        abstract: leaves may be meta tensors.

    Raises:
        CheckpointError: a node has no place in a checkpoint; the message names it.
    """
    found: dict[str, Leaf] = {}
    names = [str(name) for name in state.keys()]  # noqa: SIM118 (iterating a TensorDict iterates its batch)
    check_names(above, names)
    for name in names:
        path, value = f"{above}{name}", state.get(name)
        if isinstance(value, NonTensorData):
            value = value.data
        if path == RECIPE and isinstance(value, Recipe):
            found[path] = value
        elif type(value) is TensorDict:
            found[path] = None
            found.update(nodes(value, f"{path}/", abstract=abstract))
        else:
            _check_tensor(path, value, abstract)
            found[path] = value
    if state.batch_size:
        where = state_path(above.rstrip("/")).rstrip(".")
        raise CheckpointError(f"{where}: batch_size={list(state.batch_size)} must be []; set it before saving")
    return found


def assemble(found: Mapping[str, Leaf]) -> TensorDict:
    """Put nodes back together; the inverse of `nodes`. Branches that are not named are made."""
    tree: Tree = {}
    for path, value in found.items():
        *above, name = path.split("/")
        branch = tree
        for step in above:
            branch = branch.setdefault(step, {})
        if value is None:
            branch.setdefault(name, {})
        else:
            branch[name] = NonTensorData(value) if isinstance(value, Recipe) else value
    return _in_order(tree)


def _in_order(tree: Tree) -> TensorDict:
    """Like `lib.tree.tensordict`, but in the order that was stored: what was compiled for the state fits what is loaded."""
    return TensorDict({name: _in_order(v) if isinstance(v, dict) else v for name, v in tree.items()}, batch_size=[])


def array_of(tensor: Tensor) -> NDArray[Any]:
    """View a tensor as the array that is stored: no copy when it is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_neg().contiguous()
    viewed = _VIEWED.get(dtype_name(plain))
    array: NDArray[Any] = (plain if viewed is None else plain.view(viewed)).numpy()
    return array


def bits_of(tensor: Tensor) -> NDArray[np.uint8]:
    """View a tensor as the bytes that are stored."""
    return array_of(tensor).reshape(-1).view(np.uint8)


def empty(dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Make a tensor to be filled."""
    return torch.empty(shape, dtype=STORED[dtype][0])


def check_names(above: str, names: Iterable[str]) -> None:
    """Check that siblings can be told apart on any disk.

    Args:
        above: path of the branch they are in, with a slash at its end; "" for the root.
        names: the siblings.

    Raises:
        CheckpointError: names the first that has no place in a checkpoint.
    """
    where, names = state_path(above).rstrip("./"), list(names)
    for name in names:
        if reason := _bad_name(name, at_root=not above):
            raise CheckpointError(f"{where}: the name {name!r} {reason}; rename it")
    if twins := _first_twins(names):
        raise CheckpointError(f"{where}: the names {twins[0]!r} and {twins[1]!r} are one on some disks; rename one")


def too_large(shape: tuple[int, ...], itemsize: int) -> bool:
    """Say whether an array has more bytes than can be counted, not counting its empty dims."""
    return math.prod(max(1, n) for n in shape) * itemsize >= 2**63


def dtype_name(tensor: Tensor) -> str:
    """Name a dtype: `bfloat16`."""
    return str(tensor.dtype).removeprefix("torch.")


def _bad_name(name: str, *, at_root: bool) -> str | None:
    """Say why a name has no place in a checkpoint; None when it has."""
    if not name or set(name) == {"."}:
        return "is empty or only dots"
    if "/" in name or "\\" in name or any(unicodedata.category(c) in ("Cc", "Cs") for c in name):
        return "has a slash, a control character or half a surrogate pair"
    if name.startswith("__"):
        return "starts with '__', which Zarr keeps for itself"
    if len(name.encode()) > 255:
        return "is longer than 255 bytes"
    if name.casefold() in (("zarr.json", "manifest.json", "commit") if at_root else ("zarr.json",)):
        return "is the name of a file of the checkpoint"
    return None


def _first_twins(names: Iterable[str]) -> tuple[str, str] | None:
    """Find two names that are one file where case or the form of accents does not count."""
    seen: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", name.casefold())
        if folded in seen:
            return seen[folded], name
        seen[folded] = name
    return None


def _check_tensor(path: str, value: Any, abstract: bool) -> None:
    where = state_path(path)
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise CheckpointError(f"{where}: a {kind} must be a tensor (only the recipe is none); make it one or drop it")
    known = isinstance(value, DTensor) or not (value.is_nested or hasattr(value, "__tensor_flatten__"))
    plain = known and value.layout == torch.strided and (abstract or not value.is_meta)
    if not plain or too_large(value.shape, value.itemsize):
        raise CheckpointError(f"{where}: must be a plain dense tensor with data; make it one or drop it")
    if (dtype := dtype_name(value)) not in STORED:
        raise CheckpointError(f"{where}: dtype={dtype} must be one of {', '.join(STORED)}; convert it or drop it")
