"""What a step says where its leaves may lie on a mesh. On one device each word is the identity, and costs nothing.

A step works on plain tensors, but for leaves that are cut over ranks, which are DTensors; and what it gives lies as what it got.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

__all__ = ["gather", "local", "place", "split"]


def gather(leaf: Tensor) -> Tensor:
    """The whole of a leaf, for use; its gradient comes back cut as the leaf is."""
    if not isinstance(leaf, DTensor):
        return leaf
    everywhere = [Replicate()] * leaf.device_mesh.ndim
    return leaf.redistribute(placements=everywhere).to_local(grad_placements=everywhere)


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
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
