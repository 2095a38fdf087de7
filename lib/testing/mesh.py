"""The laws of the mesh: cut over ranks, the state alone or the rows of the batch too, an update is the same.

The ranks are simulated in this process, one after the other, by `LocalTensorMode` of torch; nothing is sent, no port opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lib.shard.words import spread
from lib.testing.arithmetic import LEARNT, apart, draws, uneven
from lib.testing.case import Case, UncheckedError, axes_of, said, stays
from lib.testing.trees import extras, rebuilt_like
from lib.tree import leaves

__all__ = ["mesh", "ranks"]

RANKS = 3  # cuts most leaves unevenly
SHARE = 1e-4  # of a change; a norm over ranks is a sum in another order, and Muon works in bf16


def mesh(case: Case) -> str | None:
    """With parameters, moments and averages cut over three ranks, an update is the same, and they stay cut as they were."""
    where = _differs(case, case.batches[0], lambda batch, over: batch)
    return where and f"with the state cut over {RANKS} ranks {where}; take norms and means of whole leaves"


def ranks(case: Case) -> str | None:
    """With the rows of the batch cut over three ranks as well, unequal numbers of targets in each, an update is the same."""
    axes = axes_of(case.batches[0])
    if axes is None:
        raise UncheckedError("the leaves of the batch have no axes [micro-batches, rows, ...] in common")
    batch = uneven(_rows(case.batches[0], axes[1]))
    where = _differs(case, batch, spread)
    if where is not None and draws(case, batch):
        raise UncheckedError(f"random numbers hang on the rank, or else it is broken: {where}; check without")
    if where is None:
        return None
    return (
        f"with the batch's rows cut over {RANKS} ranks too, {where}; "
        f"add up sums and numbers of targets over all ranks, then divide"
    )


def _differs(case: Case, batch: Any, lay: Callable[[Any, DeviceMesh], Any]) -> str | None:
    """How an update of leaves that are cut is another than that of whole ones."""
    if not any(path.startswith(LEARNT) for path in leaves(case.state)):
        raise UncheckedError("the state has no slot `params`")
    whole = case.step(case.state, batch)
    with _ranks() as over:
        cut = {path: _cut(path, leaf, over) for path, leaf in leaves(case.state).items()}
        try:
            new, metrics = case.step(rebuilt_like(case.state, cut, extras(case.state)), lay(batch, over))
        except Exception as error:  # noqa: BLE001 (whatever torch says of what cannot be cut)
            return f"an update fails: {said(error)}"
        for path, leaf in leaves(new).items():
            if isinstance(cut[path], DTensor) and getattr(leaf, "placements", None) != cut[path].placements:  # type: ignore[attr-defined]
                return f"{path} comes back otherwise than it was cut"
        try:
            found = _joined(new), _joined(metrics)
        except Exception as error:  # noqa: BLE001 (ranks that have other values for what all should have)
            return f"the ranks do not agree on an update: {said(error)}"
    where = apart(case.state, whole, found, (), SHARE)
    return where and f"an update is another one: {where}"


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
