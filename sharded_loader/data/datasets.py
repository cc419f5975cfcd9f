"""Datasets: samples by index, and what can be done with them.

    SimpleDataset(anything)        ArrayDataset(columns)        ConcatDataset(datasets)
          .filter .shard .take .sample .split      -> fewer samples, by indices (see subsets)
          .transform .transform_first              -> other samples
          .cache                                   -> the same samples, remembered (see caching)
          a + b                                    -> one after the other

A dataset owns no thread and no process. Where it can it reads in bulk: ``get_batch(indices)`` returns a
finished batch, ``__getitems__(indices)`` a list of samples; a wrapper has these methods exactly where what it
wraps has them. A subclass that overrides ``__getitem__`` alone is read sample by sample (see overrides).
``_gather(indices, empty)`` is ``get_batch`` into memory from ``empty(shape, dtype)``.

What can go wrong: an index out of range (IndexError with the length), columns of different lengths
(ValueError at construction), samples whose structure differs in one batch (ValueError that names the field).

Source of the idea: ``mxnet.gluon.data.dataset``.
"""

from sharded_loader.data.arrays import ArrayDataset
from sharded_loader.data.base import Dataset, SimpleDataset, TransformDataset, Wrapper
from sharded_loader.data.cache import CachedDataset
from sharded_loader.data.concat import ConcatDataset
from sharded_loader.data.subsets import SubsetDataset

__all__ = [
    "ArrayDataset",
    "CachedDataset",
    "ConcatDataset",
    "Dataset",
    "SimpleDataset",
    "SubsetDataset",
    "TransformDataset",
    "Wrapper",
]
