"""Plain descent, with momentum if wanted."""

from __future__ import annotations

from torch import Tensor

from lib.optim.combine import Where, chain, identity
from lib.optim.decay import decay
from lib.optim.parts import descend, momentum
from lib.optim.rule import Rule

__all__ = ["sgd"]


def sgd(beta: float | Tensor = 0.0, *, nesterov: bool = False, where: Where = "*") -> Rule:
    """Make stochastic gradient descent: `decay`, `momentum` unless `beta` is 0, `descend`.

    Source: torch.optim.SGD, but that decay is decoupled; for decay within the gradient chain `l2` before it.
    """
    plain = isinstance(beta, float | int) and beta == 0
    return chain(decay(where), identity() if plain else momentum(beta, nesterov=nesterov), descend())
