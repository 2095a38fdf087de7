"""The plain loop that people write: an `nn.Module`, autocast, `backward`, `clip_grad_norm_`, fused AdamW.

The model is the recipe's, layer for layer: document masks, rotary positions, SwiGLU, tied head or not. Written as one would for
speed: tables made once, one mask for all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from lib.config import Recipe
from lib.model.lm import inner_width

__all__ = ["Transformer", "plain_loop"]


class Block(nn.Module):
    """Attention and SwiGLU, pre-norm."""

    def __init__(self, width: int, heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        b, s, d = x.shape
        h = self.norm1(x)
        q, k, v = (w(h).view(b, s, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.wo(mixed.transpose(1, 2).reshape(b, s, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Logits of a batch's inputs."""

    cos: Tensor
    sin: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        model = recipe.model
        assert model is not None
        self.embed = nn.Embedding(model.vocab, model.width)
        inner = inner_width(model)
        self.blocks = nn.ModuleList(Block(model.width, model.heads, inner, model.eps) for _ in range(model.depth))
        self.norm = nn.RMSNorm(model.width, model.eps)
        self.head = nn.Linear(model.width, model.vocab, bias=False)
        if model.tied:
            self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=model.width**-0.5)
        half = torch.arange(0, model.width // model.heads, 2) / (model.width // model.heads)
        angles = torch.arange(recipe.batch.length)[:, None] * model.theta**-half
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        causal = torch.ones(recipe.batch.length, recipe.batch.length, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, inputs: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """[b, s] ids -> [b, s, v]."""
        x = self.embed(inputs)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        mask = ((segments[:, :, None] == segments[:, None, :]) & self.causal)[:, None]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        return self.head(self.norm(x))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class plain_loop:  # noqa: N801 (called like a function)
    """One call is one update; the loss is left on the device, as a loop that logs now and then would."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        compile: bool = False,  # noqa: A002 (the name of the setting)
        wrap: Callable[[Transformer], nn.Module] = lambda module: module,
    ) -> None:
        self.module = Transformer(recipe)
        wrapped = wrap(self.module)
        self.call = torch.compile(wrapped) if compile else wrapped
        optim = recipe.optim
        matrices = [p for p in self.module.parameters() if p.ndim >= 2]
        vectors = [p for p in self.module.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": optim.decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )
        self.bf16 = recipe.precision.compute == "bf16"
        self.limit = optim.clip or float("inf")

    def __call__(self, batch: TensorDict) -> Tensor:
        """Train on the first micro-batch of `batch`."""
        part = {name: batch[name][0] for name in ("inputs", "targets", "positions", "segments", "mask")}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            logits = self.call(part["inputs"], part["positions"], part["segments"])
        wanted = torch.where(part["mask"], part["targets"], -100)
        loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), self.limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
