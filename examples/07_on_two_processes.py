"""Two processes train one model, each with its own part of the state and its own rows; a loss of one's own knows of none."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict

from lib.config import Optim, Recipe
from lib.shard.layout import lay
from lib.shard.words import spread
from lib.state import init_state
from lib.step import make_train_step


def loss(params, batch, key):
    """Sum of the squared errors of the targets there are, and how many those are."""
    wrong = (torch.tanh(batch["x"] @ params["w"] + params["bias"]) @ params["out"])[:, 0] - batch["y"]
    return torch.where(batch["mask"], wrong.square(), 0.0).sum(), batch["mask"].sum()


def batch(n):
    """Batch n is a function of n: 101 points of a wave, of which the first process has fewer targets than the second."""
    draw = torch.Generator().manual_seed(n)
    x = torch.rand(1, 101, 2, generator=draw) * 2 - 1
    mask = torch.rand(1, 101, generator=draw) < torch.linspace(0, 1, 101)
    return TensorDict({"x": x, "y": torch.sin(3 * x[..., 0]), "mask": mask})


def train(rank, ranks, meeting):
    """What each process does; with one process it is the plain loop."""
    draw = torch.Generator().manual_seed(0)
    params = {
        "w": torch.randn(2, 65, generator=draw),
        "bias": torch.zeros(65),
        "out": torch.randn(65, 1, generator=draw) / 8,
    }
    state, step = init_state(Recipe(optim=Optim(lr=3e-3)), params=params), make_train_step(loss)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        state = lay(state, mesh, "fsdp")
    for n in range(100):
        state, metrics = step(state, spread(batch(n), mesh) if ranks > 1 else batch(n))
    held = sum(leaf.to_local().numel() if ranks > 1 else leaf.numel() for leaf in state["params"].values())
    torch.save((metrics["loss_nats"].item(), metrics["tokens"].item(), held), f"{meeting}.{ranks}.{rank}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    meeting = tempfile.mkdtemp() + "/meeting"
    train(0, 1, meeting)
    mp.spawn(train, (2, meeting), nprocs=2)
    alone, *both = (torch.load(f"{meeting}.{name}") for name in ("1.0", "2.0", "2.1"))
    print("parameters held:", alone[2], "by one process,", " and ".join(str(held) for _, _, held in both), "by two")
    print(f"error after 100 updates: {alone[0]:.7f} alone, {both[0][0]:.7f} together, over {both[0][1]} targets")
    same = all(abs(error - alone[0]) < 1e-5 * alone[0] and count == alone[1] for error, count, _ in both)
    print("two processes train what one does:", same)
