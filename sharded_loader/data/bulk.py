"""Bulk reads: many samples of a dataset at once, through any stack of wrappers.

    as_bulk(dataset)  -> gather(indices, empty) -> batch | NOT_IN_BULK
    as_items(dataset) -> read(indices) -> list of samples

| dataset | is read as |
|---|---|
| anything with ``get_batch`` (see `bulk_method`) | ``get_batch(indices)``; our own write into memory from ``empty`` |
| NumPy array, torch tensor, torch ``TensorDataset`` | one gather per array |
| Hugging Face ``datasets.Dataset`` | ``dataset[indices]``, then each column by the default rules |
| the result of ``cache`` | one gather per column, if all samples of the batch are stored |
| our `ShardDataset` over tables | the rows of each column, out of decoded groups |
| torch ``Subset``, our `SimpleDataset` and `SubsetDataset` over any of these | the same |

The batch has exactly the structure, dtypes, shapes and values that the default batchify makes of the samples. Where
that is not certain (tensors on a device, indices that are not integers), the result is None, or `NOT_IN_BULK` for one
batch, and the samples are read instead. Hugging Face samples are those of ``__getitems__``, as in torch's DataLoader:
in NumPy format ``dataset[i]`` gives a float column as float64, ``dataset[[i]]`` as float32. No library is imported: if
it is not loaded, none of its datasets exist.

A wrapper has a bulk method exactly where the dataset inside has one, and ``hasattr`` reflects that (`bulk`). If a class
overrides ``__getitem__``, inherited bulk methods are ignored, because they would bypass the override (see
`sharded_loader.base.checks.fast_method`). So are methods that a wrapper finds through ``__getattr__``, and those
of a mixin behind the class that defines ``__getitem__``.

Random numbers of a sample are keyed by the index that the loader's sampler yielded, however the sample is read. So
wrappers pass on the keys with the translated indices (`KeyedIndices` in seeding). A third-party wrapper other than
torch's Subset drops the keys; its samples are keyed by the inner index, which is still the same in every pool.

*Async datasets.* One event loop per process awaits the samples of a batch together, since objects such as HTTP sessions
belong to one loop. It runs in a thread of its own, because a notebook already runs one in the main thread, and ends
with the last reader. Each sample is a task with its own `rng.reading`, so `sample_rng()` works. If a coroutine raises,
the others are cancelled and the reader reads the samples one at a time, so that the error names the sample. Source of
the idea: the event loop in a thread of fsspec.
"""

from __future__ import annotations

import operator
import os
import sys
import threading
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, update_wrapper
from inspect import iscoroutinefunction
from itertools import repeat
from types import CoroutineType, MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from sharded_loader.base.checks import check_int, fast_method
from sharded_loader.base.described import an
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, call_with_empty, in_fields
from sharded_loader.batching.tree import as_numpy, check_no_grad, empty_tensor, is_column, is_tensor
from sharded_loader.data.seeding import Keys, attach_keys, copy_indices, keys_of, map_with_keys
from sharded_loader.randomness.rng import lent, reading

Indices = Sequence[int] | np.ndarray[Any, Any]
"""Positions of samples in a dataset: a sequence or an array of integers."""

Int64s = np.ndarray[Any, np.dtype[np.int64]]
"""An array of int64."""

Selection = range | Int64s
"""Indices of a part of a dataset: a ``range``, which takes no memory, or an int64 array. Never modified."""


class Indexed(Protocol):
    """A dataset whose sample i is ``dataset[i]``. It also has ``__len__``, unless you give the loader a sampler."""

    def __getitem__(self, index: Any, /) -> Any: ...


Gather = Callable[[Any, Empty], Any]
Method = TypeVar("Method", bound=Callable[..., Any])

NOT_IN_BULK: Any = object()
"""Returned by a gather function if this batch has to be read sample by sample."""

READS = ("__getitem__", "__getitems__", "get_batch")
"""Methods that read samples. Each one does the work of those before it, faster."""


# -- methods of a dataset ----------------------------------------------------------------------------------------------


def bulk_method(dataset: object, name: str) -> Any:
    """Return the bound ``__getitems__`` or ``get_batch`` of a dataset, or None if it would bypass ``dataset[index]``.

    For async datasets, ``__getitems__`` awaits the samples of a batch together.

    Example:
        >>> from sharded_loader import ArrayDataset
        >>> class Negative(ArrayDataset):
        ...     def __getitem__(self, index): return -super().__getitem__(index)
        >>> bulk_method(ArrayDataset([1, 2]), "get_batch") is None, bulk_method(Negative([1, 2]), "get_batch") is None
        (False, True)
    """
    plain = READS[: READS.index(name)]
    if fast_method(type(dataset), name, plain) is None and name not in getattr(dataset, "__dict__", ()):
        return concurrent_reader(dataset) if name == "__getitems__" and is_awaited(dataset) else None
    method = getattr(dataset, name, None)
    if name == "__getitems__":
        inside = _inner_of_torch(dataset)
        # torch's method falls back to reading one by one, and then an error would not name its sample.
        if any(bulk_method(inner, name) is None for inner in inside):
            return None
        if any(map(is_awaited, inside)):  # torch's method does not await samples
            return concurrent_reader(dataset)
        if iscoroutinefunction(method):
            return lambda indices: await_value(method(indices))
    return method


def _inner_of_torch(dataset: Any) -> Iterable[Any]:
    """Return the datasets whose ``__getitems__`` torch's own method calls, whatever their classes override."""
    torch: Any = sys.modules.get("torch.utils.data")
    method = getattr(type(dataset), "__getitems__", None)
    if torch is None or method is None:
        return ()
    if method is getattr(torch.Subset, "__getitems__", None):
        return [dataset.dataset]
    if method is getattr(torch.StackDataset, "__getitems__", None):
        return list(dataset.datasets.values()) if isinstance(dataset.datasets, dict) else dataset.datasets
    return ()


def bulk(method: Method) -> Method:
    """Decorate a method that a dataset has only where the datasets inside it (``_inside``) have it.

    A subclass that overrides only ``__getitem__`` has no ``get_batch``, and its ``__getitems__``, which torch's
    DataLoader and Subset look for, reads sample by sample. A subclass may override the bulk method itself and call
    ``super()``.

    Example:
        >>> class Evens:
        ...     _inside = ()
        ...     def __getitem__(self, index): return 2 * index
        ...     @bulk
        ...     def __getitems__(self, indices): return [2 * index for index in indices]
        >>> class Odds(Evens):
        ...     def __getitem__(self, index): return 2 * index + 1
        >>> Odds().__getitems__([3, 4])
        [7, 9]

    Source of the idea: scikit-learn's ``available_if``.
    """
    return _ConditionalMethod(method)  # type: ignore[return-value]


class _ConditionalMethod:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._name = method.__name__
        method.takes_empty = True  # type: ignore[attr-defined]  # for get_batch: our methods have this argument
        update_wrapper(self, method)  # type: ignore[arg-type]  # so that doctest finds the examples

    def __get__(self, instance: Any, owner: type) -> Any:
        name = self._name
        if instance is None:
            return self._method
        if name not in READS:  # set_epoch: one dataset inside is enough
            is_available = any(hasattr(inner, name) for inner in instance._inside)
        else:
            is_available = name in getattr(instance, "_reads", ())  # regardless of the datasets inside
            is_available = is_available or all(bulk_method(inner, name) is not None for inner in instance._inside)
            is_available = is_available or (name == "__getitems__" and is_awaited(instance))
        if not is_available:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r} here")
        if name not in READS or fast_method(owner, name, READS[: READS.index(name)]) is not None:
            return MethodType(self._method, instance)
        if name == "__getitems__":
            return partial(_read_one_by_one, instance)
        ours = next(cls.__name__ for cls in owner.__mro__ if cls.__module__.startswith("sharded_loader."))
        raise AttributeError(
            f"{owner.__name__} overrides how samples are read, and {ours}.{name} would ignore that: write "
            f"{name} in {owner.__name__} too, or call {ours}.{name}(dataset, indices) for what it reads "
            "by itself"
        )


# -- reading -----------------------------------------------------------------------------------------------------------

_NEVER_RANDOM = (list, tuple, range, str, np.ndarray, np.memmap)


def listed(result: Any, count: int) -> list[Any]:
    """Check the result of ``__getitems__`` and return it as a list of ``count`` samples."""
    is_list = hasattr(result, "__iter__") or hasattr(result, "__getitem__")
    if not is_list or isinstance(result, (dict, UserDict, set, frozenset, str, bytes)):
        text = f"__getitems__ returned {an(type(result))}"
        raise TypeError(f"{text}: return a list of samples, one per index, in the order of the indices")
    if len(samples := list(result)) != count:
        text = f"__getitems__ was asked for {count} samples and returned {len(samples)}"
        raise ValueError(f"{text}: return one sample per index, in the order of the indices")
    return samples


def read_many(dataset: object, indices: Sequence[int]) -> list[Any]:
    """Return the samples at these indices, read in bulk if the dataset can."""
    read = bulk_method(dataset, "__getitems__")
    return _read_one_by_one(dataset, indices) if read is None else listed(read(copy_indices(indices)), len(indices))


def _read_one_by_one(dataset: Any, indices: Sequence[int]) -> list[Any]:
    if type(dataset) in _NEVER_RANDOM:
        return [dataset[index] for index in indices]
    return map_with_keys(lambda index: dataset[index], indices, indices)


def each_sample(dataset: Any) -> Iterator[Any]:
    """Iterate over the samples of a dataset in order. Those of an ``async def`` are awaited `CONCURRENCY` at a time."""
    if is_awaited(dataset):
        loop_owner = Awaited(dataset)
        for begin in range(0, len(dataset), CONCURRENCY):
            yield from read_many(dataset, range(begin, min(begin + CONCURRENCY, len(dataset))))
        del loop_owner
    else:
        yield from (dataset[index] for index in range(len(dataset)))


def batch_reader(dataset: object) -> Gather | None:
    """Return the usable ``get_batch`` of a dataset as ``read(indices, empty)``, or None.

    Our own methods take ``empty`` as an argument; third-party ones find it in `sharded_loader.empty` while they run.
    """
    method = bulk_method(dataset, "get_batch")
    if method is None or hasattr(method, "takes_empty"):
        return method  # type: ignore[no-any-return]
    return lambda indices, empty: call_with_empty(method, copy_indices(indices), empty)


def gather(dataset: object, indices: Indices, empty: Empty) -> Any:
    """Return a collated batch of a dataset that has ``get_batch``, in memory from ``empty``."""
    read = batch_reader(dataset)
    assert read is not None
    return read(indices, empty)


# -- collated batches --------------------------------------------------------------------------------------------------


def as_bulk(dataset: Any) -> Gather | None:
    """Return ``gather(indices, empty)``, which returns a collated batch or `NOT_IN_BULK`; None without a bulk read.

    Example:
        >>> as_bulk(np.arange(5) * 10)([3, 1], np.empty)
        array([30, 10])
        >>> as_bulk([1, 2, 3]) is None
        True
    """
    if (inside := part_of(dataset)) is not None:
        return _translating_reader(as_bulk(inside[0]), inside[1])
    if fast_method(type(dataset), "_in_columns", READS) is not None:
        in_columns: Gather = dataset._in_columns
        return in_columns
    if (read := batch_reader(dataset)) is not None:
        return read
    if (arrays := arrays_of(dataset)) is not None:
        return _column_reader(*arrays)
    if _reads_like(dataset, "datasets.arrow_dataset", "Dataset"):
        return partial(_read_hugging_face, dataset)
    return None


def takes_arrays(dataset: object) -> bool:
    """Return True if `as_bulk` accepts arrays of indices, so that no lists need to be made."""
    if arrays_of(dataset) is not None:
        return as_bulk(dataset) is not None
    return hasattr(batch_reader(dataset), "takes_empty")


def as_items(dataset: Any) -> Callable[[Sequence[Any]], Iterable[Any]] | None:
    """Return a function that reads many samples at once by ``__getitems__``, or None.

    The dataset inside a torch `Subset`, which always has the method, decides. Samples keep the keys of their outer
    indices.
    """
    if _reads_like(dataset, "torch.utils.data", "Subset"):
        inner = as_items(dataset.dataset)
        if inner is None:
            return None
        return lambda indices: inner(attach_keys(_subset_indices(dataset, indices), indices))
    items = bulk_method(dataset, "__getitems__")
    return None if items is None else lambda indices: items(copy_indices(indices))


def _reads_like(dataset: object, module: str, name: str) -> bool:
    """Return True if ``dataset`` is an instance of that class and does not override how it reads."""
    base = getattr(sys.modules.get(module), name, None)
    if not isinstance(base, type) or not isinstance(dataset, base):
        return False
    kind = type(dataset)
    return all(getattr(kind, how, None) is getattr(base, how, None) for how in ("__getitem__", "__getitems__"))


def part_of(dataset: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return the dataset inside a subset, and the function that translates indices; None for other datasets.

    Example:
        >>> from sharded_loader import SubsetDataset
        >>> inner, translate = part_of(SubsetDataset([5, 6, 7], [2, 0]))
        >>> inner, translate([0, 1])
        ([5, 6, 7], array([2, 0]))
    """
    if "_is_part" in vars(type(dataset)) and "get_batch" not in vars(dataset):
        return dataset._dataset, dataset._inner
    if _reads_like(dataset, "torch.utils.data", "Subset") and batch_reader(dataset) is None:
        return dataset.dataset, partial(_subset_indices, dataset)
    return None


def arrays_of(dataset: Any) -> tuple[Callable[[], Sequence[Any]], bool] | None:
    """Return a function that looks up a dataset's arrays, and whether samples are bare rows; None for other datasets.

    Each batch looks them up again, because the arrays of a TensorDataset may be replaced between epochs.
    """
    if isinstance(dataset, np.ndarray) or is_tensor(dataset):
        return (lambda: (dataset,)), True
    return ((lambda: dataset.tensors), False) if _reads_like(dataset, "torch.utils.data", "TensorDataset") else None


def _subset_indices(subset: Any, indices: Sequence[Any]) -> list[Any]:
    """Translate indices through a torch Subset."""
    return list(map(subset.indices.__getitem__, indices))


def _translating_reader(inner: Gather | None, translate: Callable[[Any], Any]) -> Gather | None:
    """Read at translated indices. Keys that cannot be translated are read sample by sample."""
    if inner is None:
        return None

    def read(indices: object, empty: Empty) -> Any:
        try:
            inner_indices = translate(indices)
        except (TypeError, ValueError, OverflowError):
            return NOT_IN_BULK
        return inner(inner_indices, empty)

    return read


def _column_reader(columns: Callable[[], Sequence[Any]], is_single: bool) -> Gather | None:
    def read(where: Any, empty: Empty) -> Any:
        if not are_rows(columns()):
            return NOT_IN_BULK
        fields = gather_rows(columns(), where, empty)
        return fields[0] if is_single else fields

    if not are_rows(columns()):
        return None
    return _translating_reader(read, lambda indices: checked_indices(indices, len(columns()[0])))


def are_rows(columns: Sequence[Any]) -> bool:
    return all(is_gathered(column) or is_column(column) for column in columns)


def _read_hugging_face(dataset: Any, indices: Sequence[Any], empty: Empty) -> Any:
    count = len(indices)
    columns = dataset[indices if isinstance(indices, list) else np.asarray(indices).tolist()]
    if not isinstance(columns, Mapping) or not columns or any(len(columns[name]) != count for name in columns):
        return NOT_IN_BULK
    fields = in_fields(columns, "[{!r}]", repeat(_collate_column), [columns[name] for name in columns], empty)
    return dict(zip(columns, fields, strict=True))


def _collate_column(column: Any, empty: Empty) -> Any:
    """Collate a column as the default batchify does with ``column[0]``, ``column[1]``, ..."""
    if (is_gathered(column) and column.dtype.isnative) or is_column(column):
        return column
    return default_batchify_fn.assemble([column[i] for i in range(len(column))], empty)


# -- rows --------------------------------------------------------------------------------------------------------------

_ARRAYS = (np.ndarray, np.memmap)
NUMBERS = "biufc"


def is_gathered(array: Any) -> bool:
    """Return True for a plain NumPy array of numbers. Subclasses may read rows in their own way, as masked arrays do.

    Example:
        >>> is_gathered(np.zeros(3)), is_gathered(np.array(["a"])), is_gathered(np.ma.array([1, 2]))
        (True, False, False)
    """
    return type(array) in _ARRAYS and array.ndim > 0 and array.dtype.kind in NUMBERS


def gather_rows(
    columns: Sequence[Any], indices: Int64s, empty: Empty, names: Sequence[object] | None = None
) -> list[Any]:
    """Return the rows of each column at checked indices, each written once into memory from ``empty``.

    ``names`` are the columns' names in errors. Default: their positions, if there are several.

    Example:
        >>> gather_rows([np.arange(5), ["a", "b", "c", "d", "e"]], np.array([3, 1]), np.empty)
        [array([3, 1]), ['d', 'b']]
    """
    count = len(indices)
    fields = []
    for column in columns:
        if type(column) in _ARRAYS and column.ndim and column.dtype.kind in NUMBERS:  # `is_gathered`, inlined
            out: Any = empty((count, *column.shape[1:]), column.dtype.newbyteorder("="))
            fields.append(out)
        elif is_column(column):
            # NumPy instead of index_select, which wakes torch's threads: 840 us on two busy cores against 78 in one
            # thread (256 rows of 3x32x32 uint8).
            held, tensor = empty_tensor((count, *column.shape[1:]), column.dtype, empty)
            out, column = as_numpy(tensor) if held is None else held, as_numpy(column)
            fields.append(tensor)
        else:
            at, label = len(fields), "[{!r}]" if names or len(columns) > 1 else ""
            make = partial(_gather_other_rows, indices)
            fields += in_fields([names[at] if names else at], label, [make], [column], empty)
            continue
        if out.dtype == column.dtype and column.flags.c_contiguous and column.flags.aligned:
            # The indices are checked, so "clip" changes nothing, while the default mode "raise" buffers the output
            # (256 rows of 3x32x32 uint8 out of 50,000: 77 us against 53).
            column.take(indices, 0, out, "clip")
        else:
            out[...] = column[indices]  # take would copy the whole column first: a view with axes in another order
    return fields


def _gather_other_rows(indices: Int64s, column: Any, empty: Empty) -> Any:
    """Return the rows of a column that does not lie in plain memory."""
    if is_tensor(column) and type(column).__getitem__ is sys.modules["torch"].Tensor.__getitem__:
        check_no_grad([column])
        torch: Any = sys.modules["torch"]
        return column[torch.from_numpy(indices).to(column.device)]
    read = batch_reader(column)
    if read is not None:
        return read(indices, empty)
    return default_batchify_fn.assemble(read_many(column, indices.tolist()), empty)


# -- indices -----------------------------------------------------------------------------------------------------------


def check_one_index(index: Any) -> None:
    """Reject a list or array of several indices with a TypeError."""
    dimensions: Any = getattr(index, "ndim", 0)
    if isinstance(index, list) or dimensions:
        raise TypeError(
            f"the index is {an(type(index))} of {len(index)} indices, not one: read the samples one by one, "
            "[dataset[i] for i in indices], or make a dataset of them, SubsetDataset(dataset, indices)"
        )


def checked_index(index: Any, length: int) -> int:
    """Return an index as an int in 0..length-1, or raise IndexError or TypeError; negative ones count from the end.

    Example:
        >>> checked_index(-1, 5), checked_index(np.int64(2), 5)
        (4, 2)
    """
    try:
        number = operator.index(index)
    except TypeError:
        check_one_index(index)
        raise TypeError(f"index {index!r} is not an integer: give one in 0..{length - 1}") from None
    if number < 0:
        number += length
    if not 0 <= number < length:
        valid = f"0..{length - 1}, or -{length}..-1 from the end" if length else "none, it is empty"
        raise IndexError(f"index {index} is out of range for a dataset of {length} samples: valid is {valid}")
    return number


def checked_indices(indices: object, length: int) -> Int64s:
    """Return indices as an int64 array of numbers in 0..length-1; see `checked_index`.

    Example:
        >>> checked_indices([0, -1], 5)
        array([0, 4])
    """
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"indices of dtype {array.dtype} and shape {array.shape}: give a flat list of integers")
    if array.dtype != np.int64:
        array = array.astype(np.int64)
    # One reduction in the usual case, since negative numbers are large unsigned ones: 0.9 us against 1.5.
    if int(np.maximum.reduce(array.view(np.uint64))) < length:
        return array
    low, high = int(array.min()), int(array.max())
    if low < -length or high >= length:
        checked_index(low if low < -length else high, length)
    return np.where(array < 0, array + length, array)


def composed(outer: Selection, inner: Selection) -> Selection:
    """Return the indices of a part of a part, ``outer[inner]``, unchecked; a range if both are ranges.

    Example:
        >>> composed(range(100, 200, 10), range(5, 0, -2)), composed(range(100, 200, 10), np.array([3, 0]))
        (range(150, 100, -20), array([130, 100]))
    """
    if isinstance(inner, range):
        selection: Selection = outer[slice(inner.start, inner.stop if inner.stop >= 0 else None, inner.step)]
        return selection
    return taken(outer, inner)


def taken(indices: Selection, positions: Int64s) -> Int64s:
    """Return the indices at these positions, unchecked.

    Example:
        >>> taken(range(10**12, 0, -2), np.array([0, 3])).tolist()
        [1000000000000, 999999999994]
    """
    return indices.start + indices.step * positions if isinstance(indices, range) else indices[positions]


# -- async datasets ----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:  # imported on first use elsewhere: it takes 40 ms
    import asyncio

CONCURRENCY = 64
"""Samples awaited at a time, unless the dataset has an attribute ``concurrency``."""

STEP_SECONDS = 1.0
"""Interval between checks for Ctrl-C, which does not interrupt a wait on Windows."""

CLOSING_GRACE = 0.2
"""Seconds to wait for the event loop to end. Bounded, because a coroutine may ignore its cancellation."""


class EventLoop:
    """An event loop in a thread of its own. The loop ends when this object is collected."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        closed, name = threading.Event(), "sharded_loader-event-loop"
        self.thread = threading.Thread(target=_run_loop, args=[self.loop, closed], name=name, daemon=True)
        self.thread.start()
        weakref.finalize(self, _stop_loop, self.loop, closed, self.thread.ident, os.getpid())


_loops: weakref.WeakValueDictionary[int, EventLoop] = weakref.WeakValueDictionary()
"""Event loops by process id: a forked child has no threads of its parent."""


def _run_loop(loop: asyncio.AbstractEventLoop, closed: threading.Event) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    is_stopped = False
    while not is_stopped:
        with suppress(SystemExit, KeyboardInterrupt):  # raised in a task, which reports them
            loop.run_forever()
            is_stopped = True
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, loop.shutdown_asyncgens(), return_exceptions=True))
    loop.close()
    closed.set()


def _stop_loop(loop: asyncio.AbstractEventLoop, closed: threading.Event, ident: int | None, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(RuntimeError):  # already closed
            loop.call_soon_threadsafe(loop.stop)
        if ident != threading.get_ident():
            closed.wait(CLOSING_GRACE)  # not `join`, which in a dying thread leaves an entry behind for ever


def _get_event_loop() -> EventLoop:
    return _loops.get(os.getpid()) or _loops.setdefault(os.getpid(), EventLoop())


def await_value(value: object) -> Any:
    """Return a value, or wait for the result of a coroutine. Fails on the event loop, which would wait for itself."""
    if type(value) is not CoroutineType:
        return value
    events = _get_event_loop()
    if threading.current_thread() is events.thread:
        value.close()
        raise RuntimeError("samples are read here by an async def that is awaited itself: await dataset[index]")
    import asyncio
    from concurrent.futures import wait

    future = error = None
    try:
        with uninterrupted():  # a Ctrl-C between call and assignment would leave it running
            future = asyncio.run_coroutine_threadsafe(value, events.loop)
        while not future.done():
            with lent():
                wait([future], STEP_SECONDS)
        if (error := future.exception()) is not None:
            raise error  # not by `result`, which would add its frames to the traceback
        return future.result()
    finally:
        (value.close if future is None else future.cancel)()
        del future, error  # breaks the cycle error -> traceback -> this frame -> error


def await_each(fn: Callable[[Any], Any], items: Sequence[Any], keys: Keys, limit: int = CONCURRENCY) -> list[Any]:
    """Call ``fn(item)`` for each item, and await at most ``limit`` of its coroutines together. Blocks."""

    async def run_all() -> list[Any]:
        import asyncio

        semaphore = asyncio.Semaphore(limit)

        async def run_one(position: int) -> Any:
            if keys is not None:
                reading.set(keys[position])
            async with semaphore:
                result = fn(items[position])
                return await result if type(result) is CoroutineType else result

        tasks = [asyncio.ensure_future(run_one(position)) for position in range(len(items))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # wait until no task of the batch runs

    return await_value(run_all())  # type: ignore[no-any-return]


def is_awaited(dataset: object) -> bool:
    """Return True if a dataset, or one inside it, reads or transforms samples with an ``async def``.

    Example:
        >>> class Store:
        ...     async def __getitem__(self, index): return index
        >>> is_awaited(Store()), is_awaited([1, 2])
        (True, False)
    """
    methods = [getattr(type(dataset), name, None) for name in ("__getitem__", "__getitems__")]
    if any(map(iscoroutinefunction, methods)):
        return True
    inside: Iterable[Any] = ()
    module = getattr(methods[0], "__module__", None) or ""
    if module.startswith("sharded_loader."):  # wrappers of other packages may await by themselves
        if getattr(dataset, "_is_async", False):
            return True
        inside = getattr(dataset, "_inside", ())
    elif module == "torch.utils.data.dataset":
        inside = [getattr(dataset, "dataset", None)]
    return any(map(is_awaited, inside))


def concurrent_reader(dataset: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that reads many samples of an async dataset, at most its ``concurrency`` at a time."""
    advice = "the number of samples of a batch that are awaited at a time"
    limit = check_int("concurrency of the dataset", getattr(dataset, "concurrency", CONCURRENCY), 1, advice)
    return lambda indices: await_each(dataset.__getitem__, indices, keys_of(indices), limit)


class Awaited:
    """Stand-in for an async dataset. While it lives, the event loop stays alive between batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._events = dataset, _get_event_loop()

    def __getitem__(self, index: Any) -> Any:
        return await_value(self._dataset[index])
