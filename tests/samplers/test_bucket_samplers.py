"""Batches by buckets of lengths: every index once, each batch from one bucket, whatever the lengths are."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sharded_loader
from sharded_loader import (
    BucketScheme,
    ConstWidthBucket,
    ExpWidthBucket,
    FixedBucketSampler,
    LinearWidthBucket,
    ShardedDataLoader,
)


def test_the_last_group_is_filled_with_the_batches_before() -> None:
    def groups(last_group: str) -> list[list[list[int]]]:
        return list(FixedBucketSampler([1] * 10, 2, 1, num_shards=3, last_group=last_group))

    assert groups("keep") == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert groups("discard") == [[[0, 1], [2, 3], [4, 5]]]
    assert groups("overlap") == [[[0, 1], [2, 3], [4, 5]], [[4, 5], [6, 7], [8, 9]]]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80),
    size=st.integers(1, 9),
    buckets=st.integers(1, 6),
    shards=st.integers(0, 4),
    last=st.sampled_from(["keep", "discard"]),
    shuffle=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:Some buckets are empty")
def test_fixed_buckets_hold_every_index_once(
    lengths: list[int], size: int, buckets: int, shards: int, last: str, shuffle: bool
) -> None:
    sampler = FixedBucketSampler(lengths, size, buckets, shuffle=shuffle, num_shards=shards, last_group=last, seed=2)
    items = list(sampler)
    assert len(items) == len(sampler)
    batches = [batch for group in items for batch in group] if shards else items
    indices = [index for batch in batches for index in batch]
    assert len(set(indices)) == len(indices)
    if not shards or last == "keep":
        assert sorted(indices) == list(range(len(lengths)))
    else:
        assert all(len(group) == shards for group in items)
    for batch in batches:
        bucket = {min(key for key in sampler.bucket_keys if key >= lengths[index]) for index in batch}
        assert len(bucket) == 1
        assert 0 < len(batch) <= size


@pytest.mark.parametrize(
    "as_given", [tuple, np.array, torch.tensor, iter], ids=["tuple", "array", "tensor", "iterator"]
)
def test_bucket_keys_may_be_any_sequence(as_given: Callable[[Any], Any]) -> None:
    one, pairs = [1, 5, 9, 2], [[1, 2], [5, 5], [9, 8], [2, 9]]
    assert list(FixedBucketSampler(one, 2, None, as_given([5, 10]))) == list(FixedBucketSampler(one, 2, None, [5, 10]))
    keys = [[5, 5], [10, 10]]
    assert list(FixedBucketSampler(pairs, 2, None, as_given(keys))) == list(FixedBucketSampler(pairs, 2, None, keys))
    assert list(FixedBucketSampler(one, 2, None, as_given([9]))) == list(FixedBucketSampler(one, 2, None, [9]))


def test_fewer_batches_than_shards_make_one_group_of_fewer() -> None:
    for last_group in ("keep", "overlap"):
        sampler = FixedBucketSampler([5, 5, 5], 2, 1, num_shards=4, last_group=last_group)
        assert list(sampler) == [[[0, 1], [2]]]
        assert len(sampler) == 1


def test_many_lengths_are_sorted_into_buckets_in_a_moment() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, (200_000, 2))
    begin = time.process_time()  # what other programs take does not count
    sampler = FixedBucketSampler(lengths, 64, shuffle=True, seed=1)
    assert sum(len(batch) for batch in sampler) == 200_000
    assert time.process_time() - begin < 10  # 0.1 s on a free machine


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FixedBucketSampler([3, 0], 8), ValueError, r"lengths\[1\] is 0"),
        (lambda: FixedBucketSampler([[1, 2], [3]], 8), ValueError, "rows of different sizes"),
        (lambda: FixedBucketSampler([1], 8, last_group="x"), ValueError, "'keep', 'discard' or 'overlap'"),
        (lambda: FixedBucketSampler([1], 8, num_shards=-1), ValueError, "num_shards must be at least 0"),
        (lambda: FixedBucketSampler([1], 8, None), ValueError, "neither num_buckets nor bucket_keys"),
        (lambda: FixedBucketSampler([1], 8, bucket_keys=5), TypeError, "bucket_keys is 5: give a list"),
        (lambda: FixedBucketSampler([1], 8, bucket_keys=np.array(5)), TypeError, "give a list"),
        (lambda: FixedBucketSampler([1], 8, bucket_keys=np.array([])), ValueError, "give a bucket key"),
        (lambda: FixedBucketSampler([1], 8, bucket_keys=np.array([1.5])), TypeError, "give integers"),
        (lambda: FixedBucketSampler([1, 7], 8, bucket_keys=[5]), ValueError, "sample 1 has length"),
        (lambda: FixedBucketSampler([[1, 7]], 8, bucket_keys=[5]), ValueError, "1 numbers, but a length has 2"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# -- Bucket schemes: those of the library, and a user's own in a sampler and a loader ----------------------------------


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
