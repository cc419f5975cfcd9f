"""Columns that are no arrays: those of other libraries, read by position.

    pandas, polars: a Series               --as_column-->     NumPy array, no copy where there need be none
    pyarrow: an Array, a ChunkedArray      --as_column-->     NumPy array, or a list of Python values
    a DataFrame, a pyarrow Table, a dict   --named_columns--> {name: column}
    zarr, tensorstore, h5py, xarray, dask  --ArrayRows-->     rows as NumPy arrays, read when they are asked for

A pandas Series is indexed by its labels: after a shuffle or a split, ``series[3]`` is not the fourth value. Arrow's
scalars are objects of their own. So such a column becomes an array once, when the dataset is made. Later changes of
the Series are not seen. Nothing is imported: the objects are known by their methods.

What can go wrong: missing values in a column of numbers, which an array of its dtype cannot hold (ValueError), a table
where one column is expected (TypeError). Both errors say what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.base.interrupts import pass_on
from sharded_loader.batching.tree import is_masked, is_tensor, reads_rows
from sharded_loader.data.bulk import NUMBERS, checked_indices


def is_table(value: object) -> bool:
    """Whether this is a table of columns: a DataFrame of pandas, polars or cuDF, or Arrow's Table or RecordBatch.

    Example:
        >>> is_table(np.zeros((2, 3))), is_table([1, 2])
        (False, False)
    """
    kind = type(value)
    marks = ("iloc", "__arrow_c_stream__", "__dataframe__")
    return hasattr(kind, "columns") and any(hasattr(kind, mark) for mark in marks)


def named_columns(value: Any) -> dict[Any, Any] | None:
    """The columns of a table, or of a dict of columns, by name; None for everything else.

    A dict whose keys are 0, 1, 2, ... is indexed as a list is, and a TensorDict by rows: no dicts of columns.

    Raises:
        ValueError: two columns have the same name.

    Example:
        >>> named_columns({"x": [1, 2], "y": [3, 4]}), named_columns({0: "a", 1: "b"}), named_columns([1, 2])
        ({'x': [1, 2], 'y': [3, 4]}, None, None)
    """
    if isinstance(value, Mapping):
        return None if reads_rows(type(value)) or all(index in value for index in range(len(value))) else dict(value)
    if not is_table(value):
        return None
    # Arrow's ``columns`` are the columns themselves.
    names = list(getattr(value, "column_names", None) or value.columns)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"the {type(value).__name__} has several columns {twice!r}: rename them, so that each has a name of its own"
        )
    return {name: value[name] for name in names}


def as_column(value: object, name: str) -> Any:
    """A column that is read by position.

    Args:
        value: any column.
        name: how errors name it.

    Returns:
        A NumPy array of a Series or an Arrow column (a list where Arrow's values are nested), `ArrayRows` of an array
        of another library, anything else as it is.

    Raises:
        TypeError: it is a table, or a dict that is not indexed by position.
        ValueError: it has missing or masked values, which an array of its dtype cannot hold.

    Example:
        >>> as_column([1, 2], "column y")
        [1, 2]
    """
    kind = type(value)
    if kind is np.ndarray or kind is list:
        return value
    if is_table(value) or (isinstance(value, Mapping) and named_columns(value) is not None):
        raise TypeError(
            f"{name} is {an(kind)}, which has columns of its own: give ArrayDataset(table) alone, or "
            f"ArrayDataset(**table, y=more) with more columns, or one array of all its values, such as table.to_numpy()"
        )
    if is_masked(value):
        raise ValueError(
            f"{name} is a masked array with masked values, and batches have no mask: fill them, "
            "x.filled(0), or give the mask as a column of its own, ArrayDataset(x=x.data, mask=np.ma.getmaskarray(x))"
        )
    if hasattr(kind, "iloc") and hasattr(kind, "to_numpy"):
        return _of_pandas(value, name)
    if hasattr(kind, "to_pylist") and hasattr(kind, "to_numpy"):
        return _of_arrow(value, name)
    if hasattr(kind, "null_count") and hasattr(kind, "to_numpy"):
        return _of_polars(value, name)
    is_array = hasattr(kind, "__array__") and not isinstance(value, np.ndarray) and not is_tensor(value)
    return ArrayRows(value) if has_rows(value) and (is_array or not hasattr(value, "__len__")) else value


def has_rows(value: object) -> bool:
    """Return True for an array-like: indexed by position, with a shape that gives its length.

    Example:
        >>> has_rows(np.zeros((2, 3))), has_rows(np.zeros(())), has_rows([1])
        (True, False, False)
    """
    shape = getattr(value, "shape", ())
    return hasattr(type(value), "__getitem__") and isinstance(shape, (tuple, list)) and len(shape) > 0


class ArrayRows:
    """The rows of an array of another library, as NumPy arrays.

    Many rows are read at once: a run of them by a slice, others by an array of ascending indices, as h5py wants it. An
    array that takes none is read row by row.

    Args:
        array: has ``shape`` and ``__getitem__``.

    Example:
        >>> rows = ArrayRows(np.arange(5) * 10)
        >>> len(rows), int(rows[-1]), [int(row) for row in rows.__getitems__([3, 1, 3])]
        (5, 40, [30, 10, 30])
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def __getitem__(self, index: Any) -> Any:
        is_one = isinstance(index, (int, np.integer))
        return self.__getitems__([index])[0] if is_one else np.asarray(self.array[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many rows at once."""
        where, places = np.unique(checked_indices(indices, len(self)), return_inverse=True)
        try:
            is_run = where[-1] - where[0] == len(where) - 1
            rows = np.asarray(self.array[slice(int(where[0]), int(where[-1]) + 1) if is_run else where])
            if rows.shape == (len(where), *self.array.shape[1:]):
                return list(rows[places])
        except Exception as error:  # it takes no arrays of indices; another error comes again with its row
            pass_on(error)
        return [np.asarray(self.array[index])[()] for index in where[places].tolist()]


def as_dataset(value: object, owner: str, needs_length: bool = True) -> Any:
    """A dataset that is read by position: a Series or an Arrow column as an array, an array without a length by its
    shape, anything else as it is.

    Args:
        value: any dataset.
        owner: who takes it, for errors.
        needs_length: False: an object of the user's may have a shape of another meaning, and no length.

    Raises:
        TypeError: it is a table, whose samples have no index.
        ValueError: as `as_column`.

    Example:
        >>> as_dataset("abc", "SimpleDataset")
        'abc'
    """
    if is_table(value):
        raise TypeError(
            f"{owner} was given {an(type(value))}, which is indexed by the names of its columns: give "
            f"ArrayDataset(table), whose samples are dicts of its columns"
        )
    column = value if isinstance(value, (Mapping, np.ndarray)) else as_column(value, f"{owner}: the dataset")
    gives_own = hasattr(value, "__len__") or not (needs_length or hasattr(value, "__array__"))
    return value if type(column) is ArrayRows and gives_own else column


def _of_pandas(series: Any, name: str) -> Any:
    # Nullable and Arrow dtypes have a NumPy dtype beside them, which to_numpy() uses only where nothing is missing.
    known = getattr(getattr(series, "dtype", None), "numpy_dtype", None)
    if known is None or np.dtype(known).kind not in NUMBERS:
        return series.to_numpy()
    _check_complete(name, int(series.isna().sum()), np.dtype(known), "series.fillna(0)")
    return series.to_numpy(known)


def _of_polars(series: Any, name: str) -> Any:
    dtype: Any = getattr(series, "dtype", None)
    if hasattr(dtype, "is_nested") and dtype.is_nested():
        return series.to_list()
    array = series.to_numpy()
    if array.dtype.kind in NUMBERS:
        _check_complete(name, series.null_count(), dtype, "series.fill_null(0)")
    return array


def _of_arrow(column: Any, name: str) -> Any:
    kind = column.type
    if hasattr(kind, "index_type"):  # a dictionary: to_numpy() of several chunks has values where nulls are
        return _of_arrow(column.cast(kind.value_type), name)
    if getattr(kind, "num_fields", 0):
        return _of_arrow_lists(column)
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype.kind in NUMBERS:
        _check_complete(name, column.null_count, kind, "column.fill_null(0)")
    return array


def _of_arrow_lists(column: Any) -> Any:
    """Lists keep their dtype as arrays; a list that has a null or names inside is Python's."""
    if not hasattr(column.type, "value_type") or column.type.value_type.num_fields:
        return column.to_pylist()
    values = [chunk.flatten() for chunk in getattr(column, "chunks", [column])]
    size = getattr(column.type, "list_size", None)
    if column.null_count or any(chunk.null_count for chunk in values):
        rows = ((row.values, row) for row in column)
        return [row.as_py() if held is None or held.null_count else held.to_numpy(False) for held, row in rows]
    if size is None or not values:
        return column.to_numpy(zero_copy_only=False)
    return np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in values]).reshape(len(column), size)


def _check_complete(name: str, missing: int, dtype: object, fill: str) -> None:
    if missing:
        raise ValueError(
            f"{name} has {missing} missing values, which an array of {dtype} cannot hold: fill them, {fill}, or give "
            "a column of its own that says which values are missing"
        )


def is_dataset(value: object) -> bool:
    """Return True if ``value`` can be indexed and has a length, or a shape from which it follows.

    Example:
        >>> is_dataset([1]), is_dataset(iter([1]))
        (True, False)
    """
    return hasattr(value, "__getitem__") and (hasattr(value, "__len__") or has_rows(value))


def check_dataset(value: object, owner: str) -> Any:
    """Reject what has no samples by index with a TypeError.

    Returns:
        The dataset, read by position: see `as_dataset`.

    Example:
        >>> check_dataset([1, 2], "SimpleDataset")
        [1, 2]
    """
    if not is_dataset(value):
        raise TypeError(
            f"{owner} needs an object with __getitem__ and __len__, not {an(type(value))}: "
            "read a stream into a list, or give a dataset that can be indexed"
        )
    return as_dataset(value, owner)
