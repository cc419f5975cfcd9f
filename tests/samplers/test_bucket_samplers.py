"""Batches by buckets of lengths and by labels: every index once, each batch from one bucket; also over ranks."""

import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import (
    BoundedBudgetSampler,
    BucketScheme,
    ClassBalancedBatchSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    Sampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    SortedBucketSampler,
)
from sharded_loader.samplers.batch_samplers import kinds_of
from sharded_loader.samplers.costs import CostSampler
from sharded_loader.sampling.state import arguments_of


def ranks_of(replicas: int, make: Callable[..., ShardedDataLoader[Any]], state: Any = None) -> list[Any]:
    """The loader of each rank, all in the same place."""
    loaders = [make(num_replicas=replicas, rank=rank) for rank in range(replicas)]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state)
    return loaders


def steps_of(loaders: list[Any]) -> list[list[list[int]]]:
    """The batches of each rank, by steps. All ranks have as many."""
    return [[batch.tolist() for batch in step] for step in zip(*loaders, strict=True)]


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
def test_fixed_buckets_hold_every_index_once(lengths, size, buckets, shards, last, shuffle):
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


ASKED: list[tuple[int, int, int]] = []


class Every(BucketScheme):
    """A bucket for each ``step`` of length."""

    def __init__(self, step: int) -> None:
        self.step = step

    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        ASKED.append((longest, shortest, num_buckets))
        return list(range(self.step, longest + self.step, self.step))


def test_a_scheme_of_ones_own_makes_the_buckets_of_a_sampler_and_of_each_part_of_the_samples() -> None:
    ASKED.clear()
    sampler = FixedBucketSampler([3, 90, 40, 12, 7, 64, 65, 1], 2, bucket_scheme=Every(30))
    assert sampler.bucket_keys == [30, 60, 90]
    batches = [batch.tolist() for batch in ShardedDataLoader(range(8), batch_sampler=sampler)]
    assert batches == [[1, 5], [6], [2], [0, 3], [4, 7]]
    assert Every(50)([100, 100], [1, 2], 2) == [(50, 50), (100, 100)]
    assert ASKED == [(90, 1, 10), (100, 1, 2), (100, 2, 2)]
    assert repr(Every(30)) == repr(pickle.loads(pickle.dumps(Every(30)))) == "Every(step=30)"


LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3, 3, 0, 1]


def of_one_kind(last_batch: str = "keep", **given: Any) -> ShardedDataLoader[Any]:
    sampler = GroupedBatchSampler(LABELS, {0: 2, 1: 3, 2: 1, 3: 2}, last_batch=last_batch)
    return ShardedDataLoader(range(len(LABELS)), batch_sampler=sampler, seed=3, **given)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("last_batch", ["keep", "discard", "rollover"])
def test_in_each_step_all_ranks_have_a_batch_of_one_kind_and_its_size(replicas: int, last_batch: str) -> None:
    sizes, loaders = {0: 2, 1: 3, 2: 1, 3: 2}, ranks_of(replicas, partial(of_one_kind, last_batch))
    epochs = [steps_of(loaders) for _ in range(3)]
    for step in sum(epochs, []):
        (kind,) = {LABELS[index] for batch in step for index in batch}
        found = set(map(len, step))
        assert found == {sizes[kind]} or (last_batch == "keep" and max(found) <= sizes[kind])
    for steps in epochs if last_batch == "keep" else ():
        found = [index for step in steps for batch in step for index in batch]
        assert set(found) == set(range(len(LABELS))) and (replicas > 1 or len(found) == len(LABELS))
    assert epochs[0] != epochs[1]
    # Other samples of a kind meet in each epoch.
    sampler = GroupedBatchSampler(np.repeat([0, 1], 20), 5, seed=0)
    first, second = ({frozenset(batch) for batch in sampler.iter_epoch(epoch)} for epoch in (0, 1))
    assert not first & second


@given(
    labels=st.lists(st.integers(0, 4), max_size=60),
    size=st.integers(1, 7),
    ranks=st.integers(1, 4),
    last=st.sampled_from(["keep", "discard", "rollover"]),
)
def test_the_kinds_are_those_of_buckets(labels: list[int], size: int, ranks: int, last: str) -> None:
    lengths = [1 + label for label in labels]
    buckets = FixedBucketSampler(lengths, size, None, sorted(set(lengths)), shuffle=True, seed=5, last_batch=last)
    kinds = GroupedBatchSampler(labels, size, seed=5, last_batch=last)
    times: Counter[int] = Counter()
    for epoch in range(4):
        found, expected = (list(one.for_ranks(ranks).iter_epoch(epoch)) for one in (kinds, buckets))
        shapes = [[(labels[batch[0]], len(batch)) for batch in batches] for batches in (found, expected)]
        assert shapes[0] == shapes[1] and all(len({labels[index] for index in batch}) == 1 for batch in found)
        times.update(index for batch in found for index in batch)
    if last == "rollover" and ranks == 1:  # over the epochs no sample comes a second time before the others of its kind
        for kind in set(labels):
            of_kind = [times[index] for index, label in enumerate(labels) if label == kind]
            assert max(of_kind) - min(of_kind) <= 1
    if last == "keep":
        assert set(times) == set(range(len(labels)))
    as_given = FixedBucketSampler(sorted(lengths), size, None, sorted(set(lengths)), last_batch=last)
    assert list(GroupedBatchSampler(sorted(labels), size, shuffle=False, last_batch=last)) == list(as_given)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    classes=st.integers(1, 8),
    samples=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_each_batch_has_so_many_samples_of_so_many_classes(sizes, classes, samples, seed):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    classes = min(classes, len(sizes))
    sampler = ClassBalancedBatchSampler(labels, classes, samples, 30, repeat=True, seed=seed)
    batches = list(sampler)
    assert len(batches) == len(sampler) == 30
    for batch in batches:
        found = Counter(labels[index] for index in batch)
        assert list(found.values()) == [samples] * classes
        for label in found:
            # A class that has enough samples repeats none of them, and a smaller one each of them equally often.
            times = Counter(index for index in batch if labels[index] == label).values()
            assert max(times) - min(times) <= 1 and (max(times) == 1 or sizes[label] < samples)


def test_in_a_round_no_class_comes_twice_and_in_a_pass_no_sample() -> None:
    labels = np.repeat(np.arange(7), 6)
    sampler = ClassBalancedBatchSampler(labels, classes=3, samples=2, batches=5, seed=4)
    batches = [batch for epoch in range(12) for batch in sampler.iter_epoch(epoch)]  # 60 batches: 30 rounds of two
    sits_out = set()
    for begin in range(0, 60, 2):
        classes = {int(labels[index]) for batch in batches[begin : begin + 2] for index in batch}
        assert len(classes) == 6
        sits_out |= set(range(7)) - classes
    assert sits_out == set(range(7))
    for begin in range(0, 60, 6):  # three rounds use up a class of 6 samples
        indices = [index for batch in batches[begin : begin + 6] for index in batch]
        assert len(set(indices)) == len(indices)
    assert set(np.concatenate(batches)) == set(range(42))
    together = {frozenset(batch[:2]) for batch in batches}  # each pass has an order of its own
    assert len(together) > 3 * 7


def test_which_classes_meet_changes_all_the_time() -> None:
    sampler = ClassBalancedBatchSampler(np.repeat(np.arange(8), 2), 2, 1, 400, seed=4)
    pairs = Counter(frozenset(index // 2 for index in batch) for batch in sampler)
    assert len(pairs) == 28 and max(pairs.values()) < 40  # 14 on average


def test_epochs_go_on_with_rounds_and_passes_and_any_epoch_is_read_by_itself() -> None:
    def sampler(batches: int) -> ClassBalancedBatchSampler:
        return ClassBalancedBatchSampler(LABELS, 3, 2, batches, seed=1)

    whole = list(sampler(20))
    parts = sampler(5)
    assert [list(parts.iter_epoch(epoch)) for epoch in (3, 0)] == [whole[15:], whole[:5]]
    assert len(ClassBalancedBatchSampler(LABELS, 3, 2, seed=1)) == len(LABELS) // 6


def test_labels_may_be_anything_hashable_and_equal_ones_give_one_order() -> None:
    names = ["cat", "dog", "owl", "pig"]
    orders = [
        list(ClassBalancedBatchSampler(labels, 2, 2, seed=1))
        for labels in (
            LABELS,
            np.array(LABELS, np.uint8),
            torch.tensor(LABELS),
            [names[label] for label in LABELS],
            np.array([names[label] for label in LABELS]),
            [(label, "x") for label in LABELS],
        )
    ]
    assert all(order == orders[0] for order in orders)
    kinds, numbers = kinds_of([(4, 3), None, (4, 3), "wide"], "by")
    assert kinds == [(4, 3), None, "wide"] and numbers.tolist() == [0, 1, 0, 2]


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


def test_ranks_enlarge_a_sorted_bucket_as_often_as_they_are_up_to_64_times() -> None:
    sampler = SortedBucketSampler(np.arange(10_000), 2, mult=4)
    assert [sampler.for_ranks(ranks).plan for ranks in (1, 2, 3, 100)] == [8, 16, 24, 600]  # whole steps: 3 of 200


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
    assert [batch for [batch] in steps_of(loaders_of(1, batch_sampler=BUCKETS[kind]()))] == alone
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


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", BUCKETS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_state_of_four_ranks_goes_on_with_others_and_loses_no_sample(kind: str, replicas: int) -> None:
    before = loaders_of(4, batch_sampler=BUCKETS[kind]())
    steps_of(before)  # an epoch that is over: beyond epoch 0 is where ranks differ
    iterators = list(map(iter, before))
    done = [[next(one).tolist() for one in iterators] for _ in range(3)]
    state, left = before[-1].state_dict(), steps_of(iterators)
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


def test_a_state_says_the_same_of_many_kinds_as_before() -> None:
    sums = dict(arguments_of([GroupedBatchSampler(np.arange(4000) % 1000, 2, seed=1)]))
    assert sums["GroupedBatchSampler.lengths"] == "crc32 0bc5da0a"
    assert sums["GroupedBatchSampler.buckets"] == "crc32 e8ed267a"  # it was summed up kind by kind
