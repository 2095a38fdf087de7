"""What the driver's tests share: a tiny run, launched in this process or its own, and how two runs are compared."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lib.run.cli import main
from lib.run.signals import Interrupted
from lib.store import load
from lib.tree import leaves

ROOT = Path(__file__).parents[2]

TINY = (str(Path(__file__).with_name("tiny.toml")),)


class Ended(NamedTuple):
    """How a launch ended."""

    code: int
    out: str
    err: str


def text_folder(folder: Path, *, words: int = 25, files: int = 4) -> Path:
    """Write a few files of text, the same ones each time."""
    folder.mkdir()
    draw = random.Random(1)
    for number in range(files):
        chosen = (draw.choice(("the", "cat", "sat", "on", "a", "mat", "\n")) for _ in range(words))
        (folder / f"{number}.txt").write_text(" ".join(chosen))
    return folder


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Leave out what takes most of a tiny run and is not asked about: pictures, and waiting for the disk.

    What was written survives the death of a process without a sync too; a sync is for the death of the machine.
    """
    patch.setattr("os.fsync", lambda _descriptor: None)
    patch.setattr("lib.run.signals._drop", _interrupt)  # which would end this process and all its tests
    for module in ("train", "start"):
        patch.setattr(f"lib.run.{module}.drawable", lambda: False)


def _interrupt() -> None:
    raise Interrupted


def run_here(*words: str) -> Ended:
    """Launch in this process: where no question is asked of processes, their start is not paid for."""
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(list(words))
    finally:
        torch.set_num_threads(threads)
    return Ended(code, out.getvalue(), err.getvalue())


def start(
    *words: str, program: tuple[str, ...] = ("-m", "lib.run"), terminal: str = "dumb", **options: Any
) -> subprocess.Popen[str]:
    """Launch in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TERM": terminal}
    return subprocess.Popen(
        [sys.executable, *program, *words],
        env=environment,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def run_apart(*words: str) -> Ended:
    """Launch in a process of its own and wait for it."""
    process = start(*words)
    out, err = process.communicate(timeout=120)
    return Ended(process.returncode, out, err)


def rows(run: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl but the header, without the fields that it names as the clock's."""
    header, *lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    clock = header["header"]["wall_clock"]
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def bits(run: Path) -> dict[str, Any]:
    """Every leaf of the newest state, as bytes, and its recipe."""
    state = load(run)
    return {"recipe": state["recipe"], **{path: leaf.numpy().tobytes() for path, leaf in leaves(state).items()}}


def files(folder: Path) -> dict[str, Any]:
    """Every file below a folder: content and time of its last change."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


PLAIN = ("scale.dynamic=none", "scale.initial=none")  # no refused updates


class Place:
    """A folder with text, where runs may be started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = text_folder(folder / "text")
        self.words = (*TINY, *PLAIN, "steps=4", "checkpoint.every=2", "eval.every=2", f"data.cache={folder / 'cache'}")

    def train(self, *words: str, name: str = "run") -> Ended:
        return run_here(*self.words, f"data.path={self.text}", f"run.dir={self.folder / name}", *words)

    def verb(self, verb: str, *words: str, name: str = "run") -> Ended:
        return run_here(verb, f"run.dir={self.folder / name}", *words)

    @property
    def run(self) -> Path:
        return self.folder / "run"


def kept(run: Path) -> dict[str, Any]:
    """What must not change in a run folder; who holds it may."""
    return {name: content for name, content in files(run).items() if not name.endswith("/.lock")}


def failed(ended: Ended, code: int) -> str:
    """The one line of a mistake."""
    assert ended.code == code, ended
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    return ended.err.removeprefix("error: ").rstrip("\n")
