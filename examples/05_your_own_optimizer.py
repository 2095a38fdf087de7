"""Your own training rule, of small pure parts and one new one; it compiles, resumes and is saved like any other."""

import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict

from lib.config import Optim, Recipe
from lib.optim import Rule, chain, clip_value, decay, descend, partition, scaled, sgd
from lib.state import init_state
from lib.step import make_train_step
from lib.store import load, save
from lib.tree import tree_map


def scale_by_belief(beta=0.9, eps=1e-8):
    """The new part: divide by how far gradients are from what was expected of them."""

    def init(params):
        return {"mean": tree_map(torch.zeros_like, params), "far": tree_map(torch.zeros_like, params)}

    def update(grads, params, slot, now):
        mean = tree_map(lambda m, g: beta * m + (1 - beta) * g, slot["mean"], grads)
        far = tree_map(lambda f, m, g: beta * f + (1 - beta) * (g - m).square(), slot["far"], mean, grads)
        return tree_map(lambda m, f: m / (f.sqrt() + eps), mean, far), params, {"mean": mean, "far": far}

    return Rule(init, update, "belief")


def loss(params, batch, key):
    """Sum of squared errors, and how many there are."""
    wrong = (torch.tanh(batch["x"] @ params["w"] + params["bias"]) @ params["out"])[:, 0] - batch["y"]
    return wrong.square().sum(), torch.tensor(wrong.numel())


def batch(n):
    """One micro-batch of 128 points of a wave; batch n is a function of n."""
    x = torch.rand(1, 128, 2, generator=torch.Generator().manual_seed(n)) * 2 - 1
    return TensorDict({"x": x, "y": torch.sin(3 * x[..., 0])})


rule = chain(clip_value(1.0), decay("w"), scale_by_belief(), descend())
rule = partition({"slow": ("bias", scaled(sgd(0.9), lr=0.1))}, rest=rule)
params = {"w": torch.randn(2, 64), "bias": torch.zeros(64), "out": torch.randn(64, 1) / 8}
state = init_state(Recipe(optim=Optim(lr=3e-3)), params=params, rule=rule)
step = torch.compile(make_train_step(loss, rule=rule), fullgraph=True, backend="aot_eager")

for n in range(200):
    if n == 100:
        save(path := Path(tempfile.mkdtemp()) / "half", state)
    state, metrics = step(state, batch(n))
    if n % 50 == 49:
        print(f"step {n + 1}: squared error {metrics['loss_nats']:.5f}")
again = load(path)
for n in range(100, 200):
    again, _ = step(again, batch(n))
same = all(torch.equal(again["params"][name], state["params"][name]) for name in params)
print("loaded halfway and gone on equals never stopped, bit for bit:", same)
