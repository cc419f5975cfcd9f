"""Facts about a dataset before any sample is read: its capabilities, and the files that it holds open.

    is_indexed(dataset)         it is read by index, as torch's map-style datasets
    is_stream(dataset)          it is read in its own order only: iterable data
    is_stateful(one)            it has ``state_dict`` and ``load_state_dict``, and the state says all
    keeps_place(dataset)        it may know in itself how far it was read
    known_parts(dataset)        how many parts iterable data is made of
    takes_two(function)         a function needs two arguments, such as the part that it is to read
    iterable_of(dataset, part)  the dataset, or what a function of its part returns
    open_file(dataset)          the first open file that is found, as "dataset.f"

No sample is read. Of the user's own code only what a file class defines is called. What cannot be found
out counts as missing.

    exact(sample) -> text              a digest, the same in every process: all values of the sample count
    sampled(sample) -> text            a digest for which a part of large values counts: it takes less than 1 ms
    fingerprint_of(dataset) -> text    a few bytes that tell other data of the same length
    Known(dataset)                     what a loader's states have of the data, and what is checked when one is loaded

*Fingerprints.* What is known without a read is in every state: ``_fingerprint`` (Hugging Face's datasets,
`ShardDataset`), a few rows of arrays and tensors, a few items of lists of plain values. Inside an object it is what a
wrapper wraps, the first turns of a mixture, and public attributes that are as long as the dataset. Of a path only the
last part counts: a folder may have moved. ``loader.fingerprint()`` reads a few samples, and from then on states have
their digests. `Known.check` reads these again, with the seed of the state. A sample that is another one each time says
nothing, and is left out. A library of another version may decode differently: then ``strict=False`` loads the state.

*Open files.* A file has one position. Where worker A seeks and worker B seeks before A reads, A gets B's bytes: wrong
samples, without an error. Threads share the file object; forked processes share the position behind it. Spawned workers
get the dataset as a pickle: a file of bytes cannot be pickled, and a text that is read goes as a copy of its own. The
search looks a few levels deep at the attributes of the dataset, and of the datasets inside it, and only at the first
entries of long lists.

What can go wrong: a file that lies deeper, or that a library hides (HDF5, LMDB), is not found. A file that is only read
with ``os.pread``, or under a lock of another object, is reported though it does no harm.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from itertools import islice
from os import PathLike
from typing import Any

import numpy as np

from sharded_loader.base.described import brief
from sharded_loader.base.errors import text_of
from sharded_loader.base.interrupts import pass_on
from sharded_loader.base.limits import private_bytes
from sharded_loader.base.notices import warn
from sharded_loader.base.private import blake2b
from sharded_loader.batching import tree
from sharded_loader.data.columns import is_dataset
from sharded_loader.data.seeding import set_epoch_of

DEPTH, ENTRIES, OBJECTS = 4, 8, 4000
"""Of a search for open files: levels, the entries of a list or dict, and all objects."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))

# -- what it can do ----------------------------------------------------------------------------------------------------


def has_own(kind: type, name: str) -> bool:
    """Whether a class has a method that does something: torch's base classes have some that only raise."""
    method = getattr(kind, name, None)
    module = sys.modules.get("torch.utils.data")
    bases = (getattr(module, base, None) for base in ("Dataset", "IterableDataset"))
    return method is not None and all(method is not getattr(base, name, None) for base in bases)


def is_indexed(dataset: object) -> bool:
    """Whether a dataset is read by index, and has a length.

    Example:
        >>> is_indexed([1, 2]), is_indexed({1, 2})
        (True, False)
    """
    return has_own(type(dataset), "__getitem__") and is_dataset(dataset)


def is_stream(dataset: object) -> bool:
    """Whether a dataset can be read in its own order only.

    Example:
        >>> is_stream(range(3)), is_stream(lambda: range(3)), is_stream({1, 2})
        (False, True, True)
    """
    kind = type(dataset)
    if isinstance(dataset, type):
        return False
    if has_own(kind, "__getitem__"):
        # Hugging Face's IterableDataset has one too: for the name of a column.
        base = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
        return base is not None and isinstance(dataset, base) and not hasattr(kind, "__len__")
    return has_own(kind, "__iter__") or callable(dataset)


def is_stateful(obj: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``, to be called as torchdata calls them.

    The state of some Hugging Face streams does not count; see `_is_lossy`.
    """
    if not all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    if _is_lossy(obj) or hasattr(obj, "no_such_attribute"):  # a mock has every attribute
        return False
    # MosaicML's and litdata's StreamingDataset want to be told by their own loaders how far they were read.
    function: Any = getattr(obj.state_dict, "__func__", None)
    if not isinstance(function, types.FunctionType):
        return True
    return function.__code__.co_argcount - len(function.__defaults__ or ()) <= 1


def _is_lossy(dataset: object) -> bool:
    """Whether an object is, or holds, a stream of Hugging Face's from whose state it cannot go on exactly.

    The state leaves out the samples in a shuffle buffer. The state of streams one behind the other
    (``concatenate_datasets``) is an IndexError in workers, from the second epoch on.
    """
    if "datasets" not in sys.modules:
        return False
    for _, obj in tree.reachable(dataset, _held, most=10_000):
        is_concatenated = type(obj).__name__.startswith("VerticallyConcatenated")
        if _package(obj) == "datasets" and (is_concatenated or hasattr(obj, "buffer_size")):
            return True
    return False


def _held(obj: object) -> tree.Children:
    """What an object holds; not a mixture, which asks its sources."""
    return iter(()) if _package(obj) == "sharded_loader" else tree.parts(obj, 1000)


def _package(obj: object) -> str:
    return type(obj).__module__.partition(".")[0]


def keeps_place(dataset: object) -> bool:
    """Whether a dataset may know in itself how far it was read, or in which epoch: then it can be open once only."""
    return hasattr(dataset, "state_dict") or hasattr(dataset, "__next__") or set_epoch_of(dataset) is not None


def known_parts(dataset: object) -> int | None:
    """How many parts a dataset says that it has, as Hugging Face's do; None if it does not."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def takes_two(function: Callable[..., object]) -> bool:
    """Whether a function needs two arguments, such as the number of its part, and how many parts there are.

    Example:
        >>> takes_two(lambda part, parts: []), takes_two(lambda: []), takes_two(lambda size=3: [])
        (True, False, False)
    """
    by_position = [one for one in _parameters(function) if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return sum(one.default is one.empty for one in by_position) >= 2


def takes_named(function: Callable[..., object], name: str) -> bool:
    """Whether a function has an argument of this name.

    Example:
        >>> takes_named(lambda batch, rng=None: batch, "rng"), takes_named(len, "rng")
        (True, False)
    """
    return any(one.name == name for one in _parameters(function))


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of some functions in C
        return []


def iterable_of(dataset: Any, part: Callable[[], tuple[int, int]]) -> Any:
    """What is iterated over: a dataset itself, or what a function returns.

    Args:
        dataset: an object with ``__iter__``, or a function.
        part: the number of the part, and how many there are. It is asked only for a function that needs it.

    Example:
        >>> iterable_of("abc", lambda: (0, 2)), iterable_of(lambda part, parts: range(part, 9, parts), lambda: (1, 2))
        ('abc', range(1, 9, 2))
    """
    if hasattr(type(dataset), "__iter__"):
        return dataset
    return dataset(*part()) if takes_two(dataset) else dataset()


# -- open files --------------------------------------------------------------------------------------------------------


def open_file(dataset: object, in_threads: bool = False) -> str | None:
    """Where a dataset holds an open file with a position, as the user would write it.

    Args:
        dataset: any object.
        in_threads: a file beside a lock, in the same object, does not count: the lock is taken to guard it.

    Example:
        >>> import tempfile, types
        >>> with tempfile.TemporaryFile() as file:
        ...     open_file(types.SimpleNamespace(source=[file]))
        'dataset.source[0]'
    """
    children = partial(_children, in_threads=in_threads)
    inside = islice(tree.reachable(dataset, children, "dataset", OBJECTS, DEPTH), 1, None)
    return next((path for path, obj in inside if issubclass(type(obj), io.IOBase) and _has_position(obj)), None)


def warn_of_open_file(dataset: object, kind: str) -> None:
    """Warn if workers of this kind, ``"threads"`` or ``"forked processes"``, would share a file of the dataset."""
    found = open_file(dataset, kind == "threads")
    if found is None:
        return
    own = "threading.local()" if kind == "threads" else "os.getpid()"
    warnings.warn(
        f"{found} is an open file, and the workers are {kind}, which share its position: they may read each other's "
        f"data, and give wrong samples. Open it in __getitem__, once for each worker (see {own}), or read with "
        f"os.pread, which uses no position",
        RuntimeWarning,
        stacklevel=2,
    )


def _children(obj: object, in_threads: bool) -> tree.Children:
    if issubclass(type(obj), io.IOBase):  # isinstance asks the object too
        return iter(())
    held = list(tree.parts(obj, ENTRIES))
    is_guarded = in_threads and any(type(value) in _LOCKS and end[0] == "." for end, value in held)
    return iter(() if is_guarded else held)


def _has_position(file: io.IOBase) -> bool:
    try:
        file.fileno()  # one in memory has none
        return file.readable() and file.seekable()  # not a log
    except Exception:  # it is closed, or a class of the user's cannot say: no reason to end the epoch
        return False


# -- what states have of the data --------------------------------------------------------------------------------------

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

_SCALARS = {bool, int, float, complex, type(None)}
_PLAIN = (bool, int, float, complex, bytes, range, type(None), type, Enum)


def exact(sample: object) -> str:
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


def sampled(sample: object) -> str:
    """16 hexadecimal digits as of `exact`, for which some rows and characters of large values are enough.

    Example:
        >>> sampled([1, "a"]) == sampled([1, "a"]), sampled([1, "a"]) == sampled([1, "b"])
        (True, False)
    """
    try:
        return _hash(sample, {}, False).hex()
    except Exception as error:  # a class of the user's
        pass_on(error)
        return type(sample).__qualname__


def some(length: int) -> range | list[int]:
    """A few positions, from the first to the last.

    Example:
        >>> some(3), some(31)
        (range(0, 3), [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30])
    """
    return range(length) if length <= ITEMS else [i * (length - 1) // (ITEMS - 1) for i in range(ITEMS)]


def _hash(value: object, seen: dict[int, Any], whole: bool) -> bytes:
    """The digest of a value.

    Args:
        value: any.
        seen: objects that were seen, by `id`. They may refer to each other.
        whole: whether all of a large value counts.
    """
    if type(value) in _SCALARS:  # in a quarter of the time: each batch of iterable data asks for its first sample's
        return blake2b(f"{type(value).__name__}{value!r}".encode(), digest_size=8).digest()
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


def _attributes(value: object) -> dict[str, Any]:
    if tree.is_dataclass_instance(value):
        return {name: getattr(value, name) for name in tree.field_names(value)}
    return dict(getattr(value, "__dict__", {}))


def _as_array(value: Any, whole: bool) -> Any:
    """A tensor, a picture of PIL's, or what else is an array, as one of NumPy's; None: it is none."""
    if tree.is_tensor(value):
        return tree.as_numpy(value.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous())
    # A picture of PIL's is decoded for it.
    is_array = isinstance(value, np.ndarray | np.generic) or (whole and hasattr(type(value), "__array_interface__"))
    return np.asarray(value) if is_array else None


def _part_of(value: Any) -> Any:
    """What stands for a large value; any other as it is."""
    if isinstance(value, str | bytes):
        return value[:CHARACTERS]
    if isinstance(value, list | tuple) and len(value) > ITEMS:
        return [len(value), *[value[place] for place in some(len(value))]]
    if (isinstance(value, np.ndarray) or tree.is_tensor(value)) and value.nbytes > CHARACTERS:
        size = max(1, math.prod(value.shape[1:]))
        rows = [value[place : place + max(1, NUMBERS // size)].reshape(-1) for place in some(len(value))]
        return [tuple(value.shape), *[row[:: max(1, len(row) // NUMBERS)] for row in rows]]
    return value


def digest_of_read(read: Callable[[], object]) -> str:
    """The digest of the sample that a function reads; or its error as a text."""
    try:
        return exact(read())
    except Exception as error:
        pass_on(error)
        return text_with_type(error)


def text_with_type(error: BaseException) -> str:
    """What stands in the place of a digest."""
    return f"{type(error).__name__}: {text_of(error)}"


def look_in_worker(samples: list[Any]) -> list[Any]:
    """A collate function: a digest of each sample, and the memory of this process, or None."""
    nbytes = None
    with contextlib.suppress(ImportError):
        nbytes = private_bytes()
    return [*map(exact, samples), nbytes]


# -- fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint_of(dataset: object) -> str | None:
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
        pass_on(error)
        return None
    return f"{zlib.crc32(found):08x}" if found else None


def _other_data(saved: object, own: object) -> str:
    """How fingerprints differ; nothing if they do not. A state of an older version has none."""
    differs = isinstance(saved, str) and own is not None and saved != own
    return f"the fingerprint of the dataset was {saved}, and is {own}" if differs else ""


def warn_of_other_data(saved: object, own: str | None) -> None:
    """Warn if a state was saved with other data."""
    if how := _other_data(saved, own):
        warn(
            f"the state was saved with other data: {how}. The loader goes on at this position in the data that it has. "
            f"Load the original data. If you mean the change, ignore this LoaderWarning"
        )


def _of_data(data: Any, depth: int) -> bytes:
    """What is known of a dataset, or of something in it; nothing if nothing is."""
    own = getattr(data, "_fingerprint", None)
    if isinstance(own, str):
        return own.encode()
    if depth > DEEPEST or isinstance(data, range | str | bytes):
        return b""
    if isinstance(data, np.ndarray) or tree.is_tensor(data):
        return sampled(data).encode()
    if isinstance(data, list | tuple):
        return b"|".join(_of_item(data[i], depth + 1) for i in some(len(data)))
    found = []
    for name, value in sorted(getattr(data, "__dict__", {}).items()):
        may_be_column = not name.startswith("_") and isinstance(value, np.ndarray | list | tuple)
        if name in _WRAPPED or (may_be_column and len(value) == len(data)):
            found.append(_of_data(value, depth + 1))
    return b"/".join(found) if any(found) else b""


def _of_item(item: object, depth: int) -> bytes:
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

    def __init__(self, dataset: object) -> None:
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
        how = _other_data(state.get("data"), self.entries().get("data"))
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
