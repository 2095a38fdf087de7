"""Where parameters lie on a mesh: rules from their paths to names of its axes, and a state laid by them.

A layout maps patterns of parameter paths, the first that fits, to a name for each dim of the parameter: the axis of the mesh
that cuts it, several of them (the outer first), or none. Moments and averages lie as their parameters do; all else is whole on
each rank. On a mesh without an axis of a preset the axis cuts nothing, so one recipe does for one device and for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lib.shard.words import laid
from lib.tree import from_leaves, leaves, matching, tensordict

__all__ = ["AXES", "PRESETS", "Layout", "lay", "layout_of", "placements"]

Dim = str | Sequence[str] | None
Layout = Mapping[str, Sequence[Dim]]

AXES = ("replicate", "shard")
"""Axes that presets speak of, over both of which rows are cut."""

PRESETS: Mapping[str, Layout] = MappingProxyType(
    {
        "ddp": MappingProxyType({"*": ()}),
        # Axis 0 of a block's parameters counts layers: each is wanted whole at another time.
        "fsdp": MappingProxyType({"blocks.*": (None, "shard"), "*": ("shard",)}),
    }
)
"""Layouts by name: "ddp", whole on each rank; "fsdp", cut over `shard` (and whole along `replicate`, if the mesh has one)."""


def layout_of(name: str) -> Layout:
    """A preset.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in PRESETS:
        raise ValueError(f"layout={name} must be one of {', '.join(PRESETS)}, or rules by pattern; change it")
    return PRESETS[name]


def placements(state: Any, mesh: DeviceMesh, layout: str | Layout) -> dict[str, list[Placement]]:
    """Where each leaf of a state is to lie that is not whole on each rank, by path; also for `load(mesh=, layout=)`.

    Args:
        state: a state, or an abstract one.
        mesh: with names of its axes.
        layout: rules, or the name of a preset.

    Raises:
        ValueError: a rule matches no parameter, names an axis that the mesh does not have, or more dims than a parameter has,
            or one axis twice; or a parameter has no rule.
    """
    names = tuple(mesh.mesh_dim_names or ())
    params = leaves(state["params"])
    cuts = _cuts(params, names, layout)
    found: dict[str, list[Placement]] = {}
    for path, leaf in leaves(state).items():
        owner = _owner(path, leaf, params)
        if owner is not None and any(cuts[owner]):
            of = {axis: dim for dim, axes in enumerate(cuts[owner]) for axis in axes}
            found[path] = [Shard(of[axis]) if axis in of else Replicate() for axis in names]
    return found


def lay(state: TensorDict, mesh: DeviceMesh, layout: str | Layout = "fsdp") -> TensorDict:
    """Lay a state that every rank has the whole of; nothing is sent, and each rank keeps its own part only.

    Args:
        state: as `init_state` makes it, the same on each rank; it is left as it is.
        mesh: with names of its axes.
        layout: rules, or the name of a preset.

    Raises:
        ValueError: as `placements` does.
    """
    at = placements(state, mesh, layout)

    def one(path: str, leaf: Tensor) -> Tensor:
        if path not in at:
            return leaf.clone()
        # A copy, since a part of the whole would keep all of it in memory.
        mine = laid(leaf, mesh, at[path]).to_local().clone(memory_format=torch.contiguous_format)
        return DTensor.from_local(mine, mesh, at[path], run_check=False, shape=leaf.shape, stride=leaf.stride())

    new = tensordict(from_leaves({path: one(path, leaf) for path, leaf in leaves(state).items()}))
    new.set_non_tensor("recipe", state["recipe"])
    return new


def _cuts(params: Mapping[str, Tensor], names: Sequence[str], layout: str | Layout) -> dict[str, list[tuple[str, ...]]]:
    """The axes that cut each dim of each parameter."""
    preset = isinstance(layout, str)
    rules = layout_of(layout) if isinstance(layout, str) else layout
    cuts: dict[str, list[tuple[str, ...]]] = {}
    for pattern, dims in rules.items():
        fits = matching((pattern,), tuple(params))
        if not fits and not preset:
            raise ValueError(
                f"layout[{pattern!r}] must match a parameter, matches none of {_some(params)}; fix or drop it"
            )
        wanted = [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in dims]
        _check_axes(pattern, wanted, names, preset)
        for path in fits:
            if path in cuts:
                continue
            if len(wanted) > params[path].ndim and not preset:
                raise ValueError(
                    f"layout[{pattern!r}] names {len(wanted)} dims, {path} has {params[path].ndim}, must be at most that; "
                    f"give {path} a rule of its own before it"
                )
            cuts[path] = [tuple(axis for axis in dim if axis in names) for dim in wanted[: params[path].ndim]]
    if none := [path for path in params if path not in cuts]:
        raise ValueError(f"layout: {_some(none)} must have a rule; add '*': () to leave the rest whole on each rank")
    return cuts


def _check_axes(pattern: str, wanted: Sequence[tuple[str, ...]], names: Sequence[str], preset: bool) -> None:
    named = [axis for dim in wanted for axis in dim]
    if not preset and (strange := [axis for axis in named if axis not in names]):
        raise ValueError(f"layout[{pattern!r}]: {strange[0]!r} must be an axis of the mesh, {list(names)}; name one")
    if twice := [axis for axis in named if named.count(axis) > 1]:
        raise ValueError(f"layout[{pattern!r}]: {twice[0]!r} must cut one dim only; drop one")


def _owner(path: str, leaf: Tensor, params: Mapping[str, Tensor]) -> str | None:
    """The parameter that a leaf is, or goes along with: of its name and shape."""
    slot, _, rest = path.partition(".")
    if slot not in ("params", "optimizer", "average"):
        return None
    while rest:
        if rest in params and params[rest].shape == leaf.shape:
            return rest
        rest = rest.partition(".")[2]
    return None


def _some(paths: Any) -> str:
    named = list(paths)
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")
