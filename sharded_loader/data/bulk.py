"""Reading many samples of a dataset at once, through any stack of wrappers.

    read_many(dataset, indices) -> list of samples      ``__getitems__`` where the dataset has it
    gather(dataset, indices, empty) -> finished batch   ``get_batch``; own datasets write into ``empty``'s memory

A wrapper may offer a bulk method only where what it wraps has it, and ``hasattr`` must tell the truth:
`offered_if` makes a method that is absent otherwise. Which bulk methods may be used is decided in `data.overrides`;
`bulk` makes our own datasets follow that rule in whatever reads them, torch's DataLoader too.

A sample draws its random numbers by the index that the loader's sampler yielded, whichever way it is read.
So wrappers that translate indices hand on, beside the translated ones, the `Place` of each sample: the index
as the loader knows it, and the generator that has been drawn from so far (`BulkIndices`). What can go wrong:
a wrapper that is neither ours nor torch's Subset (see foreign) drops the places; its samples are then keyed by
the inner index, still the same in every pool.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, TypeVar

import numpy as np

from sharded_loader import rng
from sharded_loader.batching.protocol import Empty
from sharded_loader.data.overrides import READS, bulk_method, known_to
from sharded_loader.memory.allocation import current_empty

Method = TypeVar("Method", bound=Callable[..., Any])


def offered_if(condition: Callable[[Any], bool]) -> Callable[[Method], Method]:
    """Decorate a method that exists only on those instances for which ``condition(instance)`` holds.

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
        # `_gather` is how get_batch of the same class works, so it is always there for it.
        self._plain = READS[: READS.index(self._name)] if self._name in ("__getitems__", "get_batch") else ()
        update_wrapper(self, method)  # type: ignore[arg-type]  # doctest looks through it

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._method
        if not self._condition(instance):
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r} here")
        if self._plain and known_to(type(instance), self._name, self._plain) is None:
            if self._name == "__getitems__":
                return partial(_one_by_one, instance)
            base = self._method.__qualname__
            raise AttributeError(
                f"{owner.__name__} overrides how samples are read, and {base} would ignore that: write "
                f"{self._name} in {owner.__name__} too, or call {base}(dataset, indices) for what it reads by itself"
            )
        return MethodType(self._method, instance)


class Place:
    """Where a sample stands in its epoch: the index its random numbers are keyed by, and what it drew so far."""

    __slots__ = ("drawn", "index")

    def __init__(self, index: Any) -> None:
        self.index = index
        self.drawn: np.random.Generator | None = None


class BulkIndices(list[int]):
    """Indices into an inner dataset, with the place of each sample.

    Example:
        >>> BulkIndices([7, 8], [Place(0), Place(1)])
        [7, 8]
    """

    def __init__(self, indices: Iterable[int], places: Sequence[Place]) -> None:
        super().__init__(indices)
        self.places = places
        self._made = tuple(self)

    @property
    def is_whole(self) -> bool:
        """Whether nobody has sorted, cut or otherwise changed the list: place k still belongs to index k."""
        return tuple(self) == self._made


def places_of(indices: Sequence[Any]) -> Sequence[Place] | None:
    """The places of these samples; None outside a loader, where nothing is keyed.

    Example:
        >>> places_of([3, 4]) is None
        True
    """
    if isinstance(indices, BulkIndices) and indices.is_whole:
        return indices.places
    return None if rng.current_scope() is None else [Place(index) for index in indices]


def translated(inner: Iterable[int], outer: Sequence[Any]) -> list[int]:
    """The inner indices of the samples that the caller knows by the outer ones.

    Example:
        >>> translated([70, 80], [7, 8])
        [70, 80]
    """
    places = places_of(outer)
    return list(inner) if places is None else BulkIndices(inner, places)


@contextmanager
def each_at_its_place(indices: Sequence[Any]) -> Iterator[Callable[[int], None]]:
    """Inside the block, call the given function with k before touching sample k, so that it draws its own numbers.

    Example:
        >>> with each_at_its_place([3, 4]) as turn_to:
        ...     turn_to(0)
    """
    scope, places = rng.current_scope(), places_of(indices)
    if scope is None or places is None:
        yield lambda position: None
        return
    outer = scope.index, scope.drawn
    current: Place | None = None

    def turn_to(position: int) -> None:
        nonlocal current
        if current is not None:
            current.drawn = scope.drawn
        current = places[position]
        scope.index, scope.drawn = current.index, current.drawn

    try:
        yield turn_to
    finally:
        if current is not None:
            current.drawn = scope.drawn
        scope.index, scope.drawn = outer


def chosen(indices: Sequence[int], inner: Iterable[int], positions: Sequence[int]) -> list[int]:
    """Inner indices of only some of the samples, with the places of just those.

    Args:
        indices: of all samples, as `translated` returned them.
        inner: one per position.
        positions: which of the samples.

    Example:
        >>> chosen([5, 6, 7], [50, 70], [0, 2])
        [50, 70]
    """
    if isinstance(indices, BulkIndices):
        return BulkIndices(inner, [indices.places[position] for position in positions])
    return list(inner)


def handed_out(indices: Sequence[Any] | np.ndarray[Any, Any]) -> list[Any]:
    """The same indices as a new list, for code of the user's, which may sort it or empty it.

    Example:
        >>> ours = [3, 1]
        >>> handed_out(ours).sort()
        >>> ours
        [3, 1]
    """
    if isinstance(indices, np.ndarray):
        return indices.tolist()  # type: ignore[no-any-return]
    return BulkIndices(indices, indices.places) if isinstance(indices, BulkIndices) else list(indices)


def read_many(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Read samples, in bulk where the dataset can.

    Args:
        dataset: anything with ``__getitem__``.
        indices: of the samples.

    Returns:
        The samples, in that order.

    Example:
        >>> read_many("abc", [2, 0])
        ['c', 'a']
    """
    read = bulk_method(dataset, "__getitems__")
    return _one_by_one(dataset, indices) if read is None else list(read(handed_out(indices)))


def _one_by_one(dataset: Any, indices: Sequence[int]) -> list[Any]:
    samples = []
    with each_at_its_place(indices) as turn_to:
        for position, index in enumerate(indices):
            turn_to(position)
            samples.append(dataset[index])
    return samples


def gather(dataset: Any, indices: Sequence[int] | np.ndarray[Any, Any], empty: Empty) -> Any:
    """Read a finished batch from a dataset that has ``get_batch``, in memory from ``empty``.

    Our own datasets are handed ``empty``; in others `sharded_loader.empty` is it.

    Example:
        >>> from sharded_loader.data.datasets import ArrayDataset
        >>> gather(ArrayDataset(np.arange(5) * 10), [3, 1], np.empty)
        array([30, 10])
    """
    own = known_to(type(dataset), "_gather", READS[:-1])
    if isinstance(own, _Offered) and "get_batch" not in vars(dataset):
        return own.__get__(dataset, type(dataset))(indices, empty)
    with current_empty(empty):
        return dataset.get_batch(handed_out(indices))


def check_one_index(index: Any) -> None:
    """Refuse a list or an array of several indices where one index, or a key, is expected.

    Raises:
        TypeError: it is one.

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
        raise IndexError(f"index {index} is out of range for a dataset of {length} samples: valid is {_valid(length)}")
    return number


def _valid(length: int) -> str:
    return f"0..{length - 1}, or -{length}..-1 from the end" if length else "none, it is empty"


def checked_indices(indices: Any, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Many indices as an int64 array of numbers in 0..length-1; see `checked_index`.

    Raises:
        IndexError: one is out of range; names it and the length.
        TypeError: they are no integers.

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
    return np.where(array < 0, array + length, array) if low < 0 else array
