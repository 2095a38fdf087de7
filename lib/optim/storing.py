"""Keeping fp32 values in bf16, rounded by chance, so that what is less than half a step is not lost on average."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.random import fold, mix32, purpose
from lib.shapes import Float, Int
from lib.shard.words import split
from lib.tree import Tree, tree_map, tree_map_named

__all__ = ["round_by_chance", "stored"]

_LOW16, _LOW32 = 0xFFFF, 0xFFFFFFFF


def stored(tree: Tree, dtype: torch.dtype, key: Int[Tensor, ""], site: int) -> Tree:
    """Bring fp32 leaves into the dtype they are kept in; bf16 by chance, each leaf and `site` by draws of its own."""
    if dtype != torch.bfloat16:
        return tree_map(lambda leaf: leaf.to(dtype), tree)
    return tree_map_named(lambda path, leaf: round_by_chance(leaf, fold(fold(key, purpose(path)), site)), tree)


def round_by_chance(values: Float[Tensor, "..."], key: Int[Tensor, ""]) -> Tensor:
    """Round fp32 to bf16, up with the chance of how far up it is: the mean over keys is the value itself.

    Values that bf16 has, infinities and NaN keep their bits. Draws are by (key, position in the tensor).

    Source: the rule of Gupta et al. 2015, arXiv:1502.02551: the 16 bits that fall away, plus 16 random ones, carry or do not.
    """
    place = split(torch.arange(values.numel(), device=values.device).reshape(values.shape), values)
    chance = mix32((place * 0x9E3779B1 + key) & _LOW32) & _LOW16
    bits = values.view(torch.int32).to(torch.int64)
    carried = ((bits + chance) & ~_LOW16).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(values), carried, values).to(torch.bfloat16)
