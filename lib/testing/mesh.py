"""The law of the mesh: a state cut over ranks makes the same update as one that lies whole on each.

The ranks are simulated in this process, one after the other, by `LocalTensorMode` of torch; nothing is sent, no port opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lib.testing.arithmetic import LEARNT, apart
from lib.testing.case import Case, UncheckedError, said
from lib.testing.trees import extras, rebuilt_like
from lib.tree import leaves

__all__ = ["mesh"]

RANKS = 3  # cuts most leaves unevenly
SHARE = 1e-4  # of a change; a norm over ranks is a sum in another order, and Muon works in bf16


def mesh(case: Case) -> str | None:
    """With parameters, moments and averages cut over three ranks, an update is the same, and they stay cut as they were."""
    if not any(path.startswith(LEARNT) for path in leaves(case.state)):
        raise UncheckedError("the state has no slot `params`")
    batch = case.batches[0]
    whole = case.step(case.state, batch)
    with _ranks() as over:
        cut = {path: _cut(path, leaf, over) for path, leaf in leaves(case.state).items()}
        try:
            new, metrics = case.step(rebuilt_like(case.state, cut, extras(case.state)), batch)
        except Exception as error:  # noqa: BLE001 (whatever torch says of what cannot be cut)
            return f"an update of leaves cut over {RANKS} ranks fails: {said(error)}"
        for path, leaf in leaves(new).items():
            if isinstance(cut[path], DTensor) and getattr(leaf, "placements", None) != cut[path].placements:  # type: ignore[attr-defined]
                return f"{path} was cut over ranks and comes back otherwise; leave leaves where they lie"
        try:
            found = _joined(new), _joined(metrics)
        except Exception as error:  # noqa: BLE001 (ranks that have other values for what all should have)
            return f"ranks do not agree: {said(error)}"
    if where := apart(case.state, whole, found, (), SHARE):
        return f"cut over {RANKS} ranks it is another update: {where}; take norms and means of whole leaves"
    return None


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
