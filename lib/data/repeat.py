"""Rows that say the same thing over and over: they stay in the batch, and nothing in them is learnt.

Source: the instance filter of OLMo 2 (Team OLMo 2024, arXiv:2501.00656, section 3.1), periods up to 13 and 32 repeats.
Ours counts repeats wherever they begin in the row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["repeats"]


def repeats(ids: NDArray[np.int64], count: int, longest: int = 13) -> NDArray[np.bool_]:
    """Tell in which rows some run of ids stands so often in a row.

        some p <= longest and i:  ids[i + n] = ids[i + n + p]  for all n in [0, p (count - 1))

    Args:
        ids: rows along the last axis; what is no text in them must equal nothing else.
        count: how often, >= 2.
        longest: ids in the longest run that is looked for.

    Returns:
        One answer a row.

    >>> repeats(np.array([[5, 1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1, 9, 9]]), 3)
    array([ True, False])
    """
    found = np.zeros(ids.shape[:-1], dtype=np.bool_)
    for period in range(1, min(longest, ids.shape[-1] // count) + 1):
        width = period * (count - 1)
        alike = np.zeros((*ids.shape[:-1], ids.shape[-1] - period + 1), dtype=np.int64)
        np.cumsum(ids[..., period:] == ids[..., :-period], axis=-1, out=alike[..., 1:])
        found |= (alike[..., width:] - alike[..., :-width] == width).any(axis=-1)
    return found
