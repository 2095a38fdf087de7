"""Writing .safetensors: whole or not at all, the same bytes again, and each refusal."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors.torch")

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lib.errors import CheckpointError
from lib.store.export import write_tensors
from lib.store.tensors import describe_tensors, read_metadata, read_tensors
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
