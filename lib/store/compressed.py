"""A file's bytes from its start to its end, piece by piece, taken out of gzip or Zstandard where its name says so.

All members of a gzip file and all frames of a Zstandard file are read; NULs behind the last gzip member are padding.
Whatever else stands there, a member or frame that never ends, or damage that the format can see is an error: a reader
that takes a cut file for a short one would train on less than was given. Damage inside a Zstandard frame without a
checksum cannot be seen here. The first bytes must fit the name, for a wrong name is the usual cause of all of these.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from lib.errors import DataError
from lib.store.names import shown
from lib.store.remote import binary, said

__all__ = ["PIECE", "packing", "pieces"]

PIECE = 1 << 18

_GZIP, _ZSTD = b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"
_NAMES: Mapping[str, str] = {"gz": "gzip", "zst": "Zstandard"}
_OTHERS: Mapping[str, tuple[bytes, ...]] = {  # first bytes of what is not unpacked here, from each format's definition
    "zip": (b"PK\x03\x04", b"PK\x05\x06"),
    "bzip2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    "xz": (b"\xfd7zXZ\x00",),
    "7-Zip": (b"7z\xbc\xaf\x27\x1c",),
    "RAR": (b"Rar!\x1a\x07",),
    "LZ4": (b"\x04\x22\x4d\x18",),
}
_ANY = (
    _GZIP,
    _ZSTD,
    *(b"%c\x2a\x4d\x18" % n for n in range(0x50, 0x60)),
    *(b for some in _OTHERS.values() for b in some),
)
_TAR, _TAR_AT = b"ustar", 257
_HEAD = _TAR_AT + len(_TAR)
_INPUT = 1 << 10  # what so little can become fits in memory, even when it is one thing over and over
_WINDOW = 1 << 31  # frames of `zstd --long=31` are read too


def pieces(path: str, compression: str = "", start: int = 0) -> Iterator[bytes]:
    """Read a file.

    Args:
        path: where it is.
        compression: "", "gz" or "zst".
        start: first byte to read; 0 for a compressed file.

    Yields:
        Its content in order, in pieces that are not empty.

    Raises:
        DataError: it cannot be read, is not what its name says, is cut short or is damaged.
    """
    with binary(path) as file:
        if start:
            file.seek(start)
        else:  # of a plain file the first piece is its head, read once: a corpus may be a million small files
            head = file.read(_HEAD if compression else PIECE)
            _check_head(path, compression, head)
            if compression:
                file.seek(0)
            elif head:
                yield head
        yield from {"": _plain, "gz": _gzip, "zst": _zstd}[compression](path, file)


def packing(head: bytes) -> tuple[str, str] | None:
    r"""Tell what a file is packed as by its first bytes, and the suffix that says so where it is read; none = by nothing.

    >>> packing(b"PK\x03\x04"), packing(b"\x1f\x8b\x08"), packing(b"text")
    (('zip', ''), ('gzip', 'gz'), None)
    """
    # Most files begin as none of these: one look tells, and a corpus may be a million files.
    if not head.startswith(_ANY) and head[_TAR_AT : _TAR_AT + len(_TAR)] != _TAR:
        return None
    if kind := _suffix(head):
        return _NAMES[kind], kind
    if head[_TAR_AT:].startswith(_TAR) and b"\0" in head[:_TAR_AT]:
        return "tar", ""
    return next(((name, "") for name, begins in _OTHERS.items() if head.startswith(begins)), None)


def _suffix(head: bytes) -> str:
    return "gz" if head.startswith(_GZIP) else "zst" if _frame(head[:4]) else ""


def _check_head(path: str, compression: str, head: bytes) -> None:
    """Refuse a file whose first bytes are of another kind than its name."""
    kind = _suffix(head)
    if not compression and (packed := packing(head)):
        fix = f"name it {shown(path)}.{kind}" if kind else "unpack it"
        raise DataError(f"{shown(path)}: begins as {packed[0]} does, must be plain; {fix}")
    if kind == compression or (compression and not head):
        return
    name, begins = _NAMES[compression], head[:4].hex(" ")
    fix = f"end its name in .{kind}" if kind else f"drop .{compression} from its name if it is plain"
    raise DataError(f"{shown(path)}: begins with {begins}, must be {name}; {fix}")


def _frame(head: bytes) -> bool:
    # A frame may also be one that readers skip; some writers begin with such a one.
    return head == _ZSTD or (len(head) == 4 and head[1:] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50)


def _plain(path: str, file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def _gzip(path: str, file: BinaryIO) -> Iterator[bytes]:
    out = gzip.GzipFile(fileobj=file, mode="rb")
    while True:
        try:
            piece = out.read(PIECE)
        except EOFError:
            raise DataError(f"{shown(path)}: gzip is cut short; fetch it again") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{shown(path)}: gzip is damaged ({said(error)}); fetch it again") from None
        if not piece:
            return
        yield piece


def _zstd(path: str, file: BinaryIO) -> Iterator[bytes]:
    out = bytearray()
    for piece in _frames(path, file):
        out += piece
        while len(out) >= PIECE:
            yield bytes(out[:PIECE])
            del out[:PIECE]
    if out:
        yield bytes(out)


def _frames(path: str, file: BinaryIO) -> Iterator[bytes]:
    unpack = _unpacker(path)
    frame: Any = None
    for piece in _plain(path, file):
        for at in range(0, len(piece), _INPUT):
            rest = piece[at : at + _INPUT]
            while rest:
                try:
                    frame = frame or unpack.decompressobj()
                    yield frame.decompress(rest)
                except _zstd_error() as error:
                    raise DataError(f"{shown(path)}: Zstandard is damaged ({said(error)}); fetch it again") from None
                rest = frame.unused_data
                frame = None if frame.eof else frame
    if frame is not None:
        raise DataError(f"{shown(path)}: Zstandard is cut short; fetch it again")


def _unpacker(path: str) -> Any:
    try:
        import zstandard
    except ModuleNotFoundError:
        lack = "zstandard is not installed, must be there to read .zst"
        raise DataError(f"{shown(path)}: {lack}; pip install 'purestep[data]'") from None
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW)


def _zstd_error() -> type[Exception]:
    import zstandard

    return cast(type[Exception], zstandard.ZstdError)
