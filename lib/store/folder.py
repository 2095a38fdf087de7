"""The folder of a run's checkpoints: which are there, which one to resume from, which may go.

A folder `step_<number>` that has a COMMIT is a checkpoint; order is by number, never by text. One whose COMMIT or
content does not verify is damaged: it is named, never passed over in silence, and set aside only when the caller says
so. One without COMMIT is the rest of something unfinished, and no checkpoint. Here too a path may be a URL.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lib.errors import CheckpointError
from lib.store.local import Folder
from lib.store.manifest import COMMIT, METADATA, decode_attributes
from lib.store.place import Place, place_of
from lib.store.reader import is_committed, verify
from lib.store.remote import said
from lib.store.retention import Policy, Saved, retain

__all__ = [
    "STEP",
    "Where",
    "at_step",
    "committed",
    "inside",
    "latest",
    "newest",
    "newest_place",
    "prune",
    "step_name",
    "sweep",
    "unfinished",
    "where",
]

STEP = re.compile(r"step_([0-9]+)")

Where = Path | str
"""A folder: a path, or a URL as text."""

_Folder = str | os.PathLike[str] | Place


def step_name(step: int) -> str:
    """Name the folder of a checkpoint.

    >>> step_name(1000)
    'step_0000001000'
    """
    return f"step_{step:010d}"


def where(place: Place) -> Where:
    """Write a place as a path, or as a URL."""
    return place.at if isinstance(place, Folder) else str(place)


def inside(folder: Where, name: str) -> Where:
    """Name something in a folder.

    >>> inside("s3://bucket/run", "step_1")
    's3://bucket/run/step_1'
    """
    return folder / name if isinstance(folder, Path) else f"{folder.rstrip('/')}/{name}"


def committed(checkpoints: _Folder) -> list[int]:
    """List the steps whose COMMIT matches their manifest, in order; their data is not read.

    Raises:
        CheckpointError: the folder cannot be read, or one step is there twice.
    """
    return sorted(step for step, place in _claimed(place_of(checkpoints)).items() if is_committed(place))


def newest(checkpoints: _Folder) -> Where | None:
    """Find the greatest step that has a COMMIT, which may be damaged; None when there is none."""
    place = newest_place(place_of(checkpoints))
    return None if place is None else where(place)


def unfinished(checkpoints: _Folder) -> list[Where]:
    """List the folders beyond the newest checkpoint that are named as one and have no COMMIT."""
    place = place_of(checkpoints)
    claimed = _claimed(place)
    last = max(claimed, default=-1)
    try:
        steps = {name: int(match[1]) for name in place.names() if (match := STEP.fullmatch(name))}
    except OSError:
        return []
    return [where(place.child(name)) for name, step in steps.items() if step > last and step not in claimed]


def newest_place(checkpoints: Place) -> Place | None:
    """The same, as a place."""
    claimed = _claimed(checkpoints)
    return claimed[max(claimed)] if claimed else None


def at_step(checkpoints: _Folder, step: int) -> Where:
    """Find the checkpoint of one step, and check every byte of it.

    Raises:
        CheckpointError: it is not there (those that are, are named), or it is damaged (so is the nearest good one).
    """
    place = place_of(checkpoints)
    claimed = _claimed(place)
    if step not in claimed:
        have = ", ".join(map(str, sorted(claimed))) or "none"
        raise CheckpointError(
            f"{place}: no checkpoint of step {step} is there, must be one of {have}; name one of them"
        )
    try:
        verify(claimed[step])
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_nearest(claimed, step)}") from error.__cause__
    return where(claimed[step])


def latest(
    checkpoints: _Folder, *, older: bool = False, aside: Callable[[Where, str], None] | None = None
) -> Where | None:
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
    damaged: list[tuple[Place, str]] = []
    good = None
    for _, place in sorted(_claimed(place_of(checkpoints)).items(), reverse=True):
        try:
            verify(place)
        except CheckpointError as error:
            # What cannot be reached just now may be whole: it is neither passed over nor set aside.
            if isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.EIO:
                raise
            damaged.append((place, str(error)))
        else:
            good = place
            break
    if damaged and good is None:
        raise CheckpointError(f"{damaged[0][1]}; no older checkpoint here verifies, so start anew in another run.dir")
    if damaged and not older:
        raise CheckpointError(f"{damaged[0][1]}; the nearest good one is {good}, load=older takes it")
    for place, reason in damaged:
        moved = _set_aside(place)
        if aside is not None:
            aside(where(moved), reason)
    return None if good is None else where(good)


def prune(
    checkpoints: _Folder,
    policy: Policy,
    *,
    scores: Mapping[int, float] | None = None,
    pinned: Collection[int] = (),
) -> list[int]:
    """Delete the committed checkpoints that `retain` lets go of; return their steps.

    One that is being read stays, and goes another time.

    Raises:
        CheckpointError: one cannot be deleted.
    """
    place = place_of(checkpoints)
    claimed = _claimed(place)
    saved = [_saved(step, claimed[step]) for step in committed(place)]
    gone = []
    for step in sorted(retain(saved, policy, scores=scores or {}, pinned=pinned)):
        try:
            if claimed[step].discard():
                gone.append(step)
        except OSError as error:
            raise CheckpointError(
                f"{claimed[step]}: cannot be deleted ({error.strerror or said(error)}); make {place} writable, "
                f"or set checkpoint.keep=none"
            ) from error
    return gone


def sweep(checkpoints: _Folder) -> list[Where]:
    """Remove what saves and deletions that were killed have left behind; return what was removed."""
    place = place_of(checkpoints)
    try:
        return [where(place.child(name)) for name in place.sweep()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(place, error) from error


def _claimed(checkpoints: Place) -> dict[int, Place]:
    """Folders that claim, by name and COMMIT, to be the checkpoint of a step."""
    found: dict[int, Place] = {}
    try:
        for name in checkpoints.names():
            match = STEP.fullmatch(name)
            if match is None or not checkpoints.child(name).has(COMMIT):
                continue
            step = int(match[1])
            if step in found:
                raise CheckpointError(f"{checkpoints}: {found[step].name} and {name} are both step {step}; remove one")
            found[step] = checkpoints.child(name)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _unreadable(checkpoints, error) from error
    return found


def _saved(step: int, place: Place) -> Saved:
    """What the driver noted of a checkpoint; one that cannot be read is neither old nor temporary."""
    try:
        info: dict[str, Any] = decode_attributes(place.read(METADATA), f"{place}").info
    except (OSError, CheckpointError):
        return Saved(step)
    at = info.get("saved_at_s")
    return Saved(step, float(at) if isinstance(at, (int, float)) else None, info.get("temporary") is True)


def _nearest(claimed: Mapping[int, Place], step: int) -> str:
    for other in sorted(claimed, key=lambda each: (abs(each - step), -each)):
        if other != step:
            try:
                verify(claimed[other])
            except CheckpointError:
                continue
            return f"; the nearest good one is {claimed[other]}"
    return "; no other checkpoint here verifies"


def _unreadable(checkpoints: Place, error: OSError) -> CheckpointError:
    return CheckpointError(f"{checkpoints}: cannot be read ({error.strerror or said(error)}); make it readable")


def _set_aside(place: Place) -> Place:
    """Make a damaged checkpoint none."""
    try:
        return place.set_aside()
    except OSError as error:
        raise CheckpointError(
            f"{place}: is damaged and cannot be renamed ({error.strerror or said(error)}); make {place.parent} writable"
        ) from error
