"""Text from a language model, one id at a time, with the keys and values of earlier positions kept."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lib.model import lm
from lib.nn.attention import attend
from lib.nn.embed import embed
from lib.nn.linear import linear
from lib.nn.mask import causal_bias
from lib.nn.norm import rms_norm
from lib.nn.rope import rotations
from lib.random import fold, mix32, uniform
from lib.recipe import Model
from lib.shapes import Float, Int
from lib.tree import Tree, flatten

__all__ = ["Cache", "choose", "empty_cache", "extend", "sample"]


class Cache(NamedTuple):
    """Keys and values of all positions so far: [l, b, room, g, k], and how many of the room's places are used."""

    keys: Tensor
    values: Tensor
    used: int


def empty_cache(params: Tree, model: Model, rows: int, room: int) -> Cache:
    """Make a cache with room for `room` positions, in the parameters' dtype."""
    width = model.width // model.heads
    weight = params["embed"]["weight"]
    shape = (model.depth, rows, room, model.kv_heads or model.heads, width)
    return Cache(weight.new_zeros(shape), weight.new_zeros(shape), 0)


def extend(params: Tree, model: Model, ids: Int[Tensor, "b s"], cache: Cache) -> tuple[Float[Tensor, "b v"], Cache]:
    """Read more ids of one document.

    Args:
        params: in the compute dtype.
        model: shape.
        ids: the ids that follow those in the cache.
        cache: is left as it is.

    Returns:
        Scores of the id after the last one, and the cache with the ids added.

    Raises:
        ValueError: the cache has no room.
    """
    rows, count = ids.shape
    end, room = cache.used + count, cache.keys.shape[2]
    if end > room:
        raise ValueError(f"cache: {end} positions do not fit, must be at most {room}; make it with more room")
    positions = torch.arange(cache.used, end, device=ids.device).expand(rows, count)
    cos, sin = rotations(positions, model.width // model.heads, model.theta)
    x = embed(ids, params["embed"]["weight"])
    bias = causal_bias(count, end, x.dtype, ids.device).expand(rows, count, end)
    keys, values = cache.keys.clone(), cache.values.clone()
    flat, rebuild = flatten(params["blocks"])

    for layer in range(model.depth):

        def mix(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
            keys[layer, :, cache.used : end] = k
            values[layer, :, cache.used : end] = v
            return attend(q, keys[layer, :, :end], values[layer, :, :end], bias)

        x = lm.block(x, rebuild([leaf[layer] for leaf in flat]), model, lm.Places(cos, sin, None), mix)
    last = rms_norm(x[:, -1:], params["norm"], model.eps)
    scores = linear(last, params["embed" if model.tied else "head"]["weight"])[:, 0]
    return scores, Cache(keys, values, end)


def choose(
    scores: Float[Tensor, "b v"], key: Int[Tensor, ""], *, temperature: float = 1.0, top_k: int | None = None
) -> Int[Tensor, " b"]:
    """Draw an id from the softmax of `scores / temperature`.

    Args:
        scores: unnormalised log-probabilities.
        key: key of this draw.
        temperature: >= 0; 0 takes the highest score.
        top_k: only the k highest scores; none = all.

    Source: the Gumbel-max trick, Gumbel 1954; Fan et al. 2018 for top-k.
    """
    scores = scores.to(torch.float32)
    if temperature == 0:
        return scores.argmax(-1)
    if top_k is not None and top_k < scores.shape[-1]:
        least = scores.topk(top_k).values[:, -1:]
        scores = torch.where(scores >= least, scores, -math.inf)
    places = torch.arange(scores.numel(), device=scores.device).view(scores.shape)
    u = uniform(mix32(fold(key, places)))
    # u in [0, 1) is moved into (0, 1): the logarithm of 0 would always win or always lose
    noise = -torch.log(-torch.log(u * (1 - 2.0**-23) + 2.0**-25))
    return (scores / temperature + noise).argmax(-1)


def sample(
    params: Tree,
    model: Model,
    prompt: Int[Tensor, " s"],
    *,
    length: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: Tensor,
) -> Int[Tensor, " n"]:
    """Write `length` ids after a prompt.

    Args:
        params: in the compute dtype.
        model: shape.
        prompt: at least one id.
        length: ids to write.
        context: most positions the model looks back over, >= 2: the length it was trained at, since it knows no distances
            beyond. When they are used up it goes on from the newer half.
        temperature: see `choose`.
        top_k: see `choose`.
        key: decides every draw.

    Raises:
        ValueError: the prompt is empty, or the context too short.
    """
    if prompt.numel() == 0:
        raise ValueError("prompt: has 0 ids, must have at least one; begin with the end mark")
    if context < 2:
        raise ValueError(f"context={context} must be >= 2 positions; give the length the model was trained at")
    with torch.no_grad():
        text = prompt
        cache = empty_cache(params, model, 1, context)
        unread = prompt[-context:]
        for n in range(length):
            if cache.used + unread.numel() > context:
                cache, unread = cache._replace(used=0), text[-(context // 2) :]
            scores, cache = extend(params, model, unread[None], cache)
            unread = choose(scores, fold(key, n), temperature=temperature, top_k=top_k)
            text = torch.cat((text, unread))
        return text[prompt.numel() :]
