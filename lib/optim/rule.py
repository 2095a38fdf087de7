"""What an optimizer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lib.tree import Tree

__all__ = ["Rule"]


class Rule(NamedTuple):
    """An optimizer as two pure functions.

    `init(params) -> slot` makes the rule's own tree: fp32 leaves named as the parameters are, and int64 counters.
    `update(grads, slot, params, lr, decays) -> (params, slot)` applies one update. `grads` are fp32, averaged and clipped;
    `lr` is a 0-d tensor; `decays` holds a 0-d weight decay for each parameter. A refused update is undone by the step, so a
    rule need not look for non-finite values.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, Tensor, Tree], tuple[Tree, Tree]]
