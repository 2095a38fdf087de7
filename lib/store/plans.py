"""Row plans of a stream, made once and mapped: which pieces of which documents stand in each row.

A plan depends on the documents' lengths, the row length and the mode; it lies beside the token store, is written once,
whole, and is mapped from then on, so a corpus of any size opens at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lib.data.pack import plan_rows
from lib.errors import DataError
from lib.store.alone import alone, temporary_in
from lib.store.disk import discard, sync
from lib.store.stream import Stream

__all__ = ["MappedRows", "row_table"]

FORMAT = 1


@dataclass(frozen=True)
class MappedRows:
    """Planned rows, mapped from their files; sent to another process they are mapped there again."""

    path: Path
    rows: NDArray[np.int64] = field(repr=False, compare=False)
    pieces: NDArray[np.int64] = field(repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[[Path], MappedRows], tuple[Path]]:
        return _mapped, (self.path,)


def row_table(stream: Stream, mode: str, length: int) -> MappedRows:
    """Open the row plan of a stream, making it first where there is none.

    Args:
        stream: one side of a token store.
        mode: `pack` or `pad`.
        length: the most targets that a row holds.

    Raises:
        DataError: it cannot be written.
    """
    store = stream.path.parent
    final = store.parent / f"{store.name}-{stream.path.name}-{mode}-{length}"
    if (table := _opened(final)) is None:
        try:
            with temporary_in(store.parent) as fresh:
                _write(fresh / final.name, stream, mode, length)
                with alone(store.parent):
                    if os.path.lexists(final) and _opened(final) is None:
                        discard(final)
                    if not os.path.lexists(final):
                        os.rename(fresh / final.name, final)
                        sync(final.parent)
        except OSError as error:
            why = f"cannot be written ({error.strerror or error})"
            raise DataError(f"{final}: {why}; set data.cache to a folder with room") from None
        table = _mapped(final)
    return table


def _mapped(folder: Path) -> MappedRows:
    if (table := _opened(folder)) is None:
        raise DataError(f"{folder}: is not there or damaged; run again to have it made anew")
    return table


def _write(folder: Path, stream: Stream, mode: str, length: int) -> None:
    folder.mkdir()
    rows = pieces = 0
    with open(folder / "rows", "wb") as ends, open(folder / "pieces", "wb") as spans:
        ends.write(np.zeros(1, dtype="<i8").tobytes())
        for counts, some in plan_rows(stream.offsets, length, mode, shared=stream.shared):
            ends.write((pieces + np.cumsum(counts)).astype("<i8").tobytes())
            spans.write(some.astype("<i8").tobytes())
            rows, pieces = rows + len(counts), pieces + len(some)
        for file in (ends, spans):
            file.flush()
            os.fsync(file.fileno())
    with open(folder / "COMMIT", "wb") as file:
        file.write(json.dumps({"format": FORMAT, "rows": rows, "pieces": pieces}).encode())
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def _opened(folder: Path) -> MappedRows | None:
    try:
        facts = json.loads((folder / "COMMIT").read_bytes())
        rows, pieces = facts["rows"], facts["pieces"]
        if facts["format"] != FORMAT or (folder / "rows").stat().st_size != 8 * (rows + 1):
            return None
        if (folder / "pieces").stat().st_size != 16 * pieces:
            return None
        if not rows:
            return MappedRows(folder, np.zeros(1, dtype=np.int64), np.empty((0, 2), dtype=np.int64))
        ends = np.memmap(folder / "rows", dtype="<i8", mode="r")
        if (ends[0], ends[-1]) != (0, pieces):
            return None
        return MappedRows(folder, ends, np.memmap(folder / "pieces", dtype="<i8", mode="r").reshape(-1, 2))
    except (OSError, ValueError, KeyError, TypeError):
        return None
