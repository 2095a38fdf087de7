"""Every choice a run can make, as frozen values: what is static (`Recipe`) and what the driver does around it (`Config`).

A value that exists is a valid one: ranges and combinations are checked when a Struct is made, whoever makes it, so nothing
can be found wrong at step 900. A `Recipe` travels with the state, so a state read from disk is complete in itself.
Imports no torch, so a misspelt key is refused at once.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from lib.settings import as_struct, check_ranges, layered

__all__ = [
    "HELDOUT",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "DataIdentity",
    "Eval",
    "Guard",
    "Inspect",
    "Log",
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

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
HELDOUT = "heldout"  # what the files of `data.heldout` are called among the sources
_DTYPE = re.compile(r"[<>=]?[iu][1248]|u?int(8|16|32|64)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
Share = Annotated[float, Meta(ge=0, lt=1)]


class _Checked(Struct, frozen=True, forbid_unknown_fields=True):
    """Checks ranges on construction; `_at` is where the Struct stands in a config, for the errors."""

    _at: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_ranges(self, self._at)


class Model(_Checked, frozen=True):
    """A pre-norm transformer language model.

    Attributes:
        width: model width d.
        depth: number of blocks l.
        heads: query heads h; `width` is a multiple of it, with an even head width (rotary pairs).
        kv_heads: key-value heads g (grouped-query attention); none = as many as `heads`.
        inner: inner width f of the SwiGLU; none = 8/3 of `width`, rounded up to a multiple of 32.
        vocab: number of token ids v; 260 = bytes and four special ids.
        dropout: rate on each residual branch and on the embedding.
        tied: the output head uses the embedding's weights.
        theta: base of the rotary angles.
        eps: added to the mean square in RMSNorm.
        documents: attention stays inside a document (by `segments`); false = plain causal attention.
        layers: "unroll" (fastest step) or "scan" (compile time does not grow with depth).
    """

    _at: ClassVar[str] = "model."
    width: Count = 128
    depth: Count = 4
    heads: Count = 4
    kv_heads: Count | None = None
    inner: Count | None = None
    vocab: Annotated[int, Meta(ge=2)] = 260
    dropout: Share = 0.0
    tied: bool = False
    theta: Positive = 10_000.0
    eps: Positive = 1e-5
    documents: bool = True
    layers: Literal["unroll", "scan"] = "unroll"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"model.heads={self.heads} must divide model.width={self.width} into even head widths; "
                + (f"take heads from {fit}" if (fit := _fitting_heads(self.width)) else "make the width even")
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}; "
                f"take kv_heads from {[n for n in range(1, self.heads + 1) if self.heads % n == 0]}"
            )


class Batch(_Checked, frozen=True):
    """The shape of one update, and how documents fill its rows.

    Attributes:
        rows: sequences per update, over all ranks.
        length: positions per sequence.
        micro: micro-batches an update is cut into; divides `rows`. Changes memory, not the result.
        mode: "concat" = documents end to end, cut into rows; "pack" = whole documents packed into rows; "pad" = one
            document a row. Longer documents go on in a further row; nothing is lost in any of them.
        buckets: for "pad": lengths a batch may have, rising, the last one `length`; each is compiled once; none = `length`
            and its half and quarter.
        rows_at: other numbers of rows from later updates on, as "STEP:ROWS", each a multiple of `micro`.
        length_at: rows cut shorter until later updates, as "STEP:LENGTH", each a divisor of `length`; an update keeps its
            ids and has more rows for it.
        shuffle: rows come in an order drawn anew for each pass; false = as they lie in the text.
        repeats: a row in which up to 13 ids repeat this often in a row is masked, not trained on; none = no such filter.
    """

    _at: ClassVar[str] = "batch."
    rows: Count = 16
    length: Annotated[int, Meta(ge=2)] = 256
    micro: Count = 1
    mode: Literal["concat", "pack", "pad"] = "concat"
    buckets: tuple[int, ...] | None = None
    rows_at: tuple[str, ...] = ()
    length_at: tuple[str, ...] = ()
    shuffle: bool = True
    repeats: Annotated[int, Meta(ge=3)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % self.micro:
            raise ValueError(
                f"batch.rows={self.rows} must be a multiple of batch.micro={self.micro}; "
                f"set batch.rows={-(-self.rows // self.micro) * self.micro} or another batch.micro"
            )
        for step, rows in changes("batch.rows_at", self.rows_at):
            if rows % self.micro:
                raise ValueError(
                    f"batch.rows_at={step}:{rows} must be a multiple of batch.micro={self.micro}; "
                    f"write {step}:{-(-rows // self.micro) * self.micro}"
                )
        for step, length in changes("batch.length_at", self.length_at):
            if self.length % length or length < 2:
                raise ValueError(
                    f"batch.length_at={step}:{length} must divide batch.length={self.length} and be at least 2; "
                    f"take one from {[n for n in range(2, self.length + 1) if self.length % n == 0]}"
                )
        if self.rows * self.length > 1 << 31:
            raise ValueError(
                f"batch.rows={self.rows} of batch.length={self.length} must be at most 2**31 ids together; lower one"
            )
        if self.repeats is not None and self.repeats > self.length:
            raise ValueError(
                f"batch.repeats={self.repeats} must be at most batch.length={self.length}, what a row holds; lower it"
            )
        if self.length_at and self.mode == "pad":
            raise ValueError(
                "batch.length_at must not go with batch.mode=pad (its rows have several lengths); drop one"
            )
        if self.buckets is not None:
            _check_buckets(self)


def _check_buckets(batch: Batch) -> None:
    buckets = batch.buckets or ()
    if batch.mode != "pad":
        raise ValueError(f"batch.buckets={list(buckets)} must go with batch.mode=pad; set it or drop batch.buckets")
    if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 2 or buckets[-1] != batch.length:
        raise ValueError(
            f"batch.buckets={list(buckets)} must rise from at least 2 to batch.length={batch.length}; "
            f"write [{batch.length // 2}, {batch.length}]"
        )


def changes(where: str, texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Read `STEP:VALUE` texts: pairs of whole numbers, steps rising, values at least 1.

    Raises:
        ValueError: they are not.

    >>> changes("batch.rows_at", ("100:32", "200:64"))
    ((100, 32), (200, 64))
    """
    pairs: list[tuple[int, int]] = []
    for text in texts:
        parts = text.split(":")
        if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts) or int(parts[1]) < 1:
            raise ValueError(f"{where}={text} must be STEP:VALUE, two whole numbers; write it like 1000:32")
        pairs.append((int(parts[0]), int(parts[1])))
        if len(pairs) > 1 and pairs[-1][0] <= pairs[-2][0]:
            raise ValueError(
                f"{where}={text} must come at a later step than {texts[len(pairs) - 2]}; sort them by step"
            )
    return tuple(pairs)


class Optim(_Checked, frozen=True):
    """The optimizer.

    Attributes:
        rule: update rule.
        lr: peak learning rate.
        decay: decoupled weight decay, multiplied by the learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        clip: greatest global gradient norm; none = no clipping.
        no_decay: patterns (`*`, `?`) of parameter paths without weight decay; none = vectors and scalars (norms, biases).
        average: decay of an exponential moving average of the parameters; none = no average is kept.
    """

    _at: ClassVar[str] = "optim."
    rule: Literal["adamw"] = "adamw"
    lr: Positive = 2e-3
    decay: Annotated[float, Meta(ge=0)] = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Positive = 1e-8
    clip: Positive | None = 1.0
    no_decay: tuple[str, ...] | None = None
    average: Share | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.no_decay, str):
            raise ValueError(f"optim.no_decay={self.no_decay!r} must be a list of texts; write [{self.no_decay!r}]")


class Schedule(_Checked, frozen=True):
    """The learning rate as a closed form of the update's number u, from 1.

    Attributes:
        shape: after the warm-up: "constant", or "linear" or "cosine" down to the floor at `length` and flat beyond.
        warmup: updates of linear warm-up, lr * u / warmup; none = in a run a tenth of its length, 30 at most, else 0.
        length: updates until the floor; none = as many as the run has when it starts. Never derived again on resume.
        floor: last learning rate, as a fraction of the peak, in [0, 1].
        counts: what u counts: "step" (every call, refused updates too) or "applied" (applied updates only).
    """

    _at: ClassVar[str] = "schedule."
    shape: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: Natural | None = None
    length: Count | None = None
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.1
    counts: Literal["step", "applied"] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and (self.warmup or 0) >= self.length:
            raise ValueError(
                f"schedule.warmup={self.warmup} must be in [0, schedule.length={self.length}); "
                f"lower schedule.warmup or raise steps"
            )


class Precision(_Checked, frozen=True):
    """Dtypes: master weights, moments and sums are always fp32.

    Attributes:
        compute: dtype of matrix products and activations.
    """

    _at: ClassVar[str] = "precision."
    compute: Literal["fp32", "bf16", "fp16"] = "fp32"


class Scale(_Checked, frozen=True):
    """The loss scale. Powers of two, so that scaling is exact.

    Attributes:
        dynamic: back off on overflow and grow after good steps; none = only for fp16 compute.
        initial: scale at step 0; none = 65536 when dynamic, else 1.
        growth: factor after `every` good steps in a row.
        backoff: factor after an overflow.
        every: good steps in a row before the scale grows.
        lowest: the scale never falls below.
        highest: the scale never grows beyond.
    """

    _at: ClassVar[str] = "scale."
    dynamic: bool | None = None
    initial: Positive | None = None
    growth: Annotated[float, Meta(gt=1)] = 2.0
    backoff: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    every: Count = 2000
    lowest: Positive = 2.0**-14
    highest: Positive = 2.0**32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("initial", "growth", "backoff", "lowest", "highest"):
            value = getattr(self, name)
            if value is not None and math.frexp(value)[0] != 0.5:
                raise ValueError(
                    f"scale.{name}={value} must be a power of two (other scales are not exact); "
                    f"take {2.0 ** round(math.log2(value))!r}"
                )
        if not self.lowest <= (1.0 if self.initial is None else self.initial) <= self.highest:
            raise ValueError(
                f"scale.initial={self.initial} must be in [scale.lowest={self.lowest:g}, scale.highest={self.highest:g}]; "
                f"widen the bounds"
            )


class Guard(_Checked, frozen=True):
    """What protects a run from bad updates. Non-finite gradients are always refused.

    Attributes:
        patience: refused updates in a row after which the run stops as diverged (exit 4).
        window: accepted losses and gradient norms the spike guard remembers; 0 = no spike guard.
        sigma: an update whose loss or norm is more than this many standard deviations above their mean is refused.
    """

    _at: ClassVar[str] = "guard."
    patience: Count = 10
    window: Natural = 0
    sigma: Positive = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.window < 4:
            raise ValueError(f"guard.window={self.window} must be 0 (off) or at least 4; set guard.window=128")


class SourceIdentity(_Checked, frozen=True):
    """What one source of the ids is: content, never paths or times.

    Attributes:
        name: its name; its order of rows is drawn by it.
        digest: digest of its files (relative names, sizes, content digests).
        weight: its share of the rows, relative to the other sources'.
        reading: how files become documents, where it is not the default.
        holdout_by: "document" (keyed hash of the content) or "tail" (the last share of the text).
        tokens: ids it trains on.
    """

    _at: ClassVar[str] = "data.sources.NAME."
    name: str = "text"
    digest: str = ""
    weight: Positive = 1.0
    reading: str = ""
    holdout_by: Literal["document", "tail"] = "document"
    tokens: Natural = 0


class DataIdentity(_Checked, frozen=True):
    """Which tokens batch n is cut from: content, never paths or times.

    Attributes:
        tokenizer: name and digest of the tokenizer, and its marks.
        holdout: share of documents held out.
        heldout: digest of the files that are evaluated on instead; "" = there are none.
        sources: what each source is; none = batches come from elsewhere.
    """

    _at: ClassVar[str] = "data."
    tokenizer: str = ""
    holdout: Share = 0.0
    heldout: str = ""
    sources: tuple[SourceIdentity, ...] = ()


class Recipe(_Checked, frozen=True):
    """All that is static in a training state; the non-tensor leaf `state["recipe"]`.

    Attributes:
        model: the language model; none = parameters and loss are the caller's own (`make_train_step`).
        batch: shape of an update.
        optim: optimizer.
        schedule: learning-rate schedule.
        precision: dtypes.
        scale: loss scale.
        guard: refusal of bad updates.
        data: identity of the token stream.
    """

    model: Model | None = Model()
    batch: Batch = Batch()
    optim: Optim = Optim()
    schedule: Schedule = Schedule(shape="constant")
    precision: Precision = Precision()
    scale: Scale = Scale()
    guard: Guard = Guard()
    data: DataIdentity = DataIdentity()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.shape != "constant" and self.schedule.length is None:
            raise ValueError(
                f"schedule.length=none must be set for schedule.shape={self.schedule.shape}; set it to the updates of the run"
            )
        if self.precision.compute == "fp16" and self.scale.dynamic is False:
            raise ValueError(
                "scale.dynamic=false must not go with precision.compute=fp16 (small gradients vanish); "
                "leave scale.dynamic out or use bf16"
            )


class Run(_Checked, frozen=True):
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


class Source(_Checked, frozen=True):
    """One source of a mixture; what is none is as `data.` says.

    Attributes:
        path: files, folders or globs, local or remote (s3://...), or "stdlib:".
        weight: its share of the rows, relative to the other sources'.
        repeat: most passes over it that a run may make; a run that would make more is refused at its start; none = any.
        format: see `data.format`.
        split: see `data.split`.
        text_key: see `data.text_key`.
        id_key: see `data.id_key`.
        dtype: see `data.dtype`.
        template: see `data.template`.
        train_on: see `data.train_on`.
    """

    _at: ClassVar[str] = "data.sources.NAME."
    path: str | tuple[str, ...] = ""
    weight: Positive = 1.0
    repeat: Positive | None = None
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "npy", "bin"] | None = None
    split: Literal["file", "line", "block"] | None = None
    text_key: str | None = None
    id_key: str | None = None
    dtype: str | None = None
    template: str | None = None
    train_on: Literal["all", "assistant", "last"] | None = None


class Data(_Checked, frozen=True):
    """What is trained on.

    Attributes:
        path: files, folders or globs, local or remote (s3://...); "stdlib:" = the source of the running Python's standard
            library. Plain text, JSONL (.gz, .zst), Parquet, Arrow, token arrays (.npy, .bin).
        sources: instead of `path`, several sources by name, mixed by weight.
        holdout: share held out from training, for evaluation; none = 0.01, or nothing where `heldout` names files.
        holdout_by: "document" = by a keyed hash of each document, "tail" = the end of the text,
            "auto" = by document when there are at least 100.
        heldout: files to evaluate on instead. A file that is trained on too is refused; documents are counted.
        format: what the files are; "auto" = by their names, all unknown ones plain text.
        split: a plain text file is one document ("file"), or one for each "line", or one for each "block" of lines
            between blank ones.
        text_key: the field that holds the text, in JSONL, Parquet and Arrow.
        id_key: the field that names a record, shown by `inspect`; none = file and line.
        dtype: NumPy dtype of .bin files, such as "<u2", where no side-car says it.
        template: records are conversations, written by this template: chatml, llama2, llama3, mistral, alpaca, plain, or a
            .toml file of {role = [prefix, suffix]}; none = records are texts.
        train_on: which messages are trained on: "assistant" (each answer), "last" (the last answer) or "all".
        errors: a bad record stops the run, or is counted and passed over ("skip"); "replace" stops too but for bytes that are
            no UTF-8, which become U+FFFD.
        tokenizer: "bytes"; FILE.json (Hugging Face), FILE.tiktoken or tiktoken:NAME, FILE.model (SentencePiece);
            ids:VOCAB:EOS for token arrays alone.
        eos_token: the tokenizer's end mark, where it does not say.
        bos_token: the tokenizer's begin mark, where it does not say.
        add_bos: documents begin with the begin mark.
        add_eos: documents end with the end mark.
        cache: folder of the token stores; none = the user's cache folder.
        processes: processes that prepare text; none = as many as cores.
        workers: processes that make batches; 0 = a thread.
        ahead: batches made ahead of the step.
    """

    _at: ClassVar[str] = "data."
    path: str | tuple[str, ...] = "stdlib:"
    sources: dict[str, Source] = {}
    holdout: Share | None = None
    holdout_by: Literal["auto", "document", "tail"] = "auto"
    heldout: str | tuple[str, ...] | None = None
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "npy", "bin"] = "auto"
    split: Literal["file", "line", "block"] = "file"
    text_key: str = "text"
    id_key: str | None = None
    dtype: str | None = None
    template: str | None = None
    train_on: Literal["all", "assistant", "last"] = "assistant"
    errors: Literal["stop", "skip", "replace"] = "stop"
    tokenizer: str = "bytes"
    eos_token: str | None = None
    bos_token: str | None = None
    add_bos: bool = False
    add_eos: bool = True
    cache: str | None = None
    processes: Count | None = None
    workers: Natural = 0
    ahead: Natural = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, source in sources_of(self).items():
            _check_reading(f"data.sources.{name}" if self.sources else "data", source)
        for name, source in self.sources.items():
            at = f"data.sources.{name}"
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{at}: name must be of letters, digits, - and _ (it is a place in the state); rename it"
                )
            if not source.path:
                raise ValueError(f"{at}.path='' must name files, folders or globs; set it")
        if HELDOUT in self.sources:
            raise ValueError(f"data.sources.{HELDOUT}: the name is kept for data.heldout; rename the source")
        for key in ("heldout", "cache", "tokenizer"):
            if getattr(self, key) in ("", ()):
                raise ValueError(f"data.{key}='' must not be empty; give it or leave it out")
        if self.heldout is not None:
            for key, none in (("holdout", None), ("holdout_by", "auto")):
                if getattr(self, key) != none:
                    raise ValueError(
                        f"data.{key}={getattr(self, key)} must not go with data.heldout, which takes its place; drop one"
                    )
        kinds = {source.template for source in sources_of(self).values()}
        if kinds == {None} and self.train_on != "assistant":
            raise ValueError(f"data.train_on={self.train_on} must go with data.template; set it or drop data.train_on")
        if self.sources and self.path != Data.__struct_defaults__[0]:
            raise ValueError(f"data.path={self.path} must not go with data.sources; make it one of the sources")
        if not self.sources and not self.path:
            raise ValueError("data.path='' must name files, folders or globs; leave it out for stdlib:")


def _check_reading(at: str, source: Source) -> None:
    if source.dtype is not None and not _DTYPE.fullmatch(source.dtype):
        raise ValueError(
            f"{at}.dtype={source.dtype} must be a NumPy dtype of whole numbers; write one like <u2 or uint32"
        )
    for name in ("text_key", "id_key"):
        key = getattr(source, name)
        if key is not None and (not key or not key.isprintable() or any(mark in key for mark in '"\\')):
            raise ValueError(
                f"{at}.{name}={key!r} must be a field's name without quotes or backslashes; rename the field"
            )
    if source.text_key == source.id_key:
        raise ValueError(
            f"{at}.id_key={source.id_key} must be another field than text_key; name one that identifies records"
        )


def holdout_of(data: Data) -> float:
    """The share of documents that is held out."""
    return data.holdout if data.holdout is not None else 0.0 if data.heldout is not None else 0.01


def sources_of(data: Data) -> dict[str, Source]:
    """All sources by name, each with nothing left open: what it does not say is as `data` has it."""
    named = data.sources or {"text": Source(path=data.path)}
    shared = ("format", "split", "text_key", "id_key", "dtype", "template", "train_on")
    return {
        name: msgspec.structs.replace(
            source, **{key: getattr(data, key) for key in shared if getattr(source, key) is None}
        )
        for name, source in named.items()
    }


class Checkpoint(_Checked, frozen=True):
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


class Init(_Checked, frozen=True):
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


class Convert(_Checked, frozen=True):
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


class Eval(_Checked, frozen=True):
    """Held-out evaluation.

    Attributes:
        every: updates between evaluations; 0 = never.
        rows: rows of held-out text per evaluation, evenly spaced; none = all of it.
        weights: "params" or "average" (needs optim.average).
    """

    _at: ClassVar[str] = "eval."
    every: Natural = 100
    rows: Count | None = 256
    weights: Literal["params", "average"] = "params"


class Log(_Checked, frozen=True):
    """Metric lines.

    Attributes:
        every: updates between lines of metrics.jsonl.
    """

    _at: ClassVar[str] = "log."
    every: Count = 10


class Inspect(_Checked, frozen=True):
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


class Sample(_Checked, frozen=True):
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


class Config(_Checked, frozen=True):
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
        guard: refusal of bad updates.
        checkpoint: when to save.
        eval: held-out evaluation.
        log: metric lines.
        sample: text at the end.
        inspect: what the verb `inspect` shows.
        convert: what the verb `convert` makes.
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
    guard: Guard = Guard()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    log: Log = Log()
    sample: Sample = Sample()
    inspect: Inspect = Inspect()
    convert: Convert = Convert()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"steps={self.steps} must not go with tokens={self.tokens}, they say the same; drop one")
        if self.checkpoint.keep_best is not None and not self.eval.every:
            raise ValueError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} must go with evaluations; set eval.every=100"
            )
        if self.eval.weights == "average" and self.optim.average is None:
            raise ValueError(
                "eval.weights=average must have an average; set optim.average=0.999 or eval.weights=params"
            )
        if self.data.tokenizer == "bytes" and self.model.vocab < 260:
            raise ValueError(
                f"model.vocab={self.model.vocab} must be at least 260 (bytes and special ids); drop model.vocab"
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


def recipe_of(config: Config, data: DataIdentity = DataIdentity()) -> Recipe:
    """The static part of `config`, with the schedule's length and warm-up settled.

    Raises:
        ValueError: the parts do not go together.
    """
    shape = config.schedule
    length = run_steps(config) if shape.length is None else shape.length
    warmup = min(30, length // 10) if shape.warmup is None else shape.warmup
    return Recipe(
        model=config.model,
        batch=config.batch,
        optim=config.optim,
        schedule=msgspec.structs.replace(shape, length=length, warmup=warmup),
        precision=config.precision,
        scale=config.scale,
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


def _fitting_heads(width: int) -> list[int]:
    return [n for n in range(1, width // 2 + 1) if width % n == 0 and (width // n) % 2 == 0]
