"""Text for a launch: found, held against what the run was trained on, and opened as two streams of ids."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lib.config import Config, DataIdentity, Recipe
from lib.data.rows import require
from lib.errors import DataError
from lib.run.progress import Progress
from lib.store.corpus import Corpus, Entry, differences, scan
from lib.store.tokens import Stream, prepare, summary

__all__ = ["Text", "check_same", "corpus_text", "find_text", "open_text"]

_NAMED = 8  # files in one error line
_PACE_S = 5.0


class Text(NamedTuple):
    """What a run reads.

    Attributes:
        train: ids to train on.
        heldout: ids to evaluate on; none = nothing is held out.
        identity: which ids these are, for the recipe.
    """

    train: Stream
    heldout: Stream | None
    identity: DataIdentity


def find_text(config: Config, voice: Progress) -> Corpus:
    """Find and digest the files of `data.path`.

    Raises:
        DataError: there is no text, or something cannot be read.
    """
    paths = [config.data.path] if isinstance(config.data.path, str) else list(config.data.path)
    voice.say(f"reading text: {', '.join(paths)}")
    corpus = scan(config.data.path, _paced(voice, "reading text"))
    voice.say(f"reading text: {len(corpus.entries)} files, {_size(corpus.text_bytes)}")
    return corpus


def check_same(corpus: Corpus, recorded: str, names: Path, config: Config) -> None:
    """Hold the files found against those the run was trained on; moved folders and new times are no difference.

    Args:
        corpus: the files found.
        recorded: digest of the run's corpus.
        names: the run's data.json, to name the files that differ.
        config: for the message.

    Raises:
        DataError: names each file that differs.
    """
    if not recorded or corpus.identity == recorded:
        return
    lines = _differing(names, corpus)
    more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    raise DataError(
        f"run.dir={config.run.dir}: data.path holds other text than this run was trained on; "
        f"{', '.join(lines[:_NAMED])}{more}; restore the files, or set another run.dir for a new run"
    )


def open_text(corpus: Corpus, recipe: Recipe, cache: str | None, voice: Progress, *, how: str | None = None) -> Text:
    """Open the corpus as ids, building its token store the first time.

    Args:
        corpus: the files found.
        recipe: for the share held out and the length of a row.
        cache: folder of the token stores; none = the user's.
        voice: told what is built.
        how: how to hold out, when the recipe is not to say: in a new run.

    Raises:
        DataError: the text is shorter than one row, or the store cannot be written.
    """
    data = recipe.data
    where = Path(cache).expanduser() if cache else _user_cache()
    told = _paced(voice, "preparing text")
    store = prepare(corpus, holdout=data.holdout, how=how or data.holdout_by, cache=where, progress=told)
    for note in store.notes:
        voice.say(note)
    voice.say(f"text: {summary(store)}")
    require(store.train.size, recipe.batch.length)
    identity = DataIdentity(
        digest=store.identity,
        tokenizer=store.tokenizer.name,
        holdout=data.holdout,
        holdout_by="tail" if store.how == "tail" else "document",
        tokens=store.train.size,
    )
    return Text(store.train, store.heldout if store.heldout.size > 1 else None, identity)


def corpus_text(corpus: Corpus, paths: Any) -> str:
    """data.json: what the run was trained on, file by file."""
    entries = ",\n".join(f"  {json.dumps(list(entry))}" for entry in corpus.entries)
    head = json.dumps({"format": 1, "path": paths, "digest": corpus.identity})[:-1]
    return f'{head}, "entries": [\n{entries}\n]}}\n'


def _differing(names: Path, corpus: Corpus) -> list[str]:
    try:
        known = [Entry(*entry) for entry in json.loads(names.read_text(encoding="utf-8"))["entries"]]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{names} cannot be read, so the files that differ cannot be named"]
    return differences(known, corpus.entries) or ["the same files in another form"]


def _user_cache() -> Path:
    """Where a user's caches lie; a relative XDG_CACHE_HOME is to be ignored, by its specification."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "purestep"


def _paced(voice: Progress, what: str) -> Callable[[int, int], None]:
    """Say how far it is, but seldom: most corpora are read before the first time."""
    last = [time.monotonic()]

    def tick(done: int, total: int) -> None:
        if time.monotonic() - last[0] >= _PACE_S:
            last[0] = time.monotonic()
            voice.say(f"{what}: {_size(done)} of {_size(total)}")

    return tick


def _size(size: int) -> str:
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
