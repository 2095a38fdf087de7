"""Shapes in signatures: `Float[Tensor, "b s d"]`, and `checked`, which holds a function to what its signature says.

A type checker sees `Annotated[Tensor, ...]`, and nothing is checked at run time: it is the tests that import the core
with `checked` around every function whose signature names a shape.

    "b s d"   an axis has one size within a call, arguments and result together
    "3 d"     a number is that size
    "... d"   any number of axes, also none
    " b"      one axis, with a space: linters read a bare word in an annotation as the name of a type
    ""        a scalar
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Shape", "checked"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Shape(NamedTuple):
    """What an annotation wants of a tensor: the kind of its numbers and its axes."""

    kind: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}[{' '.join(self.axes)}]"


if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
else:

    class Float:
        """A tensor of floating-point numbers, of any width."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return Annotated[item[0], _parse("float", item[1])]

    class Int:
        """A tensor of integers, of any width; truth values are none."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return Annotated[item[0], _parse("int", item[1])]

    class Bool:
        """A tensor of truth values."""

        def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
            return Annotated[item[0], _parse("bool", item[1])]


def checked(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hold every call of `fn` to the shapes in its signature; a tensor that does not fit is a `TypeError`.

    Under `torch.compile` both this and the call go straight through: a checked function is traced like a bare one.
    """
    if torch.compiler.is_compiling():
        return fn
    signature = inspect.signature(fn)
    hints = functools.cache(lambda: _hints(fn))

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        sizes: dict[str, int] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            sizes = _bind(value, hints().get(name), f"{fn.__name__}: {name}", sizes)
        result = fn(*args, **kwargs)
        _bind(result, hints().get("return"), f"{fn.__name__}: result", sizes)
        return result

    return call


def _parse(kind: str, text: str) -> Shape:
    axes = tuple(text.split())
    for axis in axes:
        if not (axis.isidentifier() or axis.isdigit() or axis == "..."):
            raise ValueError(f'shape "{text}": axis {axis} must be a name, a number or ...; put spaces between axes')
    if axes.count("...") > 1:
        raise ValueError(f'shape "{text}": ... must stand once at most; name the other axes')
    return Shape(kind, axes)


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    # At the first call, since a signature may name what its module defines further down; and only what names a shape,
    # since the rest may name what exists for type checkers alone.
    named = {
        name: hint
        for name, hint in inspect.get_annotations(fn).items()
        if not isinstance(hint, str) or any(f"{kind}[" in hint for kind in ("Float", "Int", "Bool"))
    }
    hints = typing.get_type_hints(types.SimpleNamespace(__annotations__=named), fn.__globals__, include_extras=True)
    several = {p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.VAR_POSITIONAL}
    return {name: types.GenericAlias(tuple, (hint, ...)) if name in several else hint for name, hint in hints.items()}


def _bind(value: Any, hint: Any, where: str, sizes: dict[str, int]) -> dict[str, int]:
    """Return `sizes` with the axes that `value` adds, or raise where it does not fit `hint`."""
    form, parts = get_origin(hint), get_args(hint)
    if form is Annotated and isinstance(parts[1], Shape):
        fault, after = _fit(value, parts[1], sizes)
        if fault:
            raise TypeError(f"{where} is {fault}; want {parts[1]} with {sizes}")
        return after
    if form in (Union, types.UnionType) and isinstance(value, Tensor):
        shaped = [part for part in parts if get_origin(part) is Annotated]
        fitting = [part for part in shaped if not _fit(value, get_args(part)[1], sizes)[0]]
        return _bind(value, (fitting or shaped)[0], where, sizes) if shaped else sizes
    if form is tuple and isinstance(value, tuple):
        each = parts[:1] * len(value) if parts[-1:] == (...,) else parts
        for index, (one, part) in enumerate(zip(value, each, strict=False)):
            sizes = _bind(one, part, f"{where}[{index}]", sizes)
    return sizes


def _fit(value: Any, shape: Shape, sizes: dict[str, int]) -> tuple[str, dict[str, int]]:
    """Return what is wrong with `value`, in a few words or none, and the sizes known after it."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}", sizes
    if _kind(value.dtype) != shape.kind:
        return str(value.dtype), sizes
    got, axes, after = tuple(value.shape), shape.axes, dict(sizes)
    if "..." in axes:
        start, spare = axes.index("..."), max(0, len(got) - len(axes) + 1)
        got, axes = got[:start] + got[start + spare :], axes[:start] + axes[start + 1 :]
    wrong = f"shape {tuple(value.shape)}"
    if len(got) != len(axes):
        return wrong, sizes
    for axis, size in zip(axes, got, strict=True):
        want = int(axis) if axis.isdigit() else after.setdefault(axis, size)
        if size != want:
            return wrong if axis.isdigit() else f"{wrong}, {axis}={want}", sizes
    return "", after


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "int"
