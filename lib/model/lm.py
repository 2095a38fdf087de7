"""A decoder-only transformer language model: pre-norm RMSNorm, rotary positions, SwiGLU, grouped-query attention.

The parameters of all blocks are stacked on axis 0, so a block is one slice of each, and the model runs either unrolled (one
piece of compiled code a layer) or by scan (one for all).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

from lib.nn.attention import attend
from lib.nn.dropout import dropout
from lib.nn.embed import embed
from lib.nn.ffn import swiglu
from lib.nn.linear import linear
from lib.nn.mask import document_bias
from lib.nn.norm import rms_norm
from lib.nn.rope import rotate, rotations
from lib.recipe import Model
from lib.shapes import Float
from lib.tree import Tree, flatten

__all__ = ["Places", "Spec", "block", "hidden", "inner_width", "logits", "parameters", "places"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Spec(NamedTuple):
    """How a parameter starts: its shape, and normal with `std`, or `constant` where std is 0."""

    shape: tuple[int, ...]
    std: float
    constant: float = 0.0


class Places(NamedTuple):
    """What a block has to know about where its rows stand: rotations, who sees whom, and the keys of their dropout."""

    cos: Tensor
    sin: Tensor
    bias: Tensor | None
    keys: Tensor | None = None


def inner_width(model: Model) -> int:
    """Inner width f of the SwiGLU: as set, or 8/3 of the width rounded up to a multiple of 32."""
    return model.inner or -(-8 * model.width // (3 * 32)) * 32


def parameters(model: Model) -> dict[str, Spec]:
    """Table of all parameters by path.

    Weights start normal with variance 1 / fan-in, those that write to the residual stream with 1 / (2 l) of that, so the
    stream's variance does not grow with depth (Radford et al. 2019, section 2.3). The loss of a new model is about
    ln(v) + 1/2 nats, since its logits have variance 1.
    """
    n, d, f = model.depth, model.width, inner_width(model)
    q, kv = d, d // model.heads * (model.kv_heads or model.heads)
    residual = (2 * n) ** -0.5
    table = {
        "embed.weight": Spec((model.vocab, d), d**-0.5),
        "blocks.attention.norm": Spec((n, d), 0.0, 1.0),
        "blocks.attention.wq": Spec((n, q, d), d**-0.5),
        "blocks.attention.wk": Spec((n, kv, d), d**-0.5),
        "blocks.attention.wv": Spec((n, kv, d), d**-0.5),
        "blocks.attention.wo": Spec((n, d, q), q**-0.5 * residual),
        "blocks.ffn.norm": Spec((n, d), 0.0, 1.0),
        "blocks.ffn.gate": Spec((n, f, d), d**-0.5),
        "blocks.ffn.up": Spec((n, f, d), d**-0.5),
        "blocks.ffn.down": Spec((n, d, f), f**-0.5 * residual),
        "norm": Spec((d,), 0.0, 1.0),
    }
    return table if model.tied else {**table, "head.weight": Spec((model.vocab, d), d**-0.5)}


def logits(params: Tree, batch: Tree, model: Model, keys: Tensor | None = None) -> Float[Tensor, "b s v"]:
    """Scores of the next id at each position.

    Args:
        params: by path as in `parameters`, in the compute dtype.
        batch: `inputs`, `segments`, `positions` [b, s].
        model: shape.
        keys: dropout keys of the positions; none = evaluation.
    """
    return linear(hidden(params, batch, model, keys), params["embed" if model.tied else "head"]["weight"])


def hidden(params: Tree, batch: Tree, model: Model, keys: Tensor | None = None) -> Float[Tensor, "b s d"]:
    """Last activations, normalised: what the output head reads."""
    x = embed(batch["inputs"], params["embed"]["weight"])
    where = places(batch, model, x.dtype, keys)
    x = dropout(x, model.dropout, keys, 0)
    run = _by_scan if model.layers == "scan" else _unrolled
    x = run(x, params["blocks"], model, where)
    return rms_norm(x, params["norm"], model.eps)


def places(batch: Tree, model: Model, dtype: torch.dtype, keys: Tensor | None = None) -> Places:
    """Work out once what all blocks share."""
    cos, sin = rotations(batch["positions"], model.width // model.heads, model.theta)
    bias = document_bias(batch["segments"], dtype) if model.documents else None
    return Places(cos, sin, bias, keys)


def block(
    x: Float[Tensor, "b s d"], p: Tree, model: Model, where: Places, mix: Attend, layer: Tensor | int = 0
) -> Float[Tensor, "b s d"]:
    """One layer: x + attention(norm x), then x + ffn(norm x).

    Args:
        x: residual stream.
        p: this layer's slice of `blocks`.
        model: shape.
        where: rotations and dropout keys of `x`.
        mix: (queries, keys, values) -> mixed values; the place where a cache comes in.
        layer: number of the layer, from 0, which numbers its two places of dropout.
    """
    a, f = p["attention"], p["ffn"]
    width = model.width // model.heads
    h = rms_norm(x, a["norm"], model.eps)
    # No -1 in any shape: a rank may have no rows.
    q, k, v = (linear(h, w).view(*x.shape[:2], w.shape[0] // width, width) for w in (a["wq"], a["wk"], a["wv"]))
    mixed = mix(rotate(q, where.cos, where.sin), rotate(k, where.cos, where.sin), v)
    x = x + dropout(linear(mixed.flatten(2), a["wo"]), model.dropout, where.keys, 2 * layer + 1)
    h = rms_norm(x, f["norm"], model.eps)
    return x + dropout(swiglu(h, f["gate"], f["up"], f["down"]), model.dropout, where.keys, 2 * layer + 2)


def _unrolled(x: Tensor, blocks: Tree, model: Model, where: Places) -> Tensor:
    flat, rebuild = flatten(blocks)
    mix = functools.partial(attend, bias=where.bias)
    for layer, parts in enumerate(zip(*[leaf.unbind(0) for leaf in flat], strict=True)):
        x = block(x, rebuild(parts), model, where, mix, layer)
    return x


def _by_scan(x: Tensor, blocks: Tree, model: Model, where: Places) -> Tensor:
    flat, rebuild = flatten(blocks)
    mix = functools.partial(attend, bias=where.bias)

    def one(carry: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        layer, *leaves = parts
        return block(carry, rebuild(leaves), model, where, mix, layer), carry.new_zeros(())

    layers = torch.arange(model.depth, device=x.device)
    out, _ = scan(one, x, (layers, *flat))
    result: Tensor = out
    return result
