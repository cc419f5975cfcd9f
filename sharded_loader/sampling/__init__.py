"""The order of samples: samplers, batch samplers, buckets, shards and ranks.

    base.py          Sampler: what every sampler is
    describing.py    what their repr says
    foreign.py       anybody else's samplers, read in the same way
    keeping.py       other libraries' samplers, left as they were when one has looked
    permutation.py   shuffles of any size
    samplers.py      orders of single indices; also splits.py (one part of a dataset) and weighted.py
    batches.py       batches of indices
    buckets.py       batches by fixed buckets of lengths, which schemes.py lays out
    shards.py        a batch split over devices
    replicas.py      the share of one rank

Everything here is a pure function of (seed, epoch, position); nothing imports torch until a seed has to be
drawn from its generator.
"""

from sharded_loader.sampling.base import IndexSampler, Sampler
from sharded_loader.sampling.batches import BatchSampler, BoundedBudgetSampler, SortedBucketSampler
from sharded_loader.sampling.buckets import FixedBucketSampler
from sharded_loader.sampling.foreign import check_sampler, has_chunks, is_own, iter_epoch, len_epoch
from sharded_loader.sampling.replicas import ReplicaBatchSampler, ReplicaSampler, resolve_replicas
from sharded_loader.sampling.samplers import (
    FilterSampler,
    IntervalSampler,
    RandomSampler,
    SequentialSampler,
    SortedSampler,
    SubsetRandomSampler,
)
from sharded_loader.sampling.schemes import BucketScheme, ConstWidthBucket, ExpWidthBucket, LinearWidthBucket
from sharded_loader.sampling.shards import ShardedBatchSampler, check_weights, is_sharded, shard_sizes, split_batch
from sharded_loader.sampling.splits import SplitSampler
from sharded_loader.sampling.weighted import WeightedRandomSampler

__all__ = [
    "BatchSampler",
    "BoundedBudgetSampler",
    "BucketScheme",
    "ConstWidthBucket",
    "ExpWidthBucket",
    "FilterSampler",
    "FixedBucketSampler",
    "IndexSampler",
    "IntervalSampler",
    "LinearWidthBucket",
    "RandomSampler",
    "ReplicaBatchSampler",
    "ReplicaSampler",
    "Sampler",
    "SequentialSampler",
    "ShardedBatchSampler",
    "SortedBucketSampler",
    "SortedSampler",
    "SplitSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "check_sampler",
    "check_weights",
    "has_chunks",
    "is_own",
    "is_sharded",
    "iter_epoch",
    "len_epoch",
    "resolve_replicas",
    "shard_sizes",
    "split_batch",
]
