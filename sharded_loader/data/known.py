"""What a loader knows of its data, in its states: so that a state is not taken on over other data of the same length.

    exact(sample) -> text                  a digest, the same in every process: all values of the sample count
    sampled(sample) -> text                a digest for which a part of large values counts: it takes less than 1 ms
    fingerprint_of(dataset) -> text        a few bytes that tell other data of the same length
    Known(dataset)                         of one loader
      look(indices, epoch, read)           a few samples are read; from then on states have their digests
      entries() -> dict                    what a state has of the data
      check(state, read)                   a ValueError that says how the data differ

What is known without a read (`fingerprint_of`) is in every state. Samples are not read for a state: in the main process
a dataset would open the files that its workers are to open, and a sample may take seconds. ``loader.fingerprint()``
reads a few, and from then on states have their digests. `check` reads these again, with the seed of the state. A sample
that is another one each time says nothing, and is left out.

*Fingerprints.* What is in memory or known counts: ``_fingerprint`` (Hugging Face's datasets, `ShardDataset`), a few
rows of arrays and tensors, a few items of lists of plain values. Inside an object it is what a wrapper wraps, the first
turns of a mixture, and public attributes that are as long as the dataset. Of a path only the last part counts: a folder
may have moved. It takes less than a millisecond, once for each loader.

What can go wrong: a library of another version decodes or augments differently, and the digests differ though the data
are the same. Then ``strict=False`` loads the state. An object whose class this module does not know counts by its
attributes, or by its ``repr`` if that names no address; for `sampled` by its class alone. A dataset that raises an
error has no fingerprint.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from enum import Enum
from os import PathLike
from typing import Any

import numpy as np

from sharded_loader.base.described import brief
from sharded_loader.base.errors import text_of
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.limits import private_bytes
from sharded_loader.base.notices import warn
from sharded_loader.base.private import blake2b
from sharded_loader.batching.tensors import as_numpy
from sharded_loader.batching.tree import field_names, is_dataclass_instance, is_tensor
from sharded_loader.data.columns import PackedList

Digests = list[list[Any]]
"""Of each sample the epoch, the index and the digest."""

Read = Callable[[Any, int, int | None], str]
"""Reads the sample of an index in an epoch, with a seed (None: the loader's), and returns its digest."""

DEEPEST = 8
"""Wrappers inside each other that count."""

_WRAPPED = ("dataset", "datasets", "tensors", "_dataset", "_indices", "_parts", "_columns", "_schedule")

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


def digest_of_read(read: Callable[[], Any]) -> str:
    """The digest of the sample that a function reads; or its error as a text."""
    try:
        return exact(read())
    except Exception as error:
        if is_from_outside(error):
            raise
        return text_with_type(error)


def text_with_type(error: BaseException) -> str:
    """What stands in the place of a digest."""
    return f"{type(error).__name__}: {text_of(error)}"


def look_in_worker(samples: list[Any]) -> list[Any]:
    """A collate function: a digest of each sample, and the memory of this process, or None."""
    found: list[Any] = [exact(sample) for sample in samples]
    try:
        return [*found, private_bytes()]
    except ImportError:
        return [*found, None]


# -- fingerprints ------------------------------------------------------------------------------------------------------


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
            f"ignore this LoaderWarning"
        )


def _of_data(data: Any, depth: int) -> bytes:
    """What is known of a dataset, or of something in it; nothing if nothing is."""
    own = getattr(data, "_fingerprint", None)
    if isinstance(own, str):
        return own.encode()
    if depth > DEEPEST or isinstance(data, range | str | bytes):
        return b""
    if isinstance(data, np.ndarray) or is_tensor(data):
        return sampled(data).encode()
    if isinstance(data, list | tuple | PackedList):
        return b"|".join(_of_item(data[i], depth + 1) for i in some(len(data)))
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
        item = str(item).replace("\\", "/").rsplit("/", 1)[-1]
    if isinstance(item, dict):
        return _of_data([*item.keys(), *item.values()], depth)
    is_plain = isinstance(item, str | bytes | bool | int | float | complex | np.generic | None)
    return sampled(item).encode() if is_plain else _of_data(item, depth)


# -- what states have -------------------------------------------------------------------------------------------------


class Known:
    """What a loader knows of its data.

    Args:
        dataset: what is read.

    Attributes:
        data: what is known without a read; "": it was not asked for.
        digests: those that states have, of samples whose index JSON can have.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.forget()

    def forget(self) -> None:
        """The data have changed."""
        self.data: str | None = ""
        self.digests: Digests = []

    def look(self, indices: list[Any], epoch: int, read: Read) -> None:
        """Read some samples, for states. One that is another one when it is read again is left out."""
        found = [[epoch, index, read(index, epoch, None)] for index in indices if type(index) in (int, str)]
        self.digests = [one for one in found if read(one[1], epoch, None) == one[2]]

    def entries(self) -> dict[str, Any]:
        """What a state has of the data: a new dict."""
        if self.data == "":
            self.data = fingerprint_of(self._dataset)
        found = {"data": self.data, "digests": list(map(list, self.digests))}
        return {name: value for name, value in found.items() if value}

    def check(self, state: Mapping[str, Any], read: Read) -> None:
        """Reject a state that fits the loader, but was saved with other data.

        Raises:
            ValueError: the data differ.
        """
        saved, own, how = state.get("data"), self.entries().get("data"), ""
        if isinstance(saved, str) and own is not None and saved != own:
            how = f"the fingerprint of the dataset was {saved}, and is {own}"
        digests = state.get("digests", ())
        for one in digests if isinstance(digests, list | tuple) else [digests]:
            if type(one) not in (list, tuple) or [type(part) for part in one] not in ([int, int, str], [int, str, str]):
                raise ValueError(f"the state's 'digests' has {brief(one)}: give what state_dict() returned")
            (epoch, index, digest), seed = one, state["seed"]
            own = read(index, epoch, seed)
            if own != digest and read(index, epoch, seed) == own:  # not another one each time
                how = f"the digest of sample {index} was {digest}, and is {own}"
        if how:
            raise ValueError(
                f"load_state_dict: the state was saved with other data: {how}. Load the original data. If you mean the "
                f"change, call load_state_dict(state, strict=False)"
            )
