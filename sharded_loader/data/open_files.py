"""Open files in a dataset, whose position several workers would share.

    open_file(dataset) -> "dataset.f"      the first open file that is found; None: there is none
    warn_of_open_file(dataset, kind)       a warning that names it

A file has one position. Where worker A seeks and worker B seeks before A reads, A gets B's bytes: wrong samples,
without an error. Threads share the file object; forked processes share the position behind it. Spawned workers get the
dataset as a pickle: a file of bytes cannot be pickled, and a text that is read goes as a copy of its own.

The search looks at the attributes of the dataset, and of the datasets inside it: a few levels deep, and only at the
first entries of long lists. It reads no attribute that is computed, and of the
user's own code it calls only what a file class of the user's defines.

What can go wrong: a file that lies deeper, or that a library hides (HDF5, LMDB), is not found. A file that is only read
with ``os.pread``, or under a lock of another object, is reported though it does no harm.
"""

from __future__ import annotations

import io
import threading
import types
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

DEPTH, ENTRIES, OBJECTS = 4, 8, 1000
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


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
    seen: set[int] = set()
    level = [("dataset", dataset)]
    for _ in range(DEPTH):
        below = (child for path, one in level for child in _children(one, path, in_threads))
        level = [(path, one) for path, one in islice(below, OBJECTS) if id(one) not in seen]
        seen.update(id(one) for _, one in level)
        found = next((path for path, one in level if issubclass(type(one), io.IOBase) and _has_position(one)), None)
        if found is not None:
            return found
    return None


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


def _children(one: Any, path: str, in_threads: bool) -> Iterator[tuple[str, Any]]:
    if type(one) in (list, tuple):
        yield from ((f"{path}[{number}]", value) for number, value in enumerate(one[:ENTRIES]))
    elif type(one) is dict:
        yield from ((f"{path}[{key!r}]", value) for key, value in list(islice(one.items(), ENTRIES)))
    elif not issubclass(type(one), (type, types.ModuleType, io.IOBase)):  # isinstance asks the object too
        try:
            attributes = object.__getattribute__(one, "__dict__")  # no __getattr__ of the user's is called
        except AttributeError:
            return
        if not in_threads or not any(type(value) in _LOCKS for value in attributes.values()):
            yield from ((f"{path}.{name}", value) for name, value in list(attributes.items()))


def _has_position(file: io.IOBase) -> bool:
    try:
        file.fileno()  # one in memory has none
        return file.readable() and file.seekable()  # not a log
    except Exception:  # it is closed, or a class of the user's cannot say: no reason to end the epoch
        return False
