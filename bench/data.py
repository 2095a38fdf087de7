"""Text in: preparing it, making batches, seeking, and whether memory grows with the corpus.

    python -m bench data [part=prepare,batches,seek,memory] [megabytes=256]

Rates are of this machine; what is compared within one run is a ratio: batches against the step that uses them, memory of a
large corpus against a small one, the seek against the start. The corpora are made of the standard library's text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import record

PARTS = "prepare,batches,seek,memory"


def run(part: str = PARTS, megabytes: str = "256") -> None:
    """Measure the parts that are named."""
    for name in part.split(","):
        {"prepare": _prepare, "batches": _batches, "seek": _seek, "memory": _memory}[name](int(megabytes))


def _text(size: int) -> Iterator[bytes]:
    """Source files of the standard library, over and over, until there are so many bytes."""
    files = sorted(Path(os.__file__).parent.rglob("*.py"))
    while size > 0:
        for path in files:
            text = path.read_bytes()
            if b"\0" not in text and text and size > 0:
                yield text
                size -= len(text)


def _plain(folder: Path, size: int) -> Path:
    path = folder / "plain"
    path.mkdir()
    for number, text in enumerate(_text(size)):
        (path / f"{number:06d}.py").write_bytes(text)
    return path


def _large(folder: Path, size: int) -> Path:
    """Files of a megabyte."""
    path = folder / "large"
    path.mkdir()
    held, number = b"", 0
    for text in _text(size):
        held += text
        if len(held) >= 10**6:
            (path / f"{number:06d}.py").write_bytes(held)
            held, number = b"", number + 1
    return path


def _jsonl(folder: Path, size: int) -> Path:
    path = folder / "text.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(_text(size)):
            whole = text.decode("utf-8", "replace")
            for at in range(0, len(whole), 2000):
                row = {"id": f"{number}-{at}", "text": whole[at : at + 2000], "meta": {"lang": "py", "at": at}}
                file.write(json.dumps(row) + "\n")
    return path


CORPORA: dict[str, Callable[[Path, int], Path]] = {"plain text": _plain, "JSONL": _jsonl}


def _prepare(megabytes: int) -> None:
    from lib.run.pool import spread
    from lib.store.corpus import scan
    from lib.store.making import Making
    from lib.store.tokens import Split, prepare

    for name, make in CORPORA.items():
        with tempfile.TemporaryDirectory() as root:
            path = make(Path(root), megabytes * 10**6)
            times = []
            for turn in range(3):
                begin = time.perf_counter()
                corpus = scan(path)
                prepare(corpus, Making(), Split(0.01, "auto"), cache=Path(root) / f"{turn}", doing=spread(None))
                times.append(time.perf_counter() - begin)
            size = corpus.size / 1e6
            record(
                "data", f"prepare {name}", mb=size, mb_per_s=size / sorted(times)[1], best_mb_per_s=size / min(times)
            )


def _batches(_megabytes: int) -> None:
    from functools import partial

    from lib.config import Config, recipe_of
    from lib.data.arrays import arrays_after
    from lib.data.batch import batch_of
    from lib.data.plan import Plan
    from lib.data.rows import Cursor
    from lib.data.share import Share
    from lib.data.source import Source
    from lib.run.compile import faster
    from lib.run.feed import feed
    from lib.state import init_state
    from lib.step import train_step
    from lib.store.corpus import scan
    from lib.store.making import Making
    from lib.store.plans import row_table
    from lib.store.tokens import Split, prepare

    recipe = recipe_of(Config())
    with tempfile.TemporaryDirectory() as root:
        store = prepare(scan("stdlib:"), Making(), Split(0.01, "auto"), cache=Path(root))
        for mode in ("concat", "pack"):
            plan = Plan(recipe.batch.rows, recipe.batch.length, mode=mode)
            table = None if mode == "concat" else row_table(store.train, mode, plan.length)
            source = Source("text", store.train, 1, table)
            make = partial(arrays_after, (source,), plan, 0, {"text": Cursor(0, 0)}, 0, Share())
            for workers in (0, 1):
                with feed(make, batch_of, ahead=4, workers=workers) as batches:
                    next(batches)
                    begin = time.perf_counter()
                    for _ in islice(batches, 300):
                        pass
                    rate = 300 / (time.perf_counter() - begin)
                    step, state = faster(train_step, compile=True), init_state(recipe)
                    wait = taken = 0.0
                    for number in range(14):
                        begin = time.perf_counter()
                        batch = next(batches)
                        middle = time.perf_counter()
                        state, _ = step(state, batch)
                        if number >= 4:  # the first ones compile
                            wait, taken = wait + middle - begin, taken + time.perf_counter() - middle
                record(
                    "data",
                    f"batches {mode}, {workers} workers",
                    ratio=rate * taken / 10,
                    batches_per_s=rate,
                    step_s=taken / 10,
                    waiting=wait / (wait + taken),
                )


class _Endless:
    """A corpus of 10^12 ids that holds none of them."""

    size, vocab, eos, shared = 10**12, 260, 2, True
    offsets = np.array([0, 10**12], dtype=np.int64)
    sizes = np.ones(260, dtype=np.uint16)

    def ids(self, start: int, stop: int) -> Any:
        return np.full(stop - start, 50, dtype=np.uint16)

    def mask(self, _start: int, _stop: int) -> None:
        return None


def _seek(_megabytes: int) -> None:
    from lib.data.arrays import arrays_after
    from lib.data.plan import Plan
    from lib.data.rows import Cursor
    from lib.data.share import Share
    from lib.data.source import Source

    sources, plan = (Source("text", _Endless()),), Plan(16, 256)

    def seek(updates: int) -> None:
        arrays_after(sources, plan, 0, {"text": Cursor(0, 0)}, 0, Share(), updates)

    times = []
    for updates in [0, *range(10**8, 10**9, 10**7)]:
        begin = time.perf_counter()
        seek(updates)
        times.append(time.perf_counter() - begin)
    tracemalloc.start()
    seek(10**9 + 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    record(
        "data",
        "seek in 10^12 ids",
        ms=1e3 * sorted(times[1:])[len(times) // 2],
        most_ms=1e3 * max(times[1:]),
        mb=peak / 1e6,
    )


def _memory(megabytes: int) -> None:
    """Peak memory of preparing and of reading batches, small corpus and large, each in a process of its own.

    The names and digests of files have to be kept, so it grows with their number; with their size it must not.
    """
    small, large = 50, max(500, 8 * megabytes)
    for name, make in (
        ("JSONL", _jsonl),
        ("plain text in files of 1 MB", _large),
        ("plain text in files of 14 kB", _plain),
    ):
        peaks: dict[tuple[int, str], float] = {}
        for size in (small, large):
            with tempfile.TemporaryDirectory() as root:
                path = make(Path(root), size * 10**6)
                for what in ("prepare", "feed"):
                    words = [sys.executable, "-m", "bench.data", what, str(path), str(Path(root) / "cache")]
                    done = subprocess.run(words, capture_output=True, text=True, check=True)
                    peaks[size, what] = float(done.stdout.splitlines()[-1])
        for what in ("prepare", "feed"):
            a, b = peaks[small, what], peaks[large, what]
            record("data", f"memory of {what}, {name}", ratio=b / a, small_mb=a, large_mb=b, of=[small, large])


def _peak(what: str, path: str, cache: str) -> None:
    """Print the peak memory of this process and those it starts, in MB, while it prepares or reads batches."""
    import threading

    import psutil

    from lib.data.arrays import arrays_after
    from lib.data.plan import Plan
    from lib.data.rows import Cursor
    from lib.data.share import Share
    from lib.data.source import Source
    from lib.run.pool import spread
    from lib.store.corpus import scan
    from lib.store.making import Making
    from lib.store.stream import open_stream
    from lib.store.tokens import Split, prepare

    me, peak, done = psutil.Process(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:  # not the index that is mapped: those pages are the disk's, and given back when they are wanted
                    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
                except OSError:
                    continue
                total += 1000 * int(text.partition("Anonymous:")[2].split()[0])
            peak[0] = max(peak[0], total / 1e6)

    threading.Thread(target=watch, daemon=True).start()
    if what == "prepare":
        prepare(scan(path), Making(), Split(0.01, "auto"), cache=Path(cache), doing=spread(2, least=1))
    else:
        source = Source("text", open_stream(next(Path(cache).glob("*/COMMIT")).parent / "train"))
        for update in range(2000):
            arrays_after((source,), Plan(16, 256), 0, {"text": Cursor(0, 0)}, 0, Share(), update * 7)
    done.set()
    print(peak[0])


if __name__ == "__main__":
    _peak(*sys.argv[1:])
