"""One checkpoint: what comes back, what is refused at save, and each message in full."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from tensordict import NonTensorData, TensorDict

from lib.config import Optim, Recipe
from lib.store import load, save
from lib.store.checkpoint import Row, describe, read_info
from lib.store.leaves import STORED
from lib.store.shards import crc32c
from tests.checkpoints import (
    assert_same,
    bits,
    example,
    flip,
    numbered,
    refused,
    td,
    tree,
)

# What comes back ------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_with_its_recipe_order_and_empty_branches(tmp_path: Path) -> None:
    state = example()
    path = save(tmp_path / "run" / "checkpoints" / "step_0000000007", state)
    assert path == tmp_path / "run" / "checkpoints" / "step_0000000007"
    for place in (path, path.parent, path.parent.parent, str(path)):
        back = load(place)
        assert_same(state, back)
        assert list(back.keys()) == ["step", "params", "optimizer", "recipe", "cursor"]
        assert back["recipe"] == state["recipe"]
        assert isinstance(back["recipe"], Recipe)


@pytest.mark.parametrize("dtype", STORED)
def test_every_bit_pattern_of_every_dtype_comes_back(tmp_path: Path, dtype: str) -> None:
    kind = STORED[dtype][0]
    raw = torch.arange(65536).to(torch.uint16).view(torch.uint8)  # all 16-bit patterns; samples of the wider ones
    values = (raw % 2 == 1) if kind is torch.bool else raw.view(kind)
    state = td(x=values, scalar=values[3].clone(), empty=torch.empty((0, 3), dtype=kind))
    assert_same(state, load(save(tmp_path / "a", state)))
    plain = zarr.open_group(tmp_path / "a", mode="r")
    assert np.asarray(plain["x"][:]).tobytes() == bits(values)
    assert plain["x"].attrs["logical_dtype"] == dtype


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0x8000, torch.bfloat16),  # -0.0
        (0x7F80, torch.bfloat16),  # inf
        (0x7FC1, torch.bfloat16),  # NaN with a payload
        (0x0001, torch.bfloat16),  # smallest subnormal
        (0x80000000, torch.float32),
        (0x7FC00001, torch.float32),
        (0x00000001, torch.float32),
    ],
)
def test_negative_zero_nan_payloads_and_subnormals_keep_their_bits(
    tmp_path: Path, value: int, dtype: torch.dtype
) -> None:
    width = {2: torch.uint16, 4: torch.uint32}[dtype.itemsize]
    state = td(x=torch.full((3,), value, dtype=width).view(dtype))
    assert bits(load(save(tmp_path / "a", state))["x"]) == bits(state["x"])


def test_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = td(
        transposed=base.t(),
        strided=base[::2, 1::3],
        broadcast=torch.ones(1).expand(5),
        parameter=torch.nn.Parameter(base),
        negated=torch.complex(base, base).conj().imag,  # lazily negated views
        one=torch.complex(base[0, 1:2], base[0, 1:2]).conj().imag,
    )
    back = load(save(tmp_path / "a", state))
    for name in state.keys():  # noqa: SIM118
        assert torch.equal(back[name], state[name].detach().resolve_neg()), name
        assert back[name].is_contiguous()
        assert not back[name].requires_grad
        assert back[name].untyped_storage().nbytes() == back[name].nbytes


def test_large_leaves_are_sharded_and_plain_zarr_reads_them(tmp_path: Path) -> None:
    state = td(params=td(w=torch.randn(3, 1111, 1003), b=torch.randn(3_000_003).bfloat16()))
    path = save(tmp_path / "a", state)
    assert_same(state, load(path))
    plain = zarr.open_group(path, mode="r")
    for name in ("w", "b"):
        assert plain[f"params/{name}"].shards is not None
        assert np.asarray(plain[f"params/{name}"][:]).tobytes() == bits(state["params", name])
    assert np.array_equal(plain["params/w"][1, 200:300, 7], state["params", "w"][1, 200:300, 7].numpy())


def test_saving_what_was_loaded_writes_the_same_bytes(tmp_path: Path) -> None:
    state = example()
    state.set("recipe", NonTensorData(Recipe(optim=Optim(lr=1))))  # an int where a float comes back
    first = save(tmp_path / "a", state, info={"threads": 2, "compile": True, "names": ["x"], "of": {"y": 0.5}})
    second = save(tmp_path / "b", load(first), info=read_info(first))
    assert tree(first) == tree(second)


def test_a_checkpoint_can_be_checked_by_hand(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    digest, name = (path / "COMMIT").read_text().split()
    assert name == "manifest.json"
    assert digest == hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    listed = json.loads((path / "manifest.json").read_text())["files"]
    for name, facts in listed.items():
        data = (path / name).read_bytes()
        # The values in these files end with their checksum.
        value = data[:-4] if "/c" in name else data
        assert facts == {"size": len(data), "crc32c": crc32c(value).hex()}
        assert value == data or data.endswith(crc32c(value))
    assert {*listed, "COMMIT", "manifest.json"} == {name for name, data in tree(path).items() if data is not None}


def test_sub_trees_can_be_read_alone(tmp_path: Path) -> None:
    state = example()
    path = save(tmp_path / "a", state)
    assert_same(load(path, keys=["params"]), td(params=state["params"]))
    assert_same(
        load(path, keys=["params.blocks", "step"]), td(step=state["step"], params=td(blocks=state["params", "blocks"]))
    )
    assert_same(load(path, keys=["cursor/text/row"]), td(cursor=td(text=td(row=state["cursor", "text", "row"]))))
    assert load(path, keys=["recipe"])["recipe"] == state["recipe"]
    assert_same(load(path, keys=[]), td())


def test_a_sub_tree_is_read_without_the_rest(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    flip(path / "cursor/text/row/c")
    load(path, keys=["params"])
    refused(lambda: load(path, keys=["cursor"]))


def test_sub_trees_that_are_not_there_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    assert refused(lambda: load(path, keys=["parms"])) == (
        f"{path}: state.parms is not in this checkpoint; did you mean params?"
    )
    assert refused(lambda: load(path, keys=["zzz"])) == (
        f"{path}: state.zzz is not in this checkpoint; did you mean step, params, optimizer, recipe, cursor?"
    )
    with pytest.raises(ValueError, match=r"^keys='params' must be a list of names; write keys=\['params'\]$"):
        load(path, keys="params")


def test_info_and_leaves_are_told_without_reading_the_leaves(tmp_path: Path) -> None:
    path = save(
        tmp_path / "run/checkpoints/step_0000000001", example(), info={"torch": torch.__version__, "threads": 2}
    )
    for leaf in path.glob("params/**/c*"):
        leaf.unlink() if leaf.is_file() else None
    assert read_info(tmp_path / "run") == {"torch": str(torch.__version__), "threads": 2}
    assert describe(path) == [
        Row("step", (), "int64", 8),
        Row("params.blocks.wq", (3, 4, 4), "float32", 192),
        Row("params.embed", (5, 4), "float32", 80),
        Row("cursor.text.epoch", (), "int64", 8),
        Row("cursor.text.row", (), "int64", 8),
    ]


def test_loading_gives_memory_of_its_own(tmp_path: Path) -> None:
    path = save(tmp_path / "a", td(x=torch.zeros(5)))
    before = tree(path)
    load(path)["x"].fill_(1)
    assert tree(path) == before
    assert torch.equal(load(path)["x"], torch.zeros(5))


# What is refused at save ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "message"),
    numbered([
        (td(params=td(w=torch.tensor([1.0, float("nan"), float("inf")]))),
         ("state.params.w: 2 of 3 values are not finite, parameters must be; "
          "go on from the last checkpoint with a lower optim.lr")),
        (td(a=td(z=torch.zeros(2, dtype=torch.complex64))),
         f"state.a.z: dtype=complex64 must be one of {', '.join(STORED)}; convert it or drop it"),
        (td(name="text"), "state.name: a str must be a tensor (only the recipe is none); make it one or drop it"),
        (td(a=td(recipe=NonTensorData(Recipe()))),
         "state.a.recipe: a Recipe must be a tensor (only the recipe is none); make it one or drop it"),
        (td(recipe=NonTensorData({"a": 1})),
         "state.recipe: a dict must be a tensor (only the recipe is none); make it one or drop it"),
        (td(x=torch.empty(3, device="meta")),
         "state.x: must be a plain dense tensor with data; make it one or drop it"),
        (td(x=torch.eye(3).to_sparse()), "state.x: must be a plain dense tensor with data; make it one or drop it"),
        (td(x=torch.empty((0, 2**62))), "state.x: must be a plain dense tensor with data; make it one or drop it"),
        (td(a=TensorDict({"x": torch.zeros(3)}, batch_size=[3])),
         "state.a: batch_size=[3] must be []; set it before saving"),
        (TensorDict({"x": torch.zeros(3)}, batch_size=[3]), "state: batch_size=[3] must be []; set it before saving"),
    ]),
)  # fmt: skip
def test_what_could_not_come_back_is_refused_by_name(tmp_path: Path, state: TensorDict, message: str) -> None:
    assert refused(lambda: save(tmp_path / "a" / "b", state)) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
)
def test_parameters_must_be_finite_in_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    # Two of the greatest fp16 values: their sum overflows, neither of them does.
    good = torch.tensor([60000.0, 60000.0]) if dtype is torch.float16 else torch.ones(2)
    save(tmp_path / "a", td(params=td(w=good.to(dtype))))
    bad = torch.tensor([1.0, float("nan")]).to(dtype)
    assert refused(lambda: save(tmp_path / "b", td(params=td(w=bad)))).startswith("state.params.w: 1 of 2 values")
    save(tmp_path / "c", td(optimizer=td(w=bad)))


@pytest.mark.parametrize(
    ("names", "reason"),
    numbered(
        [
            (["a/b"], "the name 'a/b' has a slash, a control character or half a surrogate pair; rename it"),
            (["a\\b"], "the name 'a\\\\b' has a slash, a control character or half a surrogate pair; rename it"),
            (["a\nb"], "the name 'a\\nb' has a slash, a control character or half a surrogate pair; rename it"),
            (["\0"], "the name '\\x00' has a slash, a control character or half a surrogate pair; rename it"),
            (["\ud800"], "the name '\\ud800' has a slash, a control character or half a surrogate pair; rename it"),
            ([""], "the name '' is empty or only dots; rename it"),
            (["."], "the name '.' is empty or only dots; rename it"),
            ([".."], "the name '..' is empty or only dots; rename it"),
            (["zarr.json"], "the name 'zarr.json' is the name of a file of the checkpoint; rename it"),
            (["Zarr.JSON"], "the name 'Zarr.JSON' is the name of a file of the checkpoint; rename it"),
            (["__w"], "the name '__w' starts with '__', which Zarr keeps for itself; rename it"),
            (["x" * 256], f"the name '{'x' * 256}' is longer than 255 bytes; rename it"),
            (["W", "w"], "the names 'W' and 'w' are one on some disks; rename one"),
            (["\u00e9", "e\u0301"], "the names '\u00e9' and 'e\u0301' are one on some disks; rename one"),
            (["\u00df", "ss"], "the names '\u00df' and 'ss' are one on some disks; rename one"),
        ]
    ),
)
def test_names_that_could_collide_on_a_disk_are_refused(tmp_path: Path, names: list[str], reason: str) -> None:
    for at, leaf in (("state.a", torch.zeros(1)), ("state.a", td())):
        inner = TensorDict(dict.fromkeys(names, leaf), batch_size=[])
        assert refused(lambda inner=inner: save(tmp_path / "c", td(a=inner))) == f"{at}: {reason}"
    assert refused(lambda: save(tmp_path / "c", inner)) == f"state: {reason}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["manifest.json", "COMMIT", "commit"])
def test_names_of_the_checkpoints_own_files_are_refused_only_where_they_stand(tmp_path: Path, name: str) -> None:
    inner = TensorDict({name: torch.zeros(1)}, batch_size=[])
    assert refused(lambda: save(tmp_path / "a", inner)) == (
        f"state: the name {name!r} is the name of a file of the checkpoint; rename it"
    )
    assert_same(td(a=inner), load(save(tmp_path / "a", td(a=inner))))


def test_odd_names_that_cannot_collide_are_kept(tmp_path: Path) -> None:
    names = ["c", "0", "a.b", "...a", "-", " ", "e\u0301", "\u6d4b", "x" * 255, "checkpoints", "step_0000000001"]
    inner = TensorDict({name: torch.tensor(i) for i, name in enumerate(names)}, batch_size=[])
    state = td(c=td(c=td(c=torch.ones(2))), inner=inner, a=td(b=torch.zeros(1)))
    assert_same(state, load(save(tmp_path / "a", state)))
    assert_same(td(inner=td(**{"a.b": inner["a.b"]})), load(tmp_path / "a", keys=["inner/a.b"]))


@pytest.mark.parametrize(
    ("info", "message"),
    numbered(
        [
            ({"a": float("nan")}, "info.a=nan must be"),
            ({"a": {"b": [1, (2,)]}}, "info.a.b[1]=(2,) must be"),
            ({"a": {1: 2}}, "info.a={1: 2} must be"),
            ({"a": 2**63}, "info.a=9223372036854775808 must be"),
            ({"a": "\ud800"}, "info.a='\\ud800' must be"),
            ({"a": Path("x")}, "info.a=PosixPath('x') must be"),
        ]
    ),
)
def test_info_must_be_json(tmp_path: Path, info: dict[str, Any], message: str) -> None:
    full = f"{message} a JSON value (finite numbers, lists, text keys); convert it first"
    with pytest.raises(ValueError, match=f"^{re.escape(full)}$"):
        save(tmp_path / "a", td(x=torch.zeros(1)), info=info)
    assert list(tmp_path.iterdir()) == []


def test_a_dict_is_no_state(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^state: a dict must be a TensorDict; make it one with lib.tree.tensordict$"):
        save(tmp_path / "a", {"x": torch.zeros(1)})  # type: ignore[arg-type]


# What is there already ------------------------------------------------------------------------------------------------


def test_the_same_state_again_changes_nothing_and_another_is_refused(tmp_path: Path) -> None:
    state = example()
    path = save(tmp_path / "a", state, info={"threads": 1})
    before = tree(tmp_path)
    assert save(path, state, info={"threads": 2}) == path
    others = [state.clone(), state.clone(), state.clone()]
    others[0]["params", "embed"][0, 0] += 1
    others[1]["extra"] = torch.zeros(1)
    others[2].set("recipe", NonTensorData(Recipe()))
    for other in others:
        assert refused(lambda other=other: save(path, other)) == (
            f"{path}: another state is stored there already; choose another path or remove it"
        )
    assert tree(tmp_path) == before


def test_a_damaged_checkpoint_is_not_taken_for_the_same_state(tmp_path: Path) -> None:
    path = save(tmp_path / "a", example())
    flip(path / "step/c")
    assert "state.step" in refused(lambda: save(path, example()))


def test_the_rest_of_an_unfinished_save_is_replaced(tmp_path: Path) -> None:
    state = example()
    for name, spoil in (("step_0000000007", lambda p: (p / "zarr.json").unlink()), ("a", lambda p: None)):
        path = save(tmp_path / name, state)
        (path / "COMMIT").unlink()
        spoil(path)
        assert_same(state, load(save(path, state)))
    (tmp_path / "b").mkdir()
    assert_same(state, load(save(tmp_path / "b", state)))


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    before = tree(tmp_path)
    assert refused(lambda: save(tmp_path / "home", example())) == (
        f"{tmp_path}/home: must be a new folder, this one holds other files; choose another path"
    )
    for name in ("file", "link"):
        assert refused(lambda name=name: save(tmp_path / name, example())) == (
            f"{tmp_path}/{name}: must be a new folder, something else is there; choose another path"
        )
    assert refused(lambda: save(tmp_path / "file" / "a" / "b", example())) == (
        f"{tmp_path}/file/a/b: not saved (Not a directory), older checkpoints are untouched; "
        f"move {tmp_path}/file out of the way or set another run.dir"
    )
    assert tree(tmp_path) == before


# What the disk refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "why", "fix"),
    [
        (errno.ENOSPC, "No space left on device", "free 4 MB or set another run.dir"),
        (errno.EACCES, "Permission denied", "make {parent} writable or set another run.dir"),
        (errno.EROFS, "Read-only file system", "make {parent} writable or set another run.dir"),
        (errno.EIO, "Input/output error", "check the disk"),
    ],
)
def test_what_the_disk_refuses_is_said_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str, fix: str
) -> None:
    def fail(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    target = tmp_path / "run" / "checkpoints" / "step_0000000001"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        message = refused(lambda: save(target, td(x=torch.zeros(1_000_000))))
    assert message == (
        f"{target}: not saved ({why}), older checkpoints are untouched; {fix.format(parent=target.parent)}"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(lambda: save(tmp_path / "a", example()))
    tmp_path.chmod(0o000)
    assert refused(lambda: load(tmp_path)) == f"{tmp_path}: cannot be read (Permission denied); make it readable"
    tmp_path.chmod(0o700)


def test_a_real_full_disk_leaves_no_trace(tmp_path: Path) -> None:
    program = (
        "import resource, sys, torch; from tensordict import TensorDict; from lib.store import save\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: save(sys.argv[1], TensorDict({'x': torch.zeros(50_000)}, batch_size=[]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    target = tmp_path / "run" / "a"
    done = subprocess.run([sys.executable, "-c", program, target], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"CheckpointError {target}: not saved (File too large), older checkpoints are untouched; check the disk\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "run" / "a", example())
    assert list(tmp_path.iterdir()) == []
