"""Writing a checkpoint's files, by one rank or by several together, which others then see at once or never.

Guarantees: every file has one writer, and a rank writes what it holds itself as far as can be; every file is safe before
COMMIT is written; equal states cut alike give equal bytes in every file (no time, no name of a machine); what could not be
read back is refused before anything is written; if one rank fails, all do, and there is no checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tensordict
import torch

from lib.errors import CheckpointError
from lib.recipe import Recipe
from lib.store.exchange import Found, Received, agree, check_complete, exchange, part_of
from lib.store.grid import Share, deal
from lib.store.leaves import RECIPE, STORED, array_of, state_path
from lib.store.manifest import (
    FORMAT,
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
    file_of,
)
from lib.store.place import Draft, Place
from lib.store.ranks import Ranks, together
from lib.store.sharded import Held
from lib.store.shards import crc32c, file_box, file_size, inside, pieces, plan

__all__ = ["check_finite", "describe_run", "write"]


def check_finite(found: Found) -> None:
    """Check that every parameter is finite, as far as it is here.

    Raises:
        CheckpointError: names the first leaf that is not.
    """
    for path, leaf in found.items():
        if f"{path}/".startswith("params/") and isinstance(leaf, Held) and leaf.local.is_floating_point():
            values = leaf.local.detach().float() if leaf.local.itemsize == 1 else leaf.local.detach()
            # One pass without a mask: a sum is finite only if all its terms are.
            if not values.sum().isfinite() and not (finite := values.isfinite()).all():
                bad = int((~finite).sum())
                raise CheckpointError(
                    f"{state_path(path)}: {bad} of {values.numel()} values are not finite, parameters must be; "
                    f"go on from the last checkpoint with a lower optim.lr"
                )


def describe_run(found: Mapping[str, Any], info: Mapping[str, Any]) -> Attributes:
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


def write(
    target: Place, found: Found, attributes: Attributes, ranks: Ranks, explain: Callable[[OSError], Exception]
) -> None:
    """Write all files of a checkpoint, COMMIT last. Called on all ranks, with the same leaves in the same order.

    Args:
        target: where it is to be.
        found: the state as this rank holds it.
        attributes: what the root group is to say.
        ranks: those who write it.
        explain: turns what a disk refuses into what is told of it.

    Raises:
        CheckpointError: the ranks do not save one state, or one of them failed; there is no checkpoint then.
    """
    check_complete(found, ranks)
    table = {path: _node(leaf) for path, leaf in found.items()}
    arrays = {path: leaf for path, leaf in found.items() if isinstance(leaf, Held)}
    layouts = [(_array(table[path]).layout, leaf.local.itemsize, leaf.grid) for path, leaf in arrays.items()]
    shares = dict(zip(arrays, deal(layouts, ranks.size), strict=True))
    if ranks.size > 1:
        agree(f"{target}", table, attributes, arrays, ranks)
    received = exchange(arrays, shares, ranks)
    mine = [
        _File(path, leaf, _array(table[path]), share)
        for path, leaf in arrays.items()
        for share in shares[path]
        if share.writer == ranks.rank
    ]
    root, texts = encode_attributes(attributes), documents(table)
    folders = _folders([*texts, *(f"{path}/{share.key}" for path in shares for share in shares[path])])
    with ExitStack() as stack:
        drafts: list[Draft] = []

        def begin() -> bytes:
            if ranks.rank:
                return b""
            drafts.append(stack.enter_context(target.begin()))
            drafts[0].make(folders)
            drafts[0].write([(METADATA, [(root,)])])  # before all others: by it is seen whose the rest is
            return drafts[0].token.encode()

        token = together(ranks, begin, explain)[0].decode()
        draft = drafts[0] if drafts else target.join(token)

        def put() -> bytes:
            sums: dict[str, File] = {}
            few = [(name, [(text,)]) for name, text in texts.items()] if ranks.rank == 0 else []
            draft.write([*few, *((file.name, _bytes(file, received, sums)) for file in mine)])
            return msgspec.json.encode(sums)

        files = {name: file_of(len(text), [crc32c(text)]) for name, text in ((METADATA, root), *texts.items())}
        for told in together(ranks, put, explain):
            files |= msgspec.json.decode(told, type=dict[str, File])

        def seal() -> bytes:
            if ranks.rank == 0:
                manifest = encode(Manifest(FORMAT, table, files))
                draft.seal(folders, manifest, commit_of(manifest))
            return b""

        together(ranks, seal, explain)


class _File(NamedTuple):
    """A file that this rank writes: a share of a leaf."""

    path: str
    leaf: Held
    node: Array
    share: Share

    @property
    def name(self) -> str:
        return f"{self.path}/{self.share.key}"


def _node(leaf: Held | Recipe | None) -> Node:
    if isinstance(leaf, Held):
        cell = None if leaf.grid is None else leaf.grid.cell
        return Array(leaf.dtype, *plan(leaf.shape, STORED[leaf.dtype][1].itemsize, cell))
    return "group" if leaf is None else "recipe"


def _array(node: Node) -> Array:
    assert isinstance(node, Array)
    return node


def _folders(names: Sequence[str]) -> list[str]:
    """All folders that files lie in, outer ones first."""
    found: set[str] = set()
    for name in names:
        while (name := name.rpartition("/")[0]) and name not in found:
            found.add(name)
    return sorted(found)


def _bytes(file: _File, received: Received, sums: dict[str, File]) -> Iterator[Sequence[Any]]:
    """Give the bytes of a file, and note its checksums; a leaf that has to be copied is copied when its turn comes."""
    leaf, share, layout = file.leaf, file.share, file.node.layout
    box = file_box(layout, share.at)
    if len(share.parts) == 1 and share.parts[0].holder == share.writer:
        array = array_of(part_of(leaf, box))
    else:
        array = np.empty([stop - start for start, stop in box], STORED[leaf.dtype][1])
        for part in share.parts:
            ours = part.holder == share.writer
            values = array_of(part_of(leaf, part.box)) if ours else received[file.path, share.key, part.box]
            array[inside(part.box, box)] = values
    checksums: list[bytes] = []
    for piece in pieces(array, layout, share.at, box):
        checksums += piece[1:]  # behind a chunk; the shard's index, which is derived, has its own within
        yield piece
    sums[file.name] = file_of(file_size(layout, array.itemsize, share.at), checksums)


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
