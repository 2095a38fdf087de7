"""AdamW's update as the compiled step makes it, against torch's fused and foreach ones and a pass over the same bytes.

    python -m bench optimizer [turns=20] [cases=matrices,model]

An update reads parameters, gradients and two moments and writes all but the gradients: 28 bytes a parameter. The pass does
that too, and adds where AdamW divides and takes roots: what memory allows. All work in place, and none measures the norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import Ratio, interleave, record
from lib.config import Model, Optim, Recipe
from lib.optim import Now, rule_of
from lib.scalars import together
from lib.state import abstract_state
from lib.tree import Tree, from_leaves, leaves, select, tree_map

BYTES = 28
CASES: dict[str, Callable[[], dict[str, tuple[int, ...]]]] = {
    "matrices": lambda: {f"w{n}": (2048, 2048) for n in range(8)},
    "model": lambda: _shapes(Model(width=512, depth=8, heads=8, vocab=8192)),
}
RECIPE = Recipe(model=None, optim=Optim(lr=1e-3))


def run(turns: str = "20", cases: str = "matrices,model") -> None:
    """Time all cases and record one line each."""
    for case in cases.split(","):
        torch._dynamo.reset()
        shapes = CASES[case]()
        count = sum(torch.Size(shape).numel() for shape in shapes.values())
        update = ours(shapes)[1]
        against = {"ratio": fused(shapes)[1], "pass_ratio": passed(shapes), "foreach_ratio": foreach(shapes)[1]}
        ratios = {name: interleave(update, other, turns=int(turns)) for name, other in against.items()}
        record(
            "optimizer",
            f"{case}, {count / 1e6:.0f}M",
            **{name: ratio.median for name, ratio in ratios.items()},
            **_spread(ratios["ratio"]),
            ours_ns_each=ratios["ratio"].ours_s / count * 1e9,
            ours_gb_s=count * BYTES / ratios["ratio"].ours_s / 1e9,
            pass_gb_s=count * BYTES / ratios["pass_ratio"].baseline_s / 1e9,
        )


def ours(shapes: dict[str, tuple[int, ...]], backend: str = "inductor") -> tuple[Tree, Callable[[], Any]]:
    """Parameters, and steps 4 to 6 of `lib.step` on them with donation, as `lib.run.compile` compiles them."""
    params, grads, rule = _drawn(shapes, 0), _drawn(shapes, 1), rule_of(RECIPE)
    slot = rule.init(params)
    scalars = (torch.tensor(1e-3, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64), torch.tensor(7))

    def update(params: Tree, grads: Tree, slot: Tree, factor: Tensor, accept: Tensor) -> None:
        clip, accepted = together([factor, accept])
        _, new, after = rule.update(tree_map(lambda g: g * clip, grads), params, slot, Now(*scalars))
        before = {"params": params, "optimizer": slot}
        kept = select(accepted > 0, {"params": new, "optimizer": after}, before)
        tree_map(lambda old, value: old.copy_(value), before, kept)

    compiled = torch.compile(update, fullgraph=True, dynamic=False, backend=backend)
    factor, accept = torch.tensor(0.5), torch.tensor(True)
    return params, torch.no_grad()(lambda: compiled(params, grads, slot, factor, accept))


def passed(shapes: dict[str, tuple[int, ...]]) -> Callable[[], Any]:
    """Read four trees and write three of them, with one sum each."""
    trees = [_drawn(shapes, seed) for seed in range(4)]

    def move(first: Tree, second: Tree, third: Tree, grads: Tree) -> None:
        for tree in (first, second, third):
            tree_map(lambda old, g: old.copy_(old + g), tree, grads)

    compiled = torch.compile(move, fullgraph=True, dynamic=False)
    return torch.no_grad()(lambda: compiled(*trees))


def fused(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, nn.Parameter], Callable[[], Any]]:
    """torch.optim.AdamW with fused=True."""
    return _torch(shapes, fused=True)


def foreach(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, nn.Parameter], Callable[[], Any]]:
    """torch.optim.AdamW with foreach=True."""
    return _torch(shapes, foreach=True)


def _torch(shapes: dict[str, tuple[int, ...]], **how: bool) -> tuple[dict[str, nn.Parameter], Callable[[], Any]]:
    optim = RECIPE.optim
    twins = {path: nn.Parameter(leaf) for path, leaf in leaves(_drawn(shapes, 0)).items()}
    for path, grad in leaves(_drawn(shapes, 1)).items():
        twins[path].grad = grad
    made = torch.optim.AdamW(
        twins.values(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.decay, **how
    )
    return twins, made.step


def _drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Tree:
    draw = torch.Generator().manual_seed(seed)
    return from_leaves({path: torch.randn(shape, generator=draw) for path, shape in shapes.items()})


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {path: tuple(leaf.shape) for path, leaf in leaves(abstract_state(Recipe(model=model))["params"]).items()}


def _spread(ratio: Ratio) -> dict[str, float]:
    return {"least": ratio.least, "most": ratio.most, "ours_s": ratio.ours_s, "fused_s": ratio.baseline_s}
