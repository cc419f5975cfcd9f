"""Orders of single indices: one after the other, shuffled, filtered, strided, sorted.

In: how many samples there are (or keys or indices), and a seed where order is random. Out: a table of int64
indices per epoch, a pure function of (seed, epoch). Any position takes the same time. Shuffles of up to 16 M indices
are made whole when the epoch is opened.

What can go wrong: arguments, all rejected in the constructors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.data.columns import as_dataset
from sharded_loader.randomness.indices import IndexView, Selection, taken
from sharded_loader.randomness.shuffle import MAX_LENGTH, Indices, shuffle
from sharded_loader.sampling.base import Sampler, resolve_seed
from sharded_loader.sampling.sorting import sort_order, sortable
from sharded_loader.sampling.tables import BLOCK, Table, checksum_of


def _check_length(length: Any) -> int:
    return check_int("length", length, 0, "give the number of samples, len(dataset)")


class IndexSampler(Sampler[int]):
    """Base class: a subclass says how many indices an epoch has, and which one is where."""

    def epoch_table(self, epoch: int) -> Table:
        return Table(self.len_epoch(epoch), self._order(epoch), BLOCK)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        """Positions -> indices. What the whole epoch needs is made now."""
        raise NotImplementedError


class _ListedSampler(IndexSampler):
    """Base class of samplers that keep all their indices, in order."""

    _indices: Indices

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return self._indices.take

    def len_epoch(self, epoch: int) -> int:
        return len(self._indices)


class SequentialSampler(IndexSampler):
    """Indices in order: start, start + 1, ... start + length - 1.

    Args:
        length: the number of samples.
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

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return lambda positions: positions + self._first

    def len_epoch(self, epoch: int) -> int:
        return self._length


class RandomSampler(IndexSampler):
    """Every index once per epoch, in a new random order each epoch.

    Up to 2**24 (16 M) indices the order is one array; above, each position is computed, in constant
    memory (see `sharded_loader.randomness.shuffle`).

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

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return shuffle(self._length, self.seed, "order", epoch)

    def len_epoch(self, epoch: int) -> int:
        return self._length


class SubsetRandomSampler(IndexSampler):
    """The given indices once per epoch, in a new random order each epoch.

    Two samplers over different indices have different orders, also with the same seed.

    Args:
        indices: 1-D sequence of integers. A range costs no memory, however long it is; nor does a part of
            `Dataset.split` (``part.indices``).
        seed: with the epoch it decides the order. None draws one from torch's default generator.

    Raises:
        ValueError: if ``indices`` are not a 1-D sequence of integers, or more than 2**62.

    Example:
        >>> sorted(SubsetRandomSampler([2, 30, 5], seed=7))
        [2, 5, 30]
        >>> next(SubsetRandomSampler(range(0, 10**12, 2), seed=7).iter_epoch(0)) % 2
        0

    Source of the idea: `torch.utils.data.SubsetRandomSampler`.
    """

    decided_by = (("indices", "_indices"),)

    def __init__(self, indices: Sequence[int] | npt.NDArray[Any], seed: int | None = None) -> None:
        self._indices: Selection
        if isinstance(indices, range | IndexView):
            if isinstance(indices, range) and len(indices[: MAX_LENGTH + 1]) > MAX_LENGTH:
                raise ValueError(
                    f"SubsetRandomSampler shuffles up to 2**62 samples, got {indices}: give a shorter range"
                )
            self._indices = indices
        else:
            array = np.asarray(indices)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ValueError(
                    f"indices must be a 1-D sequence of integers, got shape {array.shape} and dtype {array.dtype}: "
                    "pass a list of sample indices (np.flatnonzero(mask) for a mask)"
                )
            self._indices = array.astype(np.int64)
        # Part of the key: the parts of a dataset that are shuffled by one seed would otherwise be shuffled alike.
        self._checksum = checksum_of(self._indices)
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        indices, order = self._indices, shuffle(len(self._indices), self.seed, "subset", self._checksum, epoch)
        return lambda positions: taken(indices, order(positions))

    def len_epoch(self, epoch: int) -> int:
        return len(self._indices)


class FilterSampler(_ListedSampler):
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
    shown = (("total", "_length"), *decided_by)

    def __init__(self, length: int, interval: int, rollover: bool = True) -> None:
        self._length = _check_length(length)
        self._interval = check_int("interval", interval, 1, "give the stride between two indices")
        if self._interval > self._length > 0:
            raise ValueError(
                f"interval is {interval}, more than the {length} samples there are: give an interval up to length"
            )
        self._rollover = bool(rollover)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        # The order is rows, one per offset: the first `long` rows have one index more than the others.
        short, long = divmod(self._length, self._interval)

        def at(positions: Indices) -> Indices:
            row, column = np.divmod(positions, short + 1)
            later_row, later_column = np.divmod(positions - long * (short + 1), short)
            later = long + later_row + later_column * self._interval
            earlier = row + column * self._interval
            return np.asarray(np.where(positions < long * (short + 1), earlier, later))

        return at

    def len_epoch(self, epoch: int) -> int:
        return self._length if self._rollover else -(-self._length // self._interval)


class SortedSampler(_ListedSampler):
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
    shown = (("indices", "_indices"), ("reverse", "_reverse"))

    def __init__(self, sort_keys: Sequence[Any] | npt.NDArray[Any], reverse: bool = True) -> None:
        self._reverse = bool(reverse)
        self._indices = sort_order(sortable(sort_keys), reverse)
