"""gzip and Zstandard: all members and frames are read, and a file that is cut, damaged or misnamed is never short."""

from __future__ import annotations

import gzip
import random
import struct
import sys
from pathlib import Path

import pytest

from lib.store.compressed import pieces
from tests.formats import put, read, refused, texts

zstandard = pytest.importorskip("zstandard")

GOOD = b'{"text": "a"}\n'
FETCH = "fetch it again"


def many() -> bytes:
    draw = random.Random(0)
    return b"".join(b'{"text": "line %d of %d"}\n' % (n, draw.randrange(10**9)) for n in range(20_000))


def zst(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)  # type: ignore[no-any-return]


def gz(data: bytes) -> bytes:
    return gzip.compress(
        data, mtime=0
    )  # the time would be in the names of tests, which every process has to give alike


PACK = {"gz": gz, "zst": zst}


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_what_is_compressed_reads_as_what_is_plain(tmp_path: Path, suffix: str) -> None:
    data = many()
    packed = put(tmp_path / f"x.JSONL.{suffix.upper()}", PACK[suffix](data))
    plain = put(tmp_path / "x.jsonl", data)
    assert texts(packed, target=1000) == texts(plain)
    assert read(packed).places[-1].endswith(":20000")
    text = put(tmp_path / f"x.{suffix}", PACK[suffix](b"a\n\nb"))
    assert texts(text) == [b"a\n\nb"]
    assert texts(text, split="block") == [b"a", b"b"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_all_members_and_frames_are_read(tmp_path: Path, suffix: str) -> None:
    pack = PACK[suffix]
    path = put(tmp_path / f"x.jsonl.{suffix}", pack(GOOD) + pack(b"") + pack(b'{"text": ') + pack(b'"b"}'))
    assert texts(path) == [b"a", b"b"]


def test_frames_that_are_to_be_passed_over_are(tmp_path: Path) -> None:
    note = struct.pack("<II", 0x184D2A50, 5) + b"notes"
    assert texts(put(tmp_path / "x.jsonl.zst", note + zst(GOOD) + note)) == [b"a"]


def test_memory_does_not_grow_with_what_comes_out(tmp_path: Path) -> None:
    data = b"some text and more of it, " * (1 << 19)
    for suffix, pack in PACK.items():
        path = put(tmp_path / f"x.{suffix}", pack(data))
        assert max(map(len, pieces(str(path), suffix))) < len(data)
        assert b"".join(pieces(str(path), suffix)) == data


@pytest.mark.parametrize("cut", [0.5, 0.9, -1, -4, -9])
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_cut_short_is_an_error_and_no_short_file(tmp_path: Path, suffix: str, cut: float) -> None:
    whole = PACK[suffix](many())
    path = put(tmp_path / f"x.jsonl.{suffix}", whole[: int(cut * len(whole)) if cut > 0 else int(cut)])
    refused(path, f"@: {'gzip' if suffix == 'gz' else 'Zstandard'} is cut short; {FETCH}")


def test_a_second_frame_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    for stop in range(1, len(zst(GOOD))):
        refused(put(tmp_path / "x.jsonl.zst", zst(GOOD) + zst(GOOD)[:stop]), f"@: Zstandard is cut short; {FETCH}")


def test_a_flipped_bit_is_seen_wherever_the_format_can_see_it(tmp_path: Path) -> None:
    for suffix, whole in (("gz", gzip.compress(many())), ("zst", zst(many(), write_checksum=True))):
        path = tmp_path / f"x.jsonl.{suffix}"
        for at in range(1000, len(whole), len(whole) // 20):
            put(path, whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
            with pytest.raises(
                RuntimeError, match=rf"^{path}: (gzip|Zstandard) is (damaged \(.*\)|cut short); {FETCH}$"
            ):
                read(path, errors="skip")
    damaged = gz(GOOD)[:-8] + b"\1" + gz(GOOD)[-7:]
    crc = f"CRC check failed {hex(int.from_bytes(damaged[-8:-4], 'little'))} != "
    crc += hex(int.from_bytes(gz(GOOD)[-8:-4], "little"))
    refused(put(tmp_path / "x.jsonl.gz", damaged), f"@: gzip is damaged ({crc}); {FETCH}")


def test_what_follows_the_last_member_is_padding_or_an_error(tmp_path: Path) -> None:
    assert texts(put(tmp_path / "x.jsonl.gz", gz(GOOD) + b"\0" * 513)) == [b"a"]
    refused(
        put(tmp_path / "y.jsonl.gz", gz(GOOD) + b"junk"),
        f"@: gzip is damaged (Not a gzipped file (b'ju')); {FETCH}",
    )
    wrong = "zstd decompressor error: Unknown frame descriptor"
    refused(put(tmp_path / "y.jsonl.zst", zst(GOOD) + b"junk"), f"@: Zstandard is damaged ({wrong}); {FETCH}")


@pytest.mark.parametrize(("name", "data", "says"), [
    ("x.jsonl.gz", GOOD, "begins with 7b 22 74 65, must be gzip; drop .gz from its name if it is plain"),
    ("x.txt.zst", b"text", "begins with 74 65 78 74, must be Zstandard; drop .zst from its name if it is plain"),
    ("x.gz", zst(GOOD), "begins with 28 b5 2f fd, must be gzip; end its name in .zst"),
    ("x.zst", gz(GOOD), "begins with 1f 8b 08 00, must be Zstandard; end its name in .gz"),
    ("x.jsonl", gz(GOOD), "begins as gzip does, must be plain; name it @.gz"),
    ("x.txt", gz(GOOD), "begins as gzip does, must be plain; name it @.gz"),
    ("x.ndjson", zst(GOOD), "begins as Zstandard does, must be plain; name it @.zst"),
    ("x.jsonl", b"PK\3\4 and more", "begins as zip does, must be plain; unpack it"),
    ("x.txt", b"\xfd7zXZ\0", "begins as xz does, must be plain; unpack it"),
    ("x.parquet.gz", gz(GOOD), "parquet within .gz, must be unpacked; unpack it"),
    ("x.npy.zst", zst(GOOD), "npy within .zst, must be unpacked; unpack it"),
])  # fmt: skip
def test_a_name_that_does_not_fit_is_named_with_the_likely_cause(
    tmp_path: Path, name: str, data: bytes, says: str
) -> None:
    refused(put(tmp_path / name, data), f"@: {says}")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_nothing_at_all_or_nothing_inside_is_an_empty_file(tmp_path: Path, suffix: str) -> None:
    for data in (b"", PACK[suffix](b"")):
        assert read(put(tmp_path / f"x.jsonl.{suffix}", data)).skipped == {"empty file": 1}
        assert texts(put(tmp_path / f"x.txt.{suffix}", data)) == [b""]


def test_without_its_library_a_frame_is_refused_with_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "x.jsonl.zst", zst(GOOD))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    lack = "zstandard is not installed, must be there to read .zst; pip install 'purestep[data]'"
    refused(path, f"@: {lack}")
