"""Randomness by counting: every draw is a hash of (key, purpose, place), in plain integer arithmetic.

There is no generator to save or to share. The same place gives the same bits on every device, on every mesh, in eager and in
compiled code, and any part of a tensor can be drawn without the rest.
"""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor, library

from lib.shapes import Bool, Float, Int

__all__ = ["fold", "keep_mask", "mix32", "normal", "purpose", "uniform"]

_LOW32 = 0xFFFFFFFF
_KNOTS_BITS = 12  # the normal's quantile table has 2**12 steps; the other 20 bits of a hash lie between two of them


def mix32(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Hash 32-bit values, one to one.

    Args:
        x: values in [0, 2**32), in int64 (torch has no unsigned arithmetic that fuses).

    Returns:
        Values in [0, 2**32).

    Source: "lowbias32", C. Wellons 2018, Hash Prospector. The second multiplier stands less 2**32, the same modulo 2**32, so
    that no product leaves int64.
    """
    # Not written as `>>`: of a DTensor torch 2.13 gives another value than of the tensor it holds.
    x = x ^ torch.bitwise_right_shift(x, 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ torch.bitwise_right_shift(x, 15)
    x = (x * (0x846CA68B - 2**32)) & _LOW32
    return x ^ torch.bitwise_right_shift(x, 16)


def fold(key: Int[Tensor, "..."], word: Int[Tensor, "..."] | int) -> Int[Tensor, "..."]:
    """Derive the key of a place from the key of the whole.

    Args:
        key: int64, >= 0.
        word: which place, in [0, 2**63); broadcasts against `key`.

    Returns:
        A key in [0, 2**32).
    """
    other = torch.full((), word, dtype=torch.int64, device=key.device) if isinstance(word, int) else word
    folded: Tensor = _fold(key, other)
    return folded


# Opaque to the compiler: each mix32 uses its argument twice three times over, and a chain of them, inlined, costs Inductor
# time exponential in its length. Keys are small; only the last hash of a draw, in `keep_mask`, has to fuse.
@library.custom_op("purestep::fold", mutates_args=())
def _fold(key: Tensor, word: Tensor) -> Tensor:
    h = mix32(mix32(key & _LOW32) ^ (key >> 32))
    h = mix32(mix32((h + 0x9E3779B9) & _LOW32) ^ (word & _LOW32))
    return mix32(h ^ (word >> 32))


@_fold.register_fake
def _(key: Tensor, word: Tensor) -> Tensor:
    return torch.empty_like(key + word)


def purpose(name: str) -> int:
    """Number a purpose by its name, so that draws for different purposes are independent (FNV-1a, 32 bits)."""
    h = 0x811C9DC5
    for byte in name.encode():
        h = ((h ^ byte) * 0x01000193) & _LOW32
    return h


def uniform(hashed: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Turn hashes into fp32 in [0, 1), exactly: the upper 24 bits times 2**-24."""
    return (hashed >> 8).to(torch.float32) * 2.0**-24


def normal(hashed: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Turn hashes into standard normal values, cut at about 3.8 standard deviations.

    The quantile function, linear between 2**12 knots: only sums and products of float64, which round the same everywhere,
    where log and cos would not. Mean 0 and variance 1 to within 1e-12.
    """
    knots = torch.tensor(_quantiles(), dtype=torch.float64, device=hashed.device)
    step = hashed >> (32 - _KNOTS_BITS)
    between = (hashed & (2 ** (32 - _KNOTS_BITS) - 1)).to(torch.float64) * 2.0 ** (_KNOTS_BITS - 32)
    low, high = knots[step], knots[step + 1]
    value: Tensor = (low + (high - low) * between).to(torch.float32)
    return value


def keep_mask(keys: Int[Tensor, "..."], site: Int[Tensor, ""] | int, width: int, rate: float) -> Bool[Tensor, "... d"]:
    """Draw which of `width` channels stay under dropout at `rate`.

    Args:
        keys: one for each position.
        site: number of the place in the model, so that one set of keys serves all places.
        width: channels d.
        rate: chance to be dropped, in [0, 1).
    """
    here = (keys + site * 0x9E3779B1) & _LOW32
    channel = (torch.arange(width, device=keys.device) * 0x85EBCA77) & _LOW32
    keep: Tensor = mix32(here[..., None] ^ channel) >= round(rate * 2**32)
    return keep


@functools.cache
def _quantiles() -> tuple[float, ...]:
    n = 2**_KNOTS_BITS
    law = NormalDist()
    upper = [law.inv_cdf(i / n) for i in range(n // 2, n)] + [law.inv_cdf(1 - 1 / (4 * n))]
    values = [-q for q in reversed(upper[1:])] + upper
    # variance of a value uniform between knots a and b is (a*a + a*b + b*b) / 3
    variance = math.fsum((a * a + a * b + b * b) / 3 for a, b in pairwise(values)) / n
    return tuple(q / math.sqrt(variance) for q in values)
