"""Batches in order, split over devices, read by processes or threads: an MXNet-Gluon-style loader for PyTorch.

    from sharded_loader import ShardedDataLoader

    for shards in ShardedDataLoader(dataset, 256, shuffle=True, num_workers=8, devices="auto"):
        ...

The names below are looked up when they are used: a worker process imports its own few modules and never pays
for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "base.errors": "LoaderClosedError SampleError SampleReadError TooManySkippedError "
    "WorkerDiedError WorkerTimeoutError",
    "base.notices": "LoaderWarning",
    "batching.default": "default_batchify_fn",
    "batching.protocol": "empty",
    "mixing.in_order": "ShuffleBuffer",
    "data.datasets": "ArrayDataset ConcatDataset Dataset SimpleDataset SubsetDataset",
    "mixing.interleave": "interleave",
    "mixing.tokens": "TokenWindows",
    "loader.loader": "ShardedDataLoader",
    "loader.arguments": "OnError Placement",
    "instruments.report": "RankStats",
    "instruments.stats": "LoaderStats",
    "caching.store": "CacheMismatchError",
    "parallel": "split_and_load split_data",
    "pools.local": "InlinePool ThreadPool",
    "pools.process.pool": "ProcessPool",
    "ray.pool": "RayPool",
    "randomness.rng": "sample_generator sample_rng sample_seed",
    "recordio": "RecordFileDataset",
    "sampling.base": "Sampler",
    "sampling.own": "BatchSampler RandomSampler SequentialSampler",
    "samplers.batch_samplers": "BoundedBudgetSampler ClassBalancedBatchSampler ShardedBatchSampler SortedBucketSampler",
    "samplers.bucket_samplers": "BucketScheme ConstWidthBucket ExpWidthBucket FixedBucketSampler "
    "GroupedBatchSampler LinearWidthBucket",
    "samplers.index_samplers": "FilterSampler IntervalSampler SortedSampler SplitSampler SubsetRandomSampler "
    "WeightedRandomSampler RepeatedSampler ShardShuffleSampler",
    "samplers.packing": "PackSampler",
    "storage.cache": "ShardCache",
    "storage.dataset": "ShardDataset",
    "storage.files": "ShardError",
}
"""The public names of each module; `__init__.pyi` has the same names for type checkers."""

PROVIDED = {
    ("column", "values"): "sharded_loader.storage.tables:column_values",
    ("dataset", "cache"): "sharded_loader.caching.dataset:StoredDataset",
    ("function", "gather"): "sharded_loader.parallel:gather",
    ("methods", "instruments"): "sharded_loader.instruments.report:Instruments",
    ("num_workers", "auto"): "sharded_loader.instruments.auto:Tuner",
    ("observer", "instruments"): "sharded_loader.instruments.stats:Meter",
    ("pinner", "thread"): "sharded_loader.drop_in.pinning:Pinner",
    ("pool on devices", "resident"): "sharded_loader.resident:make_resident",
    ("pool", "ray"): "sharded_loader.ray.pool:RayPool",
    ("sampler", "costs"): "sharded_loader.samplers.index_samplers:CostSampler",
    ("sampler", "mixture"): "sharded_loader.mixing.interleave:sampler_of",
    ("trainer", "fetched"): "sharded_loader.drop_in.trainers:fetched_by_lightning",
    ("trainer", "skipping"): "sharded_loader.drop_in.trainers:refuse_skipping",
}
"""Objects of the satellites that the core looks up by kind and name, instead of importing them: `base.imports`."""

_HOME_OF = {name: f"sharded_loader.{home}" for home, names in _HOMES.items() for name in names.split()}
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
