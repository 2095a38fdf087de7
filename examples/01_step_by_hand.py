"""Training is one value moving through one pure function: no trainer, no driver, no hidden state."""

import torch
from tensordict import TensorDict

from lib.config import Model, Optim, Recipe
from lib.state import init_state
from lib.step import train_step
from lib.tree import leaves

recipe = Recipe(model=Model(width=64, depth=2, heads=4), optim=Optim(lr=3e-3))
state = init_state(recipe, seed=0)

text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog. " * 40)) + 4  # byte + 4, ids 0-3 are special
rows = text[: 8 * 65].view(8, 65)


def batch(n: int) -> TensorDict:
    """Batch n, with a leading axis of one micro-batch; `cursor` is the place after it."""
    inputs = rows[None, :, :-1].contiguous()
    return TensorDict(
        {
            "inputs": inputs,
            "targets": rows[None, :, 1:].contiguous(),
            "mask": torch.ones_like(inputs, dtype=torch.bool),
            "segments": torch.zeros_like(inputs),
            "positions": torch.arange(64).expand(1, 8, 64).contiguous(),
            "bytes": torch.full((1, 8), 64),
            "cursor": {"text": {"epoch": torch.tensor(0), "row": torch.tensor(8 * (n + 1))}},
        }
    )


first = state
for n in range(30):
    state, metrics = train_step(state, batch(n))
    if n % 10 == 9:
        print(f"step {n + 1}: {metrics['loss_nats']:.3f} nats, {metrics['bpb']:.3f} bits per byte")

again, _ = train_step(first, batch(0))
twice, _ = train_step(first, batch(0))
same = all(torch.equal(leaves(again)[path], leaf) for path, leaf in leaves(twice).items())
print("the first state is as it was, and its step gives the same bits again:", same and int(first["step"]) == 0)
