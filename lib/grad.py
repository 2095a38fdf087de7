"""Gradients over micro-batches, their norm and their clipping, all in fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor

from lib.shapes import Float
from lib.shard.words import gather
from lib.tree import Tree, flatten, leaves, tree_map

__all__ = ["Found", "MicroLoss", "Summed", "accumulate", "clip_factor", "global_norm", "micro_batches"]

# Lets Dynamo trace torch.autograd.grad inside a compiled step instead of refusing it (torch >= 2.11).
torch._dynamo.config.trace_autograd_ops = True


Found = tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, Tensor]
"""The sum of losses that is descended, the number of targets, and the sum that is reported where that is another one."""

MicroLoss = Callable[[Tree, Tree, Tensor | None, int], Found]
"""(parameters, micro-batch, key of this update's draws or none, micro-batch's number) -> what was found."""


class Summed(NamedTuple):
    """Sums over all micro-batches: gradients of what is descended times `scale`, the reported loss in its unit, targets."""

    grads: Tree
    total: Tensor
    targets: Tensor


def accumulate(
    loss: Callable[[Tree, Tree, int], Found],
    params: Tree,
    parts: list[Tree],
    scale: Tensor,
    frozen: Collection[str] = (),
) -> Summed:
    """Add up the gradients of each micro-batch.

    Args:
        loss: (parameters, micro-batch, its number) -> what was found.
        params: fp32 master weights.
        parts: micro-batches.
        scale: loss scale.
        frozen: paths of parameters that are not trained; their gradients are zero, and nothing is computed for them.
    """
    flat, rebuild = flatten(params)
    trained = [path not in frozen for path in leaves(params)]
    summed: Summed | None = None
    for number, part in enumerate(parts):
        variables = [leaf.detach().requires_grad_(wanted) for leaf, wanted in zip(flat, trained, strict=True)]
        with torch.enable_grad():
            total, count, *reported = loss(rebuild(variables), part, number)
            # a parameter this micro-batch does not use has gradient zero, so the state has the same leaves at every step
            wanted = [leaf for leaf in variables if leaf.requires_grad]
            found = iter(torch.autograd.grad(total.to(torch.float32) * scale, wanted, materialize_grads=True))
        grads = rebuild(
            [(next(found) if leaf.requires_grad else torch.zeros_like(leaf)).to(torch.float32) for leaf in variables]
        )
        part_sum = Summed(grads, (*reported, total)[0].detach().to(torch.float32), torch.as_tensor(count).detach())
        summed = part_sum if summed is None else _add(summed, part_sum)
    if summed is None:
        raise ValueError("batch: has 0 micro-batches, must have at least one; give leaves a leading axis of 1 or more")
    return summed


def micro_batches(batch: Tree) -> list[Tree]:
    """Cut a batch along its leading axis; `cursor` belongs to the whole batch and stays behind."""
    data = {name: value for name, value in batch.items() if name != "cursor"}
    flat, rebuild = flatten(data)
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in flat}
    if len(counts) != 1:
        raise ValueError(
            f"batch: leaves have {sorted(counts)} micro-batches on axis 0, must all have the same number; "
            f"add a leading axis with batch.unsqueeze(0) for one micro-batch"
        )
    return [rebuild(part) for part in zip(*[leaf.unbind(0) for leaf in flat], strict=True)]


def global_norm(tree: Tree) -> Float[Tensor, ""]:
    """Root of the sum of the squares of all leaves."""
    return gather(torch.stack([leaf.square().sum() for leaf in leaves(tree).values()]).sum()).sqrt()


def clip_factor(norm: Float[Tensor, ""], limit: float | Tensor | None) -> Float[Tensor, ""]:
    """Factor that brings a gradient of norm `norm` to at most `limit`: min(1, limit / (norm + 1e-6)); none = 1.

    Source: Pascanu et al. 2013, algorithm 1, arXiv:1211.5063; the 1e-6 is torch's.
    """
    return torch.ones_like(norm) if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


def _add(one: Summed, other: Summed) -> Summed:
    return Summed(tree_map(torch.add, one.grads, other.grads), one.total + other.total, one.targets + other.targets)
