"""`ArrayDataset`: columns in memory.

    as_rows(dataset) -> Rows: columns, and the row of each sample; None: it reads anything else

What can go wrong: columns of different lengths (ValueError at construction), an index out of range (IndexError).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from sharded_loader.base.described import an
from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.data.bulk import (
    Indices,
    Int64s,
    are_rows,
    arrays_of,
    bulk,
    checked_index,
    checked_indices,
    gather_rows,
    part_of,
    read_many,
)
from sharded_loader.data.columns import as_column, is_dataset, named_columns
from sharded_loader.data.datasets import Dataset
from sharded_loader.data.seeding import translated


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
        >>> import numpy as np
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
            >>> import numpy as np
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
        >>> import numpy as np
        >>> from sharded_loader import SubsetDataset
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
    elif (found := arrays_of(dataset)) is not None and are_rows(arrays := tuple(found[0]())):
        as_batch = (lambda fields: fields[0]) if found[1] else (lambda fields: fields)
    else:
        return None
    columns = arrays if isinstance(arrays, dict) else dict(enumerate(arrays))
    return Rows(len(dataset), columns, partial(checked_indices, length=len(dataset)), as_batch)
