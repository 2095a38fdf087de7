"""Every key of a config in every way of saying it."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
import yaml

import lib.config
from lib.config import Config, Model, load_config
from lib.settings import field_paths
from tests.strategies import nested

ROOT = Path(__file__).parent.parent.parent
STRUCTS = [kind for _, kind in inspect.getmembers(lib.config, inspect.isclass) if issubclass(kind, msgspec.Struct)]

# A value for each key that is not its default, as (what is written, what is read): a new key needs its line here.
OTHER: dict[str, tuple[Any, Any]] = {
    "run.dir": ("runs/x=1", "runs/x=1"),
    "run.seed": (2**62 + 1, 2**62 + 1),
    "run.threads": (3, 3),
    "steps": (1000, 1000),
    "tokens": (10**7, 10**7),
    "stop": (0, 0),
    "load": (1200, 1200),
    "resume": ("never", "never"),
    "init.path": ("runs/old", "runs/old"),
    "init.take": ("all", "all"),
    "init.names": (["a.**=b.**"], ("a.**=b.**",)),
    "compile": ("off", "off"),
    "model.width": (64, 64),
    "model.depth": (7, 7),
    "model.heads": (8, 8),
    "model.kv_heads": (2, 2),
    "model.inner": (33, 33),
    "model.vocab": (300, 300),
    "model.dropout": (0.1, 0.1),
    "model.tied": (not Model().tied, not Model().tied),
    "model.theta": (500_000, 500_000.0),
    "model.eps": (1e-6, 1e-6),
    "model.documents": (False, False),
    "model.layers": ("scan", "scan"),
    "batch.rows": (6, 6),
    "batch.length": (7, 7),
    "batch.micro": (4, 4),
    "batch.mode": ("pack", "pack"),
    "batch.buckets": ([128, 256], (128, 256)),
    "batch.rows_at": (["100:32"], ("100:32",)),
    "batch.length_at": (["0:64", "100:128"], ("0:64", "100:128")),
    "batch.shuffle": (False, False),
    "batch.repeats": (32, 32),
    "data.path": (["a b", "c"], ("a b", "c")),
    "data.sources.NAME.path": ("books/", "books/"),
    "data.sources.NAME.weight": (0.1, 0.1),
    "data.sources.NAME.repeat": (4, 4.0),
    "data.sources.NAME.format": ("jsonl", "jsonl"),
    "data.sources.NAME.split": ("block", "block"),
    "data.sources.NAME.text_key": ("body", "body"),
    "data.sources.NAME.id_key": ("url", "url"),
    "data.sources.NAME.dtype": ("<u2", "<u2"),
    "data.sources.NAME.template": ("chatml", "chatml"),
    "data.sources.NAME.train_on": ("all", "all"),
    "data.holdout": (0.25, 0.25),
    "data.holdout_by": ("tail", "tail"),
    "data.heldout": ("valid.jsonl", "valid.jsonl"),
    "data.format": ("text", "text"),
    "data.split": ("line", "line"),
    "data.text_key": ("content", "content"),
    "data.id_key": ("id", "id"),
    "data.dtype": (">u4", ">u4"),
    "data.template": ("llama3", "llama3"),
    "data.train_on": ("last", "last"),
    "data.errors": ("skip", "skip"),
    "data.tokenizer": ("tokenizer.json", "tokenizer.json"),
    "data.eos_token": ("</s>", "</s>"),
    "data.bos_token": ("<s>", "<s>"),
    "data.add_bos": (True, True),
    "data.add_eos": (False, False),
    "data.cache": ("somewhere", "somewhere"),
    "data.processes": (3, 3),
    "data.workers": (2, 2),
    "data.ahead": (0, 0),
    "optim.rule": ("lion", "lion"),
    "optim.lr": (1e-4, 1e-4),
    "optim.decay": (0, 0.0),
    "optim.beta1": (0.0, 0.0),
    "optim.beta2": (0.999, 0.999),
    "optim.eps": (1e-15, 1e-15),
    "optim.momentum": (0.8, 0.8),
    "optim.nesterov": (False, False),
    "optim.moments": ("bf16", "bf16"),
    "optim.matrices": (["blocks.ffn.up"], ("blocks.ffn.up",)),
    "optim.groups": (["embed.*:lr=0.1", "norm:freeze"], ("embed.*:lr=0.1", "norm:freeze")),
    "optim.clip": (None, None),
    "optim.no_decay": (["*.norm", "embed.*"], ("*.norm", "embed.*")),
    "optim.average": (0.999, 0.999),
    "optim.average_last": (4, 4),
    "optim.average_every": (9, 9),
    "optim.average_at": ([9, 20], (9, 20)),
    "schedule.shape": ("linear", "linear"),
    "schedule.warmup": (0, 0),
    "schedule.length": (123, 123),
    "schedule.floor": (0, 0.0),
    "schedule.start": (0.1, 0.1),
    "schedule.exponent": (2, 2.0),
    "schedule.cycles": (2, 2),
    "schedule.tail": (0.2, 0.2),
    "schedule.tail_shape": ("sqrt", "sqrt"),
    "schedule.end": (0, 0.0),
    "schedule.stages": (["linear:10:1", "constant:90"], ("linear:10:1", "constant:90")),
    "schedule.counts": ("applied", "applied"),
    "precision.compute": ("bf16", "bf16"),
    "scale.dynamic": (True, True),
    "scale.initial": (1024, 1024.0),
    "scale.growth": (4, 4.0),
    "scale.backoff": (0.25, 0.25),
    "scale.every": (100, 100),
    "scale.lowest": (0.5, 0.5),
    "scale.highest": (2**20, 2.0**20),
    "loss.z": (1e-5, 1e-5),
    "loss.smoothing": (0.1, 0.1),
    "loss.chunk": (128, 128),
    "guard.patience": (3, 3),
    "guard.window": (128, 128),
    "guard.sigma": (4.5, 4.5),
    "guard.spikes": ("count", "count"),
    "checkpoint.dir": ("s3://bucket/run", "s3://bucket/run"),
    "checkpoint.every": (17, 17),
    "checkpoint.at": ([5, 70], (5, 70)),
    "checkpoint.temporary": (10, 10),
    "checkpoint.keep": (None, None),
    "checkpoint.keep_every": (1000, 1000),
    "checkpoint.keep_every_s": (3600, 3600.0),
    "checkpoint.keep_best": (2, 2),
    "checkpoint.best_by": ("eval/bpb", "eval/bpb"),
    "checkpoint.async": (False, False),
    "checkpoint.busy": ("skip", "skip"),
    "checkpoint.on_error": ("go_on", "go_on"),
    "eval.every": (0, 0),
    "eval.rows": (None, None),
    "eval.weights": ("params", "params"),
    "log.every": (1, 1),
    "sample.prompt": ("yes 1e-4 # no", "yes 1e-4 # no"),
    "sample.length": (0, 0),
    "sample.temperature": (0, 0.0),
    "sample.top_k": (None, None),
    "sample.seed": (5, 5),
    "inspect.rows": (4, 4),
    "inspect.path": ("runs/other", "runs/other"),
    "convert.source": (["a", "b"], ("a", "b")),
    "convert.target": ("model.safetensors", "model.safetensors"),
    "convert.what": ("all", "all"),
    "convert.names": (["a=b"], ("a=b",)),
    "convert.most_mb": (500, 500),
    "check.case": ("my_steps.py:case", "my_steps.py:case"),
    "check.laws": (["purity", "mesh"], ("purity", "mesh")),
}
BELOW: dict[str, Any] = {  # what a key needs beside it
    "batch.buckets": {"batch": {"mode": "pad"}},
    "data.sources": {"data": {"sources": {"NAME": {"path": "here"}}}},
    "data.train_on": {"data": {"template": "chatml"}},
    "init.take": {"init": {"path": "runs/old"}},
    "init.names": {"init": {"path": "runs/old"}},
    "checkpoint.best_by": {"checkpoint": {"keep_best": 2}},
    "guard.sigma": {"guard": {"window": 8}},
    "guard.spikes": {"guard": {"window": 8}},
    "optim.average_last": {"optim": {"average": "uniform", "average_last": 3, "average_every": 50}},
    "optim.average_every": {"optim": {"average": "uniform", "average_last": 3, "average_every": 50}},
    "optim.average_at": {"optim": {"average": "uniform", "average_last": 3, "average_at": [5]}},
    "optim.momentum": {"optim": {"rule": "muon"}},
    "optim.nesterov": {"optim": {"rule": "muon"}},
    "optim.matrices": {"optim": {"rule": "muon"}},
    "schedule.tail_shape": {"schedule": {"tail": 0.2}},
    "schedule.end": {"schedule": {"tail": 0.2}},
    "schedule.stages": {"schedule": {"shape": "stages", "stages": ["cosine:5:0.5"]}},
}
# There is no default that could stand where these are asked for.
NEEDED = {
    "data.sources.NAME.path",
    "schedule.stages",
    "optim.average_last",
    "optim.average_every",
    "optim.average_at",
}


def at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config[key] if isinstance(config, dict) else getattr(config, key)
    return config


def spoken(value: Any) -> str:
    """As one types it on a command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, list) else str(value)


def test_every_key_has_its_line_in_this_table() -> None:
    assert list(OTHER) == list(field_paths(Config))


@pytest.mark.parametrize("path", OTHER)
def test_every_key_says_the_same_in_every_form(path: str, tmp_path: Path) -> None:
    written, read = OTHER[path]
    toml, json_, yaml_ = (tmp_path / f"c.{kind}" for kind in ("toml", "json", "yaml"))
    toml.write_text(tomli_w.dumps(nested(path, "none" if written is None else written)))
    json_.write_text(json.dumps(nested(path, written)))
    yaml_.write_text(yaml.safe_dump(nested(path, written)))
    below = next((layer for start, layer in BELOW.items() if path.startswith(start)), {})
    by_hand = load_config(below, nested(path, written))
    assert at(by_hand, path) == read
    assert type(at(by_hand, path)) is type(read)
    assert at(load_config(below), path) != read
    for layer in (toml, json_, yaml_, f"{path}={spoken(written)}"):
        assert load_config(below, layer) == by_hand, layer
    assert load_config(msgspec.to_builtins(by_hand)) == by_hand
    if path not in NEEDED:
        assert load_config(below, nested(path, written), f"~{path}") == load_config(below)


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_described_in_its_struct(kind: Any) -> None:
    text = inspect.getdoc(kind) or ""
    described = [line.split(":")[0].strip() for line in text.split("Attributes:")[-1].splitlines() if ": " in line]
    missing = set(kind.__struct_fields__) - set(described)
    assert not missing


def test_reading_a_config_costs_no_torch() -> None:
    code = "import lib.config, lib.settings, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
