"""The laws of the mesh: cut over ranks, the state alone or the rows of the batch too, an update is the same.

The ranks are simulated in this process, one after the other, by `LocalTensorMode` of torch; nothing is sent, no port opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lib.shard.words import laid, spread
from lib.testing.arithmetic import LEARNT, apart, draws, look_for_change, rounding_of, uneven
from lib.testing.case import Case, UncheckedError, axes_of, said, stays
from lib.testing.trees import extras, rebuilt_like
from lib.tree import leaves

__all__ = ["mesh", "ranks"]

RANKS = 3  # cuts most leaves unevenly


def mesh(case: Case) -> str | None:
    """With parameters, moments and averages cut over three ranks, an update is the same, and they stay cut as they were.

    The batch is whole on each rank, as plain tensors, or as DTensors if the step works on those alone.
    """
    found = _differs(case, case.batches[0], lambda batch, over: batch)
    if found is not None and found.advice == _FAILS:
        again = _differs(case, case.batches[0], _everywhere)
        found = found if again is not None and again.advice == _FAILS else again
    return found and (
        f"with the state cut over {RANKS} ranks {found.where}; {found.advice or 'take norms and means of whole leaves'}"
    )


def ranks(case: Case) -> str | None:
    """With the rows of the batch cut over three ranks as well, unequal numbers of targets in each, an update is the same."""
    axes = axes_of(case.batches[0])
    if axes is None:
        raise UncheckedError("the leaves of the batch have no axes [micro-batches, rows, ...] in common")
    batch = uneven(_rows(case.batches[0], axes[1]))
    found = _differs(case, batch, spread)
    if found is not None and draws(case, batch):
        raise UncheckedError(f"random numbers hang on the rank, or else it is broken: {found.where}; check without")
    return found and (
        f"with the batch's rows cut over {RANKS} ranks too, {found.where}; "
        f"{found.advice or 'add up sums and numbers of targets over all ranks, then divide'}"
    )


_FAILS = "what is cut is a DTensor: bring it together by lib.shard.words.gather before it meets plain tensors"


class _Found(NamedTuple):
    where: str
    advice: str | None = None


def _differs(case: Case, batch: Any, lay: Callable[[Any, DeviceMesh], Any]) -> _Found | None:
    """How an update of leaves that are cut is another than that of whole ones."""
    if not any(path.startswith(LEARNT) for path in leaves(case.state)):
        raise UncheckedError("the state has no slot `params`")
    whole = case.step(case.state, batch)
    look_for_change(case.state, whole)
    with _ranks() as over:
        cut = {path: _cut(path, leaf, over) for path, leaf in leaves(case.state).items()}
        try:
            new, metrics = case.step(rebuilt_like(case.state, cut, extras(case.state)), lay(batch, over))
        except Exception as error:  # noqa: BLE001 (whatever torch says of what cannot be cut)
            return _Found(f"an update fails: {said(error)}", _FAILS)
        for path, leaf in leaves(new).items():
            if isinstance(cut[path], DTensor) and getattr(leaf, "placements", None) != cut[path].placements:  # type: ignore[attr-defined]
                return _Found(f"{path} comes back otherwise than it was cut", "leave leaves where they lie")
        try:
            found = _joined(new), _joined(metrics)
        except Exception as error:  # noqa: BLE001 (ranks that have other values for what all should have)
            return _Found(f"the ranks do not agree on an update: {said(error)}")
    where = apart(case.state, whole, found, rounding_of(case, batch))
    return None if where is None else _Found(f"an update is another one: {where}")


@contextmanager
def _ranks() -> Iterator[DeviceMesh]:
    """A world of ranks that are all in this process."""
    try:
        from torch.distributed._local_tensor import LocalTensorMode
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise UncheckedError("this torch cannot simulate ranks; it takes 2.13") from None
    if dist.is_initialized():
        raise UncheckedError("there is a process group already; check the step in a process of its own")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with LocalTensorMode(RANKS):
            yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def _rows(batch: Any, rows: int) -> Any:
    """As many rows as ranks can share evenly: the first ones, or all of them once for each rank."""
    kept, times = (rows - rows % RANKS, 1) if rows >= RANKS else (rows, RANKS)

    def one(path: str, leaf: Tensor) -> Tensor:
        return leaf if stays(path) else torch.cat([leaf[:, :kept]] * times, dim=1)

    return rebuilt_like(batch, {path: one(path, leaf) for path, leaf in leaves(batch).items()}, extras(batch))


def _everywhere(batch: Any, over: DeviceMesh) -> Any:
    named = leaves(batch).items()
    whole = [Replicate()] * over.ndim
    return rebuilt_like(
        batch, {path: leaf if stays(path) else laid(leaf, over, whole) for path, leaf in named}, extras(batch)
    )


def _cut(path: str, leaf: Tensor, over: DeviceMesh) -> Tensor:
    if not path.startswith(LEARNT) or not leaf.ndim:
        return leaf
    return distribute_tensor(leaf, over, [Shard(0)], src_data_rank=None)


def _joined(tree: Any) -> dict[str, Tensor]:
    return {path: _whole(leaf) for path, leaf in leaves(tree).items()}


def _whole(leaf: Tensor) -> Tensor:
    full = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    agreed: Tensor = full.reconcile() if hasattr(full, "reconcile") else full
    return agreed
