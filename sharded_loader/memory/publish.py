"""The dataset on its way to spawned workers: pickled once, by value where it must be, and sent to all.

    publish(job) -> Encoded                cloudpickle, protocol 5: lambdas, classes of ``__main__`` and of notebooks by
                                           value (`script_by_value`), arrays and tensors out of band, arrays over files
                                           by name (`MappedFiles`)
    share(encoded, number) -> Encoded, Segment   its large buffers in one segment, for all workers

A worker reads it with `codec.decode`, over a private mapping of the segment: what a dataset writes into its own arrays
stays in that worker. The pool owns the segment, until it publishes again or is closed.

*Files.* A worker opens the file of a `numpy.memmap`, of its views and slices, itself, so 100 MB cost neither a copy nor
a page. What is written to a file that was opened with ``"r+"`` is written to that file, as in the main process. A file
goes by name only if the worker would find the same bytes. By value go a file that has been deleted or replaced since it
was mapped, and an array in mode ``"c"`` that this process has written to: all of it is compared. A tensor over a memmap
also goes by value: torch does not say where its memory is from.

dill, which ``multiprocess`` uses by itself, pickles in pure Python and puts arrays in band: 0.92 s for a
154 MB dataset with a lambda in it, against 2 ms. Under fork nothing is published: the worker is born with it.

What can go wrong: an object that cannot be pickled. It is looked for and named, because "cannot pickle '_thread.lock'
object" alone does not help. Without room for a segment the buffers go through the pipe to each worker. If a file goes
before a worker has opened it, that is the error with which the worker cannot start. A ``Value`` or a ``Lock`` of
``multiprocessing`` cannot be pickled: only forked workers inherit it.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import sys
import threading
import types
from collections import abc
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np

from sharded_loader.base.interrupts import pass_on
from sharded_loader.base.limits import free_bytes
from sharded_loader.batching.tree import dtype_name, parts
from sharded_loader.memory import codec
from sharded_loader.memory.segments import Segment, create

SHARED_BYTES = 65536
"""Below this the buffers of a job go through the pipe to each worker: a segment costs as much."""


COMPARED = 1 << 20
"""Bytes of a file that are compared at once: as many stay in a processor's cache."""

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


class Publisher(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors go as views of their storage, which goes once: views of one tensor stay views of one tensor.

    Arrays over files likewise, as views of the file.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.modules: set[str] = set()
        self._storages: dict[tuple[int, int], codec.Array] = {}
        self._files = MappedFiles()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj is sys.modules.get(SCRIPT):
            return importlib.import_module, ("__main__",)  # not its variables, which may be anything
        reduced = self._files.reduce(obj) if isinstance(obj, np.ndarray) else NotImplemented
        if reduced is NotImplemented and type(obj) is np.ndarray:
            reduced = codec.reduce_array(obj)
        if reduced is NotImplemented and codec.is_plain_tensor(obj):
            self.modules.add("torch")
            reduced = self._reduce_view(obj.resolve_conj().resolve_neg())
        if reduced is NotImplemented:
            reduced = super().reducer_override(obj)
            by_name = isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))
            if reduced is NotImplemented and by_name:  # its module has to be imported
                self.modules.add(str(obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__))
        return reduced

    def _reduce_view(self, tensor: Any) -> Any:
        import torch

        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:  # the array keeps the storage alive, and so the address its own
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
            self._storages[key] = raw
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return codec.rebuild_tensor, (self._storages[key], dtype_name(tensor.dtype), *layout)


def publish(job: object, **parts: object) -> codec.Encoded:
    """Pickle ``job`` for all workers.

    Args:
        job: what the workers get.
        **parts: the user's objects in it, by the name that the user knows, for the error message.

    Raises:
        TypeError: it cannot be pickled; names the attribute and the ways out.
    """
    try:
        return dump(job)
    except Exception as error:
        pass_on(error)
        culprit = culprit_in(parts)
        fork = "" if sys.platform == "win32" else ' and forked workers (ProcessPool(start_method="fork"))'
        raise TypeError(
            f"cannot send the dataset to worker processes: {culprit} cannot be pickled ({error}). "
            f"What to do: open it lazily in the worker (in __getitem__, or in __setstate__). Threads (thread_pool=True)"
            f"{fork} need no pickle, but they share an open file or a connection, and read each other's data"
        ) from error


def share(encoded: codec.Encoded, number: int) -> tuple[codec.Encoded, Segment | None]:
    """Put the buffers of a published job into shared memory.

    Args:
        encoded: what `publish` made.
        number: number of the segment.

    Returns:
        What is to be sent of the job, and the memory; None if there is nothing large, or no room.
    """
    places, end = [], 0
    for buffer in encoded.buffers:
        start = -(-end // codec.ALIGNMENT) * codec.ALIGNMENT
        end = start + buffer.nbytes
        places.append((start, buffer.nbytes))
    if end >= SHARED_BYTES and free_bytes().nbytes > end + end // 4:
        with contextlib.suppress(OSError):  # a pipe takes longer, and gets it there
            segment = create(number, end)
            for (start, _), buffer in zip(places, encoded.buffers, strict=True):
                segment.mapping[start : start + buffer.nbytes] = buffer
            return encoded._replace(places=tuple(places), buffers=()), segment
    return encoded, None


def dump(obj: object) -> codec.Encoded:
    """Pickle an object, its arrays and tensors out of band."""
    with script_by_value():
        return codec.encode(obj, pickler=Publisher)


def culprit_in(parts: abc.Mapping[str, Any]) -> str:
    """The first of the innermost parts of these objects that cannot be pickled, as the user would write it.

    Args:
        parts: the objects, by their names.

    Example:
        >>> culprit_in({"dataset": {"x": 1, "stop": threading.Event()}})
        "dataset['stop']._cond._lock (lock)"
    """
    try:
        return next(filter(None, (_culprit(part, name, set()) for name, part in parts.items())), "it")
    except RecursionError:  # too deep for pickle, and so for us
        return "it"


def _culprit(obj: object, path: str, seen: set[int]) -> str | None:
    if id(obj) in seen:
        return None
    seen.add(id(obj))
    try:
        dump(obj)
    except Exception:
        below = (_culprit(child, where, seen) for where, child in children(obj, path))
        return next(filter(None, below), f"{path} ({type(obj).__name__})")
    return None


def children(obj: object, path: str) -> list[tuple[str, Any]]:
    """The parts of an object. A list: a traceback would keep a generator, and the lock that HDF5 holds in one."""
    if isinstance(obj, abc.Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in list(obj.items())]
    found = [(path + end, child) for end, child in parts(obj, sys.maxsize)]
    names = getattr(getattr(obj, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(obj, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            found.append((f"{path}: variable {name}", cell.cell_contents))
    return found


# -- arrays over files -------------------------------------------------------------------------------------------------


class Mapping:
    """A part of a file, which arrives in the worker as that part, mapped again: arguments of `numpy.memmap`."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return np.memmap, self.arguments


class MappedFiles:
    """The files under the arrays of one dataset, each described once, so that views of one stay views of one."""

    def __init__(self) -> None:
        # By id of the mapping, which is kept beside its description, so that its id stays its own.
        self._known: dict[int, tuple[Mapping | None, Any, Any]] = {}

    def reduce(self, array: codec.Array) -> Any:
        """A reduction of an array over a file; NotImplemented if it is none, and has to go by value."""
        if type(array) not in (np.ndarray, np.memmap) or array.base is None or not array.nbytes:
            return NotImplemented
        found = memmap_of(array)
        if found is None:
            return NotImplemented
        whole, start, span = found
        key = id(whole._mmap)
        if key not in self._known:
            self._known[key] = *_describe(whole), whole._mmap
        mapping, again, _ = self._known[key]
        if mapping is not None and (whole.mode != "c" or _is_same(whole, again, span)):
            layout = array.shape, array.dtype, start, array.strides
            return codec.view_mapping, (mapping, type(array), array.flags.writeable, *layout)
        # NumPy itself would pickle its subclass in band.
        return (np.ndarray.view, (array.view(np.ndarray), np.memmap)) if type(array) is np.memmap else NotImplemented


def _describe(whole: Any) -> tuple[Mapping | None, Any]:
    """The part of the file under this memmap, and a new memmap of it; None if that does not give the same."""
    # numpy.memmap maps whole pages, and keeps the offset that it was asked for.
    offset = whole.offset - whole.offset % mmap.ALLOCATIONGRANULARITY
    mode = "r+" if whole.mode == "w+" else whole.mode  # which would empty it
    filename, shape = os.fspath(whole.filename), (len(whole._mmap),)
    try:
        again = np.memmap(filename, np.uint8, "r", offset, shape)
    except (OSError, ValueError):  # it has gone, or is shorter
        return None, None
    ends = () if mode == "c" else (range(len(again))[: mmap.PAGESIZE], range(len(again))[-mmap.PAGESIZE :])
    is_same = all(_is_same(whole, again, end) for end in ends)
    return (Mapping(filename, np.uint8, mode, offset, shape) if is_same else None), again


def _is_same(whole: Any, again: Any, span: range) -> bool:
    """Whether two memmaps have the same bytes in a span."""
    before = np.frombuffer(whole._mmap, np.uint8)
    parts = (slice(begin, min(begin + COMPARED, span.stop)) for begin in range(span.start, span.stop, COMPARED))
    return all(np.array_equal(before[part], again[part]) for part in parts)


def memmap_of(array: codec.Array) -> tuple[Any, int, range] | None:
    """The memmap that ``array`` is, or is a view of; None if none.

    Returns:
        Also where the first element is there, and the bytes that the array reaches.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     whole = np.memmap(file, np.int64, "w+", shape=(10, 2))
        ...     memmap_of(np.asarray(whole)[3:, 1])[1:]
        (56, range(56, 160))
        >>> memmap_of(np.arange(3))
    """
    base: Any = array
    # Between the views may be a memoryview, and what as_strided and sliding_window_view hold their array by.
    while base is not None and getattr(base, "filename", None) is None:
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    memory = getattr(base, "_mmap", None)
    if not isinstance(base, np.memmap) or not isinstance(memory, mmap.mmap) or memory.closed:
        return None
    start = codec.array_address(array) - codec.array_address(np.frombuffer(memory, np.uint8))
    reach = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in reach if step < 0)
    high = start + sum(step for step in reach if step > 0) + array.itemsize
    return (base, start, range(low, high)) if low >= 0 and high <= len(memory) else None
