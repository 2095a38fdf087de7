"""Trees of tensors by dotted name: other names, and the mean of several. Nothing here opens a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lib.errors import CheckpointError

__all__ = ["averaged", "renamed"]

LISTED = 8  # names in one error line


def renamed(names: Iterable[str], rules: Mapping[str, str]) -> dict[str, str]:
    """Map names to new ones by rules `pattern: replacement`; the first rule that fits a name is the one.

    `*` stands for characters of one part of a dotted name, at least one, as many as fit; `**` at the end of a pattern
    for any rest. What they stood for is put, in order, in place of the stars of the replacement.

    Args:
        names: each once.
        rules: whole names; a name that none fits stays as it is.

    Returns:
        Old name -> new name.

    Raises:
        ValueError: a rule applies to no name, its stars do not agree, or two names become one.

    >>> renamed(["model.layers.0.wq.weight", "head"], {"model.layers.*.**": "blocks.*.**"})
    {'model.layers.0.wq.weight': 'blocks.0.wq.weight', 'head': 'head'}
    """
    apply = {pattern: _rule(pattern, replacement) for pattern, replacement in rules.items()}
    idle = dict.fromkeys(rules)
    result: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        new = name
        for pattern, rule in apply.items():
            if (put := rule(name)) is not None:
                idle.pop(pattern, None)
                new = put
                break
        if new in taken:
            raise ValueError(f"{taken[new]!r} and {name!r} both become {new!r}, must stay apart; change the rules")
        taken[new] = name
        result[name] = new
    for pattern in idle:
        raise ValueError(f"rule {pattern!r}: applies to no name, must to one; correct it or drop it")
    return result


def _rule(pattern: str, replacement: str) -> Callable[[str], str | None]:
    where = f"rule {pattern!r}: {replacement!r}"
    stars, put = re.findall(r"\*+", pattern), re.findall(r"\*+", replacement)
    if any(len(one) > 2 for one in (*stars, *put)) or "**" in stars[:-1] or ("**" in stars and pattern[-2:] != "**"):
        raise ValueError(f"{where} must have `*` between other characters and `**` at its end at most; correct it")
    if sorted(stars) != sorted(put):
        told = f"{len(stars)} stars ({' '.join(stars)}) become {len(put)} ({' '.join(put)})"
        raise ValueError(f"{where}: {told}, must be as many of each kind; correct it")
    kinds: Mapping[str, str] = {"*": "([^.]+)", "**": "(.*)"}
    fits = re.compile("".join(kinds.get(one, re.escape(one)) for one in re.split(r"(\*+)", pattern)), re.DOTALL)

    def rule(name: str) -> str | None:
        if (match := fits.fullmatch(name)) is None:
            return None
        left: dict[str, list[str]] = {"*": [], "**": []}
        for star, text in zip(stars, match.groups(), strict=True):
            left[star].append(text)
        return re.sub(r"\*+", lambda star: left[star[0]].pop(0), replacement)

    return rule


def averaged(trees: Iterable[Callable[[], Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Average trees of the same names, shapes and dtypes, element by element, each of the same weight.

        mean = (x_1 + ... + x_n) / n, in float64 (complex in complex128), rounded to the dtype of the x

    Args:
        trees: each is read when it is its turn, and let go of before the next.

    Returns:
        The mean; integers and bools as they are in all of them.

    Raises:
        CheckpointError: a tree differs from the first, in form or in an integer; up to eight differences are named.
        ValueError: there is no tree.
    """
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for read in trees:
        tree = {name: tensor.detach() for name, tensor in read().items()}
        count += 1
        if count == 1:
            dtypes = {name: tensor.dtype for name, tensor in tree.items()}
            total = {name: tensor.to(_wide(tensor.dtype), copy=True) for name, tensor in tree.items()}
        else:
            _check_alike(count, tree, total, dtypes)
            _add(total, tree)
        del tree  # or it would be held while the next is read
    if not count:
        raise ValueError("averaged: no tree, must be one or more; name one")
    for name, dtype in dtypes.items():
        if _adds(dtype):
            total[name] = (total[name] / count).to(dtype)
    return total


def _add(total: Mapping[str, Tensor], tree: Mapping[str, Tensor]) -> None:
    for name, tensor in tree.items():
        if _adds(tensor.dtype):
            total[name].add_(tensor.to(total[name]))


def _adds(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point or dtype.is_complex) and dtype != torch.float4_e2m1fn_x2  # torch has no arithmetic


def _wide(dtype: torch.dtype) -> torch.dtype:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return wide if _adds(dtype) else dtype


def _check_alike(
    number: int, tree: Mapping[str, Tensor], total: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Check that a tree is like the first in all that is not averaged."""
    found = [f"missing {name!r}" for name in sorted(total.keys() - tree.keys())]
    found += [f"extra {name!r}" for name in sorted(tree.keys() - total.keys())]
    for name in sorted(tree.keys() & total.keys()):
        tensor, first, dtype = tree[name], total[name], dtypes[name]
        if (tensor.dtype, tensor.shape) != (dtype, first.shape):
            found.append(f"{name!r} is {_form(tensor.dtype, tensor.shape)}, first {_form(dtype, first.shape)}")
        elif not _adds(dtype) and not torch.equal(_bits(tensor), _bits(first).to(tensor.device)):
            found.append(f"{name!r} has other {_form(dtype, first.shape)} values")
    if found:
        more = f" and {len(found) - LISTED} more" * (len(found) > LISTED)
        told = f"tree {number} differs from the first: {', '.join(found[:LISTED])}{more}"
        raise CheckpointError(f"averaged: {told}, must be alike; average only trees of one model")


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
