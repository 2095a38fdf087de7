"""Checkpoints in S3: a real server on loopback, the real client, and whole runs of the driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import zarr
from tensordict import TensorDict

from lib.errors import CheckpointError
from lib.store import bucket, load, save
from lib.store.bucket import Bucket
from lib.store.checkpoint import read_info
from lib.store.folder import committed, latest, prune, step_name, sweep
from lib.store.retention import Policy
from tests.checkpoints import assert_same, td
from tests.s3 import ONCE, S3Server
from tests.world.running import TINY, hasten, rows, run_apart, run_here, text_folder
from tests.world.running import bits as bits_of


@pytest.fixture
def folder(server: S3Server) -> Bucket:
    files = fsspec.filesystem("s3", **server.options, **ONCE, use_listings_cache=False)
    name = server.new_bucket()
    return Bucket(files, f"{name}/run/checkpoints", f"s3://{name}/run/checkpoints")


def state(n: int) -> TensorDict:
    return td(step=torch.tensor(n), params=td(w=torch.arange(5.0) + n, b=torch.tensor([-0.0]).bfloat16()), none=td())


def test_a_state_comes_back_from_s3_with_its_bits(folder: Bucket) -> None:
    for step in (1, 2):
        save(folder.child(step_name(step)), state(step), info={"threads": 2})
    assert committed(folder) == [1, 2]
    assert latest(folder) == f"{folder}/{step_name(2)}"
    assert_same(load(folder), state(2))
    assert_same(load(folder.child(step_name(1))), state(1))
    assert_same(load(folder, keys=["params.w"]), td(params=td(w=state(2)["params", "w"])))
    assert read_info(folder) == {"threads": 2}
    assert save(folder.child(step_name(2)), state(2)) == f"{folder}/{step_name(2)}"
    with pytest.raises(CheckpointError, match="another state is stored there already"):
        save(folder.child(step_name(2)), state(3))
    assert prune(folder, Policy(last=1)) == [1]
    assert committed(folder) == [2]


def test_what_is_in_s3_is_plain_zarr(folder: Bucket, tmp_path: Path) -> None:
    save(folder.child("a"), state(1))
    folder.files.get(f"{folder.root}/a", str(tmp_path / "a"), recursive=True)
    array = zarr.open_group(tmp_path / "a", mode="r")["params/w"]
    assert torch.from_numpy(array[:]).equal(state(1)["params", "w"])  # type: ignore[index, arg-type]


def test_a_large_leaf_goes_up_in_parts(folder: Bucket, server: S3Server) -> None:
    large = td(w=torch.arange(5 << 20, dtype=torch.float32))
    save(folder.child("a"), large)
    assert len([path for method, path in server.requests if method == "PUT" and "partNumber=" in path]) == 2
    assert_same(load(folder.child("a")), large)


def test_answers_that_pass_are_waited_for(folder: Bucket, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "FIRST_WAIT_S", 0.01)
    server.answer(503, times=3, only=lambda method, _: method == "PUT")
    server.drop(times=1, only=lambda method, path: method == "PUT" and path.endswith("COMMIT"), carried=True)
    server.delay(0.2, times=2)
    save(folder.child(step_name(1)), state(1))
    assert [path.rpartition("/")[2] for method, path in server.requests if method == "PUT"].count("COMMIT") == 2
    server.answer(500, times=2, only=lambda method, _: method == "GET")
    asked = len(server.requests)
    assert_same(load(folder), state(1))
    again = [path for method, path in server.requests[asked:] if method == "GET"]
    assert len(again) >= len(set(again)) + 2


def test_an_answer_that_lasts_ends_the_save_and_leaves_the_one_before(folder: Bucket, server: S3Server) -> None:
    save(folder.child(step_name(1)), state(1))
    server.answer(403, times=None, only=lambda method, path: method == "PUT" and "step_0000000002" in path)
    with pytest.raises(CheckpointError) as caught:
        save(folder.child(step_name(2)), state(2))
    assert str(caught.value) == (
        f"{folder}/{step_name(2)}: not saved (Access Denied), older checkpoints are untouched; check the bucket"
    )
    server.heal()
    assert committed(folder) == [1]
    assert folder.names() == [step_name(1)]
    save(folder.child(step_name(2)), state(2))
    assert_same(load(folder), state(2))


def test_a_save_whose_process_was_lost_is_no_checkpoint_and_goes_with_the_next_sweep(folder: Bucket) -> None:
    save(folder.child(step_name(1)), state(1))
    save(folder.child(step_name(2)), state(2))
    folder.files.rm_file(f"{folder.root}/{step_name(2)}/COMMIT")
    assert committed(folder) == [1]
    assert_same(load(folder), state(1))
    assert sweep(folder) == [f"{folder}/{step_name(2)}"]
    assert folder.names() == [step_name(1)]


def test_damage_in_s3_is_named_and_set_aside(folder: Bucket) -> None:
    for step in (1, 2):
        save(folder.child(step_name(step)), state(step))
    path = f"{folder.root}/{step_name(2)}/params/w/c.0"
    folder.files.pipe_file(path, b"\1" + folder.files.cat_file(path)[1:])
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "state.params.w: " in str(caught.value)
    assert f"the nearest good one is {folder}/{step_name(1)}, load=older takes it" in str(caught.value)
    assert latest(folder, older=True) == f"{folder}/{step_name(1)}"
    assert_same(load(folder), state(1))
    assert folder.names() == [step_name(1), step_name(2)]  # not deleted


@pytest.mark.slow
def test_more_than_a_thousand_objects_are_listed_and_deleted(folder: Bucket) -> None:
    many = td(**{f"w{number}": torch.tensor(number) for number in range(520)})
    save(folder.child(step_name(1)), many)
    assert_same(load(folder), many)
    save(folder.child(step_name(2)), state(2))
    assert prune(folder, Policy(last=1)) == [1]
    assert folder.names() == [step_name(2)]


def test_a_bucket_that_is_not_there_or_a_scheme_that_nobody_knows_is_named(folder: Bucket) -> None:
    absent = Bucket(folder.files, "no-such-bucket/run", "s3://no-such-bucket/run")
    with pytest.raises(
        CheckpointError, match="s3://no-such-bucket/run: must be a folder that is there; check the path"
    ):
        load(absent)
    with pytest.raises(CheckpointError, match="s3://no-such-bucket/run/a: not saved .* check the bucket"):
        save(absent.child("a"), state(1))
    with pytest.raises(ValueError, match="^ftq://x/y: must be a path or a URL that fsspec knows"):
        save("ftq://x/y", state(1))


@pytest.mark.slow
def test_a_run_keeps_its_checkpoints_in_s3_and_goes_on_from_there(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasten(monkeypatch)
    text = text_folder(tmp_path / "text")
    for name, value in {**server.environment, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    words = (*TINY, f"data.path={text}", "steps=8", "checkpoint.every=2", "checkpoint.keep=2")
    assert run_here(*words, f"run.dir={tmp_path / 'whole'}").code == 0

    where = f"s3://{server.new_bucket()}/runs/a"
    away = (*words, f"run.dir={tmp_path / 'away'}", f"checkpoint.dir={where}")
    ended = run_here(*away, "stop=5")
    assert ended.code == 0, ended.err
    assert not (tmp_path / "away" / "checkpoints").exists()
    assert committed(where) == [4, 5]
    ended = run_apart(f"run.dir={tmp_path / 'away'}")  # another process, which knows only the run folder
    assert ended.code == 0, ended.err
    assert committed(where) == [6, 8]
    assert rows(tmp_path / "away") == rows(tmp_path / "whole")
    assert _bits(where) == bits_of(tmp_path / "whole")
    for verb in ("eval", "inspect"):
        ended = run_here(verb, f"run.dir={tmp_path / 'away'}")
        assert ended.code == 0, ended.err

    # Where the run folder is lost, another one goes on from the bucket.
    server.answer(503, times=2, only=lambda method, _: method == "PUT")
    other = (*away[:-2], f"run.dir={tmp_path / 'other'}", f"checkpoint.dir={where}", "steps=10", "schedule.length=8")
    ended = run_here(*other)
    assert ended.code == 0, ended.err
    assert "going on from step 8 of 10" in ended.out
    assert committed(where) == [8, 10]


def _bits(where: str) -> dict[str, Any]:
    from lib.tree import leaves

    found = load(where)
    return {"recipe": found["recipe"], **{path: leaf.numpy().tobytes() for path, leaf in leaves(found).items()}}


def test_an_unreachable_bucket_is_found_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": f"nobody-{tmp_path.name}",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    text = text_folder(tmp_path / "text")
    ended = run_apart(*TINY, f"data.path={text}", f"run.dir={tmp_path / 'run'}", "checkpoint.dir=s3://bucket/a")
    assert ended.code == 5, ended.err
    assert ended.err.startswith("error: s3://bucket/a: cannot be read (")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
