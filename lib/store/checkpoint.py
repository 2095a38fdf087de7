"""A state on disk, and back: `save` and `load`, checkpoint format 1.

Guarantees: a checkpoint is there whole or not at all, whenever the process or the machine stops; `load(save(state))`
has the bits of `state`, and saving it again writes the same bytes; what is damaged is never returned. Any Zarr v3
reader opens the folder: `zarr.open_group(path)["params/..."][:]`. Order of a save: a hidden folder, one array a leaf,
all synced; then `manifest.json` with every digest; then `COMMIT` with the manifest's; rename to the final name; sync
of the parent. Deleting old ones comes after, see `folder.py`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from lib.errors import CheckpointError
from lib.store import disk
from lib.store.folder import STEP, latest, newest
from lib.store.leaves import STORED, Leaf, array_of, nodes
from lib.store.manifest import COMMIT, MANIFEST, METADATA, Array
from lib.store.reader import read_attributes, read_manifest, read_tree
from lib.store.writer import check_finite, describe_run, write

__all__ = ["Row", "describe", "load", "read_info", "save"]


class Row(NamedTuple):
    """A leaf as `describe` lists it: dotted path below the state, shape, logical dtype, bytes of its values."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int


def save(path: str | os.PathLike[str], state: TensorDict, *, info: Mapping[str, Any] | None = None) -> Path:
    """Write a state as a checkpoint folder at `path`, whole or not at all.

    The same state saved again at the same place changes nothing. What an unfinished save left there is replaced.

    Args:
        path: the folder, as in `run/checkpoints/step_0000001000`; folders above it are made.
        state: batch size [], every leaf a dense tensor but `recipe`.
        info: JSON values for people and warnings (compile setting, threads, ...); no part of the state.

    Returns:
        The folder.

    Raises:
        CheckpointError: the state cannot be stored (the leaf is named), its parameters are not finite, another state is
            stored there, or the disk refuses; the disk is then as it was.
        ValueError: `info` is no JSON.
    """
    target = Path(path)
    if not isinstance(state, TensorDict):
        raise ValueError(f"state: a {type(state).__name__} must be a TensorDict; make it one with lib.tree.tensordict")
    found = nodes(state)
    check_finite(found)
    attributes = describe_run(found, info or {})
    size_bytes = sum(leaf.nbytes for leaf in found.values() if isinstance(leaf, Tensor))
    with _refusals(target, size_bytes):
        if _holds(target, found):
            return target
        with _parents(target), disk.temporary(target.parent) as folder:
            write(folder, found, attributes)
            if target.exists():
                disk.discard(target)
            os.rename(folder, target)
            try:
                disk.sync(target.parent)
            except OSError:
                os.rename(target, folder)  # not surely on the disk, so not there
                raise
    return target


def load(path: str | os.PathLike[str], *, keys: Sequence[str] | None = None) -> TensorDict:
    """Read a checkpoint, checked to the last byte.

    Args:
        path: a checkpoint folder; or a run folder, or its folder of checkpoints, for the newest one in it.
        keys: sub-trees to read, as in `["params"]`; None = the whole state.

    Returns:
        The state; its tensors are contiguous, on the CPU, and own their memory.

    Raises:
        CheckpointError: none is there, or it is damaged; names the file, the leaf, and the nearest good checkpoint.
        ValueError: `keys` is not a list.
    """
    folder, checkpoints = _resolve(Path(path))
    try:
        return read_tree(folder, keys)
    except CheckpointError:
        if checkpoints is not None:
            latest(checkpoints)  # when the newest is damaged, this error also names the nearest good one
        raise


def read_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the `info` that a checkpoint was saved with; `path` as for `load`."""
    folder, _ = _resolve(Path(path))
    return read_attributes(folder, read_manifest(folder)).info


def describe(path: str | os.PathLike[str]) -> list[Row]:
    """List the leaves of a checkpoint from its manifest, without reading them; `path` as for `load`."""
    folder, _ = _resolve(Path(path))
    return [
        Row(at.replace("/", "."), node.shape, node.dtype, math.prod(node.shape) * STORED[node.dtype][1].itemsize)
        for at, node in read_manifest(folder).nodes.items()
        if isinstance(node, Array)
    ]


def _resolve(path: Path) -> tuple[Path, Path | None]:
    """Find the checkpoint that a path means, and the folder of checkpoints it was the newest in."""
    try:
        inside = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: must be a folder that is there; check the path") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    if STEP.fullmatch(path.name) or not {COMMIT, MANIFEST, METADATA}.isdisjoint(inside):
        return path, None
    for checkpoints in (path / "checkpoints", path):
        if found := newest(checkpoints):
            return found, checkpoints
    raise CheckpointError(f"{path}: must be a checkpoint or a folder with one in it; check the path")


def _holds(target: Path, found: Mapping[str, Leaf]) -> bool:
    """Say whether the state is there already; False when nothing is, or only the rest of an unfinished save."""
    if not os.path.lexists(target):
        return False
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target}: must be a new folder, something else is there; choose another path")
    if os.path.lexists(target / COMMIT):
        if _same(nodes(read_tree(target)), found):
            return True
        raise CheckpointError(f"{target}: another state is stored there already; choose another path or remove it")
    ours = STEP.fullmatch(target.name) or (target / METADATA).is_file() or not any(target.iterdir())
    if not ours:
        raise CheckpointError(f"{target}: must be a new folder, this one holds other files; choose another path")
    return False


def _same(stored: Mapping[str, Leaf], found: Mapping[str, Leaf]) -> bool:
    if stored.keys() != found.keys():
        return False
    for path, leaf in found.items():
        other = stored[path]
        if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
            if leaf is not other and leaf != other:
                return False
        elif (leaf.dtype, leaf.shape) != (other.dtype, other.shape) or not np.array_equal(_bits(leaf), _bits(other)):
            return False
    return True


def _bits(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return array_of(tensor).reshape(-1).view(np.uint8)


@contextlib.contextmanager
def _parents(target: Path) -> Iterator[None]:
    """Make the folders above a checkpoint, clear them of dead saves; if the save fails, what was made goes again."""
    made: list[Path] = []
    try:
        disk.make_folder(target.parent, made)
        disk.sweep(target.parent)
        yield
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


@contextlib.contextmanager
def _refusals(target: Path, size_bytes: int) -> Iterator[None]:
    """Turn what the disk refuses into one line with its fix."""
    try:
        yield
    except OSError as error:
        fix = f"make {target.parent} writable or set another run.dir"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"free {size_bytes / 1e6:.0f} MB or set another run.dir"
        elif error.errno == errno.ENOTDIR:
            fix = f"move {error.filename} out of the way or set another run.dir"
        elif error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "check the disk"
        why = f"not saved ({error.strerror}), older checkpoints are untouched"
        raise CheckpointError(f"{target}: {why}; {fix}") from error
