"""Work spread over processes that import no torch: text is prepared on all cores, however much of it there is.

Each process ends with the one that started it, also when that one is killed; signals are the driver's affair alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from lib.errors import DataError

__all__ = ["spread"]

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def spread(processes: int | None, least: int = 2) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]:
    """Make something like the builtin `map` that gives results as they are done.

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


def _apart(count: int, work: Callable[[Any], Any], todo: Sequence[Any]) -> Iterator[Any]:
    others = multiprocessing.active_children()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=spawn, initializer=_settle) as pool:
        try:
            with _unheard():
                results = [pool.submit(work, job) for job in todo]
            for result in as_completed(results):
                yield result.result()
        except BrokenProcessPool:
            # Who died may have held what the rest wait for, and these heed nothing less.
            for process in multiprocessing.active_children():
                if process not in others:
                    process.kill()
            raise DataError(
                "data.processes: a process that prepares text was ended from outside, must live; "
                "run again to go on from what is done (data.processes=1 needs the least memory)"
            ) from None
        finally:
            # What is begun is finished first: nobody may go on writing when the caller believes that all has ended.
            pool.shutdown(cancel_futures=True)


@contextmanager
def _unheard() -> Iterator[None]:
    """Hold signals back while processes are started: these inherit that, until they can ignore them."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _settle() -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
