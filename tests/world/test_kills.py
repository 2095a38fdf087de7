"""Two hundred kills at random moments of runs that save all the time: nothing is lost, and none goes on wrongly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.running import ROOT, TINY, text_folder

KILLS = 200
STEPS = 60

# One process imports torch once and forks the runs, with one thread: threads do not live through a fork.
PROGRAM = """
import hashlib, io, json, os, random, signal, sys, time
from contextlib import redirect_stdout, redirect_stderr
from pathlib import Path
import torch
import lib.run.train, lib.run.evals, lib.run.sampling
from lib.run.cli import main
from lib.store import load
from lib.store.folder import committed, step_name
from lib.tree import leaves
from tests.world.running import rows

torch.set_num_threads(1)
folder, kills, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
chance = random.Random(int(os.environ.get("SEED", "0")))

def run(name, *more):
    child = os.fork()
    if child:
        return child
    signal.alarm(120)
    with open(folder / f"{name}.out", "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        code = main([*words, f"run.dir={folder / name}", *more])
    os._exit(code)

def digest(place):
    state = load(place)
    found = hashlib.sha256()
    for path, leaf in leaves(state).items():
        found.update(path.encode() + leaf.numpy().tobytes())
    return found.hexdigest()

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert ended(run("whole", "checkpoint.every=1", "checkpoint.keep=none")) == 0
right = {step: digest(folder / "whole" / "checkpoints" / step_name(step)) for step in committed(folder / "whole/checkpoints")}
lines = rows(folder / "whole")
told = {"kills": 0, "saving": 0, "deleting": 0, "completed": 0, "steps": []}
number, last = 0, -1
while told["kills"] < kills:
    name = f"run{number}"
    checkpoints = folder / name / "checkpoints"
    before = set(os.listdir(checkpoints)) if checkpoints.is_dir() else set()
    child = run(name)
    # A third when something has begun to be written, a third soon after a checkpoint, a third at any time.
    kind, after = told["kills"] % 3, chance.randrange(8)
    until = time.monotonic() + (chance.uniform(0, 3) if kind == 2 else 20)
    seen = set()
    while time.monotonic() < until:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        if kind == 2 or not checkpoints.is_dir():
            time.sleep(0.001)
            continue
        mark = "." if kind == 0 else "step_"
        seen |= {entry for entry in os.listdir(checkpoints) if entry.startswith(mark)} - before
        if len(seen) > after:
            time.sleep(chance.uniform(0, 0.02))
            break
    os.kill(child, signal.SIGKILL)
    code = ended(child)
    if code == -signal.SIGKILL:
        told["kills"] += 1
        hidden = [entry for entry in os.listdir(checkpoints) if entry.startswith(".")] if checkpoints.is_dir() else []
        told["saving"] += any(entry.startswith(".saving") for entry in hidden)
        told["deleting"] += any(entry.startswith(".deleting") for entry in hidden)
    else:
        assert code == 0, (code, (folder / f"{name}.out").read_text()[-2000:])
    steps = committed(checkpoints)
    assert not steps or steps[-1] >= last, ("lost", steps, last)
    assert steps or last < 0, ("lost", steps, last)
    for step in steps:
        assert digest(checkpoints / step_name(step)) == right[step], ("wrong", name, step)
    last = max(steps, default=-1)
    told["steps"].append(last)
    if code == 0:
        assert rows(folder / name) == lines, "other lines"
        told["completed"] += 1
        number, last = number + 1, -1
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_kills_lose_nothing(tmp_path: Path) -> None:
    words = [*TINY, f"data.path={text_folder(tmp_path / 'text')}", f"data.cache={tmp_path / 'cache'}", f"steps={STEPS}"]
    words += [
        "checkpoint.every=2",
        "checkpoint.keep=2",
        "eval.every=0",
        "sample.length=0",
        "log.every=1",
        "data.workers=1",
    ]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(KILLS), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["kills"] == KILLS
    assert told["completed"] >= 3  # kills at every stage of several runs
    assert told["saving"] >= 20  # many were struck in the middle of a save
