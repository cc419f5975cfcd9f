"""The repr of samplers: short, useful, and without any effect."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from samples import NoLength

import sharded_loader
from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    BucketScheme,
    ClassBalancedBatchSampler,
    ConstWidthBucket,
    ExpWidthBucket,
    FilterSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    IntervalSampler,
    LinearWidthBucket,
    PackSampler,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardShuffleSampler,
    SortedBucketSampler,
    SortedSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.base.described import Described
from sharded_loader.engine.order import resolve_replicas
from sharded_loader.sampling.own import ReplicaSampler
from sharded_loader.sampling.tables import Table

EVERY_KIND: list[tuple[Callable[[], Any], str]] = [
    (lambda: SequentialSampler(4, start=3), "SequentialSampler(length=4, start=3)"),
    (lambda: RandomSampler(10**12, seed=7), "RandomSampler(length=1000000000000, seed=7)"),
    (lambda: SubsetRandomSampler([2, 30, 5], seed=7), "SubsetRandomSampler(length=3, indices=[2, 30, 5], seed=7)"),
    (
        lambda: WeightedRandomSampler(np.ones(10**6), 5, seed=3),
        "WeightedRandomSampler(length=5, weights=[1.0, 1.0, 1.0, ... 1000000 in all], replacement=True, seed=3)",
    ),
    (
        lambda: ShardShuffleSampler(np.broadcast_to(10**4, 100), lanes=2, seed=3),
        "ShardShuffleSampler(length=1000000, shards=100, window=16, lanes=2, seed=3)",
    ),
    (
        lambda: PackSampler([3, 5, 2], tokens=7, seed=3),
        "PackSampler(length=3, tokens=7, rows=1, window=1024, long='error', shuffle=True, last_batch='keep', seed=3)",
    ),
    (lambda: FilterSampler(lambda sample: sample > 2, [1, 5, 2, 3]), "FilterSampler(length=2, indices=[1, 3])"),
    (lambda: IntervalSampler(7, 3), "IntervalSampler(length=7, total=7, interval=3, rollover=True)"),
    (lambda: SortedSampler([3, 1, 2]), "SortedSampler(length=3, indices=[0, 2, 1], reverse=True)"),
    (
        lambda: SplitSampler(7, 3, 1, seed=5),
        "SplitSampler(length=2, total=7, part_index=1, num_parts=3, shuffle=True, seed=5)",
    ),
    (
        lambda: BatchSampler(RandomSampler(10, seed=1), 4),
        "BatchSampler(RandomSampler(length=10, seed=1), length=3, batch_size=4, last_batch='keep')",
    ),
    (
        lambda: BatchSampler(torch.utils.data.RandomSampler(range(9)), 2, seed=3),
        "BatchSampler(<torch.RandomSampler of length 9>, length=5, batch_size=2, last_batch='keep', seed=3)",
    ),
    (
        lambda: ShardedBatchSampler(SortedBucketSampler([3, 9, 4, 1], 2), 2, weights=[2, 1]),
        "ShardedBatchSampler(SortedBucketSampler(length=2, sort_keys=[3, 9, 4, 1], batch_size=2, bucket_size=4, "
        "reverse=True, shuffle=False), length=2, num_shards=2, weights=[2, 1], costs=None)",
    ),
    (
        lambda: SortedBucketSampler(range(100), 4, mult=2, shuffle=True, seed=5),
        "SortedBucketSampler(length=25, sort_keys=[0, 1, 2, ... 100 in all], batch_size=4, bucket_size=8, "
        "reverse=True, shuffle=True, seed=5)",
    ),
    (
        lambda: FixedBucketSampler([1, 8, 2, 7, 9], 2, num_buckets=2),
        "FixedBucketSampler(length=3, batch_size=2, bucket_keys=[5, 9], bucket_batch_sizes=[2, 2], num_shards=0, "
        "last_group='keep', shuffle=False, last_batch='keep')",
    ),
    (
        lambda: BoundedBudgetSampler([5, 1, 2, 4, 2], max_num_tokens=6, seed=1),
        "BoundedBudgetSampler(length=3, max_num_tokens=6, max_num_sentences=-1, "
        "required_batch_size_multiple=1, shuffle=True, seed=1)",
    ),
    (
        lambda: GroupedBatchSampler(["b", "a", "b"], {"a": 1, "b": 4}, seed=1),
        "GroupedBatchSampler(length=2, by=['a', 'b'], bucket_batch_sizes=[1, 4], num_shards=0, last_group='keep', "
        "shuffle=True, last_batch='keep', seed=1)",
    ),
    (
        lambda: ClassBalancedBatchSampler([0, 1, 1, 0], 1, 2, seed=1),
        "ClassBalancedBatchSampler(length=2, labels=4, classes=1, samples=2, batches=2, repeat=False, seed=1)",
    ),
    (
        lambda: RepeatedSampler(2, SequentialSampler(3)),
        "RepeatedSampler(SequentialSampler(length=3, start=0), length=6, copies=2)",
    ),
    (
        lambda: ReplicaSampler(RandomSampler(10, seed=1), partial(resolve_replicas, 4, 2)),
        "ReplicaSampler(RandomSampler(length=10, seed=1), length=3, num_replicas=4, rank=2, truncate=False)",
    ),
    (
        lambda: ReplicaSampler([[0, 1], [2, 3], [4]], partial(resolve_replicas, 2, 0)),
        "ReplicaSampler([[0, 1], [2, 3], [4]], length=2, num_replicas=2, rank=0, truncate=False, seed=0)",
    ),
    (lambda: ConstWidthBucket(), "ConstWidthBucket()"),
    (lambda: LinearWidthBucket(), "LinearWidthBucket()"),
    (lambda: ExpWidthBucket(bucket_len_step=2), "ExpWidthBucket(bucket_len_step=2)"),
]


@pytest.mark.parametrize(("make", "shown"), EVERY_KIND, ids=[shown.partition("(")[0] for _, shown in EVERY_KIND])
def test_a_repr_tells_what_decides_and_changes_nothing(make: Callable[[], Any], shown: str) -> None:
    one = make()
    before, generators = pickle.dumps(one), (torch.get_rng_state(), np.random.get_state()[1].copy())
    assert repr(one) == str(one) == shown
    assert pickle.dumps(one) == before
    assert torch.equal(torch.get_rng_state(), generators[0]) and (np.random.get_state()[1] == generators[1]).all()


def test_every_sampler_and_scheme_of_the_library_has_its_repr_from_one_place() -> None:
    shown = {shown.partition("(")[0] for _, shown in EVERY_KIND}
    found = [getattr(sharded_loader, name) for name in sharded_loader.__all__]
    found = [one for one in found if isinstance(one, type) and issubclass(one, (Sampler, BucketScheme))]
    assert {one.__name__ for one in found} - {"Sampler", "BucketScheme"} <= shown
    assert all(one.__repr__ is Described.__repr__ for one in found)


def test_a_repr_is_short_however_much_there_is() -> None:
    million = np.arange(1, 1_000_001)
    for one in (
        SubsetRandomSampler(million),
        WeightedRandomSampler(million, 10),
        SortedSampler(million),
        SortedBucketSampler(million, 10),
        FixedBucketSampler(million, 10, num_buckets=1000),
        BoundedBudgetSampler(million, max_num_sentences=5),
        ShardedBatchSampler([[1]] * 10**6, 2, costs=million),
        BatchSampler(million, 3),
        RandomSampler(10, seed=10**4000),
    ):
        assert len(repr(one)) < 300


class Broken(RandomSampler):
    """Never calls ``super().__init__()``."""

    def __init__(self) -> None:
        pass

    @property
    def seed(self) -> int:  # type: ignore[override]
        raise RuntimeError("no seed yet")


class Half(Sampler[int]):
    decided_by = (("width", "_width"), ("seed", "nothing"))

    def __init__(self) -> None:
        self._width = 3

    def epoch_table(self, epoch: int) -> Table:
        raise ValueError("ask later")

    def len_epoch(self, epoch: int) -> int:
        raise ValueError("ask later")


def test_a_subclass_with_broken_attributes_has_a_repr() -> None:
    class NoRepr(NoLength):
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    class Unsized(NoLength, Sampler[int]):
        pass

    assert repr(Broken()) == "Broken(length=?, seed=?)" and repr(Unsized([1])) == "Unsized(length=?)"
    assert repr(Half()) == "Half(length=?, width=3, seed=?)"
    assert repr(BatchSampler(Half(), 2)) == f"BatchSampler({Half()!r}, length=?, batch_size=2, last_batch='keep')"
    assert repr(BatchSampler(NoRepr([1]), 2, seed=1)).startswith("BatchSampler(<")
    assert repr(BatchSampler.__new__(BatchSampler)) == "BatchSampler(?, length=?, batch_size=?, last_batch=?, seed=?)"
