"""`ArrayDataset`: columns in memory; and everything else that is read in columns, from datasets of others too.

    as_bulk(dataset)  -> gather(indices, empty) -> the batch | NOT_IN_BULK     None: no such way
    as_rows(dataset)  -> Rows: columns, and the row of each sample             None: it reads anything else
    as_items(dataset) -> ``__getitems__``, through torch's Subset              None: sample by sample

| dataset | is read as |
|---|---|
| anything with ``get_batch`` (see `bulk_method`) | ``get_batch(indices)``; our own write into memory from ``empty`` |
| NumPy array, torch tensor | one gather |
| torch ``TensorDataset`` | one gather per tensor |
| Hugging Face ``datasets.Dataset`` | ``dataset[indices]``, then each column by the default rules |
| what ``cache`` returns | one gather per column, if all samples of the batch are stored |
| our `ShardDataset` over tables | the rows of each column, out of decoded groups |
| torch ``Subset``, our `SimpleDataset` and `SubsetDataset` over any of these | the same |

The batch is what the default batchify makes of the samples, value by value: same structure, dtypes, shapes. Where that
is not certain, the answer is None, or `NOT_IN_BULK` for this batch, and the samples are read. Examples are a subclass
that reads in its own way, tensors on a device, and indices that are no integers. Hugging Face samples are those of its
``__getitems__``, which torch's DataLoader reads too: in NumPy format ``dataset[i]`` gives a float column as float64,
``dataset[[i]]`` as float32.

Nothing is imported: where a library is not loaded, none of its datasets exists. What can go wrong: columns of different
lengths (ValueError at construction), an index out of range (IndexError), and what goes wrong with the samples: the
reader reads them one by one to find out which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, in_fields, known_to, new_array
from sharded_loader.batching.tensors import is_column
from sharded_loader.batching.tree import is_tensor
from sharded_loader.data.bulk import (
    NOT_IN_BULK,
    READS,
    Gather,
    Indices,
    Int64s,
    batch_reader,
    bulk,
    bulk_method,
    checked_index,
    checked_indices,
    gather_rows,
    is_gathered,
    read_many,
)
from sharded_loader.data.columns import as_column, is_dataset, named_columns
from sharded_loader.data.datasets import Dataset, SimpleDataset, SubsetDataset
from sharded_loader.data.seeding import handed_out, translated


class ArrayDataset(Dataset):
    """Columns of the same length: sample i is the i-th entry of each. A batch costs one gather per column.

    Args:
        *arrays: positional columns: NumPy arrays, torch tensors, lists, or any object with ``__getitem__`` and
            ``__len__``. Several give tuple samples and a list of fields per batch, one gives bare samples. A pandas
            or polars Series and a pyarrow column are read by position. An array of zarr, tensorstore, h5py, xarray or
            dask gives its rows as NumPy arrays, and reads those of a batch at once. A DataFrame, a pyarrow Table or a
            dict of columns, given alone, is its columns by name.
        **columns: named columns: dict samples and dict batches. Positional and named together is a TypeError.

    Raises:
        TypeError: positional and named columns, or none; a column that cannot be indexed by position.
        ValueError: the columns have different lengths (names two that do); a column of numbers has missing or masked
            values.

    Example:
        >>> dataset = ArrayDataset(image=np.zeros((4, 8, 8)), label=[3, 1, 4, 1])
        >>> dataset[2]["label"], dataset.get_batch([0, 2])["label"]
        (4, array([3, 4]))

    Source of the idea: ``mxnet.gluon.data.ArrayDataset``.
    """

    def __init__(self, *arrays: Any, **columns: Any) -> None:
        if arrays and columns:
            raise TypeError(
                f"ArrayDataset was given {len(arrays)} positional columns and the named columns {list(columns)}: "
                "name all columns or none"
            )
        if len(arrays) == 1:
            table = named_columns(arrays[0])
            if table is not None:
                arrays, columns = (), table
        if not arrays and not columns:
            raise TypeError("ArrayDataset was given no columns: give at least one")
        labelled = dict(columns) if columns else {f"array[{i}]": array for i, array in enumerate(arrays)}
        for name, given in labelled.items():
            labelled[name] = column = as_column(given, f"ArrayDataset: column {name}")
            if not is_dataset(column) or (hasattr(column, "ndim") and column.ndim == 0):
                raise TypeError(
                    f"ArrayDataset: column {name} is {an(type(column))} without a length: give arrays, "
                    "tensors, lists or datasets"
                )
        (first, column), *others = labelled.items()
        self._length = len(column)
        for name, other in others:
            if len(other) != self._length:
                raise ValueError(
                    f"All arrays must have the same length; {first} has length {self._length} while {name} has "
                    f"{len(other)}: cut them to one length"
                )
        self._names: tuple[str, ...] | None = tuple(columns) if columns else None
        self._columns: tuple[Any, ...] = tuple(labelled.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            index = checked_index(index, self._length)
        if self._names is not None:
            return {name: column[index] for name, column in zip(self._names, self._columns, strict=True)}
        if len(self._columns) == 1:
            return self._columns[0][index]
        return tuple([column[index] for column in self._columns])

    @property
    def columns(self) -> dict[str, Any] | tuple[Any, ...]:
        """The columns: a dict of the named ones, otherwise a tuple.

        Example:
            >>> ArrayDataset([1, 2], [3, 4]).columns
            ([1, 2], [3, 4])
        """
        return self._columns if self._names is None else dict(zip(self._names, self._columns, strict=True))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch: one array, a list of fields, or a dict of fields.

        Args:
            indices: flat integers; negative ones count from the end.
            empty: gives the memory: ``empty(shape, dtype)`` returns an array. A loader gives its own.

        Returns:
            NumPy arrays for NumPy columns, tensors for tensors, the default batchify of the others.

        Raises:
            IndexError: one is out of range.

        Example:
            >>> ArrayDataset(np.arange(5), np.arange(5) * 10).get_batch([4, 0])
            [array([4, 0]), array([40,  0])]
        """
        return self.as_batch(gather_rows(self._columns, checked_indices(indices, self._length), empty))

    def as_batch(self, fields: list[Any]) -> Any:
        """The batch whose columns are these, in the order of the dataset's.

        Example:
            >>> ArrayDataset(x=[1], y=[2]).as_batch(["xs", "ys"])
            {'x': 'xs', 'y': 'ys'}
        """
        if self._names is not None:
            return dict(zip(self._names, fields, strict=True))
        return fields[0] if len(fields) == 1 else fields

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once."""
        where = translated(checked_indices(indices, self._length).tolist(), indices)
        columns = [read_many(column, where) for column in self._columns]
        if self._names is not None:
            names = self._names
            return [dict(zip(names, fields, strict=True)) for fields in zip(*columns, strict=True)]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def __repr__(self) -> str:
        names = self._names or [""] * len(self._columns)
        shown = [f"{name}{'=' if name else ''}{_describe(c)}" for name, c in zip(names, self._columns, strict=True)]
        return f"ArrayDataset({', '.join(shown)}; {self._length} samples)"


def _describe(column: Any) -> str:
    if hasattr(column, "shape") and hasattr(column, "dtype"):
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape[1:])}"
    return type(column).__name__


# -- datasets of others ------------------------------------------------------------------------------------------------


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
    if (inside := part_of(dataset)) is not None:
        return _translated(as_bulk(inside[0]), inside[1])
    read = batch_reader(dataset)
    if read is not None:
        gathers = isinstance(dataset, Dataset) and known_to(type(dataset), "gather", READS) is not None
        return dataset.gather if gathers else read
    if isinstance(dataset, Dataset) and known_to(type(dataset), "_in_columns", READS) is not None:
        in_columns: Gather = dataset._in_columns
        return in_columns
    if (found := _arrays_of(dataset)) is not None:
        return _of_columns(*found)
    if _reads_like(dataset, "datasets.arrow_dataset", "Dataset"):
        return partial(_of_hugging_face, dataset)
    return None


class Rows(NamedTuple):
    """A dataset whose samples are rows of arrays and tensors.

    Attributes:
        length: the number of samples.
        columns: the arrays and tensors, by name or by number.
        find: the rows of many samples in the columns.
        as_batch: the batch whose fields are these, in the order of the columns.
    """

    length: int
    columns: dict[Any, Any]
    find: Callable[[Any], Int64s]
    as_batch: Callable[[list[Any]], Any]


def as_rows(dataset: Any) -> Rows | None:
    """The columns that a dataset reads by index, through any stack of parts; None if it does anything else.

    Args:
        dataset: any. Columns of an `ArrayDataset` may be of any kind, other columns are as for `is_gathered` and
            `is_column`.

    Example:
        >>> rows = as_rows(SubsetDataset(ArrayDataset(x=np.arange(5) * 10), [4, 2]))
        >>> rows.columns["x"][rows.find([0, -1])], rows.as_batch(["xs"])
        (array([40, 20]), {'x': 'xs'})
        >>> as_rows(ArrayDataset([1, 2]).transform(str)) is None
        True
    """
    if (inside := part_of(dataset)) is not None:
        rows, translate = as_rows(inside[0]), inside[1]
        return rows and rows._replace(length=len(dataset), find=lambda indices: rows.find(translate(indices)))
    if type(dataset) is ArrayDataset and "get_batch" not in vars(dataset):
        arrays, as_batch = dataset.columns, dataset.as_batch
    elif (found := _arrays_of(dataset)) is not None and _are_rows(arrays := tuple(found[0]())):
        as_batch = (lambda fields: fields[0]) if found[1] else (lambda fields: fields)
    else:
        return None
    columns = arrays if isinstance(arrays, dict) else dict(enumerate(arrays))
    return Rows(len(dataset), columns, partial(checked_indices, length=len(dataset)), as_batch)


def takes_arrays(dataset: Any) -> bool:
    """Whether `as_bulk` reads this dataset by arrays of indices, so that no lists need be made of them.

    Example:
        >>> takes_arrays(np.arange(5)), takes_arrays([1, 2, 3])
        (True, False)
    """
    is_torchs = is_tensor(dataset) or _reads_like(dataset, "torch.utils.data", "TensorDataset")
    if is_torchs or isinstance(dataset, np.ndarray):
        return as_bulk(dataset) is not None
    return hasattr(batch_reader(dataset), "takes_empty")


def as_items(dataset: Any) -> Callable[[Sequence[Any]], Iterable[Any]] | None:
    """How to read many samples of a dataset at once: its ``__getitems__``.

    torch's `Subset` always has one. It is looked through. If the dataset inside has none, samples are read one by one.
    If it has one, each sample keeps its key, so its random numbers are those of the loader's index.

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


def part_of(dataset: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Of a part of another dataset, that one, and the function that translates indices; otherwise None.

    Example:
        >>> inner, translate = part_of(SubsetDataset([5, 6, 7], [2, 0]))
        >>> inner, translate([0, 1])
        ([5, 6, 7], array([2, 0]))
    """
    if type(dataset) in (SimpleDataset, SubsetDataset) and "get_batch" not in vars(dataset):
        return dataset._dataset, dataset._inner
    if _reads_like(dataset, "torch.utils.data", "Subset") and batch_reader(dataset) is None:
        return dataset.dataset, partial(_chosen, dataset)
    return None


def _arrays_of(dataset: Any) -> tuple[Callable[[], Sequence[Any]], bool] | None:
    """What looks up the arrays that a sample is made of, and whether it is a row of the only one; otherwise None.

    They are looked up for each batch: a TensorDataset's may be replaced between epochs.
    """
    if isinstance(dataset, np.ndarray) or is_tensor(dataset):
        return (lambda: (dataset,)), True
    return ((lambda: dataset.tensors), False) if _reads_like(dataset, "torch.utils.data", "TensorDataset") else None


def _chosen(subset: Any, indices: Sequence[Any]) -> list[Any]:
    """Indices into what a torch Subset wraps."""
    return list(map(subset.indices.__getitem__, indices))


def _translated(inner: Gather | None, translate: Callable[[Any], Any]) -> Gather | None:
    """Reads other indices. Those that cannot be translated are no integers: a dataset may have other keys."""
    if inner is None:
        return None

    def read(indices: Any, empty: Empty) -> Any:
        try:
            found = translate(indices)
        except (TypeError, ValueError, OverflowError):
            return NOT_IN_BULK
        return inner(found, empty)

    return read


def _of_columns(columns: Callable[[], Sequence[Any]], bare: bool) -> Gather | None:
    def read(where: Any, empty: Empty) -> Any:
        if not _are_rows(columns()):
            return NOT_IN_BULK
        fields = gather_rows(columns(), where, empty)
        return fields[0] if bare else fields

    if not _are_rows(columns()):
        return None
    return _translated(read, lambda indices: checked_indices(indices, len(columns()[0])))


def _are_rows(columns: Sequence[Any]) -> bool:
    return all(is_gathered(column) or is_column(column) for column in columns)


def _of_hugging_face(dataset: Any, indices: Sequence[Any], empty: Empty) -> Any:
    count = len(indices)
    columns = dataset[indices if isinstance(indices, list) else np.asarray(indices).tolist()]
    if not isinstance(columns, Mapping) or not columns or any(len(columns[name]) != count for name in columns):
        return NOT_IN_BULK
    fields = in_fields(columns, "[{!r}]", repeat(_field), [columns[name] for name in columns], empty)
    return dict(zip(columns, fields, strict=True))


def _field(column: Any, empty: Empty) -> Any:
    """A column as the default batchify makes it of ``column[0]``, ``column[1]``, ..."""
    if (is_gathered(column) and column.dtype.isnative) or is_column(column):
        return column
    return default_batchify_fn.assemble([column[i] for i in range(len(column))], empty)
