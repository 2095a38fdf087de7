"""Row plans: made once, mapped, made anew when damaged, sent by their path; each message in full."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from lib.errors import DataError
from lib.store import plans
from lib.store.plans import MappedRows, row_table
from lib.store.stream import Stream
from tests.stores import names, ready
from tests.streams import table_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def side(tmp_path: Path) -> Stream:
    return ready(tmp_path, {f"{n:03}": b"x" * (n * 7 % 23) for n in range(150)}).train


def same(table: MappedRows, side: Stream, mode: str, length: int) -> bool:
    wanted = table_of(side, length, mode)
    return table.rows.tolist() == wanted.rows.tolist() and table.pieces.tolist() == wanted.pieces.tolist()


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("length", [4, 8, 64])
def test_a_plan_is_that_of_the_documents_and_made_once(
    side: Stream, mode: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = row_table(side, mode, length)
    assert same(table, side, mode, length)
    assert isinstance(table.rows, np.memmap)
    assert isinstance(table.pieces, np.memmap)
    assert not table.rows.flags.writeable
    monkeypatch.setattr(plans, "plan_rows", None)  # none is planned any more
    assert same(row_table(side, mode, length), side, mode, length)


def test_plans_of_other_modes_lengths_and_sides_lie_beside_each_other(tmp_path: Path) -> None:
    store = ready(tmp_path, {f"{n:03}": b"x" * n for n in range(150)}, holdout=0.3)
    tables = [
        row_table(side, mode, length)
        for side in (store.train, store.heldout) for mode in ("pack", "pad") for length in (8, 16)
    ]  # fmt: skip
    assert len({table.path for table in tables}) == 8
    assert len(names(tmp_path / "cache")) == 9
    assert tables[0].path.name == f"{store.path.name}-train-pack-8"


@pytest.mark.parametrize("name", ["rows", "pieces", "COMMIT"])
@pytest.mark.parametrize("damage", ["gone", "short", "long", "zeros"])
def test_a_damaged_plan_is_made_anew(side: Stream, name: str, damage: str) -> None:
    path = row_table(side, "pack", 8).path / name
    whole = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes({"short": whole[:-1], "long": whole + b"x", "zeros": bytes(len(whole))}[damage])
    table = row_table(side, "pack", 8)
    if (name, damage) != ("pieces", "zeros"):  # pieces are too many to be read
        assert same(table, side, "pack", 8)
        assert path.read_bytes() == whole
    assert len(names(side.path.parent.parent)) == 2


def test_a_plan_of_another_layout_or_a_file_in_its_place_is_made_anew(side: Stream) -> None:
    path = row_table(side, "pad", 8).path
    facts = json.loads((path / "COMMIT").read_bytes())
    assert sorted(facts) == ["format", "pieces", "rows"]
    for other in ({**facts, "format": 0}, [], None, {**facts, "rows": "many"}):
        (path / "COMMIT").write_text(json.dumps(other))
        assert same(row_table(side, "pad", 8), side, "pad", 8)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_bytes(b"a file")
    assert same(row_table(side, "pad", 8), side, "pad", 8)


def test_a_plan_is_sent_to_another_process_by_its_path(side: Stream) -> None:
    table = row_table(side, "pack", 8)
    sent = pickle.dumps(table)
    assert len(sent) < 400
    again = pickle.loads(sent)
    assert again == table
    assert same(again, side, "pack", 8)
    (table.path / "COMMIT").unlink()
    message = f"{table.path}: is not there or damaged; run again to have it made anew"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        pickle.loads(sent)


def test_documents_with_nothing_to_predict_have_no_rows(tmp_path: Path) -> None:
    # Without an end mark the only id of a document is predicted from nothing.
    side = ready(tmp_path, {f"{n}": b"x" for n in range(3)}, add_eos=False).train
    table = row_table(side, "pack", 8)
    assert (table.rows.tolist(), table.pieces.shape) == ([0], (0, 2))
    assert row_table(side, "pack", 8).rows.tolist() == [0]


def test_a_plan_that_cannot_be_written_is_refused_and_one_that_is_there_is_read(side: Stream) -> None:
    cache = side.path.parent.parent
    table = row_table(side, "pack", 8)
    real = plans.temporary_in  # type: ignore[attr-defined]

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    plans.temporary_in = full  # type: ignore[attr-defined]
    try:
        assert row_table(side, "pack", 8) == table
        path = cache / f"{side.path.parent.name}-train-pack-16"
        message = f"{path}: cannot be written (No space left on device); set data.cache to a folder with room"
        with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
            row_table(side, "pack", 16)
    finally:
        plans.temporary_in = real  # type: ignore[attr-defined]
    assert len(names(cache)) == 2
