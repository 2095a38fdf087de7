"""What a step says where its leaves may lie on a mesh. On one device each word is the identity, and costs nothing.

A state that is cut over a mesh has DTensors for its large leaves, and plain tensors, the same on all ranks, for the rest.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

__all__ = ["gather", "place", "split"]


def gather(leaf: Tensor) -> Tensor:
    """The whole of a leaf, for use; its gradient comes back cut as the leaf is."""
    if not isinstance(leaf, DTensor):
        return leaf
    everywhere = [Replicate()] * leaf.device_mesh.ndim
    return leaf.redistribute(placements=everywhere).to_local(grad_placements=everywhere)


def place(leaf: Tensor, like: Tensor) -> Tensor:
    """Bring a leaf to lie as another one does, wherever the operations that made it have left it."""
    if not isinstance(leaf, DTensor) or not isinstance(like, DTensor) or leaf.placements == like.placements:
        return leaf
    return leaf.redistribute(placements=like.placements)


def split(whole: Tensor, like: Tensor) -> Tensor:
    """Cut what every rank has the whole of as another leaf is cut; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
