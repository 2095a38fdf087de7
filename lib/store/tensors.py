"""Safetensors in: named tensors as others wrote them.

Guarantees: what is read has the bits that the file holds, in memory of its own. The format has no checksums: cut files,
wrong offsets and names that do not fit together are found, a changed value is not. All of the format is left to the
`safetensors` package, but that it takes the last of two tensors of one name.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lib.errors import CheckpointError
from lib.store.leaves import too_large
from lib.store.names import shown
from lib.store.remote import said

__all__ = [
    "DTYPES",
    "FORMAT",
    "INDEX",
    "SUFFIX",
    "describe_tensors",
    "package",
    "raw_header",
    "read_metadata",
    "read_tensors",
]

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
FORMAT: Mapping[str, str] = {"format": "pt"}  # transformers refuses files that do not say so
MOST_HEADER_BYTES = 100_000_000  # of the package, for its headers; here for an index too
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
            json.loads(raw_header(file), object_pairs_hook=once)
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
    library = package()
    _size(path)
    try:
        with library.safe_open(path, framework="pt") as source:
            yield source
    except library.SafetensorError as error:
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


def raw_header(file: Any) -> bytes:
    """Read the JSON of a file that the package has opened or written."""
    header: bytes = file.read(int.from_bytes(file.read(8), "little"))
    return header


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    why = error.strerror or said(error)
    return CheckpointError(f"{shown(str(path))}: cannot be read ({why}); make it readable")


def package() -> Any:
    """The `safetensors` package.

    Raises:
        ValueError: it is not there; its extra is named.
    """
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        lack = "not installed, needed for .safetensors files"
        raise ValueError(f"safetensors: {lack}; pip install 'purestep[safetensors]'") from None
    return safetensors
