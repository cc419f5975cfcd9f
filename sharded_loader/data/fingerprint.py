"""A fingerprint of a dataset: few bytes that tell other data of the same length. States have it.

    fingerprint_of(dataset) -> "1a2b3c4d"; None if nothing is known
    warn_of_other_data(saved, own)

It reads no samples of the user's classes, which may be slow. It looks at what is in memory or known: ``_fingerprint``
(Hugging Face's datasets, `ShardDataset`), a few rows of arrays and tensors, a few items of lists of plain values.
Inside an object it looks at what a wrapper wraps, at the first turns of a mixture, and at public attributes that are as
long as the dataset. Of a path only the last part counts: a folder may have moved. It takes less than a millisecond,
once for each loader.

What can go wrong: nothing. A dataset that raises has no fingerprint.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from os import PathLike
from typing import Any

import numpy as np

from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.notices import warn
from sharded_loader.batching.tree import is_tensor
from sharded_loader.data.columns import PackedList
from sharded_loader.data.schedule import Schedule

ITEMS, NUMBERS, DEEPEST = 16, 1024, 8
"""How many items of a list or rows of an array count, numbers or characters of each, and wrappers inside each other."""

_WRAPPED = ("dataset", "datasets", "tensors", "_dataset", "_indices", "_parts", "_columns", "_schedule")


def fingerprint_of(dataset: Any) -> str | None:
    """A short text that is the same in every process, and probably another one for other data.

    Example:
        >>> fingerprint_of([1, 2]) == fingerprint_of([1, 2]) != fingerprint_of([1, 3])
        True
        >>> fingerprint_of(range(3)) is None
        True
    """
    try:
        found = _of_data(dataset, 0)
    except Exception as error:  # the user's class
        if is_from_outside(error):
            raise
        return None
    return f"{zlib.crc32(found):08x}" if found else None


def warn_of_other_data(saved: Any, own: str | None) -> None:
    """Warn if a state was saved with other data. A state of an older version says nothing of them."""
    if isinstance(saved, str) and own is not None and saved != own:
        warn(
            f"the state was saved with other data: the fingerprint of the dataset was {saved}, and is {own}. The "
            f"loader goes on at this position in the data that it has. Load the original data. If you mean the change, "
            f"call load_state_dict(state, strict=False) of a ShardedDataLoader, or ignore this LoaderWarning"
        )


def _of_data(data: Any, depth: int) -> bytes:
    """What is known of a dataset, or of something in it; nothing if nothing is."""
    own = getattr(data, "_fingerprint", None)
    if isinstance(own, str):
        return own.encode()
    if depth > DEEPEST or isinstance(data, range | str | bytes):
        return b""
    if isinstance(data, np.ndarray) or is_tensor(data):
        return _of_rows(data)
    if isinstance(data, Schedule):
        turns = list(map(data.owner, range(8 * ITEMS)))
        return f"{data.seed}{data.weights[:ITEMS]}{turns}".encode()
    if isinstance(data, list | tuple | PackedList):
        return b"|".join(_of_item(data[i], depth + 1) for i in _some(len(data)))
    found = []
    for name, value in sorted(getattr(data, "__dict__", {}).items()):
        is_column = (
            not name.startswith("_") and isinstance(value, np.ndarray | list | tuple) and len(value) == len(data)
        )
        if name in _WRAPPED or is_column:
            found.append(_of_data(value, depth + 1))
    return b"/".join(found) if any(found) else b""


def _of_item(item: Any, depth: int) -> bytes:
    if isinstance(item, str | PathLike):
        return str(item).replace("\\", "/").rsplit("/", 1)[-1][:NUMBERS].encode(errors="replace")
    if isinstance(item, bytes):
        return item[:NUMBERS]
    if item is None or isinstance(item, bool | int | float | complex | np.generic):
        return str(item).encode()
    if isinstance(item, dict):
        return _of_data([*item.keys(), *item.values()], depth)
    return _of_data(item, depth)


def _of_rows(array: Any) -> bytes:
    """Shape, type, and numbers of some rows, from all over each row."""
    if is_tensor(array):
        if array.device.type != "cpu":
            return b""
        array = array.detach().numpy()
    if array.dtype.hasobject or not array.ndim:
        return b""
    rows = (array[i : i + 1].flat for i in _some(len(array)))
    numbers = b"".join(row[:: max(1, len(row) // NUMBERS)].tobytes() for row in rows)
    return f"{array.shape}{array.dtype.str}".encode() + numbers


def _some(length: int) -> Iterable[int]:
    """A few places, from the first to the last."""
    return range(length) if length <= ITEMS else [i * (length - 1) // (ITEMS - 1) for i in range(ITEMS)]
