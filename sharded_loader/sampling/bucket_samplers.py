"""Batches of samples whose lengths fall into the same bucket: `FixedBucketSampler`.

In: the length of every sample. Out: batches (lists of Python ints), or with ``num_shards`` groups of
batches (lists of lists), one batch per shard. Buckets are made once; an epoch shuffles the samples within
each bucket and the order of the batches, as a pure function of (seed, epoch).

What can go wrong: a sample longer than every bucket. The constructor rejects it with an error.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.randomness.shuffle import Indices, shuffled
from sharded_loader.sampling.base import Sampler, resolve_seed
from sharded_loader.sampling.batch_samplers import length_table
from sharded_loader.sampling.bucket_schemes import BucketScheme, ConstWidthBucket
from sharded_loader.sampling.tables import BATCHES, Table

Key = int | tuple[int, ...]


LAST_GROUP = ("keep", "discard", "overlap")
_DEFAULT_BUCKETS = 10
_DEFAULT_SCHEME = ConstWidthBucket()


class FixedBucketSampler(Sampler[Any]):
    """Batches of samples from one bucket of lengths each; long buckets come first.

    Args:
        lengths: integers above 0, shape (n,), or (n, k) for samples of k parts.
        batch_size: samples per batch; with ``use_average_length``, tokens per batch.
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
        ("buckets", "_batch_bucket"),
        ("batch sizes", "_batch_begin"),
        ("shuffle", "_shuffle"),
    )
    shown = (
        ("batch_size", "_batch_size"),
        ("bucket_keys", "bucket_keys"),
        ("bucket_batch_sizes", "bucket_batch_sizes"),
        ("num_shards", "_num_shards"),
        ("last_group", "_last_group"),
        ("shuffle", "_shuffle"),
    )

    def __init__(
        self,
        lengths: Sequence[Any] | npt.NDArray[Any],
        batch_size: int,
        num_buckets: int | None = _DEFAULT_BUCKETS,
        bucket_keys: Sequence[Any] | npt.NDArray[Any] | None = None,
        ratio: float = 0,
        shuffle: bool = False,
        use_average_length: bool = False,
        num_shards: int = 0,
        bucket_scheme: BucketScheme = _DEFAULT_SCHEME,
        last_group: str = "keep",
        seed: int | None = None,
    ) -> None:
        table = length_table(lengths, "give the length of each sample")
        if table.size and table.min() <= 0:
            index = int(np.flatnonzero((table <= 0).any(axis=1))[0])
            length = np.asarray(lengths)[index]
            raise ValueError(f"lengths must be above 0, but lengths[{index}] is {length}: leave that sample out")
        self._batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        self._num_shards = check_int("num_shards", num_shards, 0, "0 gives plain batches, k groups of k batches")
        if not 0 <= ratio < float("inf"):
            raise ValueError(f"ratio must be a finite number of at least 0, got {ratio}: give 0 for equal batches")
        if last_group not in LAST_GROUP:
            raise ValueError(
                f"last_group is {last_group!r}, which FixedBucketSampler does not know: "
                "choose 'keep', 'discard' or 'overlap'"
            )
        self._last_group = last_group
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
        self._fill(table, _check_keys([] if bucket_keys is None else bucket_keys, table.shape[1]))
        self._choose_batch_sizes(table, self._batch_size, float(ratio), use_average_length)
        self._plan()

    def _fill(self, table: Indices, keys: list[tuple[int, ...]]) -> None:
        """Sort the samples into buckets; buckets without samples go."""
        bucket_of = _match(table, keys)
        counts = np.bincount(bucket_of, minlength=len(keys))
        members = np.split(np.argsort(bucket_of, kind="stable"), np.cumsum(counts)[:-1])
        single = table.shape[1] == 1
        shown: list[Key] = [key[0] if single else key for key in keys]
        unused = [key for key, count in zip(shown, counts, strict=True) if not count]
        if unused:
            warnings.warn(f"Some buckets are empty and will be removed. Unused bucket keys={unused}", stacklevel=3)
        used = np.flatnonzero(counts).tolist()
        self.bucket_keys = [shown[bucket] for bucket in used]
        self._members: list[Indices] = [members[bucket] for bucket in used]
        self._scales = [sum(keys[bucket]) for bucket in used]

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

    def _plan(self) -> None:
        """All batches as (bucket, position of the first sample in it), the longest bucket first."""
        buckets = range(len(self._members) - 1, -1, -1)
        begins = [np.arange(0, len(self._members[b]), self.bucket_batch_sizes[b], dtype=np.int64) for b in buckets]
        self._batch_bucket = np.repeat(np.array(buckets, dtype=np.int64), [len(begin) for begin in begins])
        self._batch_begin = np.concatenate([np.zeros(0, dtype=np.int64), *begins])

    def epoch_table(self, epoch: int) -> Table:
        key = (self.seed, "fixed bucket", epoch)
        count, shards = len(self._batch_begin), self._num_shards
        order = shuffled(count, *key) if self._shuffle else np.arange(count)

        @cache
        def members(bucket: int) -> Indices:
            found = self._members[bucket]
            return found[shuffled(len(found), *key, bucket)] if self._shuffle else found

        def batch(number: int) -> Any:
            bucket, begin = int(self._batch_bucket[number]), int(self._batch_begin[number])
            return members(bucket)[begin : begin + self.bucket_batch_sizes[bucket]].tolist()

        def group(position: int) -> list[Any]:
            begin, end = position * shards, min((position + 1) * shards, count)
            if self._last_group == "overlap":
                begin = max(min(begin, count - shards), 0)  # the batches before fill the last group
            return [batch(number) for number in order[begin:end].tolist()]

        if shards:
            return Table(self.len_epoch(epoch), lambda positions: list(map(group, positions.tolist())), BATCHES)
        return Table(count, lambda positions: list(map(batch, order[positions].tolist())), BATCHES)

    def len_epoch(self, epoch: int) -> int:
        batches = len(self._batch_begin)
        if not self._num_shards:
            return batches
        full, rest = divmod(batches, self._num_shards)
        return full + (rest > 0 and self._last_group != "discard")

    def stats(self) -> str:
        """What the buckets hold, as a text of several lines.

        Returns:
            Samples and batches in all; per bucket its key, its number of samples and its batch size.
        """
        return (
            f"{type(self).__name__}:\n"
            f"  sample_num={sum(map(len, self._members))}, batch_num={len(self._batch_begin)}\n"
            f"  key={self.bucket_keys}\n"
            f"  cnt={[len(members) for members in self._members]}\n"
            f"  batch_size={self.bucket_batch_sizes}"
        )


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
