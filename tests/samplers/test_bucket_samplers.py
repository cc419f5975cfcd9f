"""Batches by buckets of lengths and by labels: every index once, each batch from one bucket; also over ranks."""

import pickle
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samplers_samples import after_steps, ranks_of, steps_of

from sharded_loader import (
    BucketScheme,
    ClassBalancedBatchSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    ShardedDataLoader,
)
from sharded_loader.samplers.batch_samplers import kinds_of


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


# -- by label ----------------------------------------------------------------------------------------------------------


LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3, 3, 0, 1]


# -- batches of one kind -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_kinds_of_a_state_resume_on_another_number_of_ranks(replicas: int) -> None:
    _, state, rest = after_steps(ranks_of(2, of_one_kind), 2)
    found = sum(steps_of(ranks_of(replicas, of_one_kind, state)), [])
    assert found[: 2 * len(rest)] == sum(rest, [])


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


# -- some samples of each of some classes ------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    classes=st.integers(1, 8),
    samples=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_each_batch_has_so_many_samples_of_so_many_classes(
    sizes: list[int], classes: int, samples: int, seed: int
) -> None:
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


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ranks_have_different_batches_of_one_order_and_resume_on_any_number_of_them(replicas: int) -> None:
    def loader(**given: Any) -> ShardedDataLoader[Any]:
        sampler = ClassBalancedBatchSampler(LABELS, 2, 3, batches=12)
        return ShardedDataLoader(range(len(LABELS)), batch_sampler=sampler, seed=6, **given)

    whole = [batch.tolist() for batch in loader()]
    first, state, _ = after_steps(ranks_of(2, loader), 3)
    assert sum(first, []) == whole[:6]
    assert sum(steps_of(ranks_of(replicas, loader, state)), []) == whole[6:]


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


def test_without_shuffle_batches_of_one_kind_come_as_buckets_do() -> None:
    buckets = FixedBucketSampler([1 + label for label in LABELS], 2, None, [1, 2, 3, 4])
    assert list(GroupedBatchSampler(LABELS, 2, shuffle=False)) == list(buckets)
