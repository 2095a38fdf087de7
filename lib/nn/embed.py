"""Looking up vectors by id, with a gradient that is summed in fp32 and in one order."""

from __future__ import annotations

import torch
from torch import Tensor, library

from lib.shapes import Float, Int

__all__ = ["embed"]


def embed(ids: Int[Tensor, "b s"], weight: Float[Tensor, "v d"]) -> Float[Tensor, "b s d"]:
    """Look up the rows of `weight`.

    An id that stands a thousand times in a batch has a thousand gradients. Summed in bf16 most of them would be lost, and
    compiled to atomic additions their order, and so their bits, would differ from run to run.
    """
    vectors: Tensor = _embed(ids, weight)
    return vectors


@library.custom_op("purestep::embed", mutates_args=())
def _embed(ids: Tensor, weight: Tensor) -> Tensor:
    return weight[ids]


@_embed.register_fake
def _(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


@library.custom_op("purestep::embed_backward", mutates_args=())
def _embed_backward(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    wide = grad.to(torch.float32).contiguous()
    summed: Tensor = torch.ops.aten.embedding_dense_backward(wide, ids, rows, -1, False)
    return summed.to(grad.dtype)


@_embed_backward.register_fake
def _(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]))


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ids, weight = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[None, Tensor]:
    (ids,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return None, _embed_backward(grad, ids, ctx.rows)  # type: ignore[attr-defined]


_embed.register_autograd(_backward, setup_context=_keep)
