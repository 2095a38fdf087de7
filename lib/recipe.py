"""What is static in a run and travels with its state: a `Recipe` of frozen values.

A value that exists is a valid one: ranges and combinations are checked when a Struct is made, whoever makes it, so nothing
can be found wrong at step 900. A state read from disk is complete in itself, since its recipe is in it. Imports no torch.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from lib.rates import Schedule
from lib.rules import MOST_LR, Group, Optim, groups_of
from lib.values import Checked, Count, Natural, Positive, Share

__all__ = [
    "MOST_LR",
    "Batch",
    "Checked",
    "Count",
    "DataIdentity",
    "Group",
    "Guard",
    "Loss",
    "Model",
    "Natural",
    "Optim",
    "Positive",
    "Precision",
    "Recipe",
    "Scale",
    "Schedule",
    "Share",
    "SourceIdentity",
    "changes",
    "groups_of",
]


class Model(Checked, frozen=True):
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


class Batch(Checked, frozen=True):
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


class Loss(Checked, frozen=True):
    """What a language model descends. What is reported and evaluated is the cross-entropy alone, whatever stands here.

    Attributes:
        z: weight of z-loss, the square of the log of the softmax's denominator; 1e-5 holds scores near 0.
        smoothing: share of each target that is spread over all ids.
        chunk: positions whose scores over the vocabulary are held at a time; none = all of a micro-batch. Changes memory, and the
            result by rounding only.
    """

    _at: ClassVar[str] = "loss."
    z: Annotated[float, Meta(ge=0)] = 0.0
    smoothing: Share = 0.0
    chunk: Count | None = None


class Precision(Checked, frozen=True):
    """Dtypes: master weights, moments and sums are always fp32.

    Attributes:
        compute: dtype of matrix products and activations.
    """

    _at: ClassVar[str] = "precision."
    compute: Literal["fp32", "bf16", "fp16"] = "fp32"


class Scale(Checked, frozen=True):
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


class Guard(Checked, frozen=True):
    """What protects a run from bad updates. Non-finite gradients are always refused.

    Attributes:
        patience: refused updates in a row after which the run stops as diverged (exit 4).
        window: accepted losses and gradient norms the spike guard remembers; 0 = no spike guard.
        sigma: an update whose loss or norm is more than this many standard deviations above their mean is a spike.
        spikes: "refuse" them, or "count" them only; either way `spike_score` in the metrics is their share.
    """

    _at: ClassVar[str] = "guard."
    patience: Count = 10
    window: Natural = 0
    sigma: Positive = 6.0
    spikes: Literal["refuse", "count"] = "refuse"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sigma", "spikes"):
            if self.sets(name) and not self.window:
                raise ValueError(f"guard.{name}={getattr(self, name)} must go with guard.window; set guard.window=128")
        if 0 < self.window < 4:
            raise ValueError(f"guard.window={self.window} must be 0 (off) or at least 4; set guard.window=128")


class SourceIdentity(Checked, frozen=True):
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


class DataIdentity(Checked, frozen=True):
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


class Recipe(Checked, frozen=True):
    """All that is static in a training state; the non-tensor leaf `state["recipe"]`.

    Attributes:
        model: the language model; none = parameters and loss are the caller's own (`make_train_step`).
        batch: shape of an update.
        optim: optimizer.
        schedule: learning-rate schedule.
        precision: dtypes.
        scale: loss scale.
        loss: what is descended.
        guard: refusal of bad updates.
        data: identity of the token stream.
    """

    model: Model | None = Model()
    batch: Batch = Batch()
    optim: Optim = Optim()
    schedule: Schedule = Schedule(shape="constant")
    precision: Precision = Precision()
    scale: Scale = Scale()
    loss: Loss = Loss()
    guard: Guard = Guard()
    data: DataIdentity = DataIdentity()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule.has_length and self.schedule.length is None:
            raise ValueError(
                f"schedule.length=none must be set for schedule.shape={self.schedule.shape}; set it to the updates of the run"
            )
        if self.precision.compute == "fp16" and self.scale.dynamic is False:
            raise ValueError(
                "scale.dynamic=false must not go with precision.compute=fp16 (small gradients vanish); "
                "leave scale.dynamic out or use bf16"
            )


def _fitting_heads(width: int) -> list[int]:
    return [n for n in range(1, width // 2 + 1) if width % n == 0 and (width // n) % 2 == 0]
