"""Batches by label: of one kind each, or with some samples of each of some classes; also over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import ClassBalancedBatchSampler, FixedBucketSampler, GroupedBatchSampler, ShardedDataLoader
from sharded_loader.samplers.batch_samplers import kinds_of

LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3, 3, 0, 1]


# -- batches of one kind -----------------------------------------------------------------------------------------------


def of_one_kind(last_batch: str = "keep", **given: Any) -> ShardedDataLoader[Any]:
    sampler = GroupedBatchSampler(LABELS, {0: 2, 1: 3, 2: 1, 3: 2}, last_batch=last_batch)
    return ShardedDataLoader(range(len(LABELS)), batch_sampler=sampler, seed=3, **given)


def kinds_in(batch: Any) -> set[int]:
    return {LABELS[index] for index in batch.tolist()}


@pytest.mark.parametrize("last_batch", ["keep", "discard", "rollover"])
def test_each_batch_has_one_kind_and_its_size(last_batch: str) -> None:
    sizes, loader = {0: 2, 1: 3, 2: 1, 3: 2}, of_one_kind(last_batch)
    epochs = [list(loader) for _ in range(3)]
    for batch in (batch for batches in epochs for batch in batches):
        (kind,) = kinds_in(batch)
        assert len(batch) == sizes[kind] or (last_batch == "keep" and len(batch) < sizes[kind])
    if last_batch == "keep":
        assert all(sorted(np.concatenate(batches).tolist()) == list(range(len(LABELS))) for batches in epochs)
    assert [batch.tolist() for batch in epochs[0]] != [batch.tolist() for batch in epochs[1]]


def test_other_samples_of_a_kind_meet_in_each_epoch() -> None:
    sampler = GroupedBatchSampler(np.repeat([0, 1], 20), 5, seed=0)
    first, second = ({frozenset(batch) for batch in sampler.iter_epoch(epoch)} for epoch in (0, 1))
    assert not first & second


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("last_batch", ["keep", "discard", "rollover"])
def test_in_each_step_all_ranks_have_a_batch_of_one_kind(replicas: int, last_batch: str) -> None:
    loaders = [of_one_kind(last_batch, num_replicas=replicas, rank=rank) for rank in range(replicas)]
    for _ in range(3):
        found = []
        for step in zip(*loaders, strict=True):
            assert len(set().union(*map(kinds_in, step))) == 1
            found += [index for batch in step for index in batch.tolist()]
        if last_batch == "keep":
            assert set(found) == set(range(len(LABELS)))


def test_the_kinds_of_a_state_resume_on_another_number_of_ranks() -> None:
    first = [of_one_kind(num_replicas=2, rank=rank) for rank in range(2)]
    iterators = list(map(iter, first))
    for _ in range(2):
        for iterator in iterators:
            next(iterator)
    state = first[1].state_dict()
    rest = [sorted(batch.tolist()) for step in zip(*iterators, strict=True) for batch in step]
    for replicas in (1, 4):
        resumed = [of_one_kind(num_replicas=replicas, rank=rank) for rank in range(replicas)]
        for one in resumed:
            one.load_state_dict(state)
        found = [sorted(batch.tolist()) for step in zip(*resumed, strict=True) for batch in step]
        assert found[: len(rest)] == rest


def test_one_kind_per_batch_is_an_order_of_buckets() -> None:
    lengths = [1 + label for label in LABELS]
    by_length = FixedBucketSampler(lengths, 2, None, [1, 2, 3, 4])
    assert list(GroupedBatchSampler(LABELS, 2, shuffle=False)) == list(by_length)


@given(
    labels=st.lists(st.integers(0, 4), max_size=60),
    size=st.integers(1, 7),
    ranks=st.integers(1, 4),
    last=st.sampled_from(["keep", "discard", "rollover"]),
)
def test_the_kinds_are_those_of_buckets_and_every_sample_comes_as_often(
    labels: list[int], size: int, ranks: int, last: str
) -> None:
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
def test_each_batch_has_so_many_samples_of_so_many_different_classes(
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


def test_ranks_have_different_batches_of_one_order_and_resume_on_any_number_of_them() -> None:
    def loader(**given: Any) -> ShardedDataLoader[Any]:
        sampler = ClassBalancedBatchSampler(LABELS, 2, 3, batches=12)
        return ShardedDataLoader(range(len(LABELS)), batch_sampler=sampler, seed=6, **given)

    whole = [batch.tolist() for batch in loader()]
    ranks = [iter(ranks := loader(num_replicas=2, rank=rank)) for rank in range(2)]
    assert [next(ranks[n % 2]).tolist() for n in range(6)] == whole[:6]
    first = loader(num_replicas=2, rank=1)
    batches = iter(first)
    for _ in range(3):
        next(batches)
    for replicas in (1, 2, 3):
        resumed = [loader(num_replicas=replicas, rank=rank) for rank in range(replicas)]
        for one in resumed:
            one.load_state_dict(first.state_dict())
        found = [batch.tolist() for step in zip(*resumed, strict=True) for batch in step]
        assert found == whole[6:]


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


def test_a_state_of_other_labels_is_refused() -> None:
    def loader(labels: list[int]) -> ShardedDataLoader[Any]:
        return ShardedDataLoader(range(len(LABELS)), batch_sampler=ClassBalancedBatchSampler(labels, 2, 3, 4, seed=0))

    saved = loader(LABELS)
    next(iter(saved))
    with pytest.raises(ValueError, match="labels of the ClassBalancedBatchSampler changed"):
        loader([0, 0, *LABELS[2:-2], 1, 2]).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GroupedBatchSampler(LABELS, {0: 1, 1: 1, 2: 1}), ValueError, "no number for the kind 3"),
        (lambda: GroupedBatchSampler(LABELS, 0), ValueError, "batch_size must be at least 1"),
        (lambda: GroupedBatchSampler(5, 2), TypeError, "by must be a sequence of hashable"),  # type: ignore[arg-type]
        (
            lambda: ShardedDataLoader(range(16), batch_sampler=GroupedBatchSampler(LABELS, 2)),
            ValueError,
            "GroupedBatchSampler has 15 labels, but the dataset has 16 samples",
        ),
        (lambda: ClassBalancedBatchSampler(LABELS, 5, 1), ValueError, "classes is 5, but the labels have 4 classes"),
        (lambda: ClassBalancedBatchSampler(LABELS, 2, 4), ValueError, "samples is 4, but class 2 has 3, and 2 classes"),
        (lambda: ClassBalancedBatchSampler(LABELS, 0, 1), ValueError, "classes must be at least 1"),
        (lambda: ClassBalancedBatchSampler(LABELS, 1, 0), ValueError, "samples must be at least 1"),
        (lambda: ClassBalancedBatchSampler([], 1, 1), ValueError, "the labels have 0 classes"),
        (lambda: ClassBalancedBatchSampler(LABELS, 1, 1, -1), ValueError, "batches must be at least 0"),
        (lambda: ClassBalancedBatchSampler([[1], [2]], 1, 1), TypeError, "labels must be a sequence of hashable"),
        (lambda: ClassBalancedBatchSampler(None, 1, 1), TypeError, "labels must be a sequence"),  # type: ignore[arg-type]
        (lambda: ClassBalancedBatchSampler(np.eye(3), 1, 1), ValueError, r"labels has shape \(3, 3\)"),
        (
            lambda: ShardedDataLoader(range(9), batch_sampler=ClassBalancedBatchSampler(LABELS, 1, 1)),
            ValueError,
            "ClassBalancedBatchSampler has 15 labels, but the dataset has 9 samples",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
