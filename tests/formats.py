"""Files of any format as tests want them: laid down, read through whole or in stretches, refused with a message."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lib.errors import DataError
from lib.store.formats import kind_of, place_of, records, spans
from lib.store.record import Reading, Record

WHOLE = 1 << 62


class Read(NamedTuple):
    """What a file gave."""

    values: list[Any]  # bytes of text, lists of ids, or fields
    places: list[str]
    names: list[str | None]
    skipped: dict[str, int]


def read(
    path: Path | str, *, target: int = WHOLE, eos: int | None = None, vocab: int | None = None, **options: Any
) -> Read:
    """Read a file through all its stretches."""
    reading, skipped = Reading(**options), Counter[str]()
    kind = kind_of(str(path), reading.format)
    size = Path(path).stat().st_size if isinstance(path, Path) else 0
    got = Read([], [], [], {})
    for span in spans(str(path), size, kind, reading, target=target):
        for record in records(str(path), span, kind, reading, skipped, eos=eos, vocab=vocab):
            got.values.append(value_of(record))
            got.places.append(place_of(str(path), span, kind, record.line).rpartition("/")[2])
            got.names.append(record.name)
    return got._replace(skipped=dict(+skipped))


def value_of(record: Record) -> Any:
    given = [one for one in (record.text, record.ids, record.fields) if one is not None]
    assert len(given) == 1
    if record.text is not None:
        pieces = list(record.text)
        assert max(map(len, pieces), default=0) <= 1 << 20 or len(pieces) == 1
        return b"".join(pieces)
    return record.fields if record.ids is None else record.ids.tolist()


def texts(path: Path, **options: Any) -> list[bytes]:
    """Read the documents of a file from which nothing is passed over."""
    got = read(path, **options)
    assert got.skipped == {}
    return got.values


def refused(path: Path | str, message: str, **options: Any) -> None:
    """Hold the one line that a file is refused with to this, `@` standing for its path."""
    with pytest.raises(DataError, match=f"^{re.escape(message.replace('@', str(path)))}$"):
        read(path, **options)


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
