"""Where text comes from and how it is read: the choices of `data.*`. Imports no torch."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

import msgspec

from lib.recipe import Checked, Count, Natural, Positive, Share

__all__ = [
    "HELDOUT",
    "Data",
    "Source",
    "holdout_of",
    "sources_of",
]

HELDOUT = "heldout"  # what the files of `data.heldout` are called among the sources
_DTYPE = re.compile(r"[<>=]?[iu][1248]|u?int(8|16|32|64)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class Source(Checked, frozen=True):
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


class Data(Checked, frozen=True):
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
    sources: dict[str, Source] = {}  # noqa: RUF012 (an empty one is made anew for each Struct)
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
