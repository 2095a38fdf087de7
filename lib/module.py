"""An `nn.Module` as a pure function of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from lib.tree import Tree, leaves

__all__ = ["as_function"]


def as_function(
    loss: Callable[[Any, Any, Tensor | None], tuple[Tensor, Tensor]], module: nn.Module | None
) -> Callable[[Tree, Tree, Tensor | None], tuple[Tensor, Tensor]]:
    """Turn `loss(call, batch, key)` over a module into `loss(params, batch, key)` over a tree; none = it is one already.

    Raises:
        ValueError: the module keeps state or draws randomness of its own, so no state of ours could hold its future.
    """
    if module is None:
        return loss
    _refuse_hidden_state(module)

    def with_params(params: Tree, batch: Tree, key: Tensor | None) -> tuple[Tensor, Tensor]:
        named = leaves(params)
        return loss(lambda *args, **kwargs: functional_call(module, named, args, kwargs), batch, key)

    return with_params


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
