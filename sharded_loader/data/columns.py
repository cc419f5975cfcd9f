"""Columns of other libraries, read by position.

    pandas, polars: Series                 --as_column-->     NumPy array, without a copy where possible
    pyarrow: Array, ChunkedArray           --as_column-->     NumPy array, or a list of Python values
    DataFrame, pyarrow Table, dict         --named_columns--> {name: column}
    zarr, tensorstore, h5py, xarray, dask  --ArrayRows-->     rows as NumPy arrays, read on demand

A pandas Series is indexed by label, so after a shuffle or split ``series[3]`` is not the fourth value, and Arrow's
scalars are objects of their own. So columns are converted once, when the dataset is made; later changes of the Series
are not seen. No library is imported: its objects are recognised by their methods.
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
    """Return True for a table of columns: a DataFrame of pandas, polars or cuDF, or Arrow's Table or RecordBatch."""
    kind = type(value)
    methods = ("iloc", "__arrow_c_stream__", "__dataframe__")
    return hasattr(kind, "columns") and any(hasattr(kind, method) for method in methods)


def named_columns(value: Any) -> dict[Any, Any] | None:
    """Return the columns of a table, or of a dict of columns, by name; None for everything else.

    A dict with keys 0, 1, 2, ... is indexed like a list, and a TensorDict by row; both give None.

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
    # In Arrow, ``columns`` holds the columns and not their names.
    names = list(getattr(value, "column_names", None) or value.columns)
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"the {type(value).__name__} has several columns {duplicate!r}: rename them, so that the names are unique"
        )
    return {name: value[name] for name in names}


def as_column(value: object, name: str) -> Any:
    """Convert a column to an object that is indexed by position. ``name`` is its name in errors.

    A Series or an Arrow column becomes a NumPy array (a list if the values are nested), another library's array becomes
    `ArrayRows`, and anything else is returned as it is. Raises TypeError for a table or a dict that is not indexed by
    position, and ValueError for missing or masked values, which an array of the dtype cannot hold.
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
        return _pandas_values(value, name)
    if hasattr(kind, "to_pylist") and hasattr(kind, "to_numpy"):
        return _arrow_values(value, name)
    if hasattr(kind, "null_count") and hasattr(kind, "to_numpy"):
        return _polars_values(value, name)
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
    """Rows of another library's array (anything with ``shape`` and ``__getitem__``), as NumPy arrays.

    A contiguous run of rows is read as a slice, other rows by one array of ascending indices, which h5py requires. If
    the array does not support that, rows are read one by one.

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
        unique, inverse = np.unique(checked_indices(indices, len(self)), return_inverse=True)
        try:
            is_run = unique[-1] - unique[0] == len(unique) - 1
            rows = np.asarray(self.array[slice(int(unique[0]), int(unique[-1]) + 1) if is_run else unique])
            if rows.shape == (len(unique), *self.array.shape[1:]):
                return list(rows[inverse])
        except Exception as error:  # no indexing by arrays; any other error is raised again for its row
            pass_on(error)
        return [np.asarray(self.array[index])[()] for index in unique[inverse].tolist()]


def as_dataset(value: object, owner: str, needs_length: bool = True) -> Any:
    """Convert a Series, an Arrow column or an array without a length to a dataset that is read by position.

    ``owner`` is the caller's name in errors: TypeError for a table, otherwise as in `as_column`. With
    ``needs_length=False``, third-party objects may have a ``shape`` of another meaning and no length.
    """
    if is_table(value):
        raise TypeError(
            f"{owner} was given {an(type(value))}, which is indexed by the names of its columns: give "
            f"ArrayDataset(table), whose samples are dicts of its columns"
        )
    column = value if isinstance(value, (Mapping, np.ndarray)) else as_column(value, f"{owner}: the dataset")
    has_own_rows = hasattr(value, "__len__") or not (needs_length or hasattr(value, "__array__"))
    return value if type(column) is ArrayRows and has_own_rows else column


def _pandas_values(series: Any, name: str) -> Any:
    # Nullable and Arrow dtypes have a matching NumPy dtype, which to_numpy() uses only if nothing is missing.
    dtype = getattr(getattr(series, "dtype", None), "numpy_dtype", None)
    if dtype is None or np.dtype(dtype).kind not in NUMBERS:
        return series.to_numpy()
    _check_complete(name, int(series.isna().sum()), np.dtype(dtype), "series.fillna(0)")
    return series.to_numpy(dtype)


def _polars_values(series: Any, name: str) -> Any:
    dtype: Any = getattr(series, "dtype", None)
    if hasattr(dtype, "is_nested") and dtype.is_nested():
        return series.to_list()
    array = series.to_numpy()
    if array.dtype.kind in NUMBERS:
        _check_complete(name, series.null_count(), dtype, "series.fill_null(0)")
    return array


def _arrow_values(column: Any, name: str) -> Any:
    arrow_type = column.type
    if hasattr(arrow_type, "index_type"):  # to_numpy() of a chunked dictionary array fills nulls with values
        return _arrow_values(column.cast(arrow_type.value_type), name)
    if getattr(arrow_type, "num_fields", 0):
        return _arrow_list_values(column)
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype.kind in NUMBERS:
        _check_complete(name, column.null_count, arrow_type, "column.fill_null(0)")
    return array


def _arrow_list_values(column: Any) -> Any:
    """Convert a list column, keeping its dtype. Lists with nulls or names inside become Python lists."""
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
    """Return True if ``value`` can be indexed and has a length, or a shape that implies one.

    Example:
        >>> is_dataset([1]), is_dataset(iter([1]))
        (True, False)
    """
    return hasattr(value, "__getitem__") and (hasattr(value, "__len__") or has_rows(value))


def check_dataset(value: object, owner: str) -> Any:
    """Return a dataset as `as_dataset` does, and raise a TypeError for objects that cannot be indexed."""
    if not is_dataset(value):
        raise TypeError(
            f"{owner} needs an object with __getitem__ and __len__, not {an(type(value))}: "
            "read a stream into a list, or give a dataset that can be indexed"
        )
    return as_dataset(value, owner)
