"""The verb `check`: the laws of a training state, held against a step that a function of the user's gives."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lib.run.launch import Launch
from lib.run.progress import Progress
from lib.run.signals import Signals
from lib.run.usage import VERBS
from lib.testing import LAWS, examine
from lib.tree import leaves

__all__ = ["BROKEN", "check_verb"]

BROKEN = 1  # exit code

_WANTED = f"must be {VERBS['check'].word}"


def check_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Hold the laws against the step of `check.case`, and say what came of each.

    Returns:
        0, or 1 when at least one is broken.

    Raises:
        ValueError: there is no such function, or it gives no step, state and batches.
    """
    name, laws = told.config.check.case, tuple[str, ...](told.config.check.laws or LAWS)
    with signals.at_once():
        step, state, batches = _parts(name, _function(name)())
        broken = []
        for verdict in examine(step, state, batches, laws=laws):
            voice.say(str(verdict))
            broken += [verdict.law] if verdict.kind == "broken" else []
    if broken:
        print(f"error: {name}: breaks {', '.join(broken)}", file=sys.stderr)
    return BROKEN if broken else 0


def _function(name: str) -> Callable[[], Any]:
    """Import what a name stands for.

    Raises:
        ValueError: there is no such thing.
    """
    where, _, called = name.rpartition(":")
    if not where or not called:
        raise ValueError(f"check.case={name!r} {_WANTED}; write it like: check my_steps:case")
    module = _file(name, Path(where)) if where.endswith(".py") else _module(name, where)
    found = getattr(module, called, None)
    if found is None:
        near = get_close_matches(called, [other for other in vars(module) if not other.startswith("_")], n=1)
        fix = f"did you mean {near[0]}?" if near else "define it there"
        raise ValueError(f"check.case={name}: {called} is not in {where}, must be a function of no arguments; {fix}")
    if not callable(found):
        raise ValueError(
            f"check.case={name}: is {type(found).__name__}, must be a function of no arguments; put it in one"
        )
    return found  # type: ignore[no-any-return]


def _file(name: str, path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"check.case={name}: there is no file {path}, {_WANTED}; correct the path")
    sys.path.insert(0, str(path.parent))  # what lies beside it is found, as when it is run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and the tracer look their module up
    spec.loader.exec_module(module)
    return module


def _module(name: str, where: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # it is there, and what it imports is not
        raise ValueError(
            f"check.case={name}: there is no module {error.name} here, {_WANTED}; run it where it can be imported"
        ) from None


def _parts(name: str, given: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Look whether a function gave what it should, before anything is run.

    Raises:
        ValueError: it did not.
    """
    if not isinstance(given, tuple) or len(given) != 3:
        what = f"{len(given)} values" if isinstance(given, tuple) else type(given).__name__
        raise ValueError(f"check.case={name}: gives {what}, must give (step, state, batches); return these three")
    step, state, batches = given
    if not callable(step):
        raise ValueError(
            f"check.case={name}: its step is {type(step).__name__}, must be a function (state, batch) -> (state, metrics)"
        )
    for what, value in (("state", state), *(("batch", each) for each in _each(batches))):
        if not hasattr(value, "items") or not leaves(value):
            raise ValueError(
                f"check.case={name}: its {what} is {type(value).__name__}, must be a TensorDict or nested dict of tensors"
            )
    if not _each(batches):
        raise ValueError(f"check.case={name}: gives no batches, must give at least one; make one")
    return step, state, batches


def _each(batches: Any) -> tuple[Any, ...]:
    return tuple(batches) if isinstance(batches, (list, tuple)) else (batches,)
