"""Work spread over processes that import no torch: text is prepared on all cores, however much of it there is.

Each process ends with the one that started it, also when that one is killed; signals are the driver's affair alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from lib.errors import DataError

__all__ = ["spread"]


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
        with ProcessPoolExecutor(
            min(count, len(todo)), mp_context=multiprocessing.get_context("spawn"), initializer=_settle
        ) as pool:
            try:
                results = [pool.submit(work, job) for job in todo]
                for result in as_completed(results):
                    yield result.result()
            except BrokenProcessPool:
                raise DataError(
                    "data.processes: a process that prepares text was ended from outside, must live; "
                    "run again to go on from what is done (data.processes=1 needs the least memory)"
                ) from None
            finally:
                # What is begun is finished first: nobody may go on writing when the caller believes that all has ended.
                pool.shutdown(cancel_futures=True)

    return doing


def _settle() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
