"""What ranks that save one state have to agree on, and the parts of files that they send each other."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lib.errors import CheckpointError
from lib.recipe import Recipe
from lib.store.grid import Share
from lib.store.leaves import STORED, bits_of, state_path
from lib.store.manifest import Attributes, Node
from lib.store.ranks import Ranks
from lib.store.sharded import Held
from lib.store.shards import Box, crc32c, inside

__all__ = ["Found", "Received", "agree", "check_complete", "exchange", "part_of"]

Found = Mapping[str, Held | Recipe | None]
"""A state as this rank holds it, by path; None = a branch."""

Received = Mapping[tuple[str, str, Box], NDArray[Any]]
"""Parts of files that came from other ranks, by leaf, file and box."""

Bytes = NDArray[np.uint8]


def check_complete(found: Found, ranks: Ranks) -> None:
    """Check that those who save hold all of the state between them."""
    for path, leaf in found.items():
        if isinstance(leaf, Held) and leaf.grid is not None and leaf.grid.ranks != ranks.size:
            raise CheckpointError(
                f"{state_path(path)}: lies on {leaf.grid.ranks} ranks, {ranks.size} save it, must all take part; "
                f"pass ranks=lib.store.ranks.over(members)"
            )


def agree(
    target: str, table: Mapping[str, Node], attributes: Attributes, arrays: Mapping[str, Held], ranks: Ranks
) -> None:
    """Check that all ranks save one state: the same leaves and recipe, the same values wherever several have the same part."""
    what = msgspec.json.encode([target, list(table.items()), attributes])
    twins = {path: _holders(leaf, ranks) for path, leaf in arrays.items()}
    shared = [path for path, holders in twins.items() if len(holders) > 1]
    sums = {path: crc32c(bits_of(arrays[path].local)) for path in shared}
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


def exchange(arrays: Mapping[str, Held], shares: Mapping[str, list[Share]], ranks: Ranks) -> Received:
    """Send parts of files to their writers; return those that came here."""
    out: dict[int, list[Bytes]] = {}
    due: dict[int, list[tuple[tuple[str, str, Box], tuple[int, ...], np.dtype[Any]]]] = {}
    for path, leaf in arrays.items():
        dtype = STORED[leaf.dtype][1]
        for share in shares[path]:
            for part in share.parts:
                if part.holder == share.writer:
                    continue
                if part.holder == ranks.rank:
                    out.setdefault(share.writer, []).append(bits_of(part_of(leaf, part.box)))
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


def part_of(leaf: Held, box: Box) -> Tensor:
    """The part of a leaf in a box, which is within the part that is here."""
    return leaf.local[inside(box, leaf.box)]
