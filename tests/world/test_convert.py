"""Checkpoints and .safetensors into each other by the driver, weights into a new run, and a run that branches off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.state.average import mean_of
from lib.store import load, save
from lib.store.checkpoint import describe
from lib.store.folder import committed, step_name
from lib.tree import leaves, plain
from tests.checkpoints import assert_same, bits, td, tree
from tests.world.running import TINY, Ended, hasten, rows, run_here, text_folder
from tests.world.running import bits as bits_of


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight updates with checkpoints of 0, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("convert")
    text = text_folder(folder / "text")
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        ended = run_here(
            *TINY,
            f"data.path={text}",
            f"run.dir={folder / 'run'}",
            "steps=8",
            "checkpoint.at=[4,6]",
            "checkpoint.every=100",
            "checkpoint.keep=none",
        )
    assert ended.code == 0, ended.err
    return folder / "run"


def convert(*words: str) -> Ended:
    return run_here("convert", *words)


def told(ended: Ended, code: int) -> str:
    assert ended.code == code, ended
    lines = ended.err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


def words_of(run: Path) -> tuple[str, ...]:
    return (
        *TINY,
        f"data.path={run.parent / 'text'}",
        f"data.cache={run.parent / 'cache'}",
        "steps=8",
        "checkpoint.every=100",
    )


def test_parameters_become_a_file_that_others_read_with_other_names(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    names = "convert.names=[blocks.**=model.layers.**,embed.weight=model.embed_tokens.weight]"
    ended = convert(f"run.dir={run}", f"convert.target={out}", names)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"{out}: 11 leaves, 33.2 kB in 1 file\n"
    params = leaves(load(run)["params"])
    found = load_file(out)
    assert len(found) == len(params)
    assert bits(found["model.embed_tokens.weight"]) == bits(params["embed.weight"])
    assert bits(found["model.layers.attention.wq"]) == bits(params["blocks.attention.wq"])


def test_a_whole_state_goes_into_one_file_and_back(run: Path, tmp_path: Path) -> None:
    assert (
        convert(f"convert.source={run}", f"convert.target={tmp_path / 'all.safetensors'}", "convert.what=all").code == 0
    )
    words = (f"convert.source={tmp_path / 'all.safetensors'}", f"convert.target={tmp_path / 'back'}")
    assert convert(*words, "convert.what=all").code == 0
    assert_same(load(tmp_path / "back"), load(run))
    # Parameters alone, of the same file.
    assert convert(*words[:1], f"convert.target={tmp_path / 'params'}").code == 0
    assert_same(load(tmp_path / "params", keys=["params"]), load(run, keys=["params"]))
    assert load(tmp_path / "params")["recipe"] == load(run)["recipe"]


def test_the_average_of_the_parameters_is_taken_by_name(run: Path, tmp_path: Path) -> None:
    assert convert(f"run.dir={run}", f"convert.target={tmp_path / 'a.safetensors'}", "convert.what=average").code == 0
    average = leaves(load(run)["average", "params"])
    assert {name: bits(leaf) for name, leaf in load_file(tmp_path / "a.safetensors").items()} == {
        name: bits(leaf) for name, leaf in average.items()
    }


def test_of_a_schedule_free_run_its_mean_is_evaluated_and_taken(run: Path, tmp_path: Path) -> None:
    words = (*words_of(run), f"run.dir={tmp_path / 'free'}")
    settings = ("optim.rule=schedule_free", "optim.average=none", "schedule.shape=constant", "eval.every=4")
    assert run_here(*words, *settings).code == 0
    told_by = {which: run_here("eval", *words[-1:], *which) for which in ((), ("eval.weights=average",))}
    assert told_by[()].code == 0
    assert len({ended.out for ended in told_by.values()}) == 1
    assert run_here("eval", *words[-1:], "eval.weights=params").out != told_by[()].out
    assert f"{rows(tmp_path / 'free')[-1]['eval/bpb']:.4f}" in told_by[()].out
    assert convert(*words[-1:], f"convert.target={tmp_path / 'a.safetensors'}", "convert.what=average").code == 0
    state = load(tmp_path / "free")
    mean = mean_of(plain(state), state["recipe"])
    assert mean is not None
    assert {name: bits(leaf) for name, leaf in load_file(tmp_path / "a.safetensors").items()} == {
        name: bits(leaf) for name, leaf in leaves(mean).items()
    }


def test_several_checkpoints_are_averaged(run: Path, tmp_path: Path) -> None:
    places = [run / "checkpoints" / step_name(step) for step in (4, 6, 8)]
    ended = convert(f"convert.source=[{','.join(map(str, places))}]", f"convert.target={tmp_path / 'mean'}")
    assert ended.out == f"{tmp_path / 'mean'}: the mean of 3 times 11 leaves, 33.2 kB in 1 file\n"
    trees = [leaves(load(place)["params"]) for place in places]
    for name, leaf in leaves(load(tmp_path / "mean")["params"]).items():
        mean = torch.stack([tree[name].double() for tree in trees]).mean(0).float()
        torch.testing.assert_close(leaf, mean, rtol=1e-7, atol=0)  # the mean of three may differ in its last bit


def test_a_large_model_becomes_several_files_with_an_index(tmp_path: Path) -> None:
    state = td(params=td(**{f"w{number}": torch.randn(150_000) for number in range(4)}))
    save(tmp_path / "a", state)
    words = (f"convert.source={tmp_path / 'a'}", f"convert.target={tmp_path / 'out' / 'model.safetensors'}")
    assert "4 leaves, 2.4 MB in 5 files" in convert(*words, "convert.most_mb=1").out
    assert convert(f"convert.source={tmp_path / 'out'}", f"convert.target={tmp_path / 'back'}").code == 0
    assert_same(load(tmp_path / "back"), state)


def test_what_cannot_be_converted_is_named_and_nothing_is_made(run: Path, tmp_path: Path) -> None:
    source, target = f"convert.source={run}", f"convert.target={tmp_path / 'x' / 'a.safetensors'}"
    absent = tmp_path / "absent"
    cases = {
        (source,): (2, "convert.target='' must be given; name a file .safetensors, or a new folder for a checkpoint"),
        ("convert.source=", target): (
            2,
            "convert.source='' must name a checkpoint, a run folder or .safetensors; correct or drop it",
        ),
        (f"convert.source=[{run},{run}]", target, "convert.what=all"): (
            2,
            "convert.what=all must be of one source, whole states have no mean; set convert.what=params",
        ),
        (source, f"convert.target={tmp_path / 'step_0000000001'}"): (
            2,
            f"convert.target={tmp_path / 'step_0000000001'} must not be named, or lie, as the checkpoints of a run do; "
            f"choose another",
        ),
        (source, f"convert.target={tmp_path / 'new'}", "convert.most_mb=3"): (
            2,
            "convert.most_mb must go with a target .safetensors; drop it",
        ),
        (f"convert.source={absent}", target): (5, f"{absent}: must be a folder that is there; check the path"),
        (source, target, "convert.names=[nothing=x]"): (
            2,
            "rule 'nothing': applies to no name, must to one; correct it or drop it",
        ),
    }
    for words, (code, message) in cases.items():
        assert told(convert(*words), code) == message
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_source_is_an_error_and_makes_nothing(run: Path, tmp_path: Path) -> None:
    for name in ("all", "params"):
        assert (
            convert(f"run.dir={run}", f"convert.target={tmp_path / f'{name}.safetensors'}", f"convert.what={name}").code
            == 0
        )
    whole = (tmp_path / "all.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-1])
    assert "cut.safetensors: " in told(
        convert(f"convert.source={tmp_path / 'cut.safetensors'}", f"convert.target={tmp_path / 'x'}"), 5
    )
    alone = convert(
        f"convert.source={tmp_path / 'params.safetensors'}", f"convert.target={tmp_path / 'x'}", "convert.what=all"
    )
    assert "holds parameters alone, must hold a whole state; set convert.what=params" in told(alone, 5)
    assert not (tmp_path / "x").exists()


# Weights into a new run, and branching off ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["run", "checkpoint", "file", "bf16"])
def test_a_new_run_begins_with_the_weights_of_another(source: str, run: Path, tmp_path: Path) -> None:
    params = leaves(load(run)["params"])
    if source in ("file", "bf16"):
        kept = {f"model.{name}": leaf.bfloat16() if source == "bf16" else leaf.clone() for name, leaf in params.items()}
        save_file(kept, tmp_path / "m.safetensors")
        params = {name: kept[f"model.{name}"].float() for name in params}
    path = {"run": run, "checkpoint": run / "checkpoints" / step_name(8)}.get(source, tmp_path / "m.safetensors")
    names = ("init.names=[model.**=**]",) if source in ("file", "bf16") else ()
    ended = run_here(*words_of(run), f"run.dir={tmp_path / 'new'}", f"init.path={path}", *names, "stop=0")
    assert ended.code == 0, ended.err
    assert f"begins with the weights of {path}" in ended.out
    state = load(tmp_path / "new")
    assert {name: bits(leaf) for name, leaf in leaves(state["params"]).items()} == {
        n: bits(p) for n, p in params.items()
    }
    assert {name: bits(leaf) for name, leaf in leaves(state["average", "params"]).items()} == {
        n: bits(p) for n, p in params.items()
    }
    assert state["step"] == state["optimizer", "adam", "count"] == 0
    assert run_here(f"run.dir={tmp_path / 'new'}").code == 0  # it goes on without asking where it came from


def test_weights_of_another_model_are_refused_with_all_differences(run: Path, tmp_path: Path) -> None:
    ended = run_here(
        *words_of(run), f"run.dir={tmp_path / 'new'}", f"init.path={run}", "model.width=32", "model.tied=false"
    )
    line = told(ended, 5)
    assert line.startswith(
        f"init.path={run}: missing head.weight (real (260, 32)); blocks.attention.norm: is real (1, 16), "
    )
    assert "embed.weight: is real (260, 16), must be real (260, 32)" in line
    assert line.endswith("; set model.* as it was there, or name the weights with init.names")
    assert not (tmp_path / "new").exists()


def test_a_run_that_branches_off_goes_on_with_the_same_bits(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    at = run / "checkpoints" / step_name(4)
    words = (*words_of(run), f"run.dir={tmp_path / 'branch'}", f"init.path={at}", "init.take=all")
    ended = run_here(*words, "stop=6")
    assert ended.code == 0, ended.err
    assert f"going on from step 4 of 8, from {at}" in ended.out
    assert committed(tmp_path / "branch" / "checkpoints") == [4, 6]
    assert run_here(f"run.dir={tmp_path / 'branch'}").code == 0
    assert bits_of(tmp_path / "branch") == bits_of(run)
    ours = [row for row in rows(tmp_path / "branch") if row["step"] > 4]
    assert ours == [row for row in rows(run) if row["step"] > 4]
    assert tree(run) == before
    other = run_here(*words_of(run), f"run.dir={tmp_path / 'x'}", f"init.path={at}", "init.take=all", "model.width=32")
    assert told(other, 2).startswith(
        f"init.path={at}: that run has another recipe; model.width: run has 16, asked for 32"
    )


def test_load_takes_a_step_for_reading_and_not_for_training_beside_later_ones(run: Path) -> None:
    shown = run_here("inspect", f"run.dir={run}", "load=4").out
    assert "verified: step 4, " in shown
    assert told(run_here("inspect", f"run.dir={run}", "load=5"), 5) == (
        f"{run / 'checkpoints'}: no checkpoint of step 5 is there, must be one of 0, 4, 6, 8; name one of them"
    )
    assert told(run_here(f"run.dir={run}", "load=4", "steps=9", "schedule.length=8"), 2) == (
        f"load=4: the run goes on to {run / 'checkpoints' / step_name(8)}, must be the newest to train on; to branch off "
        f"from it set init.path={run / 'checkpoints' / step_name(4)} init.take=all and another run.dir"
    )


def test_whether_there_must_be_a_run_is_said_by_resume(run: Path, tmp_path: Path) -> None:
    before = tree(run)
    assert told(run_here(f"run.dir={run}", "resume=never", "steps=9"), 2) == (
        f"run.dir={run}: a run is there, must be none with resume=never; set another run.dir"
    )
    assert told(run_here(f"run.dir={run}", "resume=never"), 2).endswith("set another run.dir")  # complete or not
    assert run_here(f"run.dir={run}", "resume=always").code == 0
    assert tree(run) == before
    new = tmp_path / "new"
    assert told(run_here(*words_of(run), f"run.dir={new}", "resume=always"), 5) == (
        f"{new / 'checkpoints'}: no checkpoint is there, must be one with resume=always; check run.dir and "
        f"checkpoint.dir, or begin a run without it"
    )
    assert not new.exists()
    assert run_here(*words_of(run), f"run.dir={new}", "resume=never", "stop=1").code == 0
    assert run_here(f"run.dir={new}").code == 0  # it was for that launch


def test_load_counts_wherever_a_run_is_named(run: Path, tmp_path: Path) -> None:
    assert "verified: step 4, " in run_here("inspect", f"inspect.path={run}", "load=4").out
    out = tmp_path / "four.safetensors"
    assert convert(f"convert.source={run}", f"convert.target={out}", "load=4").code == 0
    four = leaves(load(run / "checkpoints" / step_name(4))["params"])
    assert {name: bits(leaf) for name, leaf in load_file(out).items()} == {
        name: bits(leaf) for name, leaf in four.items()
    }
    assert told(run_here("inspect", f"inspect.path={run}", "load=older"), 2) == (
        "load=older must not go with inspect.path, it is for the run in run.dir; name the checkpoint itself"
    )
    new = tmp_path / "new"
    assert told(run_here(*words_of(run), f"run.dir={new}", "load=5"), 5).startswith(
        f"{new / 'checkpoints'}: no checkpoint is there, must be one with load=5"
    )


def test_weights_that_are_not_there_are_missed_before_any_text_is_read(run: Path, tmp_path: Path) -> None:
    words = (*words_of(run), f"run.dir={tmp_path / 'new'}")
    ended = run_here(*words, f"init.path={tmp_path / 'absent'}")
    assert told(ended, 5) == f"{tmp_path / 'absent'}: must be a folder that is there; check the path"
    assert ended.out == ""
    assert convert(f"run.dir={run}", f"convert.target={tmp_path / 'm.safetensors'}").code == 0
    assert told(run_here(*words, f"init.path={tmp_path / 'm.safetensors'}", "init.take=all"), 2) == (
        f"init.path={tmp_path / 'm.safetensors'} must be a checkpoint with init.take=all; make one of it with convert"
    )
    assert told(convert(f"run.dir={run}", "convert.target=memory://x.safetensors"), 2).startswith(
        "memory://x.safetensors: must be"
    )


def test_a_checkpoint_under_another_step_is_refused_and_one_without_commit_is_told_of(
    run: Path, tmp_path: Path
) -> None:
    words = (
        *words_of(run),
        f"run.dir={tmp_path / 'new'}",
        f"init.path={run / 'checkpoints' / step_name(4)}",
        "init.take=all",
    )
    assert run_here(*words, "stop=6").code == 0
    places = tmp_path / "new" / "checkpoints"
    (places / step_name(6)).rename(places / step_name(7))
    assert told(run_here(f"run.dir={tmp_path / 'new'}"), 5) == (
        f"{places / step_name(7)}: holds step 6, must hold the one of its name; rename it back"
    )
    (places / step_name(7) / "COMMIT").unlink()
    ended = run_here(f"run.dir={tmp_path / 'new'}")
    assert ended.code == 0, ended.err
    assert f"{places / step_name(7)}: has no COMMIT, so it is no checkpoint; passed over\n" in ended.out
    assert bits_of(tmp_path / "new") == bits_of(run)


def test_any_checkpoint_can_be_inspected(run: Path, tmp_path: Path) -> None:
    place = save(tmp_path / "mine", td(params=td(w=torch.ones(3, 4)), note=torch.tensor([True])), info={"by": "hand"})
    ended = run_here("inspect", f"inspect.path={place}")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "leaf    shape  dtype    bytes    norm",
        "params                     48",
        "  w     3x4    float32     48  3.4641",
        "note    1      bool         1       1",
        "verified: 2 leaves, 49 bytes",
        f"checkpoint: {place}",
        "written by: by hand",
    ]
    assert [row.path for row in describe(place)] == ["params.w", "note"]
    assert told(run_here("inspect", f"inspect.path={tmp_path}"), 5) == (
        f"{tmp_path}: must be a checkpoint or a folder with one in it; check the path"
    )
