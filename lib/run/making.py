"""From the settings of a source to the way its files become ids, and to the words that a recipe keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from lib.config import Config
from lib.data.chat import TEMPLATES, Template, template_of
from lib.settings import parse_text
from lib.sources import Data, Source, sources_of
from lib.store.coders import Coder, open_coder
from lib.store.corpus import Entry
from lib.store.formats import kind_of
from lib.store.making import Making
from lib.store.record import Reading

__all__ = ["check_effect", "coder_of", "making_of", "reading_words"]

_RECORDS = frozenset({"jsonl", "parquet", "arrow"})
# What a setting is by default, and the formats that are read by it.
_READ_BY: Mapping[str, tuple[str | None, frozenset[str]]] = {
    "split": ("file", frozenset({"text"})),
    "text_key": ("text", _RECORDS),
    "id_key": (None, _RECORDS),
    "template": (None, _RECORDS),
    "dtype": (None, frozenset({"bin"})),
}
_OPTIONS = ("format", "split", "text_key", "id_key", "dtype", "template", "train_on")


def making_of(data: Data, source: Source) -> Making:
    """How the files of a source become ids.

    Raises:
        ValueError: its template is none.
    """
    template = None if source.template is None else _template(source.template)
    return Making(
        reading=Reading(
            format=source.format or "auto",
            split=source.split or "file",
            text_key=source.text_key or "text",
            id_key=source.id_key,
            dtype=source.dtype,
            chat=template is not None,
            errors=data.errors,
        ),
        tokenizer=data.tokenizer,
        eos_token=data.eos_token,
        bos_token=data.bos_token,
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        template=template,
        train_on=source.train_on or "assistant",
    )


def check_effect(data: Data, found: Mapping[str, Sequence[Entry]]) -> None:
    """Refuse settings of how files are read that no file is read by.

    Args:
        data: the settings.
        found: the files of each source.

    Raises:
        ValueError: names the first one.
    """
    formats = {
        name: {kind_of(entry.name, source.format or "auto").format for entry in found[name]}
        for name, source in sources_of(data).items()
    }
    for key, (usual, read_by) in _READ_BY.items():
        for name, source in data.sources.items():
            if getattr(source, key) is not None and not formats[name] & read_by:
                raise ValueError(_no_effect(f"data.sources.{name}.{key}", getattr(source, key), read_by))
        open_to = [name for name in formats if not data.sources or getattr(data.sources[name], key) is None]
        if getattr(data, key) != usual and not any(formats[name] & read_by for name in open_to):
            raise ValueError(_no_effect(f"data.{key}", getattr(data, key), read_by))


def _no_effect(where: str, value: str, read_by: frozenset[str]) -> str:
    return f"{where}={value} must have a file that it is for ({', '.join(sorted(read_by))}), there is none; drop it"


def coder_of(data: Data) -> Coder:
    """Open the tokenizer that all sources share."""
    return open_coder(data.tokenizer, eos=data.eos_token, bos=data.bos_token, closed=data.add_eos)


def reading_words(config: Config) -> dict[str, str]:
    """For each source: how its files become ids, where it is not the default; what must stay as it is in a run."""
    usual = sources_of(Data())["text"]
    words = {}
    marks = {key: getattr(config.data, key) for key in ("add_bos", "add_eos", "errors")}
    for name, source in sources_of(config.data).items():
        some = [f"{key}={_shown(key, source)}" for key in _OPTIONS if getattr(source, key) != getattr(usual, key)]
        some += [f"{key}={str(value).lower()}" for key, value in marks.items() if value != getattr(Data(), key)]
        words[name] = " ".join(some)
    return words


def _shown(key: str, source: Source) -> str:
    value = getattr(source, key)
    if key == "template" and value not in TEMPLATES:  # a file may be moved, not changed
        return blake2b(repr(_template(value)).encode(), digest_size=8).hexdigest()
    return str(value)


def _template(name: str) -> Template:
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        if path.suffix.lower() == ".toml":
            raise ValueError(f"data.template={name} must be a file, there is none; correct its path or make it")
        raise ValueError(
            f"data.template={name} must be one of {', '.join(TEMPLATES)}, or a .toml file of role = [prefix, suffix]"
        )
    return template_of(parse_text(path.read_text(encoding="utf-8"), path.suffix, str(path)))
