"""Batches made ahead of the step by a thread: a cache and nothing more.

A batch is a function of its cursor and brings the next one, so the batches are the same however many are made ahead,
and what was made and not used leaves no trace. Closing never hangs; an error in the thread is raised where the batch
was wanted.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensordict import TensorDict

from lib.data.batch import cursor_of
from lib.data.rows import Cursor

__all__ = ["feed"]

PATIENCE_S = 5.0


@contextmanager
def feed(make: Callable[[Cursor], TensorDict], start: Cursor, *, ahead: int) -> Iterator[Iterator[TensorDict]]:
    """Give the endless sequence of batches that begins at a cursor.

    Args:
        make: makes the batch at a cursor; called in order, by one thread at a time.
        start: cursor of the first batch.
        ahead: how many batches may wait; 0 = each is made when it is asked for, with no thread.

    Yields:
        An iterator over the batches. On leaving the block the thread has ended.

    Raises:
        ValueError: `ahead` is negative.
    """
    if ahead < 0:
        raise ValueError(f"data.ahead={ahead} must be >= 0")
    batches = _chain(make, start)
    if not ahead:
        yield batches
        return
    line: queue.Queue[TensorDict | BaseException] = queue.Queue(maxsize=ahead)
    stop = threading.Event()
    # A daemon, so that a read that never returns cannot keep a finished process alive.
    thread = threading.Thread(target=_fill, args=(batches, line, stop), name="feed", daemon=True)
    thread.start()
    try:
        yield _drain(line)
    finally:
        stop.set()
        _join(thread, line)


def _chain(make: Callable[[Cursor], TensorDict], cursor: Cursor) -> Iterator[TensorDict]:
    while True:
        batch = make(cursor)
        yield batch
        cursor = cursor_of(batch["cursor"])


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
    if thread.is_alive():
        warnings.warn(f"feed: a batch was not made within {PATIENCE_S:g} s; its reader is left behind", stacklevel=4)
