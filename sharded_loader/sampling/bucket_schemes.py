"""Bucket schemes: how `FixedBucketSampler` makes buckets for samples of similar length.

    scheme(longest, shortest, num_buckets) -> bucket keys, each the greatest length of a bucket

A scheme keeps nothing but its arguments, and is a pure function of the lengths. What can go wrong: arguments, all
rejected with an error. If the keys of a user's scheme do not reach the longest sample, `FixedBucketSampler` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import Described


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
