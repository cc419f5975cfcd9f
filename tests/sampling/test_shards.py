"""A batch is split completely, in the promised sizes, without an empty shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import (
    BatchSampler,
    Placement,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
)
from sharded_loader.engine.messages import PartIndices, Task
from sharded_loader.engine.split import Split, check_shares, is_sharded, shard_sizes, split_batch

some_weights = (
    st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1e6)), min_size=1, max_size=6)
    .filter(any)
    .map(lambda weights: sorted(weights, key=lambda weight: weight == 0))
)


@given(n=st.integers(0, 500), shards=st.integers(1, 9))
def test_even_sizes_differ_by_one_at_most_the_first_are_larger(n: int, shards: int) -> None:
    sizes = shard_sizes(n, shards)
    assert sum(sizes) == n
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


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


def test_a_light_shard_gets_a_sample_of_the_shard_that_has_most_above_its_share() -> None:
    assert shard_sizes(4, 2, [1, 9]) == [1, 3]
    assert shard_sizes(8, 3, [8, 1, 8]) == [3, 1, 4]
    assert shard_sizes(3, 3, [1, 8, 1]) == [1, 1, 1]
    # Shares 5, 4.9 and 0.1: the second shard was rounded up, so it gives.
    assert shard_sizes(10, 3, [50, 49, 1]) == [5, 4, 1]
    assert shard_sizes(8, 5, [1, 1, 1, 100, 100]) == [1, 1, 1, 2, 3]
    assert shard_sizes(5, 5, [1e-300, 1e300, 1, 1, 1]) == [1] * 5


def test_fewer_samples_than_shards_fill_the_first_ones_whatever_the_weights_are() -> None:
    assert shard_sizes(2, 3, [1, 1, 8]) == [1, 1, 0]
    assert shard_sizes(1, 3, [1, 8, 0]) == [1, 0, 0]
    assert shard_sizes(0, 2, [1, 8]) == [0, 0]
    assert split_batch([7, 8], 3, [1, 1, 8]) == split_batch([7, 8], 3) == [[7], [8]]
    assert split_batch([7, 8], 3, [1, 1, 8], costs=[1] * 9) == [[7], [8]]


@given(n=st.integers(0, 500), shards=st.integers(1, 9), weight=st.floats(0.01, 100))
def test_equal_weights_are_even_shares(n: int, shards: int, weight: float) -> None:
    assert shard_sizes(n, shards, [weight] * shards) == shard_sizes(n, shards)


def test_decimal_weights_mean_what_they_say() -> None:
    # As binary fractions, 0.1 * 3 and 0.7 leave remainders that are not there.
    assert shard_sizes(10, 4, [0.1, 0.1, 0.1, 0.7]) == [1, 1, 1, 7]
    assert shard_sizes(3, 2, [2, 1]) == [2, 1]
    assert shard_sizes(1, 2, [0.5, 0.5]) == [1, 0]
    assert shard_sizes(4, 3, torch.tensor([2.0, 1.0, 1.0])) == [2, 1, 1]  # type: ignore[arg-type]


@given(
    batch=st.lists(st.integers(0, 99), max_size=40),
    shards=st.integers(1, 6),
    weighted=st.booleans(),
    costed=st.booleans(),
    data=st.data(),
)
def test_a_split_is_complete_without_empty_shards(
    batch: list[int], shards: int, weighted: bool, costed: bool, data: st.DataObject
) -> None:
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


def test_costs_are_shared_by_weight() -> None:
    split = split_batch(range(30), 2, weights=[2, 1], costs=[1] * 30)
    assert [len(shard) for shard in split] == [20, 10]
    # A shard of weight 0 gets nothing.
    assert split_batch(range(4), 2, weights=[1, 0], costs=[1] * 4) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("costs", [[1] * 9, [0] * 9, [100, *[1] * 8], [1e308] * 9])
@pytest.mark.parametrize("weights", [[1, 999], [999, 1], [1, 1, 999], [5, 1e-300, 5], [1e300, 1, 1e-300]])
def test_by_cost_every_positive_weight_gets_a_sample(costs: list[float], weights: list[float]) -> None:
    for size in range(1, 10):
        split = split_batch(range(size), len(weights), weights, costs)
        assert len(split) == min(size, len(weights))
        assert sorted(index for shard in split for index in shard) == list(range(size))


@pytest.mark.parametrize("weights", [[0, 1], [1, 0, 1], [0, 1, 0]])
def test_a_weight_of_zero_before_a_positive_one_is_rejected_everywhere(weights: list[float]) -> None:
    count = len(weights)
    message = r"weight \d is 0\. .* must come last: give the weights .* list the devices in the order"
    for make in (
        lambda: ShardedBatchSampler([[0, 1]], count, weights=weights),
        lambda: ShardedBatchSampler([[0, 1]], count, weights=weights, costs=[1, 1]),
        lambda: split_batch([0, 1], count, weights),
        lambda: split_batch([0, 1], count, weights, costs=[1, 1]),
        lambda: ShardedDataLoader(range(4), 2, num_shards=count, device=Placement(shard_weights=weights)),
        lambda: setattr(ShardedDataLoader(range(4), 2, devices=["cpu"] * count), "shard_weights", weights),
    ):
        with pytest.raises(ValueError, match=message):
            make()


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


def test_equal_costs_go_round_in_order() -> None:
    assert split_batch([5, 6, 7, 8, 9], 2, costs=[1.0] * 10) == [[5, 7, 9], [6, 8]]
    assert split_batch([0, 1, 2], 3, costs=[5, 0, 0]) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("batch", "sharded"),
    [
        ([], False),
        ((), False),
        ([1, 2], False),
        ([np.int64(1), np.int64(2)], False),
        ([np.array(1), np.array(2)], False),
        ([torch.tensor(1), torch.tensor(2)], False),
        (np.arange(3), False),
        (np.arange(0), False),
        (torch.arange(3), False),
        (range(3), False),
        (["ab", "cd"], False),
        ([[1, 2], [3]], True),
        ([(1, 2), (3,)], True),
        (([1], [2]), True),
        ([np.arange(2), np.arange(1)], True),
        ([torch.arange(2), torch.arange(2)], True),
        (np.zeros((2, 3), dtype=np.int64), True),
        (torch.zeros((2, 3), dtype=torch.int64), True),
        (np.array([[1], [2, 3]], dtype=object), True),
        ([[]], True),
        (7, False),
    ],
)
def test_shards_are_told_from_indices(batch: object, sharded: bool) -> None:
    assert is_sharded(batch) is sharded


@given(length=st.integers(0, 40), size=st.integers(1, 9), shards=st.integers(1, 5))
def test_sharded_batches_are_the_batches_split(length: int, size: int, shards: int) -> None:
    batches = BatchSampler(SequentialSampler(length), size)
    sharded = ShardedBatchSampler(batches, shards)
    assert len(sharded) == len(batches)
    assert [[index for shard in batch for index in shard] for batch in sharded] == list(batches.iter_epoch(0))


def test_costs_may_be_an_array_or_a_tensor() -> None:
    expected = [[[1], [0, 2]]]
    for costs in ([5, 9, 3], np.array([5, 9, 3]), torch.tensor([5, 9, 3])):
        assert list(ShardedBatchSampler([[0, 1, 2]], 2, costs=costs)) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: check_shares([1], 2), "1 weights for 2 shards: give one weight per shard"),
        (lambda: check_shares([1, -1], 2), "weight of shard 1 is -1"),
        (lambda: check_shares([1, float("nan")], 2), "weight of shard 1 is nan"),
        (lambda: check_shares([1, float("inf")], 2), "weight of shard 1 is inf"),
        (lambda: check_shares([0, 0], 2), "all 2 weights are zero"),
        (lambda: check_shares("ab", 2), "weights must be numbers"),
        (lambda: check_shares(3, 2), "weights must be numbers"),
        (lambda: shard_sizes(3, 0), "num_shards must be at least 1"),
        (lambda: split_batch([0, 5], 2, costs=[1, 2]), "sample 5 has no cost, there are 2 costs"),
        (lambda: split_batch([0, -1], 2, costs=[1, 2]), "sample -1 has no cost"),
        (lambda: split_batch([0, 1], 2, costs=[1, -2]), "cost of sample 1 is -2"),
        (lambda: split_batch([0, 1], 2, costs=[1, float("nan")]), "cost of sample 1 is nan"),
        (lambda: ShardedBatchSampler([[0]], 2, weights=[1]), "1 weights for 2 shards"),
        (lambda: ShardedBatchSampler([[0]], 2, costs=np.zeros((2, 2))), "costs must be 1-D"),
        (lambda: list(ShardedBatchSampler([[0], []], 2)), "batch 1 is empty"),
        (lambda: list(ShardedBatchSampler([[0], [[1]]], 2)), "batch 1 is sharded already"),
        (lambda: list(ShardedBatchSampler([[0], []], 2).iter_epoch(0, 1)), "batch 1 is empty"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_task_is_split_by_the_weights_of_the_moment() -> None:
    split, task = Split(2), Task(7, 0, 3, 0, ([1, 2, 3, 4],), False)
    assert split.sharded(task).shards == ([1, 2], [3, 4])
    split.weights = [3.0, 1.0]
    assert split.sharded(task).shards == ([1, 2, 3], [4])
    assert [shard.places for shard in split.sharded(replace(task, shards=(PartIndices(0, range(4)),))).shards] == [
        range(3),
        range(3, 4),
    ]


def test_a_task_that_has_shards_is_not_split_again() -> None:
    task = Task(7, 0, 3, 0, ([1, 2, 3], [4]), True)
    assert Split(2, 2).sharded(task) is task


def test_without_shards_nothing_is_split() -> None:
    task = Task(7, 0, 3, 0, ([1, 2],), False)
    assert Split().sharded(task) is task
