"""Shuffling in two steps, for data that lies in shards: files, of which only a few fit on this machine at once.

    ShardShuffleSampler(lengths, window, lanes).epoch_table(epoch).at(positions) -> indices

The shards of an epoch are put in shuffled order, one after the other. That makes a *line* of all samples. The line is
cut into ``lanes`` equal stretches, which are read in turns: position p is in lane ``p % lanes``. Each lane is cut into
windows of some shards, and samples change positions within their window. The windows of a lane grow by a fixed rule
(`windows_of`), so that the first batch of an epoch needs one shard of each lane:

    position -> lane, position in it -> position in the line -> window -> another position in it -> shard -> index

Each step is arithmetic, a binary search, or a keyed bijection. So any position takes the same time, and nothing is kept
of the samples: of n shards of different lengths 24 n bytes, of shards that all have one length nothing.

What can go wrong: arguments, all rejected in the constructors.

Source of the idea: the order of Mosaic's streaming datasets, whose "canonical nodes" are the lanes here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.limits import check_fits
from sharded_loader.randomness.shuffle import MAX_LENGTH, Bijections, Indices, shuffle, shuffled
from sharded_loader.samplers.index_samplers import Numbers, lengths_of
from sharded_loader.sampling.base import resolve_seed
from sharded_loader.sampling.own import IndexSampler


class EqualShards(Sequence[int]):
    """The lengths of shards that all have ``size`` samples; the last one may have fewer. They take no memory.

    In a `ShardShuffleSampler` that is so only if ``size`` divides ``total``. If the last shard has fewer samples, the
    sampler keeps 24 bytes for each shard, as for shards of different lengths.

    Args:
        total: the number of samples.
        size: the number of samples in a shard.

    Raises:
        TypeError, ValueError: no integers, ``total`` below 0 or above 2**62, ``size`` below 1.

    Example:
        >>> list(EqualShards(10, 4)), len(EqualShards(10**12, 10**4))
        ([4, 4, 2], 100000000)
    """

    def __init__(self, total: int, size: int) -> None:
        self.total = check_int("total", total, 0, "give the number of samples")
        if self.total > MAX_LENGTH:
            raise ValueError(f"total is {self.total}: there are 2**62 samples at most")
        self.size = check_int("size", size, 1, "give the number of samples in a shard")

    def __len__(self) -> int:
        return -(-self.total // self.size)

    def __getitem__(self, index: Any) -> Any:
        found = range(0, self.total, self.size)[index]
        if isinstance(found, range):
            return [min(self.size, self.total - begin) for begin in found]
        return min(self.size, self.total - found)

    def __repr__(self) -> str:
        return f"EqualShards({self.total}, {self.size})"


class ShardShuffleSampler(IndexSampler):
    """Shuffles shards, then the samples of ``window`` shards at a time.

    A batch holds samples of ``window`` shards. So while it is read, ``window`` shards have to be at hand, instead of
    all of them, and each shard is needed during one short stretch of the epoch.

    An epoch begins with windows of 1, 2, 4, ... shards. So the first batch needs one shard of each lane, and the others
    are fetched while you train. If a lane has no more than ``window`` shards, it is one window.

    With ranks (``num_replicas``), choose ``lanes`` so that the number of ranks divides it. Each rank then meets only
    the shards of its own lanes, so all ranks together fetch each shard once. With one lane, each rank meets all shards.
    The order of samples does not depend on the number of ranks: choose lanes once, such as 64, and train on 1, 2, 4, 8,
    16, 32 or 64 ranks. A rank then has ``window * lanes / ranks`` shards at hand.

    Args:
        lengths: the number of samples in each shard, in the order of the dataset's indices; a sequence of integers, or
            `EqualShards`.
        window: the number of shards that are mixed, after the beginning of the epoch.
        lanes: the number of windows that are read in turns.
        seed: with the epoch it decides the order. None draws one from torch's default generator.

    Raises:
        TypeError: ``lengths`` are no flat sequence of integers; ``window`` or ``lanes`` is no integer.
        ValueError: a length below 0, more than 2**62 samples, ``window`` or ``lanes`` below 1.

    Example:
        >>> sampler = ShardShuffleSampler([100, 50, 70], window=2, seed=7)
        >>> sorted(sampler) == list(range(220))
        True
        >>> huge = ShardShuffleSampler(EqualShards(10**12, 10**4), lanes=4096, seed=7)
        >>> next(huge.iter_epoch(3, start=10**11)) < 10**12
        True
    """

    decided_by = (("lengths", "_signature"), ("window", "window"), ("lanes", "lanes"))
    order_version = 2
    shown = (("shards", "_count"), ("window", "window"), ("lanes", "lanes"))

    def __init__(self, lengths: Numbers, window: int = 16, lanes: int = 1, seed: int | None = None) -> None:
        self._lengths = _simplified(lengths if isinstance(lengths, EqualShards) else lengths_of(lengths))
        self.window = check_int("window", window, 1, "give how many shards are mixed")
        self.lanes = check_int("lanes", lanes, 1, "give a number that your numbers of ranks divide, such as 64")
        self._count = len(self._lengths)
        self._signature: str | Indices
        if isinstance(self._lengths, EqualShards):
            self._signature, self._length = repr(self._lengths), self._lengths.total
        else:
            self._signature, self._length = self._lengths, int(self._lengths.sum())
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        key = self.seed, "shard order", epoch
        lengths, lanes, count = self._lengths, self.lanes, self._count
        window = min(self.window, max(count, 1))  # a number that fits into int64
        line = _Line(lengths, *key)
        mix = Bijections(self.seed, "shard window", epoch)
        size, longer = divmod(self._length, lanes)  # the first lanes have one sample more where it must be

        def at(positions: Indices) -> Indices:
            if not len(positions):
                return positions
            row = positions // lanes
            lane = positions - row * lanes  # a seventh of the time of np.divmod
            begin = lane * size + np.minimum(lane, longer)
            end = begin + size + (lane < longer)
            first = line.shard(begin)
            starts, ends = windows_of(
                line.shard(begin + row) - first, lambda at: line.shard(end[at] - 1) - first[at], window
            )
            low = np.maximum(line.begin(first + starts), begin)
            high = np.minimum(line.begin(np.minimum(first + ends, count)), end)
            # Windows are told apart by where they begin: no two begin at one position.
            return line.index(low + mix(begin + row - low, high - low, low))

        return at


def windows_of(shards: Indices, last: Callable[[Indices], Indices], window: int) -> tuple[Indices, Indices]:
    """Where the windows that shards of a lane lie in begin and end, in shards from the beginning of the lane.

    They have 1, 2, 4, ... shards, up to ``window``. As soon as no more than ``window`` shards are left, these are one
    window: so lanes of ``window`` shards are mixed as a whole.

    Args:
        shards: number of each shard in its lane, from 0 on.
        last: says the number of the last shard in the lanes of some of them, by their positions in ``shards``.
        window: the number of shards in a whole window.

    Example:
        >>> def sizes(count, window):
        ...     shards = np.arange(count)
        ...     starts, ends = windows_of(shards, lambda at: np.full(len(at), count - 1), window)
        ...     return np.bincount(starts)[np.unique(starts)].tolist()
        >>> sizes(16, 4), sizes(20, 16), sizes(4, 4)
        ([1, 2, 4, 4, 4, 1], [1, 2, 4, 13], [4])
    """
    growing = (1 << np.arange((window - 1).bit_length() + 1)) - 1  # where they begin, up to the first whole one
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


def _simplified(lengths: Indices | EqualShards) -> Indices | EqualShards:
    """`EqualShards` where all lengths are equal, otherwise an array: they are one order, however they are given."""
    if isinstance(lengths, EqualShards):
        count = len(lengths)
        if lengths.total == count * lengths.size:
            return lengths
        advice = f"give EqualShards({count * lengths.size}, {lengths.size}), whose shards are all of one length"
        check_fits(24 * count, f"the last of {count:,} shards is shorter than the others, so all are listed", advice)
        return np.append(np.full(count - 1, lengths.size, np.int64), lengths[-1])
    if len(lengths) and lengths[0] and (lengths == lengths[0]).all():
        return EqualShards(int(lengths[0]) * len(lengths), int(lengths[0]))
    return lengths


class _Line:
    """The shards of one epoch, one after the other in shuffled order. Shards count by their position in the line.

    Of shards that all have one length nothing is kept.
    """

    def __init__(self, lengths: Indices | EqualShards, *key: Hashable) -> None:
        self._size = 0  # they have several
        if isinstance(lengths, EqualShards):
            self._size, self._order = lengths.size, shuffle(max(len(lengths), 1), *key)
            return
        order = shuffled(len(lengths), *key)
        self._begins = _sums(lengths[order])
        # What is added to a position in the line to get the index.
        self._shifts = _sums(lengths)[order] - self._begins[:-1]

    def shard(self, positions: Indices) -> Indices:
        """The shards at these positions of the line."""
        return positions // self._size if self._size else np.searchsorted(self._begins, positions, side="right") - 1

    def begin(self, shards: Indices) -> Indices:
        """Where these shards begin. One number more than there are shards: where the line ends."""
        return shards * self._size if self._size else self._begins[shards]

    def index(self, positions: Indices) -> Indices:
        """The dataset's indices of the samples at these positions."""
        shards = self.shard(positions)
        if not self._size:
            return positions + self._shifts[shards]
        low, high = int(shards.min()), int(shards.max())
        # Many samples of few shards ask for each shard once: 0.1 ms, not 1.1.
        is_dense = high - low < len(shards)
        originals = self._order(np.arange(low, high + 1))[shards - low] if is_dense else self._order(shards)
        return positions + (originals - shards) * self._size


def _sums(lengths: Indices) -> Indices:
    """Where each of these begins, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
