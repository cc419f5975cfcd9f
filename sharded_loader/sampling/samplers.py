"""Orders of single indices: one after the other, shuffled, filtered, strided, sorted.

In: how many samples there are (or keys, or indices), and a seed where order is random. Out: Python
ints, or int64 arrays through ``chunks``. Every epoch is a pure function of (seed, epoch); any place in it
is reached without making what comes before, except that shuffles of up to 16 M indices are made whole.

What can go wrong: arguments, all refused in the constructors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.data.columns import as_dataset
from sharded_loader.sampling.base import IndexSampler, Indices, Sampler, check_int, resolve_seed
from sharded_loader.sampling.permutation import CHUNK, MAX_LENGTH, permuted_chunks

__all__ = [
    "FilterSampler",
    "IndexSampler",
    "IntervalSampler",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "SortedSampler",
    "SubsetRandomSampler",
    "slices",
    "sort_order",
    "sortable",
]


def _check_length(length: Any) -> int:
    return check_int("length", length, 0, "give the number of samples, len(dataset)")


def slices(array: Indices, start: int) -> Iterator[Indices]:
    """An array from ``start`` on, in chunks."""
    for begin in range(start, len(array), CHUNK):
        yield array[begin : begin + CHUNK]


class SequentialSampler(IndexSampler):
    """Indices in order: start, start + 1, ... start + length - 1.

    Args:
        length: how many.
        start: the first.

    Raises:
        TypeError, ValueError: if ``length`` is not an integer or negative.

    Example:
        >>> list(SequentialSampler(4, start=3))
        [3, 4, 5, 6]

    Source of the idea: `mxnet.gluon.data.SequentialSampler`.
    """

    decided_by = (("start", "_first"),)

    def __init__(self, length: int, start: int = 0) -> None:
        self._length = _check_length(length)
        self._first = check_int("start", start, -MAX_LENGTH, "give the first index")

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        end = self._first + self._length
        for begin in range(self._first + start, end, CHUNK):
            yield np.arange(begin, min(begin + CHUNK, end), dtype=np.int64)

    def len_epoch(self, epoch: int) -> int:
        return self._length


class RandomSampler(IndexSampler):
    """Every index once per epoch, in a new random order each epoch.

    Up to 2**24 (16 M) indices the order is one array; above it is computed in chunks, in constant memory,
    from any position in constant time (see `sharded_loader.sampling.permutation`).

    Args:
        length: number of samples, up to 2**62.
        seed: with the epoch it decides the order. None draws one from torch's default generator.

    Raises:
        TypeError, ValueError: if ``length`` is not an integer, negative, or above 2**62.

    Example:
        >>> sampler = RandomSampler(10**12, seed=7)
        >>> len(sampler)
        1000000000000
        >>> next(sampler.iter_epoch(0, start=10**11)) < 10**12
        True

    Source of the idea: `mxnet.gluon.data.RandomSampler`.
    """

    def __init__(self, length: int, seed: int | None = None) -> None:
        self._length = _check_length(length)
        if self._length > MAX_LENGTH:
            raise ValueError(
                f"RandomSampler shuffles up to 2**62 samples, got length={self._length}: "
                "use SequentialSampler, or SplitSampler over parts"
            )
        self.seed = resolve_seed(seed)

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        return permuted_chunks(self._length, (self.seed, "order", epoch), start)

    def len_epoch(self, epoch: int) -> int:
        return self._length


class SubsetRandomSampler(IndexSampler):
    """The given indices once per epoch, in a new random order each epoch.

    Two samplers over different indices have different orders, also with the same seed.

    Args:
        indices: 1-D sequence of integers.
        seed: with the epoch it decides the order. None draws one from torch's default generator.

    Raises:
        ValueError: if ``indices`` are not a 1-D sequence of integers.

    Example:
        >>> sorted(SubsetRandomSampler([2, 30, 5], seed=7))
        [2, 5, 30]

    Source of the idea: `torch.utils.data.SubsetRandomSampler`.
    """

    decided_by = (("indices", "_indices"),)

    def __init__(self, indices: Sequence[int] | npt.NDArray[Any], seed: int | None = None) -> None:
        array = np.asarray(indices)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"indices must be a 1-D sequence of integers, got shape {array.shape} and dtype {array.dtype}: "
                "pass a list of sample indices (np.flatnonzero(mask) for a mask)"
            )
        self._indices: Indices = array.astype(np.int64)
        # Part of the key: the parts of a dataset that are shuffled by one seed would otherwise be shuffled alike.
        self._checksum = zlib.crc32(self._indices.astype("<i8", copy=False).tobytes())
        self.seed = resolve_seed(seed)

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        indices, key = self._indices, (self.seed, "subset", self._checksum, epoch)
        return (indices[order] for order in permuted_chunks(len(indices), key, start))

    def len_epoch(self, epoch: int) -> int:
        return len(self._indices)


class FilterSampler(IndexSampler):
    """The indices of the samples for which ``fn(sample)`` is true, in order.

    The whole dataset is read once, when the sampler is made.

    Args:
        fn: takes a sample, says whether to keep it.
        dataset: anything with ``__getitem__`` and ``__len__``.

    Example:
        >>> list(FilterSampler(lambda sample: sample > 2, [1, 5, 2, 3]))
        [1, 3]

    Source of the idea: `mxnet.gluon.data.FilterSampler`.
    """

    decided_by = (("indices", "_indices"),)

    def __init__(self, fn: Callable[[Any], Any], dataset: Any) -> None:
        dataset = as_dataset(dataset, "FilterSampler")
        kept = [index for index in range(len(dataset)) if fn(dataset[index])]
        self._indices: Indices = np.array(kept, dtype=np.int64)

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        return slices(self._indices, start)

    def len_epoch(self, epoch: int) -> int:
        return len(self._indices)


class IntervalSampler(IndexSampler):
    """Every ``interval``-th index; with ``rollover`` again from 1, from 2, ... until all have come.

    Args:
        length: number of samples.
        interval: the stride, 1 to ``length``.
        rollover: whether to go round for the indices left out.

    Raises:
        TypeError, ValueError: if ``interval`` is not an integer from 1 to ``length``.

    Example:
        >>> list(IntervalSampler(7, 3))
        [0, 3, 6, 1, 4, 2, 5]
        >>> list(IntervalSampler(7, 3, rollover=False))
        [0, 3, 6]

    Source of the idea: `mxnet.gluon.data.IntervalSampler` (contrib).
    """

    decided_by = (("interval", "_interval"), ("rollover", "_rollover"))

    def __init__(self, length: int, interval: int, rollover: bool = True) -> None:
        self._length = _check_length(length)
        self._interval = check_int("interval", interval, 1, "give the stride between two indices")
        if self._interval > self._length > 0:
            raise ValueError(
                f"interval is {interval}, more than the {length} samples there are: give an interval up to length"
            )
        self._rollover = bool(rollover)

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        # The stream is rows, one per offset: the first `long` rows have one index more than the others.
        short, long = divmod(self._length, self._interval)
        for begin in range(start, self.len_epoch(epoch), CHUNK):
            place = np.arange(begin, min(begin + CHUNK, self.len_epoch(epoch)), dtype=np.int64)
            row, column = np.divmod(place, short + 1)
            later = place >= long * (short + 1)
            later_row, later_column = np.divmod(place - long * (short + 1), short)
            yield np.where(later, long + later_row + later_column * self._interval, row + column * self._interval)

    def len_epoch(self, epoch: int) -> int:
        return self._length if self._rollover else -(-self._length // self._interval)


def sortable(keys: Any) -> npt.NDArray[Any]:
    """Keys of any kind that Python can compare, as a numeric array of the same order."""
    if not isinstance(keys, np.ndarray) and hasattr(keys, "__array__"):
        try:
            keys = np.asarray(keys)  # a pandas Series would be read by its labels
        except (TypeError, RuntimeError):  # a tensor of another dtype, or on a device
            keys = list(keys)
    if len(keys) == 0:
        return np.zeros(0, dtype=np.int64)
    if isinstance(keys, np.ndarray) or isinstance(keys[0], int | float | np.number):
        array = np.asarray(keys)
        # As float64, integers beyond 2**53 that differ may look equal: those are ranked as Python compares them.
        exact = array.dtype.kind in "iub" or isinstance(keys, np.ndarray)
        if array.ndim == 1 and array.dtype.kind in "iufb" and (exact or np.all(np.abs(array) <= 2.0**53)):
            return array
        if isinstance(keys, np.ndarray):
            keys = keys.tolist()
    ranks = np.empty(len(keys), dtype=np.int64)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    rank = 0
    for place, index in enumerate(order):
        rank += place > 0 and keys[order[place - 1]] < keys[index]
        ranks[index] = rank
    return ranks


def sort_order(keys: npt.NDArray[Any], reverse: bool) -> Indices:
    """The stable order of numeric keys; in reverse, equal keys keep their order too, as in ``sorted``."""
    if not reverse:
        return np.argsort(keys, kind="stable")
    return len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]


class SortedSampler(IndexSampler):
    """Indices sorted by a key per sample, the greatest first.

    Args:
        sort_keys: one key per sample: numbers, or anything that can be compared.
        reverse: greatest first (default) or smallest first. Equal keys stay in order of index.

    Example:
        >>> list(SortedSampler([3, 1, 2]))
        [0, 2, 1]

    Source of the idea: `gluonnlp.data.SortedSampler`.
    """

    decided_by = (("order of the keys", "_indices"),)
    shown = (("indices", "_indices"),)

    def __init__(self, sort_keys: Sequence[Any] | npt.NDArray[Any], reverse: bool = True) -> None:
        self._indices = sort_order(sortable(sort_keys), reverse)

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        return slices(self._indices, start)

    def len_epoch(self, epoch: int) -> int:
        return len(self._indices)
