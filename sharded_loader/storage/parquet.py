"""Parquet and Arrow shards: tables, of which a group of rows is read and decoded at once.

    Parquet().read(file, index, rows) -> [{"image": b"...", "label": 3}, ...]

The unit of a Parquet file is the row group, and of an Arrow file the record batch. To read one row costs as much as to
read its group, so the last `KEPT` groups of a shard stay decoded. Shuffle such shards in windows
(`ShardShuffleSampler`).

A sample is a dict of its columns: numbers as NumPy scalars or arrays, strings and bytes as Python's, nulls as None.

What can go wrong: pyarrow is not installed, no Parquet file. Both are a `ShardError`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from sharded_loader.data.columns import as_column
from sharded_loader.storage.files import ShardFile
from sharded_loader.storage.indexes import Index
from sharded_loader.storage.stores import ShardError

KEPT = 2
"""Decoded groups that stay in memory, for each open shard."""


class _Table:
    """The format of a file of tables."""

    name = ""
    suffixes: tuple[str, ...] = ()

    def index(self, file: ShardFile) -> Index:
        """How many rows each group has."""
        counts = np.array(self._counts(self._open(file)), np.int64)
        return {"ends": np.cumsum(counts), "length": np.array(counts.sum())}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """The samples at these rows of the shard."""
        ends, where = index["ends"], np.array(rows, np.int64)
        groups = np.searchsorted(ends, where, side="right")
        samples: list[Any] = [None] * len(rows)
        for number in dict.fromkeys(groups.tolist()):
            here = np.flatnonzero(groups == number)
            columns = self._group(file, number)
            begin = int(ends[number - 1]) if number else 0
            for place, row in zip(here.tolist(), (where[here] - begin).tolist(), strict=True):
                samples[place] = {name: column[row] for name, column in columns.items()}
        return samples

    def _group(self, file: ShardFile, number: int) -> dict[str, Any]:
        """The columns of a group, decoded."""
        kept: OrderedDict[int, dict[str, Any]] = file.kept.setdefault("groups", OrderedDict())
        found = kept.get(number)
        if found is None:
            table = self._take(self._open(file), number)
            found = {name: _column(table.column(name), name) for name in table.schema.names}
            kept[number] = found
            while len(kept) > KEPT:
                kept.popitem(last=False)
        return found

    def _open(self, file: ShardFile) -> Any:
        if "table" not in file.kept:
            try:
                file.kept["table"] = self._opened(file)
            except ImportError:
                raise ShardError(
                    f"{file.name} is read by pyarrow, which is not installed: pip install pyarrow"
                ) from None
            except (ValueError, OSError) as error:  # pyarrow's errors are these
                if isinstance(error, ShardError):
                    raise
                raise ShardError(f"{file.name} is no {self.name} file ({error}): give its format") from None
        return file.kept["table"]

    def _opened(self, file: ShardFile) -> Any:
        raise NotImplementedError

    def _counts(self, table: Any) -> list[int]:
        raise NotImplementedError

    def _take(self, table: Any, number: int) -> Any:
        raise NotImplementedError


class Parquet(_Table):
    """The format of ``.parquet`` shards."""

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")

    def _opened(self, file: ShardFile) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(file.path or file.stream(), memory_map=file.path is not None)

    def _counts(self, table: Any) -> list[int]:
        return [table.metadata.row_group(number).num_rows for number in range(table.metadata.num_row_groups)]

    def _take(self, table: Any, number: int) -> Any:
        return table.read_row_group(number, use_threads=False)


class Arrow(_Table):
    """The format of ``.arrow`` and ``.feather`` shards (Arrow's IPC files, version 2)."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather")

    def _opened(self, file: ShardFile) -> Any:
        import pyarrow

        return pyarrow.ipc.open_file(pyarrow.memory_map(file.path) if file.path else file.stream())

    def _counts(self, table: Any) -> list[int]:
        return [table.get_batch(number).num_rows for number in range(table.num_record_batches)]

    def _take(self, table: Any, number: int) -> Any:
        return table.get_batch(number)


def _column(column: Any, name: str) -> Any:
    try:
        return as_column(column, name)
    except ValueError:  # it has nulls
        return column.to_pylist()
