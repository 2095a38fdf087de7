"""A manifest is consistent in itself, whoever wrote it: nothing is opened or allocated on its word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lib.store import load, save
from lib.store.shards import crc32c
from tests.checkpoints import (
    FIX,
    example,
    numbered,
    put,
    refused,
    replace_root,
    rewrite,
    td,
    tree,
)

LEAF = {"dtype": "float32", "shape": [1], "chunk": [1], "shard": None}


@pytest.mark.parametrize(
    ("change", "message"),
    numbered([
        (put("format", value=2), "format=2 must be 1; read it with a newer purestep"),
        (put("format", value="1"), "is no manifest (Expected `int`, got `str` - at `$.format`); " + FIX),
        (lambda d: [1], "is no manifest (Expected `object`, got `array`); " + FIX),
        (put("extra", value=1), "is no manifest (Object contains unknown field `extra`); " + FIX),
        (put("nodes", "../../x", value=LEAF), "state.......x must lie in a group named before it; " + FIX),
        (put("nodes", "/etc", value=LEAF), "state..etc must lie in a group named before it; " + FIX),
        (put("nodes", "..", value="group"), "state: the name '..' is empty or only dots; rename it"),
        (put("nodes", "step/x", value=LEAF), "state.step.x must lie in a group named before it; " + FIX),
        (put("nodes", "other", value="recipe"), "state.other must not be a recipe; " + FIX),
        (put("nodes", "STEP", value="group"), "state: the names 'step' and 'STEP' are one on some disks; rename one"),
        (put("nodes", "step", "dtype", value="object"), "state.step has an impossible dtype, shape or cut; " + FIX),
        (put("nodes", "step", "dtype", value="float64"),
         "step/zarr.json must say of its node what the manifest says; " + FIX),
        (put("nodes", "step", "shape", value=[2]), "state.step has an impossible dtype, shape or cut; " + FIX),
        (put("nodes", "params/embed", "shape", value=[2**62, 2**62]),
         "state.params.embed has an impossible dtype, shape or cut; " + FIX),
        (put("nodes", "params/embed", "shape", value=[2**50, 4]),
         "its arrays call for more files than it lists; " + FIX),
        (put("nodes", "params/embed", "shape", value=[-1, 4]),
         "is no manifest (Expected `int` >= 0 - at `$.nodes[...].shape[0]`); " + FIX),
        (put("nodes", "params/embed", "chunk", value=[0, 4]),
         "is no manifest (Expected `int` >= 1 - at `$.nodes[...].chunk[0]`); " + FIX),
        (put("nodes", "params/embed", "chunk", value=[2**40, 4]),
         "state.params.embed has an impossible dtype, shape or cut; " + FIX),
        (put("nodes", "params/embed", "shard", value=[2**40 * 5, 4]),
         "state.params.embed has an impossible dtype, shape or cut; " + FIX),
        (put("files", "step/c", "size", value=10**15), "step/c is not as its nodes call for; " + FIX),
        (put("files", "../x", value={"size": 1, "crc32c": "0" * 8}), "../x is not as its nodes call for; " + FIX),
        (put("files", "step/c", "crc32c", value="zz"),
         "is no manifest (Expected `str` matching regex '^([0-9a-f]{8})*$' - at `$.files[...].crc32c`); " + FIX),
        (put("files", "step/c", "crc32c", value="0" * 16), "step/c is not as its nodes call for; " + FIX),
        (put("files", "step/c", "crc32c", value=""), "step/c is not as its nodes call for; " + FIX),
        (lambda d: d["files"].pop("zarr.json") and None, "zarr.json is not as its nodes call for; " + FIX),
        (lambda d: d["files"].pop("step/c") and None, "step/c is not as its nodes call for; " + FIX),
        (lambda d: d["nodes"].pop("step") and None, "step/c is not as its nodes call for; " + FIX),
    ]),
)  # fmt: skip
def test_a_manifest_that_contradicts_itself_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = save(tmp_path / "a", example())
    rewrite(path, change)
    assert refused(lambda: load(path)) == f"{path}/manifest.json: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    numbered([
        (put("attributes", "purestep", "format", value=2), "format=2 must be 1"),
        (put("zarr_format", value=2), "is no root of a checkpoint (Invalid enum value 2 - at `$.zarr_format`)"),
        (lambda d: d["attributes"]["purestep"].pop("recipe") and None,
         "must hold a recipe just when manifest.json names one"),
        (put("attributes", "purestep", "code", value="import os"),
         "is no root of a checkpoint (Object contains unknown field `code` - at `$.attributes.purestep`)"),
    ]),
)  # fmt: skip
def test_a_root_group_that_says_something_else_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = save(tmp_path / "a", example())
    document = json.loads((path / "zarr.json").read_text())
    change(document)
    replace_root(path, json.dumps(document).encode())
    assert refused(lambda: load(path)) == f"{path}/zarr.json: {message}; {FIX}"


def test_metadata_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    info = '{"a":' * 100_000 + "1" + "}" * 100_000
    document = json.loads((path / "zarr.json").read_text())
    document["attributes"]["purestep"]["info"] = "HERE"
    replace_root(path, json.dumps(document).replace('"HERE"', info).encode())
    assert "is no root of a checkpoint" in refused(lambda: load(path))


def test_a_recipe_of_another_version_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    document = json.loads((path / "zarr.json").read_text())
    document["attributes"]["purestep"]["recipe"]["model"]["width"] = "64"
    replace_root(path, json.dumps(document).encode())
    assert refused(lambda: load(path)) == (
        f"{path}: state.recipe: Expected `int`, got `str` - at `$.model.width`; read it with the purestep that wrote it"
    )
    load(path, keys=["params"])


def test_a_shard_with_another_index_is_refused_though_its_checksums_are_right(tmp_path: Path) -> None:
    path = save(tmp_path / "a", td(x=torch.arange(2.0**20 + 2)))
    shard = path / "x/c.0"
    data = bytearray(shard.read_bytes())
    data[-36:-20], data[-20:-4] = data[-20:-4], data[-36:-20]
    data[-4:] = crc32c(bytes(data[-36:-4]))
    shard.write_bytes(data)
    assert refused(lambda: load(path)) == (
        f"state.x: {shard} must have the crc32c that manifest.json gives it, so it is damaged; {FIX}"
    )


def test_all_but_chunks_is_plain_json(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    names = {name for name, data in tree(path).items() if data is not None}
    assert {name for name in names if not name.endswith(".json")} == {
        *("COMMIT", "cursor/text/epoch/c", "cursor/text/row/c", "params/blocks/wq/c.0.0.0", "params/embed/c.0.0"),
        "step/c",
    }
    for name in names:
        if name.endswith(".json"):
            json.loads((path / name).read_text())
