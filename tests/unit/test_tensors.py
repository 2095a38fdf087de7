"""Reading .safetensors: bits as they are, and each kind of file that is refused."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors.torch")

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lib.store import tensors
from lib.store.export import write_tensors
from lib.store.tensors import DTYPES, describe_tensors, read_metadata, read_tensors
from tests.checkpoints import refused
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
        "import sys, torch, lib.store.export as t; assert 'safetensors' not in sys.modules;"
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


def test_all_that_is_public_is_named() -> None:
    assert sorted(tensors.__all__) == tensors.__all__
