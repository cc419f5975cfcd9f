"""A batch is split completely, in the promised sizes, without an empty shard."""

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import BatchSampler, Placement, SequentialSampler, ShardedBatchSampler, ShardedDataLoader
from sharded_loader.engine.messages import PartIndices, Task
from sharded_loader.engine.split import Split, is_sharded, shard_sizes, split_batch

some_weights = (
    st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e6)), min_size=1, max_size=6)
    .filter(any)
    .map(lambda weights: sorted(weights, key=lambda weight: weight == 0))
)


@given(n=st.integers(0, 500), shards=st.integers(1, 9), weight=st.floats(0.01, 100))
def test_even_sizes_differ_by_one_at_most_the_first_are_larger(n: int, shards: int, weight: float) -> None:
    sizes = shard_sizes(n, shards)
    assert sum(sizes) == n and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert shard_sizes(n, shards, [weight] * shards) == sizes


@given(n=st.integers(0, 500), weights=some_weights)
def test_weighted_sizes_are_the_exact_share_rounded_with_one_sample_at_least(n: int, weights: list[float]) -> None:
    sizes = shard_sizes(n, len(weights), weights)
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [n * weight / sum(exact) for weight in exact]
    positive = [shard for shard, weight in enumerate(weights) if weight]
    assert sum(sizes) == n
    assert all(not size for size, weight in zip(sizes, weights, strict=True) if not weight)
    if n < len(positive):
        assert [shard for shard, size in enumerate(sizes) if size] == positive[:n]
        return
    assert all(sizes[shard] for shard in positive)
    for size, share in zip(sizes, shares, strict=True):
        assert size < share + 1
    if all(share >= 1 for shard, share in enumerate(shares) if weights[shard]):
        assert all(abs(size - share) < 1 for size, share in zip(sizes, shares, strict=True))


@pytest.mark.parametrize(
    ("n", "weights", "sizes"),
    [
        # A light shard gets a sample of the shard that has most above its share.
        (4, [1, 9], [1, 3]),
        (8, [8, 1, 8], [3, 1, 4]),
        (3, [1, 8, 1], [1, 1, 1]),
        (10, [50, 49, 1], [5, 4, 1]),  # shares 5, 4.9 and 0.1: the second shard was rounded up, so it gives
        (8, [1, 1, 1, 100, 100], [1, 1, 1, 2, 3]),
        (5, [1e-300, 1e300, 1, 1, 1], [1] * 5),
        # Fewer samples than shards fill the first ones.
        (2, [1, 1, 8], [1, 1, 0]),
        (1, [1, 8, 0], [1, 0, 0]),
        (0, [1, 8], [0, 0]),
        # Decimal weights mean what they say: as binary fractions, 0.1 * 3 and 0.7 leave remainders that are not there.
        (10, [0.1, 0.1, 0.1, 0.7], [1, 1, 1, 7]),
        (3, [2, 1], [2, 1]),
        (1, [0.5, 0.5], [1, 0]),
        (4, torch.tensor([2.0, 1.0, 1.0]), [2, 1, 1]),
    ],
)
def test_so_many_samples_are_shared_by_these_weights(n: int, weights: Any, sizes: list[int]) -> None:
    assert shard_sizes(n, len(weights), weights) == sizes


@given(
    batch=st.lists(st.integers(0, 99), max_size=40),
    shards=st.integers(1, 6),
    weighted=st.booleans(),
    costed=st.booleans(),
    data=st.data(),
)
def test_a_split_is_complete_without_empty_shards(batch, shards, weighted, costed, data):
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=shards, max_size=shards)) if weighted else None
    costs = data.draw(st.lists(st.integers(0, 5), min_size=100, max_size=100)) if costed else None
    split = split_batch(batch, shards, weights, costs)
    assert sorted(index for shard in split for index in shard) == sorted(batch)
    assert all(split)
    assert len(split) <= shards
    if not costed:
        assert [index for shard in split for index in shard] == batch
    assert len(split) == min(shards, len(batch))
    places = {index: place for place, index in reversed(list(enumerate(batch)))}
    if costed and len(places) == len(batch):
        for shard in split:
            assert [places[index] for index in shard] == sorted(places[index] for index in shard)


@given(costs=st.lists(st.integers(0, 30), min_size=1, max_size=7), shards=st.integers(1, 3))
def test_the_most_expensive_shard_is_within_grahams_bound_of_the_best(costs: list[int], shards: int) -> None:
    split = split_batch(range(len(costs)), shards, costs=costs)
    worst = max(sum(costs[index] for index in shard) for shard in split)
    best = min(
        max(sum(cost for cost, place in zip(costs, places, strict=True) if place == shard) for shard in range(shards))
        for places in itertools.product(range(shards), repeat=len(costs))
    )
    assert worst * 3 * shards <= best * (4 * shards - 1)


def test_costs_are_shared_by_weight_equal_ones_in_order_and_may_be_an_array_or_a_tensor() -> None:
    split = split_batch(range(30), 2, weights=[2, 1], costs=[1] * 30)
    assert [len(shard) for shard in split] == [20, 10]
    assert split_batch(range(4), 2, weights=[1, 0], costs=[1] * 4) == [[0, 1, 2, 3]]
    assert split_batch([7, 8], 3, [1, 1, 8], costs=[1] * 9) == split_batch([7, 8], 3, [1, 1, 8]) == [[7], [8]]
    assert split_batch([5, 6, 7, 8, 9], 2, costs=[1.0] * 10) == [[5, 7, 9], [6, 8]]
    assert split_batch([0, 1, 2], 3, costs=[5, 0, 0]) == [[0], [1], [2]]
    for costs in ([5, 9, 3], np.array([5, 9, 3]), torch.tensor([5, 9, 3])):
        assert list(ShardedBatchSampler([[0, 1, 2]], 2, costs=costs)) == [[[1], [0, 2]]]


@pytest.mark.parametrize("costs", [[1] * 9, [0] * 9, [100, *[1] * 8], [1e308] * 9])
@pytest.mark.parametrize("weights", [[1, 999], [999, 1], [1, 1, 999], [5, 1e-300, 5], [1e300, 1, 1e-300]])
def test_by_cost_every_positive_weight_gets_a_sample(costs: list[float], weights: list[float]) -> None:
    for size in range(1, 10):
        split = split_batch(range(size), len(weights), weights, costs)
        assert len(split) == min(size, len(weights))
        assert sorted(index for shard in split for index in shard) == list(range(size))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("weights", [[1, 9], [8, 1, 8], [1, 8, 1], [9, 1, 0]])
def test_the_loader_and_the_sampler_put_shard_i_on_device_i(weights: list[float], batch_size: int) -> None:
    positive = sum(weight > 0 for weight in weights)
    sampler = ShardedBatchSampler(BatchSampler(SequentialSampler(61), batch_size), len(weights), weights)
    split = ShardedDataLoader(range(61), batch_size, devices=Placement(["cpu"] * len(weights), shard_weights=weights))
    given = ShardedDataLoader(range(61), batch_sampler=sampler, devices=["cpu"] * len(weights))
    for shards, others in zip(split, given, strict=True):
        assert [shard.tolist() for shard in shards] == [shard.tolist() for shard in others]
        assert len(shards) == min(positive, sum(map(len, shards)))
        assert all(len(shard) for shard in shards)


INDICES: list[Any] = [
    *([], (), [1, 2], [np.int64(1), np.int64(2)], [np.array(1), np.array(2)], [torch.tensor(1), torch.tensor(2)]),
    *(np.arange(3), np.arange(0), torch.arange(3), range(3), ["ab", "cd"], 7),
]
SHARDS: list[Any] = [
    *([[1, 2], [3]], [(1, 2), (3,)], ([1], [2]), [np.arange(2), np.arange(1)], [torch.arange(2)] * 2, [[]]),
    *(np.zeros((2, 3), int), torch.zeros((2, 3), dtype=torch.int64), np.array([[1], [2, 3]], dtype=object)),
]


def test_shards_are_told_from_indices() -> None:
    assert [is_sharded(batch) for batch in (*INDICES, *SHARDS)] == [False] * len(INDICES) + [True] * len(SHARDS)


def test_a_task_is_split_once_by_the_weights_of_the_moment() -> None:
    split, task = Split(2), Task(7, 0, 3, 0, ([1, 2, 3, 4],), False)
    assert split.sharded(task).shards == ([1, 2], [3, 4])
    split.weights = [3.0, 1.0]
    assert split.sharded(task).shards == ([1, 2, 3], [4])
    parts = split.sharded(replace(task, shards=(PartIndices(0, range(4)),))).shards
    assert [shard.places for shard in parts] == [range(3), range(3, 4)]
    given = Task(7, 0, 3, 0, ([1, 2, 3], [4]), True)
    assert Split(2, 2).sharded(given) is given and Split().sharded(task) is task
