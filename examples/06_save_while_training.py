"""Save in the background while the state changes, load what was saved, and open it with plain Zarr."""

import sys
import tempfile
from pathlib import Path

import torch
import zarr

from lib.config import Batch, Model, Optim, Recipe
from lib.errors import CheckpointError
from lib.run.saver import Saver
from lib.state import abstract_state, init_state
from lib.step import train_step
from lib.store import load
from lib.tree import leaves, tensordict

recipe = Recipe(model=Model(width=32, depth=2, heads=2), batch=Batch(rows=4, length=32), optim=Optim(lr=3e-3))


def batch(number):
    """Random bytes."""
    ids = torch.randint(4, 260, (1, 4, 33), generator=torch.Generator().manual_seed(number))
    places = torch.arange(32).expand(1, 4, 32)
    return tensordict({
        "inputs": ids[..., :-1].contiguous(), "targets": ids[..., 1:].contiguous(),
        "mask": torch.ones(1, 4, 32, dtype=torch.bool), "segments": torch.zeros(1, 4, 32, dtype=torch.int64),
        "positions": places.contiguous(), "bytes": torch.full((1, 4), 32),
        "cursor": {"text": {"epoch": torch.tensor(0), "row": torch.tensor(4 * number)}},
    })  # fmt: skip


state, kept = init_state(recipe), {}
with tempfile.TemporaryDirectory() as folder:
    with Saver(Path(folder)) as saver:  # leaving the block waits for the save at hand
        for step in range(1, 9):
            state, _ = train_step(state, batch(step))
            saver.check()  # raises what a save has failed with
            if step % 4 == 0:
                kept[step] = {path: leaf.clone() for path, leaf in leaves(state).items()}
                saver.save(state, {})  # returns when the state is copied
                leaves(state)["params.embed.weight"].mul_(1)  # the copy is the state as it was, whatever is done now
    back = load(folder, like=abstract_state(recipe))  # the newest; all differences would be listed
    same = all(torch.equal(leaf, kept[8][path]) for path, leaf in leaves(back).items())
    print(f"step {int(back['step'])} came back, {len(leaves(back))} leaves, with the bits it was saved with:", same)
    array = zarr.open_group(saver.newest, mode="r")["params/embed/weight"]
    same = same and torch.equal(torch.from_numpy(array[:]), kept[8]["params.embed.weight"])
    file = next(Path(saver.newest).glob("params/embed/weight/c*"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1  # one bit of rot
    file.write_bytes(data)
    try:
        load(folder)
        same = False
    except CheckpointError as error:
        print("one flipped bit:", str(error).split(folder)[0] + "..." + str(error).rpartition("c.0.0")[2][:75])
print("plain Zarr reads it, and damage is never a value:", same)
sys.exit(not same)
