"""States and checkpoints that several tests make, compare and spoil."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from lib.config import Model, Recipe
from lib.errors import CheckpointError
from lib.store.leaves import nodes
from lib.store.manifest import commit_of
from lib.store.shards import crc32c

FIX = "restore it or take another checkpoint"


def td(**leaves: Any) -> TensorDict:
    return TensorDict(leaves, batch_size=[])


def bits(tensor: Tensor) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: TensorDict, b: TensorDict) -> None:
    left, right = nodes(a), nodes(b)
    assert list(left) == list(right)
    for path, leaf in left.items():
        other = right[path]
        if isinstance(leaf, Tensor):
            assert isinstance(other, Tensor)
            assert (leaf.dtype, leaf.shape, bits(leaf)) == (other.dtype, other.shape, bits(other)), path
        else:
            assert leaf == other, path


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder, to compare before and after."""
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def example() -> TensorDict:
    return td(
        step=torch.tensor(7),
        params=td(blocks=td(wq=torch.randn(3, 4, 4)), embed=torch.randn(5, 4)),
        optimizer=td(),
        recipe=NonTensorData(Recipe(model=Model(width=64))),
        cursor=td(text=td(epoch=torch.tensor(1), row=torch.tensor(2**40 + 1))),
    )


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def numbered(cases: list[Any]) -> list[Any]:
    return [pytest.param(*case, id=str(i)) for i, case in enumerate(cases)]


def flip(file: Path, at: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest and commit it again: consistent digests, wrong content."""
    document = json.loads((path / "manifest.json").read_text())
    data = json.dumps(change(document) or document).encode()
    (path / "manifest.json").write_bytes(data)
    (path / "COMMIT").write_bytes(commit_of(data))


def put(*keys: str, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def replace_root(path: Path, data: bytes) -> None:
    (path / "zarr.json").write_bytes(data)
    facts = {"size": len(data), "crc32c": crc32c(data).hex()}
    rewrite(path, put("files", "zarr.json", value=facts))
