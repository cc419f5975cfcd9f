"""Publishing the dataset to spawned workers: pickled once, by value where necessary, and sent to all.

    publish(job) -> Encoded                cloudpickle, protocol 5: lambdas and classes of ``__main__`` and of notebooks
                                           by value (`script_by_value`), arrays and tensors out of band, arrays over
                                           files by name (`MappedFiles`)
    share(encoded, number) -> Encoded, Segment   moves large buffers to one segment, for all workers

Workers use `codec.decode` over a private mapping of the segment, so each worker's writes to its arrays stay local. The
pool owns the segment until it publishes again or is closed. Under fork nothing is published. dill, the default of
``multiprocess``, pickles in pure Python and puts arrays in band: 0.92 s for a 154 MB dataset with a lambda, against 2
ms.

A worker opens the file of a `numpy.memmap`, or of a view of one, itself, so 100 MB cost neither a copy nor a page.
Writes in mode ``"r+"`` reach that file, as in the main process. Deleted or replaced files, and modified copy-on-write
arrays (mode ``"c"``, compared in full), are sent by value. So are tensors over a memmap, because torch does not reveal
the origin of their memory. If a file disappears before a worker opens it, that worker fails to start.

An object that cannot be pickled is searched for and named, because "cannot pickle '_thread.lock' object" alone does not
help. ``Value`` and ``Lock`` of ``multiprocessing`` need forked workers.
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
"""Smaller buffers of a job go through the pipe to each worker: a segment costs as much."""


COMPARED = 1 << 20
"""Bytes of a file compared at a time, so that they stay in the processor's cache."""

SCRIPT = "__mp_main__"
"""Name that ``multiprocessing`` gives the user's script in a spawned process, or one forked by a fork server."""

_registry_lock = threading.RLock()


@contextlib.contextmanager
def script_by_value() -> Iterator[None]:
    """Make cloudpickle send definitions of the user's script by value, including those of `SCRIPT`.

    A worker does not run the script, so it can import neither ``__main__`` nor ``__mp_main__``. The user's own use of
    cloudpickle is unaffected, except in other threads while the block runs.
    """
    script = sys.modules.get(SCRIPT)
    if script is None or script.__name__ != SCRIPT:  # otherwise an alias of ``__main__``
        yield
        return
    with _registry_lock:
        if SCRIPT in cloudpickle.list_registry_pickle_by_value():  # by the user, or an outer block
            yield
            return
        cloudpickle.register_pickle_by_value(script)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the user did it meanwhile
                cloudpickle.unregister_pickle_by_value(script)


class Publisher(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that sends each storage and each file once; tensors and arrays over files are views of them."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.modules: set[str] = set()
        self._storages: dict[tuple[int, int], codec.Array] = {}
        self._files = MappedFiles()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType) and obj is sys.modules.get(SCRIPT):
            return importlib.import_module, ("__main__",)  # not its variables, which may hold anything
        reduced = self._files.reduce(obj) if isinstance(obj, np.ndarray) else NotImplemented
        if reduced is NotImplemented and type(obj) is np.ndarray:
            reduced = codec.reduce_array(obj)
        if reduced is NotImplemented and codec.is_plain_tensor(obj):
            self.modules.add("torch")
            reduced = self._reduce_view(obj.resolve_conj().resolve_neg())
        if reduced is NotImplemented:
            reduced = super().reducer_override(obj)
            by_name = isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType))
            if reduced is NotImplemented and by_name:  # unpickling imports its module
                self.modules.add(str(obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__))
        return reduced

    def _reduce_view(self, tensor: Any) -> Any:
        import torch

        storage = tensor.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in self._storages:  # the array keeps the storage alive, and its address unique
            self._storages[key] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
        layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return codec.rebuild_tensor, (self._storages[key], dtype_name(tensor.dtype), *layout)


def publish(job: object, **parts: object) -> codec.Encoded:
    """Pickle ``job`` for all workers. ``parts`` are the user's objects in it, by the names that error messages use.

    Raises:
        TypeError: it cannot be pickled; names the attribute and possible solutions.
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
    """Move the buffers of a published job to a segment; return both. None: nothing large, or no room for a segment."""
    nbytes = sum(codec.aligned(buffer.nbytes) for buffer in encoded.buffers)
    if nbytes >= SHARED_BYTES and free_bytes().nbytes > nbytes + nbytes // 4:
        with contextlib.suppress(OSError):  # the pipe is slower, but works
            segment = create(number, nbytes)
            slot = codec.SlotWriter(np.frombuffer(segment.mapping, np.uint8))
            places = tuple((slot.place(buffer), buffer.nbytes) for buffer in encoded.buffers)
            return encoded._replace(places=places, buffers=()), segment
    return encoded, None


def dump(obj: object) -> codec.Encoded:
    """Pickle an object, arrays and tensors out of band."""
    with script_by_value():
        return codec.encode(obj, pickler=Publisher)


def culprit_in(parts: abc.Mapping[str, Any]) -> str:
    """Find the innermost part that cannot be pickled, written as the user would access it.

    Example:
        >>> culprit_in({"dataset": {"x": 1, "stop": threading.Event()}})
        "dataset['stop']._cond._lock (lock)"
    """
    try:
        return next(filter(None, (_find_culprit(part, name, set()) for name, part in parts.items())), "it")
    except RecursionError:  # too deep for pickle and for this search
        return "it"


def _find_culprit(obj: object, path: str, seen: set[int]) -> str | None:
    if id(obj) in seen:
        return None
    seen.add(id(obj))
    try:
        dump(obj)
    except Exception:
        below = (_find_culprit(child, where, seen) for where, child in children(obj, path))
        return next(filter(None, below), f"{path} ({type(obj).__name__})")
    return None


def children(obj: object, path: str) -> list[tuple[str, Any]]:
    """Return the parts of an object, as a list: a traceback would keep a generator, and HDF5's lock in it, alive."""
    if isinstance(obj, abc.Mapping):
        return [(f"{path}[{key!r}]", value) for key, value in list(obj.items())]
    named = [(path + end, child) for end, child in parts(obj, sys.maxsize)]
    names = getattr(getattr(obj, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(obj, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            named.append((f"{path}: variable {name}", cell.cell_contents))
    return named


# -- arrays over files -------------------------------------------------------------------------------------------------


class Mapping:
    """Arguments of `numpy.memmap` that reopen a part of a file in the worker."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return np.memmap, self.arguments


class MappedFiles:
    """Files under the arrays of one dataset, each described once, so that views of one file stay so."""

    def __init__(self) -> None:
        # By id of the mapping; the value references the mapping, so that the id stays unique.
        self._descriptions: dict[int, tuple[Mapping | None, Any, Any]] = {}

    def reduce(self, array: codec.Array) -> Any:
        """Reduce an array over a file; NotImplemented if it is not one, or must be sent by value."""
        if type(array) not in (np.ndarray, np.memmap) or array.base is None or not array.nbytes:
            return NotImplemented
        located = memmap_of(array)
        if located is None:
            return NotImplemented
        whole, start, span = located
        key = id(whole._mmap)
        if key not in self._descriptions:
            self._descriptions[key] = *_describe(whole), whole._mmap
        mapping, reopened, _ = self._descriptions[key]
        if mapping is not None and (whole.mode != "c" or _have_same_bytes(whole, reopened, span)):
            layout = array.shape, array.dtype, start, array.strides
            return codec.view_mapping, (mapping, type(array), array.flags.writeable, *layout)
        # NumPy itself would pickle its subclass in band.
        return (np.ndarray.view, (array.view(np.ndarray), np.memmap)) if type(array) is np.memmap else NotImplemented


def _describe(whole: Any) -> tuple[Mapping | None, Any]:
    """Return a `Mapping` for the file under this memmap, and a new memmap of it; None if the file has changed."""
    # numpy.memmap maps whole pages, but stores the requested offset.
    offset = whole.offset - whole.offset % mmap.ALLOCATIONGRANULARITY
    mode = "r+" if whole.mode == "w+" else whole.mode  # "w+" would truncate it
    filename, shape = os.fspath(whole.filename), (len(whole._mmap),)
    try:
        reopened = np.memmap(filename, np.uint8, "r", offset, shape)
    except (OSError, ValueError):  # deleted or truncated
        return None, None
    ends = () if mode == "c" else (range(len(reopened))[: mmap.PAGESIZE], range(len(reopened))[-mmap.PAGESIZE :])
    is_same = all(_have_same_bytes(whole, reopened, end) for end in ends)
    return (Mapping(filename, np.uint8, mode, offset, shape) if is_same else None), reopened


def _have_same_bytes(whole: Any, reopened: Any, span: range) -> bool:
    """Return True if two memmaps have the same bytes in a span."""
    before = np.frombuffer(whole._mmap, np.uint8)
    parts = (slice(begin, min(begin + COMPARED, span.stop)) for begin in range(span.start, span.stop, COMPARED))
    return all(np.array_equal(before[part], reopened[part]) for part in parts)


def memmap_of(array: codec.Array) -> tuple[Any, int, range] | None:
    """Return the memmap under ``array``, the offset of its first element, and the range of bytes it covers; else None.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     whole = np.memmap(file, np.int64, "w+", shape=(10, 2))
        ...     memmap_of(np.asarray(whole)[3:, 1])[1:]
        (56, range(56, 160))
        >>> memmap_of(np.arange(3))
    """
    base: Any = array
    # Views may be chained through memoryviews, and through the wrappers of as_strided and sliding_window_view.
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
