"""What can be known of a dataset before it is read: what it can do, which files it holds open, who reads it.

    is_indexed(dataset)         it is read by index, as torch's map-style datasets
    is_stream(dataset)          it is read in its own order only: iterable data
    is_stateful(one)            it has ``state_dict`` and ``load_state_dict``, and the state says all
    keeps_place(dataset)        it may know in itself how far it was read
    known_parts(dataset)        how many parts iterable data is made of
    takes_two(function)         a function needs two arguments, such as the part that it is to read
    iterable_of(dataset, part)  the dataset, or what a function of its part returns
    open_file(dataset)          the first open file that is found, as "dataset.f"
    this_worker()               which of how many workers, or parts, reads here

No sample is read. Of the user's own code only what a file class defines is called. What cannot be found
out counts as missing.

*Open files.* A file has one position. Where worker A seeks and worker B seeks before A reads, A gets B's bytes: wrong
samples, without an error. Threads share the file object; forked processes share the position behind it. Spawned workers
get the dataset as a pickle: a file of bytes cannot be pickled, and a text that is read goes as a copy of its own. The
search looks a few levels deep at the attributes of the dataset, and of the datasets inside it, and only at the first
entries of long lists.

What can go wrong: a file that lies deeper, or that a library hides (HDF5, LMDB), is not found. A file that is only read
with ``os.pread``, or under a lock of another object, is reported though it does no harm.
"""

from __future__ import annotations

import inspect
import io
import sys
import threading
import types
import warnings
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

from sharded_loader.data.columns import is_dataset
from sharded_loader.data.seeding import Children, reachable, set_epoch_of

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


def is_indexed(dataset: Any) -> bool:
    """Whether a dataset is read by index, and has a length.

    Example:
        >>> is_indexed([1, 2]), is_indexed({1, 2})
        (True, False)
    """
    return has_own(type(dataset), "__getitem__") and is_dataset(dataset)


def is_stream(dataset: Any) -> bool:
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


def _is_lossy(dataset: Any) -> bool:
    """Whether an object is, or holds, a stream of Hugging Face's from whose state it cannot go on exactly.

    The state leaves out the samples in a shuffle buffer. The state of streams one behind the other
    (``concatenate_datasets``) is an IndexError in workers, from the second epoch on.
    """
    if "datasets" not in sys.modules:
        return False
    for _, obj in reachable(dataset, _held, most=10_000):
        is_concatenated = type(obj).__name__.startswith("VerticallyConcatenated")
        if _package(obj) == "datasets" and (is_concatenated or hasattr(obj, "buffer_size")):
            return True
    return False


def _held(obj: Any) -> Children:
    """The first items of a list or dict, or the attributes of an object; not of a mixture, which asks its sources."""
    if isinstance(obj, list | tuple | dict):
        held = list(islice(obj.values() if isinstance(obj, dict) else obj, 1000))
    else:
        held = [] if _package(obj) == "sharded_loader" else list(getattr(obj, "__dict__", {}).values())
    return (("", child) for child in held)


def _package(obj: Any) -> str:
    return type(obj).__module__.partition(".")[0]


def keeps_place(dataset: Any) -> bool:
    """Whether a dataset may know in itself how far it was read, or in which epoch: then it can be open once only."""
    return hasattr(dataset, "state_dict") or hasattr(dataset, "__next__") or set_epoch_of(dataset) is not None


def known_parts(dataset: Any) -> int | None:
    """How many parts a dataset says that it has, as Hugging Face's do; None if it does not."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments, such as the number of its part, and how many parts there are.

    Example:
        >>> takes_two(lambda part, parts: []), takes_two(lambda: []), takes_two(lambda size=3: [])
        (True, False, False)
    """
    by_position = [one for one in _parameters(function) if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return sum(one.default is one.empty for one in by_position) >= 2


def takes_named(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of this name.

    Example:
        >>> takes_named(lambda batch, rng=None: batch, "rng"), takes_named(len, "rng")
        (True, False)
    """
    return any(one.name == name for one in _parameters(function))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
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


def open_file(dataset: Any, in_threads: bool = False) -> str | None:
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
    inside = islice(reachable(dataset, children, "dataset", OBJECTS, DEPTH), 1, None)
    return next((path for path, obj in inside if issubclass(type(obj), io.IOBase) and _has_position(obj)), None)


def warn_of_open_file(dataset: Any, kind: str) -> None:
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


def _children(obj: Any, in_threads: bool) -> Children:
    if type(obj) in (list, tuple):
        yield from ((f"[{number}]", value) for number, value in enumerate(obj[:ENTRIES]))
    elif type(obj) is dict:
        yield from ((f"[{key!r}]", value) for key, value in list(islice(obj.items(), ENTRIES)))
    elif not issubclass(type(obj), (type, types.ModuleType, io.IOBase)):  # isinstance asks the object too
        try:
            attributes = object.__getattribute__(obj, "__dict__")  # no __getattr__ of the user's is called
        except AttributeError:
            return
        if not in_threads or not any(type(value) in _LOCKS for value in attributes.values()):
            yield from ((f".{name}", value) for name, value in list(attributes.items()))


def _has_position(file: io.IOBase) -> bool:
    try:
        file.fileno()  # one in memory has none
        return file.readable() and file.seekable()  # not a log
    except Exception:  # it is closed, or a class of the user's cannot say: no reason to end the epoch
        return False


# -- who reads ---------------------------------------------------------------------------------------------------------

_asked_first: list[Callable[[], tuple[int, int] | None]] = []


def ask_first(function: Callable[[], tuple[int, int] | None]) -> None:
    """Let `this_worker` ask a function before it asks torch."""
    _asked_first.append(function)


def this_worker() -> tuple[int, int] | None:
    """The number of this worker, and how many there are, as torch's ``get_worker_info`` says; None outside workers.

    A worker of this library that has not imported torch cannot ask torch, but knows its part.

    Example:
        >>> this_worker() is None
        True
    """
    for asked in _asked_first:
        if (found := asked()) is not None:
            return found
    torchs: Any = sys.modules.get("torch.utils.data")
    info = None if torchs is None else torchs.get_worker_info()
    return None if info is None else (info.id, info.num_workers)
