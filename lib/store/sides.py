"""The documents of parts, dealt out to both sides of the split.

Which side a document falls on is decided here, when all of them are known; parts do not depend on it. Ids go through in
blocks, so memory does not grow with the corpus or with a document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lib.data.split import limit
from lib.errors import DataError
from lib.store.chunks import Array
from lib.store.making import Making, ids_dtype
from lib.store.parts import Part, Written, part_path
from lib.store.stream import CHUNK_IDS

__all__ = ["SIDES", "Facts", "Side", "deal", "facts_of", "new_side"]

SIDES = ("train", "heldout")

_BLOCK_IDS = 1 << 21
_MANY = 1000  # runs of documents of one side in a block


class Facts(NamedTuple):
    """What a part says of some of its documents.

    Attributes:
        lengths: ids of each, with marks.
        draws: the word of each that decides on its side.
        origin: [documents, 2], number of the file and line or row in it.
        name_lengths: bytes in the name of each; none = they have no names.
    """

    lengths: NDArray[np.int64]
    draws: NDArray[np.uint64]
    origin: NDArray[np.int64]
    name_lengths: NDArray[np.int64] | None

    def of(self, which: slice | NDArray[np.bool_]) -> Facts:
        """Some of them."""
        names = None if self.name_lengths is None else self.name_lengths[which]
        return Facts(self.lengths[which], self.draws[which], self.origin[which], names)


@dataclass
class Side:
    """One side while it is written.

    Attributes:
        arrays: its arrays by name.
        documents: how many it has.
    """

    arrays: dict[str, Array] = field(default_factory=dict)
    documents: int = 0

    @property
    def size(self) -> int:
        """How many ids it has."""
        return self.arrays["ids"].size


def new_side(folder: Path, making: Making, vocab: int) -> Side:
    """Begin a side in a folder that is not there yet."""
    kinds: dict[str, np.dtype[Any]] = {
        "ids": ids_dtype(vocab),
        "offsets": np.dtype("<i8"),
        "origin": np.dtype("<i8"),
        "draws": np.dtype("<u8"),
    }
    if making.template is not None:
        kinds["mask"] = np.dtype("?")
    if making.reading.id_key is not None:
        kinds |= {"names": np.dtype("u1"), "name_ends": np.dtype("<i8")}
    side = Side()
    for name, dtype in kinds.items():
        (folder / name / "c").mkdir(parents=True)
        # The index is one chunk, so that it can be mapped as it is.
        most, inner = CHUNK_IDS if name in ("ids", "mask") else 1 << 62, (2,) if name == "origin" else ()
        side.arrays[name] = Array(folder / name, dtype, most, inner)
    side.arrays["offsets"].append(np.zeros(1, np.int64))
    return side


def facts_of(building: Path, part: Part, written: Written, lines: Counter[int]) -> Facts:
    """Read what a part says of its documents; `lines` counts those of each file that came before, and so many more."""
    path = part_path(building, part.number)

    def read(name: str, dtype: str) -> NDArray[Any]:
        return np.fromfile(path / name, dtype=dtype)

    origin, at = read("origin", "<i8").reshape(-1, 2), 0
    for one, (documents, more) in zip(part.stretches, written.found, strict=True):
        some = origin[at : at + documents, 1]
        some += lines[one.file] * (some > 0)
        lines[one.file] += more
        at += documents
    named = read("name_lengths", "<i8") if "name_lengths" in written.files else None
    return Facts(read("lengths", "<i8"), read("draws", "<u8"), origin, named)


def deal(
    path: Path,
    facts: Facts,
    sides: Mapping[str, Side],
    making: Making,
    *,
    share: float,
    cut: int | None,
    content: int,
) -> int:
    """Deal the documents of a part out to both sides.

    Args:
        path: the part.
        facts: all its documents.
        sides: by name, added to.
        making: how the part was made.
        share: part of the documents to hold out.
        cut: id, without marks, at which the tail is cut off instead; none = documents are drawn.
        content: ids without marks in the parts before.

    Returns:
        Ids without marks, up to the end of this part.

    Raises:
        DataError: the part was cut short meanwhile.
    """
    inner = facts.lengths - (making.add_bos + making.add_eos)
    begins = content + np.cumsum(inner) - inner
    late = facts.draws < np.uint64(limit(share)) if cut is None else begins >= cut
    across = np.flatnonzero((begins < cut) & (begins + inner > cut)) if cut is not None else np.empty(0, np.int64)
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {
            name: stack.enter_context(open(path / name, "rb"))
            for name in ("ids", "mask", "names")
            if name in sides["train"].arrays
        }
        for begin, stop in _blocks(facts.lengths, across):
            here, some = late[begin:stop], facts.of(slice(begin, stop))
            if begin in across:
                assert cut is not None
                _across(files, sides, some, making, int(cut - begins[begin]))
            elif here.all() or not here.any():
                side = sides["heldout" if here[0] else "train"]
                _copy(files, side, int(some.lengths.sum()))
                _note(files, side, some)
            else:
                _parted(files, sides, some, here)
    return content + int(inner.sum())


def _blocks(lengths: NDArray[np.int64], across: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Stretches of documents of about `_BLOCK_IDS` ids; a document that lies across the cut is one of its own."""
    ends, at, alone = np.cumsum(lengths), 0, set(across.tolist())
    while at < len(lengths):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + _BLOCK_IDS, side="right")))
        for number in alone:
            stop = at + 1 if number == at else min(stop, number) if number > at else stop
        yield at, stop
        at = stop


def _copy(files: Mapping[str, BinaryIO], side: Side, count: int) -> bool:
    """Copy the next ids of a part, and whether each is trained on, to a side; tell whether the last one is."""
    learnt = True
    for name in ("ids", "mask"):
        array, left = side.arrays.get(name), count
        while left and array is not None:
            some = _taken(files[name], min(left, _BLOCK_IDS), array.dtype)
            array.append(some)
            left -= len(some)
            learnt = name == "ids" or bool(some[-1])
    return learnt


def _taken(file: BinaryIO, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    items = np.fromfile(file, dtype=dtype, count=count)
    if len(items) < count:
        raise DataError(f"{file.name}: became shorter while it was read; run again to have it written anew")
    return items


def _parted(files: Mapping[str, BinaryIO], sides: Mapping[str, Side], some: Facts, late: NDArray[np.bool_]) -> None:
    """Deal out documents of both sides at once."""
    train, heldout = sides["train"].arrays, sides["heldout"].arrays
    ends = np.cumsum(some.lengths)
    edges = [0, *ends[np.flatnonzero(late[1:] != late[:-1])].tolist(), int(ends[-1])]
    for name in ("ids", "mask"):
        if name not in train:
            continue
        items = _taken(files[name], edges[-1], train[name].dtype)
        if len(edges) < _MANY:  # slices are copied several times faster than what a mask picks
            for number, (begin, stop) in enumerate(pairwise(edges)):
                (heldout if late[0] ^ (number % 2) else train)[name].append(items[begin:stop])
        else:
            of_ids = np.repeat(late, some.lengths)
            train[name].append(items[~of_ids])
            heldout[name].append(items[of_ids])
    named, names = some.name_lengths, _names(files, some)
    for side, here in ((sides["train"], ~late), (sides["heldout"], late)):
        own = None if names is None or named is None else names[np.repeat(here, named)]
        _note(files, side, some.of(here), own)


def _note(files: Mapping[str, BinaryIO], side: Side, some: Facts, names: NDArray[np.uint8] | None = None) -> None:
    """Note where documents end, where they come from and what they are called."""
    ends = side.size - int(some.lengths.sum()) + np.cumsum(some.lengths)
    side.arrays["offsets"].append(ends)
    side.arrays["origin"].append(some.origin)
    side.arrays["draws"].append(some.draws)
    if some.name_lengths is not None:
        names = _names(files, some) if names is None else names
        assert names is not None
        before = side.arrays["names"].size
        side.arrays["names"].append(names)
        side.arrays["name_ends"].append(before + np.cumsum(some.name_lengths))
    side.documents += len(some.lengths)


def _across(files: Mapping[str, BinaryIO], sides: Mapping[str, Side], one: Facts, making: Making, room: int) -> None:
    """Copy a document that lies across the cut: it becomes two, each with its marks."""
    marks, (whole,) = making.coder().tokenizer, one.lengths.tolist()
    head, tail = room + making.add_bos, whole - room - making.add_bos
    train, heldout = sides["train"], sides["heldout"]
    learnt = _copy(files, train, head)
    if making.add_eos:
        _mark(train, marks.eos, learnt)
    if making.add_bos:
        _mark(heldout, marks.bos or 0, False)
    _copy(files, heldout, tail)
    name = _names(files, one)
    for side, length in ((train, head + making.add_eos), (heldout, tail + making.add_bos)):
        _note(files, side, one._replace(lengths=np.array([length])), name)


def _mark(side: Side, mark: int, learnt: bool) -> None:
    side.arrays["ids"].append(np.array([mark]))
    if "mask" in side.arrays:
        side.arrays["mask"].append(np.array([learnt]))


def _names(files: Mapping[str, BinaryIO], some: Facts) -> NDArray[np.uint8] | None:
    """Read the names of the next documents of a part."""
    return None if some.name_lengths is None else _taken(files["names"], int(some.name_lengths.sum()), np.dtype("u1"))
