"""`show=true`: what a launch would do - the resolved config, and the leaves of its state - without doing any of it."""

from __future__ import annotations

import msgspec

from lib.config import Config, recipe_of, run_steps
from lib.run.folder import as_toml
from lib.state import abstract_state
from lib.tree import leaves

__all__ = ["shown"]


def shown(config: Config) -> str:
    """The config as TOML, then a comment line for each leaf of the state: path, shape, dtype."""
    recipe = recipe_of(config)
    config = msgspec.structs.replace(config, steps=run_steps(config), tokens=None, schedule=recipe.schedule)
    named = leaves(abstract_state(recipe))
    width = max(map(len, named))
    lines = [f"#   {path:<{width}}  {tuple(leaf.shape)!s:<18} {_dtype(leaf.dtype)}" for path, leaf in named.items()]
    count = sum(leaf.numel() for path, leaf in named.items() if path.startswith("params."))
    return "\n".join([as_toml(config), f"# state: {count} parameters in {len(named)} leaves", *lines])


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
