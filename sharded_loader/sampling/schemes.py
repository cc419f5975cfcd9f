"""Where one bucket of lengths ends and the next begins: three bucket schemes.

A scheme is called with the greatest and the smallest length and the number of buckets, and returns the
bucket keys: a key is the greatest length that its bucket takes. Lengths of several parts (source and target
of a translation) give tuples, one number per part.

What can go wrong: keys may coincide when there are more buckets than lengths; `FixedBucketSampler` merges
them.

Source of the idea: `gluonnlp.data.BucketScheme`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sharded_loader.sampling.base import check_int
from sharded_loader.sampling.describing import Described

Key = int | tuple[int, ...]


class BucketScheme(Described):
    """Base class: override `keys`, which treats one part's lengths.

    Example:
        >>> class Halves(BucketScheme):
        ...     def keys(self, longest, shortest, num_buckets): return [longest // 2, longest]
        >>> Halves()(100, 1, 2)
        [50, 100]
    """

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        """The bucket keys for lengths from ``shortest`` to ``longest``."""
        raise NotImplementedError(f"{type(self).__name__} makes no buckets: override keys")

    def __call__(
        self, max_lengths: int | Sequence[int], min_lengths: int | Sequence[int], num_buckets: int
    ) -> list[Any]:
        """The bucket keys.

        Args:
            max_lengths: the greatest length, or one per part.
            min_lengths: the smallest length, or one per part.
            num_buckets: how many buckets.

        Returns:
            ``num_buckets`` ints, or as many tuples of them.

        Raises:
            TypeError, ValueError: if ``num_buckets`` is not an integer of at least 1.
        """
        check_int("num_buckets", num_buckets, 1, "give how many buckets to make")
        if np.ndim(max_lengths) == 0:
            return self.keys(int(max_lengths), int(min_lengths), num_buckets)  # type: ignore[arg-type]
        pairs = zip(max_lengths, min_lengths, strict=True)  # type: ignore[arg-type]
        return list(
            zip(*(self.keys(int(longest), int(shortest), num_buckets) for longest, shortest in pairs), strict=True)
        )


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

    decided_by = (("bucket_len_step", "bucket_len_step"),)

    def __init__(self, bucket_len_step: float = 1.1) -> None:
        if not bucket_len_step > 0:
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
