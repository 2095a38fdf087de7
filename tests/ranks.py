"""Several ranks in one process, each a thread: what they say goes from hand to hand, what they hold is cut by arithmetic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from lib.store.checkpoint import commit
from lib.store.exchange import Found
from lib.store.grid import box_at, grid_of
from lib.store.leaves import dtype_name, nodes
from lib.store.place import place_of
from lib.store.ranks import Ranks
from lib.store.sharded import Held

Dims = Mapping[str, Sequence[int | None]]


def together(count: int, act: Callable[[Ranks], Any]) -> list[Any]:
    """Do something on so many ranks; what one of them raises is raised, once all have ended."""
    barrier = threading.Barrier(count)
    said: list[bytes] = [b""] * count
    sent: dict[tuple[int, int], Any] = {}
    results: list[Any] = [None] * count
    failures: list[BaseException] = []

    def ranks(rank: int) -> Ranks:
        def share(told: bytes) -> list[bytes]:
            said[rank] = told
            barrier.wait()
            heard = list(said)
            barrier.wait()
            return heard

        def swap(send: Mapping[int, Any], receive: Mapping[int, Any]) -> None:
            for to, data in send.items():
                sent[rank, to] = np.array(data)
            barrier.wait()
            for of, buffer in receive.items():
                buffer[:] = sent[of, rank]
            barrier.wait()

        return Ranks(rank, count, share, swap)

    def run(rank: int) -> None:
        try:
            results[rank] = act(ranks(rank))
        except threading.BrokenBarrierError:
            pass  # another one has failed
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def part_of(state: TensorDict, mesh: tuple[int, ...], dims: Dims, rank: int) -> Found:
    """What one rank of a mesh holds of a state: the leaves that `dims` names are cut, the others are on each rank."""
    at = tuple(int(place) for place in np.unravel_index(rank, mesh))
    found: dict[str, Any] = {}
    for path, leaf in nodes(state).items():
        found[path] = leaf
        if isinstance(leaf, torch.Tensor):
            shape = tuple(leaf.shape)
            cut = dims.get(path, [None] * len(mesh))
            box = box_at(shape, mesh, cut, at)
            local = leaf[(*(slice(*edges) for edges in box), ...)].clone()
            grid = grid_of(shape, mesh, cut) if path in dims else None
            found[path] = Held(dtype_name(leaf), shape, local, box, grid)
    return found


def save_by_ranks(path: Path, state: TensorDict, mesh: tuple[int, ...], dims: Dims) -> None:
    """Save a state by the ranks of a mesh."""
    together(
        int(np.prod(mesh)),
        lambda ranks: commit(place_of(path), part_of(state, mesh, dims, ranks.rank), {}, ranks),
    )
