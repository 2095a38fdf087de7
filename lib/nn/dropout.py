"""Dropout whose mask is a function of (key of the position, place in the model, channel)."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.random import fold, keep_mask
from lib.shapes import Float, Int

__all__ = ["dropout", "position_keys"]


def position_keys(key: Int[Tensor, ""], rows: Int[Tensor, " b"], length: int) -> Int[Tensor, "b s"]:
    """Derive a key for each position.

    Args:
        key: key of this update.
        rows: row numbers over the whole update, so that micro-batches and meshes draw the same masks.
        length: positions s of a row.
    """
    return fold(fold(key, rows)[:, None], torch.arange(length, device=key.device))


def dropout(
    x: Float[Tensor, "b s d"], rate: float, keys: Int[Tensor, "b s"] | None, site: Int[Tensor, ""] | int
) -> Float[Tensor, "b s d"]:
    """Set channels to 0 with chance `rate` and scale the others by 1 / (1 - rate).

    Args:
        x: activations.
        rate: in [0, 1).
        keys: as `position_keys` makes them; none = evaluation, `x` comes back.
        site: number of this place in the model.

    Source: Srivastava et al. 2014, section 4.
    """
    if keys is None or rate == 0.0:
        return x
    return torch.where(keep_mask(keys, site, x.shape[2], rate), x / (1 - rate), 0.0)
