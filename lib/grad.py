"""Gradients over micro-batches, their norm and their clipping, all in fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
import torch._dynamo
from torch import Tensor

from lib.shapes import Float
from lib.shard.words import Rows, gathered, total
from lib.tree import Tree, flatten, leaves, tree_map, tree_map_named

__all__ = ["Found", "MicroLoss", "Part", "Summed", "accumulate", "clip_factor", "global_norm", "micro_batches"]

# Lets Dynamo trace torch.autograd.grad inside a compiled step instead of refusing it (torch >= 2.11).
torch._dynamo.config.trace_autograd_ops = True


Found = tuple[Tensor, Tensor | float] | tuple[Tensor, Tensor | float, Tensor]
"""The sum of losses that is descended, the number of targets, and the sum that is reported where that is another one."""


class Part(NamedTuple):
    """Which part of an update is looked at.

    Attributes:
        number: of the micro-batch.
        over: how its rows are cut over ranks; none = they are not.
    """

    number: int
    over: Rows | None = None

    def rows(self, count: int, device: torch.device) -> Tensor:
        """The numbers of its `count` rows over the whole update, int64 [count], so that draws by row suit every mesh."""
        if self.over is None:
            return torch.arange(self.number * count, (self.number + 1) * count, device=device)
        return self.over.numbers() + self.number * self.over.shape[1]

    def word(self, device: torch.device) -> Tensor | int:
        """What tells it from the other parts of its update, here or on other ranks."""
        if self.over is None:
            return self.number
        # The first of its rows; a rank may have none.
        return self.over.numbers()[:1].sum() + self.number * self.over.shape[1]


MicroLoss = Callable[[Tree, Tree, Tensor | None, Part], Found]
"""(parameters, micro-batch, key of this update's draws or none, which part it is) -> what was found."""


class Summed(NamedTuple):
    """Sums over all micro-batches: gradients of what is descended times `scale`, the reported loss in its unit, targets."""

    grads: Tree
    total: Tensor
    targets: Tensor


def accumulate(
    loss: Callable[[Tree, Tree, Part], Found],
    params: Tree,
    parts: list[Tree],
    scale: Tensor,
    frozen: Collection[str] = (),
    over: Rows | None = None,
) -> Summed:
    """Add up the gradients of each micro-batch, and of all ranks.

    Args:
        loss: (parameters, micro-batch, which part it is) -> what was found.
        params: fp32 master weights.
        parts: micro-batches.
        scale: loss scale.
        frozen: paths of parameters that are not trained; their gradients are zero, and nothing is computed for them.
        over: how rows are cut over ranks.
    """
    flat, rebuild = flatten(params)
    trained = [path not in frozen for path in leaves(params)]
    summed: Summed | None = None
    for number, part in enumerate(parts):
        variables = [leaf.detach().requires_grad_(wanted) for leaf, wanted in zip(flat, trained, strict=True)]
        with torch.enable_grad():
            total, count, *reported = loss(rebuild(variables), part, Part(number, over))
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
    return _over_ranks(summed, over, frozen)


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
    return torch.stack(gathered([leaf.square().sum() for leaf in leaves(tree).values()])).sum().sqrt()


def clip_factor(norm: Float[Tensor, ""], limit: float | Tensor | None) -> Float[Tensor, ""]:
    """Factor that brings a gradient of norm `norm` to at most `limit`: min(1, limit / (norm + 1e-6)); none = 1.

    Source: Pascanu et al. 2013, algorithm 1, arXiv:1211.5063; the 1e-6 is torch's.
    """
    return torch.ones_like(norm) if limit is None else torch.clamp(limit / (norm + 1e-6), max=1.0)


def _over_ranks(summed: Summed, over: Rows | None, frozen: Collection[str]) -> Summed:
    if over is None:
        return summed
    # In one message, and exact: a count is far below 2**53, an fp32 sum has its place in a float64.
    numbers = total(torch.stack([summed.total.to(torch.float64), summed.targets.to(torch.float64)]), over)
    grads = tree_map_named(lambda path, g: g if path in frozen else total(g, over), summed.grads)
    return Summed(grads, numbers[0].to(summed.total.dtype), numbers[1].to(summed.targets.dtype))


def _add(one: Summed, other: Summed) -> Summed:
    return Summed(tree_map(torch.add, one.grads, other.grads), one.total + other.total, one.targets + other.targets)
