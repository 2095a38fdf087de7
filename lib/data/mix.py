"""Mixtures: which source each row of a run comes from, exact in every block of rows.

The rows of a run are counted through: row n lies in block n // K at place n % K. Every block holds the same number of
rows of each source, in an order drawn for (seed, block). A source's own rows come one after another, so what a mixture
has taken of each source by row n is a sum of two terms, and their sum over the sources is n: it needs no cursor of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.plan import Plan
from lib.data.shuffle import fold, permute
from lib.data.source import Source, extent

__all__ = ["Mix", "check_repeats", "counts", "deal", "mix_of", "passes"]

# The largest block: weights down to one in so many are met. The least: fewer orders to draw for a batch.
_MOST, _LEAST = 4096, 64


class Mix(NamedTuple):
    """A mixture.

    Attributes:
        shares: rows of each source in a block, each at least one.
    """

    shares: tuple[int, ...]

    @property
    def block(self) -> int:
        """Rows in a block."""
        return sum(self.shares)


def mix_of(sources: Sequence[Source]) -> Mix:
    """Turn weights into whole rows of a block.

    Weights with a common denominator of up to 4096 are met exactly; others by the largest remainders in a block of
    4096 rows, so to within one row of it.

    Raises:
        ValueError: a weight is not above 0, or so small that its source would never be read.

    >>> mix_of([Source("a", None, 1), Source("b", None, "0.5")]).shares
    (42, 21)
    """
    weights = [_exact(source) for source in sources]
    total = sum(weights, Fraction(0))
    parts = [weight / total for weight in weights]
    denominator = lcm(*(part.denominator for part in parts))
    block = denominator * max(1, _LEAST // denominator) if denominator <= _MOST else _MOST
    shares = [int(part * block) for part in parts]
    rest = sorted(range(len(parts)), key=lambda n: (shares[n] - parts[n] * block, n))
    for n in rest[: block - sum(shares)]:
        shares[n] += 1
    for source, share in zip(sources, shares, strict=True):
        if not share:
            least = float(total) / _MOST
            raise ValueError(
                f"data.sources.{source.name}.weight={source.weight} must be at least {least:.3g}; raise it"
            )
    return Mix(tuple(shares))


def counts(mix: Mix, row: int, seed: int) -> tuple[int, ...]:
    """Give how many of the first rows of a run come from each source."""
    blocks, place = divmod(row, mix.block)
    inside = np.bincount(_order(mix, blocks, place, seed), minlength=len(mix.shares))
    return tuple(blocks * share + int(some) for share, some in zip(mix.shares, inside, strict=True))


def deal(mix: Mix, row: int, rows: int, seed: int) -> NDArray[np.int64]:
    """Give the source, by its number, of each of these rows of a run.

    Args:
        mix: the mixture.
        row: the first of them, counted from the start of the run.
        rows: how many.
        seed: the run's.
    """
    parts, at = [], row
    while at < row + rows:
        block, place = divmod(at, mix.block)
        stop = min(mix.block, place + row + rows - at)
        parts.append(_order(mix, block, stop, seed)[place:])
        at += stop - place
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def passes(sources: Sequence[Source], plan: Plan, rows: int, seed: int) -> dict[str, Fraction]:
    """Give how often each source has been read through after so many rows of a run."""
    found = {}
    for source, count in zip(sources, counts(mix_of(sources), rows, seed), strict=True):
        size, length = extent(source, plan.length)
        found[source.name] = Fraction(count * length, size)
    return found


def check_repeats(
    sources: Sequence[Source], plan: Plan, limits: Mapping[str, float | None], *, rows: int, seed: int
) -> None:
    """Refuse a run that would read a source more often than it may.

    Args:
        sources: what the run reads.
        plan: the shape of its updates.
        limits: passes allowed, by the source's name; none, or a name left out = any number.
        rows: rows of the whole run.
        seed: the run's.

    Raises:
        ValueError: names the first source that does not last, and how often it would be read.
    """
    for name, needed in passes(sources, plan, rows, seed).items():
        limit = limits.get(name)
        if limit is not None and needed > Fraction(str(limit)):
            shown = ceil(needed * 100) / 100  # rounded up: the number shown is one that would do
            raise ValueError(
                f"data.sources.{name}.repeat={limit} must be at least {shown:g}, which is how often the {rows} rows of "
                f"this run read it; raise it, give more text, or lower the weight or steps"
            )


def _order(mix: Mix, block: int, stop: int, seed: int) -> NDArray[np.int64]:
    """Give the sources at the first places of a block."""
    if len(mix.shares) == 1:
        return np.zeros(stop, dtype=np.int64)
    places = permute(np.arange(stop, dtype=np.int64), mix.block, seed=fold(seed, "mixture"), epoch=block)
    return np.searchsorted(np.cumsum(mix.shares), places, side="right").astype(np.int64)


def _exact(source: Source) -> Fraction:
    try:
        weight = Fraction(str(source.weight))
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0:
        raise ValueError(f"data.sources.{source.name}.weight={source.weight} must be a number above 0")
    return weight
