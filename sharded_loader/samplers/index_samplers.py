"""Samplers of single indices: subsets, strides, parts, sorted, by shards, repeated.

Each epoch is a table of int64 indices, a pure function of (seed, epoch), with random access in constant time. Shuffles
of up to 16 M indices are computed when the epoch is opened. All errors are raised by the constructors.

`ShardShuffleSampler`: position -> lane -> position in the line of all samples -> window -> permuted position -> index

The shuffled shards form a line, cut into ``lanes`` equal stretches that are read in turns, and these into windows of
shards (`windows_of`). All steps are arithmetic, binary searches or keyed bijections. The memory is 24 bytes per shard,
or none if all lengths are equal. Compare the "canonical nodes" of Mosaic's streaming datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s, Selection, Table, WrapperSampler
from sharded_loader.extend import order as orders
from sharded_loader.extend.data import check_dataset, taken
from sharded_loader.extend.tools import brief, check_fits, check_function, check_int
from sharded_loader.samplers.bijections import Bijections
from sharded_loader.samplers.inverse import found_in, inverted, positions_of

Numbers = Sequence[Any] | npt.NDArray[Any]
"""One number or label per sample."""


def integers(
    name: str, values: object, must: str, advice: str, dims: Sequence[int] = (1,), wrong: type[Exception] = ValueError
) -> npt.NDArray[Any]:
    """Convert an argument to an array of integers; otherwise raise an error that says what it ``must`` be."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        text = f"{name} must be {must}, got rows of different sizes, or a dtype that NumPy lacks"
        raise wrong(f"{text}: {advice} ({error})") from None
    if array.ndim not in dims or (array.size and array.dtype.kind not in "iu"):
        raise wrong(f"{name} must be {must}, got shape {array.shape} and dtype {array.dtype}: {advice}")
    return array


def floats(name: str, values: Any, dims: Sequence[int] = (1,)) -> npt.NDArray[np.float64]:
    """Convert numbers of samples, also in a tensor of any device and dtype, to float64, or raise a ValueError."""
    advice = "give one number per sample"
    try:
        array = np.asarray(values.detach().cpu().double() if hasattr(values, "detach") else values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers: {advice} ({error})") from None
    if array.ndim not in dims:
        raise ValueError(f"{name} must be 1-D, got shape {array.shape}: {advice}")
    return array


def check_number(name: str, value: Any, must: str, is_right: Callable[[Any], bool], advice: str) -> None:
    """Raise a ValueError unless a number is right, and a TypeError for anything that is no number."""
    try:
        wrong: type[Exception] | None = None if is_right(value) else ValueError
    except (TypeError, ValueError, RuntimeError):  # no number, or several
        wrong = TypeError
    if wrong is not None:
        raise wrong(f"{name} must be {must}, got {value!r}: {advice}")


def underscored(*names: str) -> tuple[tuple[str, str], ...]:
    """Return pairs for `Described`, for attributes named like an argument with a leading underscore."""
    return tuple((name, f"_{name}") for name in names)


class _ListedSampler(orders.IndexSampler):
    """Base class of samplers of given indices, in order or in a permutation."""

    _indices: Selection

    def __init__(self, indices: Selection) -> None:
        self._indices, self._length = indices, len(indices)

    def _permutation(self, epoch: int) -> Callable[[Int64s], Int64s] | None:
        return None

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        order = self._permutation(epoch)
        return lambda positions: taken(self._indices, positions if order is None else order(positions))

    def positions_of(self, index: int, epoch: int) -> list[int]:
        return [*inverted(self._permutation(epoch), found_in(self._indices, [index])).tolist()]


class SubsetRandomSampler(_ListedSampler):
    """The given indices once per epoch, in a new random order each epoch.

    Samplers over different indices have different orders, even with the same seed. Source of the idea:
    `torch.utils.data.SubsetRandomSampler`.

    Args:
        indices: 1-D sequence of at most 2**62 integers, otherwise a ValueError. A range takes no memory.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.

    Example:
        >>> sorted(SubsetRandomSampler([2, 30, 5], seed=7))
        [2, 5, 30]
        >>> next(SubsetRandomSampler(range(0, 10**12, 2), seed=7).iter_epoch(0)) % 2
        0
    """

    decided_by = (("indices", "_indices"),)

    def __init__(self, indices: Numbers, seed: int | None = None) -> None:
        if isinstance(indices, range) and len(indices[: orders.MAX_LENGTH + 1]) > orders.MAX_LENGTH:
            raise ValueError(f"SubsetRandomSampler shuffles up to 2**62 samples, got {indices}: give a shorter range")
        advice = "give a list of sample indices (np.flatnonzero(mask) for a mask)"
        if not isinstance(indices, range):
            indices = integers("indices", indices, "a 1-D sequence of integers", advice).astype(np.int64)
        super().__init__(indices)
        # Part of the key, so that different subsets of equal size are not shuffled alike by one seed.
        self._checksum = orders.checksum_of(self._indices)
        self.seed = orders.resolve_seed(seed)

    def _permutation(self, epoch: int) -> Callable[[Int64s], Int64s]:
        return orders.shuffle(self._length, self.seed, "subset", self._checksum, epoch)


class FilterSampler(_ListedSampler):
    """The indices of the samples for which ``fn(sample)`` is true, in order.

    The constructor reads the whole dataset once. Source of the idea: `mxnet.gluon.data.FilterSampler`.

    Args:
        fn: predicate on a sample.
        dataset: any object with ``__getitem__`` and ``__len__``.

    Example:
        >>> list(FilterSampler(lambda sample: sample > 2, [1, 5, 2, 3]))
        [1, 3]
    """

    decided_by = (("indices", "_indices"),)

    def __init__(self, fn: Callable[[Any], Any], dataset: Any) -> None:
        dataset = check_dataset(dataset, "FilterSampler")
        check_function("the function of FilterSampler", fn, "of a sample", required=True)
        kept = [index for index in range(len(dataset)) if fn(dataset[index])]
        super().__init__(np.array(kept, dtype=np.int64))


class IntervalSampler(orders.IndexSampler):
    """Every ``interval``-th index; with ``rollover`` again from 1, from 2, ... until all have come.

    Args:
        length: number of samples.
        interval: stride, from 1 to ``length`` (otherwise a TypeError or ValueError).
        rollover: continue with the indices left out.

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
        self._length = orders.check_length(length)
        self._interval = check_int("interval", interval, 1, "give the stride between two indices")
        if self._interval > self._length > 0:
            raise ValueError(f"interval is {interval}, more than the {length} samples: give an interval up to length")
        self._rollover = bool(rollover)

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        # The order consists of one row per offset; the first `long` rows have one index more.
        short, long = divmod(self._length, self._interval)

        def at(positions: Int64s) -> Int64s:
            is_early = positions < long * (short + 1)
            row = np.where(is_early, positions // (short + 1), (positions - long) // short)
            return np.asarray(row + (positions - row * short - np.minimum(row, long)) * self._interval)

        return at

    def positions_of(self, index: int, epoch: int) -> list[int]:
        (short, long), (within, row) = divmod(self._length, self._interval), divmod(index, self._interval)
        is_read = 0 <= index < self._length and (self._rollover or row == 0)
        return [row * short + min(row, long) + within] if is_read else []

    def len_epoch(self, epoch: int) -> int:
        return self._length if self._rollover else -(-self._length // self._interval)


class SplitSampler(_ListedSampler):
    """One of ``num_parts`` contiguous parts of the dataset, each shuffled in an order of its own.

    To divide data equally among ranks, use ``num_replicas`` of the loader instead. Source of the idea:
    `gluonnlp.data.SplitSampler`.

    Args:
        length: number of samples of the whole dataset.
        num_parts: number of parts, at most ``length`` (otherwise a ValueError). The first ones may have one sample
            more.
        part_index: number of this part, from 0.
        shuffle: shuffle in a new order each epoch.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator if needed.

    Example:
        >>> [list(SplitSampler(7, 3, part, shuffle=False)) for part in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]
    """

    decided_by = underscored("num_parts", "shuffle")
    is_part = True
    shown = (*underscored("total", "part_index"), *decided_by)

    def __init__(
        self, length: int, num_parts: int = 1, part_index: int = 0, *, shuffle: bool = True, seed: int | None = None
    ) -> None:
        self._total = orders.check_length(length)
        parts = check_int("num_parts", num_parts, 1, "give how many parts the dataset is split into")
        part = check_int("part_index", part_index, 0, "parts count from 0")
        if part >= parts:
            raise ValueError(f"part_index is {part}, but there are {parts} parts: give 0 to {parts - 1}")
        if 0 < self._total < parts:
            raise ValueError(f"{self._total} samples cannot fill {parts} parts: give fewer parts")
        size, longer = divmod(self._total, parts)
        begin = size * part + min(part, longer)
        super().__init__(range(begin, begin + size + (part < longer)))
        self._num_parts, self._part_index, self._shuffle = parts, part, bool(shuffle)
        self.seed = orders.resolve_seed(seed) if shuffle or seed is not None else None

    def _permutation(self, epoch: int) -> Callable[[Int64s], Int64s] | None:
        if not self._shuffle:
            return None
        # The part is in the key, so that parts of equal size are not shuffled alike.
        return orders.shuffle(self._length, self.seed, "split sampler", self._part_index, epoch, "order", 0)


# -- sorted by keys ----------------------------------------------------------------------------------------------------


def sortable(keys: Any) -> npt.NDArray[Any]:
    """Convert keys of any kind to numbers of the same order. Raise a TypeError for keys that cannot be compared."""
    try:
        if isinstance(keys, Mapping | Set):
            raise TypeError("a dict or set has no order of samples")
        return _sortable(keys)
    except TypeError as error:
        text = f"sort_keys is {brief(keys)}, whose items cannot be sorted"
        raise TypeError(f"{text}: give comparable keys, one per sample, in a list or an array ({error})") from error


def _sortable(keys: Any) -> npt.NDArray[Any]:
    if not isinstance(keys, np.ndarray) and hasattr(keys, "__array__"):
        try:
            keys = np.asarray(keys)  # indexing a pandas Series would use its labels
        except (TypeError, RuntimeError):  # a tensor on a device, or of a dtype unknown to NumPy
            keys = list(keys)
    advice = "shuffle with RandomSampler or ShardShuffleSampler, which take none, or sort each file when you write it"
    check_fits(16 * len(keys), f"to sort, all {len(keys):,} keys and their order have to be in memory", advice)
    if len(keys) == 0 or isinstance(keys, np.ndarray) or isinstance(keys[0], int | float | np.number):
        array = np.asarray(keys)
        # Distinct integers beyond 2**53 may be equal as float64: these are ranked by Python comparison.
        exact = array.dtype.kind in "iub" or isinstance(keys, np.ndarray)
        if array.ndim == 1 and array.dtype.kind in "iufb" and (exact or np.all(np.abs(array) <= 2.0**53)):
            return array
        if isinstance(keys, np.ndarray):
            keys = keys.tolist()
    ranks: Int64s = np.unique(np.fromiter(keys, object, len(keys)), return_inverse=True)[1]
    return ranks


def sort_order(keys: npt.NDArray[Any], reverse: bool) -> Int64s:
    """Return the stable order of numeric keys; equal keys keep their order also in reverse, as in ``sorted``."""
    if not reverse:
        return np.argsort(keys, kind="stable")
    return len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]


class SortedSampler(_ListedSampler):
    """Indices sorted by one key per sample, greatest first.

    Args:
        sort_keys: one comparable key per sample.
        reverse: descending (default) or ascending order. Equal keys stay in the order of the dataset.

    Example:
        >>> list(SortedSampler([3, 1, 2]))
        [0, 2, 1]

    Source of the idea: `gluonnlp.data.SortedSampler`.
    """

    decided_by = (("order of the keys", "_indices"),)
    shown = (("indices", "_indices"), ("reverse", "_reverse"))

    def __init__(self, sort_keys: Numbers, reverse: bool = True) -> None:
        self._reverse = bool(reverse)
        super().__init__(sort_order(sortable(sort_keys), reverse))


# -- shards in shuffled order, a few at a time -------------------------------------------------------------------------


class ShardShuffleSampler(orders.IndexSampler):
    """Shuffle shards, then the samples of ``window`` shards at a time.

    While a batch is read, only ``window`` shards per lane have to be at hand, and each shard is needed during one short
    stretch of the epoch. An epoch begins with windows of 1, 2, 4, ... shards, so that its first batch needs only one
    shard per lane while the others are prefetched. Lanes of at most ``window`` shards are one window.

    The order does not depend on the number of ranks (``num_replicas``). If that number divides ``lanes``, each rank
    meets only the shards of its own lanes, ``window * lanes / ranks`` at a time, and all ranks together fetch each
    shard once. So choose lanes once, such as 64, and train on 1, 2, 4, ... or 64 ranks. With one lane, each rank needs
    all shards.

    Args:
        lengths: number of samples in each shard, in the order of the dataset. If all are equal,
            ``np.broadcast_to(length, shards)`` takes no memory, nor does the sampler.
        window: number of shards whose samples are mixed.
        lanes: number of windows that are read in turns.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.

    Raises:
        TypeError, ValueError: ``lengths`` is not a flat sequence of integers from 0, with a sum of up to 2**62.

    Example:
        >>> sampler = ShardShuffleSampler([100, 50, 70], window=2, seed=7)
        >>> sorted(sampler) == list(range(220))
        True
        >>> huge = ShardShuffleSampler(np.broadcast_to(10**4, 10**8), lanes=4096, seed=7)
        >>> next(huge.iter_epoch(3, start=10**11)) < 10**12
        True
    """

    decided_by = (("lengths", "_signature"), ("window", "window"), ("lanes", "lanes"))
    order_version = 2
    shown = (("shards", "_count"), ("window", "window"), ("lanes", "lanes"))

    def __init__(self, lengths: Numbers, window: int = 16, lanes: int = 1, seed: int | None = None) -> None:
        advice = "give the number of samples of each shard"
        array = integers("lengths", lengths, "a flat sequence of integers", advice, wrong=TypeError)
        self._count, known = len(array), array[:1] if array.strides == (0,) else array  # of np.broadcast_to
        if known.min(initial=0) < 0:
            raise ValueError(f"lengths[{int(known.argmin())}] is {known.min()}: a shard has 0 samples or more")
        if self._count and known.mean(dtype=np.float64) * self._count > orders.MAX_LENGTH:
            raise ValueError(f"the lengths sum to more than 2**62 samples: {advice}")
        self.window = check_int("window", window, 1, "give how many shards are mixed")
        self.lanes = check_int("lanes", lanes, 1, "give a number that your numbers of ranks divide, such as 64")
        # Common length of all shards, or 0. Equal lengths yield the same order in whatever form they are passed.
        self._size = int(known[0]) if self._count and (known == known[0]).all() else 0
        self._lengths: Int64s = known[: 1 if self._size else None].astype(np.int64)
        self._length = self._size * self._count or int(self._lengths.sum())
        self._signature = f"EqualShards({self._length}, {self._size})" if self._size else self._lengths
        self.seed = orders.resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        line, mix = self._shuffles(epoch)

        def at(positions: Int64s) -> Int64s:
            if not len(positions):
                return positions
            row = positions // self.lanes
            lane = positions - row * self.lanes  # 7 times as fast as np.divmod
            begin, low, high = self._window(line, lane, row)
            # The begin of a window identifies it.
            return line.index(low + mix(begin + row - low, high - low, low))

        return at

    def positions_of(self, index: int, epoch: int) -> list[int]:
        if not 0 <= index < self._length:
            return []
        line, mix = self._shuffles(epoch)
        place, (size, longer) = line.place(index), divmod(self._length, self.lanes)
        lane = max(place // (size + 1), (place - longer) // max(size, 1))
        row = place - lane * size - min(lane, longer)
        begin, low, high = np.concatenate(self._window(line, np.array([lane]), np.array([row]))).tolist()
        return [(low + mix.inverse(place - low, high - low, low) - begin) * self.lanes + lane]

    def _shuffles(self, epoch: int) -> tuple[_Line, Bijections]:
        key = self.seed, "shard order", epoch
        return _Line(self._lengths, self._size, self._count, *key), Bijections(self.seed, "shard window", epoch)

    def _window(self, line: _Line, lane: Int64s, row: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return where lanes begin in the line, and where the windows begin and end that contain their rows."""
        size, longer = divmod(self._length, self.lanes)  # the first `longer` lanes have one sample more
        begin = lane * size + np.minimum(lane, longer)
        end = begin + size + (lane < longer)
        first = line.shard(begin)
        starts, ends = windows_of(
            line.shard(begin + row) - first,
            lambda at: line.shard(end[at] - 1) - first[at],
            min(self.window, max(self._count, 1)),  # fits into int64
        )
        low = np.maximum(line.begin(first + starts), begin)
        return begin, low, np.minimum(line.begin(np.minimum(first + ends, self._count)), end)


def windows_of(shards: Int64s, last: Callable[[Int64s], Int64s], window: int) -> tuple[Int64s, Int64s]:
    """Return begin and end of the windows that contain ``shards``, all counted from the beginning of the lane.

    Windows have 1, 2, 4, ... up to ``window`` shards. Once no more than ``window`` shards are left, they are one
    window. ``last`` returns the last shard of lanes, by positions in ``shards``.

    Example:
        >>> def sizes(count, window):
        ...     shards = np.arange(count)
        ...     starts, ends = windows_of(shards, lambda at: np.full(len(at), count - 1), window)
        ...     return np.bincount(starts)[np.unique(starts)].tolist()
        >>> sizes(16, 4), sizes(20, 16), sizes(4, 4)
        ([1, 2, 4, 4, 4, 1], [1, 2, 4, 13], [4])
    """
    growing = (1 << np.arange((window - 1).bit_length() + 1)) - 1  # begins of windows, up to the first full one
    whole = int(growing[-1])
    starts = whole + (shards - whole) // window * window
    ends = starts + window
    early = np.flatnonzero(shards < whole + window)
    if len(early):
        own = growing[np.searchsorted(growing, shards[early], side="right") - 1]
        rest = growing[np.minimum(np.searchsorted(growing, last(early) + 1 - window), len(growing) - 1)]
        starts[early] = np.minimum(own, rest)
        ends[early] = np.where(own < rest, 2 * own + 1, starts[early] + window)
    return starts, ends


class _Line:
    """Shards of one epoch in shuffled order, numbered by their position in the line. Equal shards take no memory."""

    def __init__(self, lengths: Int64s, size: int, count: int, *key: Hashable) -> None:
        self._size = size
        if size:
            self._order = orders.shuffle(count, *key)
            return
        order = orders.shuffled(len(lengths), *key)
        self._begins: Int64s = np.append(0, np.cumsum(lengths[order]))
        # Difference between the index and the position in the line, per shard.
        self._shifts = (np.cumsum(lengths) - lengths)[order] - self._begins[:-1]

    def shard(self, positions: Int64s) -> Int64s:
        return positions // self._size if self._size else np.searchsorted(self._begins, positions, side="right") - 1

    def begin(self, shards: Int64s) -> Int64s:
        """Return where shards begin; the number after the last one yields the end of the line."""
        return shards * self._size if self._size else self._begins[shards]

    def index(self, positions: Int64s) -> Int64s:
        shards = self.shard(positions)
        if not self._size:
            return positions + self._shifts[shards]
        low, high = int(shards.min()), int(shards.max())
        # Look up each shard once if many samples are in few shards: 0.1 instead of 1.1 ms.
        is_dense = high - low < len(shards)
        originals = self._order(np.arange(low, high + 1))[shards - low] if is_dense else self._order(shards)
        return positions + (originals - shards) * self._size

    def place(self, index: int) -> int:
        """Return the position in the line of an index."""
        if self._size:
            shard, within = divmod(index, self._size)
            return int(inverted(self._order, np.array([shard]))[0]) * self._size + within
        places = index - self._shifts
        return int(places[(places >= self._begins[:-1]) & (places < self._begins[1:])][0])


# -- each sample several times -----------------------------------------------------------------------------------------


class RepeatedSampler(WrapperSampler[int]):
    """Each index of another order ``copies`` times in a row, for repeated augmentation.

    The copies of a sample are augmented differently, because `sample_rng`, `sample_generator` and ``transform(fn,
    seeded=True)`` distinguish them. With ``num_replicas`` they go to different ranks; on one rank, they are in one
    batch. Without ``sampler``, the loader's own order is repeated: ``ShardedDataLoader(dataset, 64, shuffle=True,
    sampler=RepeatedSampler(3))``. No other sampler may be combined with ``shuffle``. Source of the idea: Hoffer et al.,
    "Augment your batch" (2019), MultiGrain (2019), timm's ``RepeatAugSampler``.

    Args:
        copies: number of copies of each sample in an epoch, at least 1.
        sampler: any sampler of single indices; by default the order that the loader would have without a sampler.
        seed: seed for a ``sampler`` of another library; drawn if needed.

    Example:
        >>> from sharded_loader import SequentialSampler, ShardedDataLoader
        >>> list(RepeatedSampler(2, SequentialSampler(3)))
        [0, 0, 1, 1, 2, 2]
        >>> loader = ShardedDataLoader(range(3), 4, sampler=RepeatedSampler(2))
        >>> [batch.tolist() for batch in loader]
        [[0, 0, 1, 1], [2, 2]]
    """

    decided_by = (("copies", "copies"),)
    fixed = ("copies",)
    sampler: Any

    def __init__(self, copies: int, sampler: Iterable[object] | None = None, *, seed: int | None = None) -> None:
        self.copies = check_int("copies", copies, 1, "give how many times each sample comes in an epoch")
        if sampler is None:  # set by the loader
            self.sampler, self._shares_epoch, self.seed = None, False, 0
        else:
            super().__init__(sampler, seed)

    def epoch_table(self, epoch: int) -> Table:
        self._check()
        return _Copied(orders.table_of(self.sampler, epoch, self.seed), self.copies)

    def len_epoch(self, epoch: int) -> int:
        self._check()
        return self.copies * orders.len_epoch(self.sampler, epoch)

    def positions_of(self, index: Any, epoch: int) -> list[int]:
        found = positions_of(self.sampler, index, epoch)
        return [self.copies * position + copy for position in found for copy in range(self.copies)]

    def _check(self) -> None:
        if self.sampler is None:
            advice = "give it to a loader as sampler=, or give it a sampler as its second argument"
            raise ValueError(f"RepeatedSampler({self.copies}) has no order to repeat: {advice}")


class _Copied(Table):
    """Table that repeats the items of another one. The first copy is a plain int."""

    def __init__(self, table: Table, copies: int) -> None:
        self._table, self._copies = table, copies
        self._block = min(table.block, 1024)
        self._last: tuple[int, Any] = -1, None  # avoids reading an iterator twice for copies in two batches

    def upto(self, begin: int, end: int) -> int:
        copies = self._copies
        return min(end, copies * self._table.upto(begin // copies, orders.parts(end, copies, cut=False)))

    def at(self, positions: Int64s) -> list[Any]:
        places, which = np.unique(positions // self._copies, return_inverse=True)
        held, item = self._last
        known = [item] if held == places[0] else []
        found = self._table.at(places[len(known) :]) if len(places) > len(known) else []
        items = known + (found.tolist() if isinstance(found, np.ndarray) else found)
        self._last = int(places[-1]), items[-1]
        kinds, copies = [int, *map(orders.repeated_index, range(1, self._copies))], positions % self._copies
        try:
            return [kinds[copy](items[place]) for place, copy in zip(which.tolist(), copies.tolist(), strict=True)]
        except (TypeError, ValueError):
            text = f"RepeatedSampler repeats single integer indices, and its sampler yields {brief(items[0])}"
            raise TypeError(f"{text}: put the RepeatedSampler inside the batch sampler") from None
