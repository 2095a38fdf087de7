"""Files that are opened the same way wherever they are: on a local disk by path, elsewhere by URL through fsspec.

A URL is `scheme://...`; which schemes there are depends on the packages at hand (`s3fs` for `s3://`, ...). Nothing is
tried again beyond what these packages do of themselves, and nothing is kept on the local disk. Each of them has its own
kinds of error, so whatever one of them raises becomes a `DataError` that names the URL.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from lib.errors import DataError
from lib.store.names import HIDDEN, passed_over, shown, unreadable

__all__ = ["Remote", "binary", "exists", "is_remote", "list_remote", "open_binary", "said"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::.*)?://")  # also one within another, which nobody here reads

T = TypeVar("T")


class Remote(NamedTuple):
    """A file that was found elsewhere.

    Attributes:
        name: relative to what was named, with `/` between folders.
        url: where it is.
        size: bytes in it.
        named: named by the user, not met in a folder or by a pattern.
    """

    name: str
    url: str
    size: int
    named: bool


def is_remote(item: str) -> bool:
    """Tell a URL from a local path.

    >>> is_remote("s3://bucket/a.jsonl"), is_remote("C:/a"), is_remote("stdlib:")
    (True, False, False)
    """
    return _SCHEME.match(item) is not None


def open_binary(path: str) -> BinaryIO:
    """Open a file for reading.

    Raises:
        DataError: it is not there, it may not be read, or the package for its kind of URL is missing.
    """
    if not is_remote(path):
        try:
            return open(path, "rb")
        except OSError as error:
            raise unreadable(path, error.strerror) from None
    files, inside = _filesystem(path)
    return _asked(path, lambda: cast(BinaryIO, files.open(inside, "rb")))


@contextmanager
def binary(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading; whatever goes wrong with it until it is shut is a `DataError` that names it."""
    with open_binary(path) as file:
        try:
            yield file
        except OSError as error:
            raise unreadable(path, error.strerror or said(error)) from None
        except Exception as error:
            if isinstance(error, DataError) or not is_remote(path):
                raise
            raise DataError(f"{shown(path)}: cannot be read ({said(error)}); download it first") from None


def exists(path: str) -> bool:
    """Tell whether there is a file."""
    if not is_remote(path):
        return os.path.isfile(path)
    files, inside = _filesystem(path)
    return _asked(path, lambda: bool(files.isfile(inside)))


def list_remote(item: str, skipped: Counter[str]) -> list[Remote]:
    """Find the files that a URL means: a file, all files below a folder, or those that fit a pattern.

    A named file is taken literally, whatever its name is made of; of those met in a folder or by a pattern, hidden ones
    and what editors and downloads leave behind are passed over. Over HTTP there are no folders, so there a URL is one
    file.

    Args:
        item: the URL.
        skipped: counts by cause, added to.

    Returns:
        The files, in the order of their names.

    Raises:
        DataError: nothing is there, or it cannot be looked at.
    """
    files, inside = _filesystem(item)
    web = _on_web(item)
    pattern = not web and any(mark in inside for mark in "*?[")
    if pattern and not _asked(item, lambda: files.exists(inside)):
        plain = re.split(r"[*?\[]", inside, maxsplit=1)[0]
        return _met(item, files, plain.rpartition("/")[0], lambda: files.glob(inside, detail=True), skipped)
    about = _asked(item, lambda: files.info(inside))
    if about["type"] == "directory":
        return _met(item, files, about["name"].rstrip("/"), lambda: files.find(inside, detail=True), skipped)
    if about.get("size") is None:
        raise DataError(f"{shown(item)}: its server does not tell its size, must tell it; download it first")
    if web:
        _check_parts(item, int(about["size"]))
    # What follows a question mark on the web is no part of the file's name.
    name = (inside.partition("?")[0] if web else inside).rpartition("/")[2]
    return [Remote(name, item if web else files.unstrip_protocol(about["name"]), int(about["size"]), True)]


def _check_parts(url: str, size: int) -> None:
    """Refuse a server that only gives whole files, which shows when one asks for less."""
    with binary(url) as file:
        try:
            file.seek(min(1, size))
            file.read(1)
        except ValueError:
            lack = "its server does not give parts of files, must do"
            raise DataError(f"{shown(url)}: {lack}; download it first") from None


def said(error: BaseException) -> str:
    """Give on one line what an error says."""
    return " ".join(str(error).split()) or type(error).__name__


def _met(
    item: str, files: Any, root: str, look: Callable[[], dict[str, dict[str, Any]]], skipped: Counter[str]
) -> list[Remote]:
    found = []
    for path, about in sorted(_asked(item, look).items()):
        if about["type"] != "file":
            continue
        name = path.removeprefix(root).strip("/")
        *folders, own = name.split("/")
        cause = HIDDEN if any(passed_over(folder) == HIDDEN for folder in folders) else passed_over(own)
        if cause is not None:
            skipped[cause] += 1
        else:
            found.append(Remote(name, files.unstrip_protocol(path), int(about["size"]), False))
    if not found:
        raise DataError(f"{shown(item)}: no file there; check the URL")
    return found


def _on_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def _filesystem(url: str) -> tuple[Any, str]:
    if "::" in url:
        raise DataError(f"{shown(url)}: one URL within another, must be one alone; unpack what it is in")
    try:
        import fsspec  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        lack = "fsspec is not installed, must be there to read URLs"
        raise DataError(f"{shown(url)}: {lack}; pip install 'purestep[remote]'") from None
    files, inside = _asked(url, lambda: fsspec.core.url_to_fs(url))
    return files, inside


def _asked(url: str, ask: Callable[[], T]) -> T:
    """Ask a filesystem for something."""
    try:
        return ask()
    except FileNotFoundError as error:
        raise DataError(f"{shown(url)}: {_absence(error.__cause__)}") from None
    except ImportError:  # fsspec has the name of the kind, and the package behind it is not there
        kind = url.partition("://")[0]
        lack = f"the package that reads {kind}:// is not installed, must be there"
        raise DataError(f"{shown(url)}: {lack}; pip install 'purestep[remote]'") from None
    except Exception as error:  # noqa: BLE001 - each filesystem has errors of its own
        raise DataError(f"{shown(url)}: cannot be read ({said(error)}); check the URL and your rights") from None


def _absence(cause: BaseException | None) -> str:
    """Say why something is not found: over HTTP a server that is not reached is no more than a cause of that."""
    if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in (404, 410):
        return "no such file or folder; check the URL"
    if (status := getattr(cause, "status", None)) is not None:
        return f"cannot be read (its server answers {status}); check the URL and your rights"
    why = getattr(getattr(cause, "os_error", None), "strerror", None) or said(cause)
    return f"cannot be reached ({why}); check the URL and the network"
