"""Every rank the same work: bucket samplers and ``costs=`` over ranks."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samplers_samples import after_steps, ranks_of, steps_of

from sharded_loader import (
    BoundedBudgetSampler,
    FixedBucketSampler,
    Sampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    SortedBucketSampler,
)
from sharded_loader.samplers.index_samplers import CostSampler

LENGTHS = np.clip(np.random.default_rng(0).lognormal(np.log(300), 0.9, 2000), 1, 4000).astype(int)

BUCKETS: dict[str, Callable[..., Sampler[Any]]] = {
    "fixed": lambda **given: FixedBucketSampler(LENGTHS, 8, num_buckets=5, shuffle=True, seed=1, **given),
    "sorted": lambda **given: SortedBucketSampler(LENGTHS, 8, mult=50, shuffle=True, seed=1, **given),
    "budget": lambda **given: BoundedBudgetSampler(LENGTHS, max_num_tokens=12_000, seed=1, **given),
}


def loaders_of(replicas: int, state: Any = None, **given: Any) -> list[Any]:
    return ranks_of(replicas, partial(ShardedDataLoader, range(len(LENGTHS)), **given), state)


def slowest(steps: list[list[list[int]]]) -> float:
    """The longest sample of a step over that of the mean rank, as a mean over the steps."""
    work = np.array([[LENGTHS[batch].max() for batch in step] for step in steps], float)
    return float((work.max(axis=1) / work.mean(axis=1)).mean())


# -- buckets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("replicas", [2, 8])
def test_in_each_step_all_ranks_have_batches_of_one_bucket(kind: str, replicas: int) -> None:
    sampler = BUCKETS[kind]()
    loaders = loaders_of(replicas, batch_sampler=sampler)
    for _ in range(2):
        steps = steps_of(loaders)
        assert {index for step in steps for batch in step for index in batch} == set(range(len(LENGTHS)))
        assert len(steps) == len(loaders[0])
        for step in steps:
            if isinstance(sampler, FixedBucketSampler):
                assert len({np.searchsorted(sampler.bucket_keys, LENGTHS[index]) for b in step for index in b}) == 1
            elif len({tuple(batch) for batch in step}) == len(step):
                # Neighbours of one sorted bucket: no batch of a rank lies between two others of a step.
                spans = sorted((LENGTHS[batch].min(), LENGTHS[batch].max()) for batch in step)
                assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    alone = list(sampler.iter_epoch(0))
    at_random = [alone[first : first + replicas] for first in range(0, len(alone) - replicas + 1, replicas)]
    assert slowest(steps) - 1 < (slowest(at_random) - 1) * 0.7


@pytest.mark.parametrize(
    "make", [lambda: BUCKETS["fixed"](num_shards=2), lambda: ShardedBatchSampler(BUCKETS["fixed"](), 2)]
)
def test_shards_of_one_step_are_of_one_bucket_too(make: Callable[[], Any]) -> None:
    keys, read = BUCKETS["fixed"]().bucket_keys, set()  # type: ignore[attr-defined]
    for step in zip(*loaders_of(2, batch_sampler=make()), strict=True):
        indices = [index for shards in step for shard in shards for index in shard.tolist()]
        assert len({np.searchsorted(keys, LENGTHS[index]) for index in indices}) == 1
        read.update(indices)
    assert read == set(range(len(LENGTHS)))


@pytest.mark.parametrize("kind", BUCKETS)
def test_one_rank_has_the_order_that_it_always_had(kind: str) -> None:
    sampler = BUCKETS[kind]()
    for options in ({}, {"num_replicas": 1, "rank": 0}):
        loader = ShardedDataLoader(range(len(LENGTHS)), batch_sampler=sampler, **options)
        loader.set_epoch(0)
        assert [batch.tolist() for batch in loader] == list(sampler.iter_epoch(0))


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_state_of_four_ranks_goes_on_with_others_and_loses_no_sample(kind: str, replicas: int) -> None:
    before = loaders_of(4, batch_sampler=BUCKETS[kind]())
    steps_of(before)  # an epoch that is over: beyond epoch 0 is where ranks differ
    done, state, left = after_steps(before, 3)
    after = loaders_of(replicas, state, batch_sampler=BUCKETS[kind]())
    more = sum(steps_of(after), [])
    assert {index for batch in sum(done, []) + more for index in batch} == set(range(len(LENGTHS)))
    # What four ranks have left is what the others read, but for fillers at the end.
    assert more[: 4 * len(left)] == sum(left, [])
    assert {loader.epoch for loader in after} == {2}
    again = loaders_of(replicas, batch_sampler=BUCKETS[kind]())
    for loader in again:
        loader.set_epoch(2)
    assert steps_of(after) == steps_of(again)  # the next epoch is made for the ranks that there are


@pytest.mark.costly(2)
@pytest.mark.parametrize("last_batch", ["discard", "rollover"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_rest_of_each_bucket_is_left_out_or_comes_first_in_its_next_epoch(last_batch: str, replicas: int) -> None:
    sampler = BUCKETS["fixed"](last_batch=last_batch)
    loaders = loaders_of(replicas, batch_sampler=sampler)
    counts: Counter[int] = Counter()
    # Those of buckets that are as large as a step.
    large = np.flatnonzero(sampler.bucket_keys[1] >= LENGTHS)  # type: ignore[attr-defined]
    for epoch in range(6):
        steps = steps_of(loaders)
        assert len(steps) * replicas == sampler.for_ranks(replicas).len_epoch(epoch)
        assert {len(batch) for step in steps for batch in step} == {8}
        read = Counter(index for step in steps for batch in step for index in batch)
        assert max(read[index] for index in large) <= (1 if last_batch == "discard" else 2)
        counts += read
    spread = max(counts[index] for index in large) - min(counts[index] for index in large)
    assert spread <= (6 if last_batch == "discard" else 1)
    if last_batch == "discard":
        assert sum(counts.values()) < 6 * len(LENGTHS)


@given(
    length=st.integers(1, 60),
    replicas=st.integers(1, 7),
    epoch=st.integers(0, 3),
    kind=st.sampled_from(sorted(BUCKETS)),
)
def test_any_lengths_on_any_number_of_ranks_are_all_read(length: int, replicas: int, epoch: int, kind: str) -> None:
    lengths = LENGTHS[:length]
    keys = sorted({lengths.min(), lengths.max()})
    sampler: Sampler[Any] = {
        "fixed": lambda: FixedBucketSampler(lengths, 3, bucket_keys=keys, shuffle=True, seed=5),
        "sorted": lambda: SortedBucketSampler(lengths, 3, mult=2, shuffle=True, seed=5),
        "budget": lambda: BoundedBudgetSampler(lengths, max_num_tokens=4000, seed=5),
    }[kind]().for_ranks(replicas)
    items = list(sampler.iter_epoch(epoch))
    assert len(items) == sampler.len_epoch(epoch)
    assert len(items) % replicas == 0
    assert {index for batch in items for index in batch} == set(range(length))
    assert items[3:] == list(sampler.iter_epoch(epoch, 3))


# -- costs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "bar"), [(1, 1.02), (2, 1.05)])
@pytest.mark.parametrize(("replicas", "size"), [(8, 32), (8, 8), (64, 8)])
def test_the_slowest_rank_is_near_the_mean(power: int, bar: float, replicas: int, size: int) -> None:
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(300), 0.9, 16_000), 1, 4000)
    sampler = CostSampler(lengths**power, size, 16_000, seed=2).for_ranks(replicas)
    for epoch in (0, 1):
        order = np.array(list(sampler.iter_epoch(epoch)))
        steps = order[: len(order) // (size * replicas) * size * replicas].reshape(-1, size, replicas)
        work = (lengths**power)[steps].sum(axis=1)
        assert (work.max(axis=1) / work.mean(axis=1)).mean() <= bar


@given(
    length=st.integers(0, 300),
    size=st.integers(1, 9),
    replicas=st.integers(1, 6),
    epoch=st.integers(0, 3),
    equal=st.booleans(),
)
def test_with_costs_each_sample_comes_once(length: int, size: int, replicas: int, epoch: int, equal: bool) -> None:
    costs = np.ones(length) if equal else LENGTHS[:length]
    sampler = CostSampler(costs, size, length, seed=3).for_ranks(replicas)
    order = list(sampler.iter_epoch(epoch))
    assert sorted(order) == list(range(length))
    assert order[7:] == list(sampler.iter_epoch(epoch, 7))
    whole = CostSampler(costs, size, length, seed=3, whole_steps=True).for_ranks(replicas)
    steps = length // (size * replicas) * size * replicas
    assert list(whole.iter_epoch(epoch)) == order[:steps]


def test_the_order_is_another_one_in_each_epoch_and_with_each_seed() -> None:
    one, other = CostSampler(LENGTHS, 8, 2000, seed=1), CostSampler(LENGTHS, 8, 2000, seed=2)
    orders = [list(one.iter_epoch(0)), list(one.iter_epoch(1)), list(other.iter_epoch(0))]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    # Who is together in a step: in another epoch hardly more of them than by chance are together again.
    together = [
        {frozenset(pair) for at in range(0, 2000, 8) for pair in itertools.combinations(order[at : at + 8], 2)}
        for order in orders[:2]
    ]
    assert len(together[0] & together[1]) < 0.2 * len(together[0])
    # A step has cheap samples and dear ones.
    steps = LENGTHS[np.array(orders[0]).reshape(-1, 8)]
    assert (steps.max(axis=1) > 2 * steps.min(axis=1)).mean() > 0.8


@pytest.mark.costly(2)
@pytest.mark.parametrize(("replicas", "size"), [(2, 16), (8, 4), (1, 32)])
def test_a_state_goes_on_with_other_ranks_that_read_as_much(replicas: int, size: int) -> None:
    before = loaders_of(4, batch_size=8, costs=LENGTHS, seed=3)
    assert len(steps_of(before) + steps_of(before)) == 2 * 63
    _, state, there = after_steps(before, 5)
    here = steps_of(loaders_of(replicas, state, batch_size=size, costs=LENGTHS, seed=3))
    assert [sorted(sum(step, [])) for step in here[:-1]] == [sorted(sum(step, [])) for step in there[:-1]]


def test_costs_go_with_steps_per_epoch_and_discard() -> None:
    loaders = loaders_of(2, batch_size=8, costs=LENGTHS, seed=3, steps_per_epoch=50)
    read = Counter(index for _ in range(5) for step in steps_of(loaders) for batch in step for index in batch)
    assert sum(read.values()) == 5 * 50 * 16
    assert max(read.values()) <= 3
    discarded = steps_of(loaders_of(3, batch_size=8, costs=LENGTHS, seed=3, last_batch="discard"))
    assert {len(batch) for step in discarded for batch in step} == {8}
    assert len(discarded) == 2000 // 24


def test_the_shards_of_a_batch_cost_the_same_too() -> None:
    loader = ShardedDataLoader(range(2000), 32, costs=LENGTHS, seed=1, num_shards=4)
    work = np.array([[LENGTHS[shard].sum() for shard in shards] for shards in loader][:-1], float)
    assert (work.max(axis=1) / work.mean(axis=1)).mean() < 1.05


def test_costs_may_be_a_function_and_the_sampler_is_shown() -> None:
    data = list(range(50))
    by_function = ShardedDataLoader(data, 5, costs=lambda index: int(LENGTHS[index]), seed=1, shuffle=True)
    by_array = ShardedDataLoader(range(50), 5, costs=LENGTHS[:50].tolist(), seed=1)
    assert [batch.tolist() for batch in by_function] == [batch.tolist() for batch in by_array]
    assert sorted(by_array.sampler.iter_epoch(0)) == list(range(50))
    assert sum(by_array.batch_sampler, []) == list(by_array.sampler.iter_epoch(1))
    data += range(50, 70)
    by_function.refresh()
    assert sorted(index for batch in by_function for index in batch.tolist()) == data
