"""Your own training rule, of small pure parts and one new one: it shards, resumes, is saved and holds the laws as any other."""

from tempfile import mkdtemp

import torch
from tensordict import TensorDict

from lib.config import Optim, Recipe
from lib.optim import Rule, chain, decay, descend, partition, scaled, sgd
from lib.state import init_state
from lib.step import make_train_step
from lib.store import load, save
from lib.testing import check_step
from lib.tree import tree_map


def scale_by_belief(beta=0.9, eps=1e-8):
    """The new part: divide by how far gradients are from what was expected of them."""

    def init(params):
        return {name: tree_map(torch.zeros_like, params) for name in ("mean", "far")}

    def update(grads, params, slot, now):
        mean = tree_map(lambda m, g: beta * m + (1 - beta) * g, slot["mean"], grads)
        far = tree_map(lambda f, m, g: beta * f + (1 - beta) * (g - m).square(), slot["far"], mean, grads)
        return tree_map(lambda m, f: m / (f.sqrt() + eps), mean, far), params, {"mean": mean, "far": far}

    return Rule(init, update, "belief")


def loss(params, batch, key):
    """Sum of squared errors, and how many there are."""
    wrong = (torch.tanh(batch["x"] @ params["w"] + params["bias"]) @ params["out"])[:, 0] - batch["y"]
    return wrong.square().sum(), wrong.numel()


def batch(n):
    """Two micro-batches of 64 points of a wave; batch n is a function of n."""
    x = torch.rand(2, 64, 2, generator=torch.Generator().manual_seed(n)) * 2 - 1
    return TensorDict({"x": x, "y": torch.sin(3 * x[..., 0])})


def case():
    """What `python -m lib.run check examples/05_your_own_optimizer.py:case` holds the laws against."""
    rule = partition({"slow": ("bias", scaled(sgd(), lr=0.1))}, rest=chain(decay("w"), scale_by_belief(), descend()))
    params = {"w": torch.randn(2, 64), "bias": torch.zeros(64), "out": torch.randn(64, 1) / 8}
    state = init_state(Recipe(optim=Optim(lr=3e-3)), params=params, rule=rule)
    return make_train_step(loss, rule=rule), state, batch(0)


if __name__ == "__main__":
    print("held:", ", ".join(verdict.law for verdict in check_step(*case()) if verdict.kind == "held"))
    step, state, _ = case()
    for n in range(100):
        state, _ = step(state, batch(n))
    again = load(save(mkdtemp() + "/half", state))
    for n in range(100, 200):
        (state, metrics), (again, _) = step(state, batch(n)), step(again, batch(n))
    same = all(torch.equal(again["params"][name], leaf) for name, leaf in state["params"].items())
    print(f"error {metrics['loss_nats']:.5f}; loaded halfway and gone on equals never stopped, bit for bit: {same}")
