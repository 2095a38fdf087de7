"""Token files: what says what their ids are, what contradicts it, and how they are cut; messages in full."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.errors import DataError
from lib.store.formats import Kind, records
from lib.store.headers import SideCar, side_car_of
from lib.store.record import Reading, Span
from tests.formats import put, read, refused, texts

E = 2


def saved(path: Path, values: Any, dtype: Any = None) -> Path:
    np.save(path, np.asarray(values, dtype))
    return path


def raw(path: Path, values: Any, dtype_: str, **side_car: Any) -> Path:
    if side_car:
        put(path.with_name(path.name + ".json"), json.dumps(side_car).encode())
    return put(path, np.asarray(values, dtype_).tobytes())


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", ">i4", "<u4", ">i8", "<u8"])
@pytest.mark.parametrize("form", ["npy", "bin by setting", "bin by side-car"])
def test_any_integer_dtype_and_byte_order_gives_the_same_ids(tmp_path: Path, dtype: str, form: str) -> None:
    ids, want = [5, 200, E, 7, E, 9], [[5, 200], [7], [9]]
    if form == "npy":
        assert texts(saved(tmp_path / "x.npy", ids, dtype), eos=E, vocab=260) == want
    else:
        stated = {"dtype": dtype} if form == "bin by side-car" else {}
        path = raw(tmp_path / "x.bin", ids, dtype, **stated)
        assert texts(path, eos=E, vocab=260, dtype=None if stated else dtype) == want
    kind = Kind("npy" if form == "npy" else "bin", "")
    path = next(each for each in tmp_path.iterdir() if each.suffix != ".json")
    for record in records(str(path), Span(0, 9), kind, Reading(dtype=dtype), Counter(), eos=E, vocab=260):
        assert record.ids is not None
        assert record.ids.dtype.isnative


@pytest.mark.parametrize(("ids", "documents"), [
    ([7, 8, 9], [[7, 8, 9]]),
    ([E, E, E], [[], [], []]),
    ([E, 7, 8, 9, E, E, 5, 6, E], [[], [7, 8, 9], [], [5, 6]]),
    ([7, E, 8], [[7], [8]]),
    ([], []),
], ids=["Q77 no end mark", "Q77 only end marks", "B113 empty documents", "no last end mark", "B128 no ids"])  # fmt: skip
def test_documents_end_at_end_marks_which_are_not_given(
    tmp_path: Path, ids: list[int], documents: list[list[int]]
) -> None:
    got = read(saved(tmp_path / "x.npy", ids, np.uint16), eos=E)
    assert got.values == documents
    assert got.places == [f"x.npy:{n + 1}" for n in range(len(documents))]
    assert got.skipped == ({} if ids else {"empty file": 1})
    assert texts(saved(tmp_path / "y.npy", [7, E, 8], np.uint16)) == [[7, E, 8]]


def test_documents_may_lie_over_the_blocks_that_are_read(tmp_path: Path) -> None:
    ids = np.full(3_500_000, 7, np.uint16)
    ends = [0, 1_048_575, 1_048_576, 2_000_000, 3_400_000]
    ids[ends] = E
    got = read(saved(tmp_path / "x.npy", ids), eos=E, vocab=260).values
    assert list(map(len, got)) == [0, 1_048_574, 0, 951_423, 1_399_999, 99_999]


def test_a_fortran_array_of_one_axis_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    with path.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<u2", "fortran_order": True, "shape": (2,)})
        out.write(b"\5\0\6\0")
    assert texts(path) == [[5, 6]]


@pytest.mark.parametrize(("values", "says"), [
    (np.array([1.5]), "values are float64, must be integers; save ids as an integer array"),
    (np.array([True]), "values are bool, must be integers; save ids as an integer array"),
    (np.array([[1], [2]]), "array has shape (2, 1), must have one axis; save it flat"),
    (np.array(1), "array has shape (), must have one axis; save it flat"),
    (np.array([{}], object), "values are object, must be integers; save ids as an integer array"),
    (np.array(["a"]), "values are <U1, must be integers; save ids as an integer array"),
], ids=["Q71 float", "bool", "2-D", "0-D", "Q70 object", "text"])  # fmt: skip
def test_an_array_that_holds_no_ids_is_refused(tmp_path: Path, values: Any, says: str) -> None:
    refused(saved(tmp_path / "x.npy", values), f"@: {says}")


def test_an_npy_file_that_is_none_or_not_whole_is_refused(tmp_path: Path) -> None:
    save = "save it with numpy.save, or name raw ids .bin"
    whole = saved(tmp_path / "x.npy", [1, 2, 3], np.uint16).read_bytes()
    path = put(tmp_path / "y.npy", np.arange(100, dtype=np.uint16).tobytes())
    magic = r"the magic string is not correct; expected b'\x93NUMPY', got b'\x00\x00\x01\x00\x02\x00'"
    refused(path, f"@: no .npy file ({magic}), must begin with a .npy header; {save}")
    refused(put(path, b""), f"@: no .npy file (EOF: reading magic string, expected 8 bytes got 0), "
            f"must begin with a .npy header; {save}")  # fmt: skip
    wrong = "('EOF in multi-line statement', (2, 0))"
    refused(put(path, whole.replace(b"}", b"{")), f"@: no .npy file ({wrong}), must begin with a .npy header; {save}")
    refused(put(path, whole[:-3]), "@: 3 bytes of ids, must be 6 (3 of <u2, says its header); fetch it again")
    refused(
        put(path, whole + b"\0\0"), "@: 8 bytes of ids, must be 6 (3 of <u2, says its header); something was appended"
    )


@pytest.mark.parametrize(("values", "dtype", "says"), [
    ([5, 6, -100, -1], "<i8", "id -100 at index 2, must be in [0, 260)"),
    ([5, 260], "<u2", "id 260 at index 1, must be in [0, 260)"),
    ([5, 2**63], "<u8", "id 9223372036854775808 at index 1, must be in [0, 260)"),
], ids=["Q73", "Q74", "beyond int64"])  # fmt: skip
def test_an_id_outside_of_the_vocabulary_is_named_even_when_skipping(
    tmp_path: Path, values: list[int], dtype: str, says: str
) -> None:
    path = saved(tmp_path / "x.npy", values, dtype)
    refused(path, f"@: {says}; check the file's dtype and data.tokenizer", eos=E, vocab=260, errors="skip")


def test_an_index_is_counted_over_blocks(tmp_path: Path) -> None:
    ids = np.zeros(1_500_000, np.int32)
    ids[1_400_000] = -1
    path = saved(tmp_path / "x.npy", ids)
    refused(path, "@: id -1 at index 1400000, must be 0 or more; check the file's dtype and data.tokenizer")


def test_a_raw_file_must_say_what_it_holds(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.bin", [1, 2, 3], "<u2")
    refused(path, "@: no dtype is stated, must be; set data.dtype to <u2, <u4, ... or write @.json")
    with pytest.raises(
        ValueError, match=f"^{re.escape('data.dtype=f4 must be an integer dtype; set it to <u2, <u4, ...')}$"
    ):
        read(path, dtype="f4")
    with pytest.raises(ValueError, match=r"^data\.dtype=uint99 must be an integer dtype; set it to <u2, <u4, \.\.\.$"):
        read(path, dtype="uint99")


def test_a_raw_file_of_another_width_is_refused(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.bin", [70000, 5], "<u4")  # 4464 1 5 0
    fix = "set data.dtype or write @.json, which says it for sure"
    refused(path, f"@: looks like 32-bit ids, data.dtype=<u2 must fit; {fix}", dtype="<u2", vocab=100_000)
    refused(
        raw(path, [300, 5], ">u4"), f"@: looks like 32-bit ids, data.dtype=>u2 must fit; {fix}", dtype=">u2", vocab=260
    )
    refused(
        raw(path, [9, 5], "<u8"), f"@: looks like 64-bit ids, data.dtype=<u4 must fit; {fix}", dtype="<u4", vocab=260
    )
    refused(raw(path, [9, 5], "<u2"), f"@: looks like 16-bit ids, data.dtype=u1 must fit; {fix}".replace("=u1", "=|u1"),
            dtype="u1", vocab=256)  # fmt: skip
    assert texts(raw(path, [5, 0, 7, 0], "<u2", dtype="<u2"), vocab=260) == [[5, 0, 7, 0]]  # said for sure
    narrow = raw(tmp_path / "y.bin", [1, 2, 3, 4], "<u2")
    says = "id 131073 at index 0, must be in [0, 260); check the file's dtype and data.tokenizer"
    refused(narrow, f"@: {says}", dtype="<u4", vocab=260)
    odd = put(tmp_path / "z.bin", b"\1\0\2")
    refused(odd, "@: 3 bytes, must be a multiple of 2 for <u2; fetch it again or correct its dtype", dtype="<u2")


def test_a_side_car_decides_and_is_held_to_what_it_says(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.bin", [300, 5], ">u2", dtype=">u2", count=2, vocab=400, tokenizer="t")
    assert side_car_of(str(path)) == SideCar(">u2", 2, 400, "t")
    assert texts(path, vocab=400) == texts(path, dtype=">u2") == [[300, 5]]
    refused(path, "@: data.dtype=<u2, its side-car says >u2; drop or correct one of them", dtype="<u2")
    refused(path, "@: ids of a vocabulary of 400, says its side-car, must be of 260; "
            "set data.tokenizer to the one that made them", vocab=260)  # fmt: skip
    refused(raw(path, [5], ">u2", dtype=">u2", count=2), "@: 1 ids, must be 2, says its side-car; fetch it again")
    refused(raw(path, [5], ">u2", dtype="f4"), "@.json: dtype 'f4', must be an integer dtype; set it to <u2, <u4, ...")
    want = '{"dtype": "<u2"} with "count", "vocab", "tokenizer" if known; correct it'
    refused(raw(path, [5], ">u2", type="<u2"), f"@.json: Object contains unknown field `type`, must be {want}")
    refused(raw(path, [5], ">u2", count=1), f"@.json: Object missing required field `dtype`, must be {want}")


def test_two_files_of_different_dtype_are_each_read_by_their_own(tmp_path: Path) -> None:
    for name, dtype in (("x.bin", "<u2"), ("y.bin", "<u4")):
        assert texts(raw(tmp_path / name, [70, 500], dtype, dtype=dtype)) == [[70, 500]]


def test_more_ids_than_an_int32_counts_are_cut_right(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    size = 2**31 + 10
    with path.open("wb") as out:
        out.truncate(size)  # takes no room
        out.seek(size - 4)
        out.write(bytes([7, E, 8, 9]))
    first, last = records(str(path), Span(0, size), Kind("bin", ""), Reading(dtype="u1"), Counter(), eos=E, vocab=256)
    assert first.ids is not None
    assert last.ids is not None
    assert isinstance(first.ids, np.memmap)  # so long a document is not held
    assert len(first.ids) == size - 3
    assert first.ids[-2:].tolist() == [0, 7]
    assert last.ids.tolist() == [8, 9]


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.npy", np.full(5_000_000, E, np.uint16))
    found = records(str(path), Span(0, 9), Kind("npy", ""), Reading(), Counter(), eos=E)
    assert next(found).line == 1
    os.truncate(path, 3_000_000)
    says = "became shorter while it was read; run again when nothing writes to it"
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: {says}$"):
        list(found)
