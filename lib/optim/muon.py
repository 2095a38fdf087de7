"""Muon: momentum whose matrices are made orthogonal; AdamW for what is no matrix."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lib.optim.adam import scale_by_adam
from lib.optim.combine import Where, chain, chosen, mask
from lib.optim.decay import decay
from lib.optim.parts import descend, momentum, stateless
from lib.optim.rule import Now, Rule
from lib.tree import Tree, leaves, tree_map

__all__ = ["muon", "orthogonal", "orthogonalize"]

_A, _B, _C = 3.4445, -4.7750, 2.0315

Adjust = Literal["rms", "shape", "none"]


def orthogonal(matrices: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Bring the singular values of matrices near 1, keeping their singular vectors: five steps give 0.7 to 1.2.

        x <- x / |x|;    then `steps` times    x <- a x + (b A + c A^2) x,   A = x x^T

    Args:
        matrices: [..., rows, columns]; leading axes count matrices.
        steps: iterations.
        eps: least norm that is divided by.
        dtype: of the products.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", the quintic Newton-Schulz iteration
    with coefficients 3.4445, -4.7750, 2.0315.
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    found: Tensor = (x if wide else x.mT).to(matrices.dtype)
    return found


def orthogonalize(*, steps: int = 5, adjust: Adjust = "rms", dtype: torch.dtype = torch.bfloat16) -> Rule:
    """Make the gradients of matrices orthogonal; leading axes beyond two count matrices.

    Args:
        steps: Newton-Schulz iterations.
        adjust: factor on the result: "rms" 0.2 sqrt(max(rows, columns)), whose entries are as large as AdamW's usually are, so
            that one learning rate serves both (Liu et al. 2025, arXiv:2502.16982); "shape" sqrt(max(1, rows / columns));
            "none" 1.
        dtype: of the products.

    Raises:
        ValueError: a parameter is no matrix.
    """

    def change(grads: Tree, params: Tree, now: Now) -> tuple[Tree, Tree]:
        for path, leaf in leaves(grads).items():
            if leaf.ndim < 2:
                raise ValueError(f"orthogonalize: {path} has shape {list(leaf.shape)}, must be matrices; mask it out")
        return tree_map(lambda g: orthogonal(g, steps=steps, dtype=dtype) * _factor(g, adjust), grads), params

    return stateless(change)


def muon(
    beta: float | Tensor = 0.95,
    *,
    matrices: Where,
    nesterov: bool = True,
    adjust: Adjust = "rms",
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    where: Where = "*",
) -> Rule:
    """Make the Muon rule: `decay`; momentum and `orthogonalize` for `matrices`, Adam for the others; `descend`.

    Args:
        beta: of the momentum.
        matrices: the hidden layers' weights; embeddings, heads and vectors are for Adam.
        nesterov: look ahead.
        adjust: see `orthogonalize`.
        beta1: of Adam.
        beta2: of Adam.
        eps: of Adam.
        where: those that decay.

    Slot: `matrices` and `others`, each with that of its rule.
    """
    hidden = chain(momentum(beta, nesterov=nesterov, average=True), orthogonalize(adjust=adjust))

    def others(params: Tree) -> list[str]:
        return sorted(set(leaves(params)) - set(chosen(matrices, params)))

    return chain(
        decay(where),
        mask(matrices, hidden, "matrices"),
        mask(others, scale_by_adam(beta1, beta2, eps), "others"),
        descend(),
    )


def _factor(g: Tensor, adjust: Adjust) -> float:
    rows, columns = g.shape[-2], g.shape[-1]
    if adjust == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if adjust == "shape" else 1.0
