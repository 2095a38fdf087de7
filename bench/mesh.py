"""Our step on two gloo ranks against torch's DistributedDataParallel and FSDP2, and what each sends.

    python -m bench mesh [turns=20] [layouts=ddp,fsdp] [case=small]

Both run eager, one thread a rank, turn by turn in the same two processes. What is sent is counted where it is sent: messages,
and the bytes that a rank gives into them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn as spawn_processes
from torch.utils._python_dispatch import TorchDispatchMode

from bench.baseline import Transformer, plain_loop
from bench.harness import interleave, record
from bench.step import batch_of, recipe_of
from lib.shard.layout import lay
from lib.shard.words import spread
from lib.state import init_state
from lib.step import train_step

RANKS = 2


def run(turns: str = "20", layouts: str = "ddp,fsdp", case: str = "small") -> None:
    """Time all layouts and record one line each."""
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    spawn_processes(_rank, (str(meeting), int(turns), layouts.split(","), case), nprocs=RANKS)


def _rank(rank: int, meeting: str, turns: int, layouts: list[str], case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    recipe = recipe_of(case, "fp32")
    for layout in layouts:
        held = {"state": lay(init_state(recipe), mesh, layout)}
        made = [spread(batch_of(recipe, seed), mesh) for seed in range(4)]
        number = iter(range(10**9))

        def ours(held: dict[str, Any] = held, made: list[Any] = made, number: Any = number) -> None:
            held["state"], _ = train_step(held["state"], made[next(number) % 4])

        theirs = _plain(recipe, rank, layout)
        sent = {"ours": _sent(ours), "theirs": _sent(theirs)}
        ratio = interleave(ours, theirs, turns=turns)
        if rank == 0:
            record(
                "mesh",
                f"{case} {layout}, {RANKS} ranks",
                ratio=ratio.median,
                least=ratio.least,
                most=ratio.most,
                ours_s=ratio.ours_s,
                plain_s=ratio.baseline_s,
                **{f"{who}_{name}": value for who, counts in sent.items() for name, value in counts.items()},
            )
    dist.destroy_process_group()


def _plain(recipe: Any, rank: int, layout: str) -> Callable[[], Any]:
    """The plain loop, wrapped as torch's users do; each rank has its rows."""

    def cut(module: Transformer) -> nn.Module:
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
        return module

    loop = plain_loop(recipe, wrap=nn.parallel.DistributedDataParallel if layout == "ddp" else cut)
    mine = [_half(batch_of(recipe, seed), rank) for seed in range(4)]
    number = iter(range(10**9))
    return lambda: loop(mine[next(number) % 4])


def _half(batch: Any, rank: int) -> Any:
    names = ("inputs", "targets", "mask", "segments", "positions")
    return {name: batch[name].chunk(RANKS, dim=1)[rank].contiguous() for name in names}


class _Counted(TorchDispatchMode):
    """Counts the messages that are sent while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.messages, self.given = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):  # functional ones end there too
            self.messages += 1
            self.given += _size(args[1] if "base" in name else args[0])
        return func(*args, **(kwargs or {}))


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0


def _sent(update: Callable[[], Any]) -> dict[str, Any]:
    update()
    with _Counted() as seen:
        update()
    return {"messages": seen.messages, "mb": seen.given / 1e6}
