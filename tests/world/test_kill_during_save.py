"""A process that saves without end is killed at random moments; every checkpoint it committed loads, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

from lib.store import load
from tests.checkpoints import td

ROUNDS = 10

# One process imports torch once and forks the savers, with one thread: threads do not live through a fork.
PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from lib.store import load, save
from lib.store.folder import committed, prune, step_name
from lib.store.retention import Policy
from tests.checkpoints import assert_same
from tests.world.test_kill_during_save import made

torch.set_num_threads(1)
root, rounds = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(0)
last = 0
for n in range(rounds):
    saver = os.fork()
    if saver == 0:
        signal.alarm(60)
        for step in range(last + 1, last + 10**6):
            save(root / step_name(step), made(step))
            prune(root, Policy(last=3))
    while max(committed(root), default=0) == last:
        os.kill(saver, 0)
    time.sleep(chance.uniform(0, 0.05))
    os.kill(saver, signal.SIGKILL)
    _, status = os.waitpid(saver, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    hidden = [name for name in os.listdir(root) if name.startswith(".")]
    steps = committed(root)
    for step in steps:
        assert_same(load(root / step_name(step)), made(step))
    last = steps[-1]
    print(json.dumps([steps, hidden]), flush=True)
"""


def made(step: int) -> TensorDict:
    """A state that cannot be mixed up with that of another step."""
    leaves = {f"w{i}": torch.full((1000 + i,), float(step + i)) for i in range(8)}
    return td(step=torch.tensor(step), params=td(**leaves))


def test_every_committed_checkpoint_of_a_killed_process_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "checkpoints"), str(ROUNDS)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, check=True, timeout=120)
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == ROUNDS
    for steps, _ in rounds:
        assert steps == list(range(steps[0], steps[-1] + 1))
        assert len(steps) in (3, 4) or steps[0] == 1  # kept, and at most one more that was not yet pruned
    newest = [steps[-1] for steps, _ in rounds]
    assert newest == sorted(set(newest))  # each life went on from the last one
    assert any(hidden for _, hidden in rounds)  # some were struck in the middle of a save
    assert load(tmp_path)["step"] == newest[-1]
