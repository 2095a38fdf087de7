"""Documents -> the token store, a Zarr group that is built once for a corpus and the options that shape it.

    <cache>/<key>/  train/ids  train/offsets  heldout/ids  heldout/offsets  COMMIT

`ids` is uint16, uncompressed; `offsets` int64, where each document begins and last the number of ids; an end mark
belongs to the document before it. The key is a digest of the corpus' identity, the tokenizer, the split and this
layout: edited text never meets old ids, while moved folders and new time stamps build nothing.

A store is written into a temporary folder, synced, closed with COMMIT and renamed: under its name it is whole or not
there. Two processes may build the same one; the slower takes what the quicker has built. What a killed one leaves
behind is swept away by the next build.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from lib.data.bytes import BYTES
from lib.data.split import resolve
from lib.data.tokenizer import Tokenizer
from lib.errors import DataError
from lib.store.build import COMMIT, SIDES, state_of, write_store
from lib.store.corpus import Corpus, Entry, Progress
from lib.store.disk import discard, sweep, sync, temporary
from lib.store.stream import ID_BYTES, Stream, open_stream

__all__ = ["Stream", "TokenStore", "key_of", "prepare", "summary"]

FORMAT = 1


class TokenStore(NamedTuple):
    """A prepared corpus.

    Attributes:
        path: folder of the store.
        train: what is trained on.
        heldout: what is kept from training; no documents when `holdout` is 0.
        tokenizer: what the ids mean.
        how: `document` or `tail`, as resolved.
        holdout: share held out.
        identity: digest of the corpus.
        entries: the corpus' files.
        skipped: what the scan passed over, by cause.
        counts: documents, empty, duplicates, text_bytes, tokens of the corpus.
        notes: lines for the log: what was built anew and why.
    """

    path: Path
    train: Stream
    heldout: Stream
    tokenizer: Tokenizer
    how: str
    holdout: float
    identity: str
    entries: tuple[Entry, ...]
    skipped: Mapping[str, int]
    counts: Mapping[str, int]
    notes: tuple[str, ...]


def prepare(corpus: Corpus, *, holdout: float, how: str, cache: Path, progress: Progress | None = None) -> TokenStore:
    """Open the token store of a corpus, building it first where there is none or where it is damaged.

    Args:
        corpus: the scanned files.
        holdout: share held out, in [0, 1).
        how: `document`, `tail`, or `auto`.
        cache: folder of all token stores.
        progress: told how far the building is.

    Returns:
        The store, the same whoever built it.

    Raises:
        ValueError: the split is not one.
        DataError: a side is left without text, a file changed since the scan, or the cache cannot be written.
    """
    how = resolve(how, documents=len(corpus.entries), share=holdout)
    final = cache / key_of(corpus, holdout=holdout, how=how)
    wrong, notes = _damage(final), []
    if wrong is not None:
        if os.path.lexists(final):
            notes.append(f"{final}: {wrong}; built anew")
        try:
            _build(final, corpus, holdout=holdout, how=how, progress=progress)
        except OSError as error:
            why = f"cannot be written ({error.strerror or error})"
            raise DataError(f"{cache}: {why}; set data.cache to a folder with room") from None
    train, heldout = (open_stream(final / side, BYTES.vocab) for side in SIDES)
    return TokenStore(
        path=final,
        train=train,
        heldout=heldout,
        tokenizer=BYTES,
        how=how,
        holdout=holdout,
        identity=corpus.identity,
        entries=corpus.entries,
        skipped=corpus.skipped,
        counts=json.loads((final / "zarr.json").read_bytes())["attributes"]["counts"],
        notes=tuple(notes),
    )


def key_of(corpus: Corpus, *, holdout: float, how: str) -> str:
    """Name the store of a corpus: a digest of everything that shapes its ids."""
    parts = [FORMAT, corpus.identity, *BYTES, float(holdout), how]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def summary(store: TokenStore) -> str:
    """Say in one line what was read."""
    counts = store.counts
    sides = f"{store.train.documents} train, {store.heldout.documents} held out by {store.how}"
    line = f"{counts['documents']} documents ({sides}), {counts['text_bytes']} bytes, {counts['tokens']} ids"
    extra = {name: counts[name] for name in ("empty", "duplicates")}
    extra |= {f"skipped, {cause}": count for cause, count in store.skipped.items()}
    return "; ".join([line, *(f"{name}: {count}" for name, count in extra.items() if count)])


def _build(final: Path, corpus: Corpus, *, holdout: float, how: str, progress: Progress | None) -> None:
    cache = final.parent
    cache.mkdir(parents=True, exist_ok=True)
    need = ID_BYTES * (corpus.text_bytes + len(corpus.entries)) + 8 * len(corpus.entries)
    if (free := shutil.disk_usage(cache).free) < need:
        have = f"{cache}: {free} bytes are free, the token store needs {need}"
        raise DataError(f"{have}; set data.cache to a folder with room")
    attributes: dict[str, Any] = {
        "format": FORMAT,
        "tokenizer": BYTES._asdict(),
        "identity": corpus.identity,
        "document": "file",
        "holdout": holdout,
        "holdout_by": how,
        "skipped": dict(corpus.skipped),
        "entries": [list(entry) for entry in corpus.entries],
    }
    with ExitStack() as stack:
        with _alone(cache):
            sweep(cache)
            folder = stack.enter_context(temporary(cache)) / final.name
        write_store(folder, corpus, holdout=holdout, how=how, attributes=attributes, progress=progress)
        with _alone(cache):
            _publish(folder, final)


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Let one process at a time give and take names in the cache; what a process holds when it dies is free again."""
    lock = os.open(cache, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network disks have no locks; there renaming alone keeps stores whole
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _publish(folder: Path, final: Path) -> None:
    """Give a finished store its name, unless another process was quicker: what that one built has the same bits."""
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
            open_stream(folder / side, BYTES.vocab)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"cannot be opened ({' '.join(str(error).split())})"
    return None
