"""Our checkpoints against a plain file, torch.distributed.checkpoint, and a copy of the state.

    python -m bench checkpoint [turns=7] [parts=disk,stall,step,small,memory] [root=.cache/bench]

All cases share one folder on one disk, turn by turn. The state of most is 512 MB in 32 leaves. A plain file is one file
written front to back and synced, and read front to back into new memory. Checksums are on throughout.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from tensordict import TensorDict

from bench.harness import Ratio, interleave, record
from bench.step import batch_of
from lib.config import Batch, Model, Recipe
from lib.run.compile import faster
from lib.run.saver import Saver, snapshot
from lib.state import init_state
from lib.step import train_step
from lib.store import load, save
from lib.store.checkpoint import hold
from lib.store.leaves import nodes

LEAVES, ITEMS = 32, 4 << 20  # 512 MB in fp32
SMALL, SMALL_ITEMS = 2000, 1024  # 4 KB each


def run(turns: str = "7", parts: str = "disk,stall,step,small,memory", root: str = ".cache/bench") -> None:
    """Time all parts and record one line for each question."""
    where = Path(root).absolute()
    try:
        for part in parts.split(","):
            shutil.rmtree(where, ignore_errors=True)
            where.mkdir(parents=True)
            PARTS[part](where, int(turns))
    finally:
        shutil.rmtree(where, ignore_errors=True)


def state_of(leaves: int, items: int) -> TensorDict:
    """Random leaves, as they compress no more than weights do."""
    params = TensorDict({f"w{number:04}": torch.randn(items) for number in range(leaves)}, [])
    return TensorDict({"params": params, "step": torch.tensor(1)}, [])


def disk(where: Path, turns: int) -> None:
    """Write and read: ours, a plain file, torch.distributed.checkpoint."""
    state = state_of(LEAVES, ITEMS)
    size = sum(leaf.nbytes for leaf in state["params"].values())
    flat = np.concatenate([leaf.numpy() for leaf in state["params"].values()]).view(np.uint8)

    def ours() -> None:
        save(where / "ours", state)

    def plain() -> None:
        with (where / "plain").open("wb", buffering=0) as file:
            view = flat.data
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())

    def theirs() -> None:
        with quiet():
            dcp.save({"state": state["params"].to_dict()}, checkpoint_id=where / "theirs", no_dist=True)  # type: ignore[attr-defined]

    def read_ours() -> None:
        load(where / "ours")

    def read_plain() -> None:
        with (where / "plain").open("rb", buffering=0) as file:
            view = np.empty(size, np.uint8).data
            while view:
                view = view[file.readinto(view) :]

    def read_theirs() -> None:
        # Into new memory, as whoever resumes has to; it writes into tensors that are there.
        made = {name: torch.empty_like(leaf) for name, leaf in state["params"].items()}
        with quiet():
            dcp.load({"state": made}, checkpoint_id=where / "theirs", no_dist=True)  # type: ignore[attr-defined]

    writes = {"ours": ours, "plain": plain, "dcp": theirs}
    reads = {"ours": read_ours, "plain": read_plain, "dcp": read_theirs}
    wrote: dict[str, list[float]] = {name: [] for name in writes}
    got: dict[str, list[float]] = {name: [] for name in reads}
    for turn in range(turns + 1):
        order = list(writes) if turn % 2 else list(writes)[::-1]
        for name in order:
            remove(where / {"ours": "ours", "plain": "plain", "dcp": "theirs"}[name])
            wrote[name].append(seconds(writes[name]))
        for name in order:
            got[name].append(seconds(reads[name]))
    for what, times in (("write", wrote), ("read", got)):
        times = {name: values[1:] for name, values in times.items()}
        speed = {f"{name}_gb_s": size / 1e9 / statistics.median(values) for name, values in times.items()}
        record("checkpoint", what, **ratio(times["ours"], times["plain"]), **speed)
        record("checkpoint", f"{what} against torch.distributed.checkpoint", **ratio(times["ours"], times["dcp"]))


def stall(_where: Path, turns: int) -> None:
    """How long training stands still for a save in the background: the copy."""
    state = state_of(LEAVES, ITEMS)
    times = interleave(lambda: snapshot(hold(nodes(state))), state.clone, turns=turns)
    record("checkpoint", "stall against clone", **told(times))


def step(where: Path, turns: int) -> None:
    """A compiled training step beside saves in the background, against one with nothing beside it."""
    recipe = Recipe(model=Model(width=512, depth=8, heads=8), batch=Batch(rows=8, length=256))
    batch = batch_of(recipe, 0)
    taken = faster(train_step, compile=True)
    held = [init_state(recipe)]
    size = sum(leaf.local.nbytes for leaf in hold(nodes(held[0])).values() if hasattr(leaf, "local"))

    def update() -> None:
        held[0], _ = taken(held[0], batch)

    for _ in range(3):
        update()
    alone, beside, saves = [], [], []
    for turn in range(turns):
        alone += [seconds(update) for _ in range(8)]
        shutil.rmtree(where / "run", ignore_errors=True)
        with Saver(where / "run") as saver:
            begun = time.perf_counter()
            saver.save(held[0], {})
            # As long as the save takes: what stands still is the copy, which is another question.
            while saver.busy:
                beside.append(seconds(update))
                saver.check()
            saves.append(time.perf_counter() - begun)
        print(
            f"turn {turn}: alone {statistics.median(alone):.3f} s, beside {statistics.median(beside):.3f} s", flush=True
        )
    middle = statistics.median(beside) / statistics.median(alone)
    record(
        "checkpoint",
        "step beside a save in the background",
        ratio=middle,
        alone_s=statistics.median(alone),
        beside_s=statistics.median(beside),
        save_s=statistics.median(saves),
        state_mb=size / 1e6,
        steps_beside=len(beside) / turns,
    )


def small(where: Path, turns: int) -> None:
    """Many small leaves, each time in a new folder and nothing deleted before the end.

    For five minutes after inodes are freed ext4 passes over them one by one whenever it makes a file beside them
    (`recently_deleted` in fs/ext4/ialloc.c): 6,000 freed ones make each new file 30 times as dear.
    """
    state = state_of(SMALL, SMALL_ITEMS)
    wrote, got = [], []
    for turn in range(turns):
        path = where / f"small_{turn}"
        wrote.append(seconds(functools.partial(save, path, state)))
        got.append(seconds(functools.partial(load, path)))
    record(
        "checkpoint",
        f"{SMALL} leaves of {SMALL_ITEMS * 4 // 1024} KB",
        save_s=statistics.median(wrote),
        load_s=statistics.median(got),
        most_save_s=max(wrote),
        most_load_s=max(got),
    )


PEAK = """
import sys
from lib.store import load
from lib.store.checkpoint import describe
import torch, tensordict
from pathlib import Path
small, large = map(Path, sys.argv[1:])
def peak():  # not that of getrusage, which a child takes over from its parent
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
load(small)
before = peak()
state = load(large)
after = peak()
print((after - before - sum(row.size_bytes for row in describe(large))) / 1e6)
"""


def memory(where: Path, _turns: int) -> None:
    """What a load takes at its highest point beyond the state itself."""
    save(where / "small", state_of(2, 10))
    save(where / "large", state_of(LEAVES, ITEMS))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(where / "small"), str(where / "large")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    record("checkpoint", "peak memory of a load above the state", above_mb=float(done.stdout))


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Times how much faster: the baseline's time over ours, turn by turn; above 1 is faster."""
    each = [other / mine for mine, other in zip(ours, theirs, strict=True)]
    return {"faster": statistics.median(each), "least": min(each), "most": max(each)}


def told(times: Ratio) -> dict[str, float]:
    """Our time over the baseline's."""
    return {"ratio": times.median, "least": times.least, "most": times.most, "ours_s": times.ours_s}


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def seconds(act: Callable[[], Any]) -> float:
    """Time one call."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


@contextlib.contextmanager
def quiet() -> Any:
    """It warns of running without a process group, which is what is wanted here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


PARTS = {"disk": disk, "stall": stall, "step": step, "small": small, "memory": memory}
