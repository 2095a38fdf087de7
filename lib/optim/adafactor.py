"""Adafactor: second moments of matrices kept as a row and a column."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lib.optim.combine import Where, chain
from lib.optim.decay import decay
from lib.optim.parts import descend
from lib.optim.rule import Now, Rule, counter
from lib.scalars import together
from lib.tree import Tree, flatten, from_leaves, leaves, tree_map_named

__all__ = ["adafactor", "scale_by_adafactor"]

_TINY = torch.finfo(torch.float32).eps


def scale_by_adafactor(
    power: float = 0.8,
    *,
    least: float = 1e-3,
    clip: float = 1.0,
    layers: Callable[[str], bool] = lambda path: False,
) -> Rule:
    """Turn gradients into Adafactor's direction.

        b = 1 - t^-power;    v <- b v + (1 - b) g^2, of matrices only its means R over columns and C over rows: v = R C / mean(R)
        u = g / sqrt(v);     u <- u / max(1, rms(u) / clip)
        g <- u max(least, rms(p)) min(1, 1 / (lr sqrt(t)))

    Args:
        power: how fast the memory grows.
        least: rms that a parameter counts with at least.
        clip: greatest rms of an update before it is scaled.
        layers: whether axis 0 of a path counts layers, each with its own rms; a stack of vectors is not factored.

    Slot: `count` int64 []; for matrices `row` [..., rows, 1] and `column` [..., 1, columns]; for others `second`.

    Source: Shazeer & Stern 2018, algorithms 4 and 5, arXiv:1804.04235, in torch.optim.Adafactor's form: lr is the limit of the
    relative step, 1 / sqrt(t) below it.
    """

    def factored(params: Tree) -> set[str]:
        return {path for path, leaf in leaves(params).items() if leaf.ndim - layers(path) >= 2}

    def init(params: Tree) -> Tree:
        matrices, named = factored(params), leaves(params)
        slot: Tree = {"count": counter(params)}
        parts = {
            "row": {path: leaf.new_zeros((*leaf.shape[:-1], 1)) for path, leaf in named.items() if path in matrices},
            "column": {
                path: leaf.new_zeros((*leaf.shape[:-2], 1, leaf.shape[-1]))
                for path, leaf in named.items()
                if path in matrices
            },
            "second": {path: torch.zeros_like(leaf) for path, leaf in named.items() if path not in matrices},
        }
        return {**slot, **{name: from_leaves(part) for name, part in parts.items() if part}}

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        matrices, old = factored(params), {name: leaves(slot[name]) for name in slot if name != "count"}
        count = slot["count"] + 1
        times = count.to(torch.float64)
        rates = now.each_rate(params)
        flat, rebuild = flatten(rates)
        fresh, *limits = together([times**-power, *[1 / (rate * times.sqrt()) for rate in flat]])
        new: dict[str, dict[str, Tensor]] = {name: {} for name in old}

        def direction(path: str, g: Tensor, p: Tensor, limit: Tensor) -> Tensor:
            square = g * g
            if path in matrices:
                row = torch.lerp(old["row"][path], _mean(square, (-1,)), fresh)
                column = torch.lerp(old["column"][path], _mean(square, (-2,)), fresh)
                new["row"][path], new["column"][path] = row, column
                second = row @ column / _mean(row, (-2,)).clamp(min=_TINY)
            else:
                second = torch.lerp(old["second"][path], square, fresh)
                new["second"][path] = second
            u = g * second.clamp(min=_TINY * _TINY).rsqrt()
            whole = tuple(range(int(layers(path)), g.ndim))
            smaller = (_rms(u, whole) / clip).clamp(min=1.0)
            return u / smaller * _rms(p, whole).clamp(min=least) * limit.clamp(max=1.0)

        moved = tree_map_named(direction, grads, params, rebuild(limits))
        return moved, params, {"count": count, **{name: from_leaves(part) for name, part in new.items()}}

    return Rule(init, update, "adafactor")


def adafactor(
    *,
    power: float = 0.8,
    least: float = 1e-3,
    clip: float = 1.0,
    where: Where = "*",
    layers: Callable[[str], bool] = lambda path: False,
) -> Rule:
    """Make the Adafactor rule: `scale_by_adafactor`, which measures parameters before they decay, `decay`, `descend`."""
    return chain(scale_by_adafactor(power, least=least, clip=clip, layers=layers), decay(where), descend())


def _rms(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return _mean(x.square(), axes).sqrt() if axes else x.abs()


def _mean(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean over axes, which stay; that of nothing is 0."""
    count = math.prod([x.shape[axis] for axis in axes])
    return x.sum(axes, keepdim=True) / max(count, 1)
