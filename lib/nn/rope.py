"""Rotary positions: queries and keys turned by an angle that grows with their position, so that products see distances."""

from __future__ import annotations

import torch
from torch import Tensor

from lib.shapes import Float, Int

__all__ = ["rotate", "rotations"]


def rotations(
    positions: Int[Tensor, "b s"], width: int, theta: float
) -> tuple[Float[Tensor, "b s k"], Float[Tensor, "b s k"]]:
    """Cosines and sines of the angles of each position, fp32.

        angle_j = position * theta^(-2j / width),   j = 0 .. width/2 - 1, the list written twice

    Args:
        positions: place in the document, >= 0.
        width: head width k, even.
        theta: base, > 0.

    Source: Su et al. 2021, eq. 15, arXiv:2104.09864, with the pairs (j, j + width/2) of Llama.
    """
    even = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].to(torch.float32) * theta ** (-even / width)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(
    x: Float[Tensor, "b s h k"], cos: Float[Tensor, "b s k"], sin: Float[Tensor, "b s k"]
) -> Float[Tensor, "b s h k"]:
    """Turn each pair (x_j, x_{j + k/2}) by its angle; products in fp32, result in the dtype of `x`."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x * cos[:, :, None] + turned * sin[:, :, None]).to(x.dtype)
