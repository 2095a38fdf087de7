"""Your own model and loss, here an `nn.Module` that is no language model: the same step, guards, schedule and state."""

import torch
from tensordict import TensorDict
from torch import nn

from lib.config import Optim, Recipe, Schedule
from lib.state import init_state
from lib.step import make_eval_step, make_train_step

net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def loss(model, batch, key):
    """Sum of squared errors and how many there are; the step divides once, over all micro-batches."""
    wrong = model(batch["x"])[:, 0] - batch["y"]
    return wrong.square().sum(), torch.tensor(wrong.numel())


recipe = Recipe(optim=Optim(lr=1e-2, decay=0.0, average=0.9), schedule=Schedule(shape="cosine", warmup=20, length=200))
train_step, eval_step = make_train_step(loss, net), make_eval_step(loss, net)
state = init_state(recipe, seed=0, params=net)
before = net[0].weight.detach().clone()


def batch(n: int) -> TensorDict:
    """Four micro-batches of 64 points of a wave; batch n is a function of n."""
    x = torch.rand(4, 64, 2, generator=torch.Generator().manual_seed(n)) * 2 - 1
    return TensorDict({"x": x, "y": torch.sin(3 * x[..., 0]) * torch.cos(2 * x[..., 1])})


for n in range(200):
    state, metrics = train_step(state, batch(int(state["cursor", "batch"])))
    if n % 50 == 49:
        print(f"step {n + 1}: squared error {metrics['loss_nats']:.5f}, gradient norm {metrics['grad_norm']:.4f}")

held_out = eval_step(state, batch(10_000))
averaged = eval_step(state.copy().set("params", state["average", "params"]), batch(10_000))
print(f"held-out: {held_out['loss_nats']:.5f}; with the averaged weights: {averaged['loss_nats']:.5f}")
print("the module itself was never touched:", torch.equal(net[0].weight, before))
