"""Datasets of others, read in bulk: a batch as columns, not as a list of samples.

    as_bulk(dataset)  -> gather(indices, empty) -> the batch | NOT_IN_BULK     None: no such way
    as_items(dataset) -> ``__getitems__``, through torch's Subset              None: sample by sample

| dataset | is read as |
|---|---|
| anything with ``get_batch`` (see `bulk_method`) | ``get_batch(indices)``; our own write into memory from ``empty`` |
| NumPy array, torch tensor | one gather |
| torch ``TensorDataset`` | one gather per tensor |
| Hugging Face ``datasets.Dataset`` | ``dataset[indices]``, then each column by the default rules |
| torch ``Subset``, torch ``ConcatDataset``, our `SimpleDataset` and `SubsetDataset` over any of these | the same |

The batch is what the default batchify makes of the samples, value by value: same structure, dtypes, shapes. Where
that is not certain (a subclass that reads in its own way, tensors on a device, indices that are no integers, a
batch that lies in several parts of a ConcatDataset) the answer is None, or `NOT_IN_BULK` for this batch, and the
samples are read. Hugging Face samples are those of its ``__getitems__``, which torch's DataLoader reads too: in
NumPy format ``dataset[i]`` gives a float column as float64, ``dataset[[i]]`` as float32.

Nothing is imported: where a library is not loaded, none of its datasets exists. What can go wrong is what goes
wrong with the samples: the reader reads them one by one to find out which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, in_field
from sharded_loader.batching.tensors import is_column
from sharded_loader.batching.tree import is_tensor
from sharded_loader.data.arrays import ArrayDataset, gather_rows, is_gathered
from sharded_loader.data.base import SimpleDataset
from sharded_loader.data.bulk import checked_indices, gather, handed_out, translated
from sharded_loader.data.overrides import bulk_method, offers
from sharded_loader.data.subsets import SubsetDataset

Gather = Callable[[Sequence[Any], Empty], Any]

NOT_IN_BULK: Any = object()
"""What a gather function returns when this batch has to be read sample by sample."""


def as_bulk(dataset: Any) -> Gather | None:
    """How to read finished batches of a dataset; as the default batchify would make them.

    Args:
        dataset: any.

    Returns:
        ``gather(indices, empty)``, which returns a batch or `NOT_IN_BULK`; None if there is no such way.

    Example:
        >>> as_bulk(np.arange(5) * 10)([3, 1], np.empty)
        array([30, 10])
        >>> as_bulk([1, 2, 3]) is None
        True
    """
    if offers(dataset, "get_batch"):
        return lambda indices, empty: gather(dataset, indices, empty)
    if isinstance(dataset, np.ndarray):
        return _of_array(dataset)
    if is_tensor(dataset):
        return _of_tensors(lambda: (dataset,), bare=True)
    if type(dataset) is SimpleDataset:
        return _translated(as_bulk(dataset._dataset), lambda indices: _checked(indices, len(dataset)))
    if type(dataset) is SubsetDataset:
        return _translated(as_bulk(dataset._dataset), dataset._inner)
    if _reads_like(dataset, "torch.utils.data", "TensorDataset"):
        return _of_tensors(lambda: dataset.tensors, bare=False)
    if _reads_like(dataset, "torch.utils.data", "Subset"):
        return _translated(as_bulk(dataset.dataset), lambda indices: _chosen(dataset, indices))
    if _reads_like(dataset, "torch.utils.data", "ConcatDataset"):
        return _of_parts(dataset)
    if _reads_like(dataset, "datasets.arrow_dataset", "Dataset"):
        return lambda indices, empty: _of_hugging_face(dataset, indices, empty)
    return None


def takes_arrays(dataset: Any) -> bool:
    """Whether `as_bulk` reads this dataset by arrays of indices, so that nobody need make lists of them.

    Example:
        >>> takes_arrays(np.arange(5)), takes_arrays([1, 2, 3])
        (True, False)
    """
    if type(dataset) is ArrayDataset or _reads_like(dataset, "torch.utils.data", "TensorDataset"):
        return True
    return (isinstance(dataset, np.ndarray) or is_tensor(dataset)) and as_bulk(dataset) is not None


def as_items(dataset: Any) -> Callable[[Sequence[Any]], Iterable[Any]] | None:
    """How to read many samples of a dataset at once: its ``__getitems__``.

    torch's `Subset` has one always. It is looked through: where the dataset inside has none, samples are read one
    by one, and where it has, each keeps its place, so that its random numbers are those of the loader's index.

    Example:
        >>> as_items([1, 2, 3]) is None
        True
    """
    if _reads_like(dataset, "torch.utils.data", "Subset"):
        inner = as_items(dataset.dataset)
        if inner is None:
            return None
        return lambda indices: inner(translated(_chosen(dataset, indices), indices))
    items = bulk_method(dataset, "__getitems__")
    return None if items is None else lambda indices: items(handed_out(indices))


def _reads_like(dataset: Any, module: str, name: str) -> bool:
    """Whether this is an instance of that class and reads samples as the class does, not in a way of its own."""
    base = getattr(sys.modules.get(module), name, None)
    if not isinstance(base, type) or not isinstance(dataset, base):
        return False
    kind = type(dataset)
    return all(getattr(kind, how, None) is getattr(base, how, None) for how in ("__getitem__", "__getitems__"))


def _chosen(subset: Any, indices: Sequence[Any]) -> list[Any]:
    """Indices into what a torch Subset wraps."""
    return list(map(subset.indices.__getitem__, indices))


def _checked(indices: Any, length: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Indices into something of this length; None if they are no flat integers (a dataset may have other keys)."""
    try:
        return checked_indices(indices, length)
    except (TypeError, ValueError, OverflowError):
        return None


def _translated(inner: Gather | None, translate: Callable[[Any], Any]) -> Gather | None:
    if inner is None:
        return None

    def read(indices: Sequence[Any], empty: Empty) -> Any:
        found = translate(indices)
        return NOT_IN_BULK if found is None else inner(found, empty)

    return read


def _of_array(array: np.ndarray[Any, Any]) -> Gather | None:
    if not is_gathered(array):
        return None

    def read(indices: Sequence[Any], empty: Empty) -> Any:
        where = _checked(indices, len(array))
        return NOT_IN_BULK if where is None else gather_rows([array], where, empty)[0]

    return read


def _of_tensors(tensors: Callable[[], Sequence[Any]], *, bare: bool) -> Gather | None:
    """Columns of tensors, looked up for each batch: they may be replaced between epochs."""
    if not all(map(is_column, tensors())):
        return None

    def read(indices: Sequence[Any], empty: Empty) -> Any:
        columns = tensors()
        if not all(map(is_column, columns)):
            return NOT_IN_BULK
        where = _checked(indices, len(columns[0]))
        if where is None:
            return NOT_IN_BULK
        fields = gather_rows(columns, where, empty)
        return fields[0] if bare else fields

    return read


def _of_parts(dataset: Any) -> Gather | None:
    """A torch ConcatDataset: batches that lie in one part, as sequential ones mostly do."""
    readers = [as_bulk(part) for part in dataset.datasets]
    if all(reader is None for reader in readers):
        return None
    ends = np.asarray(dataset.cumulative_sizes)

    def read(indices: Sequence[Any], empty: Empty) -> Any:
        where = _checked(indices, int(ends[-1]))
        if where is None:
            return NOT_IN_BULK
        first, last = np.searchsorted(ends, [where.min(), where.max()], side="right").tolist()
        reader = readers[first]
        if first != last or reader is None:
            return NOT_IN_BULK
        return reader((where - (int(ends[first - 1]) if first else 0)).tolist(), empty)

    return read


def _of_hugging_face(dataset: Any, indices: Sequence[Any], empty: Empty) -> Any:
    count = len(indices)
    columns = dataset[indices if isinstance(indices, list) else np.asarray(indices).tolist()]
    if not isinstance(columns, Mapping) or not columns or any(len(columns[name]) != count for name in columns):
        return NOT_IN_BULK
    return {name: _field(name, columns[name], count, empty) for name in columns}


def _field(name: Any, column: Any, count: int, empty: Empty) -> Any:
    """A column as the default batchify makes it of ``column[0]``, ``column[1]``, ..."""
    if is_gathered(column) and column.dtype.isnative:
        return column
    if is_column(column):
        return column
    return in_field(f"[{name!r}]", default_batchify_fn.assemble, [column[i] for i in range(count)], empty)
