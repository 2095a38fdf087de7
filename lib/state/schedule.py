"""Slot `scheduler`: where the schedule stands, and the hyper-parameters that a run may change."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lib.rates import Schedule, stages_of
from lib.recipe import Optim
from lib.shapes import Bool, Float, Int
from lib.tree import Tree

__all__ = ["factor", "init", "number", "update"]


def init(optim: Optim) -> Tree:
    """Start at position 0.

    Slot: `position` int64 [], updates (or tokens) counted so far; float64 []: `lr`, the peak rate, and `decay`, the weight
    decay. Changing one of these leaves changes the run from there on, with no new compilation.
    """
    return {
        "position": torch.zeros((), dtype=torch.int64),
        "lr": torch.tensor(optim.lr, dtype=torch.float64),
        "decay": torch.tensor(optim.decay, dtype=torch.float64),
    }


def number(slot: Tree, schedule: Schedule, targets: Int[Tensor, ""]) -> Int[Tensor, ""]:
    """Number u of the update at hand, from 1: where the schedule stands, and this update; counted in tokens, its targets."""
    position: Tensor = slot["position"]
    return position + (targets.to(torch.int64) if schedule.counts == "tokens" else 1)


def update(slot: Tree, schedule: Schedule, *, accept: Bool[Tensor, ""], targets: Int[Tensor, ""]) -> Tree:
    """Advance by one update, or by its targets; refused ones count unless `schedule.counts` is "applied"."""
    moved = (
        slot["position"] + accept.to(torch.int64) if schedule.counts == "applied" else number(slot, schedule, targets)
    )
    return {"position": moved, "lr": slot["lr"].clone(), "decay": slot["decay"].clone()}


def factor(update_number: Int[Tensor, "..."], schedule: Schedule) -> Float[Tensor, "..."]:
    """Fraction of the peak rate that update u uses, u from 1.

        u <= W:        f = start + (top - start) u / W,      top = the shape's value at W: 1, or (1 + floor) / 2 for half_cosine
        then, with r = (u - W) / (T - W), m = floor, e = exponent:
        constant:      f = 1
        linear:        f = m + (1 - m) (1 - r)
        polynomial:    f = m + (1 - m) (1 - r)^e
        cosine:        f = m + (1 - m) (1 + cos(pi x)) / 2,  x = r^e cycles, less the cycles that are done
        half_cosine:   f = m + (1 - m) (1 + cos(pi (1 + r) / 2)) / 2
        exponential:   f = m^r
        inverse_sqrt:  f = m + (1 - m) (W / u)^e
        power:         f = max(m, (W / u)^e)
        wsd:           f = 1, then the tail
        range:         f = m^(1 - u / T)
        u >= T:        f = m; 1 for constant and range; inverse_sqrt and power have no end
        tail:          from the shape's value c at B = T - D, D = tail T updates, with s = (u - B) / D:
                       f = end + (c - end) g,   g = 1 - s, (1 + cos(pi s)) / 2 or 1 - sqrt(s);
                       reciprocal: 1 / f = (1 - s) / c + s / end;   u >= T: f = end
        stages:        each from the end of the one before, linear or half a turn of a cosine

    A cycle of "wsd" is T / cycles updates, the warm-up is part of the first; its last update is at `end`, the next at the peak.

    Args:
        update_number: u, >= 1.
        schedule: shape, W = `warmup`, T = `length`.

    Returns:
        The factor in [0, 1], float64.

    Sources: cosine: Loshchilov & Hutter 2017, eq. 5, arXiv:1608.03983; inverse_sqrt: Vaswani et al. 2017, arXiv:1706.03762;
    wsd: Hu et al. 2024, arXiv:2404.06395; power: Shen et al. 2024, arXiv:2408.13359; 1 - sqrt: Haegele et al. 2024,
    arXiv:2405.18392; range: Smith 2017, arXiv:1506.01186. All are held at their end.

    >>> factor(torch.arange(1, 7), Schedule(shape="linear", warmup=2, length=6, floor=0.0)).tolist()
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    u = update_number.to(torch.float64)
    if schedule.shape == "stages":
        return _staged(u, schedule)
    after = _with_tail(u, schedule) if schedule.has_tail else _shaped(u, schedule)
    if not schedule.warmup:
        return after
    top = (1 + schedule.floor) / 2 if schedule.shape == "half_cosine" else 1.0
    rising = schedule.start + (top - schedule.start) * u / schedule.warmup
    # The last one is the top itself, whatever the sum is rounded to.
    return torch.where(u < schedule.warmup, rising, torch.where(u <= schedule.warmup, top, after))


def _shaped(u: Tensor, schedule: Schedule) -> Tensor:
    """The shape alone, for updates after the warm-up."""
    warmup, length, floor = schedule.warmup or 0, schedule.length or 1, schedule.floor
    if schedule.shape in ("constant", "wsd"):
        return torch.ones_like(u)
    if schedule.shape in ("inverse_sqrt", "power"):
        fallen = (max(warmup, 1) / u).clamp(max=1.0) ** (schedule.exponent or 0.5)
        return fallen.clamp(min=floor) if schedule.shape == "power" else floor + (1 - floor) * fallen
    if schedule.shape == "range":
        rising: Tensor = floor ** (1 - (u / length).clamp(max=1.0))
        return rising
    r = ((u - warmup) / (length - warmup)).clamp(0.0, 1.0)
    match schedule.shape:
        case "linear":
            fall = 1 - r
        case "polynomial":
            fall = (1 - r) ** (schedule.exponent or 2.0)
        case "cosine":
            x = r ** (schedule.exponent or 1.0) * schedule.cycles
            fall = (1 + torch.cos(math.pi * (x - (torch.ceil(x) - 1).clamp(min=0)))) / 2
        case "half_cosine":
            fall = (1 + torch.cos(math.pi * (1 + r) / 2)) / 2
        case _:  # exponential
            return torch.where(u >= length, floor, floor**r)
    return torch.where(u >= length, floor, floor + (1 - floor) * fall)


def _with_tail(u: Tensor, schedule: Schedule) -> Tensor:
    length, period, down = schedule.length or 1, schedule.period, schedule.down
    end = schedule.floor if schedule.end is None else schedule.end
    # The last update of a cycle is its end: (0, period] and not [0, period).
    within = u - period * (torch.ceil(u / period) - 1).clamp(0, length // period - 1)
    begin = _shaped(torch.full_like(u, period - down), schedule) if period > down else torch.ones_like(u)
    s = ((within - (period - down)) / down).clamp(0.0, 1.0)
    match schedule.tail_shape:
        case "reciprocal":
            falling = 1 / ((1 - s) / begin + s / max(end, 1e-300))
        case "linear":
            falling = end + (begin - end) * (1 - s)
        case "cosine":
            falling = end + (begin - end) * (1 + torch.cos(math.pi * s)) / 2
        case _:  # sqrt
            falling = end + (begin - end) * (1 - s.sqrt())
    tail = torch.where(within >= period, end, falling)
    return torch.where(within > period - down, tail, _shaped(u, schedule))


def _staged(u: Tensor, schedule: Schedule) -> Tensor:
    stages = stages_of(schedule)
    value, begun = torch.full_like(u, stages[-1].to), sum(stage.updates for stage in stages)
    for stage in reversed(stages):
        begun -= stage.updates
        s = ((u - begun) / stage.updates).clamp(0.0, 1.0)
        fall = (1 + torch.cos(math.pi * s)) / 2 if stage.shape == "cosine" else 1 - s
        here = stage.to + (stage.begin - stage.to) * fall
        value = torch.where(u < begun + stage.updates, here, value)
    return value
