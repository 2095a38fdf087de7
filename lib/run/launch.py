"""From the words of a command line to one valid launch. Reads config files, imports no torch, writes nothing.

Layers, later ones on top: defaults, the config.toml of an existing run folder, the files given, the overrides given.
So a command that names only `run.dir` goes on with that run as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from lib.config import Config, load_config
from lib.errors import CheckpointError
from lib.run.usage import VERBS
from lib.settings import layered

__all__ = ["Launch", "Words", "launch", "read_words"]

_OVERRIDE = re.compile(r"~?[A-Za-z0-9_.\-]+(=|\Z)")
_CASE = re.compile(r"[^=]+:\w+\Z")  # module:function
_PLACES = (  # keys of paths
    "run.dir", "checkpoint.dir", "data.path", "data.sources.*.path", "data.heldout", "data.tokenizer", "data.template",
    "data.sources.*.template", "data.cache", "init.path", "inspect.path", "convert.source", "convert.target",
    "check.case",
)  # fmt: skip
_SUFFIXES = (".toml", ".yaml", ".yml", ".json")


class Words(NamedTuple):
    """A command line, sorted but not yet understood."""

    verb: str
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    show: bool
    help: bool
    verb_given: bool


class Launch(NamedTuple):
    """What one launch was told: the whole config, and the keys that this launch itself names."""

    verb: str
    config: Config
    named: frozenset[str]
    show: bool = False


def read_words(argv: list[str]) -> Words:
    """Sort the words of a command line; the order of files counts, that between files and overrides does not.

    Raises:
        ValueError: a word is no verb, file, override or `--help`.

    >>> read_words(["eval", "run.dir=runs/a"]).verb
    'eval'
    """
    # A verb is one word, or two.
    given = 2 if " ".join(argv[:2]) in VERBS and len(argv) > 1 else int(bool(argv) and argv[0] in VERBS)
    files: list[Path] = []
    overrides: list[str] = []
    show = wants_help = False
    for word in argv[given:]:
        if word in ("-h", "--help"):
            wants_help = True
        elif word.startswith("-"):
            raise ValueError(_no_option(word))
        elif word.startswith("show="):
            show = _truth(word)
        elif argv[0] == "check" and _CASE.match(word):
            overrides.append(f"check.case={word}")  # the word that this verb takes
        elif _OVERRIDE.match(word) and (word.startswith("~") or "=" in word):
            overrides.append(word)
        elif word.endswith(_SUFFIXES):
            files.append(Path(word))
        else:
            raise ValueError(_no_word(word, VERBS[argv[0]].word if given else ""))
    verb = " ".join(argv[:given]) or "train"
    return Words(verb, tuple(files), tuple(overrides), show, wants_help, given > 0)


def launch(words: Words) -> Launch:
    """Lay all layers over each other and check the result.

    Raises:
        ValueError: a file, key, type, range or combination is wrong.
        CheckpointError: the run folder may not be looked into.
    """
    given = _at_home(layered(Config, [*words.files, *words.overrides]))
    _check_keys(words)
    named = frozenset(_leaf_paths(given))
    folder = given.get("run", {}).get("dir", "") if isinstance(given.get("run"), Mapping) else ""
    saved = Path(folder if folder and isinstance(folder, str) else Config().run.dir) / "config.toml"
    base: dict[str, Any] = {}
    if _is_file(saved):
        base = layered(Config, [saved])
        try:
            load_config(base)
        except ValueError as error:
            raise ValueError(f"{saved}: {error}") from None
        if "tokens" in named:  # the two say the same, and the later layer wins
            base.pop("steps", None)
    config = load_config(base, given)
    if not config.run.dir.strip():
        raise ValueError("run.dir='' must name a folder; give one, such as run.dir=runs/first")
    return Launch(words.verb, config, named, words.show)


def _at_home(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Read `~/` in a path as the home folder; a shell does so at the start of a word only, and a file never."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{at}{key}"
        if isinstance(value, Mapping):
            found[key] = _at_home(value, f"{path}.")
        elif any(fnmatch(path, place) for place in _PLACES):
            found[key] = [_home(part) for part in value] if isinstance(value, list) else _home(value)
        else:
            found[key] = value
    return found


def _home(value: Any) -> Any:
    return f"{Path.home()}{value[1:]}" if isinstance(value, str) and value.startswith("~/") else value


def _check_keys(words: Words) -> None:
    """A key given for this verb must be one that it reads; files may hold the whole run's."""
    known = VERBS[words.verb].keys
    for key in _leaf_paths(layered(Config, words.overrides)):
        if not any(fnmatch(key, pattern) for pattern in known):
            raise ValueError(
                f"{key}: has no effect in {words.verb}, must be one of its keys; "
                f"see python -m lib.run {words.verb} --help"
            )


def _is_file(path: Path) -> bool:
    """Like `Path.is_file`, which raises where a folder may not be looked into."""
    try:
        return path.is_file()
    except OSError as error:
        raise CheckpointError(
            f"run.dir={path.parent}: {error.strerror}, must be readable; set another run.dir"
        ) from None


def _leaf_paths(values: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaf_paths(value, f"{at}{key}.")
        else:
            yield f"{at}{key}"


def _truth(word: str) -> bool:
    value = word.partition("=")[2]
    if value not in ("true", "false"):
        raise ValueError(f"show={value} must be true or false; change the value")
    return value == "true"


def _no_option(word: str) -> str:
    key, equals, value = word.lstrip("-").partition("=")
    fix = f"write {key}={value}" if key and equals else f"write {key.replace('-', '_')}=VALUE" if key else "see --help"
    return f"{word}: unknown option, must be a verb, a config file, key=value or ~key; {fix}"


def _no_word(word: str, wanted: str) -> str:
    if wanted:
        return f"{word!r} must be {wanted}, a config file, key=value or ~key; see --help"
    near = get_close_matches(word, list(VERBS), n=1, cutoff=0.6)
    fix = f"did you mean `{near[0]}`?" if near else "see --help"
    if Path(word).suffix:
        fix = f"a config file ends in {', '.join(_SUFFIXES)}"
    return f"{word!r} must be a verb ({', '.join(VERBS)}) first, a config file, key=value or ~key; {fix}"
