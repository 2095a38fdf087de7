"""What a run says while it works: a bar on a terminal, plain lines elsewhere, and all of it with its time in run.log.

What is said before the run folder exists is kept until it does, so the log begins where the launch began.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from lib.errors import CheckpointError

__all__ = ["Progress", "duration", "heldout_text", "progress", "row_text", "short", "size_text"]

WIDE = 110  # columns of a terminal from which on there is room for everything

Row = dict[str, Any]


class Progress(NamedTuple):
    """The driver's voice.

    Attributes:
        say: print a line, or several, and log it.
        note: only log it.
        log_to: from now on, and with all that was said before, write to this file.
        begin: `begin(step, last)`: steps are about to be taken.
        tick: `tick(step)`: one has been.
        row: a metrics row was logged.
        heldout: a held-out row was logged.
        end: no more steps.
    """

    say: Callable[[str], None]
    note: Callable[[str], None]
    log_to: Callable[[Path], None]
    begin: Callable[[int, int], None]
    tick: Callable[[int], None]
    row: Callable[[Row], None]
    heldout: Callable[[Row], None]
    end: Callable[[], None]


class _Steady:
    """A stream whose reader may leave (`| head`, a closed terminal): the run goes on, and only the log speaks."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        with self._steadily():
            self._out.write(text)
        return len(text)

    def flush(self) -> None:
        with self._steadily():
            self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    @contextmanager
    def _steadily(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # what is still in the buffer then has to go somewhere, also when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())


class _Log(NamedTuple):
    note: Callable[[str], None]
    log_to: Callable[[Path], None]
    close: Callable[[], None]


@contextmanager
def progress(out: TextIO | None = None, *, live: bool | None = None) -> Iterator[Progress]:
    """Open the voice for a launch; `live` = a bar, none = when `out` is a terminal that can draw one."""
    out = sys.stdout if out is None else out
    log = _log()
    steady = cast("TextIO", _Steady(out))
    voice = _live(steady, log) if (_can_draw(out) if live is None else live) else _plain(steady, log)
    try:
        yield voice
    finally:
        voice.end()
        log.close()


def row_text(row: Row, last: int, left_s: float | None) -> str:
    """A metrics row as one line."""
    parts = [
        f"step {row['step']:>{len(str(last))}}/{last}",
        f"bpb {short(row['bpb'], '.3f')}",
        f"loss {short(row['loss_nats'], '.3f')} nats",
        f"lr {short(row['lr'], '.2e')}",
        f"grad {short(row['grad_norm'], '.2f')}",
        f"{_thousands(row.get('tokens_per_s'))} tokens/s",
    ]
    if row.get("skipped"):
        parts.append(f"refused so far {row['skipped']}")
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    return "  ".join(parts)


def heldout_text(row: Row) -> str:
    """A held-out row as one line."""
    values = (short(row["eval/bpb"], ".4f"), short(row["eval/loss_nats"], ".4f"))
    return f"step {row['step']}: held-out {values[0]} bits per byte ({values[1]} nats, {row['eval/tokens']} targets)"


def duration(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> duration(95), duration(3723)
    ('1:35', '1:02:03')
    """
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def size_text(size: int) -> str:
    """Bytes as a person reads them.

    >>> size_text(812), size_text(1_234_567)
    ('812 bytes', '1.2 MB')
    """
    if size < 1000:
        return f"{size} bytes"
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def short(value: float | None, form: str) -> str:
    """A number in `form`; none (it was not finite, or there is none) is a dash."""
    return "-" if value is None else format(value, form)


def _can_draw(out: TextIO) -> bool:
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _plain(out: TextIO, log: _Log) -> Progress:
    """One flushed line for each thing said."""
    left, last = _left(), [0]

    def say(text: str) -> None:
        log.note(text)
        print(text, file=out, flush=True)

    def begin(step: int, end: int) -> None:
        last[0] = end
        left(step, end)

    return Progress(
        say=say,
        note=log.note,
        log_to=log.log_to,
        begin=begin,
        tick=lambda _step: None,
        row=lambda row: say(row_text(row, last[0], left(row["step"], last[0]))),
        heldout=lambda row: say(heldout_text(row)),
        end=lambda: None,
    )


def _live(out: TextIO, log: _Log) -> Progress:
    """A bar at the bottom; what is said scrolls above it, rows only change the bar."""
    console = Console(file=out, force_terminal=True)
    bar = Bar(
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        console=console,
        refresh_per_second=4,
        expand=True,
    )
    task = bar.add_task("the first step ...", total=None)
    left, last, seen = _left(), [0], {"heldout": ""}

    def say(text: str) -> None:
        log.note(text)
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(step: int, end: int) -> None:
        last[0] = end
        left(step, end)
        bar.update(task, total=end, completed=step)
        bar.start()

    def row(row: Row) -> None:
        left_s = left(row["step"], last[0])
        log.note(row_text(row, last[0], left_s))
        parts = [f"bpb {short(row['bpb'], '.3f')}", seen["heldout"]]
        if console.width >= WIDE:
            parts += [f"loss {short(row['loss_nats'], '.3f')} nats", f"lr {short(row['lr'], '.1e')}"]
        parts += [
            f"{_thousands(row.get('tokens_per_s'))} tokens/s",
            f"refused {row['skipped']}" if row["skipped"] else "",
        ]
        parts.append("" if left_s is None else f"{duration(left_s)} left")
        bar.update(task, description="  ".join(part for part in parts if part))

    def heldout(row: Row) -> None:
        seen["heldout"] = f"held-out {short(row['eval/bpb'], '.3f')}"
        say(heldout_text(row))

    return Progress(
        say=say,
        note=log.note,
        log_to=log.log_to,
        begin=begin,
        tick=lambda step: bar.update(task, completed=step),
        row=row,
        heldout=heldout,
        end=bar.stop,
    )


def _log() -> _Log:
    """run.log: lines wait until there is a file. A full disk is told of by what must be written, not by the log."""
    waiting: list[str] = []
    files: list[TextIO] = []
    one_at_a_time = threading.Lock()  # a save in the background says in here that it is done

    def note(text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S")
        lines = [f"{stamp} {line}\n" for line in text.splitlines()]
        with one_at_a_time:
            if not files:
                waiting.extend(lines)
                return
            try:
                files[0].writelines(lines)
                files[0].flush()
            except OSError:
                return

    def log_to(path: Path) -> None:
        try:
            files.append(path.open("a", encoding="utf-8"))
            files[0].writelines(waiting)
            files[0].flush()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}, must be writable; free the disk and run again") from None

    def close() -> None:
        for file in files:
            try:
                file.close()
            except OSError:
                continue

    return _Log(note, log_to, close)


def _left() -> Callable[[int, int], float | None]:
    """Seconds left, from the pace since the first row: the steps before it hold the compilation."""
    first: list[tuple[int, float]] = []

    def left_s(step: int, last: int) -> float | None:
        now = time.monotonic()
        if len(first) < 2:  # begin, then the first row
            first.append((step, now))
            return None
        began, then = first[1]
        return (last - step) * (now - then) / (step - began) if step > began else None

    return left_s


def _thousands(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"
