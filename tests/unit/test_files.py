"""Which files a path means: folders, patterns, links, what is passed over, what is refused; each message in full."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lib.errors import DataError
from lib.store.files import STDLIB, find
from lib.store.names import shown


def lay(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"text of " + name.encode())
    return root


def names(*items: Path | str) -> list[str]:
    return sorted(found.name for found in find([str(item) for item in items], Counter()))


def skips(*items: Path | str) -> dict[str, int]:
    skipped: Counter[str] = Counter()
    find([str(item) for item in items], skipped)
    return dict(skipped)


def refused(item: Path | str, message: str, call: Callable[[str], object] | None = None) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        (call or names)(str(item))


def test_a_file_has_its_own_name_and_a_folder_gives_relative_ones(tmp_path: Path) -> None:
    lay(tmp_path, "b.txt", "a/z.txt", "a/b/c.txt", "B.txt")
    assert names(tmp_path / "a" / "z.txt") == ["z.txt"]
    assert names(tmp_path) == ["B.txt", "a/b/c.txt", "a/z.txt", "b.txt"]
    assert names(f"{tmp_path}/") == names(tmp_path)


def test_a_pattern_picks_files_and_two_stars_enter_folders(tmp_path: Path) -> None:
    lay(tmp_path, "a.txt", "b.md", "one/c.txt", "one/two/d.txt", "one/two/e.md")
    assert names(tmp_path / "*.txt") == ["a.txt"]
    assert names(tmp_path / "**" / "*.txt") == ["a.txt", "one/c.txt", "one/two/d.txt"]
    assert names(tmp_path / "**") == ["a.txt", "b.md", "one/c.txt", "one/two/d.txt", "one/two/e.md"]
    assert names(tmp_path / "*" / "*.txt") == ["one/c.txt"]
    assert names(tmp_path / "**" / "two" / "*") == ["one/two/d.txt", "one/two/e.md"]
    assert names(tmp_path / "[ab].*") == ["a.txt", "b.md"]
    assert names(tmp_path / "one" / "?.txt") == ["c.txt"]
    assert names(tmp_path / "o*" / "**" / "d.txt") == ["one/two/d.txt"]


def test_a_pattern_from_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, "a.txt", "b/c.txt")
    monkeypatch.chdir(tmp_path)
    assert names("*.txt") == ["a.txt"]
    assert names("**/*.txt") == ["a.txt", "b/c.txt"]
    assert names(".") == ["a.txt", "b/c.txt"]


def test_names_in_a_list_begin_with_their_folder(tmp_path: Path) -> None:
    lay(tmp_path, "one/x.txt", "two/x.txt", "three.txt")
    assert names(tmp_path / "one", tmp_path / "two") == ["one/x.txt", "two/x.txt"]
    assert names(tmp_path / "one" / "*.txt", tmp_path / "three.txt") == ["one/x.txt", "three.txt"]


@pytest.mark.parametrize("name", ["a b,c=d.txt", "a[1].txt", "star*.txt", "what?.txt", "line\nbreak.txt", "~"])
def test_a_named_file_is_taken_literally(tmp_path: Path, name: str) -> None:
    lay(tmp_path, name, "a1.txt", "start.txt", "whatx.txt")
    assert names(tmp_path / name) == [name]


def test_a_name_that_is_no_utf8_is_read_and_shown(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9\n.txt"
    with open(raw, "wb") as file:
        file.write(b"x")
    (found,) = find([os.fsdecode(raw)], Counter())
    assert shown(found.name) == "caf\\xe9\\n.txt"
    assert len(names(tmp_path)) == 1


def test_the_home_folder_may_be_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path, "texts/a.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/texts") == ["a.txt"]


def test_hidden_files_and_leftovers_are_passed_over_and_counted(tmp_path: Path) -> None:
    lay(tmp_path, "x.txt", ".x.txt", "._x.txt", "x.txt~", "x.tmp", "x.txt.crc", ".git/objects/a", "deep/.cache/b")
    assert names(tmp_path) == ["x.txt"]
    assert skips(tmp_path) == {"hidden": 4, "leftover of an editor or a download": 3}
    assert skips(tmp_path / "*") == {"hidden": 2, "leftover of an editor or a download": 3}
    assert names(tmp_path / ".x.txt") == [".x.txt"]  # one that is named is meant
    assert names(tmp_path / "x.txt~") == ["x.txt~"]


def test_the_same_file_counts_once_and_is_said(tmp_path: Path) -> None:
    lay(tmp_path, "a.txt", "b.txt")
    file = tmp_path / "a.txt"
    assert names(file, file) == ["a.txt"]
    assert skips(file, file) == {"file met again": 1}
    base = tmp_path.name
    assert names(tmp_path / "*.txt", tmp_path / "a*") == [f"{base}/a.txt", f"{base}/b.txt"]
    assert names(tmp_path, file) == ["a.txt", f"{base}/b.txt"]


def test_links_and_hard_links_lead_to_each_real_file_once(tmp_path: Path) -> None:
    lay(tmp_path, "in/z.txt", "in/sub/y.txt", "out/far.txt")
    (tmp_path / "in" / "a_link.txt").symlink_to(tmp_path / "in" / "z.txt")
    (tmp_path / "in" / "hard.txt").hardlink_to(tmp_path / "in" / "sub" / "y.txt")
    (tmp_path / "in" / "a_folder").symlink_to(tmp_path / "in" / "sub")
    (tmp_path / "in" / "out").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "far_link.txt").symlink_to(tmp_path / "out" / "far.txt")
    # A file's own name goes before a link's, and of two hard links the first.
    assert names(tmp_path / "in") == ["far_link.txt", "hard.txt", "z.txt"]
    assert skips(tmp_path / "in") == {"folder met again": 1, "file met again": 3}


def test_link_loops_end_at_once(tmp_path: Path) -> None:
    lay(tmp_path, "in/x.txt", "in/a/y.txt", "in/b/z.txt", "secret.txt")
    (tmp_path / "in" / "self").symlink_to(".")
    (tmp_path / "in" / "up").symlink_to("..")
    (tmp_path / "in" / "a" / "to_b").symlink_to("../b")
    (tmp_path / "in" / "b" / "to_a").symlink_to("../a")
    assert names(tmp_path / "in") == ["a/y.txt", "b/z.txt", "x.txt"]
    assert skips(tmp_path / "in") == {"link loop": 2, "folder met again": 2}
    assert names(tmp_path / "in" / "**" / "*.txt") == ["a/y.txt", "b/z.txt", "x.txt"]


def test_many_folders_that_link_to_each_other_take_no_time(tmp_path: Path) -> None:
    for n in range(12):
        lay(tmp_path, f"{n:02}/x.txt")
    for n in range(12):
        for m in range(12):
            (tmp_path / f"{n:02}" / f"to{m:02}").symlink_to(f"../{m:02}")
    assert names(tmp_path) == [f"{n:02}/x.txt" for n in range(12)]


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    lay(tmp_path, "x.txt")
    broken, ring = tmp_path / "broken.txt", tmp_path / "ring"
    broken.symlink_to("gone.txt")
    message = f"{broken}: a link that leads nowhere; repair it or remove it"
    refused(tmp_path, message)
    refused(broken, message)
    assert names(tmp_path / "x*") == ["x.txt"]  # it is none of what was asked for
    broken.unlink()
    ring.symlink_to("ring")
    refused(tmp_path, f"{ring}: a link that leads nowhere; repair it or remove it")
    ring.rename(tmp_path / ".#x.txt")  # an editor's lock
    assert names(tmp_path) == ["x.txt"]


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    gone = tmp_path / "gone.txt"
    refused(gone, f"{gone}: no such file or folder; name files or folders that are there")
    for pattern in (tmp_path / "*.text", tmp_path / "no" / "**"):
        refused(pattern, f'{pattern}: matches no text file; check the pattern ("**" enters sub-folders)')
    lay(tmp_path, "in/x.txt")
    refused(tmp_path / "*", f'{tmp_path}/*: matches no text file; check the pattern ("**" enters sub-folders)')
    if importlib.util.find_spec("s3fs") is None:
        lack = "the package that reads s3:// is not installed, must be there; pip install 'purestep[remote]'"
        refused("s3://bucket/x.txt", f"s3://bucket/x.txt: {lack}")


def test_pipes_are_passed_over_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    lay(tmp_path, "x.txt")
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == ["x.txt"]
    assert skips(tmp_path) == {"not a regular file": 1}
    refused(tmp_path / "pipe", f"{tmp_path}/pipe: not a regular file; give a file or a folder")


@contextmanager
def nobody() -> Iterator[Path]:
    """A folder that anyone may enter, and a user who may not read everything."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    uid = os.geteuid()
    try:
        if uid == 0:
            os.seteuid(65534)
        yield root
    finally:
        os.seteuid(uid)
        shutil.rmtree(root)


def test_a_folder_that_cannot_be_listed_is_refused() -> None:
    with nobody() as root:
        os.seteuid(os.getuid())
        lay(root, "x.txt", "shut/y.txt")
        (root / "shut").chmod(0)
        if os.getuid() == 0:
            os.seteuid(65534)
        refused(root, f"{root}/shut: cannot be listed (Permission denied); allow reading or move it away")
        assert names(root / "*.txt") == ["x.txt"]
        os.seteuid(os.getuid())
        (root / "shut").chmod(0o755)


def test_the_standard_library_is_its_source_files_alone() -> None:
    found = names(STDLIB)
    assert len(found) > 500
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= set(found)
    assert all(name.endswith(".py") for name in found)
    assert not [name for name in found if "site-packages" in name or "__pycache__" in name]
