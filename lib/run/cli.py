"""The command line: words in, an exit code out. Errors of the user are one line; a mistake of ours shows its traceback.

Nothing that imports torch is imported before the config is known to be right, so a misspelt key costs no two seconds.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from lib.errors import CheckpointError, DataError, DivergedError
from lib.run.launch import Launch, launch, read_words
from lib.run.progress import Progress, progress
from lib.run.signals import AGAIN, INTERRUPTED, Interrupted, Signals, watched
from lib.run.usage import usage

__all__ = ["EXITS", "main"]

Verb = Callable[[Launch, Progress, Signals], int]

EXITS = ((ValueError, 2), (DataError, 3), (DivergedError, 4), (CheckpointError, 5))


def main(argv: list[str]) -> int:
    """Run one command.

    Returns:
        Its exit code, as `--help` lists them; 1 when the program itself is at fault, or a step that was checked.
    """
    try:
        with watched() as signals, progress() as voice:
            with signals.at_once():
                words = read_words(argv)
                if words.help:
                    print(usage(words.verb if words.verb_given else None), flush=True)
                    return 0
                told = launch(words)
                verb = _show if told.show else _verb(told.verb)
            return verb(told, voice, signals)
    except Interrupted:
        print(AGAIN, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read what we print has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001 - the one place where every failure becomes an exit code
        return _failed(error)


def _verb(name: str) -> Verb:
    """Import a verb, and torch with it."""
    match name:
        case "train":
            from lib.run.train import train_verb as verb
        case "eval":
            from lib.run.evals import eval_verb as verb
        case "sample":
            from lib.run.sampling import sample_verb as verb
        case "prepare":
            from lib.run.prepare import prepare_verb as verb
        case "inspect":
            from lib.run.inspect import inspect_verb as verb
        case "convert":
            from lib.run.convert import convert_verb as verb
        case "check":
            from lib.run.laws import check_verb as verb
        case "plot schedule":
            from lib.run.curve import schedule_verb as verb
        case _:
            from lib.run.plot import plot_verb as verb
    return verb


def _show(told: Launch, _voice: Progress, signals: Signals) -> int:
    with signals.at_once():
        from lib.run.show import shown

        print(shown(told.config), flush=True)
    return 0


def _failed(error: Exception) -> int:
    code = next((code for kind, code in EXITS if isinstance(error, kind)), 1)
    if code == 1 or (code == 2 and not _deliberate(error)):
        traceback.print_exception(error)
        return 1
    print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
    return code


def _deliberate(error: Exception) -> bool:
    """Whether our own code raised it: a ValueError out of a library is our mistake and no word to the user."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and str(last.tb_frame.f_globals.get("__name__", "")).startswith("lib.")
