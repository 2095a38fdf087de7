"""The whole idea on one page: training is one value moving through one pure function.

    state, metrics = train_step(state, batch)

Same inputs, same bits. Inputs are left as they are and share no memory with the outputs. Nothing is read or written but the
arguments: randomness comes from `state["key"]`, the learning rate from `state["scheduler"]`, what is static from
`state["recipe"]`. Works eager and under `torch.compile(train_step, fullgraph=True)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lib import grad, metrics
from lib.model.form import check_form
from lib.model.loss import language_loss
from lib.module import as_function
from lib.optim import Now, Rule, frozen, rule_of
from lib.random import fold, purpose
from lib.recipe import MOST_LR, Recipe
from lib.scalars import together
from lib.shard.words import Rows, gather, gathered, local, mine, place, rows_of, total
from lib.state import average, cursor, key, scale, schedule, window
from lib.tree import Tree, leaves, plain, select, tensordict, tree_map

__all__ = ["Loss", "Step", "eval_step", "make_eval_step", "make_train_step", "train_step"]

Step = Callable[[TensorDict, TensorDict], tuple[TensorDict, TensorDict]]
Loss = Callable[[Any, Any, Tensor | None], tuple[Tensor, Tensor | float]]
"""(parameters or module, micro-batch, key) -> (sum of the targets' losses, number of targets). The key is none in evaluation."""

_STEP, _OPTIM = purpose("step"), purpose("optim")
_DTYPES = (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))


def train_step(state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Train the recipe's language model on one batch.

    Args:
        state: as `lib.state.init_state` makes it.
        batch: [a, b, s] `inputs` `targets` `segments` `positions` int64 and `mask` bool; [a, b] `bytes` int64; `cursor`, the
            position after this batch. a counts micro-batches.

    Returns:
        The next state, and metrics named in `lib.metrics.UNITS`.

    Raises:
        ValueError: the recipe has no model, or the batch does not fit the state.
    """
    recipe: Recipe = state["recipe"]
    loss = language_loss(recipe)
    check_form(plain(batch))
    return _advance(state, batch, loss, rule_of(recipe))


def make_train_step(loss: Loss, module: nn.Module | None = None, *, rule: Rule | None = None) -> Step:
    """Make a train step from your own loss, and your own module and optimizer if you like.

    Args:
        loss: `loss(params, batch, key)` gives the sum of the targets' losses and how many targets there are. `params` is the
            tree of parameters in the compute dtype; with a module it is a function that calls the module with them.
            `batch` is one micro-batch, without the leading axis. All randomness must come from `key`.
        module: an `nn.Module` to call; its own parameters are only a template, the state's are used.
        rule: an optimizer as a pair of pure functions; none = the recipe's.

    Returns:
        A pure function of (state, batch), for states made by `init_state(recipe, params=module, rule=rule)`.

    Raises:
        ValueError: the module keeps state or draws randomness of its own (batch norm, dropout).
    """
    called = as_function(loss, module)

    def step(state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
        return _advance(state, batch, _numbered(called), rule or rule_of(state["recipe"]), watched=rule is not None)

    return step


def eval_step(state: TensorDict, batch: TensorDict) -> TensorDict:
    """Measure the recipe's language model on one batch, without randomness; reports add up with `lib.metrics.merge`."""
    loss = language_loss(state["recipe"])
    check_form(plain(batch), train=False)
    return _evaluate(state, batch, loss)


def make_eval_step(loss: Loss, module: nn.Module | None = None) -> Callable[[TensorDict, TensorDict], TensorDict]:
    """Make the eval step that goes with `make_train_step(loss, module)`; the loss gets no key."""
    called = as_function(loss, module)
    return lambda state, batch: _evaluate(state, batch, _numbered(called))


@torch.no_grad()  # but for the gradients in `accumulate`, whatever the caller's mode and leaves
def _advance(
    state: TensorDict, batch: TensorDict, loss: grad.MicroLoss, rule: Rule, *, watched: bool = False
) -> tuple[TensorDict, TensorDict]:
    recipe: Recipe = state["recipe"]
    held = plain(state)
    over = rows_of(plain(batch))
    old, data = tree_map(local, held), tree_map(mine, plain(batch))

    # 1. Each micro-batch: cast, forward, sum of losses times the scale; gradients added in fp32.
    draws = fold(fold(old["key"], _STEP), old["step"])
    in_compute = _cast(recipe.precision.compute, over)
    summed = grad.accumulate(
        lambda params, part, which: loss(in_compute(params), in_compute(part), draws, which),
        old["params"],
        grad.micro_batches(data),
        old["scale"]["scale"],
        frozen(recipe, old["params"]),
        over,
    )

    # 2, 3. Divide once, by all the targets of the update. No targets: the sums are zero, and so is the quotient.
    divisor = old["scale"]["scale"] * summed.targets.clamp(min=1)
    grads = tree_map(lambda g: g / divisor, summed.grads)
    loss_nats = summed.total / summed.targets.clamp(min=1)

    # 4. Norm, tests, learning rate, clip: once per update, on the real gradients.
    norm = grad.global_norm(grads)
    some = summed.targets > 0
    finite = torch.isfinite(norm) & torch.isfinite(summed.total)
    spike = (
        window.is_spike(old["window"], recipe.guard, loss_nats, norm) if "window" in old else torch.zeros_like(finite)
    )
    lr = old["scheduler"]["lr"] * schedule.factor(
        schedule.number(old["scheduler"], recipe.schedule, summed.targets), recipe.schedule
    )
    sound = (lr.abs() <= MOST_LR) & torch.isfinite(old["scheduler"]["decay"])
    accept = some & finite & sound
    if recipe.guard.spikes == "refuse":
        accept = accept & ~spike
    factor, accepted = together([grad.clip_factor(norm, recipe.optim.clip), accept])
    grads = tree_map(lambda g: g * factor, grads)

    # 5. Update, average.
    now = Now(lr, old["scheduler"]["decay"], fold(draws, _OPTIM))
    _, params, optimizer = rule.update(grads, old["params"], old["optimizer"], now)
    proposed = {"params": params, "optimizer": optimizer}
    if recipe.optim.average is not None:
        proposed["average"] = average.update(old["average"], params, recipe.optim, old["step"] + 1)

    # Finite gradients at a sound rate make finite parameters by our own rules; what others make is looked at.
    if watched:
        sums = gathered([leaf.sum() for leaf in leaves(params).values()])
        accept = accept & torch.isfinite(torch.stack(sums).sum())
        (accepted,) = together([accept])

    # 6, 7. Accept or refuse, leaf by leaf; what must move moves either way, and the cursor is the one the batch brought.
    refused = some & ~accept
    before = {name: old[name] for name in proposed}
    new: Tree = select(accepted > 0, proposed, before)
    new["step"] = old["step"] + 1
    new["scheduler"] = schedule.update(old["scheduler"], recipe.schedule, accept=accept, targets=summed.targets)
    new["cursor"] = cursor.update(old["cursor"], data)
    new["scale"] = scale.update(old["scale"], recipe, finite=finite, refused=refused, some=some)
    new["key"] = key.update(old["key"])
    if "window" in old:
        new["window"] = window.update(
            old["window"], accept=accept, spike=spike, measured=some & finite, loss=loss_nats, norm=norm
        )

    report = metrics.train_report(
        step=new["step"],
        total=summed.total,
        count=summed.targets,
        size_bytes=_bytes(data, summed.targets, over),
        lr=lr,
        norm=norm,
        scale=old["scale"]["scale"],
        skipped=new["scale"]["skipped"],
        refused=refused,
        spike_score=window.score(new["window"]) if "window" in old else None,
    )
    out = tensordict(tree_map(place, new, {name: held[name] for name in new}))
    out.set_non_tensor("recipe", recipe)
    return out, report


def _evaluate(state: TensorDict, batch: TensorDict, loss: grad.MicroLoss) -> TensorDict:
    over, data = rows_of(plain(batch)), tree_map(mine, plain(batch))
    in_compute = _cast(state["recipe"].precision.compute, over)
    with torch.no_grad():
        params = in_compute(plain(state["params"]))
        parts = enumerate(grad.micro_batches(data))
        found = [loss(params, in_compute(part), None, grad.Part(n, over)) for n, part in parts]
    nats = total(torch.stack([one[0].to(torch.float64) for one in found]).sum(), over)
    count = total(torch.stack([torch.as_tensor(one[1]) for one in found]).sum(), over)
    return metrics.eval_report(nats, count, _bytes(data, count, over))


def _cast(compute: str, over: Rows | None) -> Callable[[Tree], Tree]:
    dtype = dict(_DTYPES)[compute]
    return lambda tree: tree_map(lambda x: gather(x, dtype if x.is_floating_point() else None, over), tree)


def _numbered(loss: Loss) -> grad.MicroLoss:
    return lambda params, part, draws, which: loss(
        params, part, None if draws is None else fold(draws, which.word(draws.device))
    )


def _bytes(data: Tree, count: Tensor, over: Rows | None) -> Tensor:
    return total(data["bytes"].sum(), over) if "bytes" in data else torch.zeros_like(count)
