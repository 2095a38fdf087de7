"""Signals as a question the loop asks: the first one asks for an end at the next safe place, a second leaves at once.

SIGINT, SIGTERM and SIGHUP mean the same. Inside `at_once()` nothing is worth finishing (text is being read, a
checkpoint has just been saved), so there the first signal ends the process instead of waiting to be asked for; and so
does a second one anywhere. Ending it takes no further line of Python, since what is on disk is committed by renames, whole
or not at all. An exception would not do: raised in the middle of an import or of the compiler it meets C++ code that
aborts, or turns it into another error.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import NamedTuple

__all__ = ["AGAIN", "INTERRUPTED", "Interrupted", "Signals", "watched"]

AGAIN = "interrupted: nothing is lost, run the same command again to go on"
INTERRUPTED = 75  # exit code: everything is saved, run it again to go on (EX_TEMPFAIL of sysexits.h)
_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal had arrived when work that can be dropped was about to begin. No `Exception`, so no library swallows it."""


class Signals(NamedTuple):
    """How the driver sees signals."""

    asked: Callable[[], bool]  # has one arrived
    at_once: Callable[[], AbstractContextManager[None]]  # within it, one ends the process


@contextmanager
def watched() -> Iterator[Signals]:
    """Watch the signals until the block ends; only in the main thread. An ignored signal (nohup) stays ignored."""
    first: list[int] = []
    depth = [0]

    def arrived(number: int, _frame: FrameType | None) -> None:
        if first:
            _leave(number)
        first.append(number)
        note = (
            "leaving, nothing here needs saving" if depth[0] else "saving after this step; once more to leave at once"
        )
        _write(f"\n{signal.Signals(number).name}: {note}\n")
        if depth[0]:
            _drop()

    @contextmanager
    def at_once() -> Iterator[None]:
        depth[0] += 1
        try:
            if first:  # it came while waiting was right; here it is not
                raise Interrupted
            yield
        except Exception:
            if first:  # Ctrl-C at a terminal ends the compiler's own processes too
                raise Interrupted from None
            raise
        finally:
            depth[0] -= 1

    before = {number: signal.getsignal(number) for number in _WATCHED}
    for number, was in before.items():
        if was is not signal.SIG_IGN:
            signal.signal(number, arrived)
    try:
        yield Signals(asked=lambda: bool(first), at_once=at_once)
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _drop() -> None:
    _show_cursor()
    _write(f"{AGAIN}\n")
    os._exit(INTERRUPTED)


def _leave(number: int) -> None:
    _show_cursor()
    _write(f"{signal.Signals(number).name} again: leaving at once; committed checkpoints are whole\n")
    os._exit(128 + number)


def _show_cursor() -> None:
    if os.isatty(1):  # the live display hides it
        os.write(1, b"\x1b[?25h\n")


def _write(text: str) -> None:
    """Straight to the descriptor: a handler may run in the middle of a print."""
    try:
        os.write(2, text.encode())
    except OSError:  # nobody listens any more; the signal still counts
        return
