"""Digests of data: the same in every process and on every machine, and probably others for other values.

    exact(sample) -> text       all of its values count
    sampled(sample) -> text     of large values a part counts: it takes less than 1 ms

An object whose class this module does not know counts by its attributes, or by its ``repr`` if that names no address.
For `sampled` it counts by its class alone.

What can go wrong: an object raises an error when it is looked into. `exact` passes it on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum
from os import PathLike
from typing import Any

import numpy as np

from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.private import blake2b
from sharded_loader.batching.tensors import as_numpy
from sharded_loader.batching.tree import field_names, is_dataclass_instance, is_tensor

ITEMS, NUMBERS, CHARACTERS = 16, 1024, 1 << 16
"""For `sampled`: items of a list or rows of an array, numbers of a row, and characters of a text."""

_FOLDER = re.compile(r"(/|[A-Za-z]:[\\/])(\S*[\\/])?(?=\S*$)")

_PLAIN = (bool, int, float, complex, bytes, range, type(None), type, Enum)


def exact(sample: Any) -> str:
    """16 hexadecimal digits that depend on the values of a sample, and on nothing of this process.

    Dicts and sets count without their order. Of an absolute path the last part counts: a folder may have moved.

    Example:
        >>> exact({"x": np.arange(3), "y": 1.5}) == exact({"y": 1.5, "x": np.arange(3)})
        True
        >>> exact(np.arange(3)) == exact(np.arange(3.0))
        False
        >>> exact("/data/1.jpg") == exact("/mnt/data/1.jpg")
        True
    """
    return _hash(sample, {}, True).hex()


def sampled(sample: Any) -> str:
    """16 hexadecimal digits as of `exact`, for which some rows and characters of large values are enough.

    Example:
        >>> sampled([1, "a"]) == sampled([1, "a"]), sampled([1, "a"]) == sampled([1, "b"])
        (True, False)
    """
    try:
        return _hash(sample, {}, False).hex()
    except Exception as error:  # a class of the user's
        if is_from_outside(error):
            raise
        return type(sample).__qualname__


def some(length: int) -> range | list[int]:
    """A few positions, from the first to the last.

    Example:
        >>> some(3), some(31)
        (range(0, 3), [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30])
    """
    return range(length) if length <= ITEMS else [i * (length - 1) // (ITEMS - 1) for i in range(ITEMS)]


def _hash(value: Any, seen: dict[int, Any], whole: bool) -> bytes:
    """The digest of a value.

    Args:
        value: any.
        seen: objects that were seen, by `id`. They may refer to each other.
        whole: whether all of a large value counts.
    """
    value = value if whole else _part_of(value)
    text, content, parts = type(value).__name__, b"", []
    array = None if isinstance(value, str) else _as_array(value, whole)
    if isinstance(value, str | PathLike):
        text = "text " + (str(value)[found.end() :] if (found := _FOLDER.match(str(value))) else str(value))
    elif array is not None and array.dtype.kind in "biufcmMSUV" and not array.dtype.hasobject:
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        text, content = f"array {array.shape} {array.dtype.str}", array.tobytes()
    elif array is not None:
        parts = [_hash(part, seen, whole) for part in array.ravel().tolist()]
    elif isinstance(value, list | tuple):
        text, parts = "list", [_hash(part, seen, whole) for part in value]
    elif isinstance(value, Mapping):
        pairs = [(key, value[key]) for key in value.keys()]  # noqa: SIM118 - see `batching.tree`
        text, parts = "dict", sorted(_hash(pair, seen, whole) for pair in pairs)
    elif isinstance(value, set | frozenset):
        text, parts = "set", sorted(_hash(part, seen, whole) for part in value)
    elif not whole and not isinstance(value, _PLAIN):
        pass  # it counts by its class
    elif isinstance(value, type | Enum) or not (held := _attributes(value)):
        text += "" if " at 0x" in repr(value) else repr(value)
    elif id(value) not in seen:
        seen[id(value)] = value
        parts = [_hash(held, seen, whole)]
    return blake2b(b"".join([text.encode(errors="replace"), content, *parts]), digest_size=8).digest()


def _attributes(value: Any) -> dict[str, Any]:
    if is_dataclass_instance(value):
        return {name: getattr(value, name) for name in field_names(value)}
    return dict(getattr(value, "__dict__", {}))


def _as_array(value: Any, whole: bool) -> Any:
    """A tensor, a picture of PIL's, or what else is an array, as one of NumPy's; None: it is none."""
    if is_tensor(value):
        return as_numpy(value.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous())
    # A picture of PIL's is decoded for it.
    is_array = isinstance(value, np.ndarray | np.generic) or (whole and hasattr(type(value), "__array_interface__"))
    return np.asarray(value) if is_array else None


def _part_of(value: Any) -> Any:
    """What stands for a large value; any other as it is."""
    if isinstance(value, str | bytes):
        return value[:CHARACTERS]
    if isinstance(value, list | tuple) and len(value) > ITEMS:
        return [len(value), *[value[place] for place in some(len(value))]]
    if (isinstance(value, np.ndarray) or is_tensor(value)) and value.nbytes > CHARACTERS:
        size = max(1, math.prod(value.shape[1:]))
        rows = [value[place : place + max(1, NUMBERS // size)].reshape(-1) for place in some(len(value))]
        return [tuple(value.shape), *[row[:: max(1, len(row) // NUMBERS)] for row in rows]]
    return value
