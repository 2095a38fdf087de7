"""A state on disk, and back: `save` and `load`, checkpoint format 1.

Guarantees: a checkpoint is there whole or not at all, whenever a process or a machine stops; `load(save(state))`
has the bits of `state`, on any mesh; what is damaged is never returned; what is asked for and what is there agree, or all
differences are listed. Any Zarr v3 reader opens the folder: `zarr.open_group(path)["params/..."][:]`. A state of DTensors
is saved by all ranks of its mesh together, each writing what it holds, and loaded by each rank reading what it needs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from lib.errors import CheckpointError
from lib.store.folder import STEP, Where, latest, newest_place, where
from lib.store.leaves import RECIPE, STORED, Leaf, array_of, dtype_name, nodes, state_path
from lib.store.local import Folder, refusal
from lib.store.manifest import COMMIT, MANIFEST, METADATA, Array, Manifest
from lib.store.place import Place, place_of
from lib.store.ranks import ALONE, Ranks, over, together
from lib.store.reader import Aim, chosen, read_attributes, read_manifest, read_tree
from lib.store.remote import said
from lib.store.sharded import Held, Target, held, members_of, ranks_of, sharded, target_of
from lib.store.writer import Found, check_finite, describe_run, write

__all__ = [
    "Layout",
    "Row",
    "commit",
    "describe",
    "differences",
    "has_recipe",
    "hold",
    "load",
    "read_info",
    "resolve",
    "save",
]

LISTED = 20  # differences in one error line

Layout = Mapping[str, Sequence[Placement]]
"""Patterns of dotted state paths (`params.*`) and the placements of the leaves they fit, one for each axis of the mesh."""


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
    return where(target)


def hold(listed: Mapping[str, Leaf]) -> Found:
    """Look at the nodes of a state as this rank holds them; nothing is copied."""
    return {path: held(path, leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in listed.items()}


def commit(target: Place, found: Found, info: Mapping[str, Any], ranks: Ranks) -> None:
    """Write what is held as a checkpoint, whole or not at all; see `save`. Called on all ranks."""
    size_bytes = sum(leaf.local.nbytes for leaf in found.values() if isinstance(leaf, Held))

    def explain(error: OSError) -> Exception:
        fix = refusal(error, f"{target.parent}", size_bytes) if isinstance(target, Folder) else "check the bucket"
        why = f"not saved ({error.strerror or said(error)}), older checkpoints are untouched"
        made = CheckpointError(f"{target}: {why}; {fix}")
        made.__cause__ = error
        return made

    def check() -> bytes:
        check_finite(found)
        describe_run(found, info)
        return b""

    together(ranks, check)
    attributes = describe_run(found, info)
    there = together(ranks, lambda: b"there" if ranks.rank == 0 and _is_taken(target) else b"", explain)[0]
    if there:
        if all(together(ranks, lambda: b"same" if _same_here(target, found) else b"", explain)):
            return
        raise CheckpointError(f"{target}: another state is stored there already; choose another path or remove it")
    write(target, found, attributes, ranks, explain)


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
    _check_kinds(keys, like, mesh, rename)
    if layout is not None and mesh is None:
        raise ValueError("layout: given without a mesh, must go with one; pass mesh=...")
    if like is not None and mesh is not None:
        raise ValueError("like: given with a mesh, must be one of them; the placements of like's DTensors count")
    by_name = None if like is None else nodes(like, abstract=True)
    ranks = ranks_of(by_name or {}) if mesh is None else over(members_of(mesh))
    place, checkpoints = _agreed(path, ranks)
    wish, read = _Wish(keys, by_name, mesh, layout, rename or {}), list[TensorDict]()

    def act() -> bytes:
        read.append(_read(place, wish, ranks is None or ranks.rank == 0, checkpoints))
        return _form(read[0])

    if len(set(together(ranks or ALONE, act))) > 1:
        raise CheckpointError(
            f"{place}: the ranks ask for different leaves or layouts, must ask for the same; make them agree"
        )
    return read[0]


def _form(state: TensorDict) -> bytes:
    """What must be alike on all ranks that load together."""
    form = [
        f"{path} {_shown(leaf)} {getattr(leaf, 'placements', '')}" if isinstance(leaf, Tensor) else path
        for path, leaf in nodes(state).items()
    ]
    return hashlib.sha256("\n".join(form).encode()).digest()


def _check_kinds(keys: Any, like: Any, mesh: Any, rename: Any) -> None:
    if keys is not None and (isinstance(keys, (str, bytes)) or not isinstance(keys, Sequence)):
        raise ValueError(f"keys={keys!r} must be a list of names; write keys=[{keys!r}]")
    for key in keys or ():
        if not isinstance(key, str):
            raise ValueError(f"keys: {key!r} must be the name of a leaf or branch; give text")
    if like is not None and not isinstance(like, TensorDict):
        raise ValueError(f"like: a {type(like).__name__} must be a TensorDict; make it one with lib.tree.tensordict")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh: a {type(mesh).__name__} must be a DeviceMesh; make one with torch.distributed.device_mesh"
        )
    if rename is not None and not isinstance(rename, Mapping):
        raise ValueError(f"rename: a {type(rename).__name__} must be a mapping {{stored: wanted}}; make it one")
    for old, new in (rename or {}).items():
        if not all(isinstance(name, str) and name for name in (old, new)):
            raise ValueError(f"rename: {old!r} -> {new!r} must be two names; correct it")


class _Wish(NamedTuple):
    """What `load` was asked for, with the nodes of `like` by path."""

    keys: Sequence[str] | None
    like: Mapping[str, Leaf] | None
    mesh: DeviceMesh | None
    layout: Layout | None
    rename: Mapping[str, str]


def _read(place: Place, wish: _Wish, first: bool, checkpoints: Place | None) -> TensorDict:
    """Read what is wished for as far as it is for this rank; the first one also looks at what none needs."""
    keys = wish.keys
    try:
        manifest = read_manifest(place)
        names = _renamed(place, manifest, wish.rename)
        wanted = {name: manifest.nodes[stored] for stored, name in names.items()}
        picked = set(chosen(place, wanted, keys))
        aim_at = {stored: name for stored, name in names.items() if name in picked}
        if wish.like is not None:
            asked = wish.like if keys is None else {n: wish.like[n] for n in chosen(place, _kinds(wish.like), keys)}
            _check_like(place, {name: wanted[name] for name in picked}, asked)
        target = _targets(wish, [name for name in picked if isinstance(wanted[name], Array)])
        return read_tree(place, manifest, Aim(aim_at, target, first))
    except CheckpointError:
        if checkpoints is not None:
            latest(checkpoints)  # when the newest is damaged, this error also names the nearest good one
        raise


def resolve(path: Path | str | Place) -> Where:
    """Name the checkpoint that a path means; `path` as for `load`."""
    return where(_resolve(path)[0])


def read_info(path: Path | str | Place) -> dict[str, Any]:
    """Read the `info` that a checkpoint was saved with; `path` as for `load`."""
    place, _ = _resolve(path)
    return read_attributes(place, read_manifest(place)).info


def has_recipe(path: Path | str | Place) -> bool:
    """Say whether a checkpoint holds a recipe; `path` as for `load`."""
    place, _ = _resolve(path)
    return read_manifest(place).nodes.get(RECIPE) == "recipe"


def describe(path: Path | str | Place) -> list[Row]:
    """List the leaves of a checkpoint from its manifest, without reading them; `path` as for `load`."""
    place, _ = _resolve(path)
    return [
        Row(at.replace("/", "."), node.shape, node.dtype, math.prod(node.shape) * STORED[node.dtype][1].itemsize)
        for at, node in read_manifest(place).nodes.items()
        if isinstance(node, Array)
    ]


def _resolve(path: Path | str | Place) -> tuple[Place, Place | None]:
    """Find the checkpoint that a path means, and the folder of checkpoints it was the newest in."""
    place = place_of(path)
    try:
        inside = place.names()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{place}: must be a folder that is there; check the path") from None
    except OSError as error:
        why = error.strerror or said(error)
        raise CheckpointError(f"{place}: cannot be read ({why}); make it readable") from error
    if STEP.fullmatch(place.name) or not {COMMIT, MANIFEST, METADATA}.isdisjoint(inside):
        return place, None
    for checkpoints in (place.child("checkpoints"), place):
        if found := newest_place(checkpoints):
            return found, checkpoints
    raise CheckpointError(f"{place}: must be a checkpoint or a folder with one in it; check the path")


def _agreed(path: Path | str | Place, ranks: Ranks | None) -> tuple[Place, Place | None]:
    """The same, on several ranks the one that the first of them sees: a listing may differ from machine to machine."""
    if ranks is None or ranks.size == 1:
        return _resolve(path)
    place, checkpoints = place_of(path), None

    def resolve() -> bytes:
        nonlocal place, checkpoints
        if ranks.rank == 0:
            place, checkpoints = _resolve(path)
        return f"{place}".encode()

    return place_of(together(ranks, resolve)[0].decode()), checkpoints


def _renamed(place: Place, manifest: Manifest, rename: Mapping[str, str]) -> dict[str, str]:
    """Names in the state by path in the checkpoint."""
    dotted = {path.replace("/", "."): path for path in manifest.nodes}
    slashed: dict[str, str] = {}
    for old, new in rename.items():
        if old not in manifest.nodes and old not in dotted:
            raise ValueError(f"rename: {state_path(old)} is not in {place}, must be; see describe(path) for what is")
        slashed[old if old in manifest.nodes else dotted[old]] = new.replace(".", "/")
    names: dict[str, str] = {}
    for path in manifest.nodes:
        # The longest name that fits: a leaf's own before its branch's.
        fits = [old for old in slashed if f"{path}/".startswith(f"{old}/")]
        old = max(fits, key=len, default="")
        names[path] = slashed[old] + path[len(old) :] if old else path
    leaves: dict[str, str] = {}
    for path, name in names.items():
        if manifest.nodes[path] != "group":
            if name in leaves:
                raise ValueError(
                    f"rename: {state_path(leaves[name])} and {state_path(path)} would both be {state_path(name)}, "
                    f"must differ; change one"
                )
            leaves[name] = path
    for path, name in names.items():
        places = name.split("/")
        above = ["/".join(places[:depth]) for depth in range(1, len(places))]
        for taken in [*above, *([name] if manifest.nodes[path] == "group" else [])]:
            if taken in leaves:
                raise ValueError(
                    f"rename: {state_path(leaves[taken])} would be {state_path(taken)}, and {state_path(path)} lie "
                    f"there or below, must not; change one"
                )
    return names


def _kinds(listed: Mapping[str, Leaf]) -> dict[str, Any]:
    return {path: "group" if leaf is None else "recipe" for path, leaf in listed.items()}


def _check_like(place: Place, have: Mapping[str, Any], want: Mapping[str, Leaf]) -> None:
    """List all differences between what is stored and what is wanted."""
    stored = {state_path(name): _shown(node) for name, node in have.items() if node != "group"}
    wanted = {state_path(name): _shown(leaf) for name, leaf in want.items() if leaf is not None}
    if wrong := differences(stored, wanted):
        fix = "take a checkpoint of the same model, or name what to read with keys and rename"
        raise CheckpointError(f"{place}: {wrong}; {fix}")


def differences(have: Mapping[str, str], want: Mapping[str, str]) -> str:
    """List what is missing, what is extra and what has another form, by name and form; "" when nothing is.

    >>> differences({"a": "float32 (2,)", "c": "bool ()"}, {"a": "float32 (3,)", "b": "bool ()"})
    'missing b (bool ()); extra c (bool ()); a: is float32 (2,), must be float32 (3,)'
    """
    wrong = [f"missing {name} ({want[name]})" for name in sorted(want.keys() - have.keys())]
    wrong += [f"extra {name} ({have[name]})" for name in sorted(have.keys() - want.keys())]
    wrong += [
        f"{name}: is {have[name]}, must be {want[name]}"
        for name in sorted(have.keys() & want.keys())
        if have[name] != want[name]
    ]
    more = f" and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
    return "; ".join(wrong[:LISTED]) + more


def _shown(what: Any) -> str:
    if isinstance(what, Tensor):
        return f"{dtype_name(what)} {tuple(what.shape)}"
    return f"{what.dtype} {what.shape}" if isinstance(what, Array) else "a recipe"


def _targets(wish: _Wish, names: Sequence[str]) -> Callable[[str, Array], Target]:
    """Where each leaf is to lie."""
    mesh, like = wish.mesh, wish.like
    if mesh is not None:
        rules = dict(wish.layout or {})
        for pattern in rules:
            if not any(fnmatchcase(name.replace("/", "."), pattern) for name in names):
                raise ValueError(f"layout: {pattern!r} fits no leaf, must fit one; see describe(path) for their names")
        everywhere = [Replicate()] * mesh.ndim

        def on_mesh(name: str, node: Array) -> Target:
            fits = (each for pattern, each in rules.items() if fnmatchcase(name.replace("/", "."), pattern))
            return sharded(name, node.shape, mesh, next(fits, everywhere))

        return on_mesh

    def plain(name: str, node: Array) -> Target:
        leaf = None if like is None else like[name]
        whole = tuple((0, n) for n in node.shape)
        return target_of(leaf) if isinstance(leaf, Tensor) else Target(node.shape, whole)

    return plain


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
    if isinstance(target, Folder) and target.at.is_symlink():
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
            if not np.array_equal(_bits(leaf.local), _bits(other)):
                return False
        elif leaf is not other and leaf != other:
            return False
    return True


def _bits(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return array_of(tensor).reshape(-1).view(np.uint8)
