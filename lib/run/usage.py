"""`--help`, made from the config's Structs: docstrings, types, defaults and ranges, so it cannot say otherwise."""

from __future__ import annotations

import re
import shutil
import textwrap
import types
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from lib.config import Config
from lib.settings import NAME, type_name

__all__ = ["VERBS", "Verb", "usage"]


class Verb(NamedTuple):
    """One verb: what it does, the keys it reads (patterns), one example of its use, and a word it takes besides."""

    does: str
    keys: tuple[str, ...]
    example: str
    word: str = ""


VERBS: dict[str, Verb] = {
    "train": Verb(
        "Train a language model on text, or go on with the run in run.dir. Without arguments: a real, small run on the "
        "source text of Python's standard library.",
        ("*",),
        "python -m lib.run run.dir=runs/mine data.path=books/ steps=2000 model.width=256",
    ),
    "eval": Verb(
        "Evaluate the newest checkpoint of run.dir on its held-out text.",
        ("run.dir", "run.threads", "load", "checkpoint.dir", "data.*", "eval.rows", "eval.weights"),
        "python -m lib.run eval run.dir=runs/mine eval.rows=none",
    ),
    "sample": Verb(
        "Write text with the newest checkpoint of run.dir.",
        ("run.dir", "run.threads", "load", "checkpoint.dir", "data.tokenizer", "eval.weights", "sample.*"),
        "python -m lib.run sample run.dir=runs/mine sample.prompt='import ' sample.length=400",
    ),
    "prepare": Verb(
        "Read all text and build its token stores, which `train` would do first; say what was read and what was not.",
        ("run.dir", "run.seed", "steps", "tokens", "data.*", "batch.*"),
        "python -m lib.run prepare data.path=books/ data.tokenizer=tokenizer.json",
    ),
    "inspect": Verb(
        "Show the newest checkpoint of run.dir, or any other (inspect.path=), as a tree with shapes, dtypes and norms, every "
        "byte verified, with its recipe and where its data stands; or show the rows that are trained on next, document by "
        "document (inspect.rows=4), also before there is a run.",
        ("run.dir", "run.seed", "run.threads", "load", "checkpoint.dir", "inspect.*", "data.*", "batch.*"),
        "python -m lib.run inspect run.dir=runs/mine inspect.rows=4",
    ),
    "convert": Verb(
        "Make .safetensors of a checkpoint, or a checkpoint of .safetensors, with other names if need be; or the mean of "
        "several.",
        ("run.dir", "load", "checkpoint.dir", "convert.*"),
        "python -m lib.run convert run.dir=runs/mine convert.target=model.safetensors",
    ),
    "check": Verb(
        "Hold the laws of a training state against a step of your own: a function of yours, module:function or "
        "FILE.py:function, gives (step, state, batches). Each law is said to be held, broken (where, and the smallest input "
        "that breaks it) or not checked; exit 1 when one is broken.",
        ("check.*",),
        "python -m lib.run check my_steps.py:case",
        "module:function or FILE.py:function",
    ),
    "plot": Verb(
        "Draw loss.png of run.dir again, from its metrics.jsonl.",
        ("run.dir",),
        "python -m lib.run plot run.dir=runs/mine",
    ),
    "plot schedule": Verb(
        "Draw schedule.png, the learning rate of every update, in run.dir, and list some rates; a run is not needed.",
        ("run.dir", "steps", "tokens", "batch.*", "optim.lr", "schedule.*"),
        "python -m lib.run plot schedule steps=10000 schedule.shape=wsd schedule.tail=0.2",
    ),
}

_EXITS = (
    (0, "done"),
    (1, "check: a law is broken; else a fault in the program itself, with its traceback"),
    (2, "usage or config"),
    (3, "data"),
    (4, "diverged"),
    (5, "checkpoint or disk"),
    (75, "interrupted, everything saved: run it again to go on"),
)

_LAYERS = (
    "Later files win over earlier ones, key=value over files; ~key goes back to the default. The config.toml of an "
    "existing run folder is the first layer. show=true prints the resolved config and the leaves of the state, and "
    "starts nothing."
)


def usage(verb: str | None) -> str:
    """The help text of one verb, or of the whole program."""
    width = max(72, min(shutil.get_terminal_size((110, 24)).columns, 120))
    about = VERBS["train" if verb is None else verb]
    words = f"[{'|'.join(VERBS)}]" if verb is None else f"{verb} {about.word}".rstrip()
    lines = [f"usage: python -m lib.run {words} [FILE.toml|.yaml|.json ...] [key=value ...] [~key] [--help]", ""]
    if verb is None:
        lines += ["Training of neural networks as a pure function. Verbs (none = train):", ""]
        lines += _columns([(word, known.does) for word, known in VERBS.items()], width)
        lines += ["", *textwrap.wrap(_LAYERS, width), "", "Keys of train (each verb's --help lists its own):"]
    else:
        lines += [*textwrap.wrap(about.does, width), "", "Keys:"]
    shown = [row for row in _rows(Config) if any(fnmatch(row[0].partition("=")[0], keys) for keys in about.keys)]
    lines += ["", *_columns(shown, width), "", f"Example:\n\n  {about.example}"]
    if verb is None:
        lines += ["", "Exit codes:", *_columns([(str(code), text) for code, text in _EXITS], width)]
    return "\n".join(lines)


def _columns(rows: list[tuple[str, str]], width: int) -> list[str]:
    left = min(34, max(len(first) for first, _ in rows) + 4)
    lines: list[str] = []
    for first, second in rows:
        wrapped = textwrap.wrap(second, width - left) or [""]
        if len(first) + 4 > left:
            lines.append(f"  {first}")
            first = ""
        lines.append(f"  {first:<{left - 2}}{wrapped[0]}")
        lines += [" " * left + line for line in wrapped[1:]]
    return lines


def _rows(kind: type, default: Any = None, at: str = "") -> Iterator[tuple[str, str]]:
    """(key=default, what it means and what it takes), in order of declaration."""
    default = kind() if default is None else default
    hints = get_type_hints(kind, include_extras=True)
    for name, text in _attributes(kind).items():
        value, hint = getattr(default, name), hints[name]
        if get_origin(hint) is dict:  # sections under names of the user's own
            yield f"{at}{name}.{NAME}", text
            yield from _rows(get_args(hint)[1], None, f"{at}{name}.{NAME}.")
        elif isinstance(value, msgspec.Struct):
            yield from _rows(type(value), value, f"{at}{name}.")
        else:
            yield f"{at}{name}={_written(value)}", f"{text} [{_takes(hint)}]"


def _attributes(kind: type) -> dict[str, str]:
    """The `Attributes:` section of a docstring: {field: text on one line}."""
    section = (kind.__doc__ or "").partition("Attributes:")[2]
    found: dict[str, str] = {}
    for line in section.splitlines():
        entry = re.match(r" {8}(\w+): (.*)", line)
        if entry:
            found[entry[1]] = entry[2]
        elif found and line.strip():
            last = next(reversed(found))
            found[last] = f"{found[last]} {line.strip()}"
    return found


def _takes(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return f"{type_name(get_args(hint)[0])} {_bounds(hint.__metadata__)}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_takes(part) for part in get_args(hint))
    return type_name(hint)


def _bounds(metadata: tuple[Any, ...]) -> str:
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
    pairs = [(sign, getattr(meta, name)) for meta in metadata for name, sign in signs]
    return " and ".join(f"{sign} {'2**63' if bound == 2**63 else bound}" for sign, bound in pairs if bound is not None)


def _written(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return repr(value) if isinstance(value, str) and (" " in value or not value) else str(value)
