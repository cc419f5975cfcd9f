"""Facts about a dataset: capabilities, open files, and fingerprints of its data.

    open_file(dataset)                 path to an open file, as "dataset.f"
    exact(sample) -> text              digest of all values, the same in every process
    sampled(sample) -> text            digest of parts of large values: takes less than 1 ms
    fingerprint_of(dataset) -> text    a few bytes that differ for other data of equal length
    DataIdentity(dataset)              data entries of a loader's states, and their check when a state is loaded

Capabilities and open files are found without reading samples, and without calling user code other than methods of file
classes. Anything that cannot be determined counts as missing.

*Fingerprints.* Every state contains what is known without reading: ``_fingerprint`` (Hugging Face's datasets,
`ShardDataset`), some rows of arrays and tensors, some items of lists of plain values. Objects are searched for wrapped
datasets, the first turns of a mixture, and public attributes as long as the dataset. Of a path only the last component
counts, because folders move. ``loader.fingerprint()`` reads a few samples, whose digests are then stored in states;
`DataIdentity.check` reads them again with the seed of the state. Samples that are not reproducible are skipped. Another
version of a library may decode differently; ``strict=False`` loads such a state.

*Open files.* A file has one position. If worker A seeks, and worker B seeks before A reads, A gets B's bytes: wrong
samples without an error. Threads share the file object, forked processes the position behind it. Spawned workers get a
pickle, which rejects binary files and copies text files opened for reading. The search covers a few levels of
attributes and the first entries of long lists. It misses deeper files and those hidden by a library (HDF5, LMDB), and
reports files that are read safely with ``os.pread`` or under another object's lock.
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
from sharded_loader.data.seeding import epoch_setter

MAX_LEVELS, MAX_ENTRIES, MAX_OBJECTS = 4, 8, 4000
"""Limits of the search for open files: levels, entries of a list or dict, and objects in all."""

_LOCKS = (type(threading.Lock()), type(threading.RLock()))

# -- capabilities ------------------------------------------------------------------------------------------------------


def has_own(kind: type, name: str) -> bool:
    """Return True if a class has a method that is not one of the raising stubs of torch's base classes."""
    method = getattr(kind, name, None)
    module = sys.modules.get("torch.utils.data")
    bases = (getattr(module, base, None) for base in ("Dataset", "IterableDataset"))
    return method is not None and all(method is not getattr(base, name, None) for base in bases)


def is_stream(dataset: object) -> bool:
    """Return True if a dataset can only be read in its own order.

    Example:
        >>> is_stream(range(3)), is_stream(lambda: range(3)), is_stream({1, 2})
        (False, True, True)
    """
    kind = type(dataset)
    if isinstance(dataset, type):
        return False
    if has_own(kind, "__getitem__"):
        # Hugging Face's IterableDataset has one, too, which takes the name of a column.
        base = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
        return base is not None and isinstance(dataset, base) and not hasattr(kind, "__len__")
    return has_own(kind, "__iter__") or callable(dataset)


def is_stateful(obj: Any) -> bool:
    """Return True if ``state_dict()`` and ``load_state_dict()`` of an object restore it exactly; see `_is_lossy`."""
    if not all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    # A mixture knows whether its state suffices; a mock has every attribute.
    if _is_lossy(obj) or getattr(obj, "needs_full_replay", False) or hasattr(obj, "no_such_attribute"):
        return False
    # MosaicML's and litdata's StreamingDataset require the position, which only their own loaders pass.
    function: Any = getattr(obj.state_dict, "__func__", None)
    if not isinstance(function, types.FunctionType):
        return True
    return function.__code__.co_argcount - len(function.__defaults__ or ()) <= 1


def _is_lossy(dataset: object) -> bool:
    """Return True for a Hugging Face stream, or an object that holds one, whose state does not resume exactly.

    States omit shuffle buffers. Those of ``concatenate_datasets`` raise IndexError in workers from the second epoch on.
    """
    if "datasets" not in sys.modules:
        return False
    for _, obj in tree.reachable(dataset, _stream_children, most=10_000):
        is_concatenated = type(obj).__name__.startswith("VerticallyConcatenated")
        if _top_package(obj) == "datasets" and (is_concatenated or hasattr(obj, "buffer_size")):
            return True
    return False


def _stream_children(obj: object) -> tree.Children:
    """Yield what an object holds. A mixture is skipped, because it asks its sources itself."""
    return iter(()) if _top_package(obj) == "sharded_loader" else tree.parts(obj, 1000)


def _top_package(obj: object) -> str:
    return type(obj).__module__.partition(".")[0]


def keeps_place(dataset: object) -> bool:
    """Return True if a dataset may store its position or epoch in itself, so that only one reader can use it."""
    return hasattr(dataset, "state_dict") or hasattr(dataset, "__next__") or epoch_setter(dataset) is not None


def known_parts(dataset: object) -> int | None:
    """Return the number of parts that a dataset declares, as Hugging Face's do, or None."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def takes_two(function: Callable[..., object]) -> bool:
    """Return True if a function requires two arguments, such as the number of its part and the number of parts.

    Example:
        >>> takes_two(lambda part, parts: []), takes_two(lambda: []), takes_two(lambda size=3: [])
        (True, False, False)
    """
    by_position = [p for p in _parameters(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in by_position) >= 2


def takes_named(function: Callable[..., object], name: str) -> bool:
    """Return True if a function has an argument of this name."""
    return any(parameter.name == name for parameter in _parameters(function))


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return []


def iterable_of(dataset: Any, part: Callable[[], tuple[int, int]]) -> Any:
    """Return the dataset to iterate over: ``dataset`` itself, or the result of calling it.

    ``part()`` returns the number of the part and the number of parts. Called only for a function that needs them.

    Example:
        >>> iterable_of("abc", lambda: (0, 2)), iterable_of(lambda part, parts: range(part, 9, parts), lambda: (1, 2))
        ('abc', range(1, 9, 2))
    """
    if hasattr(type(dataset), "__iter__"):
        return dataset
    return dataset(*part()) if takes_two(dataset) else dataset()


# -- open files --------------------------------------------------------------------------------------------------------


def open_file(dataset: object, in_threads: bool = False) -> str | None:
    """Return the path of an open file with a position inside a dataset, as Python code; None if there is none.

    With ``in_threads``, a file beside a lock in the same object is skipped, because the lock probably guards it.

    Example:
        >>> import tempfile, types
        >>> with tempfile.TemporaryFile() as file:
        ...     open_file(types.SimpleNamespace(source=[file]))
        'dataset.source[0]'
    """
    list_children = partial(_children_for_files, in_threads=in_threads)
    inside = islice(tree.reachable(dataset, list_children, "dataset", MAX_OBJECTS, MAX_LEVELS), 1, None)
    return next((path for path, obj in inside if issubclass(type(obj), io.IOBase) and _has_position(obj)), None)


def warn_of_open_file(dataset: object, kind: str) -> None:
    """Warn if workers of this kind, ``"threads"`` or ``"forked processes"``, would share a file of the dataset."""
    path = open_file(dataset, kind == "threads")
    if path is None:
        return
    own = "threading.local()" if kind == "threads" else "os.getpid()"
    warn(
        f"{path} is an open file, and the workers are {kind}, which share its position: they may read each other's "
        f"data, and give wrong samples. Open it in __getitem__, once for each worker (see {own}), or read with "
        f"os.pread, which uses no position"
    )


def _children_for_files(obj: object, in_threads: bool) -> tree.Children:
    if issubclass(type(obj), io.IOBase):  # isinstance would also look up __class__ of the object
        return iter(())
    children = list(tree.parts(obj, MAX_ENTRIES))
    is_guarded = in_threads and any(type(value) in _LOCKS and end[0] == "." for end, value in children)
    return iter(() if is_guarded else children)


def _has_position(file: io.IOBase) -> bool:
    try:
        file.fileno()  # raises for a file in memory
        return file.readable() and file.seekable()  # excludes logs
    except Exception:  # a closed file, or user code: no reason to end the epoch
        return False


# -- digests -----------------------------------------------------------------------------------------------------------

Digests = list[list[Any]]
"""Epoch, index and digest of each sample."""

ReadDigest = Callable[[Any, int, int | None], str]
"""Reads the sample of (index, epoch, seed; None: the loader's seed), and returns its digest."""

MAX_DEPTH = 8
"""Maximum depth of nested wrappers."""

_WRAPPER_ATTRIBUTES = ("dataset", "datasets", "tensors", "_dataset", "_indices", "_parts", "_columns", "_schedule")

MAX_ITEMS, MAX_NUMBERS, MAX_CHARACTERS = 16, 1024, 1 << 16
"""Limits of `sampled`: items of a list or rows of an array, numbers of a row, and characters of a text."""

_FOLDER = re.compile(r"(/|[A-Za-z]:[\\/])(\S*[\\/])?(?=\S*$)")

_SCALARS = {bool, int, float, complex, type(None)}
_PLAIN = (bool, int, float, complex, bytes, range, type(None), type, Enum)


def exact(sample: object) -> str:
    """Return 16 hexadecimal digits that depend on all values of a sample, and not on the process.

    Dicts and sets count without their order. Of an absolute path only the last component counts, because folders move.

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
    """Return a digest like `exact`, from some rows and characters of large values.

    Example:
        >>> sampled([1, "a"]) == sampled([1, "a"]), sampled([1, "a"]) == sampled([1, "b"])
        (True, False)
    """
    try:
        return _hash(sample, {}, False).hex()
    except Exception as error:  # raised by user code
        pass_on(error)
        return type(sample).__qualname__


def sample_positions(length: int) -> range | list[int]:
    """Return at most `MAX_ITEMS` evenly spaced positions, from the first to the last.

    Example:
        >>> sample_positions(3), sample_positions(31)
        (range(0, 3), [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30])
    """
    return range(length) if length <= MAX_ITEMS else [i * (length - 1) // (MAX_ITEMS - 1) for i in range(MAX_ITEMS)]


def _hash(value: object, seen: dict[int, Any], whole: bool) -> bytes:
    """Return the digest of a value, or of an excerpt unless ``whole``. ``seen`` breaks cycles: objects by `id`."""
    if type(value) in _SCALARS:  # four times faster; computed for each batch of iterable data
        return blake2b(f"{type(value).__name__}{value!r}".encode(), digest_size=8).digest()
    value = value if whole else _excerpt(value)
    text, content, parts = type(value).__name__, b"", []
    array = None if isinstance(value, str) else _as_array(value, whole)
    if isinstance(value, str | PathLike):
        text = "text " + (str(value)[folder.end() :] if (folder := _FOLDER.match(str(value))) else str(value))
    elif array is not None and array.dtype.kind in "biufcmMSUV" and not array.dtype.hasobject:
        # The bytes behind a long double are anything.
        array = array.astype("U" if array.dtype.char in "gG" else array.dtype.newbyteorder("<"), copy=False)
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
        pass  # only its class counts
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
    """Return a tensor, a PIL picture or another array as a NumPy array; None for other values."""
    if tree.is_tensor(value):
        return tree.as_numpy(value.detach().cpu().to_dense().resolve_conj().resolve_neg().contiguous())
    # This decodes a PIL picture, so only `exact` does it.
    is_array = isinstance(value, np.ndarray | np.generic) or (whole and hasattr(type(value), "__array_interface__"))
    return np.asarray(value) if is_array else None


def _excerpt(value: Any) -> Any:
    """Return an excerpt of a large value, or the value itself."""
    value = tree.as_numpy(value) if tree.is_column(value) else value  # 600 KB: 68 us instead of 128
    if isinstance(value, str | bytes):
        return value[:MAX_CHARACTERS]
    if isinstance(value, list | tuple) and len(value) > MAX_ITEMS:
        return [len(value), *[value[i] for i in sample_positions(len(value))]]
    if (isinstance(value, np.ndarray) or tree.is_tensor(value)) and value.nbytes > MAX_CHARACTERS:
        size = max(1, math.prod(value.shape[1:]))
        rows = [value[i : i + max(1, MAX_NUMBERS // size)].reshape(-1) for i in sample_positions(len(value))]
        return [tuple(value.shape), *[row[:: max(1, len(row) // MAX_NUMBERS)] for row in rows]]
    return value


def digest_of_read(read: Callable[[], object]) -> str:
    """Return the digest of the sample that ``read`` returns, or the text of its error."""
    try:
        return exact(read())
    except Exception as error:
        pass_on(error)
        return text_with_type(error)


def text_with_type(error: BaseException) -> str:
    """Return the text of an error, in place of a digest."""
    return f"{type(error).__name__}: {text_of(error)}"


def look_in_worker(samples: list[Any]) -> list[Any]:
    """Collate samples into their digests and the private memory of this process (None if unknown)."""
    nbytes = None
    with contextlib.suppress(ImportError):
        nbytes = private_bytes()
    return [*map(exact, samples), nbytes]


# -- fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint_of(dataset: object) -> str | None:
    """Return a short text that is the same in every process, and most likely differs for other data; None if unknown.

    Example:
        >>> fingerprint_of([1, 2]) == fingerprint_of([1, 2]) != fingerprint_of([1, 3])
        True
        >>> fingerprint_of(range(3)) is None
        True
    """
    try:
        data = _data_bytes(dataset, 0)
    except Exception as error:  # raised by user code
        pass_on(error)
        return None
    return f"{zlib.crc32(data):08x}" if data else None


def describe_change(saved: object, own: object) -> str:
    """Describe how fingerprints differ; "" if they agree or one is missing, as in states of older versions."""
    differs = isinstance(saved, str) and own is not None and saved != own
    return f"the fingerprint of the dataset was {saved}, and is {own}" if differs else ""


def _data_bytes(data: Any, depth: int) -> bytes:
    """Return the bytes to be fingerprinted of a dataset or an object inside; empty if nothing is known."""
    own = getattr(data, "_fingerprint", None)
    if isinstance(own, str):
        return own.encode()
    if depth > MAX_DEPTH or isinstance(data, range | str | bytes):
        return b""
    if isinstance(data, np.ndarray) or tree.is_tensor(data):
        return sampled(data).encode()
    if isinstance(data, list | tuple):
        return b"|".join(_item_bytes(data[i], depth + 1) for i in sample_positions(len(data)))
    parts = []
    for name, value in sorted(getattr(data, "__dict__", {}).items()):
        may_be_column = not name.startswith(("_", "epoch_request")) and isinstance(value, np.ndarray | list | tuple)
        if name in _WRAPPER_ATTRIBUTES or (may_be_column and len(value) == len(data)):
            parts.append(_data_bytes(value, depth + 1))
    return b"/".join(parts) if any(parts) else b""


def _item_bytes(item: object, depth: int) -> bytes:
    if isinstance(item, str | PathLike):
        item = str(item).replace("\\", "/").rsplit("/", 1)[-1]
    if isinstance(item, dict):
        return _data_bytes([*item.keys(), *item.values()], depth)
    is_plain = isinstance(item, str | bytes | bool | int | float | complex | np.generic | None)
    return sampled(item).encode() if is_plain else _data_bytes(item, depth)


# -- data entries of states --------------------------------------------------------------------------------------------


class DataIdentity:
    """The data entries of a loader's states.

    `data` is the fingerprint of the dataset, "" before it is computed. `digests` are stored if JSON can represent the
    index.
    """

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self.forget()

    def forget(self, dataset: object = None) -> None:
        """Reset after the data have changed, or are those of another ``dataset``."""
        self._dataset = self._dataset if dataset is None else dataset
        self.data: str | None = ""
        self.digests: Digests = []

    def look(self, indices: list[Any], epoch: int, read: ReadDigest) -> None:
        """Read some samples, for states. Samples that are not reproducible are skipped."""
        read_once = [[epoch, index, read(index, epoch, None)] for index in indices if type(index) in (int, str)]
        self.digests = [entry for entry in read_once if read(entry[1], epoch, None) == entry[2]]

    def entries(self) -> dict[str, Any]:
        """Return the data entries of a state, as a new dict."""
        if self.data == "":
            self.data = fingerprint_of(self._dataset)
        entries = {"data": self.data, "digests": list(map(list, self.digests))}
        return {name: value for name, value in entries.items() if value}

    def check(self, state: Mapping[str, Any], read: ReadDigest) -> None:
        """Raise ValueError if a state fits the loader but was saved with other data."""
        change = describe_change(state.get("data"), self.entries().get("data"))
        digests = state.get("digests", ())
        for row in digests if isinstance(digests, list | tuple) else [digests]:
            if type(row) not in (list, tuple) or [type(part) for part in row] not in ([int, int, str], [int, str, str]):
                raise ValueError(f"the state's 'digests' has {brief(row)}: give what state_dict() returned")
            (epoch, index, digest), seed = row, state["seed"]
            current = read(index, epoch, seed)
            if current != digest and read(index, epoch, seed) == current:  # reproducible
                change = f"the digest of sample {index} was {digest}, and is {current}"
        if change:
            text = f"load_state_dict: the state was saved with other data: {change}. Load the original data"
            raise ValueError(f"{text}. If you mean the change, call load_state_dict(state, strict=False)")
