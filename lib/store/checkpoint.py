"""A state on disk, and back: `save` and `load`, checkpoint format 1.

Guarantees: a checkpoint is there whole or not at all, whenever a process or a machine stops; `load(save(state))`
has the bits of `state`, on any mesh; what is damaged is never returned; what is asked for and what is there agree, or all
differences are listed. Any Zarr v3 reader opens the folder: `zarr.open_group(path)["params/..."][:]`. A state of DTensors
is saved by all ranks of its mesh together, each writing of what it holds, and loaded by each rank reading what it needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lib.errors import CheckpointError
from lib.store.exchange import Found
from lib.store.folder import STEP, nearest_named, newest_place
from lib.store.leaves import RECIPE, STORED, Leaf, bits_of, nodes
from lib.store.manifest import COMMIT, MANIFEST, METADATA, Array, Attributes
from lib.store.place import Place, Where, place_of
from lib.store.ranks import ALONE, Ranks, together
from lib.store.reader import Aim, read_attributes, read_manifest, read_tree
from lib.store.remote import said
from lib.store.sharded import Held, Target, held, ranks_of
from lib.store.wish import Layout, aim, ranks_for, wish_of
from lib.store.writer import check_finite, describe_run, write

__all__ = [
    "Row",
    "commit",
    "describe",
    "has_recipe",
    "hold",
    "load",
    "read_info",
    "resolve",
    "save",
]


class Row(NamedTuple):
    """A leaf as `describe` lists it: dotted path below the state, shape, logical dtype, bytes of its values."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


def save(
    path: Path | str | Place,
    state: TensorDict,
    *,
    info: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Where:
    """Write a state as a checkpoint folder at `path`, whole or not at all.

    The same state saved again at the same place changes nothing. What an unfinished save left there is replaced. A state
    with DTensors is saved by all ranks of their mesh, which all call this; it is there when the call returns on any of
    them, and when one fails, all raise. A rank outside of the mesh returns at once.

    Args:
        path: the folder, as in `run/checkpoints/step_0000001000`, or its URL (`s3://bucket/run/...`); folders above it
            are made. A `lib.store.bucket.Bucket` names a file system with credentials of its own.
        state: batch size [], every leaf a dense tensor or DTensor but `recipe`. Plain leaves are the same on all ranks.
        info: JSON values for people and warnings (compile setting, threads, ...); no part of the state.
        ranks: who saves together (`lib.store.ranks.over`); None = the ranks of the DTensors' mesh, through the default
            process group; this process alone if there are no DTensors.

    Returns:
        The folder, a URL as text.

    Raises:
        CheckpointError: the state cannot be stored (the leaf is named), its parameters are not finite, another state is
            stored there, or the disk refuses; the disk is then as it was.
        ValueError: `info` is no JSON.
    """
    target = place_of(path)
    if not isinstance(state, TensorDict):
        raise ValueError(f"state: a {type(state).__name__} must be a TensorDict; make it one with lib.tree.tensordict")
    if info is not None and not isinstance(info, Mapping):
        raise ValueError(f"info: a {type(info).__name__} must be a mapping of texts to JSON values; make it one")
    if ranks is not None and not isinstance(ranks, Ranks):
        raise ValueError(f"ranks: a {type(ranks).__name__} must be made by lib.store.ranks.over; make it so")
    listed = nodes(state)
    ranks = ranks_of(listed) if ranks is None else ranks
    if ranks is not None:
        commit(target, hold(listed), info or {}, ranks)
    return target.where


def hold(listed: Mapping[str, Leaf]) -> Found:
    """Look at the nodes of a state as this rank holds them; nothing is copied."""
    return {path: held(path, leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in listed.items()}


def commit(target: Place, found: Found, info: Mapping[str, Any], ranks: Ranks) -> None:
    """Write what is held as a checkpoint, whole or not at all; see `save`. Called on all ranks."""
    size_bytes = sum(leaf.local.nbytes for leaf in found.values() if isinstance(leaf, Held))

    def explain(error: OSError) -> Exception:
        why = f"not saved ({error.strerror or said(error)}), older checkpoints are untouched"
        made = CheckpointError(f"{target}: {why}; {target.fix(error, size_bytes)}")
        made.__cause__ = error
        return made

    said_of: list[Attributes] = []

    def check() -> bytes:
        check_finite(found)
        said_of.append(describe_run(found, info))
        return b""

    together(ranks, check)
    there = together(ranks, lambda: b"there" if ranks.rank == 0 and _is_taken(target) else b"", explain)[0]
    if there:
        if all(together(ranks, lambda: b"same" if _same_here(target, found) else b"", explain)):
            return
        raise CheckpointError(f"{target}: another state is stored there already; choose another path or remove it")
    write(target, found, said_of[0], ranks, explain)


def load(
    path: Path | str | Place,
    *,
    keys: Sequence[str] | None = None,
    like: TensorDict | None = None,
    mesh: DeviceMesh | None = None,
    layout: Layout | None = None,
    rename: Mapping[str, str] | None = None,
) -> TensorDict:
    """Read a checkpoint, checked to the last byte of what is read.

    Args:
        path: a checkpoint folder; or a run folder, or its folder of checkpoints, for the newest one in it; or a URL.
        keys: sub-trees of the state to read, as in `["params"]`; None = the whole state.
        like: a state, or an abstract one, that the result must agree with in every path, shape and dtype; its DTensors'
            meshes and placements are those of the result. Nothing of it is changed or kept.
        mesh: make every leaf a DTensor on it; each of its ranks reads what it needs. All of them call this, and when one
            of them fails, all raise.
        layout: placements on the mesh by patterns of dotted paths, the first that fits; others are replicated.
        rename: leaves or branches of the checkpoint that have other names in the state, {stored: wanted}.

    Returns:
        The state; plain tensors are contiguous, on the CPU, and own their memory.

    Raises:
        CheckpointError: none is there, or it is damaged, or a key is not in it, or it is not like `like`; names the file,
            the leaf, and the nearest good checkpoint.
        ValueError: an argument is of another kind, a pattern or a name of `rename` fits nothing or two leaves would become
            one, or the arguments do not go together.
    """
    wish = wish_of(keys, like, mesh, layout, rename)
    ranks = ranks_for(wish)
    place = _agreed(path, ranks)
    read: list[TensorDict] = []

    def act() -> bytes:
        with nearest_named(place):
            manifest = read_manifest(place)
        wanted = aim(wish, place, manifest, ranks is not None and ranks.rank == 0)
        with nearest_named(place):
            read.append(read_tree(place, manifest, wanted))
        return _form(read[0])

    if len(set(together(ranks or ALONE, act))) > 1:
        raise CheckpointError(
            f"{place}: the ranks ask for different leaves or layouts, must ask for the same; make them agree"
        )
    return read[0]


def _form(state: TensorDict) -> bytes:
    """What must be alike on all ranks that load together."""
    form = [
        f"{path} {leaf.dtype} {leaf.shape} {getattr(leaf, 'placements', '')}" if isinstance(leaf, Tensor) else path
        for path, leaf in nodes(state).items()
    ]
    return hashlib.sha256("\n".join(form).encode()).digest()


def resolve(path: Path | str | Place) -> Where:
    """Name the checkpoint that a path means; `path` as for `load`."""
    return _resolve(path).where


def read_info(path: Path | str | Place) -> dict[str, Any]:
    """Read the `info` that a checkpoint was saved with; `path` as for `load`."""
    place = _resolve(path)
    return read_attributes(place, read_manifest(place)).info


def has_recipe(path: Path | str | Place) -> bool:
    """Say whether a checkpoint holds a recipe; `path` as for `load`."""
    place = _resolve(path)
    return read_manifest(place).nodes.get(RECIPE) == "recipe"


def describe(path: Path | str | Place) -> list[Row]:
    """List the leaves of a checkpoint from its manifest, without reading them; `path` as for `load`."""
    place = _resolve(path)
    return [
        Row(at.replace("/", "."), node.shape, node.dtype, math.prod(node.shape) * STORED[node.dtype][1].itemsize)
        for at, node in read_manifest(place).nodes.items()
        if isinstance(node, Array)
    ]


def _resolve(path: Path | str | Place) -> Place:
    """Find the checkpoint that a path means."""
    place = place_of(path)
    try:
        inside = place.names()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{place}: must be a folder that is there; check the path") from None
    except OSError as error:
        why = error.strerror or said(error)
        raise CheckpointError(f"{place}: cannot be read ({why}); make it readable") from error
    if STEP.fullmatch(place.name) or not {COMMIT, MANIFEST, METADATA}.isdisjoint(inside):
        return place
    for checkpoints in (place.child("checkpoints"), place):
        if found := newest_place(checkpoints):
            return found
    raise CheckpointError(f"{place}: must be a checkpoint or a folder with one in it; check the path")


def _agreed(path: Path | str | Place, ranks: Ranks | None) -> Place:
    """The same, on several ranks the one that the first of them sees: a listing may differ from machine to machine."""
    if ranks is None or ranks.size == 1:
        return _resolve(path)
    base = place_of(path)
    found = together(ranks, lambda: str(_resolve(base)).encode() if ranks.rank == 0 else str(base).encode())[0].decode()
    for name in filter(None, found.removeprefix(str(base)).split("/")):
        base = base.child(name)  # step by step, since a place may have a file system of its own
    return base


def _is_taken(target: Place) -> bool:
    """Say whether a checkpoint is there already; False when nothing is, or only the rest of an unfinished save."""
    try:
        inside = target.names()
    except FileNotFoundError:
        if target.parent.has(target.name):  # a link to nowhere
            raise _something_else(target) from None
        return False
    except NotADirectoryError:
        if not target.parent.has(target.name):
            return False  # something above is in the way, as whoever makes the folders will say
        raise _something_else(target) from None
    if target.is_link:
        raise _something_else(target)
    if COMMIT in inside:
        return True
    ours = STEP.fullmatch(target.name) or METADATA in inside or not inside
    if not ours:
        raise CheckpointError(f"{target}: must be a new folder, this one holds other files; choose another path")
    return False


def _something_else(target: Place) -> CheckpointError:
    return CheckpointError(f"{target}: must be a new folder, something else is there; choose another path")


def _same_here(target: Place, found: Found) -> bool:
    """Say whether a checkpoint has this state, as far as it is held here."""
    manifest = read_manifest(target)
    if list(manifest.nodes) != list(found):
        return False
    for path, leaf in found.items():
        node = manifest.nodes[path]
        kind = "array" if isinstance(node, Array) else node
        if kind != ("array" if isinstance(leaf, Held) else "group" if leaf is None else "recipe"):
            return False
        if isinstance(node, Array) and isinstance(leaf, Held) and (node.dtype, node.shape) != (leaf.dtype, leaf.shape):
            return False

    def part(name: str, node: Array) -> Target:
        leaf = found[name]
        assert isinstance(leaf, Held)
        return Target(node.shape, leaf.box)

    stored = nodes(read_tree(target, manifest, Aim({path: path for path in found}, part)))
    for path, leaf in found.items():
        other = stored[path]
        if isinstance(leaf, Held) and isinstance(other, Tensor):
            if not np.array_equal(bits_of(leaf.local), bits_of(other)):
                return False
        elif leaf is not other and leaf != other:
            return False
    return True
