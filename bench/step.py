"""Our step against the plain loop: time of an update, and peak memory, each in the better of eager and compiled.

    python -m bench step [turns=40] [cases=small,base] [compute=fp32,bf16]

Peak memory is what torch's allocator holds at most during an update: weights, moments, batches, activations, gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDict

from bench.baseline import plain_loop
from bench.harness import interleave, record
from lib.config import Batch, Model, Optim, Precision, Recipe, Schedule
from lib.run.compile import faster
from lib.state import init_state
from lib.step import train_step

CASES = {
    "small": (Model(width=128, depth=4, heads=4), Batch(rows=12, length=64)),
    "base": (Model(width=256, depth=6, heads=8), Batch(rows=8, length=256)),
}


def run(turns: str = "40", cases: str = "small,base", compute: str = "fp32,bf16", memory: str = "true") -> None:
    """Time all cases and record one line each."""
    for case in cases.split(","):
        for dtype in compute.split(","):
            torch._dynamo.reset()
            recipe = recipe_of(case, dtype)
            ours = {mode: contender(recipe, "ours", mode) for mode in ("compiled", "eager")}
            plain = {mode: contender(recipe, "plain", mode) for mode in ("compiled", "eager")}
            best = min(plain, key=lambda mode: interleave(plain[mode], plain["eager"], turns=10).median)
            mine = min(ours, key=lambda mode: interleave(ours[mode], ours["eager"], turns=10).median)
            ratio = interleave(ours[mine], plain[best], turns=int(turns))
            values: dict[str, Any] = {"ratio": ratio.median, "least": ratio.least, "most": ratio.most}
            values |= {"ours_s": ratio.ours_s, "plain_s": ratio.baseline_s, "ours": mine, "plain": best}
            if memory == "true":
                peaks = {"ours": peak_bytes(recipe, "ours", mine), "plain": peak_bytes(recipe, "plain", best)}
                values |= {"memory_ratio": peaks["ours"] / peaks["plain"], "ours_peak_mb": peaks["ours"] / 1e6}
            record("step", f"{case} {dtype}", **values)


def recipe_of(case: str, compute: str) -> Recipe:
    """The recipe of a case: cosine schedule, clipping and decay on, as one trains."""
    model, batch = CASES[case]
    return Recipe(
        model=model,
        batch=batch,
        optim=Optim(lr=1e-3),
        schedule=Schedule(shape="cosine", warmup=100, length=10_000),
        precision=Precision(compute=compute),  # type: ignore[arg-type]
    )


def contender(recipe: Recipe, who: str, mode: str) -> Callable[[], Any]:
    """A function that makes one update, on batches made beforehand."""
    made = [batch_of(recipe, seed) for seed in range(4)]
    turn = iter(range(10**9))
    if who == "plain":
        loop = plain_loop(recipe, compile=mode == "compiled")
        return lambda: loop(made[next(turn) % 4])
    step = faster(train_step, compile=mode == "compiled")
    held = {"state": init_state(recipe)}

    def update() -> TensorDict:
        held["state"], report = step(held["state"], made[next(turn) % 4])
        return report

    return update


def batch_of(recipe: Recipe, seed: int) -> TensorDict:
    """Random bytes with a document end about every 200."""
    rows, length = recipe.batch.rows, recipe.batch.length
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 260, (1, rows, length + 1), generator=source)
    ids[torch.rand(ids.shape, generator=source) < 1 / 200] = 2
    inputs = ids[..., :-1].contiguous()
    places = torch.arange(length).expand(inputs.shape)
    starts = torch.where(inputs == 2, places, 0).cummax(-1).values
    cursor = {"text": {"epoch": torch.tensor(0), "row": torch.tensor(rows)}}
    return TensorDict(
        {
            "inputs": inputs,
            "targets": ids[..., 1:].contiguous(),
            "mask": torch.ones_like(inputs, dtype=torch.bool),
            "segments": (inputs == 2).cumsum(-1),
            "positions": (places - starts).contiguous(),
            "bytes": torch.full((1, rows), length),
            "cursor": cursor,
        },
        [],
    )


def peak_bytes(recipe: Recipe, who: str, mode: str) -> int:
    """Most bytes alive during an update: those alive before it, and the highest point of what it takes and gives back."""
    others = _alive()
    update = contender(recipe, who, mode)
    for _ in range(2):
        update()
    held = sum(size for place, size in _alive().items() if place not in others)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        update()
    results = profile.profiler.kineto_results  # type: ignore[union-attr]
    moves = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    return held + max(accumulate((size for _, size in moves), initial=0))


def _alive() -> dict[int, int]:
    gc.collect()
    found: dict[int, int] = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            with suppress(RuntimeError):  # tracing leaves tensors without memory behind
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found
