"""Token stores as tests want them: built from a few texts, read through whole, and compared bit for bit."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib.data.bytes import decode
from lib.store.corpus import Corpus, scan
from lib.store.making import Making
from lib.store.record import Reading
from lib.store.stream import Stream
from lib.store.tokens import Split, TokenStore, prepare

READING = frozenset(Reading._fields)


def lay(root: Path, files: dict[str, bytes]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return root


def making_of(**options: Any) -> Making:
    """A `Making` by the fields of it and of its `Reading`."""
    reading = Reading(**{name: options.pop(name) for name in READING & set(options)})
    return Making(reading=reading._replace(chat=options.get("template") is not None), **options)


def made(corpus: Corpus, cache: Path, *, holdout: float = 0.0, how: str = "tail", doing: Any = map, progress: Any = None,
         **options: Any) -> TokenStore:  # fmt: skip
    making = making_of(**options)
    return prepare(corpus, making, Split(holdout, how), cache=cache, doing=doing, progress=progress)


def ready(root: Path, files: dict[str, bytes], **options: Any) -> TokenStore:
    """Lay files down and prepare all that lie there."""
    path = lay(root / "text", files)
    form = options.get("format", "auto")
    return made(scan(path, format=form), root / "cache", **{"how": "auto", **options})


def names(cache: Path) -> list[str]:
    """What is in a cache, but for the notes of how many documents there were."""
    return sorted(name for name in os.listdir(cache) if not name.endswith(".documents"))


def every(side: Stream) -> list[int]:
    ids: list[int] = side.ids(0, side.size).tolist()
    return ids


def ids_of(side: Stream) -> list[list[int]]:
    """The ids of each document, with its marks."""
    return [side.ids(a, b).tolist() for a, b in pairwise(side.offsets.tolist())]


def documents(side: Stream) -> list[bytes]:
    """The text of each document, of bytes."""
    return [decode(side.ids(a, b)) for a, b in pairwise(side.offsets.tolist())]


def masks_of(side: Stream) -> list[list[bool]]:
    found = []
    for a, b in pairwise(side.offsets.tolist()):
        mask = side.mask(a, b)
        found.append([True] * (b - a) if mask is None else mask.tolist())
    return found


def origins(side: Stream) -> list[tuple[str, int, str]]:
    return [side.origin(n) for n in range(side.documents)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
