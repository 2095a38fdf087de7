"""Kill a run with SIGKILL wherever it is, start it again, and it ends with the bits of a run that was never killed."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lib.store import load
from lib.tree import leaves

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"
SETTINGS = (
    f"steps=60 data.path={TEXT} model.width=32 model.depth=2 model.heads=2 model.dropout=0.1 batch.rows=8 batch.length=32 "
    "batch.micro=2 checkpoint.every=5 eval.every=0 log.every=5 sample.length=0 compile=off"
).split()


def start(folder: Path) -> subprocess.Popen[bytes]:
    """The program as a person would run it."""
    words = [sys.executable, "-m", "lib.run", *SETTINGS, f"run.dir={folder}", f"data.cache={folder.parent / 'cache'}"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


with tempfile.TemporaryDirectory() as place:
    whole, killed = Path(place) / "whole", Path(place) / "killed"
    assert start(whole).wait() == 0
    for wanted in (5, 25):
        run = start(killed)
        while not (killed / f"checkpoints/step_{wanted:010d}").exists() and run.poll() is None:
            time.sleep(0.02)
        run.kill()
        print(f"killed after the checkpoint of step {wanted}; exit status {run.wait()}")
    assert start(killed).wait() == 0
    one, other = leaves(load(whole)), leaves(load(killed))
    same = all(torch.equal(leaf, other[path]) for path, leaf in one.items())
    print(
        f"step {int(one['step'])}: killed twice and resumed equals never killed, {len(one)} leaves bit for bit:", same
    )
    sys.exit(not same)
