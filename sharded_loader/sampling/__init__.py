"""The order of samples: samplers, batch samplers, buckets, shards and ranks. From the bottom up:

    tables.py            one epoch as a table; batches and ranks as arithmetic on positions
    sorting.py           sorting by keys of any kind
    base.py              Sampler: what every sampler is, and what ``set_epoch`` has asked of it
    state.py             what `state_dict` returns
    foreign.py           any sampler at all as a table: the one place that reads samplers of other libraries
    index_samplers.py    orders of single indices
    shard_shuffle.py     shards in shuffled order, samples shuffled within a window of shards
    weighted.py          indices drawn by weight
    batch_samplers.py    batches of indices, and the arithmetic of rollover
    bucket_schemes.py    buckets for lengths
    bucket_samplers.py   batches by fixed buckets of lengths
    shards.py            a batch split over devices
    replicas.py          the share of one rank; one part of a dataset
    reading.py           one epoch's batches for a rank, from any position on
    order.py             a loader's order: which epoch is next, and what a state is compared with

Everything here is a pure function of (seed, epoch, position); nothing imports torch until a seed has to be
drawn from its generator.
"""

from sharded_loader.sampling.base import Sampler
from sharded_loader.sampling.batch_samplers import BatchSampler, BoundedBudgetSampler, SortedBucketSampler
from sharded_loader.sampling.bucket_samplers import FixedBucketSampler
from sharded_loader.sampling.bucket_schemes import BucketScheme, ConstWidthBucket, ExpWidthBucket, LinearWidthBucket
from sharded_loader.sampling.index_samplers import (
    FilterSampler,
    IntervalSampler,
    RandomSampler,
    SequentialSampler,
    SortedSampler,
    SubsetRandomSampler,
)
from sharded_loader.sampling.replicas import SplitSampler
from sharded_loader.sampling.shard_shuffle import EqualShards, ShardShuffleSampler
from sharded_loader.sampling.shards import ShardedBatchSampler
from sharded_loader.sampling.weighted import WeightedRandomSampler

__all__ = [
    "BatchSampler",
    "BoundedBudgetSampler",
    "BucketScheme",
    "ConstWidthBucket",
    "EqualShards",
    "ExpWidthBucket",
    "FilterSampler",
    "FixedBucketSampler",
    "IntervalSampler",
    "LinearWidthBucket",
    "RandomSampler",
    "Sampler",
    "SequentialSampler",
    "ShardShuffleSampler",
    "ShardedBatchSampler",
    "SortedBucketSampler",
    "SortedSampler",
    "SplitSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
]
