"""Safetensors out: named tensors as others read them.

Guarantees: what is written is there whole or not at all, an index after the files that it names; the same tensors are
the same bytes, whatever process writes them: the `safetensors` package writes metadata in an order that changes from
process to process, which is put right here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.errors import CheckpointError
from lib.store import disk
from lib.store.leaves import dtype_name
from lib.store.names import shown
from lib.store.remote import is_remote, said
from lib.store.tensors import DTYPES, FORMAT, INDEX, SUFFIX, package, raw_header

__all__ = ["write_tensors"]

COMPARED_BYTES = 4 << 20  # of two files at a time


def write_tensors(
    path: str | os.PathLike[str],
    named: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] = FORMAT,
    most_bytes: int | None = None,
) -> list[Path]:
    """Write tensors as one `.safetensors` file, or as several with an index when they do not fit in one.

    Tensors that share memory are stored each by itself. Writing the same again at the same place changes nothing.

    Args:
        path: the file, as in `out/model.safetensors`; several are `model-00001-of-00003.safetensors`, ..., with
            `model.safetensors.index.json`, as at Hugging Face. Folders above are made.
        named: any dtype in `DTYPES`, any device.
        metadata: what the files say beside their tensors; `format: pt` is added.
        most_bytes: most bytes of tensors in a file, >= 1; a larger tensor has a file of its own. None = one file.

    Returns:
        The files, the index last.

    Raises:
        CheckpointError: a tensor cannot be stored (it is named), something else is there, or the disk refuses; the disk
            is then as it was.
        ValueError: `path` has another ending, `metadata` is not of strings, or the package is missing.
    """
    if is_remote(os.fspath(path)):
        raise ValueError(
            f"{os.fspath(path)}: must be a local path, {SUFFIX} is not written to URLs; convert to a local file"
        )
    target = Path(path)
    if not target.name.endswith(SUFFIX) or target.name == SUFFIX:
        raise ValueError(f"{shown(str(target))}: must be named <name>{SUFFIX}; rename it")
    if most_bytes is not None and most_bytes < 1:
        raise ValueError(f"most_bytes={most_bytes} must be >= 1; raise it")
    for key, value in metadata.items():
        if not _is_text(key) or not _is_text(value):
            raise ValueError(f"metadata: {key!r}={value!r} must be two strings; convert them")
    for name, tensor in named.items():
        _check_tensor(name, tensor)
    package()
    shards = _shards(named, most_bytes)
    stem, several = target.name.removesuffix(SUFFIX), len(shards) > 1
    names = [f"{stem}-{i:05}-of-{len(shards):05}{SUFFIX}" for i in range(1, len(shards) + 1)]
    names = [*names, stem + INDEX] if several else [target.name]
    with _refusals(target), _folder(target.parent) as folder:
        for name, shard in zip(names, shards, strict=not several):
            _save(folder / name, {key: named[key] for key in shard}, {**FORMAT, **metadata})
        if several:
            total = sum(tensor.nbytes for tensor in named.values())
            where = {key: name for name, shard in zip(names, shards, strict=False) for key in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / names[-1]).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name in names:
            _sync_file(folder / name)
        # The other form of the same name would leave it open which of the two is meant.
        _place(folder, names, target.parent, without=target.name if several else stem + INDEX)
    return [target.parent / name for name in names]


def _shards(named: Mapping[str, Tensor], most_bytes: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, tensor in named.items():
        if most_bytes is not None and shards[-1] and held + tensor.nbytes > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensor.nbytes
    return shards


def _check_tensor(name: Any, value: Any) -> None:
    where = f"tensor {name!r}"
    if not _is_text(name) or name == "__metadata__":
        raise CheckpointError(f"{where}: must be named by text other than '__metadata__'; rename it")
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{where}: a {type(value).__name__} must be a tensor; make it one or drop it")
    if value.layout != torch.strided or value.is_meta or hasattr(value, "__tensor_flatten__"):
        raise CheckpointError(f"{where}: must be a plain dense tensor with data; make it one or drop it")
    if value.dtype not in DTYPES.values():
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
        raise CheckpointError(f"{where}: dtype={dtype_name(value)} must be one of {known}; convert it or drop it")
    if value.dtype == torch.float4_e2m1fn_x2 and not value.ndim:
        raise CheckpointError(f"{where}: a pair of 4-bit floats must have an axis to lie on; reshape it to (1,)")


def _save(path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    library = package()
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        one = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = one.untyped_storage().data_ptr()
        plain[name] = one.clone() if memory in seen else one  # the package refuses what shares memory
        seen.add(memory)
    try:
        library.torch.save_file(plain, path, metadata=dict(metadata))
    except library.SafetensorError as error:
        raise OSError(errno.EIO, said(error)) from None
    with open(path, "r+b") as file:
        header = raw_header(file)
        told = json.loads(header)
        told["__metadata__"] = dict(sorted(told["__metadata__"].items()))
        ordered = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode().ljust(len(header))
        assert len(ordered) == len(header)
        file.seek(8)
        file.write(ordered)


def _place(folder: Path, names: Sequence[str], into: Path, *, without: str) -> None:
    """Move new files to where they belong, all or none; those that are there with the same bytes stay."""
    taken = [name for name in names if os.path.lexists(into / name)]
    other = [name for name in taken if not _same(folder / name, into / name)]
    if other := [*other, *[without] * os.path.lexists(into / without)]:
        raise CheckpointError(
            f"{shown(str(into / other[0]))}: is there already, must be a new file; choose another path"
        )
    new = [name for name in names if name not in taken]
    try:
        for name in new:
            os.rename(folder / name, into / name)
        disk.sync(into)
    except BaseException:
        for name in new:
            if not os.path.lexists(folder / name):
                with contextlib.suppress(OSError):
                    os.unlink(into / name)
        raise


def _same(one: Path, other: Path) -> bool:
    facts = os.lstat(other)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size != os.lstat(one).st_size:
        return False
    with open(one, "rb") as ours, open(other, "rb") as theirs:
        pieces = (iter(partial(file.read, COMPARED_BYTES), b"") for file in (ours, theirs))
        return all(a == b for a, b in zip(*pieces, strict=False))


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """Make a hidden folder in one that is made if need be; if the block fails, what was made goes again."""
    made: list[Path] = []
    try:
        disk.make_folder(parent, made)
        disk.sweep(parent)
        with disk.temporary(parent) as folder:
            yield folder
    except BaseException:
        for step in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(step)
        raise


@contextlib.contextmanager
def _refusals(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
        fix = "choose another path" if denied else "check the disk"
        raise CheckpointError(f"{shown(str(target))}: not written ({error.strerror or said(error)}); {fix}") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
