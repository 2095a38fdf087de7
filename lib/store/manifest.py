"""The table of contents of a checkpoint, and what every file in it has to be.

`manifest.json` names each node of the state, in the state's order, with shape, logical dtype and cut of its array,
and each file with its size and the crc32c of each of its chunks. `COMMIT` holds the manifest's own sha256 (in the form
that `sha256sum -c COMMIT` reads). A manifest that decodes here is consistent in itself: its files are exactly those its
nodes call for, so nothing is allocated or opened on the word of a damaged or hostile one. Nothing here opens a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from lib.errors import CheckpointError
from lib.store.leaves import RECIPE, STORED, check_names, state_path, too_large
from lib.store.shards import Layout, array_json, count, crc32c, file_size, group_json, keys, stored

__all__ = [
    "COMMIT",
    "FIX",
    "FORMAT",
    "MANIFEST",
    "METADATA",
    "Array",
    "Attributes",
    "File",
    "Manifest",
    "Node",
    "commit_of",
    "decode",
    "decode_attributes",
    "documents",
    "encode",
    "encode_attributes",
    "file_of",
    "owner",
]

FORMAT = 1
COMMIT = "COMMIT"
MANIFEST = "manifest.json"
METADATA = "zarr.json"
FIX = "restore it or take another checkpoint"

Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Cell = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """A file: size in bytes, and the crc32c of each chunk in it, in order, as eight hex digits each; a text is one chunk."""

    size: Size
    crc32c: Annotated[str, Meta(pattern="^([0-9a-f]{8})*$")]

    def checksum(self, number: int) -> bytes:
        """The crc32c of a chunk, as it stands in the file."""
        return bytes.fromhex(self.crc32c[8 * number : 8 * number + 8])


class Array(Struct, frozen=True, forbid_unknown_fields=True):
    """A leaf: logical dtype, and `shards.Layout`."""

    dtype: str
    shape: tuple[Size, ...]
    chunk: tuple[Cell, ...]
    shard: tuple[Cell, ...] | None

    @property
    def layout(self) -> Layout:
        """The cut, as arithmetic."""
        return Layout(self.shape, self.chunk, self.shard)


Node = Array | Literal["group", "recipe"]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """All nodes of a state by path, and all files but the manifest and COMMIT."""

    format: int
    nodes: dict[str, Node]
    files: dict[str, File]


class Attributes(Struct, frozen=True, forbid_unknown_fields=True):
    """What the root group says of the checkpoint; `info` is for people and warnings, never for the state."""

    format: int
    versions: dict[str, str]
    info: dict[str, Any]
    recipe: dict[str, Any] | UnsetType = UNSET


class _Attributes(Struct, frozen=True, forbid_unknown_fields=True):
    purestep: Attributes


class _Root(Struct, frozen=True, forbid_unknown_fields=True):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: _Attributes


class _Format(Struct, frozen=True):
    format: int


def encode(manifest: Manifest) -> bytes:
    """Write a manifest; files in sorted order, so equal ones have equal bytes."""
    ordered = Manifest(manifest.format, manifest.nodes, dict(sorted(manifest.files.items())))
    return msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n"


def file_of(size: int, checksums: Iterable[bytes]) -> File:
    """Describe a file.

    Args:
        size: in bytes.
        checksums: crc32c of each of its chunks.
    """
    return File(size, b"".join(checksums).hex())


def commit_of(manifest: bytes) -> bytes:
    """Write the COMMIT of a manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def decode(data: bytes, where: str) -> Manifest:
    """Read a manifest, and check that nodes and files belong together.

    Raises:
        CheckpointError: another format, or contradictions; the message starts with `where`.
    """
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version != FORMAT:
            raise CheckpointError(f"{where}: format={version} must be {FORMAT}; read it with a newer purestep")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: is no manifest ({error}); {FIX}") from None
    _check_nodes(manifest, where)
    _check_files(manifest, where)
    return manifest


def encode_attributes(attributes: Attributes) -> bytes:
    """Write the root group's `zarr.json`."""
    return group_json({"purestep": attributes})


def decode_attributes(data: bytes, where: str) -> Attributes:
    """Read the root group's `zarr.json`.

    Raises:
        CheckpointError: it is not the root of a checkpoint of this format.
    """
    try:
        attributes = msgspec.json.decode(data, type=_Root).attributes.purestep
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: is no root of a checkpoint ({error}); {FIX}") from None
    if attributes.format != FORMAT:
        raise CheckpointError(f"{where}: format={attributes.format} must be {FORMAT}; {FIX}")
    return attributes


def documents(nodes: dict[str, Node]) -> dict[str, bytes]:
    """Write the `zarr.json` of each node below the root, by file name."""
    written = {}
    for path, node in nodes.items():
        if isinstance(node, Array):
            attributes = {"logical_dtype": node.dtype}
            written[f"{path}/{METADATA}"] = array_json(node.layout, STORED[node.dtype][1], attributes)
        elif node == "group":
            written[f"{path}/{METADATA}"] = group_json({})
    return written


def owner(manifest: Manifest, name: str) -> str | None:
    """Path of the node that a file belongs to; None for a file that belongs to none."""
    while name:
        name = name.rpartition("/")[0]
        if name in manifest.nodes:
            return name
    return None


def _check_nodes(manifest: Manifest, where: str) -> None:
    siblings: dict[str, list[str]] = {"": []}
    for path, node in manifest.nodes.items():
        above, _, name = path.rpartition("/")
        if above not in siblings or path != (f"{above}/{name}" if above else name):
            raise CheckpointError(f"{where}: {state_path(path)} must lie in a group named before it; {FIX}")
        siblings[above].append(name)
        if node == "group":
            siblings[path] = []
        elif isinstance(node, Array):
            _check_array(path, node, where)
        elif path != RECIPE:
            raise CheckpointError(f"{where}: {state_path(path)} must not be a recipe; {FIX}")
    try:
        for above, names in siblings.items():
            check_names(f"{above}/" if above else "", names)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _check_array(path: str, array: Array, where: str) -> None:
    shard = array.shard or array.chunk
    if (
        array.dtype not in STORED
        or not len(array.shape) == len(array.chunk) == len(shard) <= 64
        or too_large(array.shape, STORED[array.dtype][1].itemsize)
        or any(
            chunk > max(1, n) or outer % chunk or outer >= max(1, n) + chunk
            for n, chunk, outer in zip(array.shape, array.chunk, shard, strict=True)
        )
    ):
        raise CheckpointError(f"{where}: {state_path(path)} has an impossible dtype, shape or cut; {FIX}")


def _check_files(manifest: Manifest, where: str) -> None:
    arrays = {path: node for path, node in manifest.nodes.items() if isinstance(node, Array)}
    # Counted before anything is listed: a shape of 2**60 must cost nothing.
    if sum(count(array.layout) for array in arrays.values()) > len(manifest.files):
        raise CheckpointError(f"{where}: its arrays call for more files than it lists; {FIX}")
    have = {name: (file.size, len(file.crc32c)) for name, file in manifest.files.items()}
    want = {METADATA: (have.get(METADATA, (0, 0))[0], 8)}
    for path, array in arrays.items():
        itemsize = STORED[array.dtype][1].itemsize
        for index, key in keys(array.layout):
            want[f"{path}/{key}"] = file_size(array.layout, itemsize, index), 8 * stored(array.layout, index)
    for name, data in documents(manifest.nodes).items():
        want[name] = len(data), 8
        if name in have and manifest.files[name].checksum(0) != crc32c(data):
            raise CheckpointError(f"{where}: {name} must say of its node what the manifest says; {FIX}")
    for name, _ in sorted(want.items() ^ have.items()):
        raise CheckpointError(f"{where}: {name} is not as its nodes call for; {FIX}")
