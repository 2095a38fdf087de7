"""The folder of a run's checkpoints: which are there, which one to resume from, which may go.

A folder `step_<number>` that has a COMMIT is a checkpoint; order is by number, never by text. One whose COMMIT or
content does not verify is damaged: it is named, never passed over in silence, and set aside only when the caller says
so. One without COMMIT is the rest of something unfinished, and no checkpoint.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from lib.errors import CheckpointError
from lib.store import disk
from lib.store.manifest import COMMIT
from lib.store.reader import is_committed, verify
from lib.store.retention import retain

__all__ = ["committed", "latest", "newest", "prune", "step_name", "sweep"]

STEP = re.compile(r"step_([0-9]+)")


def step_name(step: int) -> str:
    """Name the folder of a checkpoint.

    >>> step_name(1000)
    'step_0000001000'
    """
    return f"step_{step:010d}"


def committed(checkpoints: Path) -> list[int]:
    """List the steps whose COMMIT matches their manifest, in order; their data is not read.

    Raises:
        CheckpointError: the folder cannot be read, or one step is there twice.
    """
    return sorted(step for step, folder in _claimed(checkpoints).items() if is_committed(folder))


def newest(checkpoints: Path) -> Path | None:
    """Find the greatest step that has a COMMIT, which may be damaged; None when there is none."""
    claimed = _claimed(checkpoints)
    return claimed[max(claimed)] if claimed else None


def latest(checkpoints: Path, *, older: bool = False, aside: Callable[[Path, str], None] | None = None) -> Path | None:
    """Find the greatest step, and check every byte of it.

    Args:
        checkpoints: a run's folder of checkpoints; it need not be there.
        older: take the greatest one that verifies, and rename the damaged ones above it to `damaged_step_...`.
        aside: is told each damaged one's new path and what was wrong with it.

    Returns:
        A checkpoint that verifies; None when there is none at all.

    Raises:
        CheckpointError: the greatest step is damaged and `older` is false; or no step verifies; or one cannot be read.
    """
    damaged: list[tuple[Path, str]] = []
    good = None
    for _, folder in sorted(_claimed(checkpoints).items(), reverse=True):
        try:
            verify(folder)
        except CheckpointError as error:
            # What cannot be reached just now may be whole: it is neither passed over nor set aside.
            if isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.EIO:
                raise
            damaged.append((folder, str(error)))
        else:
            good = folder
            break
    if damaged and good is None:
        raise CheckpointError(f"{damaged[0][1]}; no older checkpoint here verifies, so start anew in another run.dir")
    if damaged and not older:
        raise CheckpointError(f"{damaged[0][1]}; the nearest good one is {good}, load=older takes it")
    for folder, reason in damaged:
        moved = _set_aside(folder)
        if aside is not None:
            aside(moved, reason)
    return good


def prune(checkpoints: Path, keep: int | None) -> list[int]:
    """Delete the committed checkpoints that `retain` lets go of; return their steps.

    Raises:
        CheckpointError: one cannot be deleted.
    """
    claimed = _claimed(checkpoints)
    gone = sorted(retain(committed(checkpoints), keep))
    for step in gone:
        try:
            disk.discard(claimed[step])
        except OSError as error:
            raise CheckpointError(
                f"{claimed[step]}: cannot be deleted ({error.strerror}); make {checkpoints} writable, "
                f"or set checkpoint.keep=none"
            ) from error
    return gone


def sweep(checkpoints: Path) -> list[Path]:
    """Remove what saves and deletions that were killed have left behind; return what was removed."""
    try:
        return disk.sweep(checkpoints)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(checkpoints, error) from error


def _claimed(checkpoints: Path) -> dict[int, Path]:
    """Folders that claim, by name and COMMIT, to be the checkpoint of a step."""
    found: dict[int, Path] = {}
    try:
        names = sorted(os.listdir(checkpoints))
        for name in names:
            match = STEP.fullmatch(name)
            if match is None or not _is_there(checkpoints / name / COMMIT):
                continue
            step = int(match[1])
            if step in found:
                raise CheckpointError(f"{checkpoints}: {found[step].name} and {name} are both step {step}; remove one")
            found[step] = checkpoints / name
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreadable(checkpoints, error) from error
    return found


def _unreadable(checkpoints: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{checkpoints}: cannot be read ({error.strerror}); make it readable")


def _is_there(path: Path) -> bool:
    """Like `os.path.lexists`, which takes what it may not look at for absent: here that is an error."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is none."""
    target = folder.with_name(f"damaged_{folder.name}")
    number = 2
    while os.path.lexists(target):
        target, number = folder.with_name(f"damaged_{folder.name}_{number}"), number + 1
    try:
        os.rename(folder, target)
        disk.sync(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: is damaged and cannot be renamed ({error.strerror}); make {folder.parent} writable"
        ) from error
    return target
