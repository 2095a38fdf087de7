"""Where the bytes of one array stand on disk: Zarr v3 chunks and shards, put together without Zarr.

Guarantees: any Zarr v3 reader gives back the bits; each chunk carries a crc32c; a chunk that is all fill value is
stored like any other; one file is written by one writer, in one go. Nothing here opens a file. The work is done by
hand because it is several times faster than zarr-python's sharded writer, which also reads a shard back for each part
of it that is written.

A file of chunks: raw little-endian bytes, crc32c (4 bytes), the next chunk, ...; a shard ends with its index: per
chunk of its grid, in C order, offset and length as uint64 (both 2**64 - 1 for a chunk wholly outside of the array),
then a crc32c of the index. A ragged chunk is padded to its full size with zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout", "array_json", "count", "file_size", "fill", "group_json", "keys", "pieces", "plan"]

CHUNK_BYTES = 4 << 20  # the unit a reader fetches; 1-16 MB reads well from disks and from object stores
LARGEST_CHUNK_BYTES = 16 << 20
SHARD_BYTES = 128 << 20  # the unit a writer writes; small enough that one large leaf still keeps several threads busy
CRC_BYTES = 4
ABSENT = 2**64 - 1  # Zarr v3 sharding: offset and length of a chunk that is not stored

Index = tuple[int, ...]
Bytes = NDArray[np.uint8]


class Layout(NamedTuple):
    """How an array is cut.

    Attributes:
        shape: of the array.
        chunk: shape of a chunk, each dim >= 1.
        shard: shape of a file, a multiple of `chunk`; None = a chunk is a file.
    """

    shape: Index
    chunk: Index
    shard: Index | None


def plan(shape: Index, itemsize: int) -> Layout:
    """Cut an array into chunks of 1-16 MB that are contiguous in memory, and shards of at most 128 MB.

    A leaf no larger than 4 MB is one plain chunk. A larger one is cut along the first axis whose rows fit into a chunk,
    into even parts, so that padding stays below one row a part.

    >>> plan((32, 4096, 4096), 4)
    Layout(shape=(32, 4096, 4096), chunk=(1, 256, 4096), shard=(1, 4096, 4096))
    """
    whole = tuple(max(1, n) for n in shape)
    if 0 in shape or math.prod(shape) * itemsize <= CHUNK_BYTES:
        return Layout(shape, whole, None)
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) * itemsize <= LARGEST_CHUNK_BYTES)
    row = math.prod(shape[axis + 1 :]) * itemsize
    rows = _even(shape[axis], CHUNK_BYTES // row)
    chunks = _even(-(-shape[axis] // rows), SHARD_BYTES // (rows * row))
    before, after = (1,) * axis, shape[axis + 1 :]
    return Layout(shape, (*before, rows, *after), (*before, rows * chunks, *after))


def count(layout: Layout) -> int:
    """Count the files of an array, without listing them."""
    return math.prod(_grid(layout.shape, layout.shard or layout.chunk))


def keys(layout: Layout) -> Iterator[tuple[Index, str]]:
    """List the files of an array: place in the grid, and name below the array's folder.

    >>> list(keys(Layout((4, 2), (2, 2), None)))
    [((0, 0), 'c/0/0'), ((1, 0), 'c/1/0')]
    """
    for index in itertools.product(*map(range, _grid(layout.shape, layout.shard or layout.chunk))):
        yield index, "/".join(("c", *map(str, index)))


def file_size(layout: Layout, itemsize: int, index: Index) -> int:
    """Size in bytes of the file at `index`, without listing its chunks."""
    stride = math.prod(layout.chunk) * itemsize + CRC_BYTES
    if layout.shard is None:
        return stride
    inside = [
        min(shard // chunk, -(-(n - i * shard) // chunk))
        for n, chunk, shard, i in zip(layout.shape, layout.chunk, layout.shard, index, strict=True)
    ]
    return math.prod(inside) * stride + 16 * math.prod(_grid(layout.shard, layout.chunk)) + CRC_BYTES


def pieces(array: NDArray[Any], layout: Layout, index: Index) -> Iterator[Bytes | bytes]:
    """Give the bytes of the file at `index`, piece after piece; whole chunks are views of `array`, not copies."""
    boxes = list(_boxes(layout, index))
    for box in boxes:
        if box is not None:
            raw = _raw(array[_within(box)], layout.chunk)
            yield raw
            yield _crc(raw)
    if layout.shard is not None:
        table = _table(boxes, math.prod(layout.chunk) * array.itemsize + CRC_BYTES)
        yield table
        yield _crc(table)


def fill(array: NDArray[Any], layout: Layout, index: Index, read: Callable[[Bytes], None]) -> bool:
    """Fill the part of `array` that the file at `index` holds.

    Args:
        array: C-contiguous, of the layout's shape; written in place.
        layout: how the array is cut.
        index: place of the file in the grid.
        read: fills the buffer it is given with the file's next bytes.

    Returns:
        False when the shard's index is not the one of this layout: the part is then not to be used.
    """
    boxes = list(_boxes(layout, index))
    crc = np.empty(CRC_BYTES, np.uint8)  # not compared: whoever reads compares a digest of the whole file
    for box in boxes:
        if box is None:
            continue
        block = array[_within(box)]
        if block.shape == layout.chunk and block.flags.c_contiguous:
            read(block.reshape(-1).view(np.uint8))
        else:
            padded = np.empty(layout.chunk, array.dtype)
            read(padded.reshape(-1).view(np.uint8))
            block[...] = padded[tuple(slice(n) for n in block.shape)]
        read(crc)
    if layout.shard is None:
        return True
    want = _table(boxes, math.prod(layout.chunk) * array.itemsize + CRC_BYTES)
    table = np.empty(len(want) + CRC_BYTES, np.uint8)
    read(table)
    return table.tobytes() == want + _crc(want)


def array_json(layout: Layout, dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> bytes:
    """Write the `zarr.json` of an array; the same bytes for the same arguments."""
    byte_order: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        byte_order["configuration"] = {"endian": "little"}
    codecs: list[dict[str, Any]] = [byte_order, {"name": "crc32c"}]
    if layout.shard is not None:
        index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        sharding = {
            "chunk_shape": layout.chunk,
            "codecs": codecs,
            "index_codecs": index_codecs,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": sharding}]
    return _json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": layout.shape,
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": layout.shard or layout.chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if dtype.kind == "b" else 0,
            "codecs": codecs,
            "attributes": attributes,
            "storage_transformers": [],
        }
    )


def group_json(attributes: Mapping[str, Any]) -> bytes:
    """Write the `zarr.json` of a group."""
    return _json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def _json(document: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


def _even(total: int, most: int) -> int:
    """Size of a part when `total` is cut into as few even parts of at most `most` (at least 1) as it takes."""
    return -(-total // -(-total // max(1, most)))


def _grid(shape: Index, cell: Index) -> Index:
    return tuple(-(-n // m) for n, m in zip(shape, cell, strict=True))


def _boxes(layout: Layout, index: Index) -> Iterator[tuple[slice, ...] | None]:
    """Ranges of the array in each chunk of a file, in C order; None for a chunk wholly outside of the array."""
    outer = layout.shard or layout.chunk
    for inner in itertools.product(*map(range, _grid(outer, layout.chunk))):
        starts = [i * m + j * n for i, m, j, n in zip(index, outer, inner, layout.chunk, strict=True)]
        if any(start >= n for start, n in zip(starts, layout.shape, strict=True)):
            yield None
        else:
            ends = map(min, layout.shape, map(sum, zip(starts, layout.chunk, strict=True)))
            yield tuple(map(slice, starts, ends))


def _within(box: tuple[slice, ...]) -> tuple[Any, ...]:
    return (*box, ...)  # the ellipsis keeps an array of no axes an array


def _raw(block: NDArray[Any], chunk: Index) -> Bytes:
    if block.shape != chunk:
        padded = np.zeros(chunk, block.dtype)
        padded[tuple(slice(n) for n in block.shape)] = block
        block = padded
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def _table(boxes: list[tuple[slice, ...] | None], stride: int) -> bytes:
    stored = itertools.count()
    rows = [(ABSENT, ABSENT) if box is None else (next(stored) * stride, stride) for box in boxes]
    return np.array(rows, "<u8").tobytes()


def _crc(data: Bytes | bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(CRC_BYTES, "little")
