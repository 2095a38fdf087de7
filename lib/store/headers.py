"""Where the ids of a token file are and what they are: by a .npy header, by a side-car, or by a setting; never guessed.

Whatever contradicts these is an error: a size, a count, a vocabulary, another dtype.
"""

from __future__ import annotations

from tokenize import TokenError
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.lib import format as npy

from lib.errors import DataError
from lib.store.names import shown
from lib.store.remote import binary, exists, said

__all__ = ["Header", "SideCar", "header_of", "side_car_of"]


class SideCar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a raw token file holds, as the JSON file beside it says.

    Attributes:
        dtype: NumPy dtype of an id, with its byte order ("<u2").
        count: how many ids there are; none = as many as fit.
        vocab: ids are below it.
        tokenizer: name of the tokenizer that made the ids.
    """

    dtype: str
    count: int | None = None
    vocab: int | None = None
    tokenizer: str | None = None


class Header(NamedTuple):
    """Where the ids of a file are.

    Attributes:
        dtype: of an id.
        start: byte of the first one.
        length: how many there are.
        stated: whether the dtype is said by the file rather than by a setting.
    """

    dtype: np.dtype[Any]
    start: int
    length: int
    stated: bool


def header_of(path: str, form: str, dtype: str | None, vocab: int | None) -> Header:
    """Find out where the ids of a token file are.

    Args:
        path: the file.
        form: "npy" or "bin".
        dtype: what the setting says of a raw file.
        vocab: how many ids the tokenizer has; none = any.

    Raises:
        ValueError: `dtype` is no integer dtype.
        DataError: the file cannot be read, or is not what it is said to be.
    """
    return _npy(path) if form == "npy" else _raw(path, dtype, vocab)


def side_car_of(path: str) -> SideCar | None:
    """Read the side-car of a raw token file; none = it has none.

    Raises:
        DataError: it is not one.
    """
    if not exists(f"{path}.json"):
        return None
    with binary(f"{path}.json") as file:
        try:
            return msgspec.json.decode(file.read(), type=SideCar)
        except (msgspec.DecodeError, UnicodeError) as error:
            want = '{"dtype": "<u2"} with "count", "vocab", "tokenizer" if known'
            raise DataError(f"{shown(path)}.json: {said(error)}, must be {want}; correct it") from None


def _npy(path: str) -> Header:
    with binary(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        try:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
        except (ValueError, EOFError, SyntaxError, TokenError) as error:  # NumPy parses the header as Python
            why = f"no .npy file ({said(error)}), must begin with a .npy header"
            raise DataError(f"{shown(path)}: {why}; save it with numpy.save, or name raw ids .bin") from None
        start = file.tell()
    if dtype.kind not in "iu":
        raise DataError(f"{shown(path)}: values are {dtype}, must be integers; save ids as an integer array")
    if len(shape) != 1:
        raise DataError(f"{shown(path)}: array has shape {shape}, must have one axis; save it flat")
    have, want = size - start, shape[0] * dtype.itemsize
    if have != want:
        got = f"{have} bytes of ids, must be {want} ({shape[0]} of {dtype.str}, says its header)"
        raise DataError(f"{shown(path)}: {got}; {'fetch it again' if have < want else 'something was appended'}")
    return Header(dtype, start, shape[0], stated=True)


def _raw(path: str, dtype_set: str | None, vocab: int | None) -> Header:
    car, name = side_car_of(path), shown(path)
    given = _integer(dtype_set) if dtype_set is not None else None
    if dtype_set is not None and given is None:
        raise ValueError(f"data.dtype={dtype_set} must be an integer dtype; set it to <u2, <u4, ...")
    own = _integer(car.dtype) if car else None
    if car and own is None:
        raise DataError(f"{name}.json: dtype {car.dtype!r}, must be an integer dtype; set it to <u2, <u4, ...")
    dtype = own or given
    if dtype is None:
        raise DataError(f"{name}: no dtype is stated, must be; set data.dtype to <u2, <u4, ... or write {name}.json")
    if given and dtype != given:
        raise DataError(f"{name}: data.dtype={given.str}, its side-car says {dtype.str}; drop or correct one of them")
    with binary(path) as file:
        size = file.seek(0, 2)
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        got = f"{size} bytes, must be a multiple of {dtype.itemsize} for {dtype.str}"
        raise DataError(f"{name}: {got}; fetch it again or correct its dtype")
    if car and car.count not in (None, count):
        raise DataError(f"{name}: {count} ids, must be {car.count}, says its side-car; fetch it again")
    if car and vocab is not None and car.vocab not in (None, vocab):
        got = f"ids of a vocabulary of {car.vocab}, says its side-car, must be of {vocab}"
        raise DataError(f"{name}: {got}; set data.tokenizer to the one that made them")
    return Header(dtype, 0, count, stated=car is not None)


def _integer(name: str) -> np.dtype[Any] | None:
    """Turn a name into an integer dtype; none = it is not one."""
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError):
        return None
    return dtype if dtype.kind in "iu" else None
