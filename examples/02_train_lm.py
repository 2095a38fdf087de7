"""Train on real text in a loop of your own, save half-way, go on from the file: the same bits as never stopping."""

import sys
import tempfile
from pathlib import Path

import torch

from lib.config import Batch, Model, Optim, Recipe, Schedule
from lib.data.batch import batch_at, cursor_of
from lib.data.plan import Plan
from lib.data.source import Source
from lib.state import init_state
from lib.step import train_step
from lib.store import load, save
from lib.store.corpus import scan
from lib.store.making import Making
from lib.store.tokens import Split, prepare
from lib.tree import leaves

STEPS, SEED = 24, 0
recipe = Recipe(
    model=Model(width=64, depth=2, heads=4),
    batch=Batch(rows=16, length=64, micro=2),
    optim=Optim(lr=3e-3),
    schedule=Schedule(shape="cosine", warmup=4, length=STEPS),
)
plan = Plan(rows=recipe.batch.rows, length=recipe.batch.length, micro=recipe.batch.micro)

with tempfile.TemporaryDirectory() as folder:
    text = Path(__file__).parent / "data" / "tinyshakespeare.txt"
    store = prepare(scan(text), Making(), Split(holdout=0.1, how="tail"), cache=Path(folder) / "cache")
    sources = [Source("text", store.train)]

    def run(state, until):
        """Batch n is a function of (text, recipe, seed, cursor), and the cursor is in the state."""
        while (step := int(state["step"])) < until:
            state, metrics = train_step(state, batch_at(sources, plan, SEED, cursor_of(state["cursor"]), step))
            if (step + 1) % 8 == 0:
                print(f"step {step + 1}: {metrics['bpb']:.3f} bits per byte, lr {metrics['lr']:.2e}")
        return state

    straight = run(init_state(recipe, seed=SEED), STEPS)
    save(Path(folder) / "half", run(init_state(recipe, seed=SEED), STEPS // 2))
    resumed = run(load(Path(folder) / "half"), STEPS)

same = all(torch.equal(leaf, leaves(resumed)[path]) for path, leaf in leaves(straight).items())
print("stopped, saved, loaded and gone on equals never stopped, bit for bit:", same)
sys.exit(not same)
