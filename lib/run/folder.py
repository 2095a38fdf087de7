"""A run folder: config.toml, data.json, metrics.jsonl, run.log, loss.png, checkpoints/; held by one process at a time.

Nothing is written before everything that can be checked has been. A folder made by a start that fails before its first
committed checkpoint is taken away again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from lib.config import Config, run_steps
from lib.errors import CheckpointError
from lib.recipe import Schedule
from lib.sources import Data

__all__ = ["as_toml", "held", "run_folder", "settled", "write_file"]

LOCK = ".lock"
_OURS = (LOCK, "config.toml", "data.json", "metrics.jsonl", "run.log", "checkpoints")
_OF_A_LAUNCH = ("stop", "load", "resume", "inspect", "convert")  # true for one launch, no part of the run


@contextmanager
def held(path: Path, checkpoints: Path | str, begun: Callable[[], bool]) -> Iterator[None]:
    """Hold the folder, and that of its checkpoints where it is another one on a disk, for this process alone.

    Args:
        path: the folder, made if need be; taken away again when nothing has begun in it.
        checkpoints: that of its checkpoints, or its URL, which nobody can hold.
        begun: whether a checkpoint is committed.

    Raises:
        ValueError: another process holds one of them.
        CheckpointError: one of them cannot be made or written.
    """
    with ExitStack() as stack:
        stack.enter_context(_held(path, "run.dir", begun))
        if isinstance(checkpoints, Path) and checkpoints != path / "checkpoints":
            stack.enter_context(_held(checkpoints, "checkpoint.dir", begun))
        yield


@contextmanager
def _held(path: Path, key: str, begun: Callable[[], bool]) -> Iterator[None]:
    above = [p for p in (path, *path.parents) if not p.exists()]
    there = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        _remove(path, _OURS, there, above)
        raise CheckpointError(f"{key}={path}: {error.strerror}, must be writable; set another {key}") from None
    try:
        _lock(descriptor, path, key)
        try:
            yield
        finally:
            if not _surely(begun):
                _remove(path, _OURS, there, above)
    finally:
        os.close(descriptor)


def settled(config: Config, schedule: Schedule, *, threads: int, compiled: bool) -> Config:
    """The config with everything that was left open filled in, so that alone it makes the same run again."""
    replace = msgspec.structs.replace
    return replace(
        config,
        run=replace(config.run, threads=threads),
        steps=run_steps(config),
        tokens=None,
        compile="on" if compiled else "off",
        data=_found_from_anywhere(config.data),
        checkpoint=replace(config.checkpoint, dir=config.checkpoint.dir and _absolute(config.checkpoint.dir)),
        init=replace(config.init, path=config.init.path and _absolute(config.init.path)),
        schedule=schedule,
    )


def as_toml(config: Config) -> str:
    """The config as TOML text that `load_config` reads back; none is left out where it is the default, else written."""
    values, defaults = msgspec.to_builtins(config), msgspec.to_builtins(Config())
    for key in _OF_A_LAUNCH:
        del values[key]
    return tomli_w.dumps(_without_nones(values, defaults))


def write_file(path: Path, data: bytes) -> bool:
    """Write a small file in one rename; a file that holds the data already is left alone.

    Returns:
        Whether something was written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        if path.exists() and path.read_bytes() == data:
            return False
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        with _quietly():
            fresh.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: {error.strerror}, must be writable; free the disk and run again") from None
    return True


def run_folder(config: Config) -> Path:
    """The folder of a run that has been started.

    Raises:
        ValueError: there is none.
    """
    path = Path(config.run.dir)
    if not (path / "config.toml").is_file():
        raise ValueError(f"run.dir={path}: no run there, must be a run folder; train one first or set run.dir")
    return path


def _found_from_anywhere(data: Data) -> Data:
    """The same data with paths that mean the same from any working folder."""
    replace = msgspec.structs.replace
    sources = {
        name: replace(source, path=_anywhere(source.path), template=source.template and _here(source.template))
        for name, source in data.sources.items()
    }
    return replace(
        data,
        path=_anywhere(data.path),
        sources=sources,
        heldout=None if data.heldout is None else _anywhere(data.heldout),
        template=data.template and _here(data.template),
        tokenizer=_here(data.tokenizer),
    )


def _anywhere(paths: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return _absolute(paths) if isinstance(paths, str) else tuple(map(_absolute, paths))


def _here(name: str) -> str:
    """A name that may be a file's."""
    return _absolute(name) if Path(name).exists() else name


def _absolute(path: str) -> str:
    if path.startswith("stdlib:") or "://" in path:
        return path
    return os.path.abspath(path if os.path.lexists(path) else Path(path).expanduser())


def _lock(descriptor: int, path: Path, key: str) -> None:
    """The kernel drops the lock with the process, however it ends; the number in the file is for the message only."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 20, 0).decode().strip()
        raise ValueError(
            f"{key}={path}: process {holder or '(unknown)'} is training here, must be one at a time; "
            f"wait for it or set another {key}"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _surely(begun: Callable[[], bool]) -> bool:
    """Where it cannot be seen, nothing is taken away."""
    try:
        return begun()
    except CheckpointError:
        return True


def _remove(path: Path, names: tuple[str, ...], there: set[str], above: list[Path]) -> None:
    """Take away what this start has made: our files that were not there, then the folders that were not there."""
    for name in (*names, *(f".{name}.new" for name in names)):
        if name in there:
            continue
        target = path / name
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
        else:
            with _quietly():
                target.unlink(missing_ok=True)
    for folder in above:
        with _quietly():
            folder.rmdir()


@contextmanager
def _quietly() -> Iterator[None]:
    """Cleaning up after an error must not hide it."""
    try:
        yield
    except OSError:
        return


def _without_nones(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result[key] = _without_nones(value, defaults.get(key, {}))
        elif value is not None:
            result[key] = value
        elif defaults.get(key) is not None:
            result[key] = "none"
    return result
