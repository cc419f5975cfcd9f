"""Columns of other libraries, recognised and read by position; `storage.tables` converts them.

    pandas, polars: Series                 --as_column-->     NumPy array, without a copy where possible
    pyarrow: Array, ChunkedArray           --as_column-->     NumPy array, or a list of Python values
    DataFrame, pyarrow Table, dict         --named_columns--> {name: column}
    zarr, tensorstore, h5py, xarray, dask  --ArrayRows-->     rows as NumPy arrays, read on demand

A pandas Series is indexed by label, so after a shuffle or split ``series[3]`` is not the fourth value, and Arrow's
scalars are objects of their own. So columns are converted once, when the dataset is made; later changes of the Series
are not seen. No library is imported: its objects are recognised by their methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.base.imports import provided
from sharded_loader.batching.tree import is_masked, is_tensor, reads_rows


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
    `storage.tables.ArrayRows`, and anything else is returned as it is. Raises TypeError for a table or a dict that is
    not indexed by position, and ValueError for missing or masked values, which an array of the dtype cannot hold.
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
        text = f"{name} is a masked array with masked values, and batches have no mask: fill them, x.filled(0), or give"
        raise ValueError(f"{text} the mask as a column of its own, ArrayDataset(x=x.data, mask=np.ma.getmaskarray(x))")
    is_series = hasattr(kind, "to_numpy") and any(hasattr(kind, one) for one in ("iloc", "to_pylist", "null_count"))
    is_array = hasattr(kind, "__array__") and not isinstance(value, np.ndarray) and not is_tensor(value)
    if is_series or ((is_array or not hasattr(value, "__len__")) and has_rows(value)):
        return provided("column", "values")(value, name)
    return value


def has_rows(value: object) -> bool:
    """Return True for an array-like: indexed by position, with a shape that gives its length.

    Example:
        >>> has_rows(np.zeros((2, 3))), has_rows(np.zeros(())), has_rows([1])
        (True, False, False)
    """
    shape = getattr(value, "shape", ())
    return hasattr(type(value), "__getitem__") and isinstance(shape, (tuple, list)) and len(shape) > 0


def as_dataset(value: object, owner: str, needs_length: bool = True) -> Any:
    """Convert a Series, an Arrow column or an array without a length to a dataset that is read by position.

    ``owner`` is the caller's name in errors: TypeError for a table, otherwise as in `as_column`. With
    ``needs_length=False``, third-party objects may have a ``shape`` of another meaning and no length.
    """
    if is_table(value):
        text = f"{owner} was given {an(type(value))}, which is indexed by the names of its columns"
        raise TypeError(f"{text}: give ArrayDataset(table), whose samples are dicts of its columns")
    column = value if isinstance(value, (Mapping, np.ndarray)) else as_column(value, f"{owner}: the dataset")
    has_own_rows = hasattr(value, "__len__") or not (needs_length or hasattr(value, "__array__"))
    is_wrapped = column is not value and hasattr(column, "array")  # in `storage.tables.ArrayRows`
    return value if is_wrapped and has_own_rows else column


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
        text = f"{owner} needs an object with __getitem__ and __len__, not {an(type(value))}"
        raise TypeError(f"{text}: read a stream into a list, or give a dataset that can be indexed")
    return as_dataset(value, owner)
