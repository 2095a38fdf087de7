"""The algebra of rules: one after the other, on a part of the parameters, at another rate.

`chain` is associative and `identity()` is its neutral element, slots included.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from lib.optim.rule import Now, Rule
from lib.recipe import MOST_LR
from lib.tree import Tree, from_leaves, leaves, matching

__all__ = ["Where", "chain", "chosen", "freeze", "hyper", "identity", "mask", "owners", "partition", "scaled"]

Where = str | Sequence[str] | Callable[[Tree], Collection[str]]
"""Paths of parameters: patterns (`*`, `?`), or a function of the parameters that lists them."""


def chain(*rules: Rule) -> Rule:
    """One rule after the other: each gets the gradients and parameters that the one before has left.

    The slot holds those of the rules that have one, under their names; a second one of a name is NAME_2. Chains within are
    taken apart, and a chain of one rule is that rule.
    """
    links = tuple(link for rule in rules for link in (rule.links if rule.links is not None else (rule,)))
    if len(links) == 1:
        return links[0]
    names = _names(links)

    def init(params: Tree) -> Tree:
        slots = {name: link.init(params) for name, link in zip(names, links, strict=True)}
        return {name: slot for name, slot in slots.items() if slot}

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        after: Tree = {}
        for name, link in zip(names, links, strict=True):
            grads, params, own = link.update(grads, params, slot.get(name, {}), now)
            if own:
                after[name] = own
        return grads, params, after

    return Rule(init, update, links=links)


def identity() -> Rule:
    """The rule that changes nothing and holds nothing."""
    return chain()


def freeze() -> Rule:
    """What `mask` and `partition` leave alone: parameters keep their bits and have no slot. The same as `identity`."""
    return identity()


def mask(where: Where, rule: Rule, name: str = "") -> Rule:
    """Apply a rule to some parameters only; the others go by.

    Raises:
        ValueError: a pattern matches no parameter.
    """

    def init(params: Tree) -> Tree:
        paths = chosen(where, params)
        return rule.init(_only(params, paths)) if paths else {}

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        paths = chosen(where, params)
        if not paths:
            return grads, params, slot
        some, moved, after = rule.update(_only(grads, paths), _only(params, paths), slot, now)
        return _with(grads, some), _with(params, moved), after

    return Rule(init, update, name or rule.name)


def partition(groups: Mapping[str, tuple[Where, Rule]], rest: Rule | None = None) -> Rule:
    """Give each group of parameters a rule of its own.

    Args:
        groups: name -> (which parameters, rule); its slot lies under the name.
        rest: rule of the parameters in no group; none = there must be none.

    Raises:
        ValueError: a pattern matches no parameter, a parameter is in two groups, or in none and there is no `rest`.
    """
    parts = [mask(where, rule, name) for name, (where, rule) in groups.items()]

    def left(params: Tree) -> list[str]:
        owned = owners([(name, where) for name, (where, _) in groups.items()], params, "partition")
        none = [path for path in leaves(params) if path not in owned]
        if none and rest is None:
            more = f" and {len(none) - 6} more" if len(none) > 6 else ""
            raise ValueError(
                f"partition: {', '.join(none[:6])}{more} must be in a group; widen a pattern or give rest=freeze()"
            )
        return none

    whole = chain(*parts, mask(left, rest or identity(), "rest"))
    return Rule(whole.init, whole.update)


def scaled(rule: Rule, *, lr: float | Tensor = 1.0, decay: float | Tensor = 1.0, where: Where | None = None) -> Rule:
    """Run a rule with another learning rate and decay, given as factors; decay is multiplied by the learning rate too.

    Args:
        rule: the rule.
        lr: factor on the learning rate.
        decay: factor on the weight decay.
        where: the parameters meant; none = all that the rule is given.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    for name, factor in (("lr", lr), ("decay", decay)):
        if not isinstance(factor, Tensor) and not 0 <= factor <= MOST_LR:
            raise ValueError(f"scaled: {name}={factor} must be a factor from 0 to 1e6; change it")

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        paths = leaves(params) if where is None else chosen(where, params)
        rates = {**now.rates, **{path: now.rates.get(path, 1.0) * lr for path in paths}}
        decays = {**now.decays, **{path: now.decays.get(path, 1.0) * decay for path in paths}}
        return rule.update(grads, params, slot, now._replace(rates=rates, decays=decays))

    return Rule(rule.init, update, rule.name)


def hyper(make: Callable[..., Rule], **values: float) -> Rule:
    """Keep a rule's constants as leaves of the state, so that a run may change them with no new compilation.

    Slot: `hyper`: each of `values`, float64 0-d; `rule`: that of the rule. `make` gets them as 0-d tensors.

    >>> from lib.optim import scale_by_adam
    >>> slot = hyper(scale_by_adam, beta1=0.9).init({"w": torch.ones(2)})
    >>> slot["hyper"]["beta1"].item()
    0.9
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"hyper: {name}={value!r} must be a number; give it to the rule itself")

    def leaves_of() -> dict[str, Tensor]:
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    # As leaves from the start: a rule may be made otherwise of a 0 than of a tensor.
    inner = make(**leaves_of())

    def init(params: Tree) -> Tree:
        slot: Tree = {"hyper": leaves_of()}
        own = inner.init(params)
        return {**slot, "rule": own} if own else slot

    def update(grads: Tree, params: Tree, slot: Tree, now: Now) -> tuple[Tree, Tree, Tree]:
        rule = make(**{name: slot["hyper"][name] for name in values})
        grads, params, own = rule.update(grads, params, slot.get("rule", {}), now)
        after: Tree = {"hyper": {name: slot["hyper"][name].clone() for name in values}}
        return grads, params, {**after, "rule": own} if own else after

    return Rule(init, update, inner.name)


def chosen(where: Where, params: Tree, what: str = "pattern") -> list[str]:
    """List the paths that are meant, sorted.

    Raises:
        ValueError: a pattern matches no parameter.
    """
    named = leaves(params)
    if callable(where):
        found = sorted(where(params))
        strange = [path for path in found if path not in named]
        if strange:
            raise ValueError(f"where: {strange[0]!r} is no parameter, must be one of {_some(named)}; fix the function")
        return found
    if not where:
        raise ValueError("where: no patterns, must be at least one; give one, or a function that lists none")
    patterns, paths = (where,) if isinstance(where, str) else tuple(where), tuple(named)
    for pattern in patterns:
        if not matching((pattern,), paths):
            raise ValueError(
                f"{what}={pattern!r} must match a parameter, matches none of {_some(named)}; fix or drop the pattern"
            )
    return list(matching(patterns, paths))


def owners(groups: Sequence[tuple[str, Where]], params: Tree, at: str, what: str = "pattern") -> dict[str, str]:
    """List which group each parameter is in, by path; those in none are left out.

    Args:
        groups: (name, which parameters).
        params: the parameters.
        at: where the groups stand, for errors.
        what: what a pattern is called there.

    Raises:
        ValueError: a pattern matches no parameter, or a parameter is in two groups.
    """
    owned: dict[str, str] = {}
    for name, where in groups:
        for path in chosen(where, params, what):
            if path in owned:
                raise ValueError(
                    f"{at}: {path} is in {owned[path]!r} and in {name!r}, must be in one group; narrow a pattern"
                )
            owned[path] = name
    return owned


def _some(named: Collection[str]) -> str:
    return ", ".join(list(named)[:6]) + (", ..." if len(named) > 6 else "")


def _names(links: Sequence[Rule]) -> list[str]:
    names: list[str] = []
    for link in links:
        base = link.name or "rule"
        names.append(
            base if base not in names else next(f"{base}_{n}" for n in range(2, 99) if f"{base}_{n}" not in names)
        )
    return names


def _only(tree: Tree, paths: Collection[str]) -> Tree:
    named = leaves(tree)
    return from_leaves({path: named[path] for path in paths})


def _with(tree: Tree, changed: Tree) -> Tree:
    named: dict[str, Tensor] = {**leaves(tree), **leaves(changed)}
    return from_leaves(named)
