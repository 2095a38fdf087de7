"""Several real ranks: updates on any mesh, checkpoints from any to any other, and what becomes of them when a rank fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.running import ROOT


def ranks(count: int, folder: Path, *tasks: str) -> str:
    """Run tasks of tests/world/mesh_tasks.py in so many processes; return what the first one prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.world.mesh_tasks", str(folder), *tasks],
            env={**os.environ, **world, "RANK": str(rank), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    ended = [process.communicate(timeout=240) for process in processes]
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, f"{out}\n{err}"
    return ended[0][0]


@pytest.mark.slow
def test_every_mesh_loads_what_every_mesh_has_saved(tmp_path: Path) -> None:
    tasks = ("every_pair", "work_is_shared", "training_goes_on")
    assert ranks(4, tmp_path, *tasks).splitlines() == [f"{task}: held" for task in tasks]


@pytest.mark.slow
def test_ranks_fail_together_and_lose_nothing(tmp_path: Path) -> None:
    tasks = ("one_fails", "ranks_disagree", "first_rank_decides", "one_reads_damage", "in_the_background")
    assert ranks(4, tmp_path, *tasks).splitlines() == [f"{task}: held" for task in tasks]


def test_a_rank_that_dies_in_a_save_leaves_no_checkpoint_and_nobody_waiting(tmp_path: Path) -> None:
    ranks(2, tmp_path, "one_is_killed")


def test_two_ranks_make_the_update_of_one_and_send_no_more_than_they_must(tmp_path: Path) -> None:
    tasks = ("sums_are_exact", "messages_are_counted", "batches_that_do_not_fit")
    assert ranks(2, tmp_path, *tasks).splitlines() == [f"{task}: held" for task in tasks]


@pytest.mark.slow
def test_any_mesh_makes_the_update_of_one_process_compiled_too(tmp_path: Path) -> None:
    tasks = ("rows_are_shared", "states_are_laid", "sums_are_exact", "compiled_on_ranks")
    assert ranks(4, tmp_path, *tasks).splitlines() == [f"{task}: held" for task in tasks]
