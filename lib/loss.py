"""Losses as sums over valid targets, so that parts of a batch add up."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.shapes import Bool, Float, Int

__all__ = ["bits_per_byte", "by_chunks", "cross_entropy", "penalised"]


def cross_entropy(
    logits: Float[Tensor, "b s v"], targets: Int[Tensor, "b s"], mask: Bool[Tensor, "b s"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum the loss of the valid targets, and count them.

        total = - sum over valid i of log softmax(logits_i)[target_i]

    Args:
        logits: scores, any dtype; the softmax is taken in fp32.
        targets: ids in [0, v).
        mask: which targets are valid; the others get no gradient.

    Returns:
        The sum in nats, fp32, and the number of valid targets.
    """
    wanted = torch.where(mask, targets, -100)
    total = F.cross_entropy(
        logits.to(torch.float32).flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, mask.sum()


def penalised(
    logits: Float[Tensor, "b s v"],
    targets: Int[Tensor, "b s"],
    mask: Bool[Tensor, "b s"],
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, ""]]:
    """Sum what is descended over the valid targets, beside the cross-entropy alone.

        each: lse - (1 - smoothing) logits[target] - smoothing mean(logits) + z lse^2,    lse = log sum exp logits

    Returns:
        The sum, the number of valid targets, and the sum of cross-entropies, in nats.

    Source: label smoothing: Szegedy et al. 2016, arXiv:1512.00567; z-loss: Chowdhery et al. 2022, arXiv:2204.02311, section 5.
    """
    scores = logits.to(torch.float32)
    lse = scores.logsumexp(-1)
    wanted = torch.where(mask, targets, 0)
    own = scores.gather(-1, wanted[..., None])[..., 0]
    descended = lse - (1 - smoothing) * own - smoothing * scores.mean(-1) + z * lse.square()
    return (
        torch.where(mask, descended, 0.0).sum(),
        mask.sum(),
        torch.where(mask, lse - own, 0.0).sum().detach(),
    )


def by_chunks(
    hidden: Float[Tensor, "b s d"],
    weight: Float[Tensor, "v d"],
    targets: Int[Tensor, "b s"],
    mask: Bool[Tensor, "b s"],
    chunk: int,
    *,
    smoothing: float = 0.0,
    z: float = 0.0,
    descends: bool = True,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""], Float[Tensor, ""]]:
    """Do what `penalised` does to `hidden @ weight.T`, without ever holding more scores than those of `chunk` positions.

    The gradients of the head are worked out with the scores, in the one pass that has them. What is returned to be descended is a
    sum that has these gradients; its value means nothing.

    Args:
        hidden: what the head reads.
        weight: of the head.
        targets: ids in [0, v).
        mask: which targets are valid.
        chunk: positions at a time.
        smoothing: see `penalised`.
        z: see `penalised`.
        descends: whether gradients are wanted; without, the first sum is the cross-entropy too.
    """
    rows, wanted, valid = hidden.detach().flatten(0, 1), torch.where(mask, targets, 0).flatten(), mask.flatten()
    head = weight.detach()
    # Products of gradients in fp16 would lose what is small: no loss scale has been applied yet.
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    nats, d_rows, d_head = torch.zeros((), device=hidden.device), [], torch.zeros_like(head, dtype=torch.float32)
    with torch.no_grad():
        for at in range(0, rows.shape[0], chunk):
            x, target, here = [whole[at : at + chunk] for whole in (rows, wanted, valid)]
            scores = torch.nn.functional.linear(x, head).to(torch.float32)
            lse = scores.logsumexp(-1)
            own = scores.gather(-1, target[:, None])[:, 0]
            nats = nats + torch.where(here, lse - own, 0.0).sum()
            if not descends:
                continue
            slope = (scores - lse[:, None]).exp() * (1 + 2 * z * lse)[:, None] - smoothing / head.shape[0]
            hit = torch.arange(head.shape[0], device=head.device) == target[:, None]
            slope = torch.where(here[:, None], torch.where(hit, slope - (1 - smoothing), slope), 0.0).to(dtype)
            d_rows.append(slope @ head.to(dtype))
            d_head = d_head + (slope.mT @ x.to(dtype)).to(torch.float32)
    if not descends:
        return nats, mask.sum(), nats
    d_hidden = torch.cat(d_rows).reshape(hidden.shape)
    descended = (hidden.to(torch.float32) * d_hidden).sum() + (weight.to(torch.float32) * d_head).sum()
    return descended, mask.sum(), nats


def bits_per_byte(nats: Tensor, size_bytes: Tensor) -> Tensor:
    """Bits per byte of text: nats / (ln 2 * bytes); 0 where there are no bytes."""
    return torch.where(size_bytes > 0, nats / (math.log(2) * size_bytes.clamp(min=1)), 0.0)
