from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors.torch")

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lib.errors import CheckpointError
from lib.store import tensors
from lib.store.tensors import DTYPES, describe_tensors, read_metadata, read_tensors, write_tensors
from lib.store.trees import averaged, renamed
from tests.checkpoints import refused, tree
from tests.strategies import refusal

FIX = "fetch it again or take another file"
F32_BITS = [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 0x00000001]  # -0.0, NaNs, inf, subnormal


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def all_bits(named: Any) -> dict[str, Any]:
    return {name: bits(tensor) for name, tensor in named.items()}


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of random bits, NaN and all."""
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=seeded(seed))
    return data.view(dtype).reshape(shape)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def example() -> dict[str, Tensor]:
    return {
        "layers.0.w": of_bytes(torch.float32, (4, 3)),
        "layers.1.w": of_bytes(torch.bfloat16, (4, 3), 1),
        "step": torch.tensor(7),
        "none": torch.empty(0, 5),
    }


def lay(path: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
    """A file whose header is what one likes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if size is None else size) + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}


def said_of(path: Path) -> str:
    """What the package itself says of a file."""
    with pytest.raises(SafetensorError) as caught:
        safe_open(path, framework="pt")
    return str(caught.value)


def several(folder: Path, named: dict[str, Tensor] | None = None) -> Path:
    """Three files and their index."""
    named = named or {name: torch.full((2,), n) for n, name in enumerate("abc")}
    return write_tensors(folder / "m.safetensors", named, most_bytes=16)[-1]


# Round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [(n, s) for n in DTYPES for s in ((3, 4), (), (0,), (2, 0, 3), (1,)) if n != "F4" or s],  # a pair needs an axis
    ids=str,
)
def test_every_dtype_keeps_its_bits(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    named = {"x": of_bytes(dtype, shape)}
    path = tmp_path / "x.safetensors"
    assert write_tensors(path, named) == [path]
    assert all_bits(read_tensors(path)) == all_bits(named)
    assert describe_tensors(path) == {"x": (str(dtype).removeprefix("torch."), shape)}
    assert all_bits(load_file(path)) == all_bits(named)


def test_negative_zero_nan_payloads_and_subnormals_keep_their_bits(tmp_path: Path) -> None:
    named = {
        "f32": torch.tensor(F32_BITS, dtype=torch.uint32).view(torch.float32),
        "bf16": torch.tensor([0x8000, 0x7FC1, 0x7F81, 0x0001], dtype=torch.uint16).view(torch.bfloat16),
    }
    assert all_bits(read_tensors(write_tensors(tmp_path / "x.safetensors", named)[0])) == all_bits(named)


def test_views_ties_and_parameters_are_stored_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    named = {
        "base": base,
        "tied": base,
        "row": base[1],
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "broadcast": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(base),
        "negated": torch.complex(base, base).conj().imag,
        "conjugate": torch.complex(base, base).conj(),
        "one": torch.complex(base[0, 1:2], base[0, 1:2]).conj(),
    }
    before = all_bits({"base": base})
    back = read_tensors(write_tensors(tmp_path / "x.safetensors", named)[0])
    for name, tensor in named.items():
        assert torch.equal(back[name], tensor.detach().resolve_conj().resolve_neg()), name
        assert back[name].is_contiguous()
        assert not back[name].requires_grad
    assert all_bits({"base": base}) == before


def test_what_is_read_owns_its_memory(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", example())[0]
    back = read_tensors(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert all_bits(back) == all_bits(example())
    for tensor in back.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_file_of_the_package_is_read(tmp_path: Path) -> None:
    named = {"b": torch.randn(3), "a": torch.ones(2, 2, dtype=torch.float16)}
    save_file(named, tmp_path / "x.safetensors")
    save_file(named, tmp_path / "y.safetensors", metadata={"b": "2", "a": "1"})
    assert all_bits(read_tensors(tmp_path / "x.safetensors")) == all_bits(named)
    assert list(read_tensors(tmp_path / "x.safetensors")) == ["a", "b"]
    assert read_metadata(tmp_path / "x.safetensors") == {}
    assert read_metadata(tmp_path / "y.safetensors") == {"a": "1", "b": "2"}


def test_some_tensors_by_name(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", example())[0]
    assert list(read_tensors(path, names=["step", "layers.0.w"])) == ["step", "layers.0.w"]
    assert read_tensors(path, names=[]) == {}
    absent = refused(lambda: read_tensors(path, names=["step", "layers.0.v"]))
    assert absent == f"{path}: no tensor 'layers.0.v' in it, must be there; did you mean 'layers.0.w'?"
    absent = refused(lambda: read_tensors(path, names=["head"]))
    assert absent == f"{path}: no tensor 'head' in it, must be there; correct the name"
    assert refusal(read_tensors, path, names="step") == "names='step' must be a list of names; write ['step']"


def test_a_tree_without_tensors_is_a_file_too(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", {}, metadata={"made": "today"})[0]
    assert read_tensors(path) == {}
    assert read_metadata(path) == {"format": "pt", "made": "today"}


def test_metadata_of_any_text_is_kept_and_says_pt_unless_told_otherwise(tmp_path: Path) -> None:
    odd = {"a": '"\\\n\x00\x1f\x7f é \U0001f600', "": "", "z": "1", "format": "mine"}
    path = write_tensors(tmp_path / "x.safetensors", {"é\n": torch.ones(1)}, metadata=odd)[0]
    assert read_metadata(path) == dict(sorted(odd.items()))
    assert describe_tensors(path) == {"é\n": ("float32", (1,))}
    assert read_metadata(write_tensors(tmp_path / "y.safetensors", {})[0]) == {"format": "pt"}


def test_another_process_writes_the_same_bytes_and_imports_the_package_only_then(tmp_path: Path) -> None:
    metadata = {letter: letter for letter in "hgfedcba"}
    program = (
        "import sys, torch, lib.store.tensors as t; assert 'safetensors' not in sys.modules;"
        f"t.write_tensors('{tmp_path}/y.safetensors', {{'a': torch.ones(2), 'b': torch.ones(3)}}, metadata={metadata})"
    )
    path = write_tensors(tmp_path / "x.safetensors", {"b": torch.ones(3), "a": torch.ones(2)}, metadata=metadata)[0]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
    assert path.read_bytes() == (tmp_path / "y.safetensors").read_bytes()


# Several files --------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_in_one_file_is_several_with_an_index(tmp_path: Path) -> None:
    named = {"d": torch.ones(1), "c": torch.ones(3), "big": torch.ones(9), "b": torch.ones(2), "a": torch.ones(2)}
    written = write_tensors(tmp_path / "model.safetensors", named, most_bytes=16, metadata={"made": "today"})
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [path.name for path in written] == [*files, "model.safetensors.index.json"]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in written]
    assert [sorted(load_file(path)) for path in written[:3]] == [["c", "d"], ["big"], ["a", "b"]]
    where = {"a": files[2], "b": files[2], "big": files[1], "c": files[0], "d": files[0]}
    index = {"metadata": {"total_size": 68}, "weight_map": where}
    assert written[3].read_text() == json.dumps(index, indent=2) + "\n"
    for path in (tmp_path, written[3], str(tmp_path)):
        assert all_bits(read_tensors(path)) == all_bits(dict(sorted(named.items())))
        assert read_metadata(path) == {"format": "pt", "made": "today"}
        assert describe_tensors(path)["big"] == ("float32", (9,))
    assert all_bits(read_tensors(tmp_path, names=["big", "a"])) == all_bits({"big": named["big"], "a": named["a"]})


@pytest.mark.parametrize(("most_bytes", "files"), [(1, 3), (4, 3), (7, 3), (8, 2), (11, 2), (12, 1), (10**9, 1)])
def test_files_are_filled_in_order(tmp_path: Path, most_bytes: int, files: int) -> None:
    named = {name: torch.ones(1) for name in "abc"}
    written = write_tensors(tmp_path / "m.safetensors", named, most_bytes=most_bytes)
    assert len(written) == (1 if files == 1 else files + 1)
    assert list(read_tensors(tmp_path)) == ["a", "b", "c"]


def test_a_folder_may_hold_one_file_beside_other_things(tmp_path: Path) -> None:
    write_tensors(tmp_path / "m.safetensors", example())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".half.safetensors").write_text("x")
    assert all_bits(read_tensors(tmp_path)) == all_bits(dict(sorted(example().items())))


def test_a_folder_that_means_nothing_or_several_things_is_refused(tmp_path: Path) -> None:
    fix = "must be one file or one index; name the one to read"
    assert refused(lambda: read_tensors(tmp_path)) == f"{tmp_path}: 0 .safetensors files and 0 indexes in it, {fix}"
    for name in "ab":
        write_tensors(tmp_path / f"{name}.safetensors", {})
    assert refused(lambda: read_tensors(tmp_path)) == f"{tmp_path}: 2 .safetensors files and 0 indexes in it, {fix}"
    index = several(tmp_path)
    stray = f"{tmp_path}: 'a.safetensors' is in it and not in 'm.safetensors.index.json', must be there"
    assert refused(lambda: read_tensors(tmp_path)) == f"{stray}; name the one to read"
    assert list(read_tensors(index)) == ["a", "b", "c"]
    (tmp_path / "x.safetensors.index.json").write_text("{}")
    assert refused(lambda: read_tensors(tmp_path)) == f"{tmp_path}: 5 .safetensors files and 2 indexes in it, {fix}"


def change_index(index: Path, **changed: str | None) -> None:
    told = json.loads(index.read_text())
    told["weight_map"] = {name: at for name, at in {**told["weight_map"], **changed}.items() if at is not None}
    index.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "a/../../x.safetensors", "/etc/passwd", "/x.safetensors", "", ".", "x.bin", "a\0.safetensors"],
)
def test_an_index_leads_to_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / "in").mkdir()
    index = several(tmp_path / "in")
    change_index(index, a=name)
    for path in (index, index.parent):
        assert (
            refused(lambda path=path: read_tensors(path))
            == f"{index}: {name!r} must be a .safetensors file in its folder; {FIX}"
        )


def test_an_index_leads_through_no_symlink_out_of_its_folder(tmp_path: Path) -> None:
    index = several(tmp_path / "in")
    first = index.parent / json.loads(index.read_text())["weight_map"]["a"]
    first.rename(index.parent / "other.safetensors")
    first.symlink_to("other.safetensors")
    assert list(read_tensors(index)) == ["a", "b", "c"]
    (index.parent / "other.safetensors").rename(tmp_path / "other.safetensors")
    first.unlink()
    first.symlink_to("../other.safetensors")
    told = f"{index}: {first.name!r} must be a .safetensors file in its folder; {FIX}"
    assert refused(lambda: read_tensors(index)) == told
    first.unlink()
    (index.parent / "loop").symlink_to("loop")
    change_index(index, a="loop/x.safetensors")
    assert "loop/x.safetensors" in refused(lambda: read_tensors(index))


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    index = several(tmp_path)
    one, two, _ = sorted(tmp_path.glob("m-*"))
    again = "fetch all files again"
    change_index(index, d=one.name)
    assert refused(lambda: read_tensors(index)) == f"{index}: tensor 'd' is not in {one.name!r}, must be there; {again}"
    change_index(index, d=None)
    assert list(read_tensors(index)) == ["a", "b", "c"]
    save_file({"a": torch.ones(1), "d": torch.ones(1)}, one)
    assert refused(lambda: read_tensors(index)) == f"{one}: tensor 'd' is not in {index.name!r}, must be; {again}"
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, one)
    twice = f"{one}: tensor 'b' is in {two.name!r} too, must be in one file; {again}"
    assert refused(lambda: read_tensors(index)) == twice
    one.unlink()
    assert refused(lambda: describe_tensors(index)) == f"{one}: must be a file that is there; check the path"


def test_files_of_one_index_whose_metadata_contradict_are_refused(tmp_path: Path) -> None:
    index = several(tmp_path)
    _, two, _ = sorted(tmp_path.glob("m-*"))
    save_file({"b": torch.ones(1)}, two, metadata={"format": "np"})
    assert (
        refused(lambda: read_metadata(index))
        == f"{two}: metadata 'format' is 'np', must be 'pt' as in the files before; {FIX}"
    )
    assert list(read_tensors(index)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Input data was truncated"),
        ("{}", "Object missing required field `weight_map`"),
        ('{"weight_map": {"a": 1}}', "Expected `str`, got `int` - at `$.weight_map[...]`"),
        ("[]", "Expected `object`, got `array`"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(text)
    told = f"{index}: {says}, must be JSON with a weight_map of tensors to files; {FIX}"
    assert refused(lambda: read_tensors(index)) == told
    assert refused(lambda: read_tensors(tmp_path)) == told
    index.write_bytes(b'{"weight_map": {"\xff": "a"}}')
    assert refused(lambda: read_tensors(index)).startswith(f"{index}: ")


def test_a_huge_index_is_not_read(tmp_path: Path) -> None:
    index = tmp_path / "m.safetensors.index.json"
    with open(index, "wb") as file:
        file.truncate(100_000_001)
    told = f"{index}: has more than 100000000 bytes, must be an index; {FIX}"
    assert refused(lambda: read_tensors(index)) == told


# What is no good file -------------------------------------------------------------------------------------------------


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for ask in (read_tensors, describe_tensors, read_metadata):
        assert refused(lambda ask=ask: ask(path)) == f"{path}: must be a file that is there; check the path"
        below = path / "y"
        path.write_text("x")
        assert (
            refused(lambda ask=ask, below=below: ask(below)) == f"{below}: must be a file that is there; check the path"
        )
        path.unlink()
    os.mkfifo(path)
    assert refused(lambda: read_tensors(path)) == f"{path}: must be a regular file; check the path"
    assert refused(lambda: read_tensors(tmp_path)) == f"{path}: must be a regular file; check the path"


def test_what_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tensors(tmp_path / "x.safetensors", {})[0]

    def deny(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "stat", deny)
    assert refused(lambda: read_tensors(path)) == f"{path}: cannot be read (Permission denied); make it readable"
    monkeypatch.undo()
    monkeypatch.setattr(os, "listdir", deny)
    assert (
        refused(lambda: read_tensors(tmp_path)) == f"{tmp_path}: cannot be read (Permission denied); make it readable"
    )


BAD: dict[str, tuple[Any, bytes, int | None]] = {
    "no JSON": (b"{", b"", None),
    "an array": (b"[]", b"", None),
    "an absurd header": (b"{}", b"", 2**63),
    "a long header": (b"{}", b"", 3),
    "no header": (b"", b"", 0),
    "cut data": ({"a": entry("F32", [2], 0, 8)}, b"1234567", None),
    "more data": ({"a": entry("F32", [2], 0, 8)}, b"123456789", None),
    "a hole": ({"a": entry("F32", [1], 4, 8)}, b"12345678", None),
    "an overlap": ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"123456", None),
    "an absurd shape": ({"a": entry("F32", [2**62, 2**62], 0, 8)}, b"12345678", None),
    "another shape": ({"a": entry("F32", [3], 0, 8)}, b"12345678", None),
    "a negative shape": ({"a": entry("F32", [-2], 0, 8)}, b"12345678", None),
    "an unknown dtype": ({"a": entry("Q1", [2], 0, 8)}, b"12345678", None),
    "metadata that is none": ({"__metadata__": {"a": 1}}, b"", None),
}


@pytest.mark.parametrize(("header", "data", "size"), BAD.values(), ids=BAD)
def test_a_damaged_file_is_refused(tmp_path: Path, header: Any, data: bytes, size: int | None) -> None:
    path = lay(tmp_path / "x.safetensors", header, data, size)
    told = f"{path}: {said_of(path)}, must be a whole .safetensors file; {FIX}"
    for ask in (read_tensors, describe_tensors, read_metadata):
        assert refused(lambda ask=ask: ask(path)) == told


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = write_tensors(tmp_path / "x.safetensors", example())[0]
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        for ask in (read_tensors, describe_tensors):
            assert refused(lambda ask=ask: ask(path)).startswith(f"{path}: ")


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**62, 2**62], [2**64 - 1, 0]])
def test_an_empty_tensor_of_an_absurd_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    path = lay(tmp_path / "x.safetensors", {"a": entry("F32", shape, 0, 0)})
    told = f"{path}: tensor 'a' has shape {tuple(shape)}, must have fewer than 2**63 bytes; {FIX}"
    assert refused(lambda: read_tensors(path)) == told


def test_a_tensor_that_is_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    one, two = (json.dumps(entry("F32", shape, 0, 8)) for shape in ([2, 1], [1, 2]))
    path = lay(tmp_path / "x.safetensors", f'{{"a": {one}, "a": {two}}}'.encode(), b"12345678")
    assert len(load_file(path)) == 1  # the package takes the last
    assert refused(lambda: read_tensors(path)) == f"{path}: 'a' is twice in its header, must be once; {FIX}"


def test_dtypes_that_torch_has_not_are_refused(tmp_path: Path) -> None:
    path = lay(tmp_path / "x.safetensors", {"a": entry("F6_E2M3", [4], 0, 3)}, b"123")
    assert (
        refused(lambda: describe_tensors(path))
        == f"{path}: tensor 'a' is F6_E2M3, must be one of {', '.join(DTYPES)}; convert it"
    )
    lay(path, {"a": entry("F4", [2, 3], 0, 3)}, b"123")
    assert (
        refused(lambda: read_tensors(path))
        == f"{path}: tensor 'a' has shape (2, 3), must have an even last axis; {FIX}"
    )


def test_a_bool_that_is_none_is_refused(tmp_path: Path) -> None:
    path = lay(tmp_path / "x.safetensors", {"a": entry("BOOL", [2], 0, 2)}, b"\x01\x02")
    assert refused(lambda: read_tensors(path)) == f"{path}: tensor 'a' is no bool, must hold bytes 0 and 1; {FIX}"


# Writing --------------------------------------------------------------------------------------------------------------


def test_writing_again_changes_nothing_and_other_bytes_are_refused(tmp_path: Path) -> None:
    first = write_tensors(tmp_path / "m.safetensors", example(), metadata={"b": "1", "a": "2"})
    before, stamp = tree(tmp_path), first[0].stat()
    assert write_tensors(tmp_path / "m.safetensors", example(), metadata={"a": "2", "b": "1"}) == first
    assert (tree(tmp_path), first[0].stat()) == (before, stamp)
    taken = f"{first[0]}: is there already, must be a new file; choose another path"
    for named in ({}, {**example(), "step": torch.tensor(8)}):
        assert refused(lambda named=named: write_tensors(first[0], named)) == taken
    assert refused(lambda: write_tensors(first[0], example(), most_bytes=1)) == taken
    assert tree(tmp_path) == before


def test_several_files_are_written_once_and_completed_when_some_are_missing(tmp_path: Path) -> None:
    index = several(tmp_path)
    before = tree(tmp_path)
    (tmp_path / "m-00002-of-00003.safetensors").unlink()
    index.unlink()  # as a machine may stop between two of them
    assert several(tmp_path) == index
    assert tree(tmp_path) == before
    taken = f"{index}: is there already, must be a new file; choose another path"
    assert refused(lambda: write_tensors(tmp_path / "m.safetensors", {})) == taken
    assert refused(lambda: several(tmp_path, {n: torch.ones(2, dtype=torch.int64) for n in "abcd"})) == taken
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to("nowhere"), os.mkfifo], ids=["folder", "link", "pipe"]
)
def test_something_else_in_the_way_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "m.safetensors"
    make(path)
    told = f"{path}: is there already, must be a new file; choose another path"
    assert refused(lambda: write_tensors(path, example())) == told
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_folders_above_are_made_and_go_again_when_nothing_comes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a" / "b" / "m.safetensors"
    monkeypatch.setattr("safetensors.torch.save_file", fail_after(0, SafetensorError("I/O error:\nfull")))
    assert refused(lambda: write_tensors(path, example())) == f"{path}: not written (I/O error: full); check the disk"
    assert tree(tmp_path) == {}
    monkeypatch.undo()
    assert write_tensors(path, example()) == [path]


def fail_after(
    times: int, error: BaseException, call: Callable[..., Any] = lambda *_, **__: None
) -> Callable[..., Any]:
    left = [times]

    def instead(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return call(*args, **kwargs)

    return instead


@pytest.mark.parametrize(
    "stop", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=["full", "interrupt"]
)
@pytest.mark.parametrize("what", ["os.fsync", "os.rename", "safetensors.torch.save_file"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, stop: BaseException
) -> None:
    (tmp_path / "other").write_text("stays")
    call = {"os.fsync": os.fsync, "os.rename": os.rename}.get(what, save_file)
    heard: set[str] = set()
    for times in range(100):
        with monkeypatch.context() as patch:
            patch.setattr(what, fail_after(times, stop, call))
            try:
                written = several(tmp_path)
                break
            except (KeyboardInterrupt, CheckpointError) as error:
                heard.add(str(error))
        assert tree(tmp_path) == {"other": b"stays"}
    told = f"{tmp_path}/m.safetensors: not written (No space left on device); check the disk"
    assert heard == {told if isinstance(stop, OSError) else ""}
    assert times >= 3
    assert list(read_tensors(written)) == ["a", "b", "c"]


def test_a_place_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "m.safetensors"
    assert refused(lambda: write_tensors(below, {})) == f"{below}: not written (Not a directory); choose another path"
    monkeypatch.setattr(os, "mkdir", fail_after(0, PermissionError(errno.EACCES, os.strerror(errno.EACCES))))
    assert refused(lambda: write_tensors(path, {})) == f"{path}: not written (Permission denied); choose another path"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("a", 1, "tensor 'a': a int must be a tensor; make it one or drop it"),
        ("a", torch.ones(2).to_sparse(), "tensor 'a': must be a plain dense tensor with data; make it one or drop it"),
        (
            "a",
            torch.ones(2, device="meta"),
            "tensor 'a': must be a plain dense tensor with data; make it one or drop it",
        ),
        (
            "__metadata__",
            torch.ones(1),
            "tensor '__metadata__': must be named by text other than '__metadata__'; rename it",
        ),
        ("\ud800", torch.ones(1), "tensor '\\ud800': must be named by text other than '__metadata__'; rename it"),
        (3, torch.ones(1), "tensor 3: must be named by text other than '__metadata__'; rename it"),
        (
            "a",
            torch.ones(1, dtype=torch.complex128),
            "tensor 'a': dtype=complex128 must be one of bool, uint8, uint16, uint32, uint64, int8, int16, int32, int64, "
            "float4_e2m1fn_x2, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, float16, "
            "bfloat16, float32, float64, complex64; convert it or drop it",
        ),
        (
            "a",
            torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "tensor 'a': a pair of 4-bit floats must have an axis to lie on; reshape it to (1,)",
        ),
    ],
    ids=range(8),
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, name: Any, value: Any, told: str) -> None:
    path = tmp_path / "new" / "m.safetensors"
    assert refused(lambda: write_tensors(path, {"good": torch.ones(1), name: value})) == told
    assert tree(tmp_path) == {}


def test_mistakes_of_the_caller_are_value_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    for name in ("m.bin", ".safetensors"):
        told = f"{tmp_path / name}: must be named <name>.safetensors; rename it"
        assert refusal(write_tensors, tmp_path / name, {}) == told
    assert refusal(write_tensors, path, {}, most_bytes=0) == "most_bytes=0 must be >= 1; raise it"
    assert refusal(write_tensors, path, {}, metadata={"a": 1}) == "metadata: 'a'=1 must be two strings; convert them"
    assert (
        refusal(write_tensors, path, {}, metadata={"a": "\ud800"})
        == "metadata: 'a'='\\ud800' must be two strings; convert them"
    )
    write_tensors(path, {})
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    absent = "safetensors: not installed, needed for .safetensors files; pip install 'purestep[safetensors]'"
    for call in (read_tensors, describe_tensors, read_metadata, lambda at: write_tensors(at, {})):
        assert refusal(call, path) == absent


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "rules", "new"),
    [
        ("a b", {}, "a b"),
        ("a.b a.c d", {"a.*": "x.*"}, "x.b x.c d"),
        ("a.b.c a.b", {"a.*": "x.*"}, "a.b.c x.b"),
        ("a.b.c a.b", {"a.**": "**.x"}, "b.c.x b.x"),
        ("h.1.w h.2.b", {"h.*.w": "*.w", "h.**": "rest.**"}, "1.w rest.2.b"),
        ("a1.b2", {"a*.b*": "*-*"}, "1-2"),
        ("l.0.q.w", {"l.*.*.**": "*/*/**"}, "0/q/w"),
        ("l.0.q.w", {"l.*.**": "**.*"}, "q.w.0"),
        ("a a.b", {"a**": "x**"}, "x x.b"),
        ("a.c axc", {"a.c": "b"}, "b axc"),
        ("a b", {"a": "b", "b": "a"}, "b a"),
        ("ab.x", {"*b.x": "*"}, "a"),
    ],
)
def test_names_change_by_the_first_rule_that_fits(names: str, rules: dict[str, str], new: str) -> None:
    assert renamed(names.split(), rules) == dict(zip(names.split(), new.split(), strict=True))


@pytest.mark.parametrize(
    ("names", "rules", "told"),
    [
        ("a", {"b": "c"}, "rule 'b': applies to no name, must to one; correct it or drop it"),
        ("a.", {"a.*": "*"}, "rule 'a.*': applies to no name, must to one; correct it or drop it"),
        ("a.b", {"**": "**", "a.*": "*"}, "rule 'a.*': applies to no name, must to one; correct it or drop it"),
        ("a b", {"a": "b"}, "'a' and 'b' both become 'b', must stay apart; change the rules"),
        ("x.a y.a", {"*.a": "b.*", "*": "*"}, "rule '*': applies to no name, must to one; correct it or drop it"),
        ("a.x b.x", {"a.*": "*", "b.*": "*"}, "'a.x' and 'b.x' both become 'x', must stay apart; change the rules"),
        ("a a", {}, "'a' and 'a' both become 'a', must stay apart; change the rules"),
        ("a.b", {"a.*": "x"}, "rule 'a.*': 'x': 1 stars (*) become 0 (), must be as many of each kind; correct it"),
        ("a.b", {"a.*": "**"}, "rule 'a.*': '**': 1 stars (*) become 1 (**), must be as many of each kind; correct it"),
        (
            "a",
            {"***": "***"},
            "rule '***': '***' must have `*` between other characters and `**` at its end at most; correct it",
        ),
        (
            "a",
            {"**a": "**"},
            "rule '**a': '**' must have `*` between other characters and `**` at its end at most; correct it",
        ),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(names: str, rules: dict[str, str], told: str) -> None:
    assert refusal(renamed, names.split(), rules) == told


# Averages -------------------------------------------------------------------------------------------------------------


def mean(*trees: dict[str, Tensor]) -> dict[str, Tensor]:
    return averaged([lambda tree=tree: tree for tree in trees])  # type: ignore[misc]


def test_the_mean_is_taken_element_by_element_in_double_precision() -> None:
    one = {"w": torch.tensor([1.0, 2.0**24]), "step": torch.tensor(3), "on": torch.tensor(True)}
    two = {"w": torch.tensor([3.0, 1.0]), "step": torch.tensor(3), "on": torch.tensor(True)}
    out = mean(one, two, two)
    assert list(out) == ["w", "step", "on"]
    want = torch.tensor([7 / 3, (2**24 + 2) / 3], dtype=torch.float64).float()
    assert all_bits(out) == all_bits({"w": want, "step": torch.tensor(3), "on": torch.tensor(True)})
    assert all_bits(one) == all_bits(
        {"w": torch.tensor([1.0, 2.0**24]), "step": torch.tensor(3), "on": torch.tensor(True)}
    )
    out["step"] += 1
    assert one["step"] == 3


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "F4"])
def test_every_dtype_has_a_mean(name: str) -> None:
    one, two = (torch.tensor([1, 1]).to(DTYPES[name]), torch.tensor([1, 1]).to(DTYPES[name]))
    if name in ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "C64"):
        two = torch.tensor([1, 2]).to(DTYPES[name])
        assert bits(mean({"x": one}, {"x": two})["x"]) == bits(torch.tensor([1, 1.5]).to(DTYPES[name]))
    else:
        assert bits(mean({"x": one}, {"x": two})["x"]) == bits(one)


def test_numbers_that_torch_cannot_add_must_be_equal() -> None:
    one, two = (of_bytes(torch.float4_e2m1fn_x2, (3,), seed) for seed in (0, 1))
    assert bits(mean({"x": one}, {"x": one})["x"]) == bits(one)
    told = "averaged: tree 2 differs from the first: 'x' has other float4_e2m1fn_x2 (3,) values, must be alike"
    assert refused(lambda: mean({"x": one}, {"x": two})) == f"{told}; average only trees of one model"


def test_one_tree_is_read_at_a_time() -> None:
    memory: list[weakref.ref[Any]] = []

    def read() -> dict[str, Tensor]:
        assert [one() for one in memory] == [None] * len(memory)
        arrays = {"x": np.ones(2), "step": np.ones(2, np.int64)}
        memory.extend(map(weakref.ref, arrays.values()))
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    assert averaged(read for _ in range(3))["x"].tolist() == [1, 1]
    assert len(memory) == 6


def test_zeros_keep_their_sign_and_what_is_not_finite_stays_so() -> None:
    odd = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), 1e-45, 3e38])
    out = mean(*[{"x": odd}] * 3)["x"]
    assert bits(out) == bits(odd)


def test_trees_that_differ_are_refused_with_all_differences() -> None:
    one = {"a": torch.ones(2), "b": torch.ones(2), "step": torch.tensor(1), "same": torch.ones(1)}
    two = {"c": torch.ones(2), "b": torch.ones(2, 1).half(), "step": torch.tensor(2), "same": torch.ones(1)}
    told = (
        "averaged: tree 3 differs from the first: missing 'a', extra 'c', 'b' is float16 (2, 1), first float32 (2,), "
        "'step' has other int64 () values, must be alike; average only trees of one model"
    )
    assert refused(lambda: mean(one, one, two)) == told
    many = {f"{n:02}": torch.ones(1) for n in range(11)}
    told = ", ".join(f"missing '{n:02}'" for n in range(8))
    told = f"averaged: tree 2 differs from the first: {told} and 3 more, must be alike; average only trees of one model"
    assert refused(lambda: mean(many, {})) == told


def test_no_tree_has_no_mean() -> None:
    assert refusal(averaged, []) == "averaged: no tree, must be one or more; name one"
    assert mean({}) == {}


def test_all_that_is_public_is_named() -> None:
    assert sorted(tensors.__all__) == tensors.__all__
