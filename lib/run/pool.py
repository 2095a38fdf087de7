"""Work spread over processes that import no torch: text is prepared on all cores, however much of it there is.

Each process is given one job at a time. It ends with the one that started it, also when that one is killed; signals are
the driver's affair alone. An error comes back as what it was, with the traceback of where it happened as its note.
"""

from __future__ import annotations

import os
import queue
import socket
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from lib.errors import DataError
from lib.run.crew import Worker, close, end, fate, start
from lib.run.worker import listen, packed, receive_bytes, send_bytes, send_call, settle, unpacked

__all__ = ["main", "spread"]


class _Done(NamedTuple):
    """What became of a job: its result, or what it raised and where."""

    result: Any
    error: BaseException | None = None
    trace: str = ""


def spread(processes: int | None, least: int = 2) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]:
    """Make something like the builtin `map` that gives results as they are done.

    What it is given must be something that another process can import, and so must the values.

    Args:
        processes: how many; none = as many as cores.
        least: fewer jobs than this are done here, since starting a process takes longer.

    Raises:
        DataError: a process was ended from outside.
    """
    count = processes or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else processes or 1

    def doing(work: Callable[[Any], Any], jobs: Iterable[Any]) -> Iterable[Any]:
        todo = list(jobs)
        if count == 1 or len(todo) < least:
            yield from map(work, todo)
            return
        yield from _apart(min(count, len(todo)), work, todo)

    return doing


def main() -> None:
    """Do jobs as they come in, one after the other; the command line has the descriptor."""
    line, parent, _ = settle()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    calls: queue.SimpleQueue[bytes | bytearray] = queue.SimpleQueue()

    def take() -> bool:
        call = receive_bytes(line)
        if call is not None:
            calls.put(call)
        return call is not None

    listen(line, parent, take)
    with suppress(OSError):  # nobody is there any more
        while True:
            send_bytes(line, _packed(_done(calls.get())))


def _apart(count: int, work: Callable[[Any], Any], todo: Sequence[Any]) -> Iterator[Any]:
    crew, busy, jobs = list[Worker](), dict[socket.socket, Worker](), iter(todo)

    def hand(worker: Worker) -> None:
        for job in islice(jobs, 1):
            with suppress(ConnectionError):  # one that has died already is named when its result is wanted
                send_call(worker.line, partial(work, job), name="work")
            busy[worker.line] = worker

    try:
        for number in range(count):
            crew.append(start("lib.run.pool", number, setting="data.processes"))
        for worker in crew:  # only now: meanwhile all of them have been starting
            hand(worker)
        while busy:
            for line in wait(list(busy)):
                worker = busy.pop(line)  # type: ignore[arg-type]
                raw = receive_bytes(worker.line)
                if raw is None:
                    busy.clear()
                    raise _gone(worker)
                done: _Done = unpacked(raw)
                if done.error is not None:
                    done.error.add_note(f"in data worker {worker.number} (pid {worker.process.pid}):\n{done.trace}")
                    raise done.error
                hand(worker)
                yield done.result
    finally:
        # What is begun is finished first: nobody may go on writing when the caller believes that all has ended.
        for line in busy:
            receive_bytes(line)
        end(crew)
        close(crew)


def _gone(worker: Worker) -> DataError:
    return DataError(
        f"data.processes: a process that prepares text (pid {worker.process.pid}) {fate(worker)}, must live; "
        "run again to go on from what is done (data.processes=1 needs the least memory)"
    )


def _done(call: bytes | bytearray) -> _Done:
    try:
        return _Done(unpacked(call)())
    except BaseException as error:  # noqa: BLE001 - it is raised again where the result is wanted
        return _Done(None, error, "".join(traceback.format_exception(error)))


def _packed(done: _Done) -> memoryview:
    """Make it ready to be sent; a result or an error that cannot travel is an error that can."""
    try:
        raw = packed(done)
        unpacked(raw)
    except Exception as error:  # noqa: BLE001 - pickle raises what it likes
        lost = done.error or error
        return packed(_Done(None, RuntimeError(f"{type(lost).__name__}: {lost}"), done.trace))
    return raw
