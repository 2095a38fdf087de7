"""Slot `params`: fp32 master weights, drawn from (key, path, index) and nothing else.

Any part of a parameter can be made without the rest, with the same bits: a rank makes just its own shard.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lib.model.lm import Spec, parameters
from lib.random import fold, normal, purpose
from lib.recipe import Model
from lib.tree import Tree, from_leaves

__all__ = ["draw", "init"]

_AT_ONCE = 2**20  # elements drawn at a time: bounds the int64 temporaries to some tens of MB


def init(model: Model, key: Tensor, *, device: torch.device | None = None) -> Tree:
    """Draw all parameters of a model; on the meta device only their shapes."""
    table = parameters(model)
    if device is not None and device.type == "meta":
        return from_leaves({path: torch.empty(spec.shape, device="meta") for path, spec in table.items()})
    return from_leaves({path: draw(key, path, spec) for path, spec in table.items()})


def draw(key: Tensor, path: str, spec: Spec, index: tuple[slice, ...] | None = None) -> Tensor:
    """Draw a parameter, or the part of it at `index`.

    Args:
        key: root key.
        path: the parameter's path.
        spec: its whole shape, and its law.
        index: one slice (of step 1) for each leading dimension; none = all.

    Returns:
        fp32, `spec.shape` cut to `index`. Element i (counted in the whole parameter) is std * normal(hash(key, path, i)).
    """
    spans = [range(size)[part] for size, part in zip(spec.shape, _padded(index, len(spec.shape)), strict=True)]
    shape = [len(span) for span in spans]
    if spec.std == 0:
        return torch.full(shape, spec.constant, device=key.device)
    root = fold(fold(key, purpose("init")), purpose(path))
    out = torch.empty(math.prod(shape), device=key.device)
    for start in range(0, out.numel(), _AT_ONCE):
        local = torch.arange(start, min(start + _AT_ONCE, out.numel()), device=key.device)
        out[start : start + local.numel()] = normal(fold(root, _global(local, spans, spec.shape))) * spec.std
    return out.view(shape)


def _padded(index: tuple[slice, ...] | None, dims: int) -> tuple[slice, ...]:
    return (*(index or ()), *(slice(None),) * (dims - len(index or ())))


def _global(local: Tensor, spans: list[range], shape: tuple[int, ...]) -> Tensor:
    """Positions in the whole parameter of positions in its part, both row-major."""
    place = torch.zeros_like(local)
    stride = 1
    for span, size in zip(reversed(spans), reversed(shape), strict=True):
        place += (local % len(span) + span.start) * stride
        local = local // len(span)
        stride *= size
    return place
