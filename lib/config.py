"""Every choice a launch can be told: the static part (`lib.recipe`), the text (`lib.sources`), and what the driver does.

A value that exists is a valid one. Imports no torch, so a misspelt key is refused at once.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from lib.recipe import (
    Batch,
    Checked,
    Count,
    DataIdentity,
    Guard,
    Loss,
    Model,
    Natural,
    Optim,
    Positive,
    Precision,
    Recipe,
    Scale,
    Schedule,
    SourceIdentity,
    changes,
)
from lib.settings import as_struct, layered
from lib.sources import HELDOUT, Data, Source, holdout_of, sources_of

__all__ = [
    "HELDOUT",
    "Batch",
    "Check",
    "Checkpoint",
    "Config",
    "Convert",
    "Data",
    "DataIdentity",
    "Eval",
    "Guard",
    "Init",
    "Inspect",
    "Log",
    "Loss",
    "Model",
    "Optim",
    "Precision",
    "Recipe",
    "Run",
    "Sample",
    "Scale",
    "Schedule",
    "Source",
    "SourceIdentity",
    "changes",
    "holdout_of",
    "load_config",
    "recipe_of",
    "run_steps",
    "sources_of",
]


LawName = Literal[
    "purity",
    "determinism",
    "structure",
    "cursor",
    "resume",
    "accumulation",
    "refusal",
    "compilation",
    "recompilation",
    "mesh",
    "ranks",
]
"""The laws of `lib.testing.LAWS`, which itself imports torch."""


class Run(Checked, frozen=True):
    """Where a run lives and what it starts from.

    Attributes:
        dir: run folder.
        seed: root of all randomness: initial weights, data order, dropout.
        threads: CPU threads; none = as many as cores when the run starts, then kept.
    """

    _at: ClassVar[str] = "run."
    dir: str = "runs/default"
    seed: Annotated[int, Meta(ge=0, lt=2**63)] = 0
    threads: Count | None = None


class Checkpoint(Checked, frozen=True):
    """When checkpoints are written, where, and which of them stay.

    Attributes:
        dir: folder of the checkpoints, or a URL such as s3://bucket/run; none = checkpoints/ in run.dir.
        every: updates between checkpoints; the first and the last state are always saved.
        at: updates after which a checkpoint is written too, which then always stays.
        temporary: updates between temporary checkpoints, of which only the newest stays, until another one follows;
            none = no such ones.
        keep: newest checkpoints kept; none = all. A checkpoint goes only when none of these rules keeps it.
        keep_every: checkpoints of updates that are a multiple of this stay; none = no such rule.
        keep_every_s: of each stretch of so many seconds the first checkpoint stays; none = no such rule.
        keep_best: so many checkpoints with the lowest best_by stay; none = no such rule.
        best_by: what of a held-out line in metrics.jsonl counts, lower is better.
        async: write in the background from a copy of the state, while training goes on.
        busy: what a save does while the one before is still being written: "wait" for it, or "skip" this one; the last
            one of a launch always waits.
        on_error: what a save that fails does: "stop" the run, or "go_on" and say so; the last one of a launch always
            stops it.
    """

    _at: ClassVar[str] = "checkpoint."
    dir: str | None = None
    every: Count = 100
    at: tuple[int, ...] = ()
    temporary: Count | None = None
    keep: Count | None = 3
    keep_every: Count | None = None
    keep_every_s: Positive | None = None
    keep_best: Count | None = None
    best_by: Literal["eval/loss_nats", "eval/bpb"] = "eval/loss_nats"
    # `async` is a word of Python's own, so the field cannot be written as others are.
    __annotations__["async"] = "bool"
    locals()["async"] = True
    busy: Literal["wait", "skip"] = "wait"
    on_error: Literal["stop", "go_on"] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dir is not None and not self.dir.strip():
            raise ValueError("checkpoint.dir='' must name a folder or be none; drop it")
        for step in self.at:
            if step < 0:
                raise ValueError(f"checkpoint.at={step} must be at least 0; drop it")
        if self.temporary is not None and self.temporary >= self.every:
            raise ValueError(
                f"checkpoint.temporary={self.temporary} must be below checkpoint.every={self.every}; "
                f"lower it or set checkpoint.temporary=none"
            )
        rules = {name: getattr(self, name) for name in ("keep_every", "keep_every_s", "keep_best")}
        for name, rule in rules.items():
            if rule is not None and self.keep is None:
                raise ValueError(
                    f"checkpoint.{name}={rule:g} has no effect with checkpoint.keep=none, all stay; drop one of them"
                )
        if self.busy == "skip" and not self.background:
            raise ValueError("checkpoint.busy=skip has no effect with checkpoint.async=false; drop one of them")

    @property
    def background(self) -> bool:
        """The field `async`."""
        return bool(getattr(self, "async"))


class Init(Checked, frozen=True):
    """What a new run begins with, instead of random weights; a run that goes on does not look at it.

    Attributes:
        path: a checkpoint, a run folder (its newest checkpoint), or .safetensors, as a path or, but for the last, a URL;
            none = random weights.
        take: "weights" = parameters alone; "all" = the whole state, which goes on from its update with this run's folder.
        names: other names of parameters there, as "THERE=HERE"; * stands for a part of a dotted name, ** for any rest.
    """

    _at: ClassVar[str] = "init."
    path: str | None = None
    take: Literal["weights", "all"] = "weights"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and not self.path.strip():
            raise ValueError("init.path='' must name a checkpoint, a run folder or .safetensors, or be none; drop it")
        if self.path is None and (self.take != "weights" or self.names):
            raise ValueError("init.path=none must be given with init.take or init.names; set init.path")
        if self.take == "all" and self.names:
            raise ValueError("init.names has no effect with init.take=all, a state keeps its names; drop one of them")
        for text in self.names:
            if text.count("=") != 1:
                raise ValueError(f"init.names={text!r} must read THERE=HERE; write one = between the two names")


class Convert(Checked, frozen=True):
    """What the verb `convert` makes of what.

    Attributes:
        source: a checkpoint, a run folder (its newest checkpoint), or .safetensors; or a list of several, whose parameters
            are averaged; none = the newest checkpoint of run.dir.
        target: a file .safetensors, or a new folder for a checkpoint.
        what: "params" = parameters alone; "average" = their average, named as they are; "all" = every leaf of the state.
        names: other names in the target, as "SOURCE=TARGET"; * stands for a part of a dotted name, ** for any rest.
        most_mb: megabytes in one .safetensors file, more makes several and an index; none = one file.
    """

    _at: ClassVar[str] = "convert."
    source: str | tuple[str, ...] | None = None
    target: str = ""
    what: Literal["params", "average", "all"] = "params"
    names: tuple[str, ...] = ()
    most_mb: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.names:
            if text.count("=") != 1:
                raise ValueError(f"convert.names={text!r} must read SOURCE=TARGET; write one = between the two names")


class Eval(Checked, frozen=True):
    """Held-out evaluation.

    Attributes:
        every: updates between evaluations; 0 = never.
        rows: rows of held-out text per evaluation, evenly spaced; none = all of it.
        weights: "params" or "average" (of optim.average, or of optim.rule=schedule_free); none = "params", with
            "schedule_free" its "average".
    """

    _at: ClassVar[str] = "eval."
    every: Natural = 100
    rows: Count | None = 256
    weights: Literal["params", "average"] | None = None


class Log(Checked, frozen=True):
    """Metric lines.

    Attributes:
        every: updates between lines of metrics.jsonl.
    """

    _at: ClassVar[str] = "log."
    every: Count = 10


class Inspect(Checked, frozen=True):
    """What the verb `inspect` shows.

    Attributes:
        rows: rows of the next batch, as text; 0 = the checkpoint.
        path: a checkpoint, or a folder with one in it, as a path or URL; none = the run's newest.
    """

    _at: ClassVar[str] = "inspect."
    rows: Natural = 0
    path: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None and not self.path.strip():
            raise ValueError("inspect.path='' must name a checkpoint or be none; drop it")
        if self.rows and self.path is not None:
            raise ValueError("inspect.rows must not go with inspect.path, rows are those of run.dir; drop one")


class Check(Checked, frozen=True):
    """What the verb `check` holds the laws of a training state against.

    Attributes:
        case: a function of no arguments that gives (step, state, batches), as module:function or FILE.py:function.
        laws: which laws; none = all.
    """

    _at: ClassVar[str] = "check."
    case: str = ""
    laws: tuple[LawName, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.laws == ():
            raise ValueError("check.laws=[] must name a law or be none; drop it")


class Sample(Checked, frozen=True):
    """Text the model writes at the end of a run and in `sample`.

    Attributes:
        prompt: text to go on from.
        length: tokens to write; 0 = none.
        temperature: softmax temperature; 0 = always the likeliest token.
        top_k: only the likeliest k tokens; none = all.
        seed: key of the draws.
    """

    _at: ClassVar[str] = "sample."
    prompt: str = "def "
    length: Natural = 240
    temperature: Annotated[float, Meta(ge=0)] = 0.8
    top_k: Count | None = 50
    seed: Annotated[int, Meta(ge=0, lt=2**63)] = 0


DEFAULT_STEPS = 300  # about two minutes of the default model on two cores


class Config(Checked, frozen=True):
    """Everything a launch of `python -m lib.run` can be told.

    Attributes:
        run: folder, seed, threads.
        steps: updates of the whole run; none = from `tokens`, else 300.
        tokens: targets of the whole run, instead of `steps`.
        stop: this launch ends after this update, saved, exit 0; the schedule does not move.
        load: "latest" = the newest checkpoint, a damaged one is an error; "older" = pass over damaged ones; or the number of
            an update, whose checkpoint is taken; training goes on from an older one only when those beyond it are gone.
        resume: "if_available" = go on with the run in run.dir if there is one; "always" = there must be one; "never" =
            there must be none.
        init: what a new run begins with.
        compile: "on", "off" or "auto" (on when the run is long enough to earn it; decided once and kept).
        model: language model.
        batch: shape of an update.
        data: text.
        optim: optimizer.
        schedule: learning-rate schedule.
        precision: dtypes.
        scale: loss scale.
        loss: what is descended.
        guard: refusal of bad updates.
        checkpoint: when to save.
        eval: held-out evaluation.
        log: metric lines.
        sample: text at the end.
        inspect: what the verb `inspect` shows.
        convert: what the verb `convert` makes.
        check: what the verb `check` looks at.
    """

    run: Run = Run()
    steps: Count | None = None
    tokens: Count | None = None
    stop: Natural | None = None
    load: Literal["latest", "older"] | Natural = "latest"
    resume: Literal["if_available", "always", "never"] = "if_available"
    init: Init = Init()
    compile: Literal["auto", "on", "off"] = "auto"
    model: Model = Model()
    batch: Batch = Batch()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    scale: Scale = Scale()
    loss: Loss = Loss()
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    log: Log = Log()
    sample: Sample = Sample()
    inspect: Inspect = Inspect()
    convert: Convert = Convert()
    check: Check = Check()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"steps={self.steps} must not go with tokens={self.tokens}, they say the same; drop one")
        if self.checkpoint.keep_best is not None and not self.eval.every:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} must go with evaluations; set eval.every=100"
            )
        if self.eval.weights == "average" and self.optim.average is None and self.optim.rule != "schedule_free":
            raise ValueError(
                "eval.weights=average must have an average; set optim.average=0.999 or eval.weights=params"
            )
        if self.data.tokenizer == "bytes" and self.model.vocab < 260:
            raise ValueError(
                f"model.vocab={self.model.vocab} must be at least 260 (bytes and special ids); drop model.vocab"
            )
        if self.checkpoint.sets("best_by") and self.checkpoint.keep_best is None:
            raise ValueError(
                f"checkpoint.best_by={self.checkpoint.best_by} must go with checkpoint.keep_best; set checkpoint.keep_best=3"
            )
        recipe_of(self)  # the combinations of the recipe, before any file is made


def run_steps(config: Config) -> int:
    """Updates of the whole run: `steps`, or as many as `tokens` targets need, or the default."""
    if config.tokens is None:
        return DEFAULT_STEPS if config.steps is None else config.steps
    begun, rows, left = 0, config.batch.rows, -(-config.tokens // config.batch.length)
    for step, later in changes("batch.rows_at", config.batch.rows_at):
        if left <= (step - begun) * rows:
            break
        left -= (step - begun) * rows
        begun, rows = step, later
    return begun + -(-left // rows)


def run_reach(config: Config) -> int:
    """How far the run takes its schedule: updates, or tokens if it counts those."""
    if config.schedule.counts != "tokens":
        return run_steps(config)
    if config.steps is None and config.tokens is not None:
        return config.tokens
    steps, rows, begun, reach = run_steps(config), config.batch.rows, 0, 0
    for step, later in changes("batch.rows_at", config.batch.rows_at):
        reach += (min(step, steps) - begun) * rows
        begun, rows = min(step, steps), later
    return (reach + (steps - begun) * rows) * config.batch.length


def recipe_of(config: Config, data: DataIdentity = DataIdentity()) -> Recipe:
    """The static part of `config`, with the schedule's length and warm-up settled.

    Raises:
        ValueError: the parts do not go together.
    """
    shape = config.schedule
    each = config.batch.rows * config.batch.length if shape.counts == "tokens" else 1
    length = run_reach(config) if shape.length is None else shape.length
    warmup = min(30 * each, length // 10) if shape.warmup is None else shape.warmup
    if shape.warmup is None and shape.shape in ("range", "stages"):
        warmup = 0
    if shape.has_length:
        shape = msgspec.structs.replace(shape, length=length)
    return Recipe(
        model=config.model,
        batch=config.batch,
        optim=config.optim,
        schedule=msgspec.structs.replace(shape, warmup=warmup),
        precision=config.precision,
        scale=config.scale,
        loss=config.loss,
        guard=config.guard,
        data=data,
    )


def load_config(*layers: Any) -> Config:
    """Lay values over the defaults, later ones on top, and check the result.

    Args:
        layers: each one a mapping; a text `key=value` or `~key` (back to the default); an object with `suffix` and
            `read_text()`, such as a `pathlib.Path`, holding TOML, YAML or JSON; or a list of these.

    Returns:
        The config.

    Raises:
        ValueError: an unknown key, a value of the wrong type or out of range, or values that do not go together.

    >>> load_config({"optim": {"lr": 0.001}}, "batch.rows=8").batch.rows
    8
    """
    config: Config = as_struct(Config, layered(Config, layers))
    return config
