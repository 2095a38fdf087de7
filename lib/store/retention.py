"""Which checkpoints a policy lets go of: a pure function of the committed steps.

The newest committed checkpoint is never let go of, so there is always one to resume from.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["retain"]


def retain(committed: Sequence[int], keep: int | None) -> set[int]:
    """Choose the steps to delete so that the `keep` greatest stay.

    Args:
        committed: steps with a committed checkpoint, in any order.
        keep: checkpoints that stay, >= 1; None = all of them.

    Returns:
        The steps to delete, never the greatest one.

    Raises:
        ValueError: `keep` is below 1.

    >>> sorted(retain([9999, 10000, 8000], keep=2))
    [8000]
    """
    if keep is None:
        return set()
    if keep < 1:
        raise ValueError(f"checkpoint.keep={keep} must be at least 1; set checkpoint.keep=1, or none to keep all")
    return set(sorted(set(committed))[:-keep])
