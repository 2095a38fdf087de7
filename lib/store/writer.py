"""Writing a checkpoint's files into a fresh folder, which others then see at once or never.

Guarantees: every file and folder is synced before COMMIT is written; equal states give equal bytes in every file (no
time, no name of a machine); what could not be read back is refused before anything is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import tensordict
import torch
from torch import Tensor

from lib.config import Recipe
from lib.errors import CheckpointError
from lib.store import disk
from lib.store.leaves import RECIPE, Leaf, array_of, dtype_name, state_path
from lib.store.manifest import (
    COMMIT,
    FORMAT,
    MANIFEST,
    METADATA,
    Array,
    Attributes,
    File,
    Manifest,
    Node,
    commit_of,
    documents,
    encode,
    encode_attributes,
)
from lib.store.shards import keys, pieces, plan

__all__ = ["check_finite", "describe_run", "write"]


def check_finite(found: Mapping[str, Leaf]) -> None:
    """Check that every parameter is finite.

    Raises:
        CheckpointError: names the first leaf that is not.
    """
    for path, leaf in found.items():
        if f"{path}/".startswith("params/") and isinstance(leaf, Tensor) and leaf.is_floating_point():
            values = leaf.detach().float() if leaf.itemsize == 1 else leaf.detach()
            # One pass without a mask: a sum is finite only if all its terms are.
            if not values.sum().isfinite() and not (finite := values.isfinite()).all():
                bad = int((~finite).sum())
                raise CheckpointError(
                    f"{state_path(path)}: {bad} of {leaf.numel()} values are not finite, parameters must be; "
                    f"go on from the last checkpoint with a lower optim.lr"
                )


def describe_run(found: Mapping[str, Leaf], info: Mapping[str, Any]) -> Attributes:
    """Gather what the root group says: format, recipe, versions, and the caller's `info`.

    Raises:
        CheckpointError: the recipe would not come back as it is.
        ValueError: `info` is no JSON.
    """
    versions = {"torch": str(torch.__version__), "tensordict": str(tensordict.__version__)}
    told = _json("info", dict(info))
    recipe = found.get(RECIPE)
    if not isinstance(recipe, Recipe):
        return Attributes(FORMAT, versions, told)
    try:
        # Written as it will be read: what was read once has the same bytes again (1 in a float field becomes 1.0).
        read = msgspec.convert(msgspec.json.decode(msgspec.json.encode(recipe)), Recipe, strict=True)
    except ValueError as error:
        raise CheckpointError(f"{state_path(RECIPE)}: must come back from JSON as it is; {error}") from None
    return Attributes(FORMAT, versions, told, msgspec.to_builtins(read))


def write(folder: Path, found: Mapping[str, Leaf], attributes: Attributes) -> None:
    """Write all files of a checkpoint, COMMIT last."""
    table = {path: _node(leaf) for path, leaf in found.items()}
    texts = {METADATA: encode_attributes(attributes), **documents(table)}
    chunks = [
        f"{path}/{key}" for path, node in table.items() if isinstance(node, Array) for _, key in keys(node.layout)
    ]
    folders = sorted({str(above) for name in [*texts, *chunks] for above in PurePosixPath(name).parents} - {"."})
    for name in folders:
        os.mkdir(folder / name)
    written = disk.write_files((folder / name, parts) for name, parts in _contents(found, table, texts))
    for name in reversed(folders):
        disk.sync(folder / name)
    files = {str(file.relative_to(folder)): File(*facts) for file, facts in written.items()}
    manifest = encode(Manifest(FORMAT, table, files))
    disk.write_files([(folder / MANIFEST, [manifest])])
    disk.write_files([(folder / COMMIT, [commit_of(manifest)])])
    disk.sync(folder)


def _node(leaf: Leaf) -> Node:
    if isinstance(leaf, Tensor):
        layout = plan(tuple(leaf.shape), leaf.itemsize)
        return Array(dtype_name(leaf), *layout)
    return "group" if leaf is None else "recipe"


def _contents(
    found: Mapping[str, Leaf], table: Mapping[str, Node], texts: Mapping[str, bytes]
) -> Iterator[tuple[str, Iterator[Any]]]:
    """Give name and pieces of each file; a leaf that has to be copied is copied when its turn comes."""
    for name, text in texts.items():
        yield name, iter([text])
    for path, leaf in found.items():
        node = table[path]
        if isinstance(leaf, Tensor) and isinstance(node, Array):
            array = array_of(leaf)
            for index, key in keys(node.layout):
                yield f"{path}/{key}", pieces(array, node.layout, index)


def _json(where: str, value: Any) -> Any:
    """Copy a JSON value into plain Python types, refusing what JSON would change or drop."""
    match value:
        case None | bool():
            return value
        case int() if -(2**63) <= value < 2**63:
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case str() if value.encode(errors="replace").decode() == value:
            return str(value)
        case list():
            return [_json(f"{where}[{i}]", element) for i, element in enumerate(value)]
        case dict() if all(isinstance(key, str) for key in value):
            return {_json(where, key): _json(f"{where}.{key}", element) for key, element in value.items()}
    raise ValueError(f"{where}={value!r} must be a JSON value (finite numbers, lists, text keys); convert it first")
