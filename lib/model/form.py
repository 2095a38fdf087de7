"""The form of a batch for a language model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lib.tree import Tree, leaves

__all__ = ["check_form"]

_DTYPES: Mapping[str, torch.dtype] = {
    "inputs": torch.int64,
    "targets": torch.int64,
    "segments": torch.int64,
    "positions": torch.int64,
    "mask": torch.bool,
}


def check_form(batch: Tree, *, train: bool = True) -> None:
    """Check keys, dtypes and shapes, before anything is computed; no value is read, so nothing waits for the device.

    Args:
        batch: [a, b, s] `inputs` `targets` `segments` `positions` int64, `mask` bool; [a, b] `bytes` int64.
        train: a `cursor` of int64 scalars has to be there too.

    Raises:
        ValueError: names the leaf, what it is, and what it must be.
    """
    wanted = (*_DTYPES, "bytes", *(["cursor"] if train else []))
    missing = [name for name in wanted if name not in batch]
    if missing:
        raise ValueError(f"batch: missing {', '.join(missing)}, must have {', '.join(wanted)}; see lib.step.train_step")
    shape = tuple(batch["inputs"].shape)
    if len(shape) != 3 or 0 in shape:
        raise ValueError(
            f"batch.inputs: shape {shape} must be [micro-batches, rows, positions], none of them 0; "
            f"for one micro-batch add a leading axis with unsqueeze(0)"
        )
    for name, dtype in _DTYPES.items():
        _hold(name, batch[name], dtype, shape)
    _hold("bytes", batch["bytes"], torch.int64, shape[:2])
    if train:
        for path, leaf in leaves(batch["cursor"]).items():
            _hold(f"cursor.{path}", leaf, torch.int64, ())


def _hold(name: str, leaf: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if leaf.dtype != dtype or tuple(leaf.shape) != shape:
        raise ValueError(f"batch.{name}: is {leaf.dtype} {tuple(leaf.shape)}, must be {dtype} {shape}; convert it")
