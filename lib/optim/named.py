"""The rule that a recipe names, with its groups."""

from __future__ import annotations

from collections.abc import Callable

from lib.optim.adafactor import adafactor
from lib.optim.adam import adamw
from lib.optim.combine import chosen, mask, owners, scaled
from lib.optim.decay import decayed, stacked
from lib.optim.lion import lion
from lib.optim.muon import muon
from lib.optim.rule import Rule
from lib.optim.schedule_free import schedule_free
from lib.optim.sgd import sgd
from lib.recipe import Recipe, groups_of
from lib.tree import Tree, leaves, matching

__all__ = ["check_patterns", "frozen", "rule_of"]


def rule_of(recipe: Recipe) -> Rule:
    """The rule a recipe names. Its groups change rates and decay by path, and which parameters are left alone."""
    rule = _named(recipe)
    for group in groups_of(recipe.optim):
        if not group.freeze:
            rule = scaled(rule, lr=group.lr, decay=group.decay, where=group.pattern)
    return mask(lambda params: set(leaves(params)) - frozen(recipe, params), rule) if recipe.optim.groups else rule


def frozen(recipe: Recipe, params: Tree) -> set[str]:
    """Paths of the parameters that a recipe leaves as they are.

    Raises:
        ValueError: a pattern of `optim.groups` matches no parameter, or a parameter is in two groups.
    """
    groups = groups_of(recipe.optim)
    owned = owners([(group.pattern, group.pattern) for group in groups], params, "optim.groups", "optim.groups")
    kept = {group.pattern for group in groups if group.freeze}
    return {path for path, pattern in owned.items() if pattern in kept}


def check_patterns(recipe: Recipe, params: Tree) -> None:
    """Hold all patterns of a recipe's optimizer against the parameters, before any is used.

    Raises:
        ValueError: one matches no parameter, a parameter is in two groups, or none is left to train.
    """
    for name in ("no_decay", "matrices"):
        if patterns := getattr(recipe.optim, name):
            chosen(patterns, params, f"optim.{name}")
    if len(frozen(recipe, params)) == len(leaves(params)):
        raise ValueError(
            f"optim.groups={list(recipe.optim.groups)} freezes all parameters, must leave one to train; drop a group"
        )
    if recipe.optim.rule == "muon":
        for path in _matrices(recipe)(params):
            if leaves(params)[path].ndim - stacked(recipe, path) < 2:
                raise ValueError(
                    f"optim.matrices: {path} has shape {list(leaves(params)[path].shape)}, must be matrices; narrow the patterns"
                )


def _named(recipe: Recipe) -> Rule:
    optim, where = recipe.optim, decayed(recipe)
    match optim.rule:
        case "sgd":
            beta = 0.9 if optim.momentum is None else optim.momentum
            return sgd(beta, nesterov=bool(optim.nesterov), where=where)
        case "lion":
            return lion(beta1=optim.beta1, beta2=optim.beta2, where=where)
        case "adafactor":
            return adafactor(where=where, layers=lambda path: stacked(recipe, path))
        case "muon":
            return muon(
                0.95 if optim.momentum is None else optim.momentum,
                matrices=_matrices(recipe),
                nesterov=optim.nesterov is not False,
                beta1=optim.beta1,
                beta2=optim.beta2,
                eps=optim.eps,
                where=where,
            )
        case "schedule_free":
            return schedule_free(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, where=where)
        case _:
            return adamw(beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps, where=where, moments=optim.moments)


def _matrices(recipe: Recipe) -> Callable[[Tree], set[str]]:
    """Those of `optim.matrices`; else those of the blocks, or of a tree of one's own all that have two axes."""

    def those(params: Tree) -> set[str]:
        if recipe.optim.matrices is not None:
            return set(matching(recipe.optim.matrices, tuple(leaves(params))))
        return {
            path
            for path, leaf in leaves(params).items()
            if leaf.ndim - stacked(recipe, path) >= 2 and (recipe.model is None or stacked(recipe, path))
        }

    return those
