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

from sharded_loader import (
    BucketScheme,
    FixedBucketSampler,
    ShardedDataLoader,
)


def test_the_last_group_is_filled_with_the_batches_before() -> None:
    def groups(count: int, shards: int, last_group: str) -> list[list[list[int]]]:
        return list(FixedBucketSampler([1] * count, 2, 1, num_shards=shards, last_group=last_group))

    assert groups(10, 3, "keep") == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert groups(10, 3, "discard") == [[[0, 1], [2, 3], [4, 5]]]
    assert groups(10, 3, "overlap") == [[[0, 1], [2, 3], [4, 5]], [[4, 5], [6, 7], [8, 9]]]
    assert groups(3, 4, "keep") == groups(3, 4, "overlap") == [[[0, 1], [2]]]  # fewer batches than shards


def test_each_bucket_may_have_a_batch_size_of_its_own() -> None:
    sampler = FixedBucketSampler([1, 2, 9, 8, 1, 7, 2], [1, 3], bucket_keys=[9, 2], last_batch="keep")
    assert (sampler.bucket_keys, sampler.bucket_batch_sizes) == ([2, 9], [3, 1])
    assert list(sampler) == [[2], [3], [5], [0, 1, 4], [6]]


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

    def asked(self) -> list[tuple[int, int, int]]:
        return self._asked


def test_a_scheme_of_ones_own_makes_the_buckets_of_a_sampler_and_of_each_part_of_the_samples() -> None:
    scheme = Every(30)
    sampler = FixedBucketSampler(LENGTHS, 2, bucket_scheme=scheme)
    assert sampler.bucket_keys == [30, 60, 90] and scheme.asked() == [(90, 1, 10)]
    batches = [batch.tolist() for batch in ShardedDataLoader(range(8), batch_sampler=sampler)]
    assert batches == [[1, 5], [6], [2], [0, 3], [4, 7]]
    parts = Every(50)
    assert parts([100, 100], [1, 2], 2) == [(50, 50), (100, 100)] and parts.asked() == [(100, 1, 2), (100, 2, 2)]
    assert repr(Every(30)) == repr(pickle.loads(pickle.dumps(Every(30)))) == "Every(step=30)"


@pytest.mark.slow
def test_many_lengths_are_sorted_into_buckets_in_a_moment() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, (200_000, 2))
    begin = time.process_time()  # what other programs take does not count
    sampler = FixedBucketSampler(lengths, 64, shuffle=True, seed=1)
    assert sum(len(batch) for batch in sampler) == 200_000
    assert time.process_time() - begin < 10  # 0.1 s on a free machine
