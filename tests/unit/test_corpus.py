"""Files as documents: what is kept byte for byte, what is refused, what identifies a corpus; each message in full."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from lib.errors import DataError
from lib.store.corpus import Corpus, Entry, differences, identity_of, scan
from tests.stores import documents, lay, made
from tests.unit.test_files import nobody


def texts(corpus: Corpus) -> list[bytes]:
    """The documents of plain files, as a store holds them."""
    with tempfile.TemporaryDirectory() as cache:
        return documents(made(corpus, Path(cache)).train)


def refused(path: Path, message: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        scan(path)


@pytest.mark.parametrize("text", [
    b"one\r\ntwo\r\n",  # line ends stay
    b"no newline at the end",
    b"  spaces and \t tabs \n\n",
    b" \n ",
    b"caf\xe9 \xed\xa0\x80 \xff",  # no UTF-8
    b"e\xcc\x81 and \xc3\xa9",  # decomposed and composed
    b"a\xe2\x80\xa8b\xc2\x85c\x0b\x0cd",  # separators of other readers
    b"joined\n\xef\xbb\xbfby cat",  # a mark that is not at the start
    b'{"text": "a<|eos|>b"}',
    b"x" * 9000 + b"\0",  # a NUL where a text has gone on for long
])  # fmt: skip
def test_text_is_kept_byte_for_byte(tmp_path: Path, text: bytes) -> None:
    assert texts(scan(lay(tmp_path, {"x.txt": text}))) == [text]


def test_a_byte_order_mark_is_dropped_once_at_the_start_of_a_file(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    corpus = scan(lay(tmp_path, {"a.txt": mark + b"a", "b.txt": mark + mark + b"b", "c.txt": mark}))
    assert texts(corpus) == [b"a", mark + b"b", b""]
    assert [entry.size for entry in corpus.entries] == [4, 7, 3]


def test_documents_come_in_the_order_of_their_names_bytes(tmp_path: Path) -> None:
    corpus = scan(lay(tmp_path, {"b": b"1", "a/z": b"2", "a.txt": b"3", "B": b"4", "\u00e9": b"5", "c/d/e": b"6"}))
    assert [entry.name for entry in corpus.entries] == ["B", "a.txt", "a/z", "b", "c/d/e", "\u00e9"]
    assert texts(corpus) == [b"4", b"3", b"2", b"1", b"6", b"5"]


def test_a_file_longer_than_a_piece_is_one_document(tmp_path: Path) -> None:
    # A mark that stands where a piece begins is text, for it is not where the file begins.
    text = (b"\xef\xbb\xbf" + b"text " * (1 << 18))[: 1 << 20] * 3
    text = b"x" + text[1:] + b"end"
    corpus = scan(lay(tmp_path, {"a": b"1", "long": text, "z": b"2"}))
    assert texts(corpus) == [b"1", text, b"2"]


def test_empty_files_are_documents_but_not_all_of_them(tmp_path: Path) -> None:
    assert texts(scan(lay(tmp_path, {"a": b"", "b": b"text"}))) == [b"", b"text"]
    (tmp_path / "b").write_bytes(b"")
    refused(tmp_path, f"{tmp_path}: all files are empty (2); name files that hold text")


def test_nothing_to_read_is_refused_with_the_causes(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path}: no file of text there (nothing in it); name files that hold text")
    lay(tmp_path, {".x": b"x", "y~": b"y", "z.bin.json": b"{}", "b": b"\0"})
    causes = "binary, not text: 1, describes a token file: 1, hidden: 1, leftover of an editor or a download: 1"
    refused(tmp_path, f"{tmp_path}: no file of text there ({causes}); name files that hold text")


@pytest.mark.parametrize("path", ["", [], ["a", ""]])
def test_a_path_that_is_none_is_a_mistake_of_the_config(path: str | list[str]) -> None:
    message = f"path={path!r} must name files, folders or patterns; name some, or stdlib:"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        scan(path)


def test_binary_files_are_passed_over_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    lay(tmp_path, {"x.txt": b"x", "image": b"\x89PNG\r\n\x1a\n\0\0\0", "wide.txt": "\ufeffab".encode("utf-16-le")})
    corpus = scan(tmp_path)
    assert texts(corpus) == [b"x"]
    assert corpus.skipped == {"UTF-16, not UTF-8": 1, "binary, not text": 1}
    image, wide = tmp_path / "image", tmp_path / "wide.txt"
    refused(image, f"{image}: binary, not text (NUL at byte 8); save it as UTF-8 text")
    refused(wide, f"{wide}: UTF-16, not UTF-8 (NUL at byte 3); save it as UTF-8 text")


def tar(size: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x.txt"), None)
        info = tarfile.TarInfo("y.txt")
        info.size = size
        archive.addfile(info, io.BytesIO(b"y" * size))
    return out.getvalue()


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, b"text")
    return out.getvalue()


ARCHIVES = {
    "x.zip": (zipped("x"), "zip"),
    "x.npz": (zipped("ids.npy"), "zip"),
    "empty.zip": (b"PK\5\6" + b"\0" * 18, "zip"),
    "x.bz2": (bz2.compress(b"text"), "bzip2"),
    "nothing.bz2": (bz2.compress(b"text" * 999, 1), "bzip2"),
    "x.txt.xz": (lzma.compress(b"text"), "xz"),
    "x.7z": (b"7z\xbc\xaf\x27\x1c\0\4", "7-Zip"),
    "x.rar": (b"Rar!\x1a\x07\1\0", "RAR"),
    "x.lz4": (b"\x04\x22\x4d\x18\x64\x40", "LZ4"),
    "x.tar": (tar(9), "tar"),
    "g.txt": (gzip.compress(b"text"), "gzip"),
    "x.tgz": (gzip.compress(tar(9)), "gzip"),
    "z.txt": (b"\x28\xb5\x2f\xfd text", "Zstandard"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_is_refused_as_what_it_is(tmp_path: Path, name: str) -> None:
    data, kind = ARCHIVES[name]
    path = lay(tmp_path, {name: data}) / name
    suffix = {"gzip": ".gz", "Zstandard": ".zst"}.get(kind)
    fix = f"name it {path}{suffix}" if suffix else "unpack it"
    refused(path, f"{path}: begins as {kind} does, must be plain; {fix}")


def test_archives_in_a_folder_are_counted_by_what_they_are(tmp_path: Path) -> None:
    lay(tmp_path, {name: data for name, (data, _) in ARCHIVES.items()})
    counts = {"7-Zip": 1, "LZ4": 1, "RAR": 1, "Zstandard": 1, "bzip2": 2, "gzip": 2, "tar": 1, "xz": 1, "zip": 3}
    causes = ", ".join(f"archive, not read: {kind}: {count}" for kind, count in counts.items())
    refused(tmp_path, f"{tmp_path}: no file of text there ({causes}); name files that hold text")
    lay(tmp_path, {"x.txt": b"text", "y.txt": b"BZh is how bzip2 begins, PK how zip does", "z": b"x" * 257 + b"ustar"})
    corpus = scan(tmp_path)
    assert [entry.name for entry in corpus.entries] == ["x.txt", "y.txt", "z"]
    assert corpus.skipped == {f"archive, not read: {kind}": count for kind, count in counts.items()}


def test_an_archive_within_what_is_unpacked_is_named(tmp_path: Path) -> None:
    path = lay(tmp_path, {"x.tar.gz": gzip.compress(tar(9))}) / "x.tar.gz"
    message = f"{path}: begins as tar does inside, must be text; unpack it"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        texts(scan(path))


def test_a_file_of_a_known_format_may_hold_any_bytes(tmp_path: Path) -> None:
    found = ("a.arrow", "a.bin", "a.npy", "a.parquet", "a.txt.gz", "a.JSONL.ZST")
    corpus = scan(lay(tmp_path, dict.fromkeys((*found, "a.txt"), b"\x00\x00\x00\x00")))
    assert sorted(entry.name for entry in corpus.entries) == sorted(found)
    assert corpus.skipped == {"binary, not text": 1}
    assert len(scan(tmp_path, format="npy").entries) == 7


def test_what_describes_a_token_file_is_part_of_it(tmp_path: Path) -> None:
    lay(tmp_path, {"a.bin": b"\1\0\2\0", "b.txt": b"text"})
    before = scan(tmp_path)
    lay(tmp_path, {"a.bin.json": b'{"dtype": "<u2"}'})
    described = scan(tmp_path)
    assert [entry.name for entry in described.entries] == ["a.bin", "b.txt"]
    assert described.skipped == {"describes a token file": 1}
    lay(tmp_path, {"a.bin.json": b'{"dtype": "<u4"}'})
    assert len({before.identity, described.identity, scan(tmp_path).identity}) == 3
    assert differences(described.entries, scan(tmp_path).entries) == ["a.bin: content changed"]
    path = tmp_path / "a.bin.json"
    refused(path, f"{path}: describes a token file; name the token file itself")


@pytest.mark.parametrize(("head", "what", "suffix"), [
    (b"\x1f\x8b\x08\x08", "gzip", "gz"), (b"\x28\xb5\x2f\xfd", "Zstandard", "zst"),
])  # fmt: skip
def test_packed_text_under_a_plain_name_is_no_text(tmp_path: Path, head: bytes, what: str, suffix: str) -> None:
    path = lay(tmp_path, {"x.txt": head + b"some text"}) / "x.txt"
    message = f"{path}: begins as {what} does, must be plain; name it {path}.{suffix}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        texts(scan(path))


def test_an_unreadable_file_stops_the_run_at_its_start() -> None:
    with nobody() as root:
        os.seteuid(os.getuid())
        lay(root, {"x.txt": b"x", "y.txt": b"y"})
        (root / "y.txt").chmod(0)
        if os.getuid() == 0:
            os.seteuid(65534)
        refused(root, f"{root}/y.txt: cannot be read (Permission denied); allow reading or remove it")
        assert texts(scan(root / "x.txt")) == [b"x"]
        os.seteuid(os.getuid())


def test_a_file_that_changes_under_the_reader_is_noticed(tmp_path: Path) -> None:
    path = lay(tmp_path, {"x.txt": b"some text"}) / "x.txt"
    message = f"{path}: changed while it was being read; run again when nothing writes to it"
    for after in (b"some text and more", b"some", b"some tixt", b""):
        path.write_bytes(b"some text")
        os.utime(path, (5, 5))  # else all of this may happen within one tick of the disk's clock
        corpus = scan(path)
        path.write_bytes(after)
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            texts(corpus)
    corpus = scan(lay(tmp_path, {"x.txt": b"some text"}))
    path.unlink()
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}: cannot be read (No such file or directory)')}; "):
        texts(corpus)


def test_names_with_line_breaks_and_odd_bytes_stay_on_one_line(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/a\n\xe9", "wb") as file:
        file.write(b"x")
    (entry,) = scan(tmp_path).entries
    assert entry.name == "a\\n\\xe9"


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    scan(lay(tmp_path, {"a": b"12345", "b": b"678"}), lambda done, total: told.append((done, total)))
    assert told == [(5, 8), (8, 8)]


# Identity -------------------------------------------------------------------------------------------------------------


THREE = {"a.txt": b"aaa", "sub/b.txt": b"bbb", "c.txt": b"ccc"}


def test_the_identity_of_a_corpus_is_fixed_for_ever(tmp_path: Path) -> None:
    assert scan(lay(tmp_path, THREE)).identity == "7986f3c34df1510e63a93da6b2baf7b4"


def test_moved_folders_and_new_times_are_the_same_corpus(tmp_path: Path) -> None:
    before = scan(lay(tmp_path / "old", THREE))
    shutil.move(tmp_path / "old", tmp_path / "else where")
    os.utime(tmp_path / "else where" / "a.txt", (1, 1))
    after = scan(tmp_path / "else where")
    assert after.identity == before.identity
    assert after.entries == before.entries
    assert differences(before.entries, after.entries) == []
    assert scan(str(tmp_path / "else where" / "**")).identity == before.identity


@pytest.mark.parametrize(("change", "said"), [
    ({"a.txt": b"aaa and five lines"}, ["a.txt: 3 bytes, now 18"]),
    ({"c.txt": None}, ["c.txt: missing"]),
    ({"a.txt": b"ccc", "c.txt": b"aaa"}, ["a.txt: content changed", "c.txt: content changed"]),
    ({"sub/b.txt": b"bab"}, ["sub/b.txt: content changed"]),
    ({"0.txt": b"first"}, ["0.txt: new"]),
    ({"a.txt": None, "d.txt": b"aaa"}, ["a.txt: missing", "d.txt: new"]),
    ({"a.txt": b"\xef\xbb\xbfaaa"}, ["a.txt: 3 bytes, now 6"]),
])  # fmt: skip
def test_every_other_change_is_named(tmp_path: Path, change: dict[str, bytes | None], said: list[str]) -> None:
    before = scan(lay(tmp_path, THREE))
    lay(tmp_path, {name: text for name, text in change.items() if text is not None})
    for name in [name for name, text in change.items() if text is None]:
        (tmp_path / name).unlink()
    after = scan(tmp_path)
    assert after.identity != before.identity
    assert differences(before.entries, after.entries) == said
    assert differences([list(one) for one in before.entries], after.entries) == said  # as it comes out of JSON


def test_the_order_of_a_list_and_where_its_folders_are_do_not_matter(tmp_path: Path) -> None:
    one, two = lay(tmp_path / "p" / "one", {"x": b"1"}), lay(tmp_path / "q" / "two", {"x": b"2"})
    corpus = scan([one, two])
    assert corpus.identity == scan([two, one]).identity
    assert [entry.name for entry in corpus.entries] == ["one/x", "two/x"]
    shutil.move(two, tmp_path / "two")
    assert scan([one, tmp_path / "two"]).identity == corpus.identity
    # Two of one name: content decides on the order.
    other = lay(tmp_path / "r" / "one", {"x": b"0"})
    assert texts(scan([one, other])) == texts(scan([other, one]))


def test_two_files_of_one_name_are_told_apart() -> None:
    old = [Entry("x", 1, "a"), Entry("x", 1, "b")]
    assert identity_of(old) == identity_of(old[::-1])
    assert differences(old, [Entry("x", 1, "a"), Entry("x", 2, "c")]) == ["x: 1 bytes, now 2"]
    assert differences(old, old[:1]) == ["x: missing"]


def test_names_cannot_be_cut_so_that_two_corpora_meet() -> None:
    assert identity_of([Entry("a 1 x\n1 b", 1, "y")]) != identity_of([Entry("a", 1, "x"), Entry("b", 1, "y")])
