"""A researcher's own loss, over a tree or over an `nn.Module`, as a pure function of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lib.tree import Tree, leaves

__all__ = ["as_function", "trainable"]

_OwnLoss = Callable[[Any, Any, Tensor | None], tuple[Tensor, Tensor | float]]


def as_function(loss: _OwnLoss, module: nn.Module | None) -> _OwnLoss:
    """Turn `loss(call, batch, key)` over a module into `loss(params, batch, key)` over a tree; none = it is one already.

    What the module holds beside its parameters, its buffers, is taken as it is now and stays constant.

    Raises:
        ValueError: the loss is no function or the module no module; the module keeps state or draws randomness of its own,
            so no state of ours could hold its future. When called: the parameters are not the module's, the loss draws from
            torch's global generator, changes a buffer, or does not give a sum and a count.
    """
    if not callable(loss):
        raise ValueError(f"loss={loss!r} must be a function of (model or params, batch, key); pass one")
    if module is None:
        return lambda params, batch, key: _called(loss, params, batch, key)
    if not isinstance(module, nn.Module):
        raise ValueError(f"module={module!r} must be an nn.Module made already; pass an instance")
    _refuse_hidden_state(module)
    wanted = set(trainable(module))
    constants = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def with_params(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        named = leaves(params)
        if set(named) != wanted:
            odd = sorted(wanted - set(named)), sorted(set(named) - wanted)
            raise ValueError(
                f"state.params: missing {odd[0]}, extra {odd[1]}, must be the parameters of the module; "
                f"make the state with init_state(recipe, params=module)"
            )
        buffers = {name: buffer.clone() for name, buffer in constants.items()}
        found = _called(loss, _caller(module, {**named, **buffers}), batch, key)
        if not torch.compiler.is_compiling():
            changed = [name for name, buffer in buffers.items() if buffer._version]
            if changed:
                raise ValueError(
                    f"module.{changed[0]}: the buffer is changed by forward, outside the state; keep what must be "
                    f"remembered in the parameters or leave it out"
                )
        return found

    return with_params


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module by dotted name, a tied one under its first name.

    Raises:
        ValueError: a parameter is frozen or holds no real floating-point numbers.
    """
    named: dict[str, Tensor] = dict(module.named_parameters())
    for name, leaf in named.items():
        if not leaf.requires_grad:
            raise ValueError(
                f"params.{name}: is frozen (requires_grad is false), must be trainable; turn it into a buffer of the module"
            )
        if not leaf.is_floating_point():
            raise ValueError(
                f"params.{name}: is {leaf.dtype}, must be real floating point; turn it into a buffer of the module"
            )
    return named


def _caller(module: nn.Module, named: dict[str, Tensor]) -> Callable[..., Any]:
    return lambda *args, **kwargs: functional_call(module, named, args, kwargs)


def _called(loss: _OwnLoss, model: Any, batch: Any, key: Tensor | None) -> tuple[Tensor, Tensor]:
    watched = not torch.compiler.is_compiling()
    before = torch.get_rng_state() if watched else None
    found: Any = loss(model, batch, key)
    if before is not None and not torch.equal(before, torch.get_rng_state()):
        raise ValueError(
            "loss: drew from torch's global generator, must draw from its key only; use lib.random or lib.nn.dropout"
        )
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor) or found[0].ndim:
        raise ValueError(
            f"loss: gave {_described(found)}, must give (sum of the targets' losses as a 0-d tensor, number of targets); "
            f"return losses.sum(), losses.numel()"
        )
    return found[0], torch.as_tensor(found[1], device=found[0].device)


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_described(part) for part in value) + ")"
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _refuse_hidden_state(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = f"module.{name}" if name else "module"
        kind = type(part).__name__
        if getattr(part, "track_running_stats", False):
            raise ValueError(f"{where}: {kind} keeps running statistics outside the state; use a layer or group norm")
        rate = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
        if part.training and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{where}: {kind} with rate {rate} draws from torch's global generator; set it to 0 and call "
                f"lib.nn.dropout.dropout with the key"
            )
