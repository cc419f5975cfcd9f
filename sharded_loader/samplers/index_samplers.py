"""Orders of single indices: of a subset, filtered, strided, in parts, sorted, drawn by weight.

In: how many samples there are (or keys, indices, weights), and a seed where order is random. Out: a table of int64
indices per epoch, a pure function of (seed, epoch). Any position takes the same time. Shuffles of up to 16 M indices
are made whole when the epoch is opened.

With replacement each draw by weight is a random number that depends on its position alone, and nothing is kept but the
weights. So a rank computes its own draws only. A draw among groups takes two numbers: for the group, and for the sample
in it. Without replacement the epoch's draws are made when it is opened.

What can go wrong: arguments, all rejected in the constructors; keys that Python cannot compare (its TypeError), and
keys or weights that do not fit into memory (MemoryError).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.base.limits import check_fits
from sharded_loader.data.columns import as_dataset
from sharded_loader.randomness.shuffle import (
    MAX_LENGTH,
    IndexView,
    Indices,
    Selection,
    shuffle,
    taken,
    uniforms,
    uniforms_at,
)
from sharded_loader.sampling.base import resolve_seed, underscored
from sharded_loader.sampling.own import IndexSampler, check_length
from sharded_loader.sampling.tables import checksum_of


class _ListedSampler(IndexSampler):
    """Base class of samplers that keep all their indices, in order."""

    def __init__(self, indices: Indices) -> None:
        self._indices, self._length = indices, len(indices)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return self._indices.take


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
        self._length, self._checksum = len(self._indices), checksum_of(self._indices)
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        order = shuffle(self._length, self.seed, "subset", self._checksum, epoch)
        return lambda positions: taken(self._indices, order(positions))


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
        super().__init__(np.array(kept, dtype=np.int64))


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

    decided_by = underscored("interval", "rollover")
    shown = (("total", "_length"), *decided_by)

    def __init__(self, length: int, interval: int, rollover: bool = True) -> None:
        self._length = check_length(length)
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


class SplitSampler(IndexSampler):
    """One of ``num_parts`` contiguous parts of the dataset, shuffled within itself, each part in an order of its own.

    Args:
        length: number of samples of the whole dataset.
        num_parts: the number of parts.
        part_index: which of them, from 0.
        even_size: make all parts equally long: parts of ceil(length / num_parts), and where the last ones
            are short, random samples of other parts are added.
        repeat: how many times the part comes in one epoch, in another order each time. A sample that comes again in
            the epoch has the same `sample_rng`, so it is augmented in the same way.
        shuffle: whether to shuffle.
        seed: with the epoch it decides the order and the added samples. None draws one from torch's default
            generator (only if something is random).

    Raises:
        TypeError, ValueError: for ``part_index`` outside 0 .. num_parts - 1, more parts than samples, and
            ``repeat`` or ``num_parts`` below 1.

    Example:
        >>> [list(SplitSampler(7, 3, part, shuffle=False)) for part in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]

    Source of the idea: `gluonnlp.data.SplitSampler`.
    """

    decided_by = underscored("num_parts", "even_size", "repeat", "shuffle")
    is_part = True
    shown = (*underscored("total", "part_index"), *decided_by)

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        even_size: bool = False,
        repeat: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self._total = check_length(length)
        parts = check_int("num_parts", num_parts, 1, "give how many parts the dataset is split into")
        part = check_int("part_index", part_index, 0, "parts count from 0")
        self._repeat = check_int("repeat", repeat, 1, "give how many times the part comes in an epoch")
        if part >= parts:
            raise ValueError(f"part_index is {part}, but there are {parts} parts: give 0 to {parts - 1}")
        if 0 < self._total < parts:
            raise ValueError(
                f"{self._total} samples cannot be split into {parts} parts that all have one: give fewer parts"
            )
        if even_size:
            self._size = -(-self._total // parts)
            self._begin = min(self._size * part, self._total)
            self._own = min(self._size, self._total - self._begin)
        else:
            size, longer = divmod(self._total, parts)
            self._begin = size * part + min(part, longer)
            self._own = self._size = size + (part < longer)
        self._length = self._size * self._repeat
        self._num_parts, self._part_index, self._even_size = parts, part, bool(even_size)
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or self._own < self._size or seed is not None else None

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        # The part belongs to the key: parts of one size would otherwise be shuffled alike.
        key = (self.seed, "split sampler", self._part_index, epoch)

        @lru_cache(maxsize=2)
        def once(number: int) -> Callable[[Indices], Indices]:
            """One round of the part: positions in it -> indices."""
            order = shuffle(self._size, *key, "order", number) if self._shuffle else None
            extra = self._extra((*key, "extra", number))

            def at(positions: Indices) -> Indices:
                slots = positions if order is None else order(positions)
                of_part = np.minimum(slots, self._own - 1) + self._begin
                if not len(extra):
                    return of_part
                # The last slots of a short part hold the samples added to it.
                return np.where(slots < self._own, of_part, extra[np.maximum(slots - self._own, 0)])

            return at

        def order(positions: Indices) -> Indices:
            indices = np.empty_like(positions)
            rounds = positions // self._size
            for number in np.unique(rounds).tolist():
                in_round = rounds == number
                indices[in_round] = once(number)(positions[in_round] % self._size)
            return indices

        return order

    def _extra(self, key: tuple[int | str | None, ...]) -> Indices:
        """Samples of other parts, each at most once, that fill a short part (fewer than num_parts)."""
        missing = self._size - self._own
        if not missing:
            return np.zeros(0, dtype=np.int64)
        others = shuffle(self._total - self._own, *key)(np.arange(missing))
        return others + np.where(others >= self._begin, self._own, 0)


# -- sorted by keys ----------------------------------------------------------------------------------------------------


def sortable(keys: Any) -> npt.NDArray[Any]:
    """Keys of any kind that Python can compare, as a numeric array of the same order."""
    if not isinstance(keys, np.ndarray) and hasattr(keys, "__array__"):
        try:
            keys = np.asarray(keys)  # a pandas Series would be read by its labels
        except (TypeError, RuntimeError):  # a tensor of another dtype, or on a device
            keys = list(keys)
    if len(keys) == 0:
        return np.zeros(0, dtype=np.int64)
    check_fits(
        16 * len(keys),
        f"to sort, all {len(keys):,} keys and their order have to be in memory",
        "shuffle with RandomSampler or ShardShuffleSampler, which take none, or sort each file when you write it",
    )
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
    for position, index in enumerate(order):
        rank += position > 0 and keys[order[position - 1]] < keys[index]
        ranks[index] = rank
    return ranks


def sort_order(keys: npt.NDArray[Any], reverse: bool) -> Indices:
    """The stable order of numeric keys; in reverse, equal keys keep their order too, as in ``sorted``."""
    if not reverse:
        return np.argsort(keys, kind="stable")
    return len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]


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
        super().__init__(sort_order(sortable(sort_keys), reverse))


# -- drawn by weight ---------------------------------------------------------------------------------------------------


LEAST, GREATEST = 1e-300, 1e290
"""Of the positive weights without replacement: no quotient of a random number and a weight leaves float64."""


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities.

    Args:
        weights: 1-D, one non-negative number per sample, or per group of samples; they need not sum to one.
        num_samples: the number of samples to draw in each epoch.
        replacement: whether an index may be drawn more than once in an epoch. A sample that is drawn again in the
            epoch has the same `sample_rng`, so it is augmented in the same way.
        seed: with the epoch it decides what is drawn. None draws one from torch's default generator.
        lengths: of groups of samples, in the order of the dataset's indices, such as the shards of a dataset. Each
            sample of group i then has the weight ``weights[i]``, as with ``np.repeat(weights, lengths)``, which takes
            8 bytes per sample. Only with replacement.

    Raises:
        TypeError: ``lengths`` are no integers.
        ValueError: if weights are negative, not finite or all zero, if fewer than ``num_samples`` of them are positive
            with ``replacement=False``, or if ``lengths`` do not go with ``weights``.
            With ``replacement=False`` also if a positive weight is not between 1e-300 and 1e290.
        MemoryError: there are more weights than fit into memory.

    Example:
        >>> set(WeightedRandomSampler([0, 1, 0, 3], 50, seed=7))
        {1, 3}
        >>> rare, common = 2.0, 0.5
        >>> sampler = WeightedRandomSampler([rare, common], 1000, seed=7, lengths=[10, 10**12])
        >>> drawn = list(sampler)
        >>> len(drawn), max(drawn) < 10**12 + 10
        (1000, True)

    Source of the idea: `torch.utils.data.WeightedRandomSampler`; without replacement, exponential races
    (Efraimidis and Spirakis, 2006).
    """

    decided_by = (("weights", "_signature"), ("replacement", "_replacement"))
    shown = (("weights", "_weights"), ("replacement", "_replacement"), ("lengths", "_lengths"))

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[Any],
        num_samples: int,
        replacement: bool = True,
        seed: int | None = None,
        lengths: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> None:
        check_fits(
            16 * operator.length_hint(weights),
            f"there are {operator.length_hint(weights):,} weights",
            "give one weight per group of samples, with lengths=",
        )
        array = np.asarray(weights, dtype=np.float64)
        if array.ndim != 1:
            raise ValueError(f"weights must be 1-D, got shape {array.shape}: give one number per sample")
        bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
        if bad.size:
            raise ValueError(
                f"weights must be finite and at least 0, but weights[{bad[0]}] is {array[bad[0]]}: "
                "give 0 to samples that must not be drawn"
            )
        self._length = check_int("num_samples", num_samples, 0, "give how many indices an epoch draws")
        self._lengths = None if lengths is None else _checked_lengths(lengths, len(array), replacement)
        # How likely each sample, or group, is. Weights go up to 1.8e308: divided first, no product overflows.
        self._shares = array / (array.max() if array.size and array.max() else 1.0)
        if self._lengths is not None:
            self._shares = self._shares * self._lengths
        can_be_drawn = array > 0 if self._lengths is None else (array > 0) & (self._lengths > 0)
        positive = int(np.count_nonzero(can_be_drawn))
        if self._length and not positive:
            raise ValueError("weights are all zero, nothing can be drawn: give a positive weight to some sample")
        if not replacement and self._length > positive:
            raise ValueError(
                f"num_samples is {self._length}, but only {positive} weights are positive and "
                "replacement=False draws each index at most once: draw fewer, or set replacement=True"
            )
        extreme = np.flatnonzero((array > 0) & ((array < LEAST) | (array > GREATEST)))
        if len(extreme) and not replacement:
            raise ValueError(
                f"weights[{extreme[0]}] is {array[extreme[0]]}: with replacement=False, positive weights lie between "
                f"{LEAST} and {GREATEST}. Multiply all weights by one number"
            )
        self._weights = array
        self._signature = array if self._lengths is None else [array, self._lengths]
        self._replacement = bool(replacement)
        self.order_version = 2 if replacement else 1
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        key = (self.seed, "weighted", epoch)
        if not self._replacement:
            return self._without_replacement(key).take
        bounds, lengths = np.cumsum(self._shares), self._lengths
        # Rounding may put a draw on the very end: it belongs to the last index that can be drawn.
        last = np.flatnonzero(self._weights if lengths is None else self._shares)[-1:]
        firsts = None if lengths is None else np.cumsum(lengths) - lengths
        draw, draw_inside = uniforms_at(*key, "choice"), uniforms_at(*key, "inside")

        def at(positions: Indices) -> Indices:
            draws = draw(positions) * bounds[-1]
            # In ascending order they are found four times as fast among a million bounds.
            ascending = np.argsort(draws)
            chosen = np.minimum(np.searchsorted(bounds, draws[ascending], side="right"), last)
            if lengths is not None and firsts is not None:
                # A second draw inside the group: one number of 53 bits would not reach each of 10**16 samples.
                inside = (draw_inside(positions[ascending]) * lengths[chosen]).astype(np.int64)
                chosen = firsts[chosen] + np.minimum(inside, lengths[chosen] - 1)
            found = np.empty(len(positions), np.int64)
            found[ascending] = chosen
            return found

        return at

    def _without_replacement(self, key: tuple[Any, ...]) -> Indices:
        candidates = np.flatnonzero(self._weights)
        # A uniform of 0 stands for the middle of the first step: its logarithm would be no number.
        races = np.maximum(-np.log1p(-uniforms(len(self._weights), *key)), 2.0**-54)
        first = np.argsort(races[candidates] / self._weights[candidates], kind="stable")[: self._length]
        drawn: Indices = candidates[first].astype(np.int64, copy=False)
        return drawn


def lengths_of(lengths: Any) -> Indices:
    """The lengths of shards as an array.

    Raises:
        TypeError: they are no flat sequence of integers.
        ValueError: one is below 0, or they sum to more than 2**62.

    Example:
        >>> lengths_of([3, 0, 4])
        array([3, 0, 4])
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"lengths must be a flat sequence of integers, got shape {array.shape} and dtype {array.dtype}: give the "
            "number of samples of each shard"
        )
    if array.size and array.min() < 0:
        raise ValueError(f"lengths[{int(array.argmin())}] is {array.min()}: a shard has 0 samples or more")
    if array.sum(dtype=np.float64) > MAX_LENGTH:
        raise ValueError("the lengths sum to more than 2**62 samples: give the number of samples of each shard")
    return array.astype(np.int64)


def _checked_lengths(lengths: Any, count: int, replacement: bool) -> Indices:
    """The lengths of ``count`` groups; see `WeightedRandomSampler`."""
    if not replacement:
        raise ValueError(
            "lengths go with replacement=True: without replacement each sample needs a weight of its own, "
            "np.repeat(weights, lengths)"
        )
    array = lengths_of(lengths)
    if len(array) != count:
        raise ValueError(f"there are {count} weights and {len(array)} lengths: give one of each per group of samples")
    return array
