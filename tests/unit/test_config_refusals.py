"""Every bad setting, alone or with others, with its full message."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from lib.config import (
    Batch,
    Data,
    Guard,
    Model,
    Optim,
    Precision,
    Recipe,
    Run,
    Scale,
    Schedule,
    Source,
    SourceIdentity,
    load_config,
)
from tests.strategies import refusal

RANGE = "{} must be {}; give one in range"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("batch.length=1", RANGE.format("batch.length=1", ">= 2")),
        ("batch.length=0", RANGE.format("batch.length=0", ">= 2")),
        ("batch.rows=0", RANGE.format("batch.rows=0", ">= 1")),
        ("batch.rows=-3", RANGE.format("batch.rows=-3", ">= 1")),
        ("batch.micro=0", RANGE.format("batch.micro=0", ">= 1")),
        ("steps=-1", RANGE.format("steps=-1", ">= 1")),
        ("steps=0", RANGE.format("steps=0", ">= 1")),
        ("tokens=0", RANGE.format("tokens=0", ">= 1")),
        ("stop=-1", RANGE.format("stop=-1", ">= 0")),
        ("checkpoint.every=0", RANGE.format("checkpoint.every=0", ">= 1")),
        ("checkpoint.keep=0", RANGE.format("checkpoint.keep=0", ">= 1")),
        ("log.every=0", RANGE.format("log.every=0", ">= 1")),
        ("eval.every=-1", RANGE.format("eval.every=-1", ">= 0")),
        ("eval.rows=0", RANGE.format("eval.rows=0", ">= 1")),
        ("data.holdout=1", RANGE.format("data.holdout=1.0", ">= 0 and < 1")),
        ("data.holdout=-0.1", RANGE.format("data.holdout=-0.1", ">= 0 and < 1")),
        ("data.ahead=-1", RANGE.format("data.ahead=-1", ">= 0")),
        ("run.seed=-1", RANGE.format("run.seed=-1", ">= 0 and < 9223372036854775808")),
        (
            "run.seed=9223372036854775808",
            RANGE.format("run.seed=9223372036854775808", ">= 0 and < 9223372036854775808"),
        ),
        ("run.threads=0", RANGE.format("run.threads=0", ">= 1")),
        ("model.depth=0", RANGE.format("model.depth=0", ">= 1")),
        ("model.width=0", RANGE.format("model.width=0", ">= 1")),
        ("model.heads=0", RANGE.format("model.heads=0", ">= 1")),
        ("model.kv_heads=0", RANGE.format("model.kv_heads=0", ">= 1")),
        ("model.inner=0", RANGE.format("model.inner=0", ">= 1")),
        ("model.vocab=1", RANGE.format("model.vocab=1", ">= 2")),
        ("model.dropout=1", RANGE.format("model.dropout=1.0", ">= 0 and < 1")),
        ("model.theta=0", RANGE.format("model.theta=0.0", "> 0")),
        ("model.eps=0", RANGE.format("model.eps=0.0", "> 0")),
        ("optim.lr=0", RANGE.format("optim.lr=0.0", "> 0 and <= 1000000.0")),
        ("optim.lr=-1e-3", RANGE.format("optim.lr=-0.001", "> 0 and <= 1000000.0")),
        ("optim.decay=-1", RANGE.format("optim.decay=-1.0", ">= 0 and <= 1000000.0")),
        ("optim.beta1=1", RANGE.format("optim.beta1=1.0", ">= 0 and < 1")),
        ("optim.beta2=-1", RANGE.format("optim.beta2=-1.0", ">= 0 and < 1")),
        ("optim.eps=0", RANGE.format("optim.eps=0.0", ">= 1e-30")),
        ("optim.average=1", RANGE.format("optim.average=1.0", ">= 0 and < 1")),
        ("optim.clip=0", "optim.clip=0.0 must be > 0; set optim.clip=none to turn clipping off"),
        ("optim.clip=-1", "optim.clip=-1.0 must be > 0; set optim.clip=none to turn clipping off"),
        ("optim.clip=nan", "optim.clip=nan must be a number or none; change the value"),
        ("optim.clip=inf", "optim.clip=inf must be a number or none; change the value"),
        ("optim.lr=1e999", "optim.lr=inf must be a finite number; give one"),
        (
            "optim.rule=adam",
            "optim.rule=adam must be one of adamw, sgd, lion, adafactor, muon, schedule_free; change the value",
        ),
        ("steps=99999999999999999999", "steps=99999999999999999999 must be < 2**63; give one in range"),
        ("tokens=99999999999999999999", "tokens=99999999999999999999 must be < 2**63; give one in range"),
        (
            "checkpoint.at=[1, 9223372036854775808]",
            "checkpoint.at=9223372036854775808 must be < 2**63; give one in range",
        ),
        ("log.every=9223372036854775808", "log.every=9223372036854775808 must be < 2**63; give one in range"),
        (
            "checkpoint.best_by=eval/bpb",
            "checkpoint.best_by=eval/bpb must go with checkpoint.keep_best; set checkpoint.keep_best=3",
        ),
        ("schedule.warmup=-1", RANGE.format("schedule.warmup=-1", ">= 0")),
        ("schedule.length=0", RANGE.format("schedule.length=0", ">= 1")),
        ("schedule.floor=1.1", RANGE.format("schedule.floor=1.1", ">= 0 and <= 1")),
        (
            "schedule.shape=cos",
            "schedule.shape=cos must be one of constant, linear, cosine, half_cosine, polynomial, "
            "inverse_sqrt, power, exponential, wsd, range, stages; change the value",
        ),
        ("schedule.counts=updates", "schedule.counts=updates must be one of step, applied, tokens; change the value"),
        ("precision.compute=float17", "precision.compute=float17 must be one of fp32, bf16, fp16; change the value"),
        ("compile=yes", "compile=yes must be one of auto, on, off; change the value"),
        ("load=newest", "load=newest must be one of latest, older or a whole number; change the value"),
        ("load=-1", RANGE.format("load=-1", ">= 0")),
        ("resume=maybe", "resume=maybe must be one of if_available, always, never; change the value"),
        ("init.take=all", "init.path=none must be given with init.take or init.names; set init.path"),
        ("checkpoint.at=[-1]", "checkpoint.at=-1 must be at least 0; drop it"),
        ("checkpoint.dir=", "checkpoint.dir='' must name a folder or be none; drop it"),
        ("checkpoint.keep_every=0", RANGE.format("checkpoint.keep_every=0", ">= 1")),
        ("checkpoint.keep_every_s=0", RANGE.format("checkpoint.keep_every_s=0.0", "> 0")),
        ("checkpoint.keep_best=0", RANGE.format("checkpoint.keep_best=0", ">= 1")),
        (
            "checkpoint.best_by=loss",
            "checkpoint.best_by=loss must be one of eval/loss_nats, eval/bpb; change the value",
        ),
        ("checkpoint.temporary=0", RANGE.format("checkpoint.temporary=0", ">= 1")),
        (
            "checkpoint.temporary=100",
            "checkpoint.temporary=100 must be below checkpoint.every=100; lower it or set checkpoint.temporary=none",
        ),
        ("convert.names=[a]", "convert.names='a' must read SOURCE=TARGET; write one = between the two names"),
        ("convert.most_mb=0", RANGE.format("convert.most_mb=0", ">= 1")),
        ("model.layers=scam", "model.layers=scam must be one of unroll, scan; change the value"),
        ("scale.growth=1", RANGE.format("scale.growth=1.0", "> 1")),
        ("scale.backoff=1", RANGE.format("scale.backoff=1.0", "> 0 and < 1")),
        ("scale.every=0", RANGE.format("scale.every=0", ">= 1")),
        ("scale.initial=0", RANGE.format("scale.initial=0.0", "> 0")),
        ("scale.initial=3", "scale.initial=3.0 must be a power of two (other scales are not exact); take 4.0"),
        ("scale.backoff=0.3", "scale.backoff=0.3 must be a power of two (other scales are not exact); take 0.25"),
        ("scale.dynamic=maybe", "scale.dynamic=maybe must be true or false or none; change the value"),
        ("guard.patience=0", RANGE.format("guard.patience=0", ">= 1")),
        ("guard.window=2", "guard.window=2 must be 0 (off) or at least 4; set guard.window=128"),
        ("guard.sigma=0", RANGE.format("guard.sigma=0.0", "> 0")),
        ("sample.temperature=-1", RANGE.format("sample.temperature=-1.0", ">= 0")),
        ("sample.top_k=0", RANGE.format("sample.top_k=0", ">= 1")),
        ("sample.length=-1", RANGE.format("sample.length=-1", ">= 0")),
        ("optim=5", "optim=5 must be a section of keys; write optim.rule=... or another key of it"),
        ("optim", "'optim' must be key=value or ~key; for a file give its path with .toml, .yaml or .json"),
        ("=5", "'=5' must be key=value or ~key; for a file give its path with .toml, .yaml or .json"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_rule(setting: str, message: str) -> None:
    assert refusal(load_config, setting) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.width=128", "model.heads=3"],
            "model.heads=3 must divide model.width=128 into even head widths; take heads from [1, 2, 4, 8, 16, 32, 64]",
        ),
        (
            ["model.width=12", "model.heads=4"],
            "model.heads=4 must divide model.width=12 into even head widths; take heads from [1, 2, 3, 6]",
        ),
        (
            ["model.width=16", "model.heads=16"],
            "model.heads=16 must divide model.width=16 into even head widths; take heads from [1, 2, 4, 8]",
        ),
        (
            ["model.heads=4", "model.kv_heads=3"],
            "model.kv_heads=3 must divide model.heads=4; take kv_heads from [1, 2, 4]",
        ),
        (
            ["model.heads=4", "model.kv_heads=8"],
            "model.kv_heads=8 must divide model.heads=4; take kv_heads from [1, 2, 4]",
        ),
        (
            ["batch.rows=6", "batch.micro=4"],
            "batch.rows=6 must be a multiple of batch.micro=4; set batch.rows=8 or another batch.micro",
        ),
        (
            ["batch.rows=32", "batch.micro=64"],
            "batch.rows=32 must be a multiple of batch.micro=64; set batch.rows=64 or another batch.micro",
        ),
        (
            ["schedule.shape=constant", "schedule.floor=0.5"],
            "schedule.floor=0.5 must not go with schedule.shape=constant (it is never reached); drop one",
        ),
        (
            ["schedule.shape=power", "schedule.warmup=9", "schedule.length=500"],
            "schedule.length=500 must not go with schedule.shape=power (it has no end); drop one",
        ),
        (
            ["schedule.shape=wsd", "schedule.end=0", "schedule.floor=0.7"],
            "schedule.floor=0.7 must not go with schedule.end=0.0 (it is never reached); drop one",
        ),
        (
            ["steps=12", "schedule.warmup=20"],
            "schedule.warmup=20 must be in [0, schedule.length=12); lower schedule.warmup or raise steps",
        ),
        (
            ["steps=12", "schedule.warmup=12"],
            "schedule.warmup=12 must be in [0, schedule.length=12); lower schedule.warmup or raise steps",
        ),
        (
            ["schedule.length=12", "schedule.warmup=20"],
            "schedule.warmup=20 must be in [0, schedule.length=12); lower schedule.warmup or raise steps",
        ),
        (
            ["tokens=8192", "batch.rows=32", "batch.length=256", "schedule.warmup=50"],
            "schedule.warmup=50 must be in [0, schedule.length=1); lower schedule.warmup or raise steps",
        ),
        (["steps=90", "tokens=5"], "steps=90 must not go with tokens=5, they say the same; drop one"),
        (
            ["precision.compute=fp16", "scale.dynamic=false"],
            (
                "scale.dynamic=false must not go with precision.compute=fp16 (small gradients vanish); "
                "leave scale.dynamic out or use bf16"
            ),
        ),
        (
            ["scale.lowest=4", "scale.initial=2"],
            "scale.initial=2.0 must be in [scale.lowest=4, scale.highest=4.29497e+09]; widen the bounds",
        ),
        (
            ["eval.weights=average"],
            "eval.weights=average must have an average; set optim.average=0.999 or eval.weights=params",
        ),
        (["model.vocab=100"], "model.vocab=100 must be at least 260 (bytes and special ids); drop model.vocab"),
    ],
    ids=itertools.count(),
)
def test_settings_that_do_not_go_together_are_refused_before_anything_is_made(
    settings: list[str], message: str
) -> None:
    assert refusal(load_config, *settings) == message
    assert refusal(load_config, *reversed(settings)) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optim(lr=math.inf), "optim.lr=inf must be a finite number; give one"),
        (lambda: Optim(clip=math.nan), "optim.clip=nan must be a finite number; give one"),
        (lambda: Optim(clip=0.0), "optim.clip=0.0 must be > 0; set optim.clip=none to turn clipping off"),
        (lambda: Model(depth=0), "model.depth=0 must be >= 1; give one in range"),
        (lambda: Model(kv_heads=0), "model.kv_heads=0 must be >= 1; give one in range"),
        (lambda: Guard(sigma=-1.0), "guard.sigma=-1.0 must be > 0; give one in range"),
        (lambda: Run(seed=-1), "run.seed=-1 must be >= 0 and < 9223372036854775808; give one in range"),
        (
            lambda: Batch(rows=3, micro=2),
            "batch.rows=3 must be a multiple of batch.micro=2; set batch.rows=4 or another batch.micro",
        ),
        (
            lambda: Recipe(schedule=Schedule(shape="cosine")),
            "schedule.length=none must be set for schedule.shape=cosine; set it to the updates of the run",
        ),
        (
            lambda: Recipe(precision=Precision(compute="fp16"), scale=Scale(dynamic=False)),
            (
                "scale.dynamic=false must not go with precision.compute=fp16 (small gradients vanish); "
                "leave scale.dynamic out or use bf16"
            ),
        ),
        (lambda: SourceIdentity(tokens=-1), "data.sources.NAME.tokens=-1 must be >= 0; give one in range"),
        (lambda: Data(path=""), "data.path='' must name files, folders or globs; leave it out for stdlib:"),
        (
            lambda: Data(sources={"a.b": Source(path="x")}),
            "data.sources.a.b: name must be of letters, digits, - and _ (it is a place in the state); rename it",
        ),
        (
            lambda: Data(sources={"heldout": Source(path="x")}),
            "data.sources.heldout: the name is kept for data.heldout; rename the source",
        ),
        (
            lambda: Data(heldout="x", holdout=0.1),
            "data.holdout=0.1 must not go with data.heldout, which takes its place; drop one",
        ),
        (
            lambda: Data(heldout="x", holdout_by="tail"),
            "data.holdout_by=tail must not go with data.heldout, which takes its place; drop one",
        ),
        (lambda: Data(heldout=()), "data.heldout='' must not be empty; give it or leave it out"),
        (lambda: Data(cache=""), "data.cache='' must not be empty; give it or leave it out"),
        (
            lambda: Data(train_on="all"),
            "data.train_on=all must go with data.template; set it or drop data.train_on",
        ),
        (
            lambda: Batch(rows=1 << 40, length=8),
            "batch.rows=1099511627776 of batch.length=8 must be at most 2**31 ids together; lower one",
        ),
        (
            lambda: Batch(length=8, repeats=9),
            "batch.repeats=9 must be at most batch.length=8, what a row holds; lower it",
        ),
        (
            lambda: Data(text_key='a"b'),
            "data.text_key='a\"b' must be a field's name without quotes or backslashes; rename the field",
        ),
        (
            lambda: Data(dtype="float32"),
            "data.dtype=float32 must be a NumPy dtype of whole numbers; write one like <u2 or uint32",
        ),
        (
            lambda: Data(id_key="text"),
            "data.id_key=text must be another field than text_key; name one that identifies records",
        ),
        (
            lambda: Batch(buckets=(8, 256)),
            "batch.buckets=[8, 256] must go with batch.mode=pad; set it or drop batch.buckets",
        ),
        (
            lambda: Batch(mode="pad", buckets=(64, 128)),
            "batch.buckets=[64, 128] must rise from at least 2 to batch.length=256; write [128, 256]",
        ),
        (
            lambda: Batch(rows_at=("5", "7:8")),
            "batch.rows_at=5 must be STEP:VALUE, two whole numbers; write it like 1000:32",
        ),
        (
            lambda: Batch(rows_at=("5:8", "5:16")),
            "batch.rows_at=5:16 must come at a later step than 5:8; sort them by step",
        ),
        (
            lambda: Batch(rows=4, micro=4, rows_at=("5:6",)),
            "batch.rows_at=5:6 must be a multiple of batch.micro=4; write 5:8",
        ),
        (
            lambda: Batch(length=8, length_at=("5:3",)),
            "batch.length_at=5:3 must divide batch.length=8 and be at least 2; take one from [2, 4, 8]",
        ),
        (
            lambda: Batch(mode="pad", length_at=("0:8",)),
            "batch.length_at must not go with batch.mode=pad (its rows have several lengths); drop one",
        ),
        (
            lambda: Data(sources={"a": Source()}),
            "data.sources.a.path='' must name files, folders or globs; set it",
        ),
    ],
    ids=itertools.count(),
)
def test_a_value_that_exists_is_a_valid_one_whoever_makes_it(make: Any, message: str) -> None:
    assert refusal(make) == message
