"""What cannot be an order, a rank or a split is refused in words, where it is given."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from samples import Foreign
from test_order import order

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    IntervalSampler,
    PackSampler,
    Placement,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    SortedBucketSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.engine.order import resolve_replicas
from sharded_loader.engine.split import check_shares, shard_sizes, split_batch
from sharded_loader.sampling.base import check_sampler

ONE: Any = SequentialSampler(1)
auto = partial(resolve_replicas, "auto")

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # indices
    (lambda: SequentialSampler(-1), ValueError, "length must be at least 0, got -1"),
    (lambda: RandomSampler(2**62 + 1), ValueError, "up to 2\\*\\*62"),
    (lambda: RandomSampler(3, seed="x"), TypeError, "seed must be an integer.*or None"),
    (lambda: SubsetRandomSampler([0.5]), ValueError, "1-D sequence of integers"),
    (lambda: SubsetRandomSampler([True, False]), ValueError, "flatnonzero"),
    (lambda: WeightedRandomSampler([1, -2], 1), ValueError, r"weights\[1\] is -2"),
    (lambda: WeightedRandomSampler([1, float("nan")], 1), ValueError, r"weights\[1\] is nan"),
    (lambda: WeightedRandomSampler([0, 0], 1), ValueError, "all zero"),
    (lambda: WeightedRandomSampler([[1]], 1), ValueError, "1-D"),
    (lambda: WeightedRandomSampler([1, 0], 2, replacement=False), ValueError, "only 1 weights are positive"),
    (lambda: IntervalSampler(3, 4), ValueError, "more than the 3 samples"),
    (lambda: SplitSampler(10, 3, 3), ValueError, "give 0 to 2"),
    (lambda: SplitSampler(10, 3, -1), ValueError, "parts count from 0"),
    (lambda: SplitSampler(2, 3), ValueError, "give fewer parts"),
    (lambda: RandomSampler(3, seed=1).iter_epoch(0, -1), ValueError, "start must be at least 0"),
    (lambda: list(Sampler()), NotImplementedError, "override __iter__ and __len__"),
    *((lambda epoch=e: ONE.set_epoch(epoch), ValueError, "epochs count from 0") for e in (-1, 1.5, "1", None, True)),
    # batches
    (lambda: BatchSampler(ONE, 0), ValueError, "batch_size must be at least 1, got 0"),
    (lambda: BatchSampler(ONE, 2.0), TypeError, "batch_size must be an integer, got 2.0"),
    (lambda: BatchSampler(ONE, True), TypeError, "batch_size must be an integer, got True"),
    (lambda: BatchSampler(ONE, 2, "last"), ValueError, "'last'.*'keep', 'discard' or 'rollover'"),
    (lambda: SortedBucketSampler([1], 2, 0.5), ValueError, "mult must be at least 1"),
    (lambda: BoundedBudgetSampler([1]), ValueError, "there is no budget"),
    (lambda: BoundedBudgetSampler([3, 9, 4], 8), ValueError, "sample 1 has 9 tokens.*max_num_tokens=8"),
    (lambda: BoundedBudgetSampler([3, -9], 8), ValueError, r"lengths\[1\] is -9"),
    (lambda: BoundedBudgetSampler([3.5], 8), ValueError, "lengths must be integers"),
    # samplers of other libraries
    (lambda: BatchSampler(5, 2), TypeError, "sampler must be a sampler or another iterable, got 5"),
    *((partial(check_sampler, one), TypeError, "sampler or another iterable") for one in (None, object())),
    *(
        (partial(BatchSampler, once, 2, seed=0), TypeError, "pass a list, or a class with __iter__")
        for once in ((index for index in range(3)), iter([1, 2]), map(int, "12"), itertools.count())
    ),
    (
        lambda: list(BatchSampler(Foreign([0, 1, 2], 5), 2, "rollover", seed=0)),
        ValueError,
        r"a Foreign, yielded 3 items in epoch 0, but its length is 5.*__len__",
    ),
    (
        lambda: ShardedDataLoader(range(4), 2, sampler=PackSampler([1, 2, 3, 4], 4, 2)),
        TypeError,
        "sampler is a PackSampler, which yields batches: give it as batch_sampler=",
    ),
    # ranks
    (lambda: resolve_replicas(4), ValueError, "rank is missing"),
    (lambda: resolve_replicas(None, 1), ValueError, "num_replicas is missing"),
    (lambda: resolve_replicas(4, 4), ValueError, "rank is 4, but there are 4 replicas: give 0 to 3"),
    (lambda: resolve_replicas(4, -1), ValueError, "ranks count from 0"),
    (lambda: resolve_replicas("two", 0), ValueError, "num_replicas must be an integer"),
    (lambda: auto(environ={"WORLD_SIZE": "x"}), ValueError, "WORLD_SIZE is 'x'"),
    (lambda: auto(environ={"WORLD_SIZE": "2"}), ValueError, "RANK is missing"),
    (lambda: auto(environ={"WORLD_SIZE": "2", "RANK": ""}), ValueError, "RANK is missing"),
    (lambda: auto(environ={"WORLD_SIZE": "2", "RANK": "2"}), ValueError, "give 0 to 1"),
    (lambda: auto(environ={"WORLD_SIZE": "0"}), ValueError, "variable WORLD_SIZE is '0'.*at least 1"),
    (lambda: auto(environ={"WORLD_SIZE": "2", "RANK": "-1"}), ValueError, "RANK is '-1'.*at least 0"),
    (lambda: auto(environ={"RANK": "3"}), ValueError, "RANK is 3, but WORLD_SIZE is missing: set both"),
    # shards
    (lambda: check_shares([1], 2), ValueError, "1 weights for 2 shards: give one weight per shard"),
    (lambda: check_shares([1, -1], 2), ValueError, "weight of shard 1 is -1"),
    (lambda: check_shares([1, float("nan")], 2), ValueError, "weight of shard 1 is nan"),
    (lambda: check_shares([1, float("inf")], 2), ValueError, "weight of shard 1 is inf"),
    (lambda: check_shares([0, 0], 2), ValueError, "all 2 weights are zero"),
    (lambda: check_shares("ab", 2), ValueError, "weights must be numbers"),
    (lambda: check_shares(3, 2), ValueError, "weights must be numbers"),
    (lambda: shard_sizes(3, 0), ValueError, "num_shards must be at least 1"),
    (lambda: split_batch([0, 5], 2, costs=[1, 2]), ValueError, "sample 5 has no cost, there are 2 costs"),
    (lambda: split_batch([0, -1], 2, costs=[1, 2]), ValueError, "sample -1 has no cost"),
    (lambda: split_batch([0, 1], 2, costs=[1, -2]), ValueError, "cost of sample 1 is -2"),
    (lambda: split_batch([0, 1], 2, costs=[1, float("nan")]), ValueError, "cost of sample 1 is nan"),
    (lambda: ShardedBatchSampler([[0]], 2, weights=[1]), ValueError, "1 weights for 2 shards"),
    (lambda: ShardedBatchSampler([[0]], 2, costs=np.zeros((2, 2))), ValueError, "costs must be 1-D"),
    (lambda: list(ShardedBatchSampler([[0], []], 2)), ValueError, "batch 1 is empty"),
    (lambda: list(ShardedBatchSampler([[0], [[1]]], 2)), ValueError, "batch 1 is sharded already"),
    (lambda: list(ShardedBatchSampler([[0], []], 2).iter_epoch(0, 1)), ValueError, "batch 1 is empty"),
    # a loader's order
    (lambda: order(batch_size=None), ValueError, "batch_size must be specified"),
    (lambda: order(batch_sampler=4), TypeError, "batch_sampler is 4, a number"),
    (lambda: order(batch_sampler=[[1]], shuffle=True), ValueError, "must not be specified if batch_sampler"),
    (lambda: order(sampler=ONE, shuffle=True), ValueError, "shuffle must not be specified"),
    (lambda: order(last_batch="last"), ValueError, "last_batch is 'last'"),
    (lambda: order(num_replicas="auto", rank=1), ValueError, "leave out rank=1"),
    (lambda: order(None), TypeError, "the dataset has no __len__"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_cannot_be_an_order_is_refused_in_words(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


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
