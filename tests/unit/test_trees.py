"""Trees by name: new names by rules, and means."""

from __future__ import annotations

import json
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("safetensors.torch")

from safetensors import SafetensorError, safe_open

from lib.store.export import write_tensors
from lib.store.tensors import DTYPES
from lib.store.trees import averaged, renamed
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
