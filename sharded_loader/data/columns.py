"""Columns: those of other libraries read by position, and the rows of any column gathered into one array.

    pandas, polars: a Series               --as_column-->     NumPy array, no copy where there need be none
    pyarrow: an Array, a ChunkedArray      --as_column-->     NumPy array, or a list of Python values
    a DataFrame, a pyarrow Table, a dict   --named_columns--> {name: column}
    column, checked row numbers, empty     --gather_rows-->   their rows, in memory from ``empty``, each written once
    columns, row numbers, positions        --merge_rows-->    rows of several columns, in one array

A pandas Series is indexed by its labels: after a shuffle or a split, ``series[3]`` is not the fourth value. Arrow's
scalars are objects of their own. So such a column becomes an array once, when the dataset is made. Later changes of
the Series are not seen. Nothing is imported: the objects are known by their methods.

What can go wrong: missing values in a column of numbers, which an array of its dtype cannot hold (ValueError), a table
where one column is expected (TypeError). Both errors say what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Array, Empty
from sharded_loader.batching.stack import as_numpy, check_no_grad, empty_tensor, is_column
from sharded_loader.batching.tree import is_masked, is_tensor
from sharded_loader.data.bulk import Int64s, gather, offers, read_many

_NUMBERS = "biufc"


def is_table(value: Any) -> bool:
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

    A dict whose keys are 0, 1, 2, ... is a dataset that is indexed as a list is, and no dict of columns.

    Raises:
        ValueError: two columns have the same name.

    Example:
        >>> named_columns({"x": [1, 2], "y": [3, 4]}), named_columns({0: "a", 1: "b"}), named_columns([1, 2])
        ({'x': [1, 2], 'y': [3, 4]}, None, None)
    """
    if isinstance(value, Mapping):
        return None if all(index in value for index in range(len(value))) else dict(value)
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


def as_column(value: Any, name: str) -> Any:
    """A column that is read by position.

    Args:
        value: any column.
        name: how errors name it.

    Returns:
        A NumPy array of a Series or an Arrow column (a list where Arrow's values are nested), anything else as it is.

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
            f"{name} is a {kind.__name__}, which has columns of its own: give ArrayDataset(table) alone, or "
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
    return value


def as_dataset(value: Any, owner: str) -> Any:
    """A dataset that is read by position: a Series or an Arrow column as an array, anything else as it is.

    Args:
        value: any dataset.
        owner: who takes it, for errors.

    Raises:
        TypeError: it is a table, whose samples have no index.
        ValueError: as `as_column`.

    Example:
        >>> as_dataset("abc", "SimpleDataset")
        'abc'
    """
    if is_table(value):
        raise TypeError(
            f"{owner} was given a {type(value).__name__}, which is indexed by the names of its columns: give "
            f"ArrayDataset(table), whose samples are dicts of its columns"
        )
    return value if isinstance(value, (Mapping, np.ndarray)) else as_column(value, f"{owner}: the dataset")


def _of_pandas(series: Any, name: str) -> Any:
    # Nullable and Arrow dtypes have a NumPy dtype beside them, which to_numpy() uses only where nothing is missing.
    known = getattr(getattr(series, "dtype", None), "numpy_dtype", None)
    if known is None or np.dtype(known).kind not in _NUMBERS:
        return series.to_numpy()
    missing = int(series.isna().sum())
    if missing:
        raise _missing(name, missing, np.dtype(known), "series.fillna(0)")
    return series.to_numpy(known)


def _of_polars(series: Any, name: str) -> Any:
    dtype: Any = getattr(series, "dtype", None)
    if hasattr(dtype, "is_nested") and dtype.is_nested():
        return series.to_list()
    missing = series.null_count()
    array = series.to_numpy()
    if missing and array.dtype.kind in _NUMBERS:
        raise _missing(name, missing, dtype, "series.fill_null(0)")
    return array


def _of_arrow(column: Any, name: str) -> Any:
    kind = column.type
    if hasattr(kind, "index_type"):  # a dictionary: to_numpy() of several chunks has values where nulls are
        return _of_arrow(column.cast(kind.value_type), name)
    if getattr(kind, "num_fields", 0):
        return _of_arrow_lists(column)
    array = column.to_numpy(zero_copy_only=False)
    if column.null_count and array.dtype.kind in _NUMBERS:
        raise _missing(name, column.null_count, kind, "column.fill_null(0)")
    return array


def _of_arrow_lists(column: Any) -> Any:
    """Lists of numbers keep their dtype as arrays; what has nulls or names inside is Python's lists and dicts."""
    if not hasattr(column.type, "value_type") or column.type.value_type.num_fields or column.null_count:
        return column.to_pylist()
    values = [chunk.flatten() for chunk in getattr(column, "chunks", [column])]
    if any(chunk.null_count for chunk in values):
        return column.to_pylist()
    size = getattr(column.type, "list_size", None)
    if size is None or not values:
        return column.to_numpy(zero_copy_only=False)
    return np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in values]).reshape(len(column), size)


def _missing(name: str, count: int, dtype: Any, fill: str) -> ValueError:
    return ValueError(
        f"{name} has {count} missing values, which an array of {dtype} cannot hold: fill them, {fill}, or give a "
        "column of its own that says which values are missing"
    )


def is_dataset(value: Any) -> bool:
    """Whether ``value`` has samples by index, and a length.

    Example:
        >>> is_dataset([1]), is_dataset(iter([1]))
        (True, False)
    """
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def check_dataset(value: Any, owner: str) -> Any:
    """Reject what has no samples by index with a TypeError.

    Returns:
        The dataset, read by position: see `as_dataset`.

    Example:
        >>> check_dataset([1, 2], "SimpleDataset")
        [1, 2]
    """
    if not is_dataset(value):
        raise TypeError(
            f"{owner} needs an object with __getitem__ and __len__, not a {type(value).__name__}: "
            "read a stream into a list, or give a dataset that can be indexed"
        )
    return as_dataset(value, owner)


# -- rows --------------------------------------------------------------------------------------------------------------


def is_gathered(array: Any) -> bool:
    """Whether these are an array's rows of numbers, which `gather_rows` gathers at once.

    A subclass of NumPy's array may read its rows in its own way, as masked arrays do: its rows are read one by one.

    Example:
        >>> is_gathered(np.zeros(3)), is_gathered(np.array(["a"])), is_gathered(np.ma.array([1, 2]))
        (True, False, False)
    """
    return type(array) in (np.ndarray, np.memmap) and array.ndim > 0 and array.dtype.kind in "biufc"


def gather_rows(columns: Sequence[Any], where: Int64s, empty: Empty) -> list[Any]:
    """The rows of each column at checked indices, in memory from ``empty``, each written once.

    Example:
        >>> gather_rows([np.arange(5), ["a", "b", "c", "d", "e"]], np.array([3, 1]), np.empty)
        [array([3, 1]), ['d', 'b']]
    """
    run = _as_run(where)
    return [_gather_column(column, where, run, empty) for column in columns]


def _as_run(where: Int64s) -> slice | None:
    """The indices as a slice if they follow one upon the other."""
    count = len(where)
    if not count:
        return None
    first = int(where[0])
    # Most shuffled batches are told apart by the first comparison: 0.2 us.
    if int(where[-1]) - first != count - 1 or not (where[1:] - where[:-1] == 1).all():
        return None
    return slice(first, first + count)


def _gather_column(column: Any, where: Int64s, run: slice | None, empty: Empty) -> Any:
    if is_gathered(column):  # without a detour: a small batch takes 4 us
        dtype = column.dtype if column.dtype.isnative else column.dtype.newbyteorder("=")
        return _copy_rows(column, where, run, empty((len(where), *column.shape[1:]), dtype))
    if is_column(column):
        batch, out = _new_rows(column, len(where), empty)
        _copy_rows(as_numpy(column), where, run, out)
        return batch
    if is_tensor(column) and type(column).__getitem__ is sys.modules["torch"].Tensor.__getitem__:
        check_no_grad([column])
        torch: Any = sys.modules["torch"]
        return column[torch.from_numpy(where).to(column.device)]
    if offers(column, "get_batch"):
        return gather(column, where, empty)
    return default_batchify_fn.assemble(read_many(column, where.tolist()), empty)


def _new_rows(column: Any, count: int, empty: Empty) -> tuple[Any, Array]:
    """A batch of ``count`` rows like a column's, not written yet; and its memory, as an array."""
    shape = (count, *column.shape[1:])
    if isinstance(column, np.ndarray):
        array = empty(shape, column.dtype if column.dtype.isnative else column.dtype.newbyteorder("="))
        return array, array
    # By NumPy, not index_select: that wakes torch's threads, which on two busy cores took 840 us where
    # one thread took 78 (256 rows of 3x32x32 uint8).
    held, tensor = empty_tensor(shape, column.dtype, empty)
    return tensor, as_numpy(tensor) if held is None else held


def _rows_of(column: Any) -> Array:
    return column if isinstance(column, np.ndarray) else as_numpy(column)


def _copy_rows(column: Array, where: Int64s, run: slice | None, out: Array) -> Array:
    if run is not None:
        out[...] = column[run]  # one copy: 20 us where taking the same 256 rows one by one costs 24
    elif out.dtype == column.dtype:
        # The indices are checked, so clipping changes nothing; the default mode "raise" buffers the output
        # (256 rows of 3x32x32 uint8 out of 50,000: 77 us against 53).
        column.take(where, 0, out, "clip")
    else:
        out[...] = column[where]  # the other byte order
    return out


def are_alike(columns: Sequence[Any]) -> bool:
    """Whether the rows of these columns are numbers of one dtype and shape, in plain memory.

    Example:
        >>> are_alike([np.zeros((3, 2)), np.ones((4, 2))]), are_alike([np.zeros((3, 2)), [1, 2]])
        (True, False)
    """
    first = columns[0]
    plain = is_gathered if isinstance(first, np.ndarray) else is_column
    return all(plain(c) and c.dtype == first.dtype and c.shape[1:] == first.shape[1:] for c in columns)


def merge_rows(columns: Sequence[Any], rows: Sequence[Int64s], positions: Sequence[Int64s], empty: Empty) -> Any:
    """Rows of several columns that are alike, put together in one batch: what a shuffled ``a + b`` reads.

    256 rows of 3x32x32 uint8 from two parts: 72 us, by samples 220, from one part 57.

    Args:
        columns: one of each part.
        rows: where in each column.
        positions: where each part's rows stand in the batch.
        empty: gives the memory.

    Example:
        >>> columns = np.arange(3), np.arange(3) * 10
        >>> merge_rows(columns, [np.array([2]), np.array([1])], [np.array([1]), np.array([0])], np.empty)
        array([10,  2])
    """
    batch, out = _new_rows(columns[0], sum(map(len, rows)), empty)
    for column, where, place in zip(columns, rows, positions, strict=True):
        out[place] = _rows_of(column).take(where, 0, mode="clip")
    return batch
