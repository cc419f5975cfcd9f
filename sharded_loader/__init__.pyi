"""The public names, for type checkers and editors. `__init__.py` looks them up here when they are used."""

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
from sharded_loader.caching.store import CacheMismatchError as CacheMismatchError
from sharded_loader.data.datasets import ArrayDataset as ArrayDataset
from sharded_loader.data.datasets import ConcatDataset as ConcatDataset
from sharded_loader.data.datasets import Dataset as Dataset
from sharded_loader.data.datasets import SimpleDataset as SimpleDataset
from sharded_loader.data.datasets import SubsetDataset as SubsetDataset
from sharded_loader.instruments.report import RankStats as RankStats
from sharded_loader.instruments.stats import LoaderStats as LoaderStats
from sharded_loader.loader.arguments import OnError as OnError
from sharded_loader.loader.arguments import Placement as Placement
from sharded_loader.loader.loader import ShardedDataLoader as ShardedDataLoader
from sharded_loader.mixing.in_order import ShuffleBuffer as ShuffleBuffer
from sharded_loader.mixing.interleave import interleave as interleave
from sharded_loader.mixing.tokens import TokenWindows as TokenWindows
from sharded_loader.parallel import split_and_load as split_and_load
from sharded_loader.parallel import split_data as split_data
from sharded_loader.pools.local import InlinePool as InlinePool
from sharded_loader.pools.local import ThreadPool as ThreadPool
from sharded_loader.pools.process.pool import ProcessPool as ProcessPool
from sharded_loader.randomness.rng import sample_generator as sample_generator
from sharded_loader.randomness.rng import sample_rng as sample_rng
from sharded_loader.randomness.rng import sample_seed as sample_seed
from sharded_loader.ray.pool import RayPool as RayPool
from sharded_loader.recordio import RecordFileDataset as RecordFileDataset
from sharded_loader.samplers.batch_samplers import BoundedBudgetSampler as BoundedBudgetSampler
from sharded_loader.samplers.batch_samplers import ClassBalancedBatchSampler as ClassBalancedBatchSampler
from sharded_loader.samplers.batch_samplers import ShardedBatchSampler as ShardedBatchSampler
from sharded_loader.samplers.batch_samplers import SortedBucketSampler as SortedBucketSampler
from sharded_loader.samplers.bucket_samplers import BucketScheme as BucketScheme
from sharded_loader.samplers.bucket_samplers import ConstWidthBucket as ConstWidthBucket
from sharded_loader.samplers.bucket_samplers import ExpWidthBucket as ExpWidthBucket
from sharded_loader.samplers.bucket_samplers import FixedBucketSampler as FixedBucketSampler
from sharded_loader.samplers.bucket_samplers import GroupedBatchSampler as GroupedBatchSampler
from sharded_loader.samplers.bucket_samplers import LinearWidthBucket as LinearWidthBucket
from sharded_loader.samplers.index_samplers import FilterSampler as FilterSampler
from sharded_loader.samplers.index_samplers import IntervalSampler as IntervalSampler
from sharded_loader.samplers.index_samplers import RepeatedSampler as RepeatedSampler
from sharded_loader.samplers.index_samplers import ShardShuffleSampler as ShardShuffleSampler
from sharded_loader.samplers.index_samplers import SortedSampler as SortedSampler
from sharded_loader.samplers.index_samplers import SplitSampler as SplitSampler
from sharded_loader.samplers.index_samplers import SubsetRandomSampler as SubsetRandomSampler
from sharded_loader.samplers.index_samplers import WeightedRandomSampler as WeightedRandomSampler
from sharded_loader.samplers.packing import PackSampler as PackSampler
from sharded_loader.sampling.base import Sampler as Sampler
from sharded_loader.sampling.own import BatchSampler as BatchSampler
from sharded_loader.sampling.own import RandomSampler as RandomSampler
from sharded_loader.sampling.own import SequentialSampler as SequentialSampler
from sharded_loader.storage.cache import ShardCache as ShardCache
from sharded_loader.storage.dataset import ShardDataset as ShardDataset
from sharded_loader.storage.files import ShardError as ShardError

__all__: list[str]
PROVIDED: dict[tuple[str, str], str]
__version__: str
