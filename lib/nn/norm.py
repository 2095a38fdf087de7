"""Root-mean-square normalisation, in fp32 whatever the compute dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.shapes import Float

__all__ = ["rms_norm"]


def rms_norm(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"], eps: float) -> Float[Tensor, "... d"]:
    """Divide by the root mean square over the width, then scale.

        y = x / sqrt(mean(x^2) + eps) * weight

    Source: Zhang & Sennrich 2019, eq. 4, arXiv:1910.07467.
    """
    wide = x.to(torch.float32)
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return unit.to(x.dtype) * weight
