"""Reading many samples of a dataset at once, through any stack of wrappers.

    batch_reader(dataset) -> read(indices, empty)       ``get_batch`` as a function; None if there is none to use
    gather(dataset, indices, empty) -> finished batch   the same, of a dataset that has it
    read_many(dataset, indices) -> list of samples      ``__getitems__`` where the dataset has it
    gather_rows(columns, rows, empty) -> the rows       of each column, in memory from ``empty``, each written once

    as_bulk(dataset)  -> gather(indices, empty) -> the batch | NOT_IN_BULK     None: no such way
    as_items(dataset) -> ``__getitems__``, through torch's Subset              None: sample by sample

| dataset | is read as |
|---|---|
| anything with ``get_batch`` (see `bulk_method`) | ``get_batch(indices)``; our own write into memory from ``empty`` |
| NumPy array, torch tensor | one gather |
| torch ``TensorDataset`` | one gather per tensor |
| Hugging Face ``datasets.Dataset`` | ``dataset[indices]``, then each column by the default rules |
| what ``cache`` returns | one gather per column, if all samples of the batch are stored |
| our `ShardDataset` over tables | the rows of each column, out of decoded groups |
| torch ``Subset``, our `SimpleDataset` and `SubsetDataset` over any of these | the same |

The batch is what the default batchify makes of the samples, value by value: same structure, dtypes, shapes. Where that
is not certain, the answer is None, or `NOT_IN_BULK` for this batch, and the samples are read. Examples are a subclass
that reads in its own way, tensors on a device, and indices that are no integers. Hugging Face samples are those of its
``__getitems__``, which torch's DataLoader reads too: in NumPy format ``dataset[i]`` gives a float column as float64,
``dataset[[i]]`` as float32.

Nothing is imported: where a library is not loaded, none of its datasets exists.

Two rules decide what is used. A wrapper has a bulk method exactly where the dataset inside it has one, and ``hasattr``
tells the truth (`bulk`). A class that overrides ``__getitem__`` is read by it: an inherited bulk method, which
does not know the override, is never used (`bulk_method`; see `sharded_loader.batching.protocol.known_to`).
A method that a wrapper finds in the wrapped object through ``__getattr__`` is never used either.

A sample draws its random numbers by the index that the loader's sampler yielded, whichever way it is read. So wrappers
that translate indices hand on, beside the translated ones, the key of each sample (`KeyedIndices` in seeding).

*Samples that an* ``async def`` *reads*: those of a batch are awaited together, by one event loop of the process. It
has a thread of its own: a notebook already runs one in the main thread. All readers of a process share it, because
objects such as HTTP sessions belong to one loop. It ends with the last reader. Each sample is a task with its own
`rng.reading`, so `sample_rng()` knows it. The thread that reads waits for the whole batch, and calls what is no ``async
def`` afterwards. Where a coroutine raises, those beside it are cancelled, and the reader reads the samples again one at
a time, so the error names the sample. Source of the idea: the event loop in a thread of fsspec.

What can go wrong: a wrapper that is neither ours nor torch's Subset drops the keys. Its samples are then keyed by the
inner index, still the same in every pool. A class whose bulk method comes from a mixin behind the class that defines
``__getitem__`` is read sample by sample: right, but slower.
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

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, call_with_empty, in_fields, known_to
from sharded_loader.batching.tree import as_numpy, check_no_grad, empty_tensor, is_column, is_tensor
from sharded_loader.data.seeding import Keys, each_by_its_key, handed_out, keys_of, translated
from sharded_loader.randomness.rng import lent, reading

Indices = Sequence[int] | np.ndarray[Any, Any]
"""The positions of samples in a dataset: a sequence of integers, or an array of integers."""

Int64s = np.ndarray[Any, np.dtype[np.int64]]
"""An array of int64."""


class Indexed(Protocol):
    """A dataset whose sample i is ``dataset[i]``. It also has ``__len__``, unless you give the loader a sampler."""

    def __getitem__(self, index: Any, /) -> Any: ...


Gather = Callable[[Any, Empty], Any]
Method = TypeVar("Method", bound=Callable[..., Any])

NOT_IN_BULK: Any = object()
"""What a gather function returns when this batch has to be read sample by sample."""

READS = ("__getitem__", "__getitems__", "get_batch")
"""The methods that read samples. Each one does the work of those before it, faster."""


# -- which methods a dataset has ---------------------------------------------------------------------------------------


def bulk_method(dataset: object, name: str) -> Any:
    """The bound ``__getitems__`` or ``get_batch`` of a dataset, if it reads what ``dataset[index]`` reads; or None.

    Where samples are awaited, ``__getitems__`` is a function that awaits those of a batch together.

    Example:
        >>> from sharded_loader import ArrayDataset
        >>> class Negative(ArrayDataset):
        ...     def __getitem__(self, index): return -super().__getitem__(index)
        >>> bulk_method(ArrayDataset([1, 2]), "get_batch") is None, bulk_method(Negative([1, 2]), "get_batch") is None
        (False, True)
    """
    plain = READS[: READS.index(name)]
    if known_to(type(dataset), name, plain) is None and name not in getattr(dataset, "__dict__", ()):
        return many(dataset) if name == "__getitems__" and is_awaited(dataset) else None
    method = getattr(dataset, name, None)
    if name == "__getitems__":
        inside = _read_by_torch(dataset)
        # Where nothing inside is faster, torch's method reads one by one, and an error would not name its sample.
        if any(bulk_method(inner, name) is None for inner in inside):
            return None
        if any(map(is_awaited, inside)):  # which torch's method does not do
            return many(dataset)
        if iscoroutinefunction(method):
            return lambda indices: resolved(method(indices))
    return method


def _read_by_torch(dataset: Any) -> Iterable[Any]:
    """The datasets whose ``__getitems__`` torch's own method calls, whatever their classes override."""
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

    In a subclass that overrides ``__getitem__`` alone, ``get_batch`` is absent, and ``__getitems__``, which torch's
    DataLoader and Subset also look for, reads sample by sample. A subclass that writes the bulk method itself may call
    ``super()``'s.

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
    return _Offered(method)  # type: ignore[return-value]


class _Offered:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._name = method.__name__
        method.takes_empty = True  # type: ignore[attr-defined]  # of get_batch: a method of ours has this argument
        update_wrapper(self, method)  # type: ignore[arg-type]  # doctest looks through it

    def __get__(self, instance: Any, owner: type) -> Any:
        name = self._name
        if instance is None:
            return self._method
        if name not in READS:  # set_epoch: one inside may be enough
            is_offered = any(hasattr(one, name) for one in instance._inside)
        else:
            is_offered = name in getattr(instance, "_reads", ())  # whatever is inside
            is_offered = is_offered or all(bulk_method(one, name) is not None for one in instance._inside)
            is_offered = is_offered or (name == "__getitems__" and is_awaited(instance))
        if not is_offered:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {name!r} here")
        if name not in READS or known_to(owner, name, READS[: READS.index(name)]) is not None:
            return MethodType(self._method, instance)
        if name == "__getitems__":
            return partial(_one_by_one, instance)
        ours = next(cls.__name__ for cls in owner.__mro__ if cls.__module__.startswith("sharded_loader."))
        raise AttributeError(
            f"{owner.__name__} overrides how samples are read, and {ours}.{name} would ignore that: write "
            f"{name} in {owner.__name__} too, or call {ours}.{name}(dataset, indices) for what it reads "
            "by itself"
        )


# -- reading -----------------------------------------------------------------------------------------------------------

_DRAW_NOTHING = (list, tuple, range, str, np.ndarray, np.memmap)


def listed(found: Any, count: int) -> list[Any]:
    """What ``__getitems__`` has returned, as a list of ``count`` samples.

    Raises:
        TypeError: it is None or an object, or its items are keys or in no order.
        ValueError: there are more or fewer.
    """
    is_list = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
    if not is_list or isinstance(found, (dict, UserDict, set, frozenset, str, bytes)):
        raise TypeError(
            f"__getitems__ returned {an(type(found))}: return a list of samples, one per index, in the order of "
            "the indices"
        )
    if len(samples := list(found)) != count:
        raise ValueError(
            f"__getitems__ was asked for {count} samples and returned {len(samples)}: return one sample per index, in "
            "the order of the indices"
        )
    return samples


def read_many(dataset: object, indices: Sequence[int]) -> list[Any]:
    """The samples at these indices, in bulk where the dataset can.

    Example:
        >>> read_many("abc", [2, 0])
        ['c', 'a']
    """
    read = bulk_method(dataset, "__getitems__")
    return _one_by_one(dataset, indices) if read is None else listed(read(handed_out(indices)), len(indices))


def _one_by_one(dataset: Any, indices: Sequence[int]) -> list[Any]:
    if type(dataset) in _DRAW_NOTHING:
        return [dataset[index] for index in indices]
    return each_by_its_key(lambda index: dataset[index], indices, indices)


def each_sample(dataset: Any) -> Iterator[Any]:
    """The samples of a dataset in order. Those of an ``async def`` are awaited many at a time.

    Example:
        >>> list(each_sample("abc"))
        ['a', 'b', 'c']
    """
    if is_awaited(dataset):
        held = Awaited(dataset)
        for begin in range(0, len(dataset), CONCURRENCY):
            yield from read_many(dataset, range(begin, min(begin + CONCURRENCY, len(dataset))))
        del held
    else:
        yield from (dataset[index] for index in range(len(dataset)))


def batch_reader(dataset: object) -> Gather | None:
    """``get_batch`` of a dataset, if it is one to use, as ``read(indices, empty)``.

    Methods of this library take ``empty``. While another one runs, `sharded_loader.empty` is it.

    Example:
        >>> from sharded_loader import ArrayDataset
        >>> batch_reader(ArrayDataset(np.arange(5) * 10))([3, 1], np.empty)
        array([30, 10])
    """
    method = bulk_method(dataset, "get_batch")
    if method is None or hasattr(method, "takes_empty"):
        return method  # type: ignore[no-any-return]

    def read(indices: object, empty: Empty) -> Any:
        return call_with_empty(method, handed_out(indices), empty)

    return read


def gather(dataset: object, indices: Indices, empty: Empty) -> Any:
    """A finished batch of a dataset that has ``get_batch``, in memory from ``empty``."""
    read = batch_reader(dataset)
    assert read is not None
    return read(indices, empty)


# -- finished batches --------------------------------------------------------------------------------------------------


def as_bulk(dataset: Any) -> Gather | None:
    """How to read finished batches of a dataset; as the default batchify would make them.

    Args:
        dataset: any.

    Returns:
        ``gather(indices, empty)``, which returns a batch or `NOT_IN_BULK`; None if there is no such way.

    Example:
        >>> as_bulk(np.arange(5) * 10)([3, 1], np.empty)
        array([30, 10])
        >>> as_bulk([1, 2, 3]) is None
        True
    """
    if (inside := part_of(dataset)) is not None:
        return _translated(as_bulk(inside[0]), inside[1])
    if known_to(type(dataset), "_in_columns", READS) is not None:
        in_columns: Gather = dataset._in_columns
        return in_columns
    if (read := batch_reader(dataset)) is not None:
        return read
    if (found := arrays_of(dataset)) is not None:
        return _of_columns(*found)
    if _reads_like(dataset, "datasets.arrow_dataset", "Dataset"):
        return partial(_of_hugging_face, dataset)
    return None


def takes_arrays(dataset: object) -> bool:
    """Whether `as_bulk` reads this dataset by arrays of indices, so that no lists need be made of them.

    Example:
        >>> takes_arrays(np.arange(5)), takes_arrays([1, 2, 3])
        (True, False)
    """
    if arrays_of(dataset) is not None:
        return as_bulk(dataset) is not None
    return hasattr(batch_reader(dataset), "takes_empty")


def as_items(dataset: Any) -> Callable[[Sequence[Any]], Iterable[Any]] | None:
    """How to read many samples of a dataset at once: its ``__getitems__``.

    torch's `Subset` always has one. It is looked through. If the dataset inside has none, samples are read one by one.
    If it has one, each sample keeps its key, so its random numbers are those of the loader's index.

    Example:
        >>> as_items([1, 2, 3]) is None
        True
    """
    if _reads_like(dataset, "torch.utils.data", "Subset"):
        inner = as_items(dataset.dataset)
        if inner is None:
            return None
        return lambda indices: inner(translated(_chosen(dataset, indices), indices))
    items = bulk_method(dataset, "__getitems__")
    return None if items is None else lambda indices: items(handed_out(indices))


def _reads_like(dataset: object, module: str, name: str) -> bool:
    """Whether this is an instance of that class and reads samples as the class does, not in a way of its own."""
    base = getattr(sys.modules.get(module), name, None)
    if not isinstance(base, type) or not isinstance(dataset, base):
        return False
    kind = type(dataset)
    return all(getattr(kind, how, None) is getattr(base, how, None) for how in ("__getitem__", "__getitems__"))


def part_of(dataset: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Of a part of another dataset, that one, and the function that translates indices; otherwise None.

    Example:
        >>> from sharded_loader import SubsetDataset
        >>> inner, translate = part_of(SubsetDataset([5, 6, 7], [2, 0]))
        >>> inner, translate([0, 1])
        ([5, 6, 7], array([2, 0]))
    """
    if "_is_part" in vars(type(dataset)) and "get_batch" not in vars(dataset):
        return dataset._dataset, dataset._inner
    if _reads_like(dataset, "torch.utils.data", "Subset") and batch_reader(dataset) is None:
        return dataset.dataset, partial(_chosen, dataset)
    return None


def arrays_of(dataset: Any) -> tuple[Callable[[], Sequence[Any]], bool] | None:
    """What looks up the arrays that a sample is made of, and whether it is a row of the only one; otherwise None.

    They are looked up for each batch: a TensorDataset's may be replaced between epochs.
    """
    if isinstance(dataset, np.ndarray) or is_tensor(dataset):
        return (lambda: (dataset,)), True
    return ((lambda: dataset.tensors), False) if _reads_like(dataset, "torch.utils.data", "TensorDataset") else None


def _chosen(subset: Any, indices: Sequence[Any]) -> list[Any]:
    """Indices into what a torch Subset wraps."""
    return list(map(subset.indices.__getitem__, indices))


def _translated(inner: Gather | None, translate: Callable[[Any], Any]) -> Gather | None:
    """Reads other indices. Those that cannot be translated are no integers: a dataset may have other keys."""
    if inner is None:
        return None

    def read(indices: object, empty: Empty) -> Any:
        try:
            found = translate(indices)
        except (TypeError, ValueError, OverflowError):
            return NOT_IN_BULK
        return inner(found, empty)

    return read


def _of_columns(columns: Callable[[], Sequence[Any]], bare: bool) -> Gather | None:
    def read(where: Any, empty: Empty) -> Any:
        if not are_rows(columns()):
            return NOT_IN_BULK
        fields = gather_rows(columns(), where, empty)
        return fields[0] if bare else fields

    if not are_rows(columns()):
        return None
    return _translated(read, lambda indices: checked_indices(indices, len(columns()[0])))


def are_rows(columns: Sequence[Any]) -> bool:
    return all(is_gathered(column) or is_column(column) for column in columns)


def _of_hugging_face(dataset: Any, indices: Sequence[Any], empty: Empty) -> Any:
    count = len(indices)
    columns = dataset[indices if isinstance(indices, list) else np.asarray(indices).tolist()]
    if not isinstance(columns, Mapping) or not columns or any(len(columns[name]) != count for name in columns):
        return NOT_IN_BULK
    fields = in_fields(columns, "[{!r}]", repeat(_field), [columns[name] for name in columns], empty)
    return dict(zip(columns, fields, strict=True))


def _field(column: Any, empty: Empty) -> Any:
    """A column as the default batchify makes it of ``column[0]``, ``column[1]``, ..."""
    if (is_gathered(column) and column.dtype.isnative) or is_column(column):
        return column
    return default_batchify_fn.assemble([column[i] for i in range(len(column))], empty)


# -- rows --------------------------------------------------------------------------------------------------------------

_ARRAYS = (np.ndarray, np.memmap)
NUMBERS = "biufc"


def is_gathered(array: Any) -> bool:
    """Whether these are an array's rows of numbers, which `gather_rows` gathers at once.

    A subclass of NumPy's array may read its rows in its own way, as masked arrays do: its rows are read one by one.

    Example:
        >>> is_gathered(np.zeros(3)), is_gathered(np.array(["a"])), is_gathered(np.ma.array([1, 2]))
        (True, False, False)
    """
    return type(array) in _ARRAYS and array.ndim > 0 and array.dtype.kind in NUMBERS


def gather_rows(columns: Sequence[Any], where: Int64s, empty: Empty) -> list[Any]:
    """The rows of each column at checked indices, in memory from ``empty``, each written once.

    Example:
        >>> gather_rows([np.arange(5), ["a", "b", "c", "d", "e"]], np.array([3, 1]), np.empty)
        [array([3, 1]), ['d', 'b']]
    """
    count = len(where)
    rows: Int64s | slice = where
    # Most shuffled batches are told apart by the first comparison: 0.2 us.
    if count and int(where[-1]) - int(where[0]) == count - 1 and (where[1:] - where[:-1] == 1).all():
        rows = slice(int(where[0]), int(where[-1]) + 1)
    fields = []
    for column in columns:
        if type(column) in _ARRAYS and column.ndim and column.dtype.kind in NUMBERS:  # `is_gathered`, without a call
            out: Any = empty((count, *column.shape[1:]), column.dtype.newbyteorder("="))
            fields.append(out)
        elif is_column(column):
            # By NumPy, not index_select: that wakes torch's threads, which on two busy cores took 840 us where
            # one thread took 78 (256 rows of 3x32x32 uint8).
            dtype, column = column.dtype, as_numpy(column)
            held, tensor = empty_tensor((count, *column.shape[1:]), dtype, empty)
            out = as_numpy(tensor) if held is None else held
            fields.append(tensor)
        else:
            fields.append(_other_rows(column, where, empty))
            continue
        if rows is where and out.dtype == column.dtype:
            # The indices are checked, so clipping changes nothing; the default mode "raise" buffers the output
            # (256 rows of 3x32x32 uint8 out of 50,000: 77 us against 53).
            column.take(where, 0, out, "clip")
        else:
            out[...] = column[rows]  # a run in one copy: 20 us where taking the same 256 rows one by one costs 24
    return fields


def _other_rows(column: Any, where: Int64s, empty: Empty) -> Any:
    """The rows of a column that does not lie in plain memory."""
    if is_tensor(column) and type(column).__getitem__ is sys.modules["torch"].Tensor.__getitem__:
        check_no_grad([column])
        torch: Any = sys.modules["torch"]
        return column[torch.from_numpy(where).to(column.device)]
    read = batch_reader(column)
    if read is not None:
        return read(where, empty)
    return default_batchify_fn.assemble(read_many(column, where.tolist()), empty)


# -- checked indices ---------------------------------------------------------------------------------------------------


def check_one_index(index: Any) -> None:
    """Reject a list or an array of several indices with a TypeError, where one index, or a key, is expected.

    Example:
        >>> check_one_index("key")
    """
    dimensions: Any = getattr(index, "ndim", 0)
    if isinstance(index, list) or dimensions:
        raise TypeError(
            f"the index is {an(type(index))} of {len(index)} indices, not one: read the samples one by one, "
            "[dataset[i] for i in indices], or make a dataset of them, SubsetDataset(dataset, indices)"
        )


def checked_index(index: Any, length: int) -> int:
    """An index as a number in 0..length-1; negative ones count from the end.

    Raises:
        IndexError: out of range; says the length.
        TypeError: no integer.

    Example:
        >>> checked_index(-1, 5), checked_index(np.int64(2), 5)
        (4, 2)
    """
    try:
        number = operator.index(index)
    except TypeError:
        check_one_index(index)
        raise TypeError(f"index {index!r} is no integer: give one in 0..{length - 1}") from None
    if number < 0:
        number += length
    if not 0 <= number < length:
        valid = f"0..{length - 1}, or -{length}..-1 from the end" if length else "none, it is empty"
        raise IndexError(f"index {index} is out of range for a dataset of {length} samples: valid is {valid}")
    return number


def checked_indices(indices: object, length: int) -> Int64s:
    """Many indices as an int64 array of numbers in 0..length-1; see `checked_index`.

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
    # One reduction for the usual case (a negative number is a large unsigned one): 0.9 us against 1.5.
    if int(np.maximum.reduce(array.view(np.uint64))) < length:
        return array
    low, high = int(array.min()), int(array.max())
    if low < -length or high >= length:
        checked_index(low if low < -length else high, length)
    return np.where(array < 0, array + length, array)


# -- samples that an ``async def`` reads -------------------------------------------------------------------------------

if TYPE_CHECKING:  # it takes 40 ms: imported where something is awaited
    import asyncio

CONCURRENCY = 64
"""Samples that are awaited at a time, unless the dataset has an attribute ``concurrency``."""

STEP_SECONDS = 1.0
"""Between two looks for a Ctrl-C: on Windows it does not end a wait."""

CLOSING_GRACE = 0.2
"""Seconds that the end of the last reader waits for the event loop: a coroutine may go on when it is cancelled."""


class EventLoop:
    """An event loop in a thread. It ends when this object is collected."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        over, name = threading.Event(), "sharded_loader-event-loop"
        self.thread = threading.Thread(target=_run, args=[self.loop, over], name=name, daemon=True)
        self.thread.start()
        weakref.finalize(self, _end, self.loop, over, self.thread.ident, os.getpid())


_loops: weakref.WeakValueDictionary[int, EventLoop] = weakref.WeakValueDictionary()
"""The event loop of a process, by its id: a forked child has no thread of its parent's."""


def _run(loop: asyncio.AbstractEventLoop, over: threading.Event) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    is_over = False
    while not is_over:
        with suppress(SystemExit, KeyboardInterrupt):  # of a task: they belong to its sample
            loop.run_forever()
            is_over = True
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, loop.shutdown_asyncgens(), return_exceptions=True))
    loop.close()
    over.set()


def _end(loop: asyncio.AbstractEventLoop, over: threading.Event, ident: int | None, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(loop.stop)
        if ident != threading.get_ident():
            over.wait(CLOSING_GRACE)  # not `join`: in a thread that is at its end, that leaves an entry behind for ever


def _event_loop() -> EventLoop:
    return _loops.get(os.getpid()) or _loops.setdefault(os.getpid(), EventLoop())


def resolved(found: object) -> Any:
    """What was found, awaited if need be. Blocks.

    Raises:
        RuntimeError: this is the event loop, which would wait for itself.

    Example:
        >>> async def read(): return 7
        >>> resolved(read()), resolved(8)
        (7, 8)
    """
    if type(found) is not CoroutineType:
        return found
    events = _event_loop()
    if threading.current_thread() is events.thread:
        found.close()
        raise RuntimeError("samples are read here by an async def that is awaited itself: await dataset[index]")
    import asyncio
    from concurrent.futures import wait

    future = error = None
    try:
        with uninterrupted():  # a Ctrl-C between the two would leave it running
            future = asyncio.run_coroutine_threadsafe(found, events.loop)
        while not future.done():
            with lent():
                wait([future], STEP_SECONDS)
        if (error := future.exception()) is not None:
            raise error  # not by `result`, whose frames are no user's
        return future.result()
    finally:
        (found.close if future is None else future.cancel)()
        del future, error  # otherwise error -> traceback -> this frame -> error


def each(fn: Callable[[Any], Any], items: Sequence[Any], keys: Keys, limit: int = CONCURRENCY) -> list[Any]:
    """``fn(item)`` of each item, awaited together. Blocks.

    Args:
        fn: an ``async def``, or what may return a coroutine.
        items: what it is called with.
        keys: which sample each of them is; None: the one that is read anyway.
        limit: how many are awaited at a time.
    """

    async def together() -> list[Any]:
        import asyncio

        room = asyncio.Semaphore(limit)

        async def one(position: int) -> Any:
            if keys is not None:
                reading.set(keys[position])
            async with room:
                found = fn(items[position])
                return await found if type(found) is CoroutineType else found

        tasks = [asyncio.ensure_future(one(position)) for position in range(len(items))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # nothing of this batch runs any more

    return resolved(together())  # type: ignore[no-any-return]


# -- datasets ----------------------------------------------------------------------------------------------------------


def is_awaited(dataset: object) -> bool:
    """Whether a dataset, or one inside it, reads or transforms samples with an ``async def``.

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
    if module.startswith("sharded_loader."):  # a class of the user's over it may await by itself
        if getattr(dataset, "_is_async", False):
            return True
        inside = getattr(dataset, "_inside", ())
    elif module == "torch.utils.data.dataset":
        inside = [getattr(dataset, "dataset", None)]
    return any(map(is_awaited, inside))


def many(dataset: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """How to read many samples of a dataset whose ``dataset[index]`` is to be awaited.

    Raises:
        TypeError, ValueError: its ``concurrency`` is no number above 0.
    """
    advice = "the number of samples of a batch that are awaited at a time"
    limit = check_int("concurrency of the dataset", getattr(dataset, "concurrency", CONCURRENCY), 1, advice)
    return lambda indices: each(dataset.__getitem__, indices, keys_of(indices), limit)


class Awaited:
    """Stands in for a dataset that is awaited. While it lives, the event loop lives on between two batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._events = dataset, _event_loop()

    def __getitem__(self, index: Any) -> Any:
        return resolved(self._dataset[index])
