"""The command line: what words mean, in which order layers lie, and what is said of every mistake."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.config import Config, load_config
from lib.run.cli import main
from lib.run.folder import as_toml
from lib.run.launch import Launch, launch, read_words
from lib.run.usage import VERBS, usage
from lib.settings import field_paths

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(*argv: str) -> Launch:
    return launch(read_words(list(argv)))


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert list(Path().iterdir()) == []
    return captured.err.removeprefix("error: ").rstrip("\n")


def test_no_words_mean_train_with_the_defaults() -> None:
    assert told() == ("train", Config(), frozenset(), False)


def test_a_verb_files_and_overrides_are_told_apart() -> None:
    words = read_words(["eval", "a.toml", "steps=3", "b=c/d.yaml", "~optim.clip", "show=true", "x.y=z.json"])
    assert words.verb == "eval"
    assert words.files == (Path("a.toml"),)
    assert words.overrides == ("steps=3", "b=c/d.yaml", "~optim.clip", "x.y=z.json")
    assert words.show


def test_a_file_whose_name_holds_an_equals_sign_can_be_given_with_its_folder() -> None:
    assert read_words(["runs/lr=3/config.toml"]).files == (Path("runs/lr=3/config.toml"),)


def test_later_files_win_over_earlier_ones_and_overrides_over_files() -> None:
    Path("a.toml").write_text("steps = 100\n[optim]\nlr = 0.1\ndecay = 0.5\n")
    Path("b.yaml").write_text("optim:\n  lr: 1e-4\n")
    launched = told("optim.decay=0.25", "a.toml", "b.yaml")
    assert (launched.config.steps, launched.config.optim.lr, launched.config.optim.decay) == (100, 1e-4, 0.25)
    assert launched.named == {"steps", "optim.lr", "optim.decay"}


def test_a_path_at_home_is_at_home_wherever_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    Path("c.toml").write_text('[data]\nsources = {a = {path = ["~/a", "b/~/c"]}}\n[init]\npath = "~/old"\n')
    config = launch(read_words(["c.toml", "run.dir=~/runs/new", "sample.prompt=~/x"])).config
    assert config.run.dir == "/home/me/runs/new"
    assert config.data.sources["a"].path == ("/home/me/a", "b/~/c")
    assert config.init.path == "/home/me/old"
    assert config.sample.prompt == "~/x"


def test_an_existing_run_folder_is_the_first_layer() -> None:
    Path("runs/x").mkdir(parents=True)
    config = load_config("run.dir=runs/x", "steps=90", "model.width=64", "optim.clip=none", "sample.top_k=none")
    Path("runs/x/config.toml").write_text(as_toml(config))
    Path("a.toml").write_text("[run]\ndir = 'runs/x'\n[model]\nwidth = 32\n")
    assert told("run.dir=runs/x").config == config
    assert told("run.dir=runs/x").named == {"run.dir"}
    assert told("a.toml").config.model.width == 32
    assert told("run.dir=runs/x", "~optim.clip").config.optim.clip == 1.0
    assert told("run.dir=runs/y").config.model.width == 128


def test_tokens_named_over_a_run_folder_take_the_place_of_its_steps() -> None:
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.toml").write_text(as_toml(load_config("steps=90")))
    assert told("run.dir=runs/x", "tokens=1000000").config.tokens == 1_000_000


def test_the_default_run_folder_counts_too() -> None:
    Path("runs/default").mkdir(parents=True)
    Path("runs/default/config.toml").write_text(as_toml(load_config("steps=90")))
    assert told().config.steps == 90
    assert told("~run.dir").config.steps == 90


def test_a_broken_config_in_a_run_folder_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.toml").write_text("[optim]\nlrr = 1\n")
    assert main(["run.dir=runs/x"]) == 2
    assert capsys.readouterr().err == (
        "error: runs/x/config.toml: optim.lrr: unknown key, must be one of the config's; did you mean `optim.lr`?\n"
    )


@pytest.mark.parametrize("form", ["none", "written"])
def test_the_saved_config_reads_back_as_itself(form: str) -> None:
    given = ("optim.clip=none", "checkpoint.keep=none", "eval.rows=none", "sample.top_k=none", "data.path=[a, b]")
    config = load_config(*given) if form == "none" else Config()
    Path("c.toml").write_text(as_toml(config))
    assert told("c.toml").config == config


def test_a_launch_of_its_own_is_no_part_of_the_saved_config() -> None:
    text = as_toml(load_config("stop=3", "load=older"))
    assert not re.search(r"^(stop|load) =", text, re.MULTILINE)


ERRORS = {
    ("optm.lr=1",): "optm.lr: unknown key, must be one of the config's; did you mean `optim.lr`?",
    ("optim.lrr=1",): "optim.lrr: unknown key, must be one of the config's; did you mean `optim.lr`?",
    ("lr=1",): "lr: unknown key, must be one of the config's; did you mean `optim.lr`?",
    ("eval", "lr=1"): "lr: unknown key, must be one of the config's; did you mean `optim.lr`?",
    ("show=true", "lr=1"): "lr: unknown key, must be one of the config's; did you mean `optim.lr`?",
    ("model.kv-heads=2",): "model.kv-heads: unknown key, must be one of the config's; did you mean `model.kv_heads`?",
    ("steps=many",): "steps=many must be a whole number or none; change the value",
    ("steps=1.5",): "steps=1.5 must be a whole number or none; change the value",
    ("run.seed=010",): "run.seed=010 must be a whole number; change the value",
    ("model.tied=yes",): "model.tied=yes must be true or false; change the value",
    ("optim.lr=nan",): "optim.lr=nan must be a number; change the value",
    ("model.width=130", "model.heads=4"): "model.heads=4 must divide model.width=130 into even head widths; "
    "take heads from [1, 5, 13, 65]",
    ("batch.rows=3", "batch.micro=2"): "batch.rows=3 must be a multiple of batch.micro=2; "
    "set batch.rows=4 or another batch.micro",
    ("steps=20", "schedule.warmup=50"): "schedule.warmup=50 must be in [0, schedule.length=20); "
    "lower schedule.warmup or raise steps",
    ("steps=20", "tokens=5"): "steps=20 must not go with tokens=5, they say the same; drop one",
    ("optim.clip=0",): "optim.clip=0.0 must be > 0; set optim.clip=none to turn clipping off",
    ("--steps=20",): "--steps=20: unknown option, must be a verb, a config file, key=value or ~key; write steps=20",
    ("--batch-rows", "3"): "--batch-rows: unknown option, must be a verb, a config file, key=value or ~key; "
    "write batch_rows=VALUE",
    ("-v",): "-v: unknown option, must be a verb, a config file, key=value or ~key; write v=VALUE",
    ("trian",): "'trian' must be a verb (train, eval, sample, prepare, inspect, convert, check, plot, "
    "plot schedule) first, a config file, key=value or ~key; "
    "did you mean `train`?",
    (
        "steps=3",
        "eval",
    ): "'eval' must be a verb (train, eval, sample, prepare, inspect, convert, check, plot, "
    "plot schedule) first, a config file, key=value "
    "or ~key; did you mean `eval`?",
    ("notes.txt",): "'notes.txt' must be a verb (train, eval, sample, prepare, inspect, convert, check, plot, "
    "plot schedule) first, a config file, key=value "
    "or ~key; a config file ends in .toml, .yaml, .yml, .json",
    ("absent.toml",): "absent.toml: No such file or directory, must be a readable config file; give the path of one",
    ("show=maybe",): "show=maybe must be true or false; change the value",
    ("run.dir=",): "run.dir='' must name a folder; give one, such as run.dir=runs/first",
    ("~optm",): "optm: unknown key, must be one of the config's; did you mean `optim.lr`?",
    ("eval", "run.dir=no"): "run.dir=no: no run there, must be a run folder; train one first or set run.dir",
    ("sample", "run.dir=no"): "run.dir=no: no run there, must be a run folder; train one first or set run.dir",
    ("inspect", "run.dir=no"): "run.dir=no: no run there, must be a run folder; train one first or set run.dir",
    ("plot", "run.dir=no"): "run.dir=no: no run there, must be a run folder; train one first or set run.dir",
}


@pytest.mark.parametrize("argv", ERRORS, ids=" ".join)
def test_a_mistake_gets_one_line_exit_2_and_nothing_is_written(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, *argv) == ERRORS[argv]


def test_a_mistake_of_ours_shows_its_traceback_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lib.run.cli.launch", lambda words: int("x"))
    monkeypatch.setattr("lib.run.cli.__name__", "elsewhere")  # the innermost frame is then a stranger's
    monkeypatch.setitem(test_a_mistake_of_ours_shows_its_traceback_and_exits_1.__globals__, "__name__", "stranger")
    assert main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_costs_no_torch_and_names_every_key() -> None:
    code = "import sys; from lib.run.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr
    for key in field_paths(Config):
        assert f"  {key}=" in found.stdout


def test_a_config_mistake_is_told_within_two_seconds() -> None:
    start = time.monotonic()
    words = [sys.executable, "-m", "lib.run", "optm.lr=1"]
    found = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 2
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_its_keys_and_an_example_that_parses(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text == usage(verb) + "\n"
    assert ("  check.case=''" if verb == "check" else "  run.dir=runs/default") in text
    example = text.rpartition("python -m lib.run ")[2].split("'")
    words = [part for n, piece in enumerate(example) for part in ([piece] if n % 2 else piece.split())]
    joined = re.sub(r"=\0", "=", "\0".join(words)).split("\0")
    assert launch(read_words(joined)).verb == verb


def test_help_tells_type_range_and_default() -> None:
    text = " ".join(usage("train").split())
    assert "batch.length=256 positions per sequence. [a whole number >= 2]" in text
    assert "optim.clip=1 greatest global gradient norm; none = no clipping. [a number > 0 or none]" in text
    assert "sample.seed=0 key of the draws. [a whole number >= 0 and < 2**63]" in text


def test_show_prints_a_config_that_reads_back_and_the_leaves_and_writes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "show=true",
                "tokens=819200",
                "batch.rows=32",
                "batch.length=256",
                "model.width=16",
                "model.heads=2",
                "model.depth=1",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert list(Path().iterdir()) == []
    Path("shown.toml").write_text(text)
    again = told("shown.toml").config
    assert (again.steps, again.tokens, again.schedule.length, again.model.width) == (100, None, 100, 16)
    assert "#   params.embed.weight" in text
    assert "(260, 16)" in text
    assert "float32" in text
