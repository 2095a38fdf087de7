"""Rows as a person reads them: the next ones of a run, or the first ones of a config, document by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lib.data.arrays import arrays_at, positions_at
from lib.data.batch import cursor_of
from lib.data.plan import plan_of
from lib.data.rows import Cursor
from lib.data.source import Source
from lib.run.launch import Launch
from lib.run.newest import checkpoints_of, newest_state
from lib.run.progress import Progress
from lib.run.reading import check_same, find_text, open_text
from lib.store.coders import Coder
from lib.store.folder import newest
from lib.store.stream import Stream

__all__ = ["shown_rows"]

_SHOWN = 400  # characters of a document


def shown_rows(told: Launch, voice: Progress) -> str:
    """Write the next rows: which are trained on, where their documents begin, what stands in them.

    Raises:
        ValueError: the run has another recipe.
        DataError: there is no text, or other than the run's.
        CheckpointError: the newest checkpoint is damaged.
    """
    config, recipe, step, cursor, seed = told.config, None, 0, None, told.config.run.seed
    found = find_text(config, voice)
    if newest(checkpoints_of(config)) is not None:
        state = newest_state(config, voice)
        recipe, step, cursor, seed = state["recipe"], int(state["step"]), cursor_of(state["cursor"]), int(state["key"])
        check_same(found, recipe.data, Path(config.run.dir) / "data.json", config)
    text = open_text(found, config, recipe, voice)
    plan = plan_of(config.batch if recipe is None else recipe.batch)
    begin = cursor or {source.name: Cursor(0, 0) for source in text.sources}
    batch = arrays_at(text.sources, plan, seed, begin, step)
    source, places = positions_at(text.sources, plan, seed, begin, step)
    flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in ("inputs", "targets", "segments", "mask")}
    rows = len(flat["inputs"])
    legend = "{...} a special token, [[...]] not trained on"
    lines = [f"update {step + 1}: {rows} rows of {flat['inputs'].shape[1]}; {legend}"]
    some = range(min(config.inspect.rows, rows))
    for number in some:
        row = {name: part[number] for name, part in flat.items()} | {"places": places[number]}
        lines.append(_row(number, row, text.sources[source[number]], text.coder))
    return "\n".join(lines)


def _row(number: int, row: dict[str, Any], source: Source, coder: Coder) -> str:
    trained = int(row["mask"].sum())
    lines = [f"row {number} of {source.name}: {trained} of {len(row['mask'])} targets are trained on"]
    for segment in range(int(row["segments"][-1]) + 1):
        here = np.flatnonzero(row["segments"] == segment)
        mask = row["mask"][here]
        from_ = _from(source, int(row["places"][here[0]]))
        lines.append(f"  {here[0]:>5} {from_}{_segment(row['targets'][here], mask, coder)}")
    return "\n".join(lines)


def _from(source: Source, place: int) -> str:
    """Where a document comes from: file, line, its own name."""
    if place < 0 or not isinstance(source.stream, Stream):
        return ""
    file, line, name = source.stream.origin(source.stream.document(place))
    return f"{file}{f':{line}' if line else ''}{f' ({name})' if name else ''}: "


def _segment(targets: Any, mask: Any, coder: Coder) -> str:
    """A segment's targets as text: special tokens in braces, what is not trained on in double brackets."""
    if not mask.any():
        return f"[[{len(targets)} of padding, or of what is not trained on]]"
    edges = np.flatnonzero(np.diff(mask)) + 1
    parts = []
    for some, on in zip(np.split(targets, edges), np.split(mask, edges), strict=True):
        parts.append(_text(some, coder) if on[0] else f"[[{_text(some, coder)}]]")
    whole = "".join(parts)
    return whole if len(whole) <= _SHOWN else f"{whole[: _SHOWN // 2]} ... {whole[-_SHOWN // 2 :]}"


def _text(ids: Any, coder: Coder) -> str:
    """Ids as text on one line; a special token stands in braces, so that it is told from text that spells it."""
    spelled = {number: spelling for spelling, number in coder.marks.items()}
    marks = np.array(sorted({*spelled, coder.tokenizer.eos, coder.tokenizer.bos or 0} - {-1}), dtype=np.int64)
    at = np.flatnonzero(np.isin(ids, marks) & (coder.sizes[ids] == 0))
    parts, begin = [], 0
    for place in at.tolist():
        parts += [_plain(ids[begin:place], coder), f"{{{_spelling(int(ids[place]), spelled, coder)}}}"]
        begin = place + 1
    return "".join([*parts, _plain(ids[begin:], coder)])


def _plain(ids: Any, coder: Coder) -> str:
    return repr(coder.decode(ids).decode("utf-8", "replace"))[1:-1] if len(ids) else ""


def _spelling(number: int, spelled: dict[int, str], coder: Coder) -> str:
    return spelled.get(number, "end" if number == coder.tokenizer.eos else "begin")
