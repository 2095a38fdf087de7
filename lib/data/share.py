"""A rank's share of a global batch: rows of it, so that no batch depends on how many ranks there are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Share", "places"]


class Share(NamedTuple):
    """Which rank of how many.

    Attributes:
        rank: in [0, world).
        world: ranks that share the rows of each batch.
    """

    rank: int = 0
    world: int = 1


def places(share: Share, rows: int, micro: int) -> NDArray[np.int64]:
    """Give which rows of a global batch are this rank's: in each micro-batch a block of them.

    The shares of all ranks, laid side by side along the axis of rows, are the global batch.

    Raises:
        ValueError: the rank is none of the world's, or rows cannot be dealt out evenly.

    >>> places(Share(1, 2), rows=8, micro=2).tolist()
    [2, 3, 6, 7]
    """
    if not 0 <= share.rank < share.world:
        raise ValueError(f"rank={share.rank} must be in [0, {share.world}), the number of ranks")
    unit = micro * share.world
    if rows % unit:
        raise ValueError(
            f"batch.rows={rows} must be a multiple of {unit}: batch.micro={micro} on each of {share.world} ranks"
        )
    return np.arange(rows, dtype=np.int64).reshape(micro, share.world, -1)[:, share.rank].reshape(-1)
