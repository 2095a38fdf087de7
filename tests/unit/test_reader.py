"""Damage: each kind is an error that names it, and nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.store import load, save
from lib.store.checkpoint import describe, read_info
from lib.store.sharded import Target
from tests.checkpoints import (
    FIX,
    assert_same,
    example,
    flip,
    numbered,
    refused,
    tree,
)

DAMAGED = "must have the crc32c that manifest.json gives it, so it is damaged"


@pytest.mark.parametrize(
    ("spoil", "message"),
    numbered([
        (lambda p: flip(p / "params/embed/c.0.0"),
         "state.params.embed: {p}/params/embed/c.0.0 {d}"),
        (lambda p: flip(p / "params/embed/zarr.json"),
         "state.params.embed: {p}/params/embed/zarr.json {d}"),
        (lambda p: flip(p / "params/zarr.json"),
         "state.params: {p}/params/zarr.json {d}"),
        (lambda p: flip(p / "zarr.json"),
         "{p}/zarr.json {d}"),
        (lambda p: flip(p / "manifest.json"),
         "{p}: COMMIT must hold the sha256 of manifest.json, one of them is damaged"),
        (lambda p: flip(p / "COMMIT"), "{p}: COMMIT must hold the sha256 of manifest.json, one of them is damaged"),
        (lambda p: (p / "COMMIT").unlink(), "{p}: COMMIT is missing, so this is no finished checkpoint"),
        (lambda p: (p / "manifest.json").unlink(), "{p}: manifest.json is missing, so this is no finished checkpoint"),
        (lambda p: (p / "step/c").unlink(), "{p}: step/c (state.step) is missing"),
        (lambda p: (p / "step/c").write_bytes(b""), "{p}: step/c (state.step) has 0 bytes, must have 12"),
        (lambda p: (p / "step/d").write_bytes(b""), "{p}: step/d (state.step) is unexpected"),
        (lambda p: (p / "new").write_bytes(b""), "{p}: new is unexpected"),
        (lambda p: (p / "params/embed/zarr.json").unlink(),
         "{p}: params/embed/zarr.json (state.params.embed) is missing"),
        (lambda p: (p / "params").rename(p.parent / "gone") and (p / "x").write_bytes(b""),
         ("{p}: params/blocks/wq/c.0.0.0 (state.params.blocks.wq) is missing, "
          "params/blocks/wq/zarr.json (state.params.blocks.wq) is missing, "
          "params/blocks/zarr.json (state.params.blocks) is missing, "
          "params/embed/c.0.0 (state.params.embed) is missing, "
          "params/embed/zarr.json (state.params.embed) is missing, "
          "params/zarr.json (state.params) is missing, x is unexpected")),
        (lambda p: [(p / f"x{i}").write_bytes(b"") for i in range(10)],
         "{p}: " + ", ".join(f"x{i} is unexpected" for i in range(8)) + " and 2 more"),
    ]),
)  # fmt: skip
def test_damage_is_named(tmp_path: Path, spoil: Callable[[Path], Any], message: str) -> None:
    path = save(tmp_path / "a", example())
    spoil(path)
    before = tree(tmp_path)
    assert refused(lambda: load(path)) == f"{message.format(p=path, d=DAMAGED)}; {FIX}"
    assert tree(tmp_path) == before


def test_links_and_pipes_in_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    outside = tmp_path / "outside"
    for name in ("step/c", "params", "COMMIT", "zarr.json"):
        (path / name).rename(outside)
        (path / name).symlink_to(outside)
        message = refused(lambda: load(path))
        assert "no regular file" in message or "is missing" in message or "cannot be read" in message
        (path / name).unlink()
        outside.rename(path / name)
    load(path)
    (path / "COMMIT").unlink()
    os.mkfifo(path / "COMMIT")
    assert refused(lambda: load(path)) == (
        f"{path}/COMMIT: cannot be read (no regular file); make it readable or take another checkpoint"
    )


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no", tmp_path / "file"):
        for read in (load, read_info, describe):
            assert refused(lambda path=path, read=read: read(path)) == (
                f"{path}: must be a folder that is there; check the path"
            )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert refused(lambda: load(tmp_path / "run")) == (
        f"{tmp_path}/run: must be a checkpoint or a folder with one in it; check the path"
    )


def test_a_leaf_is_made_when_all_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of another kind of device it is a copy of what was read: made earlier, a copy of nothing."""
    state = example()
    path = save(tmp_path / "a", state)
    monkeypatch.setattr(Target, "filled", lambda _self, local: local.clone())
    assert_same(load(path), state)


@pytest.mark.parametrize("name", ["step/c", "step/zarr.json", "params/embed", "manifest.json", "COMMIT", "zarr.json"])
def test_a_link_out_of_the_folder_is_never_followed(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "a", example())
    outside = (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(outside)
    message = refused(lambda: load(path))
    assert any(told in message for told in ("is no regular file", "cannot be read", "is unexpected")), message
