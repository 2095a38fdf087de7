"""What may change when a run goes on, and what may not.

May: how long it runs, where its data lies now, everything around the step (log, eval, checkpoint, sample, read-ahead),
the peak learning rate, the weight decay, the patience, the threads, and by name the length of the schedule. May not:
everything else in the recipe, and the seed; each difference is listed, old and new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
import torch
from tensordict import TensorDict

from lib.config import Config, recipe_of
from lib.recipe import Recipe, SourceIdentity
from lib.run.launch import Launch
from lib.run.making import reading_words
from lib.sources import holdout_of, sources_of

__all__ = ["Recorded", "Resumed", "as_info", "compare", "recorded_in", "with_changes"]

_FREE = frozenset({"optim.lr", "optim.decay", "guard.patience"})


class Recorded(NamedTuple):
    """What a checkpoint says of the process that wrote it, as far as bits depend on it; none = it does not say."""

    threads: int | None
    compiled: bool | None
    torch: str | None
    device: str | None


class Resumed(NamedTuple):
    """How a run goes on: its recipe from here, threads and compilation, and a line for each thing that changes."""

    recipe: Recipe
    threads: int | None
    compiled: bool | None
    notes: tuple[str, ...]


def compare(old: Recipe, seed: int, launch: Launch, recorded: Recorded, device: str) -> Resumed:
    """Hold a launch against the run it would go on with.

    Args:
        old: recipe of the checkpoint.
        seed: seed of the checkpoint.
        launch: what this launch was told.
        recorded: what the checkpoint says of its process.
        device: kind of device here.

    Raises:
        ValueError: something differs that may not.
    """
    config = launch.config
    new = _asked(old, launch)
    fixed, notes = [], []
    for key, was, wants in [*_differences(old, new), *_seeds(seed, config.run.seed)]:
        if key in _FREE or key == "schedule.length":
            notes.append(f"{key}: {_shown(was)} -> {_shown(wants)} from here on")
        else:
            fixed.append(f"{key}: run has {_shown(was)}, asked for {_shown(wants)}")
    if fixed:
        raise ValueError(
            f"run.dir={config.run.dir}: this run has another recipe; {'; '.join(fixed)}; "
            f"these must stay as they are, set another run.dir for a new run"
        )
    threads, compiled = recorded.threads, recorded.compiled
    if config.run.threads is not None and config.run.threads != threads and "run.threads" in launch.named:
        notes += [_bits("run.threads", threads, config.run.threads)] if threads is not None else []
        threads = config.run.threads
    if config.compile != "auto" and (config.compile == "on") != compiled and "compile" in launch.named:
        notes += [_bits("compile", "on" if compiled else "off", config.compile)] if compiled is not None else []
        compiled = config.compile == "on"
    return Resumed(new, threads, compiled, (*notes, *_moved(recorded, device)))


def with_changes(state: TensorDict, recipe: Recipe) -> TensorDict:
    """The state as it goes on under `recipe`; rates that change are leaves, so nothing is compiled for them."""
    if state["recipe"] == recipe:
        return state
    changed = state.clone(recurse=False)
    optim, old = recipe.optim, state["recipe"].optim
    rates = state["scheduler"].clone(recurse=False)
    for name in ("lr", "decay"):
        if getattr(optim, name) != getattr(old, name):
            rates[name] = torch.full_like(rates[name], getattr(optim, name))
    changed["scheduler"] = rates
    changed.set_non_tensor("recipe", recipe)
    return changed


def recorded_in(info: Mapping[str, Any]) -> Recorded:
    """Read from a checkpoint's info what `as_info` put there."""
    return Recorded(*(info.get(name) for name in Recorded._fields))


def as_info(threads: int, compiled: bool, device: str) -> dict[str, Any]:
    """What a checkpoint is to say of the process that writes it."""
    return Recorded(threads, compiled, torch.__version__, device)._asdict()


def _asked(old: Recipe, launch: Launch) -> Recipe:
    """The recipe this launch asks for; what it does not name and can only be derived stays as it is."""
    config, replace = launch.config, msgspec.structs.replace
    # Which files are evaluated on is known when they have been read; whether there are any is known now.
    heldout = (old.data.heldout or "other files") if config.data.heldout is not None else ""
    data = replace(
        old.data,
        tokenizer=_asked_tokenizer(old.data.tokenizer, config.data.tokenizer),
        holdout=holdout_of(config.data),
        heldout=heldout,
        sources=_asked_sources(old, config),
    )
    if "schedule.length" not in launch.named:
        config = replace(config, schedule=replace(config.schedule, length=old.schedule.length))
    if config.schedule.warmup is None:
        config = replace(config, schedule=replace(config.schedule, warmup=old.schedule.warmup))
    return recipe_of(config, data)


def _asked_tokenizer(was: str, asked: str) -> str:
    """As far as its name tells; a file's content and its marks are known when it has been read."""
    if asked == "bytes" or asked.startswith("ids:"):
        return was if was.startswith(f"{asked},") else asked
    name = asked if asked.startswith("tiktoken:") else PurePath(asked).name
    return was if was.startswith(f"{name}:") else name


def _asked_sources(old: Recipe, config: Config) -> tuple[SourceIdentity, ...]:
    """The sources this launch names; what they hold is known when they have been read."""
    known = {source.name: source for source in old.data.sources}
    words, how, asked = reading_words(config), config.data.holdout_by, list[SourceIdentity]()
    for name, source in sources_of(config.data).items():
        was = known.get(name, SourceIdentity())
        asked.append(
            msgspec.structs.replace(
                was,
                name=name,
                weight=source.weight,
                reading=words[name],
                holdout_by=was.holdout_by if how == "auto" else how,
            )
        )
    return tuple(asked)


def _differences(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name in old.__struct_fields__:
        was, wants = getattr(old, name), getattr(new, name)
        if isinstance(was, msgspec.Struct) and isinstance(wants, msgspec.Struct):
            yield from _differences(was, wants, f"{at}{name}.")
        elif name == "sources" and was != wants:
            yield from _different_sources(was, wants)
        elif was != wants:
            yield f"{at}{name}", was, wants


def _different_sources(
    old: tuple[SourceIdentity, ...], new: tuple[SourceIdentity, ...]
) -> Iterator[tuple[str, Any, Any]]:
    before, after = {each.name: each for each in old}, {each.name: each for each in new}
    if list(before) != list(after):
        yield "data.sources", ", ".join(before), ", ".join(after)
        return
    for name, was in before.items():
        if was.weight != after[name].weight:
            yield f"data.sources.{name}.weight", was.weight, after[name].weight
        if was.reading != after[name].reading:
            yield f"how data.sources.{name} is read", was.reading or "as usual", after[name].reading or "as usual"
        if was.holdout_by != after[name].holdout_by:
            yield (
                "data.holdout_by" if len(before) == 1 else f"data.holdout_by of {name}",
                was.holdout_by,
                after[name].holdout_by,
            )


def _seeds(was: int, wants: int) -> list[tuple[str, Any, Any]]:
    return [("run.seed", was, wants)] if was != wants else []


def _moved(recorded: Recorded, device: str) -> Iterator[str]:
    for key, was, here in (("torch", recorded.torch, torch.__version__), ("device", recorded.device, device)):
        if was is not None and was != here:
            yield _bits(key, was, here)


def _bits(key: str, was: Any, here: Any) -> str:
    return f"{key}: {_shown(was)} -> {_shown(here)}; from here on the bits may differ from those of an unbroken run"


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
