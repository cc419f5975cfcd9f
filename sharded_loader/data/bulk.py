"""Reading many samples of a dataset at once, through any stack of wrappers.

    read_many(dataset, indices) -> list of samples      ``__getitems__`` where the dataset has it
    gather(dataset, indices, empty) -> finished batch   ``get_batch``; datasets of ours write into ``empty``'s memory

Two rules decide what is used. A wrapper has a bulk method exactly where the dataset inside it has one, and ``hasattr``
tells the truth (`offered_if`). A class that overrides ``__getitem__`` is read by it: an inherited bulk method, which
does not know the override, is never used (`bulk`, `bulk_method`; see `sharded_loader.batching.protocol.known_to`).
A method that a wrapper finds in the wrapped object through ``__getattr__`` is never used either.

A sample draws its random numbers by the index that the loader's sampler yielded, whichever way it is read. So wrappers
that translate indices hand on, beside the translated ones, the `SampleKey` of each sample (`KeyedIndices`).

What can go wrong: a wrapper that is neither ours nor torch's Subset drops the keys. Its samples are then keyed by the
inner index, still the same in every pool. A class whose bulk method comes from a mixin behind the class that defines
``__getitem__`` is read sample by sample: right, but slower.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, TypeVar

import numpy as np

from sharded_loader import rng
from sharded_loader.batching.protocol import Empty, call_with_empty, known_to

Indices = Sequence[int] | np.ndarray[Any, Any]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
Method = TypeVar("Method", bound=Callable[..., Any])

READS = ("__getitem__", "__getitems__", "get_batch")
"""The methods that read samples. Each one does the work of those before it, faster."""


# -- which methods a dataset has ---------------------------------------------------------------------------------------


def bulk_method(dataset: Any, name: str) -> Any:
    """The bound ``__getitems__`` or ``get_batch`` of a dataset, if it reads what ``dataset[index]`` reads; or None.

    Example:
        >>> from sharded_loader import ArrayDataset
        >>> class Negative(ArrayDataset):
        ...     def __getitem__(self, index): return -super().__getitem__(index)
        >>> bulk_method(ArrayDataset([1, 2]), "get_batch") is None, bulk_method(Negative([1, 2]), "get_batch") is None
        (False, True)
    """
    plain = READS[: READS.index(name)]
    if known_to(type(dataset), name, plain) is None and name not in getattr(dataset, "__dict__", ()):
        return None
    # Where nothing inside is faster, torch's method reads one by one, and nobody knows which sample it is at.
    if name == "__getitems__" and any(bulk_method(inner, name) is None for inner in _read_by_torch(dataset)):
        return None
    return getattr(dataset, name, None)


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


def offers(dataset: Any, name: str) -> bool:
    """Whether a dataset has this method; of bulk methods, whether it is one to use (`bulk_method`)."""
    return hasattr(dataset, name) if name not in READS else bulk_method(dataset, name) is not None


def has(name: str) -> Callable[[Any], bool]:
    """A condition for `offered_if`: the dataset that the instance wraps as ``_dataset`` offers this method."""
    return lambda wrapper: offers(wrapper.__dict__.get("_dataset"), name)


def offered_if(condition: Callable[[Any], bool]) -> Callable[[Method], Method]:
    """Decorate a method that exists only on those instances for which ``condition(instance)`` holds.

    A bulk method is decorated as with `bulk` too.

    Example:
        >>> class Box:
        ...     def __init__(self, full): self.full = full
        ...     @offered_if(lambda box: box.full)
        ...     def open(self): return "something"
        >>> hasattr(Box(True), "open"), hasattr(Box(False), "open")
        (True, False)

    Source of the idea: scikit-learn's ``available_if``.
    """
    return lambda method: _Offered(condition, method)  # type: ignore[return-value]


def bulk(method: Method) -> Method:
    """Decorate a bulk method of a dataset of ours, so that subclasses may override ``__getitem__`` alone.

    In such a subclass ``get_batch`` is absent, and ``__getitems__``, which torch's DataLoader and Subset also look for,
    reads sample by sample. A subclass that writes the bulk method itself may call ``super()``'s.

    Example:
        >>> class Evens:
        ...     def __getitem__(self, index): return 2 * index
        ...     @bulk
        ...     def __getitems__(self, indices): return [2 * index for index in indices]
        >>> class Odds(Evens):
        ...     def __getitem__(self, index): return 2 * index + 1
        >>> Odds().__getitems__([3, 4])
        [7, 9]
    """
    return _Offered(lambda dataset: True, method)  # type: ignore[return-value]


class _Offered:
    def __init__(self, condition: Callable[[Any], bool], method: Callable[..., Any]) -> None:
        self._condition = condition
        self._method = method
        self._name = method.__name__
        self._plain = READS[: READS.index(self._name)] if self._name in READS else ()
        update_wrapper(self, method)  # type: ignore[arg-type]  # doctest looks through it

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._method
        if not self._condition(instance):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r} here")
        if not self._plain or known_to(type(instance), self._name, self._plain) is not None:
            return MethodType(self._method, instance)
        if self._name == "__getitems__":
            return partial(_one_by_one, instance)
        ours = next(cls.__name__ for cls in owner.__mro__ if cls.__module__.startswith("sharded_loader."))
        raise AttributeError(
            f"{owner.__name__} overrides how samples are read, and {ours}.{self._name} would ignore that: write "
            f"{self._name} in {owner.__name__} too, or call {ours}.{self._name}(dataset, indices) for what it reads "
            "by itself"
        )


# -- the keys of samples -----------------------------------------------------------------------------------------------


class SampleKey:
    """What a sample's random numbers are keyed by: its index in the loader; and what it drew so far."""

    __slots__ = ("drawn", "index")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.drawn: np.random.Generator | None = None


class KeyedIndices(list[int]):
    """Indices into an inner dataset, with the key of each sample.

    Example:
        >>> KeyedIndices([7, 8], [SampleKey(0), SampleKey(1)])
        [7, 8]
    """

    def __init__(self, indices: Iterable[int], keys: Sequence[SampleKey]) -> None:
        super().__init__(indices)
        self.keys = keys
        self._made = tuple(self)

    @property
    def is_whole(self) -> bool:
        """Whether nobody has sorted, cut or otherwise changed the list: key k still belongs to index k."""
        return tuple(self) == self._made


def keys_of(indices: Sequence[Any]) -> Sequence[SampleKey] | None:
    """The keys of these samples; None outside a loader, where nothing is keyed."""
    if isinstance(indices, KeyedIndices) and indices.is_whole:
        return indices.keys
    return None if rng.reading.scope is None else [SampleKey(index) for index in indices]


def translated(
    inner: Iterable[int], outer: Sequence[Any], positions: Sequence[int] | None = None
) -> list[int] | KeyedIndices:
    """The inner indices of the samples that the caller knows by the outer ones.

    Args:
        inner: the indices.
        outer: of all samples.
        positions: which of the samples ``inner`` are, if not all.

    Example:
        >>> translated([70, 80], [7, 8]), translated([50, 70], [5, 6, 7], [0, 2])
        ([70, 80], [50, 70])
    """
    keys = keys_of(outer)
    if keys is None:
        return list(inner)
    return KeyedIndices(inner, keys if positions is None else [keys[position] for position in positions])


def handed_out(indices: Indices) -> list[Any]:
    """The same indices as a new list, for code of the user's, which may sort it or empty it.

    Example:
        >>> ours = [3, 1]
        >>> handed_out(ours).sort()
        >>> ours
        [3, 1]
    """
    if isinstance(indices, np.ndarray):
        return indices.tolist()  # type: ignore[no-any-return]
    return KeyedIndices(indices, indices.keys) if isinstance(indices, KeyedIndices) else list(indices)


@contextmanager
def each_by_its_key(indices: Sequence[Any]) -> Iterator[Callable[[int], None]]:
    """Inside the block, call the given function with k before touching sample k, so that it draws its own numbers."""
    scope, keys = rng.reading.scope, keys_of(indices)
    if scope is None or keys is None:
        yield lambda position: None
        return
    before = scope.index, scope.drawn
    current = SampleKey(None)

    def turn_to(position: int) -> None:
        nonlocal current
        current.drawn = scope.drawn
        current = keys[position]
        scope.index, scope.drawn = current.index, current.drawn

    try:
        yield turn_to
    finally:
        current.drawn = scope.drawn
        scope.index, scope.drawn = before


# -- reading -----------------------------------------------------------------------------------------------------------


def read_many(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """The samples at these indices, in bulk where the dataset can.

    Example:
        >>> read_many("abc", [2, 0])
        ['c', 'a']
    """
    read = bulk_method(dataset, "__getitems__")
    return _one_by_one(dataset, indices) if read is None else list(read(handed_out(indices)))


def _one_by_one(dataset: Any, indices: Sequence[int]) -> list[Any]:
    samples = []
    with each_by_its_key(indices) as turn_to:
        for position, index in enumerate(indices):
            turn_to(position)
            samples.append(dataset[index])
    return samples


def gather(dataset: Any, indices: Indices, empty: Empty) -> Any:
    """A finished batch of a dataset that has ``get_batch``, in memory from ``empty``.

    Datasets of this library are handed ``empty``. While another one's method runs, `sharded_loader.empty` is it.

    Example:
        >>> from sharded_loader import ArrayDataset
        >>> gather(ArrayDataset(np.arange(5) * 10), [3, 1], np.empty)
        array([30, 10])
    """
    ours = known_to(type(dataset), "get_batch", READS[:2])
    if isinstance(ours, _Offered) and "get_batch" not in vars(dataset):
        return ours.__get__(dataset, type(dataset))(indices, empty)
    return call_with_empty(dataset.get_batch, handed_out(indices), empty)


# -- checked indices ---------------------------------------------------------------------------------------------------


def check_one_index(index: Any) -> None:
    """Reject a list or an array of several indices with a TypeError, where one index, or a key, is expected.

    Example:
        >>> check_one_index("key")
    """
    dimensions: Any = getattr(index, "ndim", 0)
    if isinstance(index, list) or dimensions:
        raise TypeError(
            f"the index is a {type(index).__name__} of {len(index)} indices, not one: read the samples one by one, "
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


def checked_indices(indices: Any, length: int) -> Int64s:
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
    array = array.astype(np.int64, copy=False)
    # One reduction for the usual case (a negative number is a large unsigned one): 0.9 us against 1.5.
    if int(np.maximum.reduce(array.view(np.uint64))) < length:
        return array
    low, high = int(array.min()), int(array.max())
    if low < -length or high >= length:
        checked_index(low if low < -length else high, length)
    return np.where(array < 0, array + length, array)
