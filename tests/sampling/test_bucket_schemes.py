"""Bucket schemes: those of the library, and a user's own in a sampler and a loader."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import sharded_loader
from sharded_loader import (
    BucketScheme,
    ConstWidthBucket,
    ExpWidthBucket,
    FixedBucketSampler,
    LinearWidthBucket,
    ShardedDataLoader,
)

LENGTHS = [3, 90, 40, 12, 7, 64, 65, 1]


class Every(BucketScheme):
    """A bucket for each ``step`` of length."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._asked: list[tuple[int, int, int]] = []

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        self._asked.append((longest, shortest, num_buckets))
        return list(range(self.step, longest + self.step, self.step))


def test_a_scheme_of_ones_own_makes_the_buckets_of_a_sampler() -> None:
    scheme = Every(30)
    sampler = FixedBucketSampler(LENGTHS, 2, bucket_scheme=scheme)
    assert sampler.bucket_keys == [30, 60, 90]
    assert scheme._asked == [(90, 1, 10)]
    batches = [batch.tolist() for batch in ShardedDataLoader(range(8), batch_sampler=sampler)]
    assert batches == [[1, 5], [6], [2], [0, 3], [4, 7]]


def test_a_scheme_of_ones_own_is_asked_for_each_part_of_the_samples() -> None:
    scheme = Every(50)
    assert scheme([100, 100], [1, 2], 2) == [(50, 50), (100, 100)]
    assert scheme._asked == [(100, 1, 2), (100, 2, 2)]


def test_keys_that_miss_the_longest_sample_are_refused_by_the_sampler() -> None:
    class TooShort(BucketScheme):
        def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
            return [longest - 1]

    with pytest.raises(ValueError, match="1 samples fit no bucket: sample 1 has length"):
        FixedBucketSampler(LENGTHS, 2, bucket_scheme=TooShort())


def test_a_scheme_without_keys_says_what_to_override() -> None:
    class Nothing(BucketScheme):
        pass

    for call in (lambda: Nothing()(10, 1, 2), lambda: BucketScheme().keys(10, 1, 2)):
        with pytest.raises(NotImplementedError, match="makes no buckets: override keys"):
            call()


@pytest.mark.parametrize("scheme", [ConstWidthBucket(), LinearWidthBucket(), ExpWidthBucket(), Every(3)], ids=repr)
@pytest.mark.parametrize("num_buckets", [0, 2.5, "many", True])
def test_a_number_of_buckets_that_is_none_is_refused(scheme: BucketScheme, num_buckets: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="num_buckets"):
        scheme(10, 1, num_buckets)


def test_a_scheme_shows_its_arguments_and_pickles() -> None:
    assert repr(Every(30)) == "Every(step=30)"
    assert repr(pickle.loads(pickle.dumps(Every(30)))) == "Every(step=30)"
    assert repr(ExpWidthBucket(2)) == "ExpWidthBucket(bucket_len_step=2)"


def test_every_scheme_is_public() -> None:
    def kinds(base: type) -> list[type]:
        return [base, *(one for sub in base.__subclasses__() for one in kinds(sub))]

    ours = [one for one in kinds(BucketScheme) if one.__module__.startswith("sharded_loader.")]
    assert len(ours) == 4 and {one.__name__ for one in ours} <= set(sharded_loader.__all__)
