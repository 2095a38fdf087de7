"""Worker processes of this one: started without its main module, spoken to over a socket each, and ended for good.

They share nothing, no lock and no semaphore, so one that is killed holds up none of the others, and when this process is
ended without a further line of Python nothing is left that anybody would have to clear away: they notice, and end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lib.errors import DataError
from lib.run.worker import WATCHED

__all__ = ["Worker", "close", "end", "fate", "start"]

PATIENCE_S = 5.0


class Worker(NamedTuple):
    """A process that was started, and the line to it."""

    number: int
    process: subprocess.Popen[bytes]
    line: socket.socket


def start(module: str, number: int, words: Sequence[int] = (), *, setting: str) -> Worker:
    """Start a process that calls `main()` of a module.

    Args:
        module: imported there under this name; what it imports decides how soon the process works.
        number: of the worker.
        words: for its command line, behind the descriptor of its end of the line.
        setting: that says how many there are, for the error.

    Raises:
        DataError: the system will not start another process.
    """
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(where or str(Path.cwd()) for where in sys.path)
    # One thread each: their arithmetic is small, and others want the cores.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # A signal that came while the worker starts would end it with a traceback; it inherits that they are blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {module} import main; main()", *map(str, (theirs.fileno(), *words))],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    except OSError as error:
        ours.close()
        raise DataError(f"data worker {number} cannot be started ({error.strerror}); lower {setting}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Worker(number, process, ours)


def fate(worker: Worker) -> str:
    """Say how a worker ended that is not heard of any more."""
    try:
        code = worker.process.wait(1)
    except subprocess.TimeoutExpired:
        return "has hung up"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end(crew: Sequence[Worker]) -> None:
    """End workers: they hold nothing that needs saving, and killing is the end that always comes.

    One that the system does not let go of within a while (a read from a disk that hangs) is waited for no longer.
    """
    for worker in crew:
        worker.process.kill()
    for worker in crew:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(PATIENCE_S)
        # Not closed yet: a thread may be reading, and could find another file under the same number.
        with suppress(OSError):
            worker.line.shutdown(socket.SHUT_RDWR)


def close(crew: Sequence[Worker]) -> None:
    """Close the lines to workers that have ended."""
    for worker in crew:
        worker.line.close()
