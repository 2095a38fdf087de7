"""Safetensors in and out: named tensors as others read them.

Guarantees: what is written is there whole or not at all, an index after the files that it names; the same tensors are
the same bytes, whatever process writes them. What is read has the bits that the file holds, in memory of its own. The
format has no checksums: cut files, wrong offsets and names that do not fit together are found, a changed value is not.
All of the format is left to the `safetensors` package, but for two things that it does not do: it writes metadata in
an order that changes from process to process, and it takes the last of two tensors of one name.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lib.errors import CheckpointError
from lib.store import disk
from lib.store.leaves import dtype_name, too_large
from lib.store.names import shown
from lib.store.remote import is_remote, said

__all__ = ["DTYPES", "describe_tensors", "read_metadata", "read_tensors", "write_tensors"]

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
FORMAT: Mapping[str, str] = {"format": "pt"}  # transformers refuses files that do not say so
MOST_HEADER_BYTES = 100_000_000  # of the package, for its headers; here for an index too
COMPARED_BYTES = 4 << 20  # of two files at a time
LISTED = 8  # names in one error line
FIX = "fetch it again or take another file"

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""What the format calls a dtype -> what torch calls it."""


class _Header(NamedTuple):
    """What a file says of itself; of each tensor its dtype and shape."""

    file: Path
    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


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
    _package()
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


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _save(path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    package = _package()
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in named.items():
        one = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = one.untyped_storage().data_ptr()
        plain[name] = one.clone() if memory in seen else one  # the package refuses what shares memory
        seen.add(memory)
    try:
        package.torch.save_file(plain, path, metadata=dict(metadata))
    except package.SafetensorError as error:
        raise OSError(errno.EIO, said(error)) from None
    with open(path, "r+b") as file:
        header = _raw_header(file)
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


def read_tensors(path: str | os.PathLike[str], *, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Read tensors, all of them sorted by name, or those named.

    Args:
        path: a `.safetensors` file; an index of several; or a folder with one such file in it, or one index and the
            files that it names.
        names: which; None = all.

    Returns:
        Tensors on the CPU that own their memory.

    Raises:
        CheckpointError: nothing is there, it is damaged, or it does not fit together; or it lacks a name.
        ValueError: `names` is not a list, or the package is missing.
    """
    if isinstance(names, str):
        raise ValueError(f"names={names!r} must be a list of names; write [{names!r}]")
    headers = _headers(Path(path))
    every = {name for header in headers for name in header.tensors}
    wanted = sorted(every) if names is None else list(names)
    for name in wanted:
        if name not in every:
            near = difflib.get_close_matches(name, every, 1)
            fix = f"did you mean {near[0]!r}?" if near else "correct the name"
            raise CheckpointError(f"{shown(str(path))}: no tensor {name!r} in it, must be there; {fix}")
    found: dict[str, Tensor] = {}
    for header in headers:
        with _opened(header.file) as source:
            for name in header.tensors.keys() & set(wanted):
                found[name] = _read(source, header.file, name)
    return {name: found[name] for name in wanted}


def describe_tensors(path: str | os.PathLike[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """List dtype (`bfloat16`) and shape by name, sorted, without reading the tensors; `path` as for `read_tensors`."""
    headers = _headers(Path(path))
    return dict(sorted(item for header in headers for item in header.tensors.items()))


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read what files say beside their tensors, sorted; `path` as for `read_tensors`.

    Raises:
        CheckpointError: as for `read_tensors`, or files of one index contradict one another.
    """
    found: dict[str, str] = {}
    for header in _headers(Path(path)):
        for key, value in header.metadata.items():
            if found.setdefault(key, value) != value:
                told = f"metadata {key!r} is {value!r}, must be {found[key]!r} as in the files before"
                raise CheckpointError(f"{shown(str(header.file))}: {told}; {FIX}")
    return dict(sorted(found.items()))


def _headers(path: Path) -> list[_Header]:
    """Read the headers of all files that a path stands for, and see that they fit together."""
    source = _source(path) if os.path.isdir(path) else path
    if not source.name.endswith(".json"):
        return [_header(source)]
    places = _weight_map(source)
    headers = [_header(source.parent / name) for name in sorted(set(places.values()))]
    held = {str(header.file): header.tensors for header in headers}
    for tensor, name in places.items():
        if tensor not in held[str(source.parent / name)]:
            told = f"tensor {tensor!r} is not in {name!r}, must be there"
            raise CheckpointError(f"{shown(str(source))}: {told}; fetch all files again")
    for header in headers:
        for tensor in header.tensors:
            where = places.get(tensor)
            if where is None or source.parent / where != header.file:
                told = f"in {where!r} too, must be in one file" if where else f"not in {source.name!r}, must be"
                raise CheckpointError(f"{shown(str(header.file))}: tensor {tensor!r} is {told}; fetch all files again")
    return headers


def _source(folder: Path) -> Path:
    """Choose the file or the index that a folder stands for."""
    try:
        inside = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise _unreadable(folder, error) from error
    files = [name for name in inside if name.endswith(SUFFIX)]
    indexes = [name for name in inside if name.endswith(INDEX)]
    if not indexes and len(files) == 1:
        return folder / files[0]
    if len(indexes) != 1:
        told = f"{len(files)} {SUFFIX} files and {len(indexes)} indexes in it, must be one file or one index"
        raise CheckpointError(f"{shown(str(folder))}: {told}; name the one to read")
    index = folder / indexes[0]
    if strays := sorted(set(files) - {os.path.normpath(name) for name in _weight_map(index).values()}):
        told = f"{strays[0]!r} is in it and not in {index.name!r}, must be there"
        raise CheckpointError(f"{shown(str(folder))}: {told}; name the one to read")
    return index


def _weight_map(index: Path) -> dict[str, str]:
    """Read which tensor is in which file, none of them outside of the index's folder."""
    if _size(index) > MOST_HEADER_BYTES:
        raise CheckpointError(f"{shown(str(index))}: has more than {MOST_HEADER_BYTES} bytes, must be an index; {FIX}")
    try:
        places = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeError) as error:
        want = "must be JSON with a weight_map of tensors to files"
        raise CheckpointError(f"{shown(str(index))}: {said(error)}, {want}; {FIX}") from None
    except OSError as error:
        raise _unreadable(index, error) from error
    home = os.path.realpath(index.parent)
    for name in set(places.values()):
        parts = Path(name).parts
        inside = parts and ".." not in parts and "\0" not in name and name.endswith(SUFFIX)
        if not inside or not os.path.realpath(index.parent / name).startswith(os.path.join(home, "")):
            told = f"{name!r} must be a {SUFFIX} file in its folder; {FIX}"
            raise CheckpointError(f"{shown(str(index))}: {told}")
    return places


def _header(path: Path) -> _Header:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]:
            raise CheckpointError(f"{shown(str(path))}: {twice[0]!r} is twice in its header, must be once; {FIX}")
        return dict(pairs)

    with _opened(path) as source:
        slices = {name: source.get_slice(name) for name in source.keys()}  # noqa: SIM118 (it is no mapping)
        tensors = {name: _about(path, name, one.get_dtype(), one.get_shape()) for name, one in slices.items()}
        with open(path, "rb") as file:
            json.loads(_raw_header(file), object_pairs_hook=once)
        return _Header(path, dict(source.metadata() or {}), tensors)


def _about(path: Path, name: str, code: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Say what a tensor will be, from what its header says."""
    where = f"{shown(str(path))}: tensor {name!r}"
    if (dtype := DTYPES.get(code)) is None:
        raise CheckpointError(f"{where} is {code}, must be one of {', '.join(DTYPES)}; convert it")
    if too_large(tuple(shape), dtype.itemsize):
        raise CheckpointError(f"{where} has shape {tuple(shape)}, must have fewer than 2**63 bytes; {FIX}")
    if code == "F4":  # the header counts numbers, torch counts pairs of them
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"{where} has shape {tuple(shape)}, must have an even last axis; {FIX}")
        shape = (*shape[:-1], shape[-1] // 2)
    return str(dtype).removeprefix("torch."), tuple(shape)


def _read(source: Any, path: Path, name: str) -> Tensor:
    tensor: Tensor = source.get_tensor(name)
    if tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any()):  # a copy would make them 1
        raise CheckpointError(f"{shown(str(path))}: tensor {name!r} is no bool, must hold bytes 0 and 1; {FIX}")
    return tensor.clone()  # what the package gives is the mapped file


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    package = _package()
    _size(path)
    try:
        with package.safe_open(path, framework="pt") as source:
            yield source
    except package.SafetensorError as error:
        raise CheckpointError(f"{shown(str(path))}: {said(error)}, must be a whole {SUFFIX} file; {FIX}") from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _size(path: Path) -> int:
    """Measure a regular file."""
    try:
        facts = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{shown(str(path))}: must be a file that is there; check the path") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(facts.st_mode):
        raise CheckpointError(f"{shown(str(path))}: must be a regular file; check the path")
    return facts.st_size


def _raw_header(file: Any) -> bytes:
    """Read the JSON of a file that the package has opened or written."""
    header: bytes = file.read(int.from_bytes(file.read(8), "little"))
    return header


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    why = error.strerror or said(error)
    return CheckpointError(f"{shown(str(path))}: cannot be read ({why}); make it readable")


def _package() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        lack = "not installed, needed for .safetensors files"
        raise ValueError(f"safetensors: {lack}; pip install 'purestep[safetensors]'") from None
    return safetensors
