"""Batches from one bucket each: of similar length, or of one kind; and schemes that choose buckets of lengths.

Batches are lists of Python ints; with ``num_shards``, groups of as many batches. Buckets are built once. Each epoch
shuffles the samples within buckets and the batches, as a pure function of (seed, epoch). All errors are raised by the
constructors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from sharded_loader.extend import Int64s
from sharded_loader.extend.order import LAST_BATCH, parts
from sharded_loader.extend.tools import Described, check_choice, check_function, check_int, refuse_class, warn
from sharded_loader.samplers.batch_samplers import NumberedBatches, kinds_of, length_table
from sharded_loader.samplers.bijections import Bijections
from sharded_loader.samplers.index_samplers import Numbers, check_number, underscored


class BucketScheme(Described):
    """Base class of bucket schemes, which choose the buckets of a `FixedBucketSampler` from the lengths of the samples.

    A *bucket key* is the greatest length that fits into a bucket. Override `keys` for a scheme of your own; if samples
    have several parts, such as source and target, it is called for each. Source of the idea:
    ``gluonnlp.data.sampler.BucketScheme``.

    Example:
        Buckets whose keys are powers of two:

        >>> from sharded_loader import BucketScheme, FixedBucketSampler
        >>> class PowersOfTwo(BucketScheme):
        ...     def keys(self, longest, shortest, num_buckets):
        ...         top = (longest - 1).bit_length()
        ...         return [2 ** max(top - number, 0) for number in range(num_buckets)]
        >>> PowersOfTwo()(100, 1, 4)
        [128, 64, 32, 16]
        >>> scheme = PowersOfTwo()
        >>> lengths = [3, 90, 40, 20]
        >>> sampler = FixedBucketSampler(lengths, 2, num_buckets=3, bucket_scheme=scheme)
        >>> sampler.bucket_keys
        [32, 64, 128]
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        """Return ``num_buckets`` bucket keys of one part, in any order; equal keys are one bucket.

        The greatest key must be at least ``longest``, the greatest length; ``shortest`` is the smallest one.

        Example:
            >>> ConstWidthBucket().keys(100, 1, 4)
            [100, 75, 50, 25]
        """
        raise NotImplementedError(f"{type(self).__name__} makes no buckets: override keys")

    def __call__(
        self, max_lengths: int | Sequence[int], min_lengths: int | Sequence[int], num_buckets: int
    ) -> list[Any]:
        """Return ``num_buckets`` keys from ``max_lengths`` and ``min_lengths``: ints, or tuples of one int per part.

        Example:
            >>> ConstWidthBucket()([100, 10], [1, 1], 2)
            [(100, 10), (50, 5)]
        """
        check_int("num_buckets", num_buckets, 1, "give how many buckets to make")
        pairs = zip(np.atleast_1d(max_lengths).tolist(), np.atleast_1d(min_lengths).tolist(), strict=True)
        keys = [self.keys(longest, shortest, num_buckets) for longest, shortest in pairs]
        return list(zip(*keys, strict=True)) if np.ndim(max_lengths) else keys[0]

    def _shown(self) -> Iterable[tuple[str, str]]:
        return [(name, name) for name in vars(self) if not name.startswith("_")]


class ConstWidthBucket(BucketScheme):
    """Buckets of equal width.

    Example:
        >>> ConstWidthBucket()(100, 1, 4)
        [100, 75, 50, 25]
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        width = max((longest - shortest + 1) // num_buckets, 1)
        return [max(longest - width * number, shortest) for number in range(num_buckets)]


class LinearWidthBucket(BucketScheme):
    """Buckets whose widths grow linearly.

    Example:
        >>> LinearWidthBucket()(100, 1, 4)
        [12, 32, 61, 100]
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        growth = 2 * float(longest - shortest - num_buckets) / (num_buckets * (num_buckets + 1))
        return _end_at(longest, num_buckets, lambda n: shortest + growth * (n * (n + 1) / 2) + n)


class ExpWidthBucket(BucketScheme):
    """Buckets whose widths grow by the factor ``bucket_len_step``, which must be above 0.

    Example:
        >>> ExpWidthBucket(bucket_len_step=2)(100, 1, 4)
        [8, 21, 47, 100]
    """

    def __init__(self, bucket_len_step: float = 1.1) -> None:
        advice = "it is the width of a bucket over the width of the one before"
        check_number("bucket_len_step", bucket_len_step, "above 0", lambda step: step > 0, advice)
        self.bucket_len_step = bucket_len_step

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        step = self.bucket_len_step
        if step == 1:
            return _end_at(longest, num_buckets, lambda n: shortest + (longest - shortest) * n / num_buckets)
        first = (longest - shortest) * (step - 1) / (step**num_buckets - 1)
        return _end_at(longest, num_buckets, lambda n: shortest + first * (step**n - 1) / (step - 1))


def _end_at(longest: int, num_buckets: int, edge: Callable[[int], float]) -> list[int]:
    keys = [round(edge(number)) for number in range(1, num_buckets + 1)]
    keys[-1] = max(keys[-1], longest)
    return keys


# -- the sampler -------------------------------------------------------------------------------------------------------

Key = int | tuple[int, ...]

LAST_GROUP = ("keep", "discard", "overlap")
_DEFAULT_BUCKETS = 10
_DEFAULT_SCHEME = ConstWidthBucket()


class FixedBucketSampler(NumberedBatches):
    """Batches of samples from one bucket of lengths each; long buckets come first.

    With ``num_replicas``, the ranks have batches of one bucket in each step. If the last step of a bucket has fewer
    batches than ranks, batches of the bucket are repeated, or dropped with ``last_batch="discard"``. Source of the
    idea: `gluonnlp.data.FixedBucketSampler`.

    Args:
        lengths: integers above 0, shape (n,), or (n, k) for samples of k parts.
        batch_size: samples per batch; with ``use_average_length``, tokens per batch. With ``bucket_keys``, also a list
            with one number per key.
        num_buckets: number of buckets; ignored with ``bucket_keys``.
        bucket_keys: greatest length of each bucket, as ints or tuples of k ints; by default chosen by
            ``bucket_scheme``.
        ratio: enlarges batches of shorter buckets: a bucket with key K has batches of
            ``max(ratio * batch_size * max(keys) / K, batch_size)`` samples.
        shuffle: shuffle samples within buckets, and batches, in a new order each epoch.
        use_average_length: choose batch sizes so that batches hold about ``batch_size`` tokens, counting the mean
            length of the bucket plus one standard deviation per sample.
        num_shards: if above 0, yield groups of that many batches.
        bucket_scheme: `BucketScheme` that chooses the keys.
        last_group: ``"keep"`` an incomplete last group, ``"discard"`` it, or ``"overlap"``: fill it by repeating the
            batches before it (as GluonNLP did).
        last_batch: ``"keep"`` the incomplete last batch of a bucket, ``"discard"`` it, or ``"rollover"``: its samples
            come first in the next epoch. With ``num_replicas``, the latter two apply to whole steps.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.

    Attributes:
        bucket_keys: greatest length of each bucket, ascending.
        bucket_batch_sizes: samples per batch of each bucket.

    Raises:
        TypeError, ValueError: An argument is invalid; a length is not above 0, or fits no bucket.

    Example:
        >>> sampler = FixedBucketSampler([1, 8, 2, 7, 9], batch_size=2, num_buckets=2)
        >>> list(sampler)
        [[1, 3], [4], [0, 2]]
        >>> print(sampler.stats())
        FixedBucketSampler:
          sample_num=5, batch_num=3
          key=[5, 9]
          cnt=[2, 3]
          batch_size=[2, 2]
    """

    _sizes = (("buckets", "_counts"), ("batch sizes", "bucket_batch_sizes"))
    decided_by = (("lengths", "_members"), *_sizes, *underscored("shuffle", "last_batch"))
    fixed = ("bucket_keys",)
    cut_by, sized_by = ("buckets", "batch sizes"), ("_batch_size", "bucket_batch_sizes")
    _buckets = (("bucket_keys", "bucket_keys"), ("bucket_batch_sizes", "bucket_batch_sizes"))
    shown = (*underscored("batch_size"), *_buckets, *underscored("num_shards", "last_group", "shuffle", "last_batch"))

    def __init__(
        self,
        lengths: Numbers,
        batch_size: int | Sequence[int],
        num_buckets: int | None = _DEFAULT_BUCKETS,
        bucket_keys: Numbers | None = None,
        ratio: float = 0,
        shuffle: bool = False,
        use_average_length: bool = False,
        num_shards: int = 0,
        bucket_scheme: BucketScheme = _DEFAULT_SCHEME,
        last_group: str = "keep",
        seed: int | None = None,
        last_batch: str = "keep",
    ) -> None:
        table = length_table(lengths, "give the length of each sample")
        if table.size and table.min() <= 0:
            index = int(np.flatnonzero((table <= 0).any(axis=1))[0])
            text = f"lengths must be above 0, but lengths[{index}] is {np.asarray(lengths)[index]}"
            raise ValueError(f"{text}: leave that sample out")
        self.dataset_length = len(table)
        given = batch_size if isinstance(batch_size, Sequence) else np.ravel(batch_size).tolist()
        advice = "give the number of samples in a batch"
        sizes = [check_int("batch_size", one, 1, advice) for one in given]
        self._batch_size: Any = sizes if np.ndim(batch_size) else sizes[0]
        takes_list = bucket_keys is not None and not ratio and not use_average_length
        self._num_shards = check_int("num_shards", num_shards, 0, "0 gives plain batches, k groups of k batches")
        must, is_right = "a finite number of at least 0", lambda number: 0 <= number < float("inf")
        check_number("ratio", ratio, must, is_right, "give 0 for equal batches")
        refuse_class("bucket_scheme", bucket_scheme)
        check_function("bucket_scheme", bucket_scheme, "of lengths and num_buckets, as a BucketScheme", required=True)
        self._last_group = check_choice("last_group", last_group, LAST_GROUP, "FixedBucketSampler")
        self._last_batch = check_choice("last_batch", last_batch, LAST_BATCH, "FixedBucketSampler")
        super().__init__(shuffle, seed)
        is_single = table.shape[1] == 1
        if bucket_keys is None and len(table):
            if num_buckets is None:
                raise ValueError("there are neither num_buckets nor bucket_keys: give one of them")
            longest, shortest = table.max(axis=0).tolist(), table.min(axis=0).tolist()
            limits = (longest[0], shortest[0]) if is_single else (longest, shortest)
            bucket_keys = bucket_scheme(*limits, num_buckets)
        elif bucket_keys is not None and num_buckets not in (None, _DEFAULT_BUCKETS):
            warn(f"num_buckets={num_buckets} is not used, because bucket_keys are given")
        rows = _rows([] if bucket_keys is None else bucket_keys, table.shape[1])
        keys = np.array(sorted(set(rows)), np.int64).reshape(-1, table.shape[1])
        by_key = dict(zip(rows, sizes, strict=False)) if np.ndim(batch_size) else None
        if by_key is not None and not (takes_list and len(by_key) == len(rows) == len(sizes)):
            text = f"batch_size is a list of {len(sizes)} numbers, and there are {len(set(rows))} bucket keys"
            raise ValueError(f"{text}: give one number for each of bucket_keys, without ratio and use_average_length")
        bucket_of = _match(table, keys)
        counts = np.bincount(bucket_of, minlength=len(keys))
        shown: list[Key] = keys[:, 0].tolist() if is_single else list(map(tuple, keys.tolist()))
        self.bucket_keys = [key for key, count in zip(shown, counts, strict=True) if count]
        if unused := [key for key, count in zip(shown, counts, strict=True) if not count]:
            warn(f"Some buckets are empty and will be removed. Unused bucket keys={unused}")
        keys, counts = keys[counts > 0], counts[counts > 0]
        # One array for all buckets, as there may be 100,000.
        self._members, self._counts = np.argsort(bucket_of, kind="stable").astype(np.int64), counts.astype(np.int64)
        if use_average_length and ratio > 0:
            warn(f"ratio={ratio} is not used, because use_average_length is set")
        if by_key is not None:
            self.bucket_batch_sizes = [by_key[tuple(key)] for key in keys.tolist()]
        elif use_average_length:
            lengths_in = np.split(table[self._members], np.cumsum(counts)[:-1])[: len(keys)]
            self.bucket_batch_sizes = [max(int(sizes[0] / (part.mean() + part.std())), 1) for part in lengths_in]
        else:
            size, scales = sizes[0], keys.sum(axis=1).tolist()
            largest = max(scales, default=0)
            self.bucket_batch_sizes = [max(int(largest / one * float(ratio) * size), size) for one in scales]

    @property
    def plan(self) -> list[int]:
        """Samples of each bucket that are batched together: those of one step of all ranks."""
        return [size * self._unit for size in self.bucket_batch_sizes]

    def _at(self, epoch: int) -> Callable[[Int64s], list[Any]]:
        shards, unit = self._num_shards, self._unit
        buckets, batches = np.arange(len(self._counts))[::-1], self._batches(epoch)[::-1]  # the longest first
        units = -(-batches // unit)
        count = int(units.sum()) * unit
        order, ends, read = self._order(count // unit, "fixed bucket", epoch), np.cumsum(units), self._reader(epoch)

        def at(positions: Int64s) -> list[list[int]]:
            number, within = np.divmod(positions, unit)
            place = np.searchsorted(ends, order[number], side="right")
            first = (order[number] - ends[place] + units[place]) * unit
            # The last step of a bucket is filled with the batches before it.
            found = (np.minimum(first, batches[place] - unit) + within) % batches[place]
            return read(buckets[place], found)

        def groups(positions: Int64s) -> list[list[list[int]]]:
            begins, ends = positions * shards, np.minimum((positions + 1) * shards, count)
            if self._last_group == "overlap":
                begins = np.clip(begins, 0, max(count - shards, 0))  # the last group repeats batches before it
            spans = list(zip(begins.tolist(), ends.tolist(), strict=True))
            batches = iter(at(np.concatenate([np.arange(*span) for span in spans])))
            return [list(islice(batches, end - begin)) for begin, end in spans]

        return groups if shards else at

    def _reader(self, epoch: int) -> Callable[[Int64s, Int64s], list[list[int]]]:
        """Return a function from buckets and batch numbers in them to batches of an epoch."""
        counts, sizes, members = self._counts, np.array(self.bucket_batch_sizes, np.int64), self._members
        (begins, ends), firsts, place = self._span(epoch), np.cumsum(counts) - counts, self._shuffler()

        def read(buckets: Int64s, numbers: Int64s) -> list[list[int]]:
            low = begins[buckets] + numbers * sizes[buckets]
            many = np.minimum(sizes[buckets], ends[buckets] - low)
            cuts = np.cumsum(many)
            of = np.repeat(buckets, many)
            passes, places = np.divmod(np.arange(many.sum()) + np.repeat(low - cuts + many, many), counts[of])
            if self._shuffle:
                places = place(places, of, passes * len(counts) + of)
            return [batch.tolist() for batch in np.split(members[firsts[of] + places], cuts[:-1])]

        return read

    def _shuffler(self) -> Callable[[Int64s, Int64s, Int64s], Int64s]:
        """Return a function that shuffles places within buckets; the third argument numbers the pass over a bucket."""
        kinds, counts = len(self._counts), self._counts.tolist()
        order = cache(lambda one: self._order(counts[one % kinds], "fixed bucket", one // kinds, one % kinds))

        def place(places: Int64s, buckets: Int64s, passes: Int64s) -> Int64s:
            begins = np.flatnonzero(np.diff(passes, prepend=-1))
            parts = zip(passes[begins].tolist(), np.split(places, begins[1:]), strict=True)
            return np.concatenate([order(one)[part] for one, part in parts])

        return place

    @property
    def _unit(self) -> int:
        """Number of batches of one bucket in a step of all ranks."""
        return 1 if self.ranks == 1 else self.ranks * max(self._num_shards, 1)

    def _span(self, epoch: int) -> tuple[Int64s, Int64s]:
        """Return begin and end of each bucket's samples in an epoch, counted over all epochs."""
        counts, steps = self._counts, np.array(self.plan, np.int64)
        begins, ends = epoch * counts, (epoch + 1) * counts
        if self._last_batch == "rollover":
            return begins // steps * steps, ends // steps * steps
        return begins, ends if self._last_batch == "keep" else begins + counts // steps * steps

    def _batches(self, epoch: int) -> Int64s:
        begins, ends = self._span(epoch)
        return -((begins - ends) // np.array(self.bucket_batch_sizes, np.int64))

    def len_epoch(self, epoch: int) -> int:
        unit, shards = self._unit, self._num_shards
        count = int((-(-self._batches(epoch) // unit)).sum()) * unit
        return parts(count, shards, cut=self._last_group == "discard") if shards else count

    def stats(self) -> str:
        """Return a multi-line summary: samples and batches in total; key, samples and batch size of each bucket."""
        samples, batches = self._counts.sum(), self._batches(self.epoch).sum()
        first = f"{type(self).__name__}:\n  sample_num={samples}, batch_num={batches}"
        counts, sizes = self._counts.tolist(), self.bucket_batch_sizes
        return f"{first}\n  key={self.bucket_keys}\n  cnt={counts}\n  batch_size={sizes}"


class GroupedBatchSampler(FixedBucketSampler):
    """Batches of samples of one kind each: one label, one source, one aspect ratio.

    The kinds are the buckets of a `FixedBucketSampler`: they are its ``bucket_keys``, and with ``num_replicas`` the
    ranks have batches of one kind in each step. Source of the idea: torchvision's ``GroupedBatchSampler``, aspect ratio
    buckets of NovelAI (2022).

    Args:
        by: kind of each sample: a list, array or tensor of integers, strings or other hashable objects.
        batch_size: samples per batch, or a dict with one number per kind.
        shuffle: shuffle samples within kinds, and batches, in a new order each epoch.
        last_batch, num_shards, last_group, seed: as in `FixedBucketSampler`.

    Raises:
        TypeError, ValueError: Kinds are not hashable, or ``batch_size`` lacks one. The loader raises a ValueError if
            the number of kinds differs from the dataset's length.

    Example:
        >>> shapes = ["wide", "tall", "wide", "wide", "tall"]
        >>> list(GroupedBatchSampler(by=shapes, batch_size={"wide": 2, "tall": 3}, seed=0))
        [[4, 1], [0], [2, 3]]
    """

    shown = (("by", "bucket_keys"), *FixedBucketSampler.shown[2:])
    of_each = "label"
    order_version = 2

    def __init__(
        self,
        by: Numbers,
        batch_size: int | Mapping[Any, int],
        shuffle: bool = True,
        last_batch: str = "keep",
        num_shards: int = 0,
        last_group: str = "keep",
        seed: int | None = None,
    ) -> None:
        kinds, numbers = kinds_of(by, "by")
        sizes: Any = batch_size
        if isinstance(batch_size, Mapping):
            missing = next((repr(kind) for kind in kinds if kind not in batch_size), None)
            if missing is not None:
                raise ValueError(f"batch_size has no number for the kind {missing}: give one for each kind in by")
            sizes = [batch_size[kind] for kind in kinds]
        groups: dict[str, Any] = {"num_shards": num_shards, "last_group": last_group, "last_batch": last_batch}
        super().__init__(numbers + 1, sizes, None, range(1, len(kinds) + 1), shuffle=shuffle, seed=seed, **groups)
        vars(self)["bucket_keys"] = kinds

    def _shuffler(self) -> Callable[[Int64s, Int64s, Int64s], Int64s]:
        # A rank may meet many kinds for the first time: computing whole shuffles would be too slow.
        counts, shuffle = self._counts, Bijections(self.seed, "kinds")
        return lambda places, buckets, passes: shuffle(places, counts[buckets], passes)


def _rows(keys: Numbers, parts: int) -> list[tuple[int, ...]]:
    try:
        rows = [tuple(map(operator.index, np.atleast_1d(key))) for key in keys]
    except TypeError:
        advice = "give a list, the greatest length of each bucket; give integers"
        raise TypeError(f"bucket_keys is {keys!r}: {advice}") from None
    wrong = next((row for row in rows if len(row) != parts), None)
    if wrong is not None:
        raise ValueError(f"bucket key {wrong} has {len(wrong)} numbers, but a length has {parts}: give as many")
    return rows


def _match(table: Int64s, bounds: Int64s) -> Int64s:
    """Return for each sample the bucket that it fits into with the least padding."""
    if table.shape[1] == 1:
        found = np.searchsorted(bounds[:, 0], table[:, 0], side="left").astype(np.int64)
    else:
        found = np.full(len(table), len(bounds), dtype=np.int64)
        for bucket in np.argsort(bounds.sum(axis=1), kind="stable")[::-1].tolist():  # that of least padding is last
            found[(table <= bounds[bucket]).all(axis=1)] = bucket
    outside = np.flatnonzero(found == len(bounds))
    if outside.size:
        sample = int(outside[0])
        text = f"{outside.size} samples fit no bucket: sample {sample} has length {table[sample].tolist()}"
        greatest = bounds[-1].tolist() if len(bounds) else None
        raise ValueError(f"{text}, the greatest bucket key is {greatest}: give a bucket key that it fits into")
    return found
