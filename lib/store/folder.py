"""The folder of a run's checkpoints: which are there, which one to resume from, which may go.

A folder `step_<number>` that has a COMMIT is a checkpoint; order is by number, never by text. One whose COMMIT or
content does not verify is damaged: it is named, never passed over in silence, and set aside only when the caller says
so. One without COMMIT is the rest of something unfinished, and no checkpoint. Here too a path may be a URL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from lib.errors import CheckpointError
from lib.store.manifest import COMMIT, METADATA, decode_attributes
from lib.store.place import Place, Where, place_of
from lib.store.reader import is_committed, verify
from lib.store.remote import said
from lib.store.retention import Policy, Saved, retain

__all__ = [
    "STEP",
    "at_step",
    "committed",
    "latest",
    "nearest_named",
    "newest",
    "newest_place",
    "prune",
    "step_name",
    "sweep",
    "unfinished",
]

STEP = re.compile(r"step_([0-9]+)")

_Folder = str | os.PathLike[str] | Place


def step_name(step: int) -> str:
    """Name the folder of a checkpoint.

    >>> step_name(1000)
    'step_0000001000'
    """
    return f"step_{step:010d}"


def committed(checkpoints: _Folder) -> list[int]:
    """List the steps whose COMMIT matches their manifest, in order; their data is not read.

    Raises:
        CheckpointError: the folder cannot be read, or one step is there twice.
    """
    return sorted(step for step, place in _claimed(place_of(checkpoints)).items() if is_committed(place))


def newest(checkpoints: _Folder) -> Where | None:
    """Find the greatest step that has a COMMIT, which may be damaged; None when there is none."""
    place = newest_place(place_of(checkpoints))
    return None if place is None else place.where


def unfinished(checkpoints: _Folder) -> list[Where]:
    """List the folders beyond the newest checkpoint that are named as one and have no COMMIT."""
    place = place_of(checkpoints)
    claimed = _claimed(place)
    last = max(claimed, default=-1)
    try:
        steps = {name: int(match[1]) for name in place.names() if (match := STEP.fullmatch(name))}
    except OSError:
        return []
    return [place.child(name).where for name, step in steps.items() if step > last and step not in claimed]


def newest_place(checkpoints: Place) -> Place | None:
    """The same, as a place."""
    claimed = _claimed(checkpoints)
    return claimed[max(claimed)] if claimed else None


def at_step(checkpoints: _Folder, step: int) -> Where:
    """Find the checkpoint of one step; it may be damaged.

    Raises:
        CheckpointError: it is not there; those that are, are named.
    """
    place = place_of(checkpoints)
    claimed = _claimed(place)
    if step not in claimed:
        have = ", ".join(map(str, sorted(claimed))) or "none"
        raise CheckpointError(
            f"{place}: no checkpoint of step {step} is there, must be one of {have}; name one of them"
        )
    return claimed[step].where


@contextlib.contextmanager
def nearest_named(place: Place) -> Iterator[None]:
    """Whoever finds a checkpoint of a run damaged also says which good one is nearest to it."""
    try:
        yield
    except CheckpointError as error:
        match = STEP.fullmatch(place.name)
        if match is None or _may_be_whole(error):
            raise
        raise CheckpointError(f"{error}{_nearest(place.parent, int(match[1]))}") from error.__cause__


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
    for _, place in sorted(_claimed(place_of(checkpoints)).items(), reverse=True):
        try:
            # The error of the greatest one names the nearest good one, so nothing below needs to be looked at for it.
            with contextlib.nullcontext() if older else nearest_named(place):
                verify(place)
        except CheckpointError as error:
            if not older or _may_be_whole(error):
                raise
            damaged.append((place, str(error)))
            continue
        for other, reason in damaged:
            moved = _set_aside(other)
            if aside is not None:
                aside(moved.where, reason)
        return place.where
    if damaged:
        raise CheckpointError(f"{damaged[0][1]}{_nearest(damaged[0][0].parent, max(_claimed(place_of(checkpoints))))}")
    return None


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
        return [place.child(name).where for name in place.sweep()]
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


def _may_be_whole(error: CheckpointError) -> bool:
    """What cannot be reached just now is neither passed over nor set aside."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.EIO


def _nearest(checkpoints: Place, step: int) -> str:
    """What to add to the error of a damaged checkpoint: the nearest good one, an older one first."""
    claimed = _claimed(checkpoints)
    last = step == max(claimed, default=step)
    for other in sorted(claimed, key=lambda each: (each > step, abs(each - step))):
        if other != step:
            try:
                verify(claimed[other])
            except CheckpointError:
                continue
            return f"; the nearest good one is {claimed[other]}{', load=older takes it' if last else ''}"
    return f"; no {'older' if last else 'other'} checkpoint here verifies, so start anew in another run.dir"


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
