"""Batches in order, split over devices, read by processes or threads: an MXNet-Gluon-style loader for PyTorch.

    from sharded_loader import ShardedDataLoader

    for shards in ShardedDataLoader(dataset, 256, shuffle=True, num_workers=8, devices="auto"):
        ...

The names below are looked up when they are used: a worker process imports its own few modules and never pays
for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sharded_loader import batchify as batchify
    from sharded_loader import recordio as recordio
    from sharded_loader.base.errors import LoaderClosedError as LoaderClosedError
    from sharded_loader.base.errors import SampleError as SampleError
    from sharded_loader.base.errors import SampleReadError as SampleReadError
    from sharded_loader.base.errors import TooManySkippedError as TooManySkippedError
    from sharded_loader.base.errors import WorkerDiedError as WorkerDiedError
    from sharded_loader.base.errors import WorkerTimeoutError as WorkerTimeoutError
    from sharded_loader.base.notices import LoaderWarning as LoaderWarning
    from sharded_loader.batching.default import default_batchify_fn as default_batchify_fn
    from sharded_loader.batching.protocol import empty as empty
    from sharded_loader.data.arrays import ArrayDataset as ArrayDataset
    from sharded_loader.data.columns import PackedList as PackedList
    from sharded_loader.data.datasets import ConcatDataset as ConcatDataset
    from sharded_loader.data.datasets import Dataset as Dataset
    from sharded_loader.data.datasets import SimpleDataset as SimpleDataset
    from sharded_loader.data.datasets import SubsetDataset as SubsetDataset
    from sharded_loader.data.interleave import interleave as interleave
    from sharded_loader.loader.loader import ShardedDataLoader as ShardedDataLoader
    from sharded_loader.loader.stats import LoaderStats as LoaderStats
    from sharded_loader.parallel import Replicas as Replicas
    from sharded_loader.parallel import split_and_load as split_and_load
    from sharded_loader.parallel import split_data as split_data
    from sharded_loader.pools.inline import InlinePool as InlinePool
    from sharded_loader.pools.process.pool import ProcessPool as ProcessPool
    from sharded_loader.pools.ray.pool import RayPool as RayPool
    from sharded_loader.pools.threads import ThreadPool as ThreadPool
    from sharded_loader.randomness.indices import IndexView as IndexView
    from sharded_loader.randomness.rng import sample_generator as sample_generator
    from sharded_loader.randomness.rng import sample_rng as sample_rng
    from sharded_loader.randomness.rng import sample_seed as sample_seed
    from sharded_loader.recordio import RecordFileDataset as RecordFileDataset
    from sharded_loader.sampling import BatchSampler as BatchSampler
    from sharded_loader.sampling import BoundedBudgetSampler as BoundedBudgetSampler
    from sharded_loader.sampling import BucketScheme as BucketScheme
    from sharded_loader.sampling import ConstWidthBucket as ConstWidthBucket
    from sharded_loader.sampling import EqualShards as EqualShards
    from sharded_loader.sampling import ExpWidthBucket as ExpWidthBucket
    from sharded_loader.sampling import FilterSampler as FilterSampler
    from sharded_loader.sampling import FixedBucketSampler as FixedBucketSampler
    from sharded_loader.sampling import IntervalSampler as IntervalSampler
    from sharded_loader.sampling import LinearWidthBucket as LinearWidthBucket
    from sharded_loader.sampling import RandomSampler as RandomSampler
    from sharded_loader.sampling import Sampler as Sampler
    from sharded_loader.sampling import SequentialSampler as SequentialSampler
    from sharded_loader.sampling import ShardedBatchSampler as ShardedBatchSampler
    from sharded_loader.sampling import ShardShuffleSampler as ShardShuffleSampler
    from sharded_loader.sampling import SortedBucketSampler as SortedBucketSampler
    from sharded_loader.sampling import SortedSampler as SortedSampler
    from sharded_loader.sampling import SplitSampler as SplitSampler
    from sharded_loader.sampling import SubsetRandomSampler as SubsetRandomSampler
    from sharded_loader.sampling import WeightedRandomSampler as WeightedRandomSampler
    from sharded_loader.storage.cache import ShardCache as ShardCache
    from sharded_loader.storage.dataset import ShardDataset as ShardDataset
    from sharded_loader.storage.stores import ShardError as ShardError

_HOMES = {
    "sharded_loader.batching.default": ["default_batchify_fn"],
    "sharded_loader.data.arrays": ["ArrayDataset"],
    "sharded_loader.data.datasets": ["ConcatDataset", "Dataset", "SimpleDataset", "SubsetDataset"],
    "sharded_loader.data.columns": ["PackedList"],
    "sharded_loader.data.interleave": ["interleave"],
    "sharded_loader.recordio": ["RecordFileDataset"],
    "sharded_loader.base.errors": [
        "LoaderClosedError",
        "SampleError",
        "SampleReadError",
        "TooManySkippedError",
        "WorkerDiedError",
        "WorkerTimeoutError",
    ],
    "sharded_loader.randomness.indices": ["IndexView"],
    "sharded_loader.base.notices": ["LoaderWarning"],
    "sharded_loader.pools.inline": ["InlinePool"],
    "sharded_loader.pools.ray.pool": ["RayPool"],
    "sharded_loader.pools.process.pool": ["ProcessPool"],
    "sharded_loader.pools.threads": ["ThreadPool"],
    "sharded_loader.loader.loader": ["ShardedDataLoader"],
    "sharded_loader.batching.protocol": ["empty"],
    "sharded_loader.parallel": ["Replicas", "split_and_load", "split_data"],
    "sharded_loader.randomness.rng": ["sample_generator", "sample_rng", "sample_seed"],
    "sharded_loader.sampling": [
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
    ],
    "sharded_loader.loader.stats": ["LoaderStats"],
    "sharded_loader.storage.cache": ["ShardCache"],
    "sharded_loader.storage.dataset": ["ShardDataset"],
    "sharded_loader.storage.stores": ["ShardError"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("batchify", "recordio")

__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"sharded_loader.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'sharded_loader' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
