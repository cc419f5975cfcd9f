"""The dataset on its way to spawned workers: pickled once, by value where it must be, and sent to all.

    publish(job) -> Encoded                cloudpickle, protocol 5: lambdas, classes of ``__main__`` and of notebooks by
                                           value (`script_by_value`), arrays and tensors out of band, arrays over files
                                           by name (`references`)
    share(encoded, number) -> Published    its large buffers in one segment, for all workers

A worker reads it with `codec.decode`, over a private mapping of the segment: what a dataset writes into its own arrays
stays in that worker. The pool owns the segment, until it publishes again or is closed.

dill, which ``multiprocess`` uses by itself, pickles in pure Python and puts arrays in band: 0.92 s for a
154 MB dataset with a lambda in it, against 2 ms. Under fork nothing is published: the worker is born with it.

What can go wrong: an object that cannot be pickled. It is looked for and named, because "cannot pickle '_thread.lock'
object" alone helps nobody. Without room for a segment the buffers go through the pipe to each worker.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from sharded_loader.base.limits import free_bytes
from sharded_loader.memory.codec import (
    ALIGNMENT,
    Array,
    Encoded,
    dtype_name,
    encode,
    is_plain_tensor,
    rebuild_tensor,
    reduce_array,
)
from sharded_loader.memory.references import Inherited, MappedFiles, needs_inheritance, reduced_lock
from sharded_loader.memory.segments import Segment, create

SHARED_BYTES = 65536
"""Below this the buffers of a job go through the pipe to each worker: a segment costs as much."""


SCRIPT = "__mp_main__"
"""What ``multiprocessing`` calls the user's script in a process that it has spawned, or forked from a forkserver."""

_registering = threading.RLock()


@contextlib.contextmanager
def script_by_value() -> Iterator[None]:
    """Inside, cloudpickle sends what is defined in the user's script by value, also where that is `SCRIPT`.

    A worker does not run the script, so it can import neither ``__main__`` nor ``__mp_main__``. Outside, the user's
    own use of cloudpickle goes on as before, unless it is in another thread at this moment.
    """
    script = sys.modules.get(SCRIPT)
    if script is None or script.__name__ != SCRIPT:  # elsewhere it is another name of ``__main__``
        yield
        return
    with _registering:
        if SCRIPT in cloudpickle.list_registry_pickle_by_value():  # by the user, or further out
            yield
            return
        cloudpickle.register_pickle_by_value(script)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the user has done so
                cloudpickle.unregister_pickle_by_value(script)


class _Publisher(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors go as views of their storage, which goes once: views of one tensor stay views of one tensor.

    Arrays over files likewise, as views of the file.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.modules: set[str] = set()
        self._storages: dict[tuple[int, int], Array] = {}
        self._files = MappedFiles()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj is sys.modules.get(SCRIPT):
            return importlib.import_module, ("__main__",)  # not its variables, of which nobody knows what they are
        reduced = self._files.reduce(obj) if isinstance(obj, np.ndarray) else NotImplemented
        if reduced is NotImplemented and type(obj) is np.ndarray:
            reduced = reduce_array(obj)
        if reduced is NotImplemented and is_plain_tensor(obj):
            self.modules.add("torch")
            reduced = self._reduce_view(obj.resolve_conj().resolve_neg())
        if reduced is NotImplemented:
            reduced = reduced_lock(obj)
        if reduced is NotImplemented:
            reduced = super().reducer_override(obj)
            if reduced is NotImplemented:
                self._note_module(obj)
        return reduced

    def _note_module(self, obj: Any) -> None:
        """What goes by reference, its module has to be imported for."""
        name = None
        if isinstance(obj, types.ModuleType):
            name = obj.__name__
        elif isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            name = obj.__module__
        if isinstance(name, str):
            self.modules.add(name)

    def _reduce_view(self, tensor: Any) -> Any:
        import torch

        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:  # the array keeps the storage alive, and so the address its own
            self._storages[key] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
        raw = self._storages[key]
        return rebuild_tensor, (raw, dtype_name(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


class NeedsInheritanceError(TypeError):
    """The job has objects that a worker can only inherit when it is started."""


def publish(job: Any, inherited: Inherited | None = None, **parts: Any) -> Encoded:
    """Pickle ``job`` for all workers.

    Args:
        job: what the workers get.
        inherited: takes what the workers have to be started with.
        **parts: the user's objects in it, by the name that the user knows, for the error message.

    Raises:
        TypeError: it cannot be pickled; names the attribute and the ways out.
    """
    try:
        with contextlib.nullcontext() if inherited is None else inherited:
            return _dump(job)
    except Exception as error:
        kind = NeedsInheritanceError if inherited is None and needs_inheritance(error) else TypeError
        try:
            culprit = next(filter(None, (_culprit(part, name, set()) for name, part in parts.items())), "it")
        except RecursionError:  # too deep for pickle, and so for us
            culprit = "it"
        fork = "" if sys.platform == "win32" else ' and forked workers (ProcessPool(start_method="fork"))'
        raise kind(
            f"cannot send the dataset to worker processes: {culprit} cannot be pickled ({error}). "
            f"What to do: open it lazily in the worker (in __getitem__, or in __setstate__). Threads (thread_pool=True)"
            f"{fork} need no pickle, but they share an open file or a connection, and read each other's data"
        ) from error


@dataclass
class Published:
    """A pickled job, and its large buffers in one segment for all workers together.

    Attributes:
        head: the pickle.
        places: offset and size of each buffer in the segment; offset -1 where it has to be sent.
        buffers: those that have to be sent.
        number: identifies the publication to the workers.
        segment: the memory; None if there is nothing large, or no room.
    """

    head: bytes
    places: tuple[tuple[int, int], ...]
    buffers: tuple[memoryview, ...]
    number: int
    segment: Segment | None = None

    def close(self) -> None:
        """Give the segment up; workers that have mapped it keep theirs."""
        if self.segment is not None:
            self.segment.close()
            self.segment = None


def share(encoded: Encoded, number: int) -> Published:
    """Put the buffers of a published job into shared memory.

    Args:
        encoded: what `publish` made.
        number: number of the segment.
    """
    places, end = [], 0
    for buffer in encoded.buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        end = start + buffer.nbytes
        places.append((start, buffer.nbytes))
    if end >= SHARED_BYTES and free_bytes().nbytes > end + end // 4:
        with contextlib.suppress(OSError):  # a pipe takes longer, and gets it there
            segment = create(number, end)
            for (start, _), buffer in zip(places, encoded.buffers, strict=True):
                segment.write(start, buffer)
            return Published(encoded.head, tuple(places), (), number, segment)
    return Published(encoded.head, encoded.places, encoded.buffers, number)


def _dump(obj: Any) -> Encoded:
    with script_by_value():
        return encode(obj, pickler=_Publisher)


def _culprit(obj: Any, path: str, seen: set[int]) -> str | None:
    """The first of the innermost attributes below ``obj`` that do not pickle, as the user would write it."""
    if id(obj) in seen:
        return None
    seen.add(id(obj))
    try:
        _dump(obj)
    except Exception:
        below = (_culprit(child, where, seen) for where, child in _children(obj, path))
        return next(filter(None, below), f"{path} ({type(obj).__name__})")
    return None


def _children(obj: Any, path: str) -> list[tuple[str, Any]]:
    """The parts of an object. A list: a traceback would keep a generator, and the lock that HDF5 holds in one."""
    if isinstance(obj, abc.Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in list(obj.items())]
    if isinstance(obj, (list, tuple)):
        return [(f"{path}[{i}]", value) for i, value in enumerate(obj)]
    found = [(f"{path}.{name}", value) for name, value in list(getattr(obj, "__dict__", {}).items())]
    names = getattr(getattr(obj, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(obj, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            found.append((f"{path}: variable {name}", cell.cell_contents))
    return found
