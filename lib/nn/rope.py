"""Rotary positions: queries and keys turned by an angle that grows with their position, so that products see distances."""

from __future__ import annotations

import torch
from torch import Tensor, library

from lib.shapes import Float, Int

__all__ = ["rotate", "rotations"]


def rotations(
    positions: Int[Tensor, "b s"], width: int, theta: float
) -> tuple[Float[Tensor, "b s j"], Float[Tensor, "b s j"]]:
    """Cosines and sines of the angles of each position, fp32.

        angle_j = position * theta^(-2j / width),   j = 0 .. width/2 - 1

    Args:
        positions: place in the document, >= 0.
        width: head width k, even.
        theta: base, > 0.

    Source: Su et al. 2021, eq. 15, arXiv:2104.09864.
    """
    cos, sin = _rotations(positions, width, theta)
    return cos, sin


def rotate(
    x: Float[Tensor, "b s h k"], cos: Float[Tensor, "b s j"], sin: Float[Tensor, "b s j"]
) -> Float[Tensor, "b s h k"]:
    """Turn each pair (x_j, x_{j + k/2}) by its angle, the pairs of Llama; products in fp32, result in the dtype of `x`."""
    left, right = x.chunk(2, dim=-1)
    c, s = cos[:, :, None], sin[:, :, None]
    return torch.cat(((left * c - right * s).to(x.dtype), (right * c + left * s).to(x.dtype)), dim=-1)


# Opaque to the compiler, which would otherwise work out the angles again for each head, in each layer, forward and backward.
@library.custom_op("purestep::rotations", mutates_args=())
def _rotations(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    even = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].to(torch.float32) * theta ** (-even / width)
    return angles.cos(), angles.sin()


@_rotations.register_fake
def _(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, width // 2)
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)
