"""Laws of reading files: however a file is cut into stretches, each record is read once, at the same place."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import DataError
from lib.store.compressed import packing
from lib.store.formats import kind_of, spans
from lib.store.record import Reading
from tests.formats import put, read

TARGETS = st.integers(1, 40)
MARK = b"\xef\xbb\xbf"
ODD = (b"\n", b"\n\n", b"\r\n", b"\r", b" ", b"\t\x0b\x0c", b"a", "\u2028\u00e9".encode(), b"\xff", b"\0", MARK)
LINES = (b'{"text": "a"}', b'{"text": "b\\n"}\n', b'{"text": 1}\n', b'{"text"', b'{"text": "\\ud800"}\n', b"[1]\n")
ANY = st.one_of(st.binary(max_size=60), st.lists(st.sampled_from(ODD + LINES), max_size=16).map(b"".join))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def said(path: Path, **options: Any) -> Any:
    """What reading a file gives, or what it is refused with."""
    try:
        return read(path, **options)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("split", ["line", "block"])
@given(data=ANY, target=TARGETS)
def test_text_is_the_same_however_it_is_cut(folder: Path, split: str, data: bytes, target: int) -> None:
    path = put(folder / "x.txt", data)
    assert said(path, split=split, target=target) == said(path, split=split)


@pytest.mark.parametrize("errors", ["stop", "skip", "replace"])
@given(data=ANY, target=TARGETS)
def test_jsonl_is_the_same_however_it_is_cut(folder: Path, errors: str, data: bytes, target: int) -> None:
    path = put(folder / "x.jsonl", data)
    assert said(path, errors=errors, target=target) == said(path, errors=errors)


@given(
    texts=st.lists(st.text(max_size=20), max_size=20),
    target=TARGETS,
    ascii=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_texts_come_back_from_jsonl(folder: Path, texts: list[str], target: int, ascii: bool, end: str) -> None:  # noqa: A002
    lines = [json.dumps({"n": [n, {}], "text": text, "id": n}, ensure_ascii=ascii) for n, text in enumerate(texts)]
    path = put(folder / "x.jsonl", end.join(lines).encode())
    got = read(path, target=target, id_key="id")
    assert got.values == [text.encode() for text in texts]
    assert got.names == [str(n) for n in range(len(texts))]
    assert got.places == [f"x.jsonl:{n + 1}" for n in range(len(texts))]
    packed = put(folder / "x.jsonl.gz", gzip.compress(path.read_bytes()))
    assert read(packed).values == got.values


@given(data=st.binary(max_size=80).filter(lambda data: b"\0" not in data and packing(data) is None))
def test_lines_and_blocks_lose_no_text(folder: Path, data: bytes) -> None:
    path = put(folder / "x.txt", data)
    text = data.removeprefix(MARK)
    lines = [line for line in (one.removesuffix(b"\r") for one in text.split(b"\n")) if line.strip()]
    # At the end of a file a carriage return has no line feed that it could belong to.
    if text.endswith(b"\r") and text.split(b"\n")[-1].strip():
        lines[-1] += b"\r"
    assert read(path, split="line").values == lines
    blocks = read(path, split="block").values
    assert [one for block in blocks for one in block.split(b"\n")][-1:] == lines[-1:]
    assert sum(len(block.split(b"\n")) for block in blocks) == len(lines)


@given(size=st.integers(0, 200), target=st.integers(1, 300), split=st.sampled_from(["file", "line", "block"]))
def test_stretches_lie_side_by_side_over_the_whole_file(folder: Path, size: int, target: int, split: str) -> None:
    path = put(folder / "x.txt", b"x" * size)
    cut = spans(str(path), size, kind_of("x.txt"), Reading(split=split), target=target)
    assert cut == spans(str(path), size, kind_of("x.txt"), Reading(split=split), target=target)
    assert (cut[0].start, cut[-1].stop) == (0, size)
    assert all(one.stop == other.start for one, other in pairwise(cut))
    assert split == "file" or all(0 < one.stop - one.start <= target for one in cut) or size == 0


@given(ids=st.lists(st.integers(0, 5), max_size=30), eos=st.integers(0, 5), dtype=st.sampled_from(["u1", ">u2", "<i4"]))
def test_documents_and_their_end_marks_make_up_a_token_file(folder: Path, ids: list[int], eos: int, dtype: str) -> None:
    path = folder / "x.npy"
    np.save(path, np.array(ids, dtype))
    documents = read(path, eos=eos, vocab=6).values
    joined = [one for document in documents for one in (*document, eos)]
    assert joined == (ids if not ids or ids[-1] == eos else [*ids, eos])
    assert all(eos not in document for document in documents)
