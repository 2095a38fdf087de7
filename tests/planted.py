"""A sound step written by hand, and the same with one fault planted in it: what people really write."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from lib.shard.words import gather, mine, rows_of
from lib.shard.words import total as sum_of

CLIP, BETA = 0.5, 0.9


def state() -> TensorDict:
    draw = torch.Generator().manual_seed(0)
    params = {"bias": torch.zeros(4), "w": torch.randn(5, 4, generator=draw)}
    tree = {
        "params": params,
        "optimizer": {name: torch.zeros_like(leaf) for name, leaf in params.items()},
        "scheduler": {"lr": torch.tensor(0.1)},
        "cursor": {"row": torch.tensor(0)},
        "step": torch.tensor(0),
        "key": torch.tensor(7),
    }
    return TensorDict({key: TensorDict(value) if isinstance(value, dict) else value for key, value in tree.items()})


def batches(count: int = 2) -> list[TensorDict]:
    found = []
    for number in range(1, count + 1):
        draw = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 3, 4, 5, generator=draw), torch.randn(2, 3, 4, 4, generator=draw)
        mask, cursor = torch.ones(2, 3, 4, dtype=torch.bool), TensorDict({"row": torch.tensor(6 * number)})
        found.append(TensorDict({"x": x, "y": y, "mask": mask, "cursor": cursor}))
    return found


def loss(params: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    wrong = (part["x"] @ params["w"] + params["bias"] - part["y"]).square().sum(-1)
    return torch.where(part["mask"], wrong, 0.0).sum(), part["mask"].sum()


class World:
    """What lies outside of the state."""

    def __init__(self) -> None:
        self.calls = 0
        self.moments: dict[str, Tensor] = {}
        self.lr = 0.1


def sound(old: TensorDict, batch: TensorDict, *, fault: str = "", world: World | None = None) -> Any:
    world = world or World()
    if fault == "an update in place":
        old["params", "bias"].add_(0.0)
    if fault == "a batch that is normed in place":
        batch["x"].div_(batch["x"].abs().max())
    over = rows_of(batch)
    x = mine(batch["x"])
    if fault == "noise of torch's generator":
        x = x + 0.01 * torch.randn(x.shape)
    if fault == "noise of numpy's generator":
        x = x + 0.01 * float(np.random.rand())  # noqa: NPY002
    if fault == "noise of Python's generator, put back":
        stood = random.getstate()
        x = x + 0.01 * random.random()
        random.setstate(stood)
    if fault == "a clock":
        x = x * (1 + time.perf_counter() * 1e3 % 1)
    if fault == "a hidden counter":
        world.calls += 1
        x = x * (1 + 0.01 * world.calls)

    params = {name: leaf.detach().requires_grad_() for name, leaf in old["params"].items()}
    names = sorted(params)
    if fault == "draws by micro-batch":
        shift = torch.arange(x.shape[0]).reshape(-1, 1, 1, 1) * (old["key"] % 5 + 1)
        x = x * (1 + 0.01 * shift)
    y, mask = mine(batch["y"]), mine(batch["mask"])
    parts = [{"x": x[n], "y": y[n], "mask": mask[n]} for n in range(x.shape[0])]
    if fault == "the last micro-batch alone":
        parts = parts[-1:]
    total, count = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    summed = {name: torch.zeros_like(params[name]) for name in names}
    for part in parts:
        with torch.enable_grad():
            summing = None if fault == "gradients of the rank's own rows" else over
            value, targets = loss({name: gather(params[name], over=summing) for name in names}, part)
            if fault == "a mean of means":
                value = value / targets.clamp(min=1)
            found = dict(zip(names, torch.autograd.grad(value, [params[name] for name in names]), strict=True))
        if fault == "clipping by micro-batch":
            norm = torch.stack([found[name].square().sum() for name in names]).sum().sqrt()
            found = {name: found[name] * torch.clamp(8.0 / (norm + 1e-6), max=1.0) for name in names}
        summed = {name: summed[name] + found[name] for name in names}
        total, count = total + value.detach(), count + targets
    own = count
    total, count = sum_of(total, over), sum_of(count, over)
    if fault == "a mean of the rank's own rows":
        count = own
    summed = {name: sum_of(leaf, over) for name, leaf in summed.items()}
    if fault != "a loss with its graph":
        total = total.detach()
    else:
        total = total + 0 * params["bias"].sum()
    by = len(parts) if fault == "a mean of means" else count.clamp(min=1)
    grads = {name: leaf / by for name, leaf in summed.items()}
    squares = [leaf.square().sum() for leaf in grads.values()]
    norm = gather(torch.stack(squares).sum()).sqrt()
    if fault == "a norm of the rank's own part":
        norm = torch.stack([mine(leaf).square().sum() for leaf in grads.values()]).sum().sqrt()
    clip = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
    if fault == "clipping by `if`":
        clip = torch.clamp(CLIP / norm, max=1.0) if norm > CLIP else torch.ones(())
    if fault == "another path when compiled" and torch.compiler.is_compiling():
        clip = clip * 1.001
    accept = torch.isfinite(norm) & torch.isfinite(total)

    lr = old["scheduler", "lr"]
    if fault == "a rate in Python":
        lr = world.lr = world.lr * 0.9
    if fault == "a rate that is a number of the state":
        lr = old["lr_now"]
    held = world.moments if fault == "moments in a closure" else getattr(old, "moments", None) or old["optimizer"]
    moments = {name: BETA * held.get(name, old["optimizer", name]) + (1 - BETA) * grads[name] * clip for name in names}
    if fault == "moments in a closure":
        world.moments = {name: leaf.detach().clone() for name, leaf in moments.items()}
    new = {name: old["params", name] - lr * moments[name] for name in names}

    if fault == "no look at what is finite":
        kept, after = moments, new
    elif fault == "refusal by multiplication":
        kept = {name: old["optimizer", name] + accept * (moments[name] - old["optimizer", name]) for name in names}
        after = {name: old["params", name] + accept * (new[name] - old["params", name]) for name in names}
    else:
        kept = {name: torch.where(accept, moments[name], old["optimizer", name]) for name in names}
        after = {name: torch.where(accept, new[name], old["params", name]) for name in names}
    if fault == "moments that decay when refused":
        kept = {name: torch.where(accept, moments[name], BETA * old["optimizer", name]) for name in names}
    if fault == "a moment that drifts to float64":
        kept["w"] = kept["w"].double()
    if fault == "a moment turned on its side":
        kept["w"] = kept["w"].t().contiguous().t()

    out = TensorDict(
        {
            "params": TensorDict(after),
            "optimizer": TensorDict(kept),
            "scheduler": TensorDict({"lr": old["scheduler", "lr"].clone()}),
            "cursor": TensorDict({"row": batch["cursor", "row"].clone()}),
            "step": old["step"] + 1,
            "key": old["key"].clone(),
        }
    )
    metrics = {"loss": total / count.clamp(min=1), "norm": norm}
    if fault == "the old leaf":
        out["key"] = old["key"]
    if fault == "one leaf twice":
        metrics["clipped"] = metrics["norm"]
    if fault == "a metric now and then" and int(old["step"]) % 2:
        metrics["extra"] = torch.ones(())
    if fault == "a cursor of its own":
        out["cursor", "row"] = old["cursor", "row"] + 1
    if fault == "an update that is not counted":
        out["step"] = old["step"] + accept.to(torch.int64) * 2
    if fault == "a moment hung on the state":
        out["optimizer"] = TensorDict({name: torch.zeros_like(leaf) for name, leaf in kept.items()})
        object.__setattr__(out, "moments", {name: leaf.clone() for name, leaf in kept.items()})
    if fault == "a rate that is a number of the state":
        out.set_non_tensor("lr_now", lr * 0.9)
    return out, TensorDict(metrics)


FAULTS: Mapping[str, str] = {
    "an update in place": "purity",
    "a batch that is normed in place": "purity",
    "noise of torch's generator": "purity",
    "noise of numpy's generator": "purity",
    "noise of Python's generator, put back": "purity",
    "the old leaf": "purity",
    "one leaf twice": "purity",
    "a clock": "determinism",
    "a hidden counter": "determinism",
    "moments in a closure": "determinism",
    "a rate in Python": "determinism",
    "a moment that drifts to float64": "structure",
    "a metric now and then": "structure",
    "a loss with its graph": "structure",
    "a rate that is a number of the state": "structure",
    "a cursor of its own": "cursor",
    "an update that is not counted": "cursor",
    "a moment hung on the state": "resume",
    "a mean of means": "accumulation",
    "clipping by micro-batch": "accumulation",
    "the last micro-batch alone": "accumulation",
    "refusal by multiplication": "refusal",
    "no look at what is finite": "refusal",
    "moments that decay when refused": "refusal",
    "clipping by `if`": "compilation",
    "another path when compiled": "compilation",
    "a moment turned on its side": "recompilation",
    "a norm of the rank's own part": "mesh",
    "gradients of the rank's own rows": "ranks",
    "a mean of the rank's own rows": "ranks",
}


def planted(fault: str) -> tuple[Callable[..., Any], TensorDict, list[TensorDict]]:
    begun = state()
    if fault == "a rate that is a number of the state":
        begun.set_non_tensor("lr_now", 0.1)
    return functools.partial(sound, fault=fault, world=World()), begun, batches()


def case() -> tuple[Callable[..., Any], TensorDict, list[TensorDict]]:
    return planted("")
