"""Batches made ahead of the step, by a thread or by worker processes: a cache and nothing more.

The n-th batch of a launch is a function of n, so the batches and their order are the same however many workers make
them and however far ahead, and what was made and not used leaves no trace. With workers, batch n is made by worker
n mod W. Closing never hangs and leaves no process; an error is raised where the batch was wanted, with the traceback of
where it happened.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from tensordict import TensorDict

from lib.errors import DataError
from lib.run.crew import Worker, close, end, fate, start
from lib.run.worker import Failure, receive, send_call

__all__ = ["feed", "pinned"]

PATIENCE_S = 5.0

_Made = Mapping[str, Any]


@contextmanager
def feed(
    make: Callable[[int], _Made], finish: Callable[[_Made], TensorDict], *, ahead: int, workers: int = 0
) -> Iterator[Iterator[TensorDict]]:
    """Give the endless sequence of batches of a launch.

    Args:
        make: makes batch n, as NumPy arrays and plain values by name. For workers it must be something that another
            process can import, and what it imports decides how soon a worker starts.
        finish: makes it what the step takes; called in this process, in order, by one thread at a time.
        ahead: how many batches may wait; 0 = each is finished when it is asked for, with no thread.
        workers: processes that make batches; 0 = they are made here. Each makes at most its part of `ahead`, one at
            least, before they are received, and two more wait in this process.

    Yields:
        An iterator over the batches. On leaving the block the thread and the processes have ended; a thread that has
        not returned from a read 5 s later is left to itself, since it keeps nobody from ending.

    Raises:
        ValueError: a number is negative, or `make` cannot be sent to a worker.
    """
    for name, value in (("ahead", ahead), ("workers", workers)):
        if value < 0:
            raise ValueError(f"data.{name}={value} must be >= 0")
    crew = _start(make, workers, ahead)
    batches = map(finish, _received(crew) if crew else map(make, itertools.count()))
    if not ahead:
        try:
            yield batches
        finally:
            end(crew)
            close(crew)
        return
    line: queue.Queue[TensorDict | BaseException] = queue.Queue(maxsize=1 if crew else ahead)
    stop = threading.Event()
    # A daemon, so that a read that never returns cannot keep a finished process alive.
    thread = threading.Thread(target=_fill, args=(batches, line, stop), name="feed", daemon=True)
    thread.start()
    try:
        yield _drain(line)
    finally:
        stop.set()
        end(crew)  # before the thread, which may be waiting for one of them
        _join(thread, line)
        close(crew)


def pinned(batch: TensorDict, device: torch.device) -> TensorDict:
    """Begin to copy a batch to an accelerator while the step before it still runs there; on the CPU, the batch itself.

    Untested on a device.
    """
    return batch if device.type == "cpu" else batch.pin_memory().to(device, non_blocking=True)


def _start(make: Callable[[int], _Made], workers: int, ahead: int) -> list[Worker]:
    crew: list[Worker] = []
    try:
        for number in range(workers):
            words = (number, workers, max(1, -(-ahead // workers)))
            crew.append(start("lib.run.worker", number, words, setting="data.workers"))
        for worker in crew:  # only now: meanwhile all of them have been starting
            with suppress(ConnectionError):  # one that has died already is named when its batch is wanted
                send_call(worker.line, make, name="make")
    except BaseException:
        end(crew)
        close(crew)
        raise
    return crew


def _received(crew: list[Worker]) -> Iterator[_Made]:
    for worker in itertools.cycle(crew):
        batch = receive(worker.line)
        if batch is None:
            raise _gone(worker)
        if isinstance(batch, Failure):
            raise _again(worker, batch)
        with suppress(OSError):  # it may have ended since, which counts when its next batch is wanted
            worker.line.send(b"\0")
        yield batch


def _again(worker: Worker, failure: Failure) -> Exception:
    """Make a worker's error an error of this process, of the same kind where callers tell kinds apart."""
    kinds: dict[str, type[Exception]] = {"DataError": DataError, "ValueError": ValueError}
    kind = kinds.get(failure.kind)
    error = kind(failure.text) if kind else RuntimeError(f"{failure.kind}: {failure.text}")
    error.add_note(f"in data worker {worker.number} (pid {worker.process.pid}):\n{failure.trace}")
    return error


def _gone(worker: Worker) -> DataError:
    who = f"data worker {worker.number} (pid {worker.process.pid}) {fate(worker)}"
    return DataError(f"{who}, must live as long as the run; free memory or lower data.workers, then run it again")


def _fill(batches: Iterator[TensorDict], line: queue.Queue[TensorDict | BaseException], stop: threading.Event) -> None:
    try:
        for batch in batches:
            line.put(batch)
            if stop.is_set():
                return
    except BaseException as error:  # noqa: BLE001 - it is raised again where the batch is wanted
        line.put(error)


def _drain(line: queue.Queue[TensorDict | BaseException]) -> Iterator[TensorDict]:
    while True:
        item = line.get()
        if isinstance(item, BaseException):
            raise item
        yield item


def _join(thread: threading.Thread, line: queue.Queue[TensorDict | BaseException]) -> None:
    tries = int(PATIENCE_S / 0.01)
    while thread.is_alive() and tries:
        # A thread that waits for room in the line gets it, and then sees that it is to stop.
        while not line.empty():
            line.get_nowait()
        thread.join(0.01)
        tries -= 1
