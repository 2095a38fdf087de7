"""What every batch obeys; held where batches are made, so that nothing downstream has to doubt them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["check_arrays"]

_FIELDS = ("inputs", "targets", "segments", "positions", "mask", "bytes")


def check_arrays(batch: Mapping[str, NDArray[Any]], vocab: int, widest: int = 1) -> None:
    """Hold a batch to its invariants: shapes, dtypes, ids in range, segments and positions that tell one story.

    Args:
        batch: its arrays by name.
        vocab: ids must be in [0, vocab).
        widest: the most bytes of text that one id stands for.

    Raises:
        ValueError: the first invariant that is broken, with the index.
    """
    shape = batch["inputs"].shape
    if len(shape) != 3:
        raise ValueError(f"batch.inputs={shape} must have three axes: micro-batches, rows, positions")
    for name in _FIELDS:
        axes = shape[:2] if name == "bytes" else shape
        dtype = np.dtype(np.bool_ if name == "mask" else np.int64)
        if batch[name].shape != axes or batch[name].dtype != dtype:
            raise ValueError(f"batch.{name}={batch[name].shape} {batch[name].dtype} must be {axes} {dtype}")
    for name in ("inputs", "targets"):
        ids = batch[name]
        _hold(batch, name, (ids >= 0) & (ids < vocab), f"in [0, {vocab}), the vocabulary")
    segments, positions = batch["segments"], batch["positions"]
    _hold(batch, "segments", segments[..., :1] == 0, "0 where a row begins")
    _hold(batch, "positions", positions[..., :1] == 0, "0 where a row begins")
    rise = np.diff(segments, axis=-1)
    _hold(batch, "segments", (rise == 0) | (rise == 1), "the segment before or the next one", shift=1)
    step = np.where(rise == 0, positions[..., :-1] + 1, 0)
    _hold(batch, "positions", positions[..., 1:] == step, "one more than before, or 0 where a segment begins", shift=1)
    count, most = batch["bytes"], batch["mask"].sum(-1) * widest
    each = "" if widest == 1 else f"{widest} times "
    _hold(batch, "bytes", (count >= 0) & (count <= most), f"between 0 and {each}the valid targets")


def _hold(batch: Mapping[str, NDArray[Any]], name: str, good: NDArray[np.bool_], must: str, *, shift: int = 0) -> None:
    if good.all():
        return
    where = [int(axis) for axis in np.argwhere(~good)[0]]
    where[-1] += shift
    raise ValueError(f"batch.{name}{where}={int(batch[name][tuple(where)])} must be {must}")
