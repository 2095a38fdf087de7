"""Update rules: a pair of pure functions, `init(params) -> slot` and `update(...) -> (params, slot)`."""

from __future__ import annotations

from lib.optim.adamw import adamw
from lib.optim.rule import Rule
from lib.recipe import Optim

__all__ = ["Rule", "adamw", "rule_of"]


def rule_of(optim: Optim) -> Rule:
    """The rule a recipe names."""
    return {"adamw": adamw}[optim.rule](beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps)
