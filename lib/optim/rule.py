"""What an optimizer is, and what it is told of each update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lib.scalars import together
from lib.tree import Tree, from_leaves, leaves

__all__ = ["Now", "Rule", "counter"]


class Now(NamedTuple):
    """What holds for one update, beside its gradients.

    Attributes:
        lr: learning rate, 0-d.
        decay: weight decay, 0-d.
        key: key of this update's draws, int64 0-d.
        rates: factors on `lr` by path; a path that is not there has 1.
        decays: factors on `decay` by path.
    """

    lr: Tensor
    decay: Tensor
    key: Tensor
    rates: Mapping[str, float | Tensor] = {}
    decays: Mapping[str, float | Tensor] = {}

    def each_rate(self, params: Tree) -> Tree:
        """The learning rate of each parameter, 0-d fp32."""
        named = leaves(params)
        rates = [self.lr * self.rates[path] if path in self.rates else self.lr for path in named]
        return from_leaves(dict(zip(named, together(rates), strict=True)))

    def each_decay(self, params: Tree, decayed: Collection[str]) -> Tree:
        """The weight decay of each parameter, 0-d fp32; 0 for those that do not decay."""
        weights = {path: torch.zeros_like(self.decay) for path in leaves(params)}
        for path in decayed:
            weights[path] = self.decay * self.decays[path] if path in self.decays else self.decay
        return from_leaves(dict(zip(weights, together(list(weights.values())), strict=True)))

    def each_keep(self, params: Tree, decayed: Collection[str]) -> Tree:
        """What decay leaves of each parameter, 1 - lr * decay, 0-d fp32; 1 for those that do not decay."""
        keeps = {path: torch.ones_like(self.lr) for path in leaves(params)}
        for path in decayed:
            lost = self.lr * self.decay
            if path in self.rates or path in self.decays:
                lost = lost * self.rates.get(path, 1.0) * self.decays.get(path, 1.0)
            keeps[path] = 1 - lost
        return from_leaves(dict(zip(keeps, together(list(keeps.values())), strict=True)))


class Rule(NamedTuple):
    """A training rule, or a part of one, as two pure functions. Parts follow each other by `lib.optim.chain`.

    `init(params) -> slot` makes the rule's own tree, which may be empty: leaves named as the parameters are, int64 counters.
    `update(grads, params, slot, now) -> (grads, params, slot)` takes part in one update: it may change the gradients, for the
    parts behind it, or the parameters, or both. `grads` come in fp32, averaged and clipped. A refused update is undone by the
    step, and so is one of a rule of your own that makes a parameter non-finite: a rule need not look for that.

    Attributes:
        init: see above.
        update: see above.
        name: under which its slot lies in that of a chain.
        links: the parts of a chain.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, Now], tuple[Tree, Tree, Tree]]
    name: str = ""
    links: tuple[Rule, ...] | None = None


def counter(params: Tree) -> Tensor:
    """A count that begins at 0, int64, where the parameters are."""
    return torch.zeros((), dtype=torch.int64, device=next((leaf.device for leaf in leaves(params).values()), None))
