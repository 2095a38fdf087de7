"""What a run reads: found, held against what the run was trained on, and opened as streams of ids."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from lib.config import Config, recipe_of
from lib.config import Source as Described
from lib.data.plan import Plan, plan_of
from lib.data.source import Source, Stream, check_sources
from lib.errors import DataError
from lib.recipe import DataIdentity, Recipe, SourceIdentity
from lib.run.making import check_effect, coder_of, making_of, reading_words
from lib.run.pool import spread
from lib.run.progress import Progress, size_text
from lib.sources import HELDOUT, Data, holdout_of, sources_of
from lib.store.coders import Coder
from lib.store.corpus import Corpus, Entry, differences, scan
from lib.store.plans import row_table
from lib.store.tokens import Split, TokenStore, prepare, summary

__all__ = ["Found", "Text", "check_same", "check_tokenizer", "data_text", "find_text", "open_text"]

_NAMED = 8  # files in one error line
_PACE_S = 5.0

Found = Mapping[str, Corpus]  # by source; the files of `data.heldout` under HELDOUT


class Text(NamedTuple):
    """What a run reads.

    Attributes:
        sources: what is trained on.
        heldout: ids to evaluate on, by source; none where nothing is held out.
        identity: which ids these are, for the recipe.
        coder: text to ids and back.
        stores: the token stores.
    """

    sources: tuple[Source, ...]
    heldout: Mapping[str, Stream]
    identity: DataIdentity
    coder: Coder
    stores: Mapping[str, TokenStore]


def find_text(config: Config, voice: Progress) -> Found:
    """Find and digest the files of all sources.

    Raises:
        ValueError: a setting of how text is read has no effect on it.
        DataError: there is no text, something cannot be read, or a file is both trained and evaluated on.
    """
    sources = sources_of(config.data)
    found = {name: _found(source.path, source.format or "auto", voice) for name, source in sources.items()}
    if config.data.heldout is not None:
        found[HELDOUT] = _found(config.data.heldout, config.data.format, voice)
        _check_apart(found)
    check_effect(config.data, {name: corpus.entries for name, corpus in found.items()})
    return found


def check_same(found: Found, recorded: DataIdentity, names: Path, config: Config) -> None:
    """Hold the files found against those the run was trained on; moved folders and new times are no difference.

    Args:
        found: the files found.
        recorded: what the run was trained on.
        names: the run's data.json, to name the files that differ.
        config: for the message.

    Raises:
        DataError: names each file that differs.
    """
    lines = []
    wanted = {source.name: source.digest for source in recorded.sources} | {HELDOUT: recorded.heldout}
    for name, corpus in found.items():
        if corpus.identity != wanted.get(name, corpus.identity):
            lines += _differing(names, name, corpus)
    if lines:
        more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        raise DataError(
            f"run.dir={config.run.dir}: data.path holds other text than this run was trained on; "
            f"{', '.join(lines[:_NAMED])}{more}; restore the files, or set another run.dir for a new run"
        )


def open_text(found: Found, config: Config, recipe: Recipe | None, voice: Progress) -> Text:
    """Open all sources as ids, building their token stores the first time.

    Args:
        found: the files found.
        config: how they are read.
        recipe: of the run that goes on, whose rows and held-out text stay as they are; none = a run begins.
        voice: told what is built.

    Raises:
        ValueError: the tokenizer, a template or a weight is none.
        DataError: the run was trained with another tokenizer, a record is bad, a source is shorter than one row, or a
            store cannot be written.
    """
    data, stores, coder = config.data, dict[str, TokenStore](), coder_of(config.data)
    if recipe is not None:
        check_tokenizer(coder, recipe.data, config)
    recipe = recipe or recipe_of(config, DataIdentity(holdout=holdout_of(data)))
    words, known = reading_words(config), {source.name: source.holdout_by for source in recipe.data.sources}
    for name, corpus in found.items():
        making = making_of(data, sources_of(data)[name] if name != HELDOUT else _shared(data))
        split = Split(0.0 if name == HELDOUT else recipe.data.holdout, known.get(name) or data.holdout_by)
        stores[name] = prepare(
            corpus,
            making,
            split,
            cache=Path(data.cache).expanduser() if data.cache else _user_cache(),
            doing=spread(data.processes),
            progress=_paced(voice, "preparing text"),
        )
        for note in stores[name].notes:
            voice.say(note)
        voice.say(f"{_titled(name, config.data)}: {summary(stores[name])}")
    trained = {name: store for name, store in stores.items() if name != HELDOUT}
    if HELDOUT in stores:
        for name, store in trained.items():
            if both := stores[HELDOUT].train.among(store.train):
                voice.say(f"data.heldout: {both} of its documents are also trained on, in {_titled(name, data)}")
    shape = plan_of(recipe.batch)
    sources = tuple(_source(name, store, config, shape) for name, store in trained.items())
    check_sources(sources, shape)
    identity = DataIdentity(
        tokenizer=coder.identity,
        holdout=recipe.data.holdout,
        heldout=found[HELDOUT].identity if HELDOUT in found else "",
        sources=tuple(
            SourceIdentity(
                name,
                store.identity,
                weight=_weight(config, name),
                reading=words[name],
                holdout_by="tail" if store.how == "tail" else "document",
                tokens=store.train.size,
            )
            for name, store in trained.items()
        ),
    )
    return Text(sources, _heldout(stores), identity, coder, stores)


def data_text(found: Found, config: Config, text: Text) -> str:
    """data.json: what the run is trained on, file by file, and what was read of it."""
    paths = {name: source.path for name, source in sources_of(config.data).items()}
    parts = []
    for name, corpus in found.items():
        entries = ",\n".join(f"    {json.dumps(list(entry))}" for entry in corpus.entries)
        about = {
            "path": paths.get(name, config.data.heldout),
            "digest": corpus.identity,
            "summary": summary(text.stores[name]),
            "counts": text.stores[name].counts,
        }
        head = json.dumps(about)[:-1]
        parts.append(f'  {json.dumps(name)}: {head}, "entries": [\n{entries}\n  ]}}')
    return '{"format": 2, "sources": {\n' + ",\n".join(parts) + "\n}}\n"


def _found(paths: str | tuple[str, ...], form: str, voice: Progress) -> Corpus:
    named = [paths] if isinstance(paths, str) else list(paths)
    voice.say(f"reading text: {', '.join(named)}")
    corpus = scan(paths, _paced(voice, "reading text"), format=form)
    voice.say(f"reading text: {len(corpus.entries)} file{'s' * (len(corpus.entries) != 1)}, {size_text(corpus.size)}")
    return corpus


def _check_apart(found: Found) -> None:
    """A file that is trained on may not be evaluated on, whatever it is called there."""
    evaluated = {entry.digest: entry.name for entry in found[HELDOUT].entries if entry.size}
    for name, corpus in found.items():
        both = [entry for entry in corpus.entries if name != HELDOUT and entry.digest in evaluated]
        if both:
            raise DataError(
                f"data.heldout: {evaluated[both[0].digest]} is also trained on, as {both[0].name} of source {name}, "
                f"must be on one side only; take it out of one"
            )


def check_tokenizer(coder: Coder, recorded: DataIdentity, config: Config) -> None:
    """Hold a tokenizer and its marks against the run's.

    Raises:
        DataError: it is another.
    """
    if coder.identity != recorded.tokenizer:
        raise DataError(
            f"run.dir={config.run.dir}: data.tokenizer is {coder.identity}, must be {recorded.tokenizer}, "
            f"which this run was trained with; restore its file and marks, or set another run.dir for a new run"
        )


def _titled(name: str, data: Data) -> str:
    return "held-out text" if name == HELDOUT else f"text {name}" if data.sources else "text"


def _source(name: str, store: TokenStore, config: Config, shape: Plan) -> Source:
    table = None if shape.mode == "concat" else row_table(store.train, shape.mode, shape.length)
    return Source(name, store.train, _weight(config, name), table)


def _weight(config: Config, name: str) -> float:
    return sources_of(config.data)[name].weight


def _shared(data: Data) -> Described:
    """The reading that `data` itself describes."""
    return sources_of(msgspec.structs.replace(data, sources={}))["text"]


def _heldout(stores: Mapping[str, TokenStore]) -> dict[str, Stream]:
    if HELDOUT in stores:
        return {HELDOUT: stores[HELDOUT].train}
    return {name: store.heldout for name, store in stores.items() if store.heldout.size > 1}


def _differing(names: Path, source: str, corpus: Corpus) -> list[str]:
    try:
        known = [Entry(*entry) for entry in json.loads(names.read_text(encoding="utf-8"))["sources"][source]["entries"]]
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
            voice.say(f"{what}: {size_text(done)} of {size_text(total)}")

    return tick
