"""Twenty losses of two tiny recipes, kept: a change of the numbers has to be meant, and gets a line under "Bits".

To write them anew: `python -m tests.golden.test_golden`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.step import batch_of
from lib.config import Batch, Model, Optim, Recipe, Schedule
from lib.state import init_state
from lib.step import train_step

KEPT = Path(__file__).parent / "losses.json"
RECIPES = {
    "plain": Recipe(
        model=Model(width=32, depth=2, heads=2),
        batch=Batch(rows=4, length=16),
        schedule=Schedule(shape="cosine", warmup=4, length=20),
    ),
    "grouped, tied, dropout, average": Recipe(
        model=Model(width=32, depth=2, heads=4, kv_heads=2, tied=True, dropout=0.1),
        batch=Batch(rows=4, length=16),
        optim=Optim(average=0.9, clip=0.5),
        schedule=Schedule(shape="linear", warmup=2, length=15),
    ),
}


def losses(recipe: Recipe) -> list[float]:
    state, found = init_state(recipe, seed=1), []
    for n in range(20):
        state, metrics = train_step(state, batch_of(recipe, n % 4))
        found.append(metrics["loss_nats"].item())
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_the_losses_are_those_that_were_kept(name: str) -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))[name]
    assert len(kept) == 20
    # matrix products round differently on other processors; twenty updates let that grow to some 1e-6
    assert losses(RECIPES[name]) == pytest.approx(kept, rel=2e-5)


if __name__ == "__main__":
    KEPT.write_text(
        json.dumps({name: losses(recipe) for name, recipe in RECIPES.items()}, indent=1) + "\n", encoding="utf-8"
    )
