"""Where the bytes of one array stand on disk: Zarr v3 chunks and shards, put together without Zarr.

Guarantees: any Zarr v3 reader gives back the bits; each chunk carries a crc32c; a chunk that is all fill value is
stored like any other; one file is written by one writer, in one go; any part of an array can be read by reading only
the chunks it lies in. Nothing here opens a file. The work is done by
hand because it is several times faster than zarr-python's sharded writer, which also reads a shard back for each part
of it that is written.

A file of chunks: raw little-endian bytes, crc32c (4 bytes), the next chunk, ...; a shard ends with its index: per
chunk of its grid, in C order, offset and length as uint64 (both 2**64 - 1 for a chunk wholly outside of the array),
then a crc32c of the index. A ragged chunk is padded to its full size with zeros. Files are named `c.0.1`, not `c/0/1`: to
make and sync a folder costs a disk as much as a small leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CRC_BYTES",
    "Box",
    "Layout",
    "array_json",
    "chunks",
    "count",
    "crc32c",
    "file_box",
    "file_size",
    "group_json",
    "inside",
    "keys",
    "pieces",
    "plan",
    "stored",
    "tail",
]

SMALLEST_CHUNK_BYTES = 1 << 20
CHUNK_BYTES = 4 << 20  # the unit a reader fetches; 1-16 MB reads well from disks and from object stores
LARGEST_CHUNK_BYTES = 16 << 20
SHARD_BYTES = 128 << 20  # the unit a writer writes; small enough that one large leaf still keeps several threads busy
CRC_BYTES = 4
ABSENT = 2**64 - 1  # Zarr v3 sharding: offset and length of a chunk that is not stored

Index = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""A part of an array: start and stop along each dim."""
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


def plan(shape: Index, itemsize: int, cell: Index | None = None) -> Layout:
    """Cut an array into chunks of 1-16 MB that are contiguous in memory, and shards of at most 128 MB.

    A leaf no larger than 4 MB is one plain chunk. A larger one is cut along the first axis whose rows fit into a chunk,
    into even parts, so that padding stays below one row a part.

    Args:
        shape: of the array.
        itemsize: bytes of an element.
        cell: size of the parts that ranks hold, the last one along a dim shorter; None = one holds it all. Files then
            do not cross the edges of these parts if a cut into chunks of 1-16 MB allows it; parts below 1 MB share one.

    >>> plan((32, 4096, 4096), 4)
    Layout(shape=(32, 4096, 4096), chunk=(1, 256, 4096), shard=(1, 4096, 4096))
    >>> plan((3 << 20,), 4, cell=(1 << 20,))
    Layout(shape=(3145728,), chunk=(1048576,), shard=None)
    """
    part = tuple(max(1, n) for n in shape) if cell is None else _grown(shape, itemsize, cell)
    if 0 in shape or math.prod(part) * itemsize <= CHUNK_BYTES:
        return Layout(shape, part, None)
    axis = next(i for i in range(len(part)) if math.prod(part[i + 1 :]) * itemsize <= LARGEST_CHUNK_BYTES)
    row = math.prod(part[axis + 1 :]) * itemsize
    before, after = (1,) * axis, part[axis + 1 :]
    if part != tuple(shape) and (even := _divisors(part[axis], row)):
        rows, outer = even
        return Layout(shape, (*before, rows, *after), (*before, outer, *after))
    rows = _even(part[axis], CHUNK_BYTES // row)
    most = SHARD_BYTES // (rows * row)
    outer = rows * _even(-(-part[axis] // rows), most)
    return Layout(shape, (*before, rows, *after), (*before, outer, *after))


def count(layout: Layout) -> int:
    """Count the files of an array, without listing them."""
    return math.prod(_grid(layout.shape, layout.shard or layout.chunk))


def keys(layout: Layout) -> Iterator[tuple[Index, str]]:
    """List the files of an array: place in the grid, and name below the array's folder.

    >>> list(keys(Layout((4, 2), (2, 2), None)))
    [((0, 0), 'c.0.0'), ((1, 0), 'c.1.0')]
    """
    for index in itertools.product(*map(range, _grid(layout.shape, layout.shard or layout.chunk))):
        yield index, ".".join(("c", *map(str, index)))


def file_size(layout: Layout, itemsize: int, index: Index) -> int:
    """Size in bytes of the file at `index`, without listing its chunks."""
    stride = math.prod(layout.chunk) * itemsize + CRC_BYTES
    if layout.shard is None:
        return stride
    return stored(layout, index) * stride + 16 * math.prod(_grid(layout.shard, layout.chunk)) + CRC_BYTES


def file_box(layout: Layout, index: Index) -> Box:
    """The box of what the file at `index` holds.

    >>> file_box(Layout((5, 2), (2, 2), None), (2, 0))
    ((4, 5), (0, 2))
    """
    outer = layout.shard or layout.chunk
    return tuple((i * m, min((i + 1) * m, n)) for i, m, n in zip(index, outer, layout.shape, strict=True))


def stored(layout: Layout, index: Index) -> int:
    """Count the chunks that the file at `index` holds, without listing them."""
    if layout.shard is None:
        return 1
    return math.prod(
        min(shard // chunk, -(-(n - i * shard) // chunk))
        for n, chunk, shard, i in zip(layout.shape, layout.chunk, layout.shard, index, strict=True)
    )


def chunks(layout: Layout, index: Index) -> Iterator[Box]:
    """List the chunks of the file at `index` in the order they stand in it."""
    return (box for box in _boxes(layout, index) if box is not None)


def inside(box: Box, part: Box) -> tuple[Any, ...]:
    """Index a part of an array by a box within it."""
    moved = (slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, part, strict=True))
    return (*moved, ...)  # the ellipsis keeps an array of no axes an array


def pieces(array: NDArray[Any], layout: Layout, index: Index, part: Box | None = None) -> Iterator[tuple[Any, ...]]:
    """Give the bytes of the file at `index`: for each chunk its bytes and its crc32c, at the end the shard's index.

    Args:
        array: holds at least what the file holds; whole chunks are views of it, not copies.
        layout: how the whole array is cut.
        index: place of the file in the grid.
        part: which part of the whole `array` is; None = all of it.
    """
    part = part or tuple((0, n) for n in layout.shape)
    for box in chunks(layout, index):
        raw = _raw(array[inside(box, part)], layout.chunk)
        yield raw, crc32c(raw)
    if layout.shard is not None:
        yield (tail(layout, index, array.itemsize),)


def tail(layout: Layout, index: Index, itemsize: int) -> bytes:
    """Write what stands behind the chunks of a file: the shard's index and its crc32c; nothing in a plain chunk."""
    if layout.shard is None:
        return b""
    stride, number = math.prod(layout.chunk) * itemsize + CRC_BYTES, itertools.count()
    rows = [(ABSENT, ABSENT) if box is None else (next(number) * stride, stride) for box in _boxes(layout, index)]
    table = np.array(rows, "<u8").tobytes()
    return table + crc32c(table)


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
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
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


def _grown(shape: Index, itemsize: int, cell: Index) -> Index:
    """Put neighbouring parts together, along the last dims first, until they make a chunk of about 1 MB."""
    part = [max(1, n) for n in cell]
    for dim in reversed(range(len(shape))):
        room = max(1, SMALLEST_CHUNK_BYTES // (math.prod(part) * itemsize))
        part[dim] = max(1, min(shape[dim], part[dim] * room))
    return tuple(part)


def _divisors(total: int, row: int) -> tuple[int, int] | None:
    """Rows of a chunk of 1-16 MB and of a shard that divide `total`; None when there are none."""
    fits = [n for n in _factors(total) if LARGEST_CHUNK_BYTES >= n * row >= SMALLEST_CHUNK_BYTES]
    if not fits:
        return None
    rows = max((n for n in fits if n * row <= CHUNK_BYTES), default=min(fits))
    return rows, rows * max(n for n in _factors(total // rows) if n == 1 or n * rows * row <= SHARD_BYTES)


def _factors(total: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    return sorted({*small, *(total // n for n in small)})


def _grid(shape: Index, cell: Index) -> Index:
    return tuple(-(-n // m) for n, m in zip(shape, cell, strict=True))


def _boxes(layout: Layout, index: Index) -> Iterator[Box | None]:
    """The boxes of the chunks of a file, in C order; None for a chunk wholly outside of the array."""
    outer = layout.shard or layout.chunk
    for inner in itertools.product(*map(range, _grid(outer, layout.chunk))):
        starts = [i * m + j * n for i, m, j, n in zip(index, outer, inner, layout.chunk, strict=True)]
        if any(start >= n for start, n in zip(starts, layout.shape, strict=True)):
            yield None
        else:
            ends = map(min, layout.shape, map(sum, zip(starts, layout.chunk, strict=True)))
            yield tuple(zip(starts, ends, strict=True))


def _raw(block: NDArray[Any], chunk: Index) -> Bytes:
    if block.shape != chunk:
        padded = np.zeros(chunk, block.dtype)
        padded[tuple(slice(n) for n in block.shape)] = block
        block = padded
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def crc32c(data: Bytes | bytes) -> bytes:
    """Checksum of some bytes as Zarr's crc32c codec writes it (Castagnoli's polynomial, RFC 3720, little-endian)."""
    return int(google_crc32c.value(data)).to_bytes(CRC_BYTES, "little")
