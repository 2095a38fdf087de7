"""The core held against torch's own optimizers, layers and losses, and against plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lib.config import Batch, Model, Optim, Recipe
from lib.grad import clip_factor, global_norm
from lib.loss import cross_entropy
from lib.nn.attention import attend
from lib.nn.embed import embed
from lib.nn.ffn import swiglu
from lib.nn.mask import document_bias
from lib.nn.norm import rms_norm
from lib.nn.rope import rotate, rotations
from lib.state import init_state
from lib.step import train_step
from lib.testing.strategies import lm_batch, trees
from lib.tree import Tree, leaves

pytestmark = pytest.mark.parity

SEEDS = st.integers(0, 2**32 - 1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Clipping -------------------------------------------------------------------------------------------------------------


@given(params=trees(), limit=st.floats(1e-2, 1e3))
def test_clipping_is_torchs(params: Tree, limit: float) -> None:
    twins = [nn.Parameter(torch.zeros_like(leaf)) for leaf in leaves(params).values()]
    for twin, grad in zip(twins, leaves(params).values(), strict=True):
        twin.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(twins, limit)
    ours = global_norm(params)
    assert ours.item() == pytest.approx(norm.item(), rel=1e-6, abs=1e-12)
    for leaf, twin in zip(leaves(params).values(), twins, strict=True):
        assert twin.grad is not None
        assert torch.allclose(leaf * clip_factor(ours, limit), twin.grad, rtol=1e-5, atol=1e-12)


# Layers ---------------------------------------------------------------------------------------------------------------


@given(seed=SEEDS, width=st.integers(1, 65), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_rms_norm_is_torchs(seed: int, width: int, dtype: torch.dtype) -> None:
    x, weight = (normal(3, 4, width, seed=seed) * 10).to(dtype), normal(width, seed=seed + 1).to(dtype)
    wanted = F.rms_norm(x.float(), (width,), weight.float(), 1e-5)
    # sums over the width in another order; in bf16 the unit vector is rounded before the weight, as in Llama
    rounding = 1e-5 if dtype == torch.float32 else 1.2e-2
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).float(), wanted, rtol=rounding, atol=rounding)


def test_the_gradient_of_rms_norm_is_torchs() -> None:
    x, weight = normal(4, 16).requires_grad_(), normal(16, seed=1).requires_grad_()
    ours = torch.autograd.grad(rms_norm(x, weight, 1e-5).square().sum(), (x, weight))
    theirs = torch.autograd.grad(F.rms_norm(x, (16,), weight, 1e-5).square().sum(), (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_attention_is_multi_head_attention() -> None:
    module = nn.MultiheadAttention(16, 4, bias=False, batch_first=True)
    module.in_proj_weight.data, module.out_proj.weight.data = normal(48, 16), normal(16, 16, seed=1)
    x = normal(2, 6, 16, seed=2)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wanted, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    q, k, v = (F.linear(x, w).view(2, 6, 4, 4) for w in module.in_proj_weight.chunk(3))
    ours = F.linear(attend(q, k, v, None).reshape(2, 6, 16), module.out_proj.weight)
    assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_attention_is_torchs(groups: int) -> None:
    q, k, v = normal(2, 6, 4, 8), normal(2, 6, groups, 8, seed=1), normal(2, 6, groups, 8, seed=2)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    bias = document_bias(segments, torch.float32)
    wanted = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias[:, None], enable_gqa=True
    ).transpose(1, 2)
    assert torch.allclose(attend(q, k, v, bias), wanted, rtol=1e-5, atol=1e-6)


def test_embedding_and_gate_are_torchs_with_their_gradients() -> None:
    weight = normal(9, 4).requires_grad_()
    ids = torch.tensor([[1, 1, 3], [8, 0, 1]])
    scale = normal(2, 3, 4, seed=1)
    (ours,) = torch.autograd.grad((embed(ids, weight) * scale).sum(), weight)
    (theirs,) = torch.autograd.grad((F.embedding(ids, weight) * scale).sum(), weight)
    assert torch.equal(embed(ids, weight), F.embedding(ids, weight))
    assert torch.allclose(ours, theirs, rtol=1e-6)
    parts = [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(((2, 3, 4), (5, 4), (5, 4), (4, 5)))]
    x, gate, up, down = parts
    wanted = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    mine = swiglu(x, gate, up, down)
    assert torch.allclose(mine, wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        torch.autograd.grad(mine.square().sum(), parts), torch.autograd.grad(wanted.square().sum(), parts), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_rotations_are_those_of_plain_numpy() -> None:
    x, positions = normal(1, 5, 2, 8), np.array([0, 1, 2, 100, 1000])
    cos, sin = rotations(torch.from_numpy(positions)[None], 8, 10_000.0)
    half = x[0].double().numpy()
    z = (half[..., :4] + 1j * half[..., 4:]) * np.exp(1j * positions[:, None] * 10_000.0 ** (-np.arange(4) / 4))[
        :, None
    ]
    wanted = np.concatenate((z.real, z.imag), -1)
    np.testing.assert_allclose(rotate(x, cos, sin)[0].numpy(), wanted, rtol=1e-3, atol=2e-4)


# Loss -----------------------------------------------------------------------------------------------------------------


@given(seed=SEEDS, rows=st.integers(1, 3), length=st.integers(1, 5), vocab=st.integers(2, 40), size=st.floats(0.1, 30))
def test_cross_entropy_is_torchs_and_plain_numpys(seed: int, rows: int, length: int, vocab: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, length, vocab, generator=draw) * size).requires_grad_()
    targets = torch.randint(vocab, (rows, length), generator=draw)
    mask = torch.rand(rows, length, generator=draw) < 0.7
    total, count = cross_entropy(logits, targets, mask)
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(rows, length)
    assert total.item() == pytest.approx(each[mask].sum().item(), rel=1e-5, abs=1e-5)
    wide = logits.detach().double().numpy()
    exact = np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1)) + wide.max(-1)
    exact -= np.take_along_axis(wide, targets.numpy()[..., None], -1)[..., 0]
    assert total.item() == pytest.approx(exact[mask.numpy()].sum(), rel=1e-5, abs=1e-4)
    assert count.item() == int(mask.sum())
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (total, each[mask].sum()))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


# All of it ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        h = self.norm1(x)
        k = d // self.heads
        angles = torch.arange(s)[:, None] * 10_000.0 ** (-torch.arange(0, k, 2) / k)
        turn = torch.polar(torch.ones_like(angles), angles)[None, :, None]

        def turned(y: Tensor) -> Tensor:
            y = y.view(b, s, self.heads, k)
            z = torch.complex(y[..., : k // 2], y[..., k // 2 :]) * turn
            return torch.cat((z.real, z.imag), -1).transpose(1, 2)

        v = self.wv(h).view(b, s, self.heads, k).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(turned(self.wq(h)), turned(self.wk(h)), v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).reshape(b, s, d))
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Twin(nn.Module):
    """The same model as modules, for the usual loop."""

    def __init__(self, model: Model, params: Tree) -> None:
        super().__init__()
        assert model.inner is not None
        self.embed = nn.Embedding(model.vocab, model.width)
        self.blocks = nn.ModuleList([Block(model.width, model.heads, model.inner) for _ in range(model.depth)])
        self.norm = nn.RMSNorm(model.width, eps=1e-5)
        self.head = nn.Linear(model.width, model.vocab, bias=False)
        for path, leaf in leaves(params).items():
            self.of(path, leaf)

    def of(self, path: str, leaf: Tensor) -> None:
        """Put one of our parameters where it belongs; a stacked one into each block."""
        *above, name = path.split(".")
        if above[:1] != ["blocks"]:
            (self.norm if path == "norm" else getattr(self, above[0])).weight.data = leaf.clone()
            return
        for block, part in zip(self.blocks, leaf, strict=True):
            where = {"norm": "norm1" if above[1] == "attention" else "norm2"}.get(name, name)
            getattr(block, where).weight.data = part.clone()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def test_training_is_the_usual_loop_over_modules() -> None:
    model = Model(width=16, depth=2, heads=2, inner=24, vocab=30, tied=False, documents=False)
    recipe = Recipe(model=model, batch=Batch(rows=4, length=12, micro=2), optim=Optim(lr=1e-2, decay=0.1, clip=1.0))
    state = init_state(recipe, seed=4)
    twin = Twin(model, state["params"])
    matrices = [p for p in twin.parameters() if p.ndim > 1]
    vectors = [p for p in twin.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for n in range(20):
        batch = lm_batch(recipe, n)
        batch["positions"] = torch.arange(12).expand(2, 2, 12).contiguous()
        state, metrics = train_step(state, batch)
        logits = twin(batch["inputs"].flatten(0, 1))
        wanted = torch.where(batch["mask"], batch["targets"], -100).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), wanted)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        assert metrics["loss_nats"].item() == pytest.approx(loss.item(), rel=1e-3)
        assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-2)
    assert math.isfinite(metrics["loss_nats"].item())
    # rounding is enlarged by Adam where a second moment is tiny; 20 steps of 1e-2 move a weight by up to 0.2
    assert torch.allclose(state["params", "embed", "weight"], twin.embed.weight, atol=2e-3)
