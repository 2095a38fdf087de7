"""Laws of what a step works out: micro-batches are one batch, and a bad update leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lib.random import mix32
from lib.testing.case import Case, UncheckedError, axes_of, outcome, reshaped
from lib.testing.trees import bits, difference, extras, rebuilt_like, snapshot
from lib.tree import leaves

__all__ = [
    "LEARNT",
    "Rounding",
    "accumulation",
    "apart",
    "draws",
    "look_for_change",
    "refusal",
    "rounding_of",
    "uneven",
]

LEARNT = ("params.", "optimizer.", "average.")
SPOILT = 6  # leaves that are spoilt in turn
PROBES = 6  # a rule that takes signs turns what is all but zero either way, half of the time
# Of a change may be rounding: sums in another order, of terms that partly cancel.
_SHARES: Mapping[str, float] = {"fp32": 1e-4, "bf16": 0.02, "fp16": 0.005}
_UNITS: Mapping[str, float] = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}


def accumulation(case: Case) -> str | None:
    """However its rows are cut into micro-batches, a batch is one update; rows have unequal numbers of targets.

    What is compared is the change of each leaf, within what rounding makes of it: so much as parameters that are one unit in
    the last place of the compute dtype away make, and a share of the change.
    """
    axes = axes_of(case.batches[0])
    if axes is None:
        raise UncheckedError("the leaves of the batch have no axes [micro-batches, rows, ...] in common")
    rows = axes[0] * axes[1]
    if rows < 2:
        raise UncheckedError("the batch has one row, must have two")
    batch = uneven(case.batches[0])
    whole = case.step(case.state, reshaped(batch, 1))
    look_for_change(case.state, whole)
    rounding = rounding_of(case, reshaped(batch, 1))
    for micro in sorted({2 if rows % 2 == 0 else rows, axes[0], rows} - {1}):
        parts = case.step(case.state, reshaped(batch, micro))
        if where := apart(case.state, whole, parts, rounding):
            if draws(case, batch):
                raise UncheckedError(
                    f"random numbers hang on the micro-batch, or else it is broken: {where}; check without"
                )
            return (
                f"{rows} rows in 1 and in {micro} micro-batches are two updates: {where}; "
                f"add up sums and numbers of targets, and divide, clip and test once"
            )
    return None


def refusal(case: Case) -> str | None:
    """An update whose loss or gradient is not finite leaves what was learnt as it was, to the last bit."""
    begun = case.state
    for batch in case.batches:  # moments that are all zero would hide what happens to them
        begun, _ = case.step(begun, batch)
    named, batch = leaves(begun), case.batches[0]
    learnt = [path for path in named if path.startswith(LEARNT)]
    params = [path for path in named if path.startswith("params.") and named[path].is_floating_point()]
    if not params:
        raise UncheckedError("the state has no slot `params`")
    data = [path for path, leaf in leaves(batch).items() if _floats(leaf)]
    every = max(1, len(params) // SPOILT)
    clean = {path for path, leaf in leaves(case.step(begun, batch)[1]).items() if _finite(leaf)}
    spoilt = [("state", path) for path in params[::every] if named[path].numel()] + [("batch", path) for path in data]
    for tree, path in spoilt:
        for value in (math.nan, math.inf):
            state = _spoilt(begun, path, value) if tree == "state" else begun
            brought = _spoilt(batch, path, value) if tree == "batch" else batch
            new, metrics = case.step(state, brought)
            bad = [name for name, leaf in leaves(metrics).items() if name in clean and not _finite(leaf)]
            if where := _trace(state, new, bad, learnt, path if tree == "state" else None):
                return (
                    f"with {value} in {tree}.{path}, {where}; "
                    f"keep the old leaves by `torch.where` when the loss or a gradient is not finite"
                )
    return None


class Rounding(NamedTuple):
    """What rounding may make of an update.

    Attributes:
        noise: updates from states that are one unit in the last place of the compute dtype away.
        share: of a leaf's change that may be rounding, where sums are taken in another order.
    """

    noise: Sequence[tuple[Any, Any]]
    share: float


def rounding_of(case: Case, batch: Any) -> Rounding:
    """Measure it for an update of a case."""
    compute = _compute(case, batch)
    nudged = (_nudged(case.state, _UNITS[compute], probe) for probe in range(PROBES))
    return Rounding([case.step(state, batch) for state in nudged], _SHARES[compute])


def apart(old: Any, one: tuple[Any, Any], other: tuple[Any, Any], rounding: Rounding) -> str | None:
    """The first leaf in which two outcomes differ by more than rounding, in words.

    Args:
        old: the state before.
        one: what the step gave.
        other: what it gave otherwise.
        rounding: what may be rounding.
    """
    begun, found, others = leaves(old), outcome(one), outcome(other)
    probes = [outcome(probe) for probe in rounding.noise]
    for path, a in found.items():
        b = others[path]
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"{path} is {_shown(a)} and {_shown(b)}"
            continue
        was = begun.get(path.removeprefix("state."), torch.zeros(())) if path.startswith("state.") else torch.zeros(())
        left, right = a.double(), b.double()
        alike = (left == right) | (left.isnan() & right.isnan())
        moved, gap = _size(left - was.double()), _size(torch.where(alike, 0.0, left - right))
        noise = max((_size(probe[path].double() - left) for probe in probes), default=0.0)
        if not gap <= rounding.share * moved + 8 * noise + 1e-6 * _size(left):
            return f"{path} moves by {moved:.3g} and differs by {gap:.3g}"
    return None


def look_for_change(old: Any, one: tuple[Any, Any]) -> None:
    """See whether an update changes anything, as one that is refused does not: others that do not are no witness.

    Raises:
        UncheckedError: it does not.
    """
    begun, after = leaves(old), leaves(one[0])
    learnt = [path for path in begun if path.startswith(LEARNT) and path in after]
    if all(torch.equal(bits(begun[path]), bits(after[path])) for path in learnt):
        bad = next((path for path, leaf in leaves(one[1]).items() if not _finite(leaf)), None)
        why = "" if bad is None else f" (metrics.{bad} is not finite)"
        raise UncheckedError(
            f"the update changes nothing that is learnt{why}; give a state and a batch whose update counts"
        )


def _size(gap: Tensor) -> float:
    return float(gap.square().sum().sqrt())


def _shown(leaf: Tensor) -> str:
    return str(leaf.item()) if leaf.ndim == 0 else "one thing"


def _compute(case: Case, batch: Any) -> str:
    """The dtype that a step computes its loss in: the coarsest that is seen where gradients are recorded."""
    with _Seen() as seen:
        case.step(case.state, batch)
    return next((name for name, dtype in _COARSE if dtype in seen.dtypes), "fp32")


_COARSE = (("bf16", torch.bfloat16), ("fp16", torch.float16))


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dtypes that operations give while it is on and gradients are recorded: a rule may work in another one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            several = given if isinstance(given, (list, tuple)) else (given,)
            self.dtypes |= {one.dtype for one in several if torch.is_tensor(one)}
        return given


def draws(case: Case, batch: Any) -> bool:
    """Whether the outcome hangs on the state's key."""
    named = leaves(case.state)
    if "key" not in named:
        return False
    other = rebuilt_like(case.state, {**named, "key": named["key"] + 1}, extras(case.state))
    return difference(leaves(case.step(case.state, batch)[1]), leaves(case.step(other, batch)[1])) is not None


def _nudged(state: Any, unit: float, probe: int) -> Any:
    """The state with parameters one unit in the last place away, up or down by their places."""

    def one(leaf: Tensor) -> Tensor:
        place = torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape)
        up = mix32(place * PROBES + probe) & 1
        return leaf + leaf * unit * (2 * up - 1).to(leaf.dtype)

    nudged = {path: one(leaf) for path, leaf in leaves(state).items() if path.startswith("params.") and _floats(leaf)}
    return rebuilt_like(state, {**leaves(state), **nudged}, extras(state))


def _floats(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() > 0


def uneven(batch: Any) -> Any:
    """The batch with another number of targets in each row, none in the first, where it has a `mask`."""
    named = leaves(batch)
    mask = named.get("mask")
    if mask is None or mask.dtype != torch.bool or mask.ndim < 3:
        return batch
    rows, length = mask.shape[0] * mask.shape[1], mask.shape[2]
    counts = torch.tensor([(row * 7) % (length + 1) for row in range(rows)]).reshape(*mask.shape[:2], 1)
    places = torch.arange(length).reshape(length, *(1,) * (mask.ndim - 3))
    kept = mask & (places < counts.reshape(*mask.shape[:2], *(1,) * (mask.ndim - 2)))
    return rebuilt_like(batch, {**named, "mask": kept if bool(kept.any()) else mask}, extras(batch))


def _spoilt(tree: Any, path: str, value: float) -> Any:
    named = snapshot(tree)
    named[path].view(-1)[0] = value
    return rebuilt_like(tree, named, extras(tree))


def _finite(leaf: Tensor) -> bool:
    return bool(leaf.isfinite().all())


def _trace(old: Any, new: Any, bad: list[str], learnt: list[str], spoilt: str | None) -> str | None:
    before, after = leaves(old), leaves(new)
    changed = [path for path in learnt if not torch.equal(bits(before[path]), bits(after[path]))]
    if not changed:
        return None
    # What is spoilt may have no part in the loss: then the update is a good one, and the spoilt element stays alone.
    if bad:
        return f"metrics.{bad[0]} is not finite and yet {changed[0]} changes"
    for path in learnt:
        leaf = after[path]
        own = spoilt is not None and path.removeprefix("average.").endswith(spoilt.removeprefix("params."))
        if int((~leaf.isfinite()).sum()) > int(own):
            return f"{path} becomes non-finite"
    return None
