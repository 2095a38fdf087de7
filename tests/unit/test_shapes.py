"""Shapes: what fits, what the error says, and that compiled code does not notice."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import lib
from lib.shapes import Bool, Float, Int, checked

if TYPE_CHECKING:
    from nowhere import Ghost  # a name that only a type checker could know


@checked
def attend(
    q: Float[Tensor, "b h s k"], v: Float[Tensor, "b h t k"], *, t: Int[Tensor, " t"]
) -> Float[Tensor, "b h s k"]:
    return q


@checked
def ghost(x: Float[Tensor, "... d"], other: Ghost = None) -> Float[Tensor, "..."]:
    return x.sum(-1)


@checked
def shorten(x: Float[Tensor, "b s"], keep: int) -> tuple[Float[Tensor, "b s"], Int[Tensor, ""]]:
    return x[:, :keep], torch.tensor(keep)


@checked
def masked(x: Float[Tensor, "b 3"], mask: Bool[Tensor, "b 3"] | None = None) -> Float[Tensor, "b 3"]:
    return x if mask is None else torch.where(mask, x, 0.0)


@checked
def stack(*rows: Float[Tensor, " d"]) -> Float[Tensor, "n d"]:
    return torch.stack(rows)


def test_an_axis_has_one_size_within_a_call() -> None:
    q, v = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 6, 8)
    attend(q, v, t=torch.zeros(6, dtype=torch.int64))
    wanted = r"^attend: t is shape \(5,\), t=6; want int\[t\] with \{'b': 2, 'h': 4, 's': 3, 'k': 8, 't': 6\}$"
    with pytest.raises(TypeError, match=wanted):
        attend(q, v, t=torch.zeros(5, dtype=torch.int64))


def test_an_axis_is_bound_anew_in_the_next_call() -> None:
    assert stack(torch.zeros(2)).shape == (1, 2)
    assert stack(torch.zeros(3), torch.ones(3)).shape == (2, 3)


@pytest.mark.parametrize(
    ("x", "fault"),
    [
        (torch.zeros(2), r"shape \(2,\); want float\[b 3\]"),
        (torch.zeros(2, 3, 3), r"shape \(2, 3, 3\); want float\[b 3\]"),
        (torch.zeros(2, 4), r"shape \(2, 4\); want float\[b 3\]"),
        (torch.zeros(2, 3, dtype=torch.int64), r"torch\.int64; want float\[b 3\]"),
        (torch.zeros(2, 3, dtype=torch.complex64), r"torch\.complex64; want float\[b 3\]"),
        ([[1.0, 2.0, 3.0]], r"a list; want float\[b 3\]"),
    ],
    ids=["too few axes", "too many axes", "another literal size", "integers", "complex", "no tensor"],
)
def test_what_does_not_fit_is_named(x: Tensor, fault: str) -> None:
    with pytest.raises(TypeError, match=rf"^masked: x is {fault} with \{{\}}$"):
        masked(x)


def test_floating_point_is_of_any_width_and_truth_is_no_integer() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert masked(x).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"^masked: mask is torch\.int64; want bool\[b 3\] with \{'b': 2\}$"):
        masked(x, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^attend: t is torch\.bool; want int\[t\] with "):
        attend(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), t=torch.zeros(1, dtype=torch.bool))


def test_none_passes_where_it_may() -> None:
    assert masked(torch.ones(2, 3), None).sum() == 6
    assert masked(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)).sum() == 0


def test_the_result_is_held_to_the_arguments() -> None:
    shorten(torch.zeros(2, 5), 5)
    with pytest.raises(TypeError, match=r"^shorten: result\[0\] is shape \(2, 4\), s=5; want float\[b s\] with "):
        shorten(torch.zeros(2, 5), 4)


def test_each_of_several_arguments_is_held() -> None:
    with pytest.raises(TypeError, match=r"^stack: rows\[1\] is shape \(3,\), d=2; want float\[d\] with \{'d': 2\}$"):
        stack(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)], ids=["none", "one", "two"])
def test_leading_axes_are_free(leading: tuple[int, ...]) -> None:
    assert ghost(torch.zeros(*leading, 4)).shape == leading


def test_leading_axes_leave_room_for_the_named_ones() -> None:
    with pytest.raises(TypeError, match=r"^ghost: x is shape \(\); want float\[\.\.\. d\] with \{\}$"):
        ghost(torch.zeros(()))


def test_a_shape_that_says_nothing_is_refused() -> None:
    message = r'^shape "b h\*k": axis h\*k must be a name, a number or \.\.\.; put spaces between axes$'
    with pytest.raises(ValueError, match=message):
        Float[Tensor, "b h*k"]
    message = r'^shape "\.\.\. d \.\.\.": \.\.\. must stand once at most; name the other axes$'
    with pytest.raises(ValueError, match=message):
        Float[Tensor, "... d ..."]


def test_compiled_code_does_not_notice() -> None:
    def outer(x: Tensor) -> Tensor:
        @checked
        def inner(y: Float[Tensor, "b 3"]) -> Float[Tensor, "b 3"]:
            return y * 2

        return inner(masked(x)) + 1

    x = torch.arange(6.0).view(2, 3)
    compiled = torch.compile(outer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), outer(x))


def test_a_checked_function_keeps_its_name_and_signature() -> None:
    assert attend.__name__ == "attend"
    assert list(inspect.signature(attend).parameters) == ["q", "v", "t"]


def test_the_tests_import_the_core_checked() -> None:
    """The import hook of conftest.py reached every module: no function of the core that names a shape is bare."""
    bare, wrapped = [], []
    for info in pkgutil.walk_packages(lib.__path__, "lib."):
        if info.name.split(".")[1] in {"config", "run", "shapes", "store"}:
            continue
        module = importlib.import_module(info.name)
        for name, fn in inspect.getmembers(module, inspect.isfunction):
            hints = " ".join(str(hint) for hint in fn.__annotations__.values())
            if fn.__module__ == info.name and any(f"{kind}[" in hints for kind in ("Float", "Int", "Bool")):
                (wrapped if hasattr(fn, "__wrapped__") else bare).append(f"{info.name}.{name}")
    assert bare == []
    assert wrapped
