"""Softmax attention with grouped key-value heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lib.shapes import Float

__all__ = ["attend"]


def attend(
    q: Float[Tensor, "b s h k"],
    k: Float[Tensor, "b t g k"],
    v: Float[Tensor, "b t g k"],
    bias: Float[Tensor, "b s t"] | None,
) -> Float[Tensor, "b s h k"]:
    """Mix values by softmax(q k^T / sqrt(head width) + bias); query head i uses key-value head i // (h / g).

    Args:
        q: queries.
        k: keys.
        v: values.
        bias: 0 or -inf for each pair; none = causal.

    Source: Vaswani et al. 2017, eq. 1; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
    """
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if bias is None else bias[:, None],
        is_causal=bias is None,
    )
    return mixed.transpose(1, 2)
