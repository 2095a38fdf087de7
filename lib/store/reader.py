"""Reading a checkpoint: nothing is believed until its digest is seen to be right.

Guarantees: what is returned is, bit by bit, what was written; any file that is missing, unexpected, cut short,
changed, or not a regular file is an error that names it and its leaf. Nothing read is ever run, and no size is
believed before a file has it.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tensordict import TensorDict
from torch import Tensor

from lib.config import Recipe
from lib.errors import CheckpointError
from lib.store import disk
from lib.store.leaves import RECIPE, Leaf, array_of, assemble, empty, state_path
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
from lib.store.shards import fill, keys

__all__ = ["is_committed", "read_attributes", "read_manifest", "read_tree", "verify"]

LISTED = 8  # names in one error line


def is_committed(folder: Path) -> bool:
    """Say whether COMMIT is there and matches the manifest: cheap, looks at no other file.

    Raises:
        CheckpointError: the two may be there but cannot be read.
    """
    try:
        return disk.read_bytes(folder / COMMIT) == commit_of(disk.read_bytes(folder / MANIFEST))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(folder, error) from error


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest, checked against COMMIT and in itself.

    Raises:
        CheckpointError: there is no finished checkpoint, or it is damaged.
    """
    found: dict[str, bytes] = {}
    for name in (COMMIT, MANIFEST):
        try:
            found[name] = disk.read_bytes(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                raise CheckpointError(f"{folder}: must be a folder that is there; check the path") from None
            raise CheckpointError(f"{folder}: {name} is missing, so this is no finished checkpoint; {FIX}") from None
        except OSError as error:
            raise _unreadable(folder / name, error) from error
    if found[COMMIT] != commit_of(found[MANIFEST]):
        raise CheckpointError(f"{folder}: {COMMIT} must hold the sha256 of {MANIFEST}, one of them is damaged; {FIX}")
    return decode(found[MANIFEST], f"{folder / MANIFEST}")


def read_attributes(folder: Path, manifest: Manifest) -> Attributes:
    """Read what the root group says of the checkpoint.

    Raises:
        CheckpointError: its `zarr.json` is damaged.
    """
    with _faults(folder, manifest, METADATA):
        data = disk.read_bytes(folder / METADATA)
    if hashlib.sha256(data).hexdigest() != manifest.files[METADATA].sha256:
        raise CheckpointError(_damaged(folder, manifest, METADATA))
    attributes = decode_attributes(data, f"{folder / METADATA}")
    if (attributes.recipe is msgspec.UNSET) == (manifest.nodes.get(RECIPE) == "recipe"):
        raise CheckpointError(f"{folder / METADATA}: must hold a recipe just when {MANIFEST} names one; {FIX}")
    return attributes


def verify(folder: Path) -> None:
    """Check every byte of a checkpoint, without keeping it.

    Raises:
        CheckpointError: names what is damaged.
    """
    manifest = read_manifest(folder)
    _check_listing(folder, manifest)
    read_attributes(folder, manifest)
    for name in manifest.files:
        _check_file(folder, manifest, name)


def read_tree(folder: Path, names: Sequence[str] | None = None) -> TensorDict:
    """Read a state, or the sub-trees that `names` names, and check every byte of it.

    Raises:
        CheckpointError: names what is damaged, or the sub-tree that is not there.
    """
    manifest = read_manifest(folder)
    _check_listing(folder, manifest)
    attributes = read_attributes(folder, manifest)
    found: dict[str, Leaf] = {}
    for path in _chosen(folder, manifest, names):
        node = manifest.nodes[path]
        if node == "recipe":
            found[path] = _recipe(folder, attributes)
            continue
        _check_file(folder, manifest, f"{path}/{METADATA}")
        found[path] = _read_array(folder, manifest, path, node) if isinstance(node, Array) else None
    return assemble(found)


def _read_array(folder: Path, manifest: Manifest, path: str, node: Array) -> Tensor:
    tensor = empty(node.dtype, node.shape)
    array = array_of(tensor)
    for index, key in keys(node.layout):
        name = f"{path}/{key}"
        with _faults(folder, manifest, name), disk.reading(folder / name) as (_, read, sha256):
            in_order = fill(array, node.layout, index, read)
            if sha256() != manifest.files[name].sha256:
                raise CheckpointError(_damaged(folder, manifest, name))
            if not in_order:
                raise CheckpointError(f"{_at(folder, manifest, name)} must hold its chunks in order; {FIX}")
    return tensor


def _check_file(folder: Path, manifest: Manifest, name: str) -> None:
    with _faults(folder, manifest, name):
        if disk.digest(folder / name) != manifest.files[name].sha256:
            raise CheckpointError(_damaged(folder, manifest, name))


def _check_listing(folder: Path, manifest: Manifest) -> None:
    """Hold the files that are there, and their sizes, against the manifest; list what differs in one line."""
    try:
        have = disk.listing(folder)
    except OSError as error:
        raise _unreadable(folder, error) from error
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
        raise CheckpointError(f"{folder}: {', '.join(wrong[:LISTED])}{more}; {FIX}")


def _chosen(folder: Path, manifest: Manifest, names: Sequence[str] | None) -> list[str]:
    """Paths of the nodes at, below and above `names`; a name is written with slashes or with dots."""
    if names is None:
        return list(manifest.nodes)
    if isinstance(names, str):
        raise ValueError(f"keys={names!r} must be a list of names; write keys=[{names!r}]")
    roots = []
    dotted = {path.replace("/", "."): path for path in manifest.nodes}
    for name in names:
        if name not in manifest.nodes and name not in dotted:
            near = difflib.get_close_matches(name, dotted, n=1) or [path for path in dotted if "." not in path]
            raise CheckpointError(
                f"{folder}: {state_path(name)} is not in this checkpoint; did you mean {', '.join(near)}?"
            )
        roots.append(name if name in manifest.nodes else dotted[name])
    return [
        path
        for path in manifest.nodes
        if any(f"{path}/".startswith(f"{root}/") or root.startswith(f"{path}/") for root in roots)
    ]


def _recipe(folder: Path, attributes: Attributes) -> Recipe:
    try:
        return msgspec.convert(attributes.recipe, Recipe, strict=True)
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{folder}: state.recipe: {error}; read it with the purestep that wrote it") from None


@contextlib.contextmanager
def _faults(folder: Path, manifest: Manifest, name: str) -> Iterator[None]:
    """Turn failures of reading a file into errors that name its leaf."""
    try:
        yield
    except EOFError:
        raise CheckpointError(f"{_at(folder, manifest, name)} is cut short; {FIX}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{_at(folder, manifest, name)} is missing; {FIX}") from None
    except OSError as error:
        raise _unreadable(folder / name, error) from error


def _at(folder: Path, manifest: Manifest, name: str) -> str:
    node = owner(manifest, name)
    return f"{state_path(node)}: {folder / name}" if node else f"{folder / name}"


def _damaged(folder: Path, manifest: Manifest, name: str) -> str:
    return f"{_at(folder, manifest, name)} must have the sha256 that {MANIFEST} gives it, so it is damaged; {FIX}"


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({error.strerror}); make it readable or take another checkpoint")
