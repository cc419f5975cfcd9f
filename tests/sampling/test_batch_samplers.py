"""Batch samplers: no index lost or doubled, batches of the promised size, each epoch a pure function."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    FixedBucketSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardedBatchSampler,
    SortedBucketSampler,
)
from sharded_loader.sampling.tables import BLOCK

LENGTHS = [(7 * place) % 29 + 1 for place in range(61)]

EVERY_KIND: dict[str, Callable[[int | None], Sampler[Any]]] = {
    "keep": lambda seed: BatchSampler(RandomSampler(23, seed=seed), 5),
    "discard": lambda seed: BatchSampler(RandomSampler(23, seed=seed), 5, "discard"),
    "rollover": lambda seed: BatchSampler(RandomSampler(23, seed=seed), 5, "rollover"),
    "foreign": lambda seed: BatchSampler(torch.utils.data.RandomSampler(range(23)), 5, seed=seed),
    "foreign rollover": lambda seed: BatchSampler(torch.utils.data.RandomSampler(range(23)), 5, "rollover", seed=seed),
    "of batches": lambda seed: BatchSampler(BatchSampler(RandomSampler(23, seed=seed), 2), 3),
    "sharded": lambda seed: ShardedBatchSampler(BatchSampler(RandomSampler(23, seed=seed), 5), 2),
    "sorted bucket": lambda seed: SortedBucketSampler(LENGTHS, 4, 2.7, shuffle=True, seed=seed),
    "budget": lambda seed: BoundedBudgetSampler(LENGTHS, 90, 7, 2, seed=seed),
    "fixed bucket": lambda seed: FixedBucketSampler(LENGTHS, 4, 5, shuffle=True, seed=seed),
    "fixed bucket, groups": lambda seed: FixedBucketSampler(LENGTHS, 4, 5, shuffle=True, num_shards=3, seed=seed),
    "fixed bucket, overlap": lambda seed: FixedBucketSampler(
        LENGTHS, 4, 5, shuffle=True, num_shards=3, last_group="overlap", seed=seed
    ),
    "fixed bucket, discard": lambda seed: FixedBucketSampler(
        LENGTHS, 4, 5, shuffle=True, num_shards=3, last_group="discard", seed=seed
    ),
}


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in (flat(batch) if isinstance(batch, list) else [batch])]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_epoch_is_a_pure_function_of_seed_and_epoch(kind: str) -> None:
    make = EVERY_KIND[kind]
    one, other = make(7), make(7)
    epochs = [list(one) for _ in range(4)]
    assert one.epoch == 4
    assert epochs[0] != epochs[1]
    assert list(make(8)) != epochs[0]
    assert list(other.iter_epoch(3)) == epochs[3]
    assert list(other.iter_epoch(0)) == epochs[0]
    assert other.epoch == 0
    other.set_epoch(2)
    assert list(other) == epochs[2]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_len_is_what_an_epoch_yields_and_batches_are_lists_of_ints(kind: str) -> None:
    sampler = EVERY_KIND[kind](7)
    for epoch in range(6):
        length = len(sampler)
        batches = list(sampler)
        assert len(batches) == length == sampler.len_epoch(epoch)
        assert all(type(batch) is list for batch in batches)
        assert all(type(index) is int for index in flat(batches))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_any_batch_of_an_epoch_can_be_reached(kind: str) -> None:
    sampler = EVERY_KIND[kind](7)
    for epoch in range(3):
        whole = list(sampler.iter_epoch(epoch))
        for start in range(len(whole) + 2):
            assert list(sampler.iter_epoch(epoch, start)) == whole[start:]


@pytest.mark.parametrize("kind", sorted(set(EVERY_KIND) - {"discard", "rollover", "foreign rollover"}))
def test_every_index_comes_once(kind: str) -> None:
    indices = flat(EVERY_KIND[kind](7))
    count = len(LENGTHS) if "buck" in kind or kind == "budget" else 23
    if "overlap" in kind:
        assert set(indices) == set(range(count))
    elif kind == "fixed bucket, discard":
        assert len(set(indices)) == len(indices) < count
    else:
        assert sorted(indices) == list(range(count))


class Plain:
    """A sampler of another library."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@given(length=st.integers(0, 60), size=st.integers(1, 70), start=st.integers(0, 5), own=st.booleans())
def test_keep_and_discard_slice_the_epoch(length: int, size: int, start: int, own: bool) -> None:
    sampler = SequentialSampler(length) if own else Plain(list(range(length)))
    slices = [list(range(length))[begin : begin + size] for begin in range(0, length, size)]
    assert list(BatchSampler(sampler, size).iter_epoch(0, start)) == slices[start:]
    full = [batch for batch in slices if len(batch) == size]
    assert list(BatchSampler(sampler, size, "discard", seed=0).iter_epoch(0, start)) == full[start:]


@given(length=st.integers(0, 30), size=st.integers(1, 40), own=st.booleans(), seed=st.integers(0, 5))
def test_rollover_slices_the_endless_stream_of_epochs(length: int, size: int, own: bool, seed: int) -> None:
    epochs = 7
    order = RandomSampler(length, seed=seed)
    stream = [index for epoch in range(epochs) for index in order.iter_epoch(epoch)]

    class Foreign(RandomSampler):
        def __iter__(self) -> Any:
            return super().__iter__()

    batches = BatchSampler(order if own else Foreign(length, seed=seed), size, "rollover", seed=0)
    expected = [stream[begin : begin + size] for begin in range(0, len(stream) - size + 1, size)]
    got = []
    for epoch in range(epochs):
        this = list(batches.iter_epoch(epoch))
        assert len(this) == batches.len_epoch(epoch)
        got += this
    assert got == expected


def test_rollover_is_indifferent_to_abandoned_epochs() -> None:
    walked, fresh = (BatchSampler(RandomSampler(10, seed=1), 4, "rollover") for _ in range(2))
    next(iter(walked))
    iter(walked)
    assert list(walked) == list(fresh.iter_epoch(2))


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_batches_cross_the_boundaries_of_blocks(size: int) -> None:
    length = 2 * BLOCK + 11
    batches = list(BatchSampler(SequentialSampler(length), size))
    assert flat(batches[:1] + batches[-1:])[-1] == length - 1
    assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert list(itertools.chain.from_iterable(batches)) == list(range(length))


def test_set_epoch_may_be_called_on_either_of_nested_samplers() -> None:
    inner = RandomSampler(10, seed=1)
    outer = ShardedBatchSampler(BatchSampler(inner, 3), 2)
    expected = list(outer.iter_epoch(4))
    outer.set_epoch(4)
    assert inner.epoch == outer.batch_sampler.epoch == 4  # type: ignore[attr-defined]
    assert list(outer) == expected
    inner.set_epoch(4)
    assert outer.epoch == 4
    assert list(outer) == expected
    assert inner.epoch == 5


def test_set_epoch_reaches_a_foreign_sampler() -> None:
    inner = torch.utils.data.DistributedSampler(range(10), 2, 0)  # type: ignore[arg-type]
    outer = BatchSampler(inner, 3, seed=0)
    outer.set_epoch(4)
    assert inner.epoch == 4
    assert flat(outer) == list(inner)


def test_iter_captures_the_epoch_when_it_is_called() -> None:
    sampler = BatchSampler(RandomSampler(10, seed=1), 3)
    first = iter(sampler)
    sampler.set_epoch(9)
    assert list(first) == list(sampler.iter_epoch(0))


def test_a_foreign_sampler_with_a_wrong_length_is_named() -> None:
    class Short(Plain):
        def __len__(self) -> int:
            return 5

    with pytest.raises(ValueError, match=r"a Short, yielded 3 items in epoch 0, but its length is 5.*__len__"):
        list(BatchSampler(Short([0, 1, 2]), 2, "rollover", seed=0))


def test_keys_that_are_no_integers_pass_through() -> None:
    assert list(BatchSampler(["a", "b", "c"], 2)) == [["a", "b"], ["c"]]
    assert [type(index) for batch in BatchSampler(np.arange(3, dtype=np.int32), 2) for index in batch] == [int] * 3
    assert [type(index) for batch in BatchSampler(torch.arange(3), 2, seed=0) for index in batch] == [int] * 3


@given(
    keys=st.lists(st.integers(0, 9), max_size=60),
    size=st.integers(1, 9),
    mult=st.floats(1, 5),
    shuffle=st.booleans(),
    reverse=st.booleans(),
)
def test_sorted_buckets_hold_every_index_once_in_sorted_batches(
    keys: list[int], size: int, mult: float, shuffle: bool, reverse: bool
) -> None:
    sampler = SortedBucketSampler(keys, size, mult, reverse, shuffle, seed=3)
    batches = list(sampler)
    assert sorted(flat(batches)) == list(range(len(keys)))
    assert len(batches) == len(sampler)
    assert all(len(batch) <= size for batch in batches)
    for batch in batches:
        got = [keys[index] for index in batch]
        assert got == sorted(got, reverse=reverse)


@given(
    lengths=st.lists(st.integers(0, 30), max_size=60),
    tokens=st.sampled_from([-1, 30, 64, 200]),
    sentences=st.sampled_from([-1, 1, 5]),
    multiple=st.sampled_from([1, 4]),
    shuffle=st.booleans(),
)
def test_budget_batches_hold_every_index_once_within_the_budget(
    lengths: list[int], tokens: int, sentences: int, multiple: int, shuffle: bool
) -> None:
    if tokens < 0 and sentences < 0:
        return
    batches = list(BoundedBudgetSampler(lengths, tokens, sentences, multiple, shuffle, seed=1))
    assert sorted(flat(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert tokens < 0 or max(lengths[index] for index in batch) * len(batch) <= tokens
        assert sentences < 0 or len(batch) <= sentences
    # All but the last are a multiple, or smaller than one.
    if not shuffle:
        assert all(len(batch) % multiple == 0 or len(batch) < multiple for batch in batches[:-1])
        assert [lengths[index] for index in flat(batches)] == sorted(lengths)


def test_budget_batches_are_as_large_as_allowed() -> None:
    assert list(BoundedBudgetSampler([1] * 7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(BoundedBudgetSampler([[1, 3], [2, 2]], 6, shuffle=False)) == [[1, 0]]


def test_an_empty_dataset_is_an_empty_epoch() -> None:
    for sampler in (
        BatchSampler(SequentialSampler(0), 3),
        BatchSampler(SequentialSampler(0), 3, "rollover"),
        BatchSampler([], 3),
        SortedBucketSampler([], 3),
        BoundedBudgetSampler([], 3, seed=1),
        FixedBucketSampler([], 3),
        FixedBucketSampler([], 3, num_shards=2, last_group="overlap"),
    ):
        assert len(sampler) == 0
        assert list(sampler) == []


ONE = SequentialSampler(1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BatchSampler(ONE, 0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: BatchSampler(ONE, 2.0), TypeError, "batch_size must be an integer, got 2.0"),
        (lambda: BatchSampler(ONE, True), TypeError, "batch_size must be an integer, got True"),
        (lambda: BatchSampler(ONE, 2, "last"), ValueError, "'last'.*'keep', 'discard' or 'rollover'"),
        (lambda: BatchSampler(5, 2), TypeError, "sampler must be a sampler or another iterable, got 5"),
        (lambda: SortedBucketSampler([1], 2, 0.5), ValueError, "mult must be at least 1"),
        (lambda: SortedBucketSampler([1], 0), ValueError, "batch_size must be at least 1"),
        (lambda: BoundedBudgetSampler([1]), ValueError, "there is no budget"),
        (lambda: BoundedBudgetSampler([3, 9, 4], 8), ValueError, "sample 1 has 9 tokens.*max_num_tokens=8"),
        (lambda: BoundedBudgetSampler([3, -9], 8), ValueError, r"lengths\[1\] is -9"),
        (lambda: BoundedBudgetSampler([3.5], 8), ValueError, "lengths must be integers"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
