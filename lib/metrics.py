"""What a step reports: a fixed set of 0-d tensors, their units, and how reports merge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from tensordict import TensorDict
from torch import Tensor

from lib.loss import bits_per_byte
from lib.tree import leaves, tensordict

__all__ = ["UNITS", "as_row", "eval_report", "merge", "train_report"]

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "step": "calls of train_step, this one included",
        "loss_nats": "nats per valid target, over the whole update",
        "bpb": "bits per byte of text",
        "lr": "learning rate of this update",
        "grad_norm": "L2 norm of the averaged gradient, before clipping",
        "tokens": "valid targets in this update",
        "bytes": "bytes of text the valid targets stand for",
        "scale": "loss scale of this update",
        "skipped": "refused updates so far",
        "refused": "1 if this update was refused",
        "spike_score": "share of updates so far that were spikes; with guard.window",
    }
)


def train_report(
    *,
    step: Tensor,
    total: Tensor,
    count: Tensor,
    size_bytes: Tensor,
    lr: Tensor,
    norm: Tensor,
    scale: Tensor,
    skipped: Tensor,
    refused: Tensor,
    spike_score: Tensor | None = None,
) -> TensorDict:
    """Report of one update; the names are those of `UNITS`, the same at every step of a recipe."""
    return tensordict(
        {
            "step": step.clone(),
            "loss_nats": total / count.clamp(min=1),
            "bpb": bits_per_byte(total, size_bytes),
            "lr": lr.clone(),
            "grad_norm": norm.clone(),
            "tokens": count.clone(),
            "bytes": size_bytes.clone(),
            "scale": scale.clone(),
            "skipped": skipped.clone(),
            "refused": refused.clone(),
            **({} if spike_score is None else {"spike_score": spike_score}),
        }
    )


def eval_report(total: Tensor, count: Tensor, size_bytes: Tensor) -> TensorDict:
    """Report of one evaluated batch: the sum in float64, so that reports merge without loss, and the ratios."""
    nats = total.to(torch.float64)
    return tensordict(
        {
            "nats": nats,
            "tokens": count.clone(),
            "bytes": size_bytes.clone(),
            "loss_nats": nats / count.clamp(min=1),
            "bpb": bits_per_byte(nats, size_bytes),
        }
    )


def merge(reports: Sequence[TensorDict]) -> TensorDict:
    """Report of several evaluated batches together: sums added, ratios taken of the sums and never averaged.

    Raises:
        ValueError: there are no reports.
    """
    if not reports:
        raise ValueError("reports: got none, must have at least one; evaluate a batch first")
    nats, count, size = (torch.stack([r[name] for r in reports]).sum() for name in ("nats", "tokens", "bytes"))
    return eval_report(nats, count, size)


def as_row(metrics: TensorDict) -> dict[str, int | float | None]:
    """Python values of a report, in one copy from the device.

    What is not finite becomes None, and so do ratios with nothing under them: the loss without targets, bits per byte without
    bytes.
    """
    named = leaves(metrics)
    host = torch.stack([leaf.to(torch.float64) for leaf in named.values()]).tolist()
    row: dict[str, int | float | None] = {}
    for (name, leaf), value in zip(named.items(), host, strict=True):
        row[name] = (value if leaf.is_floating_point() else int(value)) if math.isfinite(value) else None
    for ratio, under in (("loss_nats", "tokens"), ("bpb", "bytes")):
        if ratio in row and not row.get(under):
            row[ratio] = None
    return row
