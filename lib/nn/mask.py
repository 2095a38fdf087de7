"""Who may attend to whom, as what is added to attention scores: 0 where allowed, -inf elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor, library

from lib.shapes import Float, Int

__all__ = ["causal_bias", "document_bias"]


def causal_bias(
    queries: int, keys: int, dtype: torch.dtype, device: torch.device | None = None
) -> Float[Tensor, "s t"]:
    """Each query sees the keys up to its own place; the last query stands at the last key."""
    places = torch.arange(keys, device=device)
    seen = places[keys - queries :, None] >= places
    return _as_bias(seen, dtype)


def document_bias(segments: Int[Tensor, "b s"], dtype: torch.dtype) -> Float[Tensor, "b s s"]:
    """Each position sees itself and the earlier positions of its own document."""
    bias: Tensor = _document_bias(segments, dtype)
    return bias


# Opaque to the compiler, which would otherwise compare all pairs again in each layer, forward and backward.
@library.custom_op("purestep::document_bias", mutates_args=())
def _document_bias(segments: Tensor, dtype: torch.dtype) -> Tensor:
    place = torch.arange(segments.shape[1], device=segments.device)
    seen = (segments[:, :, None] == segments[:, None, :]) & (place[:, None] >= place)
    return _as_bias(seen, dtype)


@_document_bias.register_fake
def _(segments: Tensor, dtype: torch.dtype) -> Tensor:
    rows, length = segments.shape
    return segments.new_empty((rows, length, length), dtype=dtype)


def _as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))
