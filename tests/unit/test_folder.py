"""The folder of checkpoints: order by number, damage never passed over, retention, what the dead leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from lib.store import disk, load, save
from lib.store.folder import committed, latest, newest, prune, step_name, sweep, unfinished
from lib.store.place import place_of
from lib.store.retention import Policy
from tests.checkpoints import assert_same, flip, refused, td, tree

FIX = "restore it or take another checkpoint"


def fill(root: Path, *steps: int) -> None:
    for step in steps:
        save(root / step_name(step), td(step=torch.tensor(step)))


def damage(root: Path, step: int) -> str:
    """Flip a bit; return the error it makes."""
    file = root / step_name(step) / "step" / "c"
    flip(file)
    return f"state.step: {file} must have the crc32c that manifest.json gives it, so it is damaged; {FIX}"


# Order ----------------------------------------------------------------------------------------------------------------


def test_names_sort_like_numbers_up_to_ten_digits() -> None:
    assert step_name(1000) == "step_0000001000"
    assert step_name(10**10) == "step_10000000000"


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["step_9999", "step_10000"], [9999, 10000]),
        (["step_0900000", "step_100000"], [100000, 900000]),
        (["step_0000000007", "step_10000000000"], [7, 10**10]),
    ],
)
def test_order_is_by_number_whatever_the_padding(tmp_path: Path, names: list[str], steps: list[int]) -> None:
    for name in names:
        save(tmp_path / name, td(name=torch.tensor(int(name[5:]))))
    assert committed(tmp_path) == steps
    assert newest(tmp_path) == latest(tmp_path)
    assert load(tmp_path)["name"] == steps[-1]


def test_one_step_under_two_names_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    shutil.copytree(tmp_path / step_name(5), tmp_path / "step_5")
    message = f"{tmp_path}: step_0000000005 and step_5 are both step 5; remove one"
    assert refused(lambda: committed(tmp_path)) == message
    assert refused(lambda: latest(tmp_path)) == message


def test_only_committed_steps_count(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / step_name(3)).mkdir()
    shutil.copytree(tmp_path / step_name(2), tmp_path / step_name(4))
    (tmp_path / step_name(4) / "COMMIT").unlink()  # unfinished: no checkpoint
    for name in ("step_x", "step_-1", "step_\u0665", ".saving-0", "damaged_step_0000000009", "last"):
        shutil.copytree(tmp_path / step_name(2), tmp_path / name)
    (tmp_path / "step_0000000008").write_text("a file")
    assert committed(tmp_path) == [1, 2]
    assert latest(tmp_path) == tmp_path / step_name(2)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no", tmp_path / "file"):
        assert committed(path) == []
        assert newest(path) is None
        assert latest(path) is None
        assert prune(path, Policy(last=1)) == []
        assert sweep(path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_damaged_latest_is_an_error_that_names_the_nearest_good_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    root = run / "checkpoints"
    fill(root, 1, 2, 3, 4)
    damage(root, 3)
    first = damage(root, 4)
    before = tree(tmp_path)
    message = f"{first}; the nearest good one is {root / step_name(2)}, load=older takes it"
    assert refused(lambda: latest(root)) == message
    assert refused(lambda: load(root)) == message
    assert refused(lambda: load(run)) == message
    assert refused(lambda: load(root / step_name(4))) == message
    assert tree(tmp_path) == before


def test_older_takes_the_nearest_good_one_and_sets_the_damaged_aside(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3, 4)
    reasons = [damage(tmp_path, 4), damage(tmp_path, 3)]
    (tmp_path / "damaged_step_0000000003").mkdir()
    told: list[tuple[Path, str]] = []
    assert latest(tmp_path, older=True, aside=lambda path, why: told.append((path, why))) == tmp_path / step_name(2)
    moved = [tmp_path / "damaged_step_0000000004", tmp_path / "damaged_step_0000000003_2"]
    assert told == list(zip(moved, reasons, strict=True))
    assert all((path / "step" / "c").exists() for path in moved)
    assert committed(tmp_path) == [1, 2]
    assert latest(tmp_path) == tmp_path / step_name(2)
    assert load(tmp_path)["step"] == 2


def test_older_changes_nothing_when_the_latest_is_whole(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    damage(tmp_path, 1)
    before = tree(tmp_path)
    assert latest(tmp_path, older=True) == tmp_path / step_name(2)
    assert tree(tmp_path) == before


def test_when_none_verifies_nothing_is_set_aside(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    damage(tmp_path, 1)
    first = damage(tmp_path, 2)
    before = tree(tmp_path)
    for older in (False, True):
        assert refused(lambda older=older: latest(tmp_path, older=older)) == (
            f"{first}; no older checkpoint here verifies, so start anew in another run.dir"
        )
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["COMMIT", "manifest.json"])
def test_a_step_whose_commit_does_not_match_is_damaged_not_absent(tmp_path: Path, name: str) -> None:
    fill(tmp_path, 1, 2)
    flip(tmp_path / step_name(2) / name)
    assert committed(tmp_path) == [1]
    assert refused(lambda: latest(tmp_path)) == (
        f"{tmp_path}/step_0000000002: COMMIT must hold the sha256 of manifest.json, one of them is damaged; {FIX}; "
        f"the nearest good one is {tmp_path}/step_0000000001, load=older takes it"
    )


@pytest.mark.parametrize(("code", "passed_over"), [(errno.EACCES, False), (errno.ESTALE, False), (errno.EIO, True)])
def test_what_cannot_be_reached_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, passed_over: bool
) -> None:
    fill(tmp_path, 1, 2)
    real = os.open

    def open_(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if f"{step_name(2)}/step/c" in str(path):
            raise OSError(code, os.strerror(code))
        return real(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        if passed_over:  # a sector that cannot be read is damage
            assert latest(tmp_path, older=True) == tmp_path / step_name(1)
        else:
            assert refused(lambda: latest(tmp_path, older=True)) == (
                f"{tmp_path}/step_0000000002/step/c: cannot be read ({os.strerror(code)}); "
                f"make it readable or take another checkpoint"
            )
    assert committed(tmp_path) == ([1] if passed_over else [1, 2])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_folder_that_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / step_name(2)).chmod(0o000)
    for look in (committed, latest, newest):
        assert "Permission denied" in refused(lambda look=look: look(tmp_path))
    (tmp_path / step_name(2)).chmod(0o700)


# Retention ------------------------------------------------------------------------------------------------------------


def test_pruning_deletes_the_oldest_committed_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, 9999, 10000, 7, 8)
    flip(tmp_path / step_name(8) / "COMMIT")  # damaged: neither counted nor deleted
    (tmp_path / step_name(3)).mkdir()
    assert prune(tmp_path, Policy(last=None)) == []
    assert prune(tmp_path, Policy(last=2)) == [7]
    assert prune(tmp_path, Policy(last=1)) == [9999]
    assert prune(tmp_path, Policy(last=1)) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(3), step_name(8), step_name(10000)]


def test_pruning_says_what_it_cannot_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 1, 2)

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        assert refused(lambda: prune(tmp_path, Policy(last=1))) == (
            f"{tmp_path}/step_0000000001: cannot be deleted (Read-only file system); make {tmp_path} writable, "
            f"or set checkpoint.keep=none"
        )
        flip(tmp_path / step_name(2) / "COMMIT")
        assert refused(lambda: latest(tmp_path, older=True)) == (
            f"{tmp_path}/step_0000000002: is damaged and cannot be renamed (Read-only file system); "
            f"make {tmp_path} writable"
        )
    assert committed(tmp_path) == [1]


# What the dead leave behind -------------------------------------------------------------------------------------------


def test_sweeping_removes_what_dead_saves_left_and_spares_the_living(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    dead = [tmp_path / f".{what}-{'0' * 16}" for what in ("saving", "deleting")]
    for folder in dead:
        shutil.copytree(tmp_path / step_name(1), folder / "a")
    for name in (".saving-", ".saving-xyz", ".hidden", "saving-0000000000000000"):
        (tmp_path / name).mkdir()
    (tmp_path / f".saving-{'2' * 16}").symlink_to(tmp_path / step_name(1))
    with disk.temporary(tmp_path) as alive:
        (alive / "file").write_text("x")
        assert sweep(tmp_path) == sorted(dead)
        assert (alive / "file").exists()
    assert not alive.exists()
    assert committed(tmp_path) == [1]
    assert len(list(tmp_path.iterdir())) == 6


def test_a_save_sweeps_before_it_writes(tmp_path: Path) -> None:
    (tmp_path / f".saving-{'0' * 16}" / "params").mkdir(parents=True)
    fill(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == [step_name(1)]


def test_a_disk_without_locks_can_be_saved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / f".saving-{'0' * 16}").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        fill(tmp_path, 1)
        assert sweep(tmp_path) == []  # who is alive cannot be told
    assert_same(load(tmp_path), td(step=torch.tensor(1)))


def test_what_is_being_read_is_not_deleted_and_goes_another_time(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    with place_of(tmp_path / step_name(1)).shared(), place_of(tmp_path / step_name(1)).shared():
        assert prune(tmp_path, Policy(last=1)) == [2]
        assert load(tmp_path / step_name(1))["step"] == 1
    assert prune(tmp_path, Policy(last=1)) == [1]


def test_a_policy_looks_at_what_checkpoints_say_of_themselves_and_at_scores(tmp_path: Path) -> None:
    for step, info in {
        1: {"saved_at_s": 10.0},
        2: {"saved_at_s": 20.0},
        3: {"saved_at_s": 110.0},
        4: {"temporary": True},
        5: {"saved_at_s": 130, "temporary": False},
        6: {"temporary": True},
    }.items():
        save(tmp_path / step_name(step), td(step=torch.tensor(step)), info=info)
    policy = Policy(last=1, every_s=100.0, best=1, steps=frozenset({2}))
    assert prune(tmp_path, policy, scores={1: 3.0, 3: float("nan"), 5: 1.0}, pinned=[4]) == []
    assert prune(tmp_path, Policy(last=1, every_s=100.0), scores={}) == [2, 4]
    assert committed(tmp_path) == [1, 3, 5, 6]
    save(tmp_path / step_name(7), td(step=torch.tensor(7)))
    assert prune(tmp_path, Policy(last=2)) == [1, 3, 6]


def test_folders_beyond_the_newest_without_a_commit_are_listed(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 3)
    for step in (1, 3):
        (tmp_path / step_name(step) / "COMMIT").unlink()
    assert unfinished(tmp_path) == [tmp_path / step_name(3)]
    assert unfinished(tmp_path / "absent") == []
