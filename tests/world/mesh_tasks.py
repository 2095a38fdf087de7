"""What ranks do in tests/world/test_meshes.py: one function a task, run in a process for each rank.

python -m tests.world.mesh_tasks TASK FOLDER     with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.debug import CommDebugMode

from lib.config import Batch, Model, Optim, Recipe, Schedule
from lib.errors import CheckpointError
from lib.run.saver import Saver
from lib.shard.layout import lay, placements
from lib.shard.words import mine, spread
from lib.state import init_state
from lib.step import eval_step, make_train_step, train_step
from lib.store import disk, load, save
from lib.store.checkpoint import describe
from lib.store.folder import committed, latest, step_name, sweep
from lib.store.local import Folder
from lib.store.ranks import ALONE, over
from lib.testing.strategies import lm_batch
from lib.tree import leaves, tree_map_named
from tests.checkpoints import bits, td

SHAPES: dict[str, tuple[int, ...]] = {"1": (1,), "2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2)}


def meshes() -> dict[str, DeviceMesh]:
    """A mesh of each form that fits, over the first ranks of the world; all ranks make all, since that takes all of them."""
    made = {}
    for name, shape in SHAPES.items():
        if np.prod(shape) > dist.get_world_size():
            continue
        ranks = torch.arange(int(np.prod(shape))).reshape(shape)
        made[name] = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return made


def distribute_tensor(leaf: Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """Cut what every rank has, without sending it: gloo knows neither fp8 nor bool."""
    return torch_distribute(leaf, mesh, placements, src_data_rank=None)


def inside(mesh: DeviceMesh) -> bool:
    return mesh.get_coordinate() is not None


def values() -> dict[str, Tensor]:
    """Leaves of all kinds, the same on each rank: uneven, shorter than the mesh, empty, 0-d, of any bits."""
    draw = torch.Generator().manual_seed(0)

    def bytes_(count: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, 256, (count,), generator=draw, dtype=torch.uint8).view(dtype)

    return {
        "uneven": torch.randn(7, 5, generator=draw),
        "short": torch.randn(2, generator=draw),
        "one": torch.randn(1, 3, generator=draw),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(2**40 + 1),
        "columns": bytes_(6 * 10 * 2, torch.bfloat16).reshape(6, 10),
        "fp8": bytes_(35, torch.float8_e4m3fn).reshape(5, 7),
        "flags": bytes_(9, torch.uint8) % 2 == 1,
        "copies": torch.randn(3, generator=draw),
        "large": torch.randn(1003, 2049, generator=draw),  # 8 MB: shards of several chunks, uneven on any mesh
        "wide": torch.randn(9, 200_000, generator=draw),
    }


def placed(name: str, mesh: DeviceMesh) -> list[Any]:
    """Placements of a leaf, of each kind there is."""
    dim = {"scalar": None, "copies": None, "columns": 1, "fp8": 1, "wide": 1}.get(name, 0)
    if dim is None:
        return [Replicate()] * mesh.ndim
    if mesh.ndim == 1:
        return [Shard(dim)]
    # Cut twice along one dim, copied along one axis, or cut along two dims.
    kinds = {"uneven": [Shard(0), Shard(0)], "large": [Shard(0), Shard(0)], "wide": [Shard(0), Shard(1)]}
    return kinds.get(name, [Replicate(), Shard(dim)])


def state_on(mesh: DeviceMesh) -> TensorDict:
    tree = {name: distribute_tensor(leaf, mesh, placed(name, mesh)) for name, leaf in values().items()}
    return td(step=torch.tensor(3), params=td(**tree))


def equal(name: str, one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other)), name


def check_local(name: str, leaf: Tensor, mesh: DeviceMesh) -> None:
    """What a rank got is its own part of the right bits."""
    assert isinstance(leaf, DTensor), name
    want = distribute_tensor(values()[name], mesh, placed(name, mesh))
    assert leaf.placements == want.placements
    assert leaf.shape == want.shape
    assert leaf.stride() == want.stride(), name
    equal(name, leaf.to_local(), want.to_local())


def every_pair(root: Path) -> None:
    made = meshes()
    for name, mesh in made.items():
        if inside(mesh):
            assert save(root / name, state_on(mesh)) == root / name
        else:
            save(root / name, state_on(mesh))  # it takes no part, and does not wait for those who do
        dist.barrier()
    for stored in made:
        plain = load(root / stored)
        for name, leaf in values().items():
            equal(name, plain["params", name], leaf)
        assert plain["step"] == 3
        for mesh in made.values():
            layout = {f"params.{name}": placed(name, mesh) for name in values()}
            if inside(mesh):
                back = load(root / stored, mesh=mesh, layout=layout)
                assert list(back["step"].placements) == [Replicate()] * mesh.ndim
                like = load(root / stored, like=state_on(mesh))
                assert not isinstance(like["step"], DTensor)
                for name in values():
                    check_local(name, back["params", name], mesh)
                    check_local(name, like["params", name], mesh)
                part = load(root / stored, mesh=mesh, keys=["params.large"], layout={"*.large": placed("large", mesh)})
                assert list(leaves(part)) == ["params.large"]
                check_local("large", part["params", "large"], mesh)
    if dist.get_rank() == 0:
        for stored in made:
            group = zarr.open_group(root / stored, mode="r")
            for name, leaf in values().items():
                assert np.asarray(group[f"params/{name}"][...]).tobytes() == bits(leaf), name  # type: ignore[index]
            large = next(row for row in describe(root / stored) if row.path == "params.large")
            assert large.shape == (1003, 2049)
        # Each rank of the mesh of four has written a part of the large leaf.
        assert len(list((root / "4" / "params" / "large").glob("c.*"))) == 4


def work_is_shared(root: Path) -> None:
    """Replicas share what both hold, and each rank writes its own part."""
    mesh, written = meshes()["2x2"], 0
    names = [f"w{number}" for number in range(8)]
    draw = torch.Generator().manual_seed(1)  # copies are the same on all ranks that have them
    tree = {
        name: distribute_tensor(torch.randn(512, 2048, generator=draw), mesh, [Replicate(), Shard(0)]) for name in names
    }
    real = disk.write_file

    def counted(path: str, pieces: Any) -> None:
        nonlocal written
        real(path, pieces)
        written += Path(path).stat().st_size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "write_file", counted)
        save(root / "a", td(**tree))
    shares: list[Any] = [None] * 4
    dist.all_gather_object(shares, written)
    assert min(shares) > 0.2 * sum(shares), shares


def training_goes_on(root: Path) -> None:
    """Two updates, saved on one mesh, loaded on another, two more: the bits of four updates that were not cut."""
    recipe = Recipe(model=Model(width=16, depth=2, heads=2))
    batches = [lm_batch(recipe, number=number) for number in range(4)]
    whole, losses = init_state(recipe, seed=1), []
    for number, batch in enumerate(batches):
        if number == 2:
            half = whole
        whole, metrics = train_step(whole, batch)
        losses.append(bits(metrics["loss_nats"]))
    made = meshes()

    def spread(mesh: DeviceMesh) -> TensorDict:
        def one(path: str, leaf: Tensor) -> Tensor:
            cut = path.startswith(("params.", "optimizer.")) and leaf.ndim > 0
            kind = [Shard(leaf.ndim - 1) if cut else Replicate()]
            return distribute_tensor(leaf, mesh, [Replicate()] * (mesh.ndim - 1) + kind)

        return td(**tree_map_named(one, {k: v for k, v in half.to_dict().items() if k != "recipe"}))

    for stored, mesh in made.items():
        state = spread(mesh)
        state.set_non_tensor("recipe", recipe)
        save(root / stored, state)
        dist.barrier()
    for stored in made:
        for mesh in made.values():
            if not inside(mesh):
                continue
            state = load(root / stored, like=spread(mesh).set_non_tensor("recipe", recipe))
            full = td(**tree_map_named(lambda _, leaf: leaf.full_tensor(), _plain(state)))
            full.set_non_tensor("recipe", state["recipe"])
            for number in (2, 3):
                assert bits(full["cursor", "text", "row"]) == bits(batches[number - 1]["cursor", "text", "row"])
                full, metrics = train_step(full, batches[number])
                assert bits(metrics["loss_nats"]) == losses[number]
            for path, leaf in leaves(whole).items():
                equal(path, leaves(full)[path], leaf)
            check_cut_update(state, mesh, half, batches[2])


def check_cut_update(state: TensorDict, mesh: DeviceMesh, half: TensorDict, batch: TensorDict) -> None:
    """A step takes the state as it was loaded, cut over real ranks, and gives it back cut in the same way."""
    new, metrics = train_step(state, batch)
    want, told = train_step(half, batch)
    assert bits(metrics["loss_nats"]) == bits(told["loss_nats"])
    for path, leaf in leaves(new).items():
        before = leaves(state)[path]
        assert isinstance(leaf, DTensor), path
        assert isinstance(before, DTensor), path
        assert (leaf.placements, leaf.device_mesh) == (before.placements, mesh), path
        # The norm is a sum of sums of ranks, in another order, and all gradients are scaled by it.
        torch.testing.assert_close(leaf.full_tensor(), leaves(want)[path], rtol=1e-5, atol=1e-7)


def rows_are_shared(root: Path) -> None:
    """Rows cut over ranks, unevenly, with ranks that have no targets or no rows at all: the updates of one process."""
    recipe = Recipe(
        model=Model(width=16, depth=2, heads=2, vocab=20, dropout=0.3), batch=Batch(rows=6, length=8, micro=2)
    )
    begun, batches = init_state(recipe, seed=1), [lm_batch(recipe, number=number) for number in (1, 2)]
    for batch in batches:
        batch["mask"][:, 0] = False  # what the first rank has of small batches
    whole, told = begun, []
    for batch in batches:
        whole, metrics = train_step(whole, batch)
        told.append(metrics)
    for mesh in meshes().values():
        if not inside(mesh):
            continue
        for kinds in layouts(mesh):
            state = placed_state(begun, mesh, kinds)
            for batch, want in zip(batches, told, strict=True):
                state, metrics = train_step(state, spread(batch, mesh))
                assert metrics["tokens"].item() == want["tokens"].item()
                assert metrics["bpb"].item() == pytest.approx(want["bpb"].item(), rel=1e-6)
                assert metrics["grad_norm"].item() == pytest.approx(want["grad_norm"].item(), rel=1e-5)
            assert bits(state["cursor", "text", "row"]) == bits(batches[1]["cursor", "text", "row"])
            for path, leaf in leaves(state).items():
                found = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
                # A gradient is a sum of 6 rows of 8 targets in another order, which Adam divides by its own size.
                torch.testing.assert_close(found, leaves(whole)[path], rtol=1e-4, atol=2e-6)
            one, other = eval_step(state, spread(batches[0], mesh)), eval_step(state, batches[0])
            assert one["tokens"].item() == other["tokens"].item()
            assert one["bytes"].item() == other["bytes"].item()
            assert one["nats"].item() == pytest.approx(other["nats"].item(), rel=1e-6)


def layouts(mesh: DeviceMesh) -> list[list[Any] | None]:
    """None = plain tensors on each rank; else placements by axis, -1 the last dim of a leaf."""
    if mesh.ndim == 1:
        return [None, [Replicate()], [Shard(0)], [Shard(-1)]]
    return [None, [Replicate(), Shard(-1)], [Shard(-1), Replicate()], [Shard(0), Shard(-1)]]


def placed_state(state: TensorDict, mesh: DeviceMesh, kinds: list[Any] | None) -> TensorDict:
    """What is learnt lies as told; all else is plain."""

    def one(path: str, leaf: Tensor) -> Tensor:
        if kinds is None or not path.startswith(("params.", "optimizer.")) or not leaf.ndim:
            return leaf
        at = [Shard(kind.dim % leaf.ndim) if isinstance(kind, Shard) else kind for kind in kinds]
        return distribute_tensor(leaf, mesh, at)

    laid = td(**tree_map_named(one, _plain(state)))
    laid.set_non_tensor("recipe", state["recipe"])
    return laid


def states_are_laid(root: Path) -> None:
    """By a layout, each rank keeps its own part alone; updates go on from it, and a checkpoint is loaded by the same layout."""
    recipe = Recipe(model=Model(width=16, depth=2, heads=2, vocab=20), batch=Batch(rows=4, length=8))
    begun, batch = init_state(recipe, seed=1), lm_batch(recipe)
    want, told = train_step(begun, batch)
    for name, mesh in meshes().items():
        if not inside(mesh):
            continue
        for layout in ("ddp", "fsdp"):
            state = lay(begun, mesh, layout)
            at = placements(begun, mesh, layout)
            assert bool(at) is (layout == "fsdp" and mesh.size(mesh.ndim - 1) >= 1)
            for path, leaf in leaves(state).items():
                assert isinstance(leaf, DTensor) is (path in at)
                if isinstance(leaf, DTensor):
                    own = leaf.to_local()
                    assert leaf.placements == tuple(at[path])
                    assert own.untyped_storage().nbytes() == own.numel() * own.element_size()
                    equal(path, leaf.full_tensor(), leaves(begun)[path])
            state, metrics = train_step(state, spread(batch, mesh))
            assert metrics["loss_nats"].item() == pytest.approx(told["loss_nats"].item(), rel=1e-6)
            for path, leaf in leaves(state).items():
                found = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
                torch.testing.assert_close(found, leaves(want)[path], rtol=1e-4, atol=2e-6)
            if layout == "fsdp":
                save(root / name, state)
                dist.barrier(mesh.get_group(0)) if mesh.ndim == 1 else None
                back = load(root / name, mesh=mesh, layout=at)
                for path, leaf in leaves(state).items():
                    equal(path, mine(leaves(back)[path]), mine(leaf))


def sums_are_exact(root: Path) -> None:
    """Of whole numbers every sum is exact in any order, so each mesh gives the same bits."""
    draw = torch.Generator().manual_seed(0)
    params = {"w": torch.randint(-8, 9, (5, 3), generator=draw).float(), "b": torch.zeros(3)}
    x = torch.randint(-8, 9, (2, 3, 5), generator=draw).float()
    counts = torch.tensor([[0, 5, 1], [2, 0, 8]])  # 16 targets, divided by without rounding
    batch = td(x=x, n=counts)
    recipe = Recipe(optim=Optim(rule="sgd", lr=0.25, decay=0.0, clip=None), schedule=Schedule(shape="constant"))

    def loss(p: Any, part: Any, key: Any) -> tuple[Tensor, Tensor]:
        return (part["x"] @ p["w"] + p["b"]).sum(), part["n"].sum()

    step, begun = make_train_step(loss), init_state(recipe, params=params)
    whole, told = step(begun, batch)
    for mesh in meshes().values():
        if not inside(mesh):
            continue
        for kinds in layouts(mesh):
            state, metrics = step(placed_state(begun, mesh, kinds), spread(batch, mesh))
            assert bits(metrics["loss_nats"]) == bits(told["loss_nats"])
            for path, leaf in leaves(state).items():
                equal(path, leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, leaves(whole)[path])


def messages_are_counted(root: Path) -> None:
    """One gather and one sum of gradients a parameter and micro-batch, two sums of a few numbers; none where nothing is cut."""
    mesh = meshes()["2"]
    if not inside(mesh):
        return
    recipe = Recipe(model=Model(width=16, depth=1, heads=2, vocab=20), batch=Batch(rows=4, length=8, micro=2))
    begun, batch = init_state(recipe), lm_batch(recipe)
    count, ops = len(leaves(begun["params"])), torch.ops.c10d_functional
    for kinds, gathers, scatters, sums in (
        ([Shard(-1)], 2 * count, 2 * count, 3),  # loss and targets, bytes, norm
        ([Replicate()], 0, 0, count + 2),
        (None, 0, 0, count + 2),
    ):
        with CommDebugMode() as seen:
            train_step(placed_state(begun, mesh, kinds), spread(batch, mesh))
        found = {str(op): n for op, n in seen.get_comm_counts().items()}
        assert found.get(str(ops.all_gather_into_tensor), 0) == gathers, (kinds, found)
        assert found.get(str(ops.reduce_scatter_tensor), 0) == scatters, (kinds, found)
        assert found.get(str(ops.all_reduce), 0) == sums, (kinds, found)
    with CommDebugMode() as seen:
        train_step(begun, batch)
    assert seen.get_total_counts() == 0


def batches_that_do_not_fit(root: Path) -> None:
    made = meshes()
    mesh, other = made["2"], made["1"]
    if not inside(mesh):
        return
    recipe = Recipe(model=Model(width=16, depth=1, heads=2, vocab=20), batch=Batch(rows=4, length=8))
    state, batch = placed_state(init_state(recipe), mesh, [Shard(0)]), lm_batch(recipe)
    half = spread(batch, mesh)
    half["mask"] = batch["mask"]
    wrong = spread(batch, mesh)
    wrong["targets"] = distribute_tensor(batch["targets"], mesh, [Shard(2)])
    cases = [
        (half, "batch.mask: its rows lie otherwise than those of batch.bytes, must all lie alike"),
        (wrong, "batch.targets: is placed [Shard(dim=2)], must be cut along its rows, axis 1, or not at all"),
    ]
    if inside(other):
        cases.append((spread(batch, other), "batch: its rows are cut over"))
    for bad, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            train_step(state, bad)
    with pytest.raises(ValueError, match=re.escape("axes=['tensor'] must be axes of the mesh, ['shard']")):
        spread(batch, mesh, ["tensor"])


def compiled_on_ranks(root: Path) -> None:
    """Traced as one graph, an update on several ranks has the eager one's bits."""
    mesh = meshes()["2"]
    if not inside(mesh):
        return
    recipe = Recipe(
        model=Model(width=16, depth=1, heads=2, vocab=20, dropout=0.3), batch=Batch(rows=6, length=8, micro=2)
    )
    begun, batch = init_state(recipe), spread(lm_batch(recipe), mesh)
    step = torch.compile(train_step, fullgraph=True, backend="aot_eager")
    for kinds in ([Shard(-1)], None):
        state = placed_state(begun, mesh, kinds)
        (one, told), (other, want) = step(state, batch), train_step(state, batch)
        assert bits(told["loss_nats"]) == bits(want["loss_nats"])
        for path, leaf in leaves(one).items():
            equal(path, mine(leaf), mine(leaves(other)[path]))


def _plain(state: TensorDict) -> dict[str, Any]:
    return {
        name: _plain(value) if isinstance(value, TensorDict) else value
        for name, value in state.items()
        if name != "recipe"
    }


def one_fails(root: Path) -> None:
    """A disk that refuses on one rank: all raise, all name it, nothing is there; the next save works."""
    mesh = meshes()["2"]
    if not inside(mesh):
        return
    save(root / step_name(1), state_on(mesh))
    for failing in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == failing:
                patch.setattr(disk, "write_file", _full)
            with pytest.raises(CheckpointError) as caught:
                save(root / step_name(2), state_on(mesh))
        want = f"{root / step_name(2)}: not saved (No space left on device), older checkpoints are untouched; free "
        start = want if dist.get_rank() == failing else f"rank {failing}: {want}"
        assert str(caught.value).startswith(start), caught.value
        dist.barrier(group_of(mesh))
        assert os.listdir(root) == [step_name(1)]
        dist.barrier(group_of(mesh))
    save(root / step_name(2), state_on(mesh))
    assert committed(root) == [1, 2]


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group()


def _full(_path: str, _pieces: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ranks_disagree(root: Path) -> None:
    mesh, rank = meshes()["2"], dist.get_rank()
    if not inside(mesh):
        return
    base = state_on(mesh)
    other = 1 - rank
    for change, message in (
        (td(extra=torch.tensor(rank)), f"state.extra: rank {other} has another value than rank {rank}, what several "
         "ranks have must be the same on all; sum or broadcast it before saving"),
        (td(**({"x": torch.ones(1)} if rank else {"y": torch.ones(1)})), f"state: rank {other} saves another tree, recipe or "
         f"info, or to another path, than rank {rank}, all must save one state; make the ranks agree before saving"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            save(root / "a", td(**dict(base.items()), **dict(change.items())))
        assert str(caught.value) == message
    with pytest.raises(CheckpointError, match="or to another path, than rank"):
        save(root / f"a{rank}", base)
    # Copies of a DTensor that are none.
    copies = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()], run_check=False)
    with pytest.raises(
        CheckpointError, match=f"state.w: rank {other} has another value than rank {rank}, what several"
    ):
        save(root / "a", td(w=copies))
    # Half of those who hold a state.
    with pytest.raises(CheckpointError) as caught:
        save(root / "a", base, ranks=ALONE)
    assert str(caught.value) == (
        "state.params.uneven: lies on 2 ranks, 1 save it, must all take part; pass ranks=lib.store.ranks.over(members)"
    )
    with pytest.raises(CheckpointError, match="lies on 2 ranks, 1 save it"), Saver(root / "b") as saver:
        saver.save(base, {})
    # A parameter that is no number on one rank alone.
    bad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    if rank == 1:
        bad.to_local()[0] = float("nan")
    with pytest.raises(CheckpointError, match="state.params.w: 1 of 2 values are not finite"):
        save(root / "a", td(params=td(w=bad)))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError, match=r"state.w: placement P\(sum\) must be Shard or Replicate"):
        save(root / "a", td(w=partial))
    assert not root.exists() or not os.listdir(root)


def first_rank_decides(root: Path) -> None:
    """A listing that lags behind on one rank: all load what the first one sees."""
    mesh, rank = meshes()["2"], dist.get_rank()
    if not inside(mesh):
        return
    for step in (5, 10):
        save(root / "checkpoints" / step_name(step), td(step=torch.tensor(step), w=state_on(mesh)["params", "large"]))
    real = Folder.names

    def lagging(place: Folder) -> list[str]:
        return [name for name in real(place) if name != step_name(10)]

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Folder, "names", lagging)
        assert load(root, mesh=mesh)["step"].to_local() == 10
    with pytest.raises(CheckpointError, match="the ranks ask for different leaves or layouts, must ask for the same"):
        load(root, mesh=mesh, layout={"w": [Shard(rank)]})


def one_reads_damage(root: Path) -> None:
    """A chunk that is damaged where only one rank reads it: all raise, all name it."""
    mesh, rank = meshes()["2"], dist.get_rank()
    if not inside(mesh):
        return
    save(root / "a", state_on(mesh))
    dist.barrier(group_of(mesh))
    file = root / "a" / "params" / "large" / "c.1.0"
    if rank == 0:
        data = bytearray(file.read_bytes())
        data[100] ^= 1
        file.write_bytes(data)
    dist.barrier(group_of(mesh))
    with pytest.raises(CheckpointError) as caught:
        load(root / "a", like=state_on(mesh))
    assert f"state.params.large: {file} must have the crc32c that manifest.json gives it" in str(caught.value)
    assert str(caught.value).startswith("rank 1: " if rank == 0 else "state.")


def in_the_background(root: Path) -> None:
    """Saves of two ranks in the background, one of which fails on one rank: both hear of it at the same step."""
    mesh = meshes()["2"]
    background = dist.new_group([0, 1], backend="gloo")
    if not inside(mesh):
        return
    writers, watchers = over([0, 1], background), over([0, 1])
    assert writers is not None
    assert watchers is not None
    heard: list[tuple[int, bool]] = []
    with Saver(root, ranks=(writers, watchers)) as saver:
        for step in range(1, 7):
            state = state_on(mesh)
            state["step"].fill_(step)
            with pytest.MonkeyPatch.context() as patch:
                if step == 3 and dist.get_rank() == 1:
                    patch.setattr(disk, "write_file", _full)
                saver.save(state, {})
                state["params", "large"].to_local().zero_()
                while saver.busy:
                    try:
                        saver.check()
                    except CheckpointError as error:
                        heard.append((step, "No space left on device" in str(error)))
    assert heard == [(3, True)]
    assert committed(root) == [1, 2, 4, 5, 6]
    check_local("large", load(root / step_name(5), like=state_on(mesh))["params", "large"], mesh)


def one_is_killed(root: Path) -> None:
    """A rank that dies in the middle of a save: the other is told within seconds, and there is no checkpoint."""
    mesh, rank = meshes()["2"], dist.get_rank()
    if not inside(mesh):
        return
    save(root / step_name(1), state_on(mesh))
    real = disk.write_file

    def dies(path: str, pieces: Any) -> None:
        if "large" in path:
            os._exit(0)
        real(path, pieces)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(disk, "write_file", dies)
        begun = time.monotonic()
        with pytest.raises(CheckpointError, match="rank 0 .* lost the others, who must all take part"):
            save(root / step_name(2), state_on(mesh))
        assert time.monotonic() - begun < 30
    sweep(root)
    assert os.listdir(root) == [step_name(1)]
    assert latest(root) == root / step_name(1)
    os._exit(0)  # there is nobody left to say goodbye to


TASKS: dict[str, Callable[[Path], None]] = {
    task.__name__: task
    for task in (
        every_pair,
        work_is_shared,
        training_goes_on,
        rows_are_shared,
        states_are_laid,
        sums_are_exact,
        messages_are_counted,
        batches_that_do_not_fit,
        compiled_on_ranks,
        one_fails,
        ranks_disagree,
        first_rank_decides,
        one_reads_damage,
        in_the_background,
        one_is_killed,
    )
}


def main(words: Sequence[str]) -> None:
    """Run tasks one after the other, each in a folder of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in words[1:]:
        TASKS[name](Path(words[0]) / name)
        if dist.get_world_size() > 1:
            dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name}: held", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
