"""Documents -> the token store, a Zarr group that is built once for a corpus and the options that shape it.

    <cache>/<key>/  train/{ids,offsets,origin,draws}  heldout/{...}  sizes  COMMIT

`ids` is uint16 or uint32, uncompressed, with `mask` beside it where some are not trained on; `offsets` int64, where each
document begins and last the number of ids; a document's marks belong to it. The key is a digest of the files' content in
their order, the tokenizer, the split, how files are read and this layout: edited text, reordered options or another
tokenizer never meet old ids, while moved folders, new names and new time stamps build nothing.

A store is built in parts beside its place, by as many processes as there are; a part that is finished outlives whoever
built it, so a build that was killed goes on where it was. Then it is put together in a temporary folder, synced,
closed with COMMIT and renamed: under its name it is whole or not there. Of two processes that want the same store one
builds and the other waits.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from lib.data.split import resolve
from lib.data.tokenizer import Tokenizer
from lib.errors import DataError
from lib.store.alone import alone, alone_in_new, temporary_in
from lib.store.build import COMMIT, Split, assemble, state_of, whole
from lib.store.corpus import Corpus, Progress
from lib.store.disk import discard, sweep, sync
from lib.store.faults import NOTES
from lib.store.formats import kind_of
from lib.store.making import Making, ids_dtype
from lib.store.parts import Job, Part, parts_of, read_part, write_part
from lib.store.sides import SIDES
from lib.store.stream import Stream, open_stream

__all__ = ["Split", "Stream", "TokenStore", "key_of", "prepare", "summary"]

FORMAT = 3

# Does the jobs, in any order, and gives back what each returns as it is done: the builtin `map`, or a pool's.
Doing = Callable[[Callable[[Job], int], Iterable[Job]], Iterable[int]]


class TokenStore(NamedTuple):
    """A prepared corpus.

    Attributes:
        path: folder of the store.
        train: what is trained on.
        heldout: what is kept from training; no documents when nothing is held out.
        tokenizer: what the ids mean.
        how: `document` or `tail`, as resolved.
        identity: digest of the corpus.
        counts: files, documents, empty, duplicates, text_bytes, counted_bytes (that the ids stand for), tokens of the
            corpus, and skipped by cause.
        notes: lines for the log: what was built anew and why.
    """

    path: Path
    train: Stream
    heldout: Stream
    tokenizer: Tokenizer
    how: str
    identity: str
    counts: Mapping[str, Any]
    notes: tuple[str, ...]


def prepare(
    corpus: Corpus,
    making: Making,
    split: Split,
    *,
    cache: Path,
    doing: Doing = map,
    progress: Progress | None = None,
) -> TokenStore:
    """Open the token store of a corpus, building it first where there is none or where it is damaged.

    Args:
        corpus: the scanned files.
        making: how files become ids.
        split: what is held out.
        cache: folder of all token stores.
        doing: does the jobs, maybe in other processes.
        progress: told how far the building is.

    Returns:
        The store, the same whoever built it.

    Raises:
        ValueError: the split, the tokenizer or its marks are none.
        DataError: a record is bad, a side is left without text, a file changed, or the cache cannot be written.
    """
    tokenizer = making.coder().tokenizer
    if making.add_bos and tokenizer.bos is None:
        raise ValueError(
            f"data.add_bos=true: data.tokenizer={making.tokenizer} has no begin mark; set data.bos_token or drop add_bos"
        )
    resolve(split.how, documents=0, share=split.holdout)  # a word that is none is found before anything is read
    key = key_of(corpus, making, tokenizer)
    final, notes = _known(cache, key, split), list[str]()
    if final is None or (wrong := _damage(final)) is not None:
        if final is not None and os.path.lexists(final):
            notes.append(f"{final}: {wrong}; built anew")
        try:
            final = _build(cache, key, corpus, making, tokenizer, split, doing, progress)
        except OSError as error:
            why = f"cannot be written ({error.strerror or error})"
            raise DataError(f"{cache}: {why}; set data.cache to a folder with room") from None
    names = tuple(entry.name for entry in corpus.entries)
    train, heldout = (replace(open_stream(final / side), files=names) for side in SIDES)
    about = _about(final)
    counts = about["counts"]
    # What was passed over is of this scan, what is in the records of the store.
    skipped = Counter(counts["skipped"]) + Counter(dict(corpus.skipped))
    return TokenStore(
        path=final,
        train=train,
        heldout=heldout,
        tokenizer=tokenizer,
        how=about["holdout_by"],
        identity=corpus.identity,
        counts={**counts, "skipped": dict(sorted(skipped.items()))},
        notes=tuple(notes),
    )


def key_of(corpus: Corpus, making: Making, tokenizer: Tokenizer) -> str:
    """Name a corpus as ids: a digest of everything that shapes them but the split."""
    # Not the names: a file that is renamed and stays in its place gives the same ids.
    content = [(entry.size, entry.digest, kind_of(entry.name, making.reading.format)) for entry in corpus.entries]
    parts = [FORMAT, content, tokenizer, _options(making)]
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def summary(store: TokenStore) -> str:
    """Say in one line what was read."""
    counts = store.counts
    sides = f"{store.train.documents} train, {store.heldout.documents} held out by {store.how}"
    documents, size = (
        f"{counts[key]} {what}{'s' * (counts[key] != 1)}"
        for key, what in (("documents", "document"), ("text_bytes", "byte"))
    )
    line = f"{documents} ({sides}), {size}, {counts['tokens']} ids"
    extra = {name: counts[name] for name in ("empty", "duplicates")}
    # What was mended is there all the same.
    extra |= {cause if cause in NOTES else f"skipped, {cause}": count for cause, count in counts["skipped"].items()}
    return "; ".join([line, *(f"{name}: {count}" for name, count in extra.items() if count)])


def _options(making: Making) -> dict[str, Any]:
    """All choices but the tokenizer's words, of which its identity is kept instead."""
    options = making._asdict() | {"reading": making.reading._asdict()}
    for name in ("tokenizer", "eos_token", "bos_token"):
        del options[name]
    options["template"] = None if making.template is None else making.template._asdict()
    return options


def _final(cache: Path, key: str, split: Split, documents: int | None) -> Path | None:
    """Where the store of a split lies; none = that depends on how many documents there are, which nobody knows yet."""
    if split.how == "auto" and documents is None:
        return None
    how = resolve(split.how, documents=documents or 0, share=split.holdout)
    word = json.dumps([key, float(split.holdout), how]).encode()
    return cache / blake2b(word, digest_size=16).hexdigest()


def _known(cache: Path, key: str, split: Split) -> Path | None:
    """Where the store of a split lies, as far as it was noted how many documents a corpus has; none = it was not.

    The note is no more than a hint: a store that it leads to must be of the split that was asked for.
    """
    try:
        documents = int((cache / f"{key}.documents").read_bytes())
    except (OSError, ValueError):
        documents = None
    final = _final(cache, key, split, documents)
    if split.how == "auto" and final is not None and _damage(final) is None:
        told = _about(final)
        if resolve("auto", documents=told["counts"]["documents"], share=split.holdout) != told["holdout_by"]:
            return None
    return final


def _about(store: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((store / "zarr.json").read_bytes())["attributes"]
    return about


def _build(
    cache: Path,
    key: str,
    corpus: Corpus,
    making: Making,
    tokenizer: Tokenizer,
    split: Split,
    doing: Doing,
    progress: Progress | None,
) -> Path:
    building = cache / f".building-{key}"
    with alone_in_new(building):
        final = _known(cache, key, split)
        if final is None or _damage(final) is not None:  # else who was here before has built it
            _check_room(cache, corpus, tokenizer)
            with alone(cache):
                sweep(cache)
            sweep(building)
            parts = _all_parts(building, corpus, making, doing, progress)
            documents = sum(part.documents for part in whole(building, parts))
            final = _final(cache, key, split, documents)
            assert final is not None
            about = {"format": FORMAT, "tokenizer": tokenizer._asdict()}
            about |= {"holdout": split.holdout, **_options(making)}
            with temporary_in(cache) as fresh:
                (fresh / "documents").write_bytes(b"%d" % documents)
                os.rename(fresh / "documents", cache / f"{key}.documents")
                if _damage(final) is not None:
                    folder = fresh / final.name
                    folder.mkdir()
                    assemble(building, parts, folder, corpus=corpus, making=making, split=split, about=about)
                    _publish(folder, final)
        shutil.rmtree(building, ignore_errors=True)
    return final


def _all_parts(building: Path, corpus: Corpus, making: Making, doing: Doing, progress: Progress | None) -> list[Part]:
    """Have the parts written that are not there yet."""
    parts = parts_of(corpus, making.reading)
    missing = [part for part in parts if read_part(building, part, verify=True) is None]
    done = sum(part.size for part in parts) - sum(part.size for part in missing)
    for size in doing(write_part, [Job(str(building), part, making) for part in missing]):
        done += size
        if progress:
            progress(done, corpus.size)
    return parts


def _check_room(cache: Path, corpus: Corpus, tokenizer: Tokenizer) -> None:
    # In parts and put together; compressed files are larger than they look, which nobody knows before they are read.
    need = 2 * ids_dtype(tokenizer.vocab).itemsize * corpus.size
    if (free := shutil.disk_usage(cache).free) < need:
        have = f"{cache}: {free} bytes are free, the token store needs about {need}"
        raise DataError(f"{have}; set data.cache to a folder with room")


def _publish(folder: Path, final: Path) -> None:
    """Give a finished store its name, unless another process was quicker: what that one built has the same bits."""
    with alone(final.parent):
        if _damage(final) is None:
            return
        if os.path.lexists(final):
            discard(final)
        os.rename(folder, final)
        sync(final.parent)


def _damage(folder: Path) -> str | None:
    """Say what is wrong with a store; none = it is whole, as far as its index and the sizes of its files tell."""
    try:
        wanted, found = json.loads((folder / COMMIT).read_bytes()), state_of(folder)
        for name, size in wanted["files"].items():
            if found["files"].get(name) != size:
                return f"{name} has {found['files'].get(name, 'no')} bytes, must have {size}"
        if found != wanted:
            return "its files are not those that were written"
        for side in SIDES:
            open_stream(folder / side)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be opened ({' '.join(str(error).split())})"
    return None
