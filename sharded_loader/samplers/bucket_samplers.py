"""Batches of samples of one bucket: of similar length, or of one kind; and how buckets of lengths are made.

    scheme(longest, shortest, num_buckets) -> bucket keys, each the greatest length of a bucket
    FixedBucketSampler(lengths)            a bucket for each key
    GroupedBatchSampler(by=labels)         a bucket for each label

In: the length, or the label, of every sample. Out: batches (lists of Python ints), or with ``num_shards`` groups of
batches (lists of lists), one batch per shard. Buckets are made once; an epoch shuffles the samples within
each bucket and the order of the batches, as a pure function of (seed, epoch). A scheme keeps nothing but its arguments,
and is a pure function of the lengths.

What can go wrong: arguments, all rejected in the constructors. If the keys of a user's scheme do not reach the longest
sample, `FixedBucketSampler` says so.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import Described
from sharded_loader.randomness.shuffle import Bijections, Indices, shuffled
from sharded_loader.samplers.batch_samplers import kinds_of, length_table
from sharded_loader.sampling.base import BalancedSampler, check_choice, resolve_seed, underscored
from sharded_loader.sampling.own import LAST_BATCH
from sharded_loader.sampling.tables import BATCHES, Rolling, Table, parts


class BucketScheme(Described):
    """Base class of bucket schemes: how `FixedBucketSampler` makes its buckets from the lengths of the samples.

    A *bucket key* is the greatest length that fits into a bucket. To write a scheme of your own, override `keys`. If
    samples have several parts (such as source and target), `keys` is called for each part.

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

    Source of the idea: ``gluonnlp.data.sampler.BucketScheme``.
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        """The bucket keys of one part, for lengths from ``shortest`` to ``longest``.

        Args:
            longest: The greatest length. One key at least must reach it.
            shortest: The smallest length.
            num_buckets: How many keys to return. Keys may be equal: equal keys are one bucket.

        Returns:
            The keys, in any order.

        Example:
            >>> ConstWidthBucket().keys(100, 1, 4)
            [100, 75, 50, 25]
        """
        raise NotImplementedError(f"{type(self).__name__} makes no buckets: override keys")

    def __call__(
        self, max_lengths: int | Sequence[int], min_lengths: int | Sequence[int], num_buckets: int
    ) -> list[Any]:
        """The bucket keys.

        Args:
            max_lengths: the greatest length, or one per part.
            min_lengths: the smallest length, or one per part.
            num_buckets: the number of buckets.

        Returns:
            ``num_buckets`` ints. With several parts, ``num_buckets`` tuples of one int per part.

        Raises:
            TypeError, ValueError: ``num_buckets`` is not an integer of at least 1.

        Example:
            >>> ConstWidthBucket()([100, 10], [1, 1], 2)
            [(100, 10), (50, 5)]
        """
        check_int("num_buckets", num_buckets, 1, "give how many buckets to make")
        if np.ndim(max_lengths) == 0:
            return self.keys(int(max_lengths), int(min_lengths), num_buckets)  # type: ignore[arg-type]
        pairs = zip(max_lengths, min_lengths, strict=True)  # type: ignore[arg-type]
        return list(
            zip(*(self.keys(int(longest), int(shortest), num_buckets) for longest, shortest in pairs), strict=True)
        )

    def _shown(self) -> Iterable[tuple[str, str]]:
        return [(name, name) for name in vars(self) if not name.startswith("_")]


class ConstWidthBucket(BucketScheme):
    """Buckets of one width.

    Example:
        >>> ConstWidthBucket()(100, 1, 4)
        [100, 75, 50, 25]
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        width = max((longest - shortest + 1) // num_buckets, 1)
        return [max(longest - width * number, shortest) for number in range(num_buckets)]


class LinearWidthBucket(BucketScheme):
    """Buckets whose widths grow by a constant.

    Example:
        >>> LinearWidthBucket()(100, 1, 4)
        [12, 32, 61, 100]
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        growth = 2 * float(longest - shortest - num_buckets) / (num_buckets * (num_buckets + 1))
        return _end_at(longest, num_buckets, lambda n: shortest + growth * (n * (n + 1) / 2) + n)


class ExpWidthBucket(BucketScheme):
    """Buckets whose widths grow by a factor.

    Args:
        bucket_len_step: the factor, above 0.

    Raises:
        ValueError: if ``bucket_len_step`` is not above 0.

    Example:
        >>> ExpWidthBucket(bucket_len_step=2)(100, 1, 4)
        [8, 21, 47, 100]
    """

    def __init__(self, bucket_len_step: float = 1.1) -> None:
        if isinstance(bucket_len_step, (str, list)) or not bucket_len_step > 0:
            raise ValueError(
                f"bucket_len_step must be above 0, got {bucket_len_step}: "
                "it is the width of a bucket over the width of the one before"
            )
        self.bucket_len_step = bucket_len_step

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        step = self.bucket_len_step
        if step == 1:
            return _end_at(longest, num_buckets, lambda n: shortest + (longest - shortest) * n / num_buckets)
        first = (longest - shortest) * (step - 1) / (step**num_buckets - 1)
        return _end_at(longest, num_buckets, lambda n: shortest + first * (step**n - 1) / (step - 1))


def _end_at(longest: int, num_buckets: int, edge: Callable[[int], float]) -> list[int]:
    """The rounded edges of buckets 1 to ``num_buckets``; the last takes the longest whatever the rounding."""
    keys = [round(edge(number)) for number in range(1, num_buckets + 1)]
    keys[-1] = max(keys[-1], longest)
    return keys


# -- the sampler -------------------------------------------------------------------------------------------------------

Key = int | tuple[int, ...]

LAST_GROUP = ("keep", "discard", "overlap")
_DEFAULT_BUCKETS = 10
_DEFAULT_SCHEME = ConstWidthBucket()


class FixedBucketSampler(BalancedSampler[Any]):
    """Batches of samples from one bucket of lengths each; long buckets come first.

    Under ``num_replicas`` all ranks have batches of one bucket in each step. Batches of the bucket come twice where its
    last step has fewer batches than ranks; with ``last_batch="discard"`` they are left out.

    Args:
        lengths: integers above 0, shape (n,), or (n, k) for samples of k parts.
        batch_size: samples per batch; with ``use_average_length``, tokens per batch. With ``bucket_keys`` it may be a
            list, with one number for each key.
        num_buckets: the number of buckets to make. Not used with ``bucket_keys``.
        bucket_keys: greatest length of each bucket (ints, or tuples of k ints; an array works too). None: made by
            ``bucket_scheme``.
        ratio: scales up the batches of shorter buckets: a bucket with key K has batches of
            ``max(ratio * batch_size * max(keys) / K, batch_size)`` samples.
        shuffle: shuffle samples within buckets, and batches, in each epoch again.
        use_average_length: make the batches of each bucket hold about ``batch_size`` tokens
            (mean length plus one standard deviation, per sample).
        num_shards: 0 for plain batches; above, each item is a group of that many batches.
        bucket_scheme: how to make bucket keys: a `BucketScheme`.
        last_group: what to do with a last group of fewer batches. ``"keep"`` it, ``"discard"`` it, or
            ``"overlap"``: fill it with the batches before, which then come twice (as GluonNLP did).
        last_batch: what to do with the samples of a bucket that do not fill a batch. ``"keep"``: a smaller batch;
            ``"discard"``: left out; ``"rollover"``: first in the bucket's next epoch. Under ``num_replicas`` the two
            others than ``"keep"`` count whole steps.
        seed: with the epoch it decides the shuffles. None draws one from torch's default generator.

    Attributes:
        bucket_keys: greatest length of each bucket, ascending.
        bucket_batch_sizes: samples per batch of each bucket.

    Raises:
        TypeError, ValueError: for lengths that are not above 0, a length that fits no bucket, a negative
            ``ratio``, an unknown ``last_group``.

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

    Source of the idea: `gluonnlp.data.FixedBucketSampler`.
    """

    decided_by = (
        ("lengths", "_members"),
        ("buckets", "_counts"),
        ("batch sizes", "bucket_batch_sizes"),
        *underscored("shuffle", "last_batch"),
    )
    fixed = ("bucket_keys",)
    cut_by, sized_by = ("buckets", "batch sizes"), ("_batch_size", "bucket_batch_sizes")
    _buckets = (("bucket_keys", "bucket_keys"), ("bucket_batch_sizes", "bucket_batch_sizes"))
    shown = (*underscored("batch_size"), *_buckets, *underscored("num_shards", "last_group", "shuffle", "last_batch"))

    def __init__(
        self,
        lengths: Sequence[Any] | npt.NDArray[Any],
        batch_size: int | Sequence[int],
        num_buckets: int | None = _DEFAULT_BUCKETS,
        bucket_keys: Sequence[Any] | npt.NDArray[Any] | None = None,
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
            length = np.asarray(lengths)[index]
            raise ValueError(f"lengths must be above 0, but lengths[{index}] is {length}: leave that sample out")
        self.dataset_length = len(table)
        self._batch_size, size, sizes = _batch_sizes(batch_size, bucket_keys, ratio, use_average_length)
        self._num_shards = check_int("num_shards", num_shards, 0, "0 gives plain batches, k groups of k batches")
        if not 0 <= ratio < float("inf"):
            raise ValueError(f"ratio must be a finite number of at least 0, got {ratio}: give 0 for equal batches")
        self._last_group = check_choice("last_group", last_group, LAST_GROUP, "FixedBucketSampler")
        self._last_batch = check_choice("last_batch", last_batch, LAST_BATCH, "FixedBucketSampler")
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None
        if bucket_keys is None and len(table):
            if num_buckets is None:
                raise ValueError("there are neither num_buckets nor bucket_keys: give one of them")
            if table.shape[1] == 1:
                bucket_keys = bucket_scheme(int(table.max()), int(table.min()), num_buckets)
            else:
                bucket_keys = bucket_scheme(table.max(axis=0).tolist(), table.min(axis=0).tolist(), num_buckets)
        elif bucket_keys is not None and num_buckets not in (None, _DEFAULT_BUCKETS):
            warnings.warn(f"num_buckets={num_buckets} is not used, because bucket_keys are given", stacklevel=2)
        keys = _check_keys([] if bucket_keys is None else bucket_keys, table.shape[1])
        if sizes is not None and len(sizes) != len(keys):
            raise ValueError("two bucket keys are equal: with a list as batch_size give each key once")
        used = self._fill(table, keys)
        if sizes is None:
            self._choose_batch_sizes(table, size, float(ratio), use_average_length)
        else:
            self.bucket_batch_sizes = [sizes[bucket] for bucket in used]

    def _fill(self, table: Indices, keys: list[tuple[int, ...]]) -> list[int]:
        """Sort the samples into buckets; buckets without samples go. Returns the numbers of those that stay."""
        bucket_of = _match(table, keys)
        counts = np.bincount(bucket_of, minlength=len(keys))
        members = np.split(np.argsort(bucket_of, kind="stable"), np.cumsum(counts)[:-1])
        single = table.shape[1] == 1
        shown: list[Key] = [key[0] if single else key for key in keys]
        unused = [key for key, count in zip(shown, counts, strict=True) if not count]
        if unused:
            warnings.warn(f"Some buckets are empty and will be removed. Unused bucket keys={unused}", stacklevel=3)
        used: list[int] = np.flatnonzero(counts).tolist()
        self.bucket_keys = [shown[bucket] for bucket in used]
        self._members: list[Indices] = [members[bucket] for bucket in used]
        self._scales = [sum(keys[bucket]) for bucket in used]
        return used

    def _choose_batch_sizes(self, table: Indices, batch_size: int, ratio: float, use_average_length: bool) -> None:
        if not use_average_length:
            longest = max(self._scales, default=0)
            self.bucket_batch_sizes = [
                max(int(longest / float(scale) * ratio * batch_size), batch_size) for scale in self._scales
            ]
            return
        if ratio > 0:
            warnings.warn(f"ratio={ratio} is not used, because use_average_length is set", stacklevel=3)
        lengths = (table[members] for members in self._members)
        self.bucket_batch_sizes = [max(int(batch_size / (part.mean() + part.std())), 1) for part in lengths]

    @property
    def plan(self) -> list[int]:
        """The samples of the batches that come together, of each bucket."""
        return [size * self._unit for size in self.bucket_batch_sizes]

    @property
    def _counts(self) -> list[int]:
        """The number of samples in each bucket."""
        return list(map(len, self._members))

    def epoch_table(self, epoch: int) -> Table:
        shards, unit = self._num_shards, self._unit
        buckets = np.arange(len(self._members))[::-1]  # the longest first
        batches = np.array([self._batches(bucket, epoch) for bucket in buckets.tolist()], np.int64)
        units = -(-batches // unit)
        count = int(units.sum()) * unit
        order = np.arange(count // unit)
        if self._shuffle:
            order = shuffled(count // unit, *self._key(epoch))
        ends = np.cumsum(units)
        read = self._reader(epoch)

        def at(positions: Indices) -> list[list[int]]:
            number, within = np.divmod(positions, unit)
            place = np.searchsorted(ends, order[number], side="right")
            first = (order[number] - ends[place] + units[place]) * unit
            # Batches before fill the last step of a bucket.
            found = (np.minimum(first, batches[place] - unit) + within) % batches[place]
            return read(buckets[place], found)

        def group(position: int) -> list[Any]:
            begin, end = position * shards, min((position + 1) * shards, count)
            if self._last_group == "overlap":
                begin = max(min(begin, count - shards), 0)  # the batches before fill the last group
            return at(np.arange(begin, end))

        if not shards:
            return Table(count, at, BATCHES)
        length = _groups(count, shards, self._last_group)
        return Table(length, lambda found: list(map(group, found.tolist())), BATCHES)

    def _reader(self, epoch: int) -> Callable[[Indices, Indices], list[list[int]]]:
        """What reads batches of an epoch: the bucket of each, and its number in the bucket -> lists of indices."""
        samples, sizes = cache(partial(self._samples, epoch=epoch)), self.bucket_batch_sizes

        def read(buckets: Indices, numbers: Indices) -> list[list[int]]:
            pairs = zip(buckets.tolist(), numbers.tolist(), strict=True)
            return [
                samples(one).slice(number * sizes[one], (number + 1) * sizes[one]).tolist() for one, number in pairs
            ]

        return read

    def _key(self, epoch: int) -> tuple[Any, ...]:
        return (self.seed, "fixed bucket", epoch)

    @property
    def _unit(self) -> int:
        """The number of batches of one bucket that come together: those of one step of all ranks."""
        return 1 if self.ranks == 1 else self.ranks * max(self._num_shards, 1)

    def _batches(self, bucket: int, epoch: int) -> int:
        """The number of batches of a bucket in an epoch."""
        count, size, unit = len(self._members[bucket]), self.bucket_batch_sizes[bucket], self._unit
        if self._last_batch == "rollover":
            return Rolling(count, size * unit, epoch).length() * unit
        return (
            parts(count, size * unit, cut=True) * unit if self._last_batch == "discard" else parts(count, size, False)
        )

    def _samples(self, bucket: int, epoch: int) -> Table:
        """The samples of a bucket in an epoch."""
        members = self._members[bucket]

        def opened(epoch: int) -> Table:
            order = shuffled(len(members), *self._key(epoch), bucket) if self._shuffle else None
            return Table(len(members), (members if order is None else members[order]).take)

        if self._last_batch != "rollover":
            return opened(epoch)
        step = self.bucket_batch_sizes[bucket] * self._unit
        return Rolling(len(members), step, epoch).items(opened, 0, type(self).__name__)

    def len_epoch(self, epoch: int) -> int:
        counts = [parts(self._batches(bucket, epoch), self._unit, False) for bucket in range(len(self._members))]
        count = sum(counts) * self._unit
        return _groups(count, self._num_shards, self._last_group) if self._num_shards else count

    def stats(self) -> str:
        """What the buckets hold, as a text of several lines.

        Returns:
            Samples and batches in all; per bucket its key, its number of samples and its batch size.
        """
        batches = sum(self._batches(bucket, self.epoch) for bucket in range(len(self._members)))
        return (
            f"{type(self).__name__}:\n"
            f"  sample_num={sum(self._counts)}, batch_num={batches}\n"
            f"  key={self.bucket_keys}\n"
            f"  cnt={self._counts}\n"
            f"  batch_size={self.bucket_batch_sizes}"
        )


class GroupedBatchSampler(FixedBucketSampler):
    """Batches of samples of one kind each: one label, one source, one aspect ratio.

    Under ``num_replicas`` all ranks have batches of one kind in each step, as with `FixedBucketSampler`: the kinds are
    its buckets.

    Args:
        by: the kind of each sample: integers, texts or other hashable objects; an array, a tensor or a list.
        batch_size: samples per batch; or a dict with one number for each kind.
        shuffle: shuffle samples within kinds, and batches, in each epoch again.
        last_batch, num_shards, last_group, seed: as in `FixedBucketSampler`.

    Attributes:
        bucket_keys: the kinds, in order if they have one.
        bucket_batch_sizes: samples per batch of each kind.

    Raises:
        TypeError: ``by`` is no sequence of hashable objects.
        ValueError: ``batch_size`` has no number for a kind, or one below 1. The loader raises it if there is not one
            kind per sample of its dataset.

    Example:
        >>> shapes = ["wide", "tall", "wide", "wide", "tall"]
        >>> list(GroupedBatchSampler(by=shapes, batch_size={"wide": 2, "tall": 3}, seed=0))
        [[4, 1], [0], [2, 3]]

    Source of the idea: torchvision's ``GroupedBatchSampler``, aspect ratio buckets of NovelAI (2022).
    """

    shown = (("by", "bucket_keys"), *FixedBucketSampler.shown[2:])
    of_each = "label"
    order_version = 2

    def __init__(
        self,
        by: Sequence[Any] | npt.NDArray[Any],
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
            missing = [kind for kind in kinds if kind not in batch_size]
            if missing:
                raise ValueError(f"batch_size has no number for the kind {missing[0]!r}: give one for each kind in by")
            sizes = [batch_size[kind] for kind in kinds]
        super().__init__(
            numbers + 1,
            sizes,
            None,
            range(1, len(kinds) + 1),
            shuffle=shuffle,
            num_shards=num_shards,
            last_group=last_group,
            seed=seed,
            last_batch=last_batch,
        )
        vars(self)["bucket_keys"], self.dataset_length = kinds, len(numbers)

    def _reader(self, epoch: int) -> Callable[[Indices, Indices], list[list[int]]]:
        if not self._shuffle:
            return super()._reader(epoch)
        # There may be many kinds, each of them read for the first time by a rank: no shuffle is made whole.
        counts, sizes = np.array(self._counts, np.int64), np.array(self.bucket_batch_sizes, np.int64)
        begins, ends = epoch * counts, (epoch + 1) * counts
        if self._last_batch == "rollover":
            steps = zip(counts.tolist(), (sizes * self._unit).tolist(), strict=True)
            begins = np.array([Rolling(count, step, epoch).begin for count, step in steps], np.int64)
            ends = begins + counts + sizes * self._unit  # its batches are whole
        members = np.concatenate([np.zeros(0, np.int64), *self._members])
        firsts, shuffle = np.cumsum(counts) - counts, Bijections(self.seed, "kinds")

        def read(buckets: Indices, numbers: Indices) -> list[list[int]]:
            low = begins[buckets] + numbers * sizes[buckets]
            many = np.minimum(sizes[buckets], ends[buckets] - low)
            cuts = np.cumsum(many)
            of = np.repeat(buckets, many)
            passes, places = np.divmod(np.arange(cuts[-1]) + np.repeat(low - cuts + many, many), counts[of])
            found = members[firsts[of] + shuffle(places, counts[of], passes * len(counts) + of)]
            return [batch.tolist() for batch in np.split(found, cuts[:-1])]

        return read


def _groups(batches: int, shards: int, last_group: str) -> int:
    """The number of groups of ``shards`` batches."""
    return parts(batches, shards, cut=last_group == "discard")


def _batch_sizes(given: Any, keys: Any, ratio: float, by_tokens: bool) -> tuple[Any, int, list[int] | None]:
    """The argument ``batch_size`` as it is shown, as one number, and as one for each bucket key in ascending order."""
    advice = "give the number of samples in a batch"
    if np.ndim(given) == 0:
        size = check_int("batch_size", given, 1, advice)
        return size, size, None
    if keys is None or ratio or by_tokens:
        raise ValueError(
            "batch_size is a list, one number for each bucket: give bucket_keys, and leave out ratio and "
            "use_average_length"
        )
    sizes = [check_int(f"batch_size[{place}]", size, 1, advice) for place, size in enumerate(given)]
    if len(sizes) != len(keys):
        raise ValueError(f"batch_size has {len(sizes)} numbers for {len(keys)} bucket keys: give one for each key")
    order = sorted(range(len(sizes)), key=lambda place: tuple(np.atleast_1d(keys[place])))
    return sizes, 0, [sizes[place] for place in order]


def _check_keys(keys: Sequence[Any] | npt.NDArray[Any], parts: int) -> list[tuple[int, ...]]:
    """Distinct bucket keys in ascending order, each as a tuple of ``parts`` ints."""
    made = set()
    try:
        given = list(keys)
    except TypeError:
        raise TypeError(f"bucket_keys is {keys!r}: give a list, the greatest length of each bucket") from None
    for key in given:
        try:
            row = tuple(map(operator.index, np.atleast_1d(key)))
        except TypeError:
            raise TypeError(f"bucket key {key!r} is no integer: bucket keys are lengths, give integers") from None
        if len(row) != parts:
            raise ValueError(f"bucket key {key} has {len(row)} numbers, but a length has {parts}: give as many")
        made.add(row)
    return sorted(made)


def _match(table: Indices, keys: list[tuple[int, ...]]) -> Indices:
    """For each sample the bucket that it fits into with the least padding."""
    bounds = np.array(keys, dtype=np.int64).reshape(len(keys), table.shape[1])
    if table.shape[1] == 1:
        found = np.searchsorted(bounds[:, 0], table[:, 0], side="left").astype(np.int64)
    else:
        found = np.full(len(table), len(keys), dtype=np.int64)
        least = np.full(len(table), np.iinfo(np.int64).max, dtype=np.int64)
        for bucket, bound in enumerate(bounds):
            spare = bound - table
            padding = spare.sum(axis=1)
            better = (spare >= 0).all(axis=1) & (padding < least)
            found[better] = bucket
            least[better] = padding[better]
    outside = np.flatnonzero(found == len(keys))
    if outside.size:
        sample = int(outside[0])
        raise ValueError(
            f"{outside.size} samples fit no bucket: sample {sample} has length {table[sample].tolist()}, the greatest "
            f"bucket key is {list(keys[-1]) if keys else None}: give a bucket key that is at least the greatest length"
        )
    return found
