"""Every rule against torch's own over 50 updates, or against its paper's equations in float64 where torch has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lib.optim import Rule, adafactor, adam, adamw, averaged, chain, l2, lion, muon, schedule_free, sgd
from lib.optim.muon import orthogonal
from lib.tree import Tree, from_leaves, leaves
from tests.strategies import FEW, now

pytestmark = pytest.mark.parity

UPDATES = 50
SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1
)
MATRICES = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1)
PEAK = st.floats(1e-4, 1e-1)


def drawn(shapes: dict[str, tuple[int, ...]], draw: torch.Generator) -> Tree:
    return from_leaves({path: torch.randn(shape, generator=draw) for path, shape in sorted(shapes.items())})


def against(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rule: Rule,
    shapes: dict[str, tuple[int, ...]],
    peak: float,
    weight: float = 0.0,
) -> tuple[Tree, Tree, dict[str, Tensor], dict[str, Any]]:
    """Both over 50 updates of a falling rate: our parameters and slot, torch's parameters and state by path."""
    draw = torch.Generator().manual_seed(0)
    params = drawn(shapes, draw)
    twins = {path: nn.Parameter(leaf.clone()) for path, leaf in leaves(params).items()}
    optimizer, slot = make(list(twins.values())), rule.init(params)
    for n in range(1, UPDATES + 1):
        grads, lr = drawn(shapes, draw), peak * (1 - n / (UPDATES + 1))
        optimizer.param_groups[0]["lr"] = lr
        for path, twin in twins.items():
            twin.grad = leaves(grads)[path].clone()
        optimizer.step()
        _, params, slot = rule.update(grads, params, slot, now(lr, weight))
    return params, slot, dict(twins), {path: optimizer.state[twin] for path, twin in twins.items()}


def same(ours: Tree, theirs: dict[str, Any], ulps: float) -> None:
    """Within so many units in the last place of the largest value of a leaf: sums of 50 updates cancel."""
    for path, leaf in leaves(ours).items():
        other = theirs[path].detach()
        unit = torch.finfo(torch.float32).eps * max(1.0, other.abs().max().item())
        assert (leaf - other).abs().max().item() <= ulps * unit, path


@FEW
@given(
    shapes=SHAPES,
    peak=PEAK,
    weight=st.floats(0, 0.5),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.999)),
    eps=st.sampled_from([1e-8, 1e-3]),
)
def test_adamw(shapes: Any, peak: float, weight: float, betas: tuple[float, float], eps: float) -> None:
    ours, slot, theirs, state = against(
        lambda twins: torch.optim.AdamW(twins, betas=betas, eps=eps, weight_decay=weight, foreach=False),
        adamw(beta1=betas[0], beta2=betas[1], eps=eps),
        shapes,
        peak,
        weight,
    )
    # Torch multiplies by lr before it divides by the root, we after: a unit in the last place each update.
    same(ours, theirs, UPDATES)
    for name, there in (("first", "exp_avg"), ("second", "exp_avg_sq")):
        same(slot["adam"][name], {path: held[there] for path, held in state.items()}, 8)


@FEW
@given(shapes=SHAPES, peak=PEAK)
def test_adam(shapes: Any, peak: float) -> None:
    ours, _, theirs, _ = against(lambda twins: torch.optim.Adam(twins, foreach=False), adam(), shapes, peak)
    same(ours, theirs, UPDATES)


@FEW
@given(
    shapes=SHAPES, peak=PEAK, beta=st.sampled_from([0.0, 0.5, 0.9]), nesterov=st.booleans(), weight=st.floats(0, 0.5)
)
def test_sgd(shapes: Any, peak: float, beta: float, nesterov: bool, weight: float) -> None:
    nesterov = nesterov and beta > 0
    ours, _, theirs, _ = against(
        lambda twins: torch.optim.SGD(twins, momentum=beta, nesterov=nesterov, weight_decay=weight, foreach=False),
        chain(l2(weight), sgd(beta, nesterov=nesterov)),
        shapes,
        peak,
    )
    same(ours, theirs, UPDATES)


@FEW
@given(
    shapes=SHAPES,
    peak=PEAK,
    weight=st.floats(0, 0.5),
    least=st.sampled_from([1e-3, 0.5]),
    clip=st.sampled_from([1.0, 2.0]),
)
def test_adafactor(shapes: Any, peak: float, weight: float, least: float, clip: float) -> None:
    ours, _, theirs, _ = against(
        lambda twins: torch.optim.Adafactor(twins, eps=(None, least), d=clip, weight_decay=weight, foreach=False),
        adafactor(least=least, clip=clip),
        shapes,
        peak,
        weight,
    )
    same(ours, theirs, 4 * UPDATES)  # a root, a quotient and two means each update


@FEW
@given(shapes=MATRICES, peak=PEAK, weight=st.floats(0, 0.5), nesterov=st.booleans(), rms=st.booleans())
def test_muon(shapes: Any, peak: float, weight: float, nesterov: bool, rms: bool) -> None:
    ours, _, theirs, _ = against(
        lambda twins: torch.optim.Muon(
            twins, weight_decay=weight, nesterov=nesterov, adjust_lr_fn="match_rms_adamw" if rms else "original"
        ),
        muon(matrices="*", nesterov=nesterov, adjust="rms" if rms else "shape"),
        shapes,
        peak,
        weight,
    )
    # Both iterate in bf16 (8 bits), and their sums of products are in other orders: each update may differ by a unit or two
    # of bf16 (0.0075 of the path at most was seen; the other kind of momentum moves it by 0.03, the other factor by 0.19).
    for path, leaf in leaves(ours).items():
        factor = 0.2 * max(leaf.shape) ** 0.5 if rms else max(1.0, leaf.shape[0] / leaf.shape[1]) ** 0.5
        assert (leaf - theirs[path].detach()).abs().max() <= UPDATES * peak * factor * 3 * 2**-8, path


@FEW
@given(shapes=SHAPES, peak=PEAK, weight=st.floats(0, 0.5), betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)))
def test_lion_follows_its_paper(shapes: Any, peak: float, weight: float, betas: tuple[float, float]) -> None:
    rule, draw = lion(beta1=betas[0], beta2=betas[1]), torch.Generator().manual_seed(0)
    params = drawn(shapes, draw)
    slot = rule.init(params)
    exact = {path: leaf.double().numpy().copy() for path, leaf in leaves(params).items()}
    m = {path: np.zeros_like(value) for path, value in exact.items()}
    for n in range(1, UPDATES + 1):
        grads, lr = drawn(shapes, draw), peak * (1 - n / (UPDATES + 1))
        _, params, slot = rule.update(grads, params, slot, now(lr, weight))
        for path, leaf in leaves(grads).items():
            g = leaf.double().numpy()
            c = betas[0] * m[path] + (1 - betas[0]) * g
            # Where the sum all but cancels, fp32 may see the other sign.
            sure = np.abs(c) > 1e-5
            exact[path] = exact[path] * (1 - lr * weight) - lr * np.sign(c)
            exact[path] = np.where(sure, exact[path], leaves(params)[path].double().numpy())
            m[path] = betas[1] * m[path] + (1 - betas[1]) * g
    same(params, {path: torch.from_numpy(value) for path, value in exact.items()}, UPDATES)
    same(slot["lion"]["first"], {path: torch.from_numpy(value) for path, value in m.items()}, UPDATES)


def rate(peak: float, number: int) -> float:
    """Warmed up over ten updates from none at all, then constant."""
    return peak * min(1.0, (number - 1) / 10)


@FEW
@given(shapes=SHAPES, peak=PEAK, weight=st.floats(0, 0.5), beta=st.sampled_from([0.1, 0.9, 0.98]))
def test_schedule_free_follows_its_paper(shapes: Any, peak: float, weight: float, beta: float) -> None:
    rule, draw, keep, eps = schedule_free(beta1=beta), torch.Generator().manual_seed(0), 0.999, 1e-8
    params = drawn(shapes, draw)
    slot = rule.init(params)
    y = {path: leaf.double() for path, leaf in leaves(params).items()}
    z, x, v = dict(y), dict(y), {path: torch.zeros_like(leaf) for path, leaf in y.items()}
    total = 0.0
    for n in range(1, UPDATES + 1):
        grads, lr = drawn(shapes, draw), rate(peak, n)
        _, params, slot = rule.update(grads, params, slot, now(lr, weight))
        total += lr**2
        share = lr**2 / total if total else 0.0
        for path, leaf in leaves(grads).items():
            v[path] = keep * v[path] + (1 - keep) * leaf.double() ** 2
            direction = leaf.double() / ((v[path] / (1 - keep**n)).sqrt() + eps) + weight * y[path]
            z[path] = z[path] - lr * direction
            x[path] = (1 - share) * x[path] + share * z[path]
            y[path] = (1 - beta) * z[path] + beta * x[path]
    same(params, y, UPDATES)
    same(slot["free"]["base"], z, UPDATES)
    # The mean is told by how far y is from z, so what y is off by counts (1 - beta) / beta times.
    same(averaged(params, slot["free"], beta), x, UPDATES / min(beta, 0.5))


@FEW
@given(shapes=SHAPES, peak=PEAK, weight=st.floats(0, 0.5), beta=st.sampled_from([0.5, 0.9]))
def test_schedule_free(shapes: Any, peak: float, weight: float, beta: float) -> None:
    rule, draw = schedule_free(beta1=beta), torch.Generator().manual_seed(0)
    params = drawn(shapes, draw)
    slot, twins = rule.init(params), {path: nn.Parameter(leaf.clone()) for path, leaf in leaves(params).items()}
    theirs = schedulefree.AdamWScheduleFree(
        list(twins.values()), lr=peak, betas=(beta, 0.999), weight_decay=weight, foreach=False
    )
    theirs.train()
    for n in range(1, UPDATES + 1):
        grads, lr = drawn(shapes, draw), rate(peak, n)
        theirs.param_groups[0]["lr"] = lr
        for path, twin in twins.items():
            twin.grad = leaves(grads)[path].clone()
        theirs.step()
        _, params, slot = rule.update(grads, params, slot, now(lr, weight))
    same(params, dict(twins), UPDATES)
    same(slot["free"]["base"], {path: theirs.state[twin]["z"] for path, twin in twins.items()}, UPDATES)
    theirs.eval()
    same(averaged(params, slot["free"], beta), dict(twins), 2 * UPDATES)


@pytest.mark.parametrize("shape", [(4, 4), (3, 17), (17, 3), (2, 3, 8, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrices, dtype=dtype)
    values = torch.linalg.svdvals(found.double())
    # The bounds of the published coefficients after five iterations, for singular values that are not all but zero.
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    between = u.mT @ found.double() @ vh.mT
    off = between - torch.diag_embed(torch.diagonal(between, dim1=-2, dim2=-1))
    assert off.abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-4)
