"""Safetensors: what was written is read, damage to a header never moves a byte of data, names and means stay what they are."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("safetensors.torch")

from safetensors.torch import load_file

from lib.errors import CheckpointError
from lib.store.export import write_tensors
from lib.store.tensors import DTYPES, describe_tensors, read_metadata, read_tensors
from lib.store.trees import averaged, renamed
from tests.strategies import SEEDS

T = TypeVar("T")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAMES = st.one_of(
    st.lists(st.sampled_from(["layers", "0", "1", "w"]), min_size=1, max_size=4).map(".".join), TEXT
).filter(lambda name: name != "__metadata__")


@st.composite
def trees(draw: st.DrawFn, most: int = 5) -> dict[str, Tensor]:
    """Tensors of any dtype and random bits."""
    names = draw(st.lists(NAMES, unique=True, max_size=most))
    return {name: draw(random_bits(DTYPES[draw(st.sampled_from(list(DTYPES)))])) for name in names}


@st.composite
def random_bits(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    axes = 1 if dtype == torch.float4_e2m1fn_x2 else 0
    shape = draw(st.lists(st.integers(0, 4), min_size=axes, max_size=3))
    size, most = math.prod(shape) * dtype.itemsize, 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(draw(SEEDS)))
    return data.view(dtype).reshape(shape)


def data_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(named: Any) -> dict[str, Any]:
    return {name: (tensor.dtype, tuple(tensor.shape), data_of(tensor)) for name, tensor in named.items()}


def form(named: Any) -> dict[str, Any]:
    return {name: (str(tensor.dtype)[6:], tuple(tensor.shape)) for name, tensor in named.items()}


def tried(call: Callable[[], T]) -> tuple[str, T | None]:
    """What a call gives, or what its one-line error says."""
    try:
        return "", call()
    except (CheckpointError, ValueError) as error:
        heard = str(error)
    assert len(heard.splitlines()) == 1
    return heard, None


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@given(trees(), st.one_of(st.none(), st.integers(1, 200)), st.dictionaries(TEXT, TEXT, max_size=3))
def test_what_was_written_is_read(named: dict[str, Tensor], most_bytes: int | None, metadata: dict[str, str]) -> None:
    with folder() as at:
        written = write_tensors(at / "m.safetensors", named, most_bytes=most_bytes, metadata=metadata)
        assert bits(read_tensors(at)) == bits(dict(sorted(named.items())))
        assert describe_tensors(at) == form(dict(sorted(named.items())))
        assert read_metadata(at) == dict(sorted({"format": "pt", **metadata}.items()))
        files = [path for path in written if path.suffix == ".safetensors"]
        theirs = [load_file(path) for path in files]
        assert bits({name: one for tree in theirs for name, one in tree.items()}) == bits(named) or not named
        assert sum(map(len, theirs)) == len(named)
        if most_bytes is not None:
            assert all(len(tree) <= 1 or sum(one.nbytes for one in tree.values()) <= most_bytes for tree in theirs)
        before = [path.read_bytes() for path in written]
        assert write_tensors(at / "m.safetensors", named, most_bytes=most_bytes, metadata=metadata) == written
        assert [path.read_bytes() for path in written] == before


@given(trees(), st.data())
def test_a_changed_byte_of_a_header_is_an_error_or_moves_no_byte_of_data(
    named: dict[str, Tensor], data: st.DataObject
) -> None:
    """A changed letter of a name, or F32 that became I32, is seen by nobody: the format has no checksums."""
    with folder() as at:
        path = write_tensors(at / "m.safetensors", named)[0]
        raw = bytearray(path.read_bytes())
        size = 8 + int.from_bytes(raw[:8], "little")
        for place in data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)):
            spoilt = bytearray(raw)
            spoilt[place] ^= data.draw(st.integers(1, 255))
            path.write_bytes(spoilt)
            heard, found = tried(lambda: read_tensors(path))
            if found is None:
                assert heard.startswith(f"{path}: "), heard
            else:
                assert describe_tensors(path) == form(found)
                assert len(found) == len(named)
                assert sorted(map(data_of, found.values())) == sorted(map(data_of, named.values()))


@given(trees(), st.integers(0), st.binary(max_size=20))
def test_a_file_of_another_length_is_an_error(named: dict[str, Tensor], cut: int, more: bytes) -> None:
    with folder() as at:
        path = write_tensors(at / "m.safetensors", named)[0]
        raw = path.read_bytes()
        for spoilt in (raw[: cut % len(raw)], *[raw + more] * bool(more)):
            path.write_bytes(spoilt)
            for ask in (read_tensors, describe_tensors):
                with pytest.raises(CheckpointError):
                    ask(path)


@given(st.binary(max_size=200), st.booleans())
def test_what_is_no_file_of_tensors_is_an_error(noise: bytes, index: bool) -> None:
    with folder() as at:
        path = at / ("m.safetensors.index.json" if index else "m.safetensors")
        path.write_bytes(noise)
        with pytest.raises(CheckpointError) as caught:
            read_tensors(path)
        assert str(caught.value).startswith(f"{path}: ")


@given(random_bits(torch.float32), st.integers(1, 9))
def test_the_mean_of_copies_is_what_was_copied(tensor: Tensor, copies: int) -> None:
    before = data_of(tensor)
    mean = averaged(lambda: {"x": tensor} for _ in range(copies))["x"]
    assert data_of(tensor) == before
    nan = tensor.isnan()
    assert torch.equal(mean.isnan(), nan)
    assert torch.equal(mean.view(torch.int32)[~nan], tensor.view(torch.int32)[~nan])


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=1)
)
def test_a_mean_lies_between_the_least_and_the_greatest(rows: list[list[float]]) -> None:
    mean = averaged((lambda row=row: {"x": torch.tensor(row)}) for row in rows)["x"]  # type: ignore[misc]
    every = torch.tensor(rows)
    assert bool(((every.amin(0) <= mean) & (mean <= every.amax(0))).all())


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "0", "1"]), min_size=1, max_size=4).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "a*", "0"]), min_size=1, max_size=3).map(".".join)


@given(st.lists(PARTS, unique=True), st.dictionaries(PATTERNS, PATTERNS, max_size=3), st.booleans())
def test_names_stay_apart_or_it_is_an_error(names: list[str], rules: dict[str, str], rest: bool) -> None:
    if rest:
        rules = {f"{pattern}.**": f"{new}.**" for pattern, new in rules.items()}
    heard, new = tried(lambda: renamed(names, rules))
    if new is None:
        assert heard
    else:
        assert list(new) == names
        assert len(set(new.values())) == len(names)
        if not rules:
            assert list(new.values()) == names


@given(st.lists(PARTS, unique=True, min_size=1))
def test_a_rule_turned_round_gives_the_names_back(names: list[str]) -> None:
    there = renamed(names, {"**": "model.**.end"})
    back = renamed([name.removesuffix(".end") for name in there.values()], {"model.**": "**"})
    assert list(back.values()) == names
