"""Shards of tables, Parquet and Arrow, which are read and decoded in groups of rows; columns of other libraries.

    Parquet().read(file, index, rows) -> [{"image": b"...", "label": 3}, ...]
    Parquet().pick(file, index, ascending rows) -> the columns of these rows, per group
    batch_of(groups, positions, empty) -> {"image": [b"...", b"...", ...], "label": array}
    column_values(series, name) -> array                       for `ArrayDataset`, and the columns of groups

A group is a Parquet row group or an Arrow record batch. A row costs as much as its group, so each process caches
decoded groups (`DecodedGroups`); shuffle such shards in windows (`ShardShuffleSampler`).

A sample is a dict of columns: numbers are NumPy scalars or arrays, strings and bytes Python's, nulls None (NaT for
dates and times), lists with nulls Python lists. Types depend on the schema alone, never on neighbouring rows.

pyarrow's readers crash if two threads share one, so one thread at a time decodes a shard. Files are read, not mapped: a
truncated mapping would kill the process with SIGBUS. Counting the rows of an Arrow file reads its footer and one small
column, or once all of a file that has none, or whose batches are small (`FAR`). An Arrow stream has no footer, so it is
read once; batches with dictionaries may depend on all earlier ones.
"""

from __future__ import annotations

import contextlib
import io
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from sharded_loader import default_batchify_fn
from sharded_loader.extend import Empty, Int64s
from sharded_loader.extend.data import NOT_IN_BULK, NUMBERS, checked_indices, elide, in_fields, is_gathered
from sharded_loader.extend.tools import pass_on
from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.indexes import Index, by_part, in_order

KEPT, KEPT_BYTES = 2, 1 << 30
"""Decoded groups to keep per process; more only up to ``KEPT_BYTES``: the default window of 16 groups of 64 MB."""

OBJECT_BYTES = 64
"""Approximate overhead of a Python string or list in a decoded column."""

FAR = 1 << 20
"""Bytes per record batch above which counting rows seeks; below, a whole read takes fewer requests and less time."""

MAGIC = b"ARROW1"
"""First bytes of an Arrow file that is not a stream."""

Columns = dict[str, Any]
"""Arrays and lists of equal length, by name."""


class DecodedGroups:
    """LRU cache of decoded groups, safe for threads."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self._groups: OrderedDict[object, tuple[Columns, int]] = OrderedDict()

    def find(self, key: object) -> Columns | None:
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
            return self._groups.get(key, (None, 0))[0]

    def keep(self, key: object, columns: Columns, nbytes: int) -> Columns:
        with self._lock:
            self._groups[key] = columns, nbytes
            self._bytes += nbytes
            while len(self._groups) > KEPT and self._bytes > KEPT_BYTES:
                self._bytes -= self._groups.popitem(last=False)[1][1]
        return columns


class TableFormat:
    """Base class of table formats; ``columns`` are the decoded ones, None for all."""

    name = ""
    suffixes: tuple[str, ...] = ()
    scans = False
    columns: tuple[str, ...] | None = None
    _count_rows: Callable[[ShardFile], tuple[Any, Index]]  # rows per group, and further arrays of the index
    _read_group: Callable[[ShardFile, Index, int], Any]  # a group as an Arrow table

    def with_columns(self, names: Iterable[str]) -> TableFormat:
        """Return a copy that decodes only these columns."""
        found = copy(self)
        found.columns = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else ()
        if not found.columns or not all(isinstance(name, str) for name in found.columns):
            raise TypeError(f"columns is {names!r}: give a list of the names of columns")
        found.columns = tuple(dict.fromkeys(found.columns))
        return found

    def index(self, file: ShardFile) -> Index:
        said = f"{file.name} is not a valid {self.name} file, or damaged within bytes 0 to {file.size} ("
        with _damage_named(file, said, "): give its format"):
            counts, more = self._count_rows(file)
            return {"ends": np.cumsum(counts), "length": np.array(counts.sum()), **more}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[dict[str, Any]]:
        order, groups = by_part(np.array(rows, np.int64), index["ends"])
        samples: list[dict[str, Any]] = []
        for group, inside in groups:
            columns = self._group(file, index, group)
            samples += [{name: column[row] for name, column in columns.items()} for row in inside.tolist()]
        return in_order(order, samples)

    def pick(self, file: ShardFile, index: Index, rows: Int64s) -> list[Columns]:
        """Return the columns of ascending rows, per group."""
        _, groups = by_part(rows, index["ends"])
        return [select_rows(self._group(file, index, group), inside) for group, inside in groups]

    def _group(self, file: ShardFile, index: Index, number: int) -> Columns:
        # One reader per shard took 0.20 s for 8,000 rows in order by 4 threads on 2 cores, one per thread 0.29 s. Two
        # alternating shards: 0.12 and 0.11 s. Windows: 0.25 and 0.21 s (medians of 4, which vary by a factor of 3).
        kept: DecodedGroups = file.shared.get("groups") or file.shared.setdefault("groups", DecodedGroups())
        lock = file.kept.get("lock") or file.kept.setdefault("lock", threading.Lock())
        key = lock, number  # unique to this open file: a later one may have other bytes
        found = kept.find(key)
        if found is None:
            with lock:  # decoded by another thread meanwhile?
                found = kept.find(key) or kept.keep(key, *self._decoded(file, index, number))
        return found

    def _decoded(self, file: ShardFile, index: Index, number: int) -> tuple[Columns, int]:
        """Decode a group. Return it with its approximate size in bytes."""
        end = operator.index(index["ends"][number])
        begin = operator.index(index["ends"][number - 1]) if number else 0
        with _damage_named(file, f"{file.name} is damaged, or was cut: rows {begin} to {end} cannot be read (", ")"):
            table = self._read_group(file, index, number)
            table.validate(full=True)  # 70 us for 1,000 rows of 0.7 MB, which take 20 ms to read, decode and stack
            if table.num_rows != end - begin:
                raise ValueError(f"there are {table.num_rows} rows")
            names = self.columns or table.schema.names
            found = {name: _column(table.column(name), name) for name in names}
            return found, sum(_bytes_of(found[name], table.column(name)) for name in names)

    def _check_names(self, file: ShardFile, names: Sequence[str]) -> None:
        for name in self.columns or names:
            if (found := names.count(name)) != 1:
                known = elide(sorted(one for one in set(names) if names.count(one) == 1), 20)
                raise ShardError(
                    f"{file.name} has {found} columns {name!r}: give columns= names of its columns, {known}"
                )


class Parquet(TableFormat):
    """Format of ``.parquet`` shards."""

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")

    def _count_rows(self, file: ShardFile) -> tuple[Any, Index]:
        from pyarrow import parquet  # before reading, in case it is missing

        tail = _footer(file)
        metadata = parquet.read_metadata(io.BytesIO(b"PAR1" + tail))
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if sum(counts) != metadata.num_rows or min(counts, default=0) < 0:
            raise ValueError(f"its groups have {sum(counts)} rows, and the whole {metadata.num_rows}")
        return np.array(counts, np.int64), {"footer": np.frombuffer(tail, np.uint8)}

    def _read_group(self, file: ShardFile, index: Index, number: int) -> Any:
        if (opened := file.kept.get("table")) is None:
            from pyarrow import parquet

            metadata = parquet.read_metadata(io.BytesIO(b"PAR1" + index["footer"].tobytes()))
            # Unbuffered for some columns: pyarrow reads whole column chunks, and a buffer would read into the others.
            stream = file.stream() if self.columns is None else file.stream().detach()
            opened = parquet.ParquetFile(stream, metadata=metadata, page_checksum_verification=True)
            self._check_names(file, opened.schema_arrow.names)
            file.kept["table"] = opened
        return opened.read_row_group(number, self.columns, use_threads=False)


def _footer(file: ShardFile) -> bytes:
    """Return the footer of a Parquet file, with its length and magic number."""
    [tail] = file.ranges([file.size - file.guess], [file.size])
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if not tail.endswith(b"PAR1") or length > file.size:
        raise ValueError(f"its end is missing at byte {file.size}")
    return tail[-length:] if length <= len(tail) else file.ranges([file.size - length], [file.size])[0]


class Arrow(TableFormat):
    """Format of ``.arrow`` and ``.feather`` shards: Arrow IPC files (version 2) and streams."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather")
    scans = True

    def _count_rows(self, file: ShardFile) -> tuple[Any, Index]:
        import pyarrow

        stream: Any = file.stream().detach()
        index = Index()
        if stream.read(len(MAGIC)) == MAGIC:
            opened = pyarrow.ipc.open_file(stream)
            small = [number for number, kind in enumerate(opened.schema.types) if pyarrow.types.is_primitive(kind)]
            options = pyarrow.ipc.IpcReadOptions(included_fields=(small or [0])[:1], use_threads=False)
            if not small or file.size < FAR * opened.num_record_batches:
                stream = file.stream()
            opened = pyarrow.ipc.open_file(stream, options=options)
            counts = [opened.get_batch(number).num_rows for number in range(opened.num_record_batches)]
        else:
            stream = file.stream()
            opened = pyarrow.ipc.open_stream(stream)
            counts, ends = [], [stream.tell()]
            for batch in opened:
                counts.append(batch.num_rows)
                ends.append(stream.tell())
            if not ends[-1] < stream.tell() == file.size or any(file.ranges([file.size - 4], [file.size])[0]):
                raise ValueError(f"there is no whole batch, and no end, at byte {ends[-1]}")
            needs_all = "dictionary<" in str(opened.schema.types)
            index = {"begins": np.array([ends[0]] * len(counts) if needs_all else ends[:-1]), "stops": np.array(ends)}
        for number in np.flatnonzero(np.array(counts) == 0).tolist():  # never read later, but 0 may be damage
            self._read_group(file, index, number).validate(full=True)
        return np.array(counts, np.int64), index

    def _read_group(self, file: ShardFile, index: Index, number: int) -> Any:
        import pyarrow

        if "begins" in index:
            begins, stops = index["begins"].tolist(), index["stops"].tolist()
            parts = file.ranges([0, begins[number]], [stops[0], stops[number + 1]])
            batches = pyarrow.ipc.open_stream(b"".join(parts))
            for _ in range(number if begins[number] == begins[0] else 0):
                batches.read_next_batch()
            batch = batches.read_next_batch()
            self._check_names(file, batch.schema.names)
        else:
            if (opened := file.kept.get("table")) is None:  # another thread may close the file
                stream = file.stream().detach()
                opened = pyarrow.ipc.open_file(stream)
                names = opened.schema.names
                self._check_names(file, names)
                if self.columns is not None:  # nothing of the others is read
                    fields = list(map(names.index, self.columns))
                    opened = pyarrow.ipc.open_file(stream, options=pyarrow.ipc.IpcReadOptions(included_fields=fields))
                file.kept["table"] = opened
            batch = opened.get_batch(number)
        return batch if self.columns is None else batch.select(self.columns)


@contextlib.contextmanager
def _damage_named(file: ShardFile, before: str, after: str) -> Iterator[None]:
    """Raise all errors of pyarrow, which have several base classes, as a `ShardError`."""
    try:
        yield
    except ImportError:
        raise ShardError(f"{file.name} is read by pyarrow, which is not installed: pip install pyarrow") from None
    except ShardError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ShardError(f"{before}{said}{after}, or copy it again") from None


def _column(column: Any, name: str) -> Any:
    """Decode a column. Numbers keep the schema's dtype, also where some are null."""
    if hasattr(column.type, "index_type"):  # a dictionary, whose values may be null
        column = column.cast(column.type.value_type)
    if not column.null_count or not is_gathered(column_values(column[:0], name)):
        return column_values(column, name)
    values = iter(column_values(column.drop_null(), name))
    return [next(values) if has_value else None for has_value in column.is_valid().to_pylist()]


def _bytes_of(decoded: Any, column: Any) -> int:
    return int(decoded.nbytes if is_gathered(decoded) else column.nbytes + OBJECT_BYTES * len(column))


def select_rows(columns: Columns, rows: Int64s) -> Columns:
    """Select rows of columns.

    Example:
        >>> select_rows({"x": np.array([5, 6]), "y": ["a", "b"]}, np.array([1]))
        {'x': array([6]), 'y': ['b']}
    """
    return {
        name: [column[row] for row in rows.tolist()] if type(column) is list else column.take(rows, 0)
        for name, column in columns.items()
    }


def batch_of(groups: Sequence[Columns], where: Int64s, empty: Empty) -> Any:
    """Collate rows of groups as the default rules do; return `NOT_IN_BULK` if their columns differ.

    ``where`` has the position in the batch of each row; ``empty`` allocates the arrays.

    Example:
        >>> batch_of([{"x": np.array([5, 6]), "y": ["a", "b"]}], np.array([1, 0]), np.empty)
        {'x': array([6, 5]), 'y': ['b', 'a']}
    """
    names = list(groups[0])
    if any(list(of) != names for of in groups):
        return NOT_IN_BULK
    parts = [[of[name] for of in groups] for name in names]
    return dict(zip(names, in_fields(names, "[{!r}]", repeat(partial(_in_place, where)), parts, empty), strict=True))


def _in_place(where: Int64s, parts: Sequence[Any], empty: Empty) -> Any:
    """Build one column of a batch from parts whose values go to the positions ``where``."""
    if is_gathered(parts[0]) and len({(getattr(of, "dtype", None), np.shape(of)[1:]) for of in parts}) == 1:
        out = empty((len(where), *parts[0].shape[1:]), parts[0].dtype)
        out[where] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return out
    return default_batchify_fn.assemble(in_order(where, chain.from_iterable(parts)), empty)


# -- columns of other libraries ----------------------------------------------------------------------------------------


def column_values(value: Any, name: str) -> Any:
    """Convert a Series or an Arrow column to a NumPy array, or a list; any other array to `ArrayRows`.

    ``name`` is its name in errors: ValueError for missing values, which an array of the dtype cannot hold.
    """
    kind = type(value)
    convert = next((convert for method, convert in _SERIES.items() if hasattr(kind, method)), None)
    return ArrayRows(value) if convert is None or not hasattr(kind, "to_numpy") else convert(value, name)


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


def _pandas_values(series: Any, name: str) -> Any:
    # Nullable and Arrow dtypes have a matching NumPy dtype, which to_numpy() uses only if nothing is missing.
    dtype = getattr(getattr(series, "dtype", None), "numpy_dtype", None)
    if dtype is None or np.dtype(dtype).kind not in NUMBERS:
        values = series.to_numpy()
        missing = np.asarray(series.isna()) if values.dtype == object else np.zeros(0, bool)
        if missing.any() and set(map(type, values[~missing])) == {str}:
            return np.where(missing, None, values)  # a text that is missing is None, as in a Parquet file
        return values
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
    if hasattr(arrow_type, "run_end_type") or "month_day_nano_interval" in str(arrow_type):
        return column.to_pylist()  # to_numpy() of the latter kills the process
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


_SERIES = {"iloc": _pandas_values, "to_pylist": _arrow_values, "null_count": _polars_values}
"""Conversions of columns, by a method that only the columns of one library have."""


def _check_complete(name: str, missing: int, dtype: object, fill: str) -> None:
    if missing:
        text = f"{name} has {missing} missing values, which an array of {dtype} cannot hold"
        raise ValueError(f"{text}: fill them, {fill}, or give a column of its own that says which values are missing")
