"""The verb `convert`: checkpoints and .safetensors into each other, with other names, or averaged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from tensordict import TensorDict
from torch import Tensor

from lib.config import Convert
from lib.errors import CheckpointError
from lib.recipe import Recipe
from lib.run.folder import run_folder
from lib.run.init import is_tensors, rules_of
from lib.run.launch import Launch
from lib.run.newest import checkpoint_in, newest_checkpoint
from lib.run.progress import Progress, size_text
from lib.run.signals import Signals
from lib.state.average import mean_of
from lib.store import load, save
from lib.store.checkpoint import has_recipe, read_info
from lib.store.export import write_tensors
from lib.store.folder import STEP
from lib.store.tensors import read_metadata, read_tensors
from lib.store.trees import averaged, renamed
from lib.tree import from_leaves, leaves, plain, tensordict

__all__ = ["convert_verb"]

RECIPE = "purestep.recipe"  # metadata of a .safetensors file: the recipe as JSON
WHAT = "purestep.what"


def convert_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Make one file or folder of another.

    Raises:
        ValueError: source and target do not go together, or a name fits nothing.
        CheckpointError: the source cannot be read, or the target cannot be written.
    """
    with signals.at_once():
        how = told.config.convert
        _check(how)
        if how.source is None:
            run_folder(told.config)
            sources = [str(newest_checkpoint(told.config, voice))]
        else:
            given = [how.source] if isinstance(how.source, str) else list(how.source)
            config = told.config
            sources = [
                each if is_tensors(each) else str(checkpoint_in(config, each, "convert.source")) for each in given
            ]
        named, recipe = _read(sources, how)
        names = renamed(named, rules_of(how.names))
        named = {names[name]: leaf for name, leaf in named.items()}
        if how.target.endswith(".safetensors"):
            said = {WHAT: how.what} | ({} if recipe is None else {RECIPE: msgspec.json.encode(recipe).decode()})
            most = None if how.most_mb is None else how.most_mb * 1_000_000
            files = write_tensors(how.target, named, metadata=said, most_bytes=most)
        else:
            files = [Path(str(save(how.target, _state(named, how.what, recipe), info=_info(sources))))]
        size = sum(leaf.nbytes for leaf in named.values())
        of = f"the mean of {len(sources)} times " if len(sources) > 1 else ""
        voice.say(
            f"{how.target}: {of}{len(named)} leaves, {size_text(size)} in {len(files)} file{'s'[: len(files) > 1]}"
        )
    return 0


def _check(how: Convert) -> None:
    if not how.target:
        raise ValueError("convert.target='' must be given; name a file .safetensors, or a new folder for a checkpoint")
    sources = how.source if isinstance(how.source, tuple) else (how.source,)
    if "" in sources or not sources:
        raise ValueError("convert.source='' must name a checkpoint, a run folder or .safetensors; correct or drop it")
    if len(sources) > 1 and how.what == "all":
        raise ValueError("convert.what=all must be of one source, whole states have no mean; set convert.what=params")
    if not how.target.endswith(".safetensors"):
        if STEP.fullmatch(Path(how.target).name) or Path(how.target).parent.name == "checkpoints":
            raise ValueError(
                f"convert.target={how.target} must not be named, or lie, as the checkpoints of a run do; choose another"
            )
        if how.most_mb is not None:
            raise ValueError("convert.most_mb must go with a target .safetensors; drop it")


def _read(sources: list[str], how: Convert) -> tuple[dict[str, Tensor], Recipe | None]:
    """The leaves by dotted name, and the recipe of the first source."""
    recipe = _recipe_at(sources[0])
    if len(sources) > 1:
        return averaged(partial(_leaves_at, source, how.what) for source in sources), recipe
    return _leaves_at(sources[0], how.what), recipe


def _leaves_at(source: str, what: str) -> dict[str, Tensor]:
    if is_tensors(source):
        if what == "average":
            raise ValueError(f"convert.what=average must be of a checkpoint, {source} is none; set convert.what=params")
        found = read_tensors(source)
        whole = read_metadata(source).get(WHAT) == "all"
        if what == "all" and not whole:
            raise CheckpointError(f"{source}: holds parameters alone, must hold a whole state; set convert.what=params")
        if what == "params" and whole:
            return {name.removeprefix("params."): leaf for name, leaf in found.items() if name.startswith("params.")}
        return found
    if what == "all":
        return leaves(load(source))
    if what == "average":
        return _mean_at(source)
    return leaves(load(source, keys=["params"])["params"])


def _mean_at(source: str) -> dict[str, Tensor]:
    recipe = _recipe_at(source)
    own = recipe is not None and recipe.optim.rule == "schedule_free"
    keys = ["params", "optimizer.free.base"] if own else ["average.params"]
    mean = mean_of(plain(load(source, keys=keys)), recipe or Recipe())
    assert mean is not None  # it was loaded
    return leaves(mean)


def _recipe_at(source: str) -> Recipe | None:
    if not is_tensors(source):
        recipe: Recipe | None = load(source, keys=["recipe"])["recipe"] if has_recipe(source) else None
        return recipe
    text = read_metadata(source).get(RECIPE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Recipe, strict=True)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"{source}: {RECIPE}: {error}; read it with the purestep that wrote it") from None


def _state(named: Mapping[str, Tensor], what: str, recipe: Recipe | None) -> TensorDict:
    tree = tensordict(from_leaves(named))
    state = tree if what == "all" else TensorDict({"params": tree}, [])
    if recipe is not None:
        state.set_non_tensor("recipe", recipe)
    return state


def _info(sources: list[str]) -> dict[str, object]:
    """What the first source says of the process that wrote it, as far as it is a checkpoint."""
    return {} if is_tensors(sources[0]) else read_info(sources[0])
