"""Which files a path means: a file, a folder, a pattern, the standard library, or a list of these.

A named file is taken literally, whatever its name is made of. A folder means all files in it and in its sub-folders.
In a pattern `*`, `?` and `[a-z]` stay within a name and `**` stands for any number of folders; it picks files, not
folders. Each real file counts once. Passed over, and counted by cause: hidden names, and what editors and downloads
leave behind. Links are followed, but a link to a folder that holds the corpus is a loop. What is broken or shut stops
everything.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from lib.errors import DataError
from lib.store.names import HIDDEN, passed_over, shown, unreadable
from lib.store.remote import is_remote, list_remote

__all__ = ["STDLIB", "Found", "find", "refuse", "stamp"]

STDLIB = "stdlib:"


class Found(NamedTuple):
    """A file that was found.

    Attributes:
        name: relative to what was named, with `/` between folders.
        path: where it is.
        size: bytes in it when it was looked at.
        named: named by the user, not met in a folder or by a pattern.
    """

    name: str
    path: str
    size: int
    named: bool


class _Met(NamedTuple):
    name: str
    path: str
    linked: bool
    named: bool


def find(items: Sequence[str], skipped: Counter[str]) -> list[Found]:
    """Find the regular files that these paths mean, each real one once.

    Args:
        items: paths, patterns or `stdlib:`.
        skipped: counts by cause, added to.

    Returns:
        The files, in no order that means anything.

    Raises:
        DataError: a path or pattern means nothing, or something cannot be looked at.
    """
    met, found = list[_Met](), list[Found]()
    for item in items:
        if is_remote(item):
            found += [Found(*each) for each in list_remote(item, skipped)]
            continue
        root, some = _meet(item, skipped)
        # Two folders of a list may hold the same names, so there the folder's own name goes first.
        met += [each if each.named or len(items) == 1 else each._replace(name=f"{root}/{each.name}") for each in some]
    once = {each.path: each for each in found}
    if len(once) < len(found):
        skipped["file met again"] += len(found) - len(once)
    return [*_once(met, skipped), *once.values()]


def refuse(found: Found, cause: str, fix: str, skipped: Counter[str]) -> None:
    """Pass over and count a file that was met; a file that was named is an error."""
    if found.named:
        raise DataError(f"{shown(found.path)}: {cause}; {fix}")
    skipped[cause] += 1


def stamp(path: str) -> tuple[int, ...]:
    """What tells that a file was written to meanwhile; never what tells that it is the same."""
    if is_remote(path):
        return (list_remote(path, Counter())[0].size,)
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error.strerror) from None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _meet(item: str, skipped: Counter[str]) -> tuple[str, list[_Met]]:
    """Meet the files of one item; also the name of the folder that their names are relative to."""
    if item == STDLIB:
        return "stdlib", _stdlib(skipped)
    if not os.path.lexists(item) and item.startswith("~"):
        item = os.path.expanduser(item)
    if os.path.isdir(item):
        return os.path.basename(os.path.abspath(item)), list(_walk(item, skipped))
    if os.path.lexists(item):
        return "", [_Met(os.path.basename(item), item, os.path.islink(item), True)]
    if not any(mark in item for mark in "*?["):
        raise DataError(f"{shown(item)}: no such file or folder; name files or folders that are there")
    return _match(item, skipped)


def _match(pattern: str, skipped: Counter[str]) -> tuple[str, list[_Met]]:
    parts = pattern.split("/")
    plain = next(n for n, part in enumerate(parts) if any(mark in part for mark in "*?["))
    root, rest = "/".join(parts[:plain]) or ("/" if pattern.startswith("/") else "."), parts[plain:]
    some: list[_Met] = []
    if os.path.isdir(root):
        some = list(_walk(root, skipped, lambda name, folder: _fits(name.split("/"), rest, folder=folder)))
    if not some:
        raise DataError(f'{shown(pattern)}: matches no text file; check the pattern ("**" enters sub-folders)')
    return os.path.basename(os.path.abspath(root)), some


def _fits(parts: Sequence[str], pattern: Sequence[str], *, folder: bool) -> bool:
    """Tell whether a file matches; for a folder, whether something in it could."""
    if not parts or not pattern:
        return not parts and folder == bool(pattern)
    if pattern[0] == "**":
        return folder or any(_fits(parts[n:], pattern[1:], folder=folder) for n in range(len(parts) + 1))
    return fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:], folder=folder)


def _stdlib(skipped: Counter[str]) -> list[_Met]:
    # The folder that holds os.py is the standard library's, also within a virtual environment.
    root = os.path.dirname(os.path.realpath(os.__file__))

    def wanted(name: str, folder: bool) -> bool:
        leaf, path = name.rpartition("/")[2], os.path.join(root, name)
        if leaf in ("site-packages", "dist-packages", "__pycache__") or not (folder or leaf.endswith(".py")):
            return False
        # Some systems keep a setting of the machine here, as a link to it.
        return not os.path.islink(path) or (os.path.exists(path) and _holds(root, os.path.realpath(path)))

    return list(_walk(root, skipped, wanted))


def _walk(root: str, skipped: Counter[str], wanted: Callable[[str, bool], bool] | None = None) -> Iterator[_Met]:
    """Go through a folder; each real folder is entered once, by its own name rather than a link's where it has both."""
    above, entered = os.path.realpath(root), set[tuple[int, int]]()
    own, linked = [("", root, False)], list[tuple[str, str, bool]]()
    while own or linked:
        base, folder, through = own.pop() if own else linked.pop(0)
        status, inside = _listed(folder)
        if (status.st_dev, status.st_ino) in entered:
            skipped["folder met again"] += 1
            continue
        entered.add((status.st_dev, status.st_ino))
        for each in inside:
            name, link = base + each.name, each.is_symlink()
            # A link may lead nowhere, and os.path, unlike DirEntry, calls that no folder instead of raising.
            is_folder = os.path.isdir(each.path) if link else each.is_dir()
            if wanted and not wanted(name, is_folder):
                continue
            cause = passed_over(each.name)
            if cause is not None and (cause == HIDDEN or not is_folder):
                skipped[cause] += 1
            elif not is_folder:
                yield _Met(name, each.path, through or link, False)
            elif link and _holds(os.path.realpath(each.path), above):
                skipped["link loop"] += 1
            else:
                (linked if link else own).append((name + "/", each.path, through or link))


def _listed(folder: str) -> tuple[os.stat_result, list[os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as inside:
            return os.stat(folder), sorted(inside, key=lambda each: os.fsencode(each.name))
    except OSError as error:
        cause = f"cannot be listed ({error.strerror})"
        raise DataError(f"{shown(folder)}: {cause}; allow reading or move it away") from None


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(os.path.join(folder, ""))


def _once(met: Sequence[_Met], skipped: Counter[str]) -> list[Found]:
    """Keep each real file once: by the name given rather than met, its own rather than a link's, the first of them."""
    kept: dict[tuple[int, int], Found] = {}
    for each in sorted(met, key=lambda one: (not one.named, one.linked, os.fsencode(one.name))):
        try:
            status = os.stat(each.path)
        except OSError as error:
            what = "a link that leads nowhere" if os.path.islink(each.path) else f"cannot be read ({error.strerror})"
            raise DataError(f"{shown(each.path)}: {what}; repair it or remove it") from None
        found = Found(each.name, each.path, status.st_size, each.named)
        if not stat.S_ISREG(status.st_mode):
            refuse(found, "not a regular file", "give a file or a folder", skipped)
        elif (status.st_dev, status.st_ino) in kept:
            skipped["file met again"] += 1
        else:
            kept[status.st_dev, status.st_ino] = found
    return list(kept.values())
