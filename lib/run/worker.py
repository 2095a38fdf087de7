"""A process that makes every W-th batch and sends it on: what it does, and how a batch travels.

It keeps nothing, so it may be killed at any time. It ends when the process that started it does, whatever that one was
doing; signals meant for a run are that one's affair. Nothing here imports torch: a worker starts in a fifth of a second.

A message is a length, a header in MessagePack, and the bytes of the arrays as they lie in memory. A byte comes back for
each batch that was received; so many batches may be under way, however small they are.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lib.errors import DataError

__all__ = [
    "WATCHED", "Failure", "listen", "main", "packed", "receive", "receive_bytes", "send", "send_bytes", "send_call",
    "settle", "unpacked",
]  # fmt: skip

WATCHED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

_LENGTH = struct.Struct("<Q")


class Failure(msgspec.Struct, frozen=True):
    """An error as it travels.

    Attributes:
        kind: `ValueError` or `DataError`, or the name of what else it was.
        text: what it said.
        trace: its traceback, as Python prints it.
    """

    kind: str
    text: str
    trace: str


class _Field(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a batch: an array that follows the header (dtype and shape), or a value as it is."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    value: Any = None


class _Header(msgspec.Struct, frozen=True, array_like=True):
    fields: list[_Field]
    failure: Failure | None = None


def send(line: socket.socket, batch: Mapping[str, Any] | Failure) -> None:
    """Send a batch, arrays and plain values by name, or an error.

    Raises:
        OSError: nobody is there any more.
    """
    if isinstance(batch, Failure):
        return send_bytes(line, msgspec.msgpack.encode(_Header([], batch)))
    fields, arrays = [], []
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            fields.append(_Field(name, value.dtype.str, value.shape))
            arrays.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        else:
            fields.append(_Field(name, None, (), value))
    send_bytes(line, msgspec.msgpack.encode(_Header(fields)))
    for array in arrays:
        line.sendall(array)
    return None


def receive(line: socket.socket) -> dict[str, Any] | Failure | None:
    """Receive what `send` sent; none = whoever sends has ended."""
    raw = receive_bytes(line)
    if raw is None:
        return None
    header = msgspec.msgpack.decode(raw, type=_Header)
    if header.failure is not None:
        return header.failure
    batch: dict[str, Any] = {}
    for field in header.fields:
        if field.dtype is None:
            batch[field.name] = field.value
            continue
        array: NDArray[Any] = np.empty(field.shape, dtype=field.dtype)
        if not _fill(line, array.reshape(-1).view(np.uint8).data):
            return None
        batch[field.name] = array
    return batch


def send_bytes(line: socket.socket, raw: bytes | memoryview) -> None:
    """Send bytes, their length first.

    Raises:
        OSError: nobody is there any more.
    """
    line.sendall(_LENGTH.pack(len(raw)))
    line.sendall(raw)


def receive_bytes(line: socket.socket) -> bytearray | None:
    """Receive what `send_bytes` sent; none = whoever sends has ended."""
    length = bytearray(_LENGTH.size)
    if not _fill(line, memoryview(length)):
        return None
    raw = bytearray(_LENGTH.unpack(length)[0])
    return raw if _fill(line, memoryview(raw)) else None


def send_call(line: socket.socket, call: Callable[..., Any], *, name: str) -> None:
    """Send what a worker is to call, by the name under which it is imported, and with the values it is bound to.

    Args:
        line: to the worker.
        call: what it is to call.
        name: of the argument that it came as, for the error.

    Raises:
        ValueError: it is nothing that another process can import.
        OSError: nobody is there any more.
    """
    try:
        raw = packed(call)
    except Exception as error:  # noqa: BLE001 - pickle raises what it likes
        why = " ".join(str(error).split())
        raise ValueError(f"{name}={call!r} must be a function that another process can import ({why})") from None
    send_bytes(line, raw)


def packed(value: Any) -> memoryview:
    """Make a value something that can be sent to a process of this program, and nowhere else."""
    return memoryview(ForkingPickler.dumps(value))


def unpacked(raw: bytes | bytearray | memoryview) -> Any:
    """Make what `packed` made a value again; only for what came over a line that these two processes alone have."""
    return ForkingPickler.loads(raw)


def settle() -> tuple[socket.socket, int, list[int]]:
    """Begin as a worker: leave signals to whoever started it, and take what its command line says.

    Returns:
        The line to the other process, that one's id, and the numbers behind the line's descriptor.
    """
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)
    # Whoever started this blocked them, so that none could arrive before they were ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    descriptor, *words = (int(word) for word in sys.argv[1:])
    return socket.socket(fileno=descriptor), os.getppid(), words


def listen(line: socket.socket, parent: int, take: Callable[[], bool]) -> None:
    """Take what comes over the line in a thread, and end this process with the one that started it.

    However deep in a read it is: it holds nothing that needs saving.

    Args:
        line: to the other process.
        parent: its id.
        take: takes what has come; says whether the other one is still there.
    """
    threading.Thread(target=_watch, args=(line, parent, take), daemon=True).start()


def main() -> None:
    """Work as the command line says: descriptor, number of this worker, number of workers, batches made and not received."""
    line, parent, (first, step, waiting) = settle()
    call = receive_bytes(line)
    if call is None:
        return
    room = threading.Semaphore(waiting)

    def take() -> bool:
        received = line.recv(64)
        for _ in received:
            room.release()
        return bool(received)

    listen(line, parent, take)
    made: queue.SimpleQueue[Mapping[str, Any] | Failure] = queue.SimpleQueue()
    sender = threading.Thread(target=_deliver, args=(line, made))
    sender.start()
    try:
        make, n = unpacked(call), first
        while True:
            room.acquire()
            made.put(make(n))
            n += step
    except BaseException as error:  # noqa: BLE001 - it is raised again where the batch is wanted
        made.put(_failure(error))
    sender.join()


def _deliver(line: socket.socket, made: queue.SimpleQueue[Mapping[str, Any] | Failure]) -> None:
    try:
        while True:
            batch = made.get()
            send(line, batch)
            if isinstance(batch, Failure):
                return
    except OSError:
        os._exit(0)
    except Exception as error:  # noqa: BLE001 - a value that cannot travel
        with suppress(OSError):
            send(line, _failure(error))
        os._exit(1)


def _watch(line: socket.socket, parent: int, take: Callable[[], bool]) -> None:
    poll = select.poll()
    poll.register(line, select.POLLIN)
    # The line may be held open by a copy of the other process that was forked from it, hence the second question.
    with suppress(OSError):  # one that ended with something unread resets the line
        while os.getppid() == parent:
            if poll.poll(500) and not take():
                break
    os._exit(0)


def _failure(error: BaseException) -> Failure:
    kinds = {DataError: "DataError", ValueError: "ValueError"}
    kind = next((name for known, name in kinds.items() if isinstance(error, known)), type(error).__name__)
    return Failure(kind, str(error), "".join(traceback.format_exception(error)))


def _fill(line: socket.socket, view: memoryview) -> bool:
    try:
        while view:
            got = line.recv_into(view)
            if not got:
                return False
            view = view[got:]
    except ConnectionError:
        return False
    return True
