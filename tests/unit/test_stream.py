"""One side of a token store: sent by its path, shut again, refused where it is not what it says."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from lib.data.chat import TEMPLATES
from lib.errors import DataError
from lib.store import sides, stream
from lib.store.stream import open_stream
from tests.stores import every, origins, ready

TALK = b'{"prompt": "abc", "completion": "de"}\n'


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sides, stream):
        monkeypatch.setattr(module, "CHUNK_IDS", 4)


def test_a_stream_is_sent_to_another_process_by_its_path(tmp_path: Path) -> None:
    side = ready(tmp_path, {f"{n}": b"text %d" % n for n in range(2000)}, how="document", holdout=0.1).train
    side.ids(0, side.size)
    sent = pickle.dumps(side)
    assert len(sent) < 400
    again = pickle.loads(sent)
    assert (again, again.path) == (side, side.path)
    assert every(again) == every(side)
    assert again.offsets.tolist() == side.offsets.tolist()
    (side.path / "ids/c/0").unlink()
    (side.path / "offsets/c/0").unlink()
    with pytest.raises(ValueError, match=r"^train/offsets must lead from 0 to \d+ in \d+ documents$"):
        pickle.loads(sent)


def test_masks_are_read_across_chunks_as_ids_are(tmp_path: Path, small_chunks: None) -> None:
    side = ready(tmp_path, {"1.jsonl": TALK * 3}, template=TEMPLATES["plain"]).train
    whole = ([False] * 3 + [True] * 3) * 3
    for start in range(19):
        for stop in range(start, 19):
            mask = side.mask(start, stop)
            assert mask is not None
            assert (mask.dtype, mask.tolist()) == (np.bool_, whole[start:stop])
    with pytest.raises(ValueError, match=r"^mask\[3:19\] must lie in \[0, 18\)$"):
        side.mask(3, 19)
    os.truncate(side.path / "mask/c/1", 2)
    fix = "run again to have the token store built anew"
    message = f"{side.path}/mask/c/1: cut short; {fix}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        side.mask(0, 18)
    assert len(side.ids(0, 18)) == 18


def test_more_chunks_than_are_kept_open_are_read_and_shut_again(
    tmp_path: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_OPEN_FILES", 3)
    side = ready(tmp_path, {"1": bytes(range(1, 200))}).train
    before = len(os.listdir("/proc/self/fd"))
    for start in range(0, 190, 3):
        assert side.ids(start, start + 9).tolist() == list(range(start + 5, start + 14))
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    del side
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_document_says_where_it_comes_from_without_reading_the_others(tmp_path: Path) -> None:
    rows = b"".join(b'{"text": "t%d", "id": "n%d"}\n' % (n, n) for n in range(50))
    side = ready(tmp_path, {"a.jsonl": rows, "b/c.txt": b"x"}, id_key="id").train
    assert origins(side) == [*(("a.jsonl", n + 1, f"n{n}") for n in range(50)), ("b/c.txt", 0, "")]
    assert side.origin(49) == ("a.jsonl", 50, "n49")


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    side = ready(tmp_path, {"1": b"abc"}).train
    (side.path / "offsets/c/0").write_bytes(b"")
    with pytest.raises(ValueError, match=r"^train/offsets must lead from 0 to 4 in 1 documents$"):
        open_stream(side.path)
    (side.path / "offsets/c/0").write_bytes(np.array([0, 4], "<i8").tobytes())
    (side.path.parent / "sizes/c/0").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"^sizes has 1 ids, must have 260$"):
        open_stream(side.path)
    (side.path.parent / "zarr.json").write_text(json.dumps({"attributes": {}}))
    with pytest.raises(KeyError):
        open_stream(side.path)
    with pytest.raises(FileNotFoundError):
        open_stream(side.path / "none")
