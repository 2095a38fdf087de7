"""What is wanted of a checkpoint: which leaves, under which names, like what, and where they are to lie.

Guarantees: no leaf is lost by a name; nothing is cast; everything that differs from what is expected is listed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from lib.errors import CheckpointError
from lib.store.grid import whole
from lib.store.leaves import Leaf, dtype_name, nodes, state_path
from lib.store.manifest import Array, Manifest
from lib.store.place import Place
from lib.store.ranks import Ranks, over
from lib.store.reader import Aim, chosen
from lib.store.sharded import Target, members_of, ranks_of, sharded, target_of

__all__ = ["Layout", "Wish", "aim", "differences", "ranks_for", "wish_of"]

LISTED = 20  # differences in one error line

Layout = Mapping[str, Sequence[Placement]]
"""Patterns of dotted state paths (`params.*`) and the placements of the leaves they fit, one for each axis of the mesh."""


class Wish(NamedTuple):
    """What `lib.store.load` was asked for; of `like` its nodes by path."""

    keys: Sequence[str] | None
    like: Mapping[str, Leaf] | None
    mesh: DeviceMesh | None
    layout: Layout | None
    rename: Mapping[str, str]


def wish_of(keys: Any, like: Any, mesh: Any, layout: Any, rename: Any) -> Wish:
    """Check the arguments of `lib.store.load`.

    Raises:
        ValueError: one is of another kind, or two do not go together.
    """
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
    if layout is not None and mesh is None:
        raise ValueError("layout: given without a mesh, must go with one; pass mesh=...")
    if like is not None and mesh is not None:
        raise ValueError("like: given with a mesh, must be one of them; the placements of like's DTensors count")
    return Wish(keys, None if like is None else nodes(like, abstract=True), mesh, layout, rename or {})


def ranks_for(wish: Wish) -> Ranks | None:
    """The ranks that load together; None on one that gets no part."""
    return ranks_of(wish.like or {}) if wish.mesh is None else over(members_of(wish.mesh))


def aim(wish: Wish, place: Place, manifest: Manifest, first: bool) -> Aim:
    """What is to be read of a checkpoint for a wish; on the first rank also what none needs, to check it.

    Raises:
        CheckpointError: it has not what is wanted, all differences are listed; or placements do not fit a leaf.
        ValueError: a name or a pattern fits nothing, or two leaves would become one.
    """
    names = _renamed(place, manifest, wish.rename)
    wanted = {name: manifest.nodes[stored] for stored, name in names.items()}
    picked = set(chosen(place, wanted, wish.keys))
    if wish.like is not None:
        like = {name: wish.like[name] for name in chosen(place, wish.like, wish.keys)}
        _check_like(place, {name: wanted[name] for name in picked}, like)
    target = _targets(wish, [name for name in picked if isinstance(wanted[name], Array)])
    return Aim({stored: name for stored, name in names.items() if name in picked}, target, first)


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


def _check_like(place: Place, have: Mapping[str, Any], want: Mapping[str, Leaf]) -> None:
    """List all differences between what is stored and what is wanted."""
    stored = {state_path(name): _shown(node) for name, node in have.items() if node != "group"}
    wanted = {state_path(name): _shown(leaf) for name, leaf in want.items() if leaf is not None}
    if wrong := differences(stored, wanted):
        fix = "take a checkpoint of the same model, or name what to read with keys and rename"
        raise CheckpointError(f"{place}: {wrong}; {fix}")


def _shown(what: Any) -> str:
    if isinstance(what, Tensor):
        return f"{dtype_name(what)} {tuple(what.shape)}"
    return f"{what.dtype} {what.shape}" if isinstance(what, Array) else "a recipe"


def _targets(wish: Wish, names: Sequence[str]) -> Callable[[str, Array], Target]:
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
        return target_of(leaf) if isinstance(leaf, Tensor) else Target(node.shape, whole(node.shape))

    return plain
