"""Writing a checkpoint's files, by one rank or by several together, which others then see at once or never.

Guarantees: every file has one writer, and a rank writes what it holds itself as far as can be; every file is safe before
COMMIT is written; equal states cut alike give equal bytes in every file (no time, no name of a machine); what could not be
read back is refused before anything is written; if one rank fails, all do, and there is no checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import tensordict
import torch
from numpy.typing import NDArray

from lib.config import Recipe
from lib.errors import CheckpointError
from lib.store.grid import Box, Share, deal
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
from lib.store.place import Content, Draft, Place
from lib.store.ranks import Ranks, together
from lib.store.sharded import Held
from lib.store.shards import crc32c, file_box, inside, pieces, plan

__all__ = ["Found", "check_finite", "describe_run", "write"]

Found = Mapping[str, Held | Recipe | None]
"""A state as this rank holds it, by path; None = a branch."""

Bytes = NDArray[np.uint8]


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
    _check_complete(found, ranks)
    table = {path: _node(leaf) for path, leaf in found.items()}
    arrays = {path: leaf for path, leaf in found.items() if isinstance(leaf, Held)}
    layouts = [(_array(table[path]).layout, leaf.local.itemsize, leaf.grid) for path, leaf in arrays.items()]
    shares = dict(zip(arrays, deal(layouts, ranks.size), strict=True))
    if ranks.size > 1:
        _agree(f"{target}", table, attributes, arrays, ranks)
    received = _exchange(arrays, shares, ranks)
    texts = {METADATA: encode_attributes(attributes), **documents(table)} if ranks.rank == 0 else {}
    files: dict[str, File] = {}
    with ExitStack() as stack:
        drafts: list[Draft] = []
        folders = _folders([*documents(table), *(f"{path}/{share.key}" for path in shares for share in shares[path])])

        def begin() -> bytes:
            if ranks.rank:
                return b""
            drafts.append(stack.enter_context(target.begin()))
            drafts[0].make(folders)
            return drafts[0].token.encode()

        token = together(ranks, begin, explain)[0].decode()
        draft = drafts[0] if drafts else target.join(token)

        def put() -> bytes:
            mine: dict[str, File] = {}
            draft.write(list(_contents(arrays, table, shares, received, texts, ranks.rank, mine)))
            return msgspec.json.encode(mine)

        for told in together(ranks, put, explain):
            files.update(msgspec.json.decode(told, type=dict[str, File]))

        def seal() -> bytes:
            if ranks.rank == 0:
                manifest = encode(Manifest(FORMAT, table, files))
                draft.seal(folders, manifest, commit_of(manifest))
            return b""

        together(ranks, seal, explain)


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


def _check_complete(found: Found, ranks: Ranks) -> None:
    """Check that those who save hold all of the state between them."""
    for path, leaf in found.items():
        if isinstance(leaf, Held) and leaf.grid is not None and leaf.grid.ranks != ranks.size:
            raise CheckpointError(
                f"{state_path(path)}: lies on {leaf.grid.ranks} ranks, {ranks.size} save it, must all take part; "
                f"pass ranks=lib.store.ranks.over(members)"
            )


def _agree(
    target: str, table: Mapping[str, Node], attributes: Attributes, arrays: Mapping[str, Held], ranks: Ranks
) -> None:
    """Check that all ranks save one state: the same leaves and recipe, the same values wherever several have the same part."""
    what = msgspec.json.encode([target, list(table.items()), attributes])
    twins = {path: _holders(leaf, ranks) for path, leaf in arrays.items()}
    shared = [path for path, holders in twins.items() if len(holders) > 1]
    sums = {path: crc32c(_bytes(array_of(arrays[path].local))) for path in shared}
    told = msgspec.json.encode([hashlib.sha256(what).hexdigest(), {path: sums[path].hex() for path in shared}])
    heard = [msgspec.json.decode(other, type=tuple[str, dict[str, str]]) for other in ranks.share(told)]
    for rank, (plan_, others) in enumerate(heard):
        if plan_ != heard[ranks.rank][0]:
            raise CheckpointError(
                f"state: rank {rank} saves another tree, recipe or info, or to another path, than rank {ranks.rank}, "
                f"all must save one state; make the ranks agree before saving"
            )
        for path in shared:
            if rank in twins[path] and others[path] != sums[path].hex():
                raise CheckpointError(
                    f"{state_path(path)}: rank {rank} has another value than rank {ranks.rank}, what several ranks have "
                    f"must be the same on all; sum or broadcast it before saving"
                )


def _holders(leaf: Held, ranks: Ranks) -> tuple[int, ...]:
    """The ranks that hold the part of a leaf that this one holds."""
    if leaf.grid is None:
        return tuple(range(ranks.size))
    return next((holders for holders in leaf.grid.holders.values() if ranks.rank in holders), ())


def _exchange(
    arrays: Mapping[str, Held], shares: Mapping[str, list[Share]], ranks: Ranks
) -> dict[tuple[str, str, Box], NDArray[Any]]:
    """Send parts of files to their writers; return those that came here, by leaf, file and box."""
    out: dict[int, list[Bytes]] = {}
    due: dict[int, list[tuple[tuple[str, str, Box], tuple[int, ...], np.dtype[Any]]]] = {}
    for path, leaf in arrays.items():
        dtype = STORED[leaf.dtype][1]
        for share in shares[path]:
            for part in share.parts:
                if part.holder == share.writer:
                    continue
                if part.holder == ranks.rank:
                    out.setdefault(share.writer, []).append(_bytes(_view(leaf, part.box)))
                elif share.writer == ranks.rank:
                    shape = tuple(stop - start for start, stop in part.box)
                    due.setdefault(part.holder, []).append(((path, share.key, part.box), shape, dtype))
    send = {to: np.concatenate(parts) for to, parts in out.items()}
    receive = {
        of: np.empty(sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in parts), np.uint8)
        for of, parts in due.items()
    }
    ranks.swap(send, receive)
    found = {}
    for of, parts in due.items():
        at = 0
        for key, shape, dtype in parts:
            size = math.prod(shape) * dtype.itemsize
            found[key] = receive[of][at : at + size].view(dtype).reshape(shape)
            at += size
    return found


def _contents(
    arrays: Mapping[str, Held],
    table: Mapping[str, Node],
    shares: Mapping[str, list[Share]],
    received: Mapping[tuple[str, str, Box], NDArray[Any]],
    texts: Mapping[str, bytes],
    rank: int,
    facts: dict[str, File],
) -> Iterator[Content]:
    """Give each file that this rank writes; `facts` is filled as they are written."""
    for name, text in texts.items():
        facts[name] = file_of(len(text), [crc32c(text)])
        yield name, [(text,)]
    for path, leaf in arrays.items():
        layout = _array(table[path]).layout
        for share in shares[path]:
            if share.writer == rank:
                box = file_box(layout, share.at)
                name = f"{path}/{share.key}"
                yield name, _file(leaf, path, share, box, layout, received, facts)


def _file(
    leaf: Held,
    path: str,
    share: Share,
    box: Box,
    layout: Any,
    received: Mapping[tuple[str, str, Box], NDArray[Any]],
    facts: dict[str, File],
) -> Iterator[Sequence[Any]]:
    """Give the bytes of a file; a leaf that has to be copied is copied when its turn comes."""
    if len(share.parts) == 1 and share.parts[0].holder == share.writer:
        array = _view(leaf, box)
    else:
        array = np.empty([stop - start for start, stop in box], STORED[leaf.dtype][1])
        for part in share.parts:
            ours = part.holder == share.writer
            values = _view(leaf, part.box) if ours else received[path, share.key, part.box]
            array[_inside(part.box, box)] = values
    size, sums = 0, []
    for piece in pieces(array, layout, share.at, tuple(start for start, _ in box)):
        size += sum(map(len, piece))
        if len(piece) == 2:
            sums.append(bytes(piece[1]))
        yield piece
    facts[f"{path}/{share.key}"] = file_of(size, sums)


def _view(leaf: Held, box: Box) -> NDArray[Any]:
    """The part of a leaf in a box, which is within the part that is here."""
    return array_of(leaf.local[_inside(box, leaf.box)])


def _inside(box: Box, outer: Box) -> tuple[Any, ...]:
    return inside(tuple(slice(*edges) for edges in box), tuple(start for start, _ in outer))


def _bytes(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


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
