"""The ranks that save or load one state together: what they tell each other, and how they fail together.

Guarantees: when one of them fails, all raise, and all name that failure; nobody goes on as if all were well. What they
send each other is bytes and numbers, never pickled objects. It goes from rank to rank within the group that is given, so
no rank outside takes part, and a mesh that is a part of the world needs no group of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lib.errors import CheckpointError

__all__ = ["ALONE", "Ranks", "over", "together"]

Bytes = NDArray[np.uint8]


class Ranks(NamedTuple):
    """Ranks that act together.

    Attributes:
        rank: of this process among them.
        size: how many there are.
        share: give some bytes to all, get those of each, in order.
        swap: for each other rank, bytes to send to it and a buffer for what it sends; sizes are known to both.
    """

    rank: int
    size: int
    share: Callable[[bytes], list[bytes]]
    swap: Callable[[Mapping[int, Bytes], Mapping[int, Bytes]], None]


def _nothing(_send: Mapping[int, Bytes], _receive: Mapping[int, Bytes]) -> None:
    return None


ALONE = Ranks(0, 1, lambda told: [told], _nothing)


def over(members: Sequence[int], group: dist.ProcessGroup | None = None) -> Ranks | None:
    """Make the ranks of a part of the world.

    Args:
        members: global ranks, each once, the same sequence on each of them.
        group: whom they talk through; its backend must serve CPU tensors. None = the default group.

    Returns:
        None on a rank that is not among them.

    Raises:
        CheckpointError: a rank among them does not answer (later, when they talk).
    """
    me = dist.get_rank()
    if me not in members:
        return None
    rank = members.index(me)
    if len(members) == 1:
        return ALONE

    def share(told: bytes) -> list[bytes]:
        with _answering():
            if rank:
                _send(told, members[0], group)
                return _split(_receive(members[0], group), len(members))
            heard = [told, *(_receive(other, group) for other in members[1:])]
            for other in members[1:]:
                _send(_joined(heard), other, group)
            return heard

    def swap(send: Mapping[int, Bytes], receive: Mapping[int, Bytes]) -> None:
        with _answering():
            works = [dist.isend(torch.from_numpy(data), members[to], group) for to, data in sorted(send.items())]
            works += [dist.irecv(torch.from_numpy(data), members[of], group) for of, data in sorted(receive.items())]
            for work in works:
                if work is not None:
                    work.wait()

    return Ranks(rank, len(members), share, swap)


def together(
    ranks: Ranks, act: Callable[[], bytes], explain: Callable[[OSError], Exception] | None = None
) -> list[bytes]:
    """Do something on each rank and share what came of it.

    Args:
        ranks: all of them call this.
        act: what each does, and what it tells the others.
        explain: turns what a disk refuses into what is told of it.

    Returns:
        What each rank's `act` gave.

    Raises:
        Exception: this rank's own, when it failed.
        CheckpointError: another rank failed; its message follows the rank's number.
    """
    own: Exception | None = None
    try:
        told = b"+" + act()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must hear of it
        own = explain(error) if explain is not None and isinstance(error, OSError) else error
        told = b"-" + str(own).encode(errors="replace")
    heard = ranks.share(told)
    if own is not None:
        raise own from own.__cause__
    for rank, answer in enumerate(heard):
        if answer.startswith(b"-"):
            raise CheckpointError(f"rank {rank}: {answer[1:].decode()}")
    return [answer[1:] for answer in heard]


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Turn the failure of a connection into one line."""
    try:
        yield
    except RuntimeError as error:
        why = str(error).splitlines()[0].split(" Exception raised from")[0]
        raise CheckpointError(
            f"checkpoint: rank {dist.get_rank()} (process {os.getpid()}) lost the others, who must all take part "
            f"({why}); see what ended them, then go on from the last checkpoint"
        ) from error


def _send(told: bytes, to: int, group: dist.ProcessGroup | None) -> None:
    dist.send(torch.tensor([len(told)]), to, group)
    if told:
        dist.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), to, group)


def _receive(of: int, group: dist.ProcessGroup | None) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, of, group)
    told = torch.empty(int(length), dtype=torch.uint8)
    if len(told):
        dist.recv(told, of, group)
    return told.numpy().tobytes()


def _joined(heard: Sequence[bytes]) -> bytes:
    lengths = np.array([len(told) for told in heard], "<i8").tobytes()
    return b"".join([lengths, *heard])


def _split(joined: bytes, count: int) -> list[bytes]:
    ends = np.cumsum([8 * count, *np.frombuffer(joined, "<i8", count)])
    return [joined[start:end] for start, end in itertools.pairwise(ends)]
