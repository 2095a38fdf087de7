"""What a step says where leaves lie on a mesh. On one device each word is the identity, and costs nothing.

A step works on plain tensors, but for leaves that are cut over ranks, which are DTensors; and what it gives lies as what it got.
Where the rows of a batch are cut over ranks, each works on its own, and what it finds is summed over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lib.tree import from_leaves, leaves, tensordict

__all__ = ["Rows", "gather", "gathered", "laid", "local", "mine", "place", "rows_of", "split", "spread", "total"]

ROWS = 1  # the axis of a batch's leaves that counts rows, behind that of micro-batches


class Rows(NamedTuple):
    """How the rows of a batch are cut over ranks.

    Attributes:
        mesh: which ranks.
        placements: Shard(1) for each axis of the mesh that cuts them, else Replicate.
        shape: of [micro-batches, rows], all ranks' together.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, int]

    @property
    def summed(self) -> list[Placement]:
        """How what a rank found in its own rows lies: to be summed over the axes that cut them."""
        return [Replicate() if placement.is_replicate() else Partial() for placement in self.placements]

    def numbers(self) -> Tensor:
        """The numbers of this rank's rows within a micro-batch, int64."""
        every = torch.arange(self.shape[1], device=self.mesh.device_type).expand(self.shape)
        return laid(every, self.mesh, self.placements).to_local()[0]


def rows_of(batch: Mapping[str, Any]) -> Rows | None:
    """See how the rows of a batch are cut over ranks; none = each rank has all of them.

    Raises:
        ValueError: some leaves are cut and others are not, or another axis than that of rows is.
    """
    found: dict[str, Rows] = {}
    whole: list[str] = []
    for path, leaf in leaves({name: value for name, value in batch.items() if name != "cursor"}).items():
        if isinstance(leaf, DTensor) and not all(placement.is_replicate() for placement in leaf.placements):
            if not all(placement.is_replicate() or placement.is_shard(ROWS) for placement in leaf.placements):
                raise ValueError(
                    f"batch.{path}: is placed {list(leaf.placements)}, must be cut along its rows, axis 1, or not at all; "
                    f"distribute it with Shard(1)"
                )
            found[path] = Rows(leaf.device_mesh, tuple(leaf.placements), (leaf.shape[0], leaf.shape[1]))
        elif leaf.ndim > ROWS:
            whole.append(path)
    if not found:
        return None
    first, rows = next(iter(found.items()))
    other = next((path for path, cut in found.items() if cut != rows), whole[0] if whole else None)
    if other is not None:
        raise ValueError(
            f"batch.{other}: its rows lie otherwise than those of batch.{first}, must all lie alike; distribute all leaves"
        )
    return rows


def spread(batch: Any, mesh: DeviceMesh, axes: Sequence[str] | None = None) -> Any:
    """Cut the rows of a batch that every rank has the whole of, in equal parts as far as they go; nothing is sent.

    Args:
        batch: a TensorDict or nested dict, leaves are [micro-batches, rows, ...]; `cursor` and what has no rows stay whole.
        mesh: the mesh that parameters lie on.
        axes: names of its axes to cut over; none = all.
    """
    known = mesh.mesh_dim_names or ()
    if strange := [axis for axis in axes or () if axis not in known]:
        raise ValueError(f"axes={strange} must be axes of the mesh, {list(known)}; name those")
    chosen = [axes is None or (bool(known) and known[axis] in axes) for axis in range(mesh.ndim)]
    placements = [Shard(ROWS) if cut else Replicate() for cut in chosen]

    def one(path: str, leaf: Tensor) -> Tensor:
        if path == "cursor" or path.startswith("cursor.") or leaf.ndim <= ROWS:
            return leaf
        return laid(leaf, mesh, placements)

    tree = from_leaves({path: one(path, leaf) for path, leaf in leaves(batch).items()})
    return tensordict(tree) if isinstance(batch, TensorDict) else tree


def mine(leaf: Tensor) -> Tensor:
    """What this rank has of a leaf, as a plain tensor; nothing is sent."""
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def gather(leaf: Tensor, dtype: torch.dtype | None = None, over: Rows | None = None) -> Tensor:
    """The whole of a leaf, for use, in another dtype if need be, in which it is sent.

    Its gradient is summed over the ranks that have different rows, in fp32, and comes back cut as the leaf is.
    """
    if not isinstance(leaf, DTensor):
        return leaf if dtype is None else leaf.to(dtype)
    if over is not None and over.mesh != leaf.device_mesh:
        raise ValueError(
            f"batch: its rows are cut over {over.mesh}, parameters lie on {leaf.device_mesh}, must be one mesh; use one"
        )
    everywhere = [Replicate()] * leaf.device_mesh.ndim
    whole = leaf.redistribute(placements=everywhere, forward_dtype=dtype, backward_dtype=leaf.dtype)
    return whole.to_local(grad_placements=everywhere if over is None else over.summed)


def gathered(scalars: Sequence[Tensor]) -> list[Tensor]:
    """The whole of 0-d values that may each be a sum over what ranks have; one message for all that lie alike."""
    found = list(scalars)
    alike: dict[Any, list[int]] = {}
    for number, scalar in enumerate(scalars):
        if isinstance(scalar, DTensor):
            alike.setdefault((scalar.device_mesh, scalar.placements), []).append(number)
    for numbers in alike.values():
        for number, scalar in zip(numbers, gather(torch.stack([scalars[n] for n in numbers])).unbind(0), strict=True):
            found[number] = scalar
    return found


def total(value: Tensor, over: Rows | None) -> Tensor:
    """The sum of what each rank found in its rows; a DTensor has been summed on its way here."""
    if over is None or isinstance(value, DTensor):
        return value
    return gather(DTensor.from_local(value, over.mesh, over.summed, run_check=False))


def local(leaf: Tensor) -> Tensor:
    """A leaf that every rank has the whole of, as a plain tensor; nothing is sent. One that is cut stays cut."""
    if not isinstance(leaf, DTensor) or not all(placement.is_replicate() for placement in leaf.placements):
        return leaf
    return leaf.to_local()


def place(leaf: Tensor, like: Tensor) -> Tensor:
    """Bring a leaf to lie as another one does, wherever the operations that made it have left it."""
    if not isinstance(like, DTensor):
        return gather(leaf)
    if not isinstance(leaf, DTensor):
        return split(leaf, like)
    return leaf.redistribute(placements=like.placements)


def split(whole: Tensor, like: Tensor) -> Tensor:
    """Cut what every rank has the whole of as another leaf is cut; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return laid(whole, like.device_mesh, like.placements)


def laid(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Lay what every rank has the whole of on a mesh; nothing is sent."""
    # Not by `distribute_tensor`, which Dynamo does not trace (torch 2.13).
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=placements)
