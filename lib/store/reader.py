"""Reading a checkpoint: nothing is believed until its checksum is seen to be right.

Guarantees: what is returned is, bit by bit, what was written; any file that is missing, unexpected, cut short,
changed, or not a regular file is an error that names it and its leaf. Nothing read is ever run, and no size is
believed before a file has it. A part of a leaf is read by the chunks it lies in, straight into its place.
"""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from lib.errors import CheckpointError
from lib.recipe import Recipe
from lib.store.each import each
from lib.store.grid import overlap
from lib.store.leaves import RECIPE, STORED, Leaf, array_of, assemble, empty, state_path
from lib.store.manifest import (
    COMMIT,
    FIX,
    MANIFEST,
    METADATA,
    Array,
    Attributes,
    Manifest,
    commit_of,
    decode,
    decode_attributes,
    owner,
)
from lib.store.place import Place
from lib.store.remote import said
from lib.store.sharded import Target
from lib.store.shards import CRC_BYTES, Box, chunks, crc32c, file_box, inside, keys, tail

__all__ = ["Aim", "chosen", "is_committed", "read_attributes", "read_manifest", "read_tree", "verify"]

LISTED = 8  # names in one error line


class Aim(NamedTuple):
    """What is to come of a checkpoint.

    Attributes:
        nodes: path in the checkpoint -> path in the state; branches before what they hold.
        target: where a leaf of the state is to lie.
        all_here: every file is read here; else only what lies in this rank's parts.
    """

    nodes: Mapping[str, str]
    target: Callable[[str, Array], Target]
    all_here: bool = True


def is_committed(place: Place) -> bool:
    """Say whether COMMIT is there and matches the manifest: cheap, looks at no other file.

    Raises:
        CheckpointError: the two may be there but cannot be read.
    """
    try:
        return place.read(COMMIT) == commit_of(place.read(MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(f"{place}", error) from error


def read_manifest(place: Place) -> Manifest:
    """Read the manifest, checked against COMMIT and in itself.

    Raises:
        CheckpointError: there is no finished checkpoint, or it is damaged.
    """
    found: dict[str, bytes] = {}
    for name in (COMMIT, MANIFEST):
        try:
            found[name] = place.read(name)
        except (FileNotFoundError, NotADirectoryError):
            if not _there(place):
                raise CheckpointError(f"{place}: must be a folder that is there; check the path") from None
            raise CheckpointError(f"{place}: {name} is missing, so this is no finished checkpoint; {FIX}") from None
        except OSError as error:
            raise _unreadable(f"{place}/{name}", error) from error
    if found[COMMIT] != commit_of(found[MANIFEST]):
        raise CheckpointError(f"{place}: {COMMIT} must hold the sha256 of {MANIFEST}, one of them is damaged; {FIX}")
    return decode(found[MANIFEST], f"{place}/{MANIFEST}")


def read_attributes(place: Place, manifest: Manifest) -> Attributes:
    """Read what the root group says of the checkpoint.

    Raises:
        CheckpointError: its `zarr.json` is damaged.
    """
    data = _text(place, manifest, METADATA)
    attributes = decode_attributes(data, f"{place}/{METADATA}")
    if (attributes.recipe is msgspec.UNSET) == (manifest.nodes.get(RECIPE) == "recipe"):
        raise CheckpointError(f"{place}/{METADATA}: must hold a recipe just when {MANIFEST} names one; {FIX}")
    return attributes


def verify(place: Place) -> None:
    """Check every byte of a checkpoint, without keeping it.

    Raises:
        CheckpointError: names what is damaged.
    """
    manifest = read_manifest(place)
    with _held(place):
        check_listing(place, manifest)
        read_attributes(place, manifest)
        files = [
            _File(path, node, index, key, None)
            for path, node in manifest.nodes.items()
            if isinstance(node, Array)
            for index, key in keys(node.layout)
        ]
        each(
            _one_text(place, manifest),
            [path for path, node in manifest.nodes.items() if node != "recipe"],
            place.readers,
        )
        each(lambda file: _read_file(place, manifest, file), files, place.readers)


def read_tree(place: Place, manifest: Manifest, aim: Aim) -> TensorDict:
    """Read a state, and check every byte of what is read.

    Raises:
        CheckpointError: names what is damaged.
    """
    with _held(place):
        if aim.all_here:
            check_listing(place, manifest)
        attributes = read_attributes(place, manifest)
        found: dict[str, Leaf] = {}
        texts, files = [], []
        made: list[tuple[str, Target, Tensor]] = []
        for path, name in aim.nodes.items():
            node = manifest.nodes[path]
            if node == "recipe":
                found[name] = _recipe(place, attributes)
                continue
            texts.append(path)
            found[name] = None
            if isinstance(node, Array):
                target = aim.target(name, node)
                local = empty(node.dtype, tuple(stop - start for start, stop in target.box))
                part = _Part(array_of(local), target.box)
                files += [_File(path, node, index, key, part) for index, key in _needed(node, target.box)]
                made.append((name, target, local))
        if aim.all_here:
            each(_one_text(place, manifest), texts, place.readers)
        each(lambda file: _read_file(place, manifest, file), files, place.readers)
    # Only now that it is read: a leaf of a mesh of another kind of device is a copy of what is here.
    found |= {name: target.filled(local) for name, target, local in made}
    return assemble(found)


def check_listing(place: Place, manifest: Manifest) -> None:
    """Hold the files that are there, and their sizes, against the manifest; list what differs in one line."""
    try:
        have = place.listing()
    except OSError as error:
        raise _unreadable(f"{place}", error) from error
    wrong = []
    for name in sorted({*manifest.files, *have} - {COMMIT, MANIFEST}):
        node = owner(manifest, name)
        shown = f"{name} ({state_path(node)})" if node else name
        if name not in have:
            wrong.append(f"{shown} is missing")
        elif name not in manifest.files:
            wrong.append(f"{shown} is unexpected")
        elif have[name] is None:
            wrong.append(f"{shown} is no regular file")
        elif have[name] != manifest.files[name].size:
            wrong.append(f"{shown} has {have[name]} bytes, must have {manifest.files[name].size}")
    if wrong:
        more = f" and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise CheckpointError(f"{place}: {', '.join(wrong[:LISTED])}{more}; {FIX}")


def chosen(place: Place, paths: Collection[str], names: Sequence[str] | None) -> list[str]:
    """Those of `paths` that are at, below or above `names`; a name is written with slashes or with dots.

    Raises:
        CheckpointError: a name is not there; the nearest one is named.
    """
    if names is None:
        return list(paths)
    roots = []
    dotted = {path.replace("/", "."): path for path in paths}
    for name in names:
        if name not in paths and name not in dotted:
            near = difflib.get_close_matches(name, dotted, n=1) or [path for path in dotted if "." not in path]
            raise CheckpointError(
                f"{place}: {state_path(name)} is not in this checkpoint; did you mean {', '.join(near)}?"
            )
        roots.append(name if name in paths else dotted[name])
    return [
        path
        for path in paths
        if any(f"{path}/".startswith(f"{root}/") or root.startswith(f"{path}/") for root in roots)
    ]


class _Part(NamedTuple):
    """Memory to be filled, and which part of a leaf it is for."""

    array: NDArray[Any]
    box: Box


class _File(NamedTuple):
    """A file of a leaf: the leaf, its place in the leaf's cut, and where what it holds is to go; None = nowhere."""

    path: str
    node: Array
    at: tuple[int, ...]
    key: str
    part: _Part | None


def _needed(node: Array, box: Box) -> Iterator[tuple[tuple[int, ...], str]]:
    for index, key in keys(node.layout):
        if overlap(file_box(node.layout, index), box) is not None:
            yield index, key


def _read_file(place: Place, manifest: Manifest, wanted: _File) -> None:
    """Read what a file has of a part of its leaf into its place; without a part, check all of it and keep nothing."""
    name, layout, part = f"{wanted.path}/{wanted.key}", wanted.node.layout, wanted.part
    file, itemsize = manifest.files[name], STORED[wanted.node.dtype][1].itemsize
    size_bytes = math.prod(layout.chunk) * itemsize
    checksum, complete = np.empty(CRC_BYTES, np.uint8), True
    with _faults(place, manifest, name), place.source(name) as source:
        if source.size != file.size:
            raise CheckpointError(f"{_at(place, manifest, name)} has {source.size} bytes, must have {file.size}; {FIX}")
        for number, box in enumerate(chunks(layout, wanted.at)):
            common = box if part is None else overlap(box, part.box)
            if common is None:
                complete = False
                continue
            block = None if part is None else part.array[inside(common, part.box)]
            # Straight to where it goes, if all of the chunk goes there as it stands.
            straight = block is not None and block.shape == layout.chunk and block.flags.c_contiguous
            buffer = (
                block.reshape(-1).view(np.uint8) if block is not None and straight else np.empty(size_bytes, np.uint8)
            )
            source.read(number * (size_bytes + CRC_BYTES), [buffer, checksum])
            if not crc32c(buffer) == checksum.tobytes() == file.checksum(number):
                raise CheckpointError(_damaged(place, manifest, name))
            if block is not None and not straight:
                block[...] = buffer.view(block.dtype).reshape(layout.chunk)[inside(common, box)]
        if complete and (want := tail(layout, wanted.at, itemsize)):
            table = np.empty(len(want), np.uint8)
            source.read(file.size - len(want), [table])
            if table.tobytes() != want:
                raise CheckpointError(_damaged(place, manifest, name))


def _one_text(place: Place, manifest: Manifest) -> Callable[[str], None]:
    def check(path: str) -> None:
        _text(place, manifest, f"{path}/{METADATA}")

    return check


def _text(place: Place, manifest: Manifest, name: str) -> bytes:
    with _faults(place, manifest, name):
        data = place.read(name)
    if len(data) != manifest.files[name].size or crc32c(data) != manifest.files[name].checksum(0):
        raise CheckpointError(_damaged(place, manifest, name))
    return data


def _recipe(place: Place, attributes: Attributes) -> Recipe:
    try:
        return msgspec.convert(attributes.recipe, Recipe, strict=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{place}: state.recipe: {error}; read it with the purestep that wrote it") from None


@contextlib.contextmanager
def _held(place: Place) -> Iterator[None]:
    """Keep the checkpoint from being deleted while it is read."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(place.shared())
        except OSError as error:
            raise _unreadable(f"{place}", error) from error
        yield


@contextlib.contextmanager
def _faults(place: Place, manifest: Manifest, name: str) -> Iterator[None]:
    """Turn failures of reading a file into errors that name its leaf."""
    try:
        yield
    except EOFError:
        raise CheckpointError(f"{_at(place, manifest, name)} is cut short; {FIX}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{_at(place, manifest, name)} is missing; {FIX}") from None
    except OSError as error:
        raise _unreadable(f"{place}/{name}", error) from error


def _there(place: Place) -> bool:
    try:
        place.names()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(f"{place}", error) from error
    return True


def _at(place: Place, manifest: Manifest, name: str) -> str:
    node = owner(manifest, name)
    return f"{state_path(node)}: {place}/{name}" if node else f"{place}/{name}"


def _damaged(place: Place, manifest: Manifest, name: str) -> str:
    return f"{_at(place, manifest, name)} must have the crc32c that {MANIFEST} gives it, so it is damaged; {FIX}"


def _unreadable(path: str, error: OSError) -> CheckpointError:
    why = error.strerror or said(error)
    return CheckpointError(f"{path}: cannot be read ({why}); make it readable or take another checkpoint")
