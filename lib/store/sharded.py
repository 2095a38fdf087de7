"""Tensors as ranks hold them: a state's leaves, plain or DTensor, and the leaves of a state that is loaded onto a mesh.

Guarantees: looking at a leaf sends nothing and copies nothing; what is loaded takes no more room than a rank's own parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from lib.errors import CheckpointError
from lib.store.grid import Grid, box_at, grid_of, whole
from lib.store.leaves import Leaf, dtype_name, state_path
from lib.store.ranks import ALONE, Ranks, over
from lib.store.shards import Box

__all__ = ["Held", "Target", "held", "members_of", "ranks_of", "sharded", "target_of"]


class Held(NamedTuple):
    """A leaf as this rank holds it.

    Attributes:
        dtype: logical dtype.
        shape: of the whole leaf.
        local: the part that is here.
        box: which part that is.
        grid: who holds which part, by place in the mesh; None = every rank has all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    local: Tensor
    box: Box
    grid: Grid | None


class Target(NamedTuple):
    """What a leaf is to become when it is loaded.

    Attributes:
        shape: of the whole leaf.
        box: the part that this rank needs.
        mesh: where the whole will lie; None = the part is a plain tensor.
        placements: one for each axis of the mesh.
    """

    shape: tuple[int, ...]
    box: Box
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()

    def filled(self, local: Tensor) -> Tensor:
        """Make the leaf of its local part, which is in the CPU's memory; it goes to the mesh's kind of device."""
        if self.mesh is None:
            return local
        stride = torch.empty(self.shape, device="meta").stride()
        made: Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )
        return made


def held(path: str, leaf: Tensor) -> Held:
    """Look at a leaf of a state.

    Raises:
        CheckpointError: its placements have no fixed parts; the leaf is named.
    """
    shape = tuple(leaf.shape)
    if not isinstance(leaf, DTensor):
        return Held(dtype_name(leaf), shape, leaf, whole(shape), None)
    _check_placements(path, leaf.placements, len(shape))
    mesh, dims = leaf.device_mesh, _dims(leaf.placements)
    box = _on(mesh, shape, tuple(leaf.placements)).box
    local = leaf.to_local()
    if mesh.get_coordinate() is not None and tuple(local.shape) != tuple(stop - start for start, stop in box):
        raise CheckpointError(
            f"{state_path(path)}: the part here is {tuple(local.shape)}, by its placements it must be "
            f"{tuple(stop - start for start, stop in box)}; distribute it with torch.distributed.tensor"
        )
    return Held(dtype_name(leaf), shape, local, box, grid_of(shape, tuple(mesh.shape), dims))


def _check_placements(path: str, placements: Sequence[Placement], axes: int) -> None:
    """Check that placements give each rank a fixed part of a leaf of so many dims."""
    for placement in placements:
        plain = isinstance(placement, (Shard, Replicate)) and not isinstance(placement, _StridedShard)
        if not plain:
            raise CheckpointError(
                f"{state_path(path)}: placement {placement} must be Shard or Replicate; redistribute it first"
            )
        if isinstance(placement, Shard) and not -axes <= placement.dim < axes:
            raise CheckpointError(
                f"{state_path(path)}: placement {placement} must cut one of its {axes} dims; change the layout"
            )


def ranks_of(found: Mapping[str, Leaf]) -> Ranks | None:
    """The ranks that hold a state: those of its DTensors' mesh, or this process alone.

    Returns:
        None on a rank that holds no part of it.

    Raises:
        CheckpointError: its leaves lie on meshes of different ranks.
    """
    first: tuple[str, tuple[int, ...]] | None = None
    for path, leaf in found.items():
        if isinstance(leaf, DTensor):
            members = members_of(leaf.device_mesh)
            if first is None:
                first = path, members
            elif members != first[1]:
                raise CheckpointError(
                    f"{state_path(path)}: lies on ranks {list(members)}, {state_path(first[0])} on {list(first[1])}, "
                    f"must all lie on the same; use one mesh for the whole state"
                )
    return ALONE if first is None else over(first[1])


def members_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of a mesh, in its C order."""
    return tuple(mesh.mesh.flatten().tolist())


def target_of(leaf: Tensor) -> Target:
    """The place of a leaf of an abstract state: where a checkpoint's leaf of the same path is to lie."""
    shape = tuple(leaf.shape)
    if isinstance(leaf, DTensor):
        return _on(leaf.device_mesh, shape, tuple(leaf.placements))
    return Target(shape, whole(shape))


def sharded(path: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: Any) -> Target:
    """A place on a mesh.

    Raises:
        CheckpointError: the placements do not fit the leaf.
        ValueError: there is not one placement for each axis of the mesh.
    """
    if not isinstance(placements, Sequence) or isinstance(placements, str) or len(placements) != mesh.ndim:
        raise ValueError(
            f"layout: {placements} for {state_path(path)} must have one placement for each of the mesh's "
            f"{mesh.ndim} axes; add Replicate() where an axis does not cut it"
        )
    _check_placements(path, placements, len(shape))
    normal = tuple(Shard(p.dim % len(shape)) if isinstance(p, Shard) else p for p in placements)
    return _on(mesh, shape, normal)


def _on(mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Target:
    at = mesh.get_coordinate()
    box = tuple((0, 0) for _ in shape)
    if at is not None:
        box = box_at(shape, tuple(mesh.shape), _dims(placements), tuple(at))
    return Target(shape, box, mesh, placements)


def _dims(placements: Sequence[Placement]) -> list[int | None]:
    return [placement.dim if isinstance(placement, Shard) else None for placement in placements]
