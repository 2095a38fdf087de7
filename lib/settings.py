"""Texts and plain data into the Structs of a config, by the field's own type and never by guessing.

A value's text means what its field says: `1e-4` is a number where a number is wanted and text where text is wanted, so YAML
and the command line need no rules of their own. Unknown keys are errors with the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml
from msgspec import Meta

__all__ = ["NAME", "as_struct", "check_ranges", "field_paths", "layered", "parse_text", "type_name"]

NAME = "NAME"  # stands in a key for a name of the user's own

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\Z")


class _Text(str):
    """Text whose type is still open: from the command line or from YAML, where everything is text."""

    __slots__ = ()


class _Default:
    """Stands for `~key`: whatever the default is."""


def layered(kind: type, layers: Sequence[Any]) -> dict[str, Any]:
    """Merge layers (see `lib.config.load_config`) into one nested dict of raw values.

    Raises:
        ValueError: a layer is of no known form, a file does not parse, or `~key` names no field.
    """
    merged: dict[str, Any] = {}
    for layer in _flat(layers):
        if isinstance(layer, Mapping):
            _overlay(merged, layer)
        elif isinstance(layer, str):
            _overlay(merged, _override(kind, layer))
        elif hasattr(layer, "read_text"):
            _overlay(merged, parse_text(_read(layer), str(layer.suffix), str(layer)))
        else:
            raise ValueError(f"config layer={layer!r} must be a mapping, a `key=value` text or a path; convert it")
    return merged


def parse_text(text: str, suffix: str, where: str) -> dict[str, Any]:
    """Parse a config file's text by its suffix: .toml, .yaml, .yml or .json.

    Raises:
        ValueError: another suffix, a syntax error (with its place), or something else than a table at the top.
    """
    try:
        if suffix == ".toml":
            return tomllib.loads(text)
        if suffix == ".json":
            value = json.loads(text)
        elif suffix in (".yaml", ".yml"):
            value = _open(yaml.load(text, Loader=yaml.BaseLoader) or {})
        else:
            raise ValueError(f"{where}: suffix={suffix!r} must be .toml, .yaml, .yml or .json; rename the file")
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{where}: must parse as {suffix[1:]}, {' '.join(str(error).split())}; fix the file") from None
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: top level is {type(value).__name__}, must be a table of keys; write `key: value` lines"
        )
    return value


def as_struct(kind: type, values: Mapping[str, Any], at: str = "", root: type | None = None) -> Any:
    """Build the Struct `kind` from raw values, each turned into its field's type.

    Raises:
        ValueError: an unknown key (with the nearest one), a wrong type, or what the Struct itself refuses.
    """
    root = root or kind
    hints = get_type_hints(kind)
    for key in values:
        if key not in _fields(kind):
            raise ValueError(_unknown(root, f"{at}{key}"))
    given = {k: _value(hints[k], v, f"{at}{k}", root) for k, v in values.items() if not isinstance(v, _Default)}
    defaults = kind()
    for key, value in given.items():
        if isinstance(value, _Section):
            kept = {k: v for k, v in value.values.items() if not isinstance(v, _Default)}
            given[key] = as_struct(value.kind, {**_shallow(getattr(defaults, key)), **kept}, f"{at}{key}.", root)
        elif isinstance(value, _Named):
            given[key] = {name: _one(value.kind, one, f"{at}{key}.{name}.", root) for name, one in value.values.items()}
    return kind(**given)


def field_paths(kind: type, at: str = "") -> Iterator[str]:
    """All leaf keys of a config Struct, dotted, in order of declaration."""
    for name, hint in get_type_hints(kind).items():
        if name in _fields(kind):
            inner, named = _struct_in(hint), _named_in(hint)
            if named:
                yield from field_paths(named, f"{at}{name}.{NAME}.")
            else:
                yield from field_paths(inner, f"{at}{name}.") if inner else (f"{at}{name}",)


def type_name(hint: Any) -> str:
    """How a field's type is called in messages and in `--help`."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if _is_union(hint):
        return " or ".join(type_name(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        one = get_args(hint)[0]
        if get_origin(one) is Literal:
            return "list of " + ", ".join(map(str, get_args(one)))
        return "list of texts" if one is str else "list of whole numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def check_ranges(value: Any, at: str) -> None:
    """Check each field of a Struct against its `Meta` bounds, and that whole numbers fit where they go, into int64.

    Raises:
        ValueError: a field is out of range or not finite.
    """
    for name, hint in get_type_hints(type(value), include_extras=True).items():
        optional = [part for part in getattr(hint, "__args__", ()) if hasattr(part, "__metadata__")]
        bounds = getattr(hint if hasattr(hint, "__metadata__") or not optional else optional[0], "__metadata__", ())
        given = getattr(value, name)
        if any(get_origin(part) is Literal and given in get_args(part) for part in getattr(hint, "__args__", ())):
            continue  # a word that stands for itself beside a range of numbers
        for bound in bounds:
            _in_range(f"{at}{name}", given, bound)
        for number in given if isinstance(given, tuple) else (given,):
            if isinstance(number, int) and number >= 2**63:
                raise ValueError(f"{at}{name}={number} must be < 2**63; give one in range")


class _Section(msgspec.Struct, frozen=True):
    kind: type
    values: Mapping[str, Any]


class _Named(msgspec.Struct, frozen=True):
    """Sections under names of the user's own."""

    kind: type
    values: Mapping[str, Any]


def _one(kind: type, value: Any, at: str, root: type) -> Any:
    """One section under a name of the user's own."""
    kept = {key: each for key, each in value.items() if not isinstance(each, _Default)}
    try:
        return as_struct(kind, kept, at, root)
    except ValueError as error:  # the Struct knows its fields but not its name
        raise ValueError(str(error).replace(f"{getattr(kind, '_at', '')}", at)) from None


def _value(hint: Any, value: Any, where: str, root: type) -> Any:
    if named := _named_in(hint):
        values = {name: one for name, one in value.items() if not isinstance(one, _Default)} if _is_map(value) else None
        if values is None or not all(map(_is_map, values.values())):
            first = next(iter(_fields(named)))
            raise ValueError(f"{where}={value} must be sections of keys; write {where}.{NAME}.{first}=...")
        return _Named(named, values)
    inner = _struct_in(hint)
    if inner is not None:
        if isinstance(value, Mapping):
            return _Section(inner, value)
        first = next(iter(_fields(inner)))
        raise ValueError(f"{where}={value} must be a section of keys; write {where}.{first}=... or another key of it")
    kinds = get_args(hint) if _is_union(hint) else (hint,)
    for part in sorted(kinds, key=lambda k: k is str):  # text last: it would take what the others read better
        found, result = _scalar(part, value)
        if found:
            return result
    if isinstance(value, Mapping):
        raise ValueError(_unknown(root, f"{where}.{next(iter(value), '')}"))
    raise ValueError(f"{where}={value} must be {type_name(hint)}; change the value")


def _scalar(kind: Any, value: Any) -> tuple[bool, Any]:
    """(fits, value as `kind`). Open text is read by the kind; typed values must fit as they are."""
    text = str(value).strip() if isinstance(value, _Text) else None
    if kind is types.NoneType:
        return value is None or (isinstance(value, str) and value.strip() in ("none", "null")), None  # TOML has no none
    if kind is bool:
        return (text in ("true", "false"), text == "true") if text is not None else (isinstance(value, bool), value)
    if kind is int:
        return _integer(value, text)
    if kind is float:
        if text is not None:
            return (True, float(text)) if _NUMBER.match(text) and not _octal_like(text) else (False, None)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        return fits, float(value) if fits else None
    if kind is str:
        return isinstance(value, str), str(value)
    if get_origin(kind) is Literal:
        named = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else str(value).strip()
        named = {"true": "on", "false": "off"}.get(str(named), named) if "on" in get_args(kind) else named
        return named in get_args(kind), named
    if get_origin(kind) is tuple:
        items = _list_text(text) if text is not None else value
        if not isinstance(items, (list, tuple)):
            return False, None
        one = get_args(kind)[0]
        read = [_scalar(one, _Text(item) if isinstance(item, str) and one is int else item) for item in items]
        return all(found for found, _ in read), tuple(item for _, item in read)
    return False, None


def _in_range(where: str, value: Any, bound: Meta) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{where}={value!r} must be a number; give one")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}={value} must be a finite number; give one")
    rules = (
        (bound.ge is None or value >= (bound.ge or 0), f">= {bound.ge}"),
        (bound.gt is None or value > (bound.gt or 0), f"> {bound.gt}"),
        (bound.le is None or value <= (bound.le or 0), f"<= {bound.le}"),
        (bound.lt is None or value < (bound.lt or 0), f"< {bound.lt}"),
    )
    if not all(holds for holds, _ in rules):
        wanted = " and ".join(text for _, text in rules if not text.endswith("None"))
        hint = "; set optim.clip=none to turn clipping off" if where == "optim.clip" else "; give one in range"
        raise ValueError(f"{where}={value} must be {wanted}{hint}")


def _integer(value: Any, text: str | None) -> tuple[bool, Any]:
    """Whole numbers; `1e3` and `10.0` are whole too, `1.5`, `010` and `true` are not."""
    if text is not None:
        if _INTEGER.match(text):
            return True, int(text)
        if not _NUMBER.match(text) or _octal_like(text):
            return False, None
        value = float(text)
    if isinstance(value, float):
        return value.is_integer(), int(value) if value.is_integer() else None
    return isinstance(value, int) and not isinstance(value, bool), value


def _octal_like(text: str) -> bool:
    digits = text.lstrip("+-")
    return len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()


def _list_text(text: str) -> Any:
    """`[a, b]` on the command line, JSON or bare words; no brackets = no list."""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return [item.strip() for item in text[1:-1].split(",") if item.strip()]


def _override(kind: type, text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if text.startswith("~") and not equals:
        leaf: Any = _Default()
        key = key[1:]
    elif equals and key:
        leaf = _Text(value)
    else:
        raise ValueError(f"{text!r} must be key=value or ~key; for a file give its path with .toml, .yaml or .json")
    if not _known(kind, key):
        raise ValueError(_unknown(kind, key))
    for part in reversed(key.split(".")):
        leaf = {part: leaf}
    return dict(leaf)


def _known(kind: type, key: str) -> bool:
    """Whether this is a key, or a section of keys; a name of the user's own fits any name."""
    parts = key.split(".")
    for path in field_paths(kind):
        wanted = path.split(".")[: len(parts)]
        if len(wanted) == len(parts) and all(a in (b, NAME) for a, b in zip(wanted, parts, strict=True)) and all(parts):
            return True
    return False


def _unknown(root: type, key: str) -> str:
    known = list(field_paths(root))
    same = [path for path in known if path.rpartition(".")[2] == key.rpartition(".")[2].replace("-", "_")]
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.5)
    tails = {path.rpartition(".")[2]: path for path in known}
    tail = difflib.get_close_matches(key.rpartition(".")[2], list(tails), n=1, cutoff=0.7)
    best = (same[:1] if "." not in key else []) or near or same[:1] or [tails[t] for t in tail]
    fix = f"did you mean `{best[0]}`?" if best else "see --help for all keys"
    return f"{key}: unknown key, must be one of the config's; {fix}"


def _read(source: Any) -> str:
    try:
        return str(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ValueError(f"{source}: {cause}, must be a readable config file; give the path of one") from None


def _overlay(base: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _overlay(base[key], value)
        else:
            base[key] = {} if isinstance(value, Mapping) else value
            if isinstance(value, Mapping):
                _overlay(base[key], value)


def _open(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _open(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_open(v) for v in value]
    return _Text("none" if value in ("", "~") else value)


def _flat(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if isinstance(layer, (list, tuple)):
            yield from _flat(layer)
        else:
            yield layer


def _struct_in(hint: Any) -> Any:
    parts = get_args(hint) if _is_union(hint) else (hint,)
    return next((p for p in parts if isinstance(p, type) and issubclass(p, msgspec.Struct)), None)


def _named_in(hint: Any) -> Any:
    """The Struct of a field that holds sections under names of the user's own: `dict[str, Struct]`."""
    return get_args(hint)[1] if get_origin(hint) is dict else None


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(kind.__struct_fields__)


def _shallow(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _fields(type(value))}
