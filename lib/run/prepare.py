"""The verb `prepare`: all text read and turned into ids, and what was read and what was not, source by source."""

from __future__ import annotations

from lib.config import run_steps
from lib.data.mix import passes
from lib.data.plan import plan_of, rows_before
from lib.data.source import Source, extent
from lib.run.launch import Launch
from lib.run.progress import Progress
from lib.run.reading import Text, find_text, open_text
from lib.run.signals import Signals
from lib.store.faults import NOTES
from lib.store.tokens import TokenStore

__all__ = ["prepare_verb"]


def prepare_verb(told: Launch, voice: Progress, signals: Signals) -> int:
    """Build the token stores of a config, where they are not there yet.

    Raises:
        ValueError: the tokenizer, a template or a weight is none.
        DataError: a record is bad, or a store cannot be written.
    """
    with signals.at_once():
        config = told.config
        found = find_text(config, voice)
        text = open_text(found, config, None, voice)
        for name, store in text.stores.items():
            voice.say(_described(name, store))
        plan = plan_of(config.batch)
        rows = rows_before(plan, run_steps(config))
        read = passes(text.sources, plan, rows, config.run.seed)
        for source in text.sources:
            voice.say(_planned(source, text, plan.length, float(read[source.name]), run_steps(config)))
    return 0


def _described(name: str, store: TokenStore) -> str:
    counts, passed = store.counts, [*store.counts["skipped"].items()]
    lines = [f"{name}: {store.path}"]
    lines += [_counted(counts[key], key.replace("_", " ")) for key in ("files", "documents", "text_bytes", "tokens")]
    for key, what in (("empty", "empty documents"), ("duplicates", "documents")):
        if counts[key]:
            lines.append(_counted(counts[key], what) + " seen before" * (key == "duplicates"))
    # What was mended is there all the same.
    lines += [
        f"  {count:>15,} {cause}" if cause in NOTES else f"  {count:>15,} skipped, {cause}" for cause, count in passed
    ]
    # Of a conversation only what was said counts as text, and its template is not all marks.
    if counts["counted_bytes"] != counts["text_bytes"] and not store.train.masked:
        lines.append(
            f"  {counts['counted_bytes']:>15,} bytes that the ids stand for: this tokenizer changes its text, so bits per "
            f"byte are of what it makes of it"
        )
    sides = f"{_counted(store.train.documents, 'documents')} to train on, {store.heldout.documents:,} held out"
    lines.append(f"{sides} (by {store.how})")
    return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    """One line of a list of counts, of things that are named as there are many of them."""
    return f"  {count:>15,} {what.removesuffix('s') if count == 1 else what}"


def _planned(source: Source, text: Text, length: int, read: float, steps: int) -> str:
    size, step = extent(source, length)
    rows = size // step
    part = f"{100 * read:.3g}%" if read >= 1e-4 else "less than 0.01%"
    line = f"{source.name}: {rows:,} row{'s' * (rows != 1)} of {length} a pass; "
    line += f"{steps:,} update{' reads' if steps == 1 else 's read'} "
    line += f"it {read:.3g} times" if read >= 1 else f"{part} of it"
    if source.rows is not None:
        targets = int(source.rows.pieces[:, 1].sum())
        line += f"; padding {1 - targets / (rows * length):.2%}"
    return line
