"""Parquet and Arrow shards: tables, of which a group of rows is read and decoded at once.

    Parquet().read(file, index, rows) -> [{"image": b"...", "label": 3}, ...]

The unit of a Parquet file is the row group, and of an Arrow file the record batch. To read one row costs as much as to
read its group, so the last `KEPT` groups of a shard stay decoded. Shuffle such shards in windows
(`ShardShuffleSampler`).

A sample is a dict of its columns: numbers as NumPy scalars or arrays, strings and bytes as Python's, nulls as None.

pyarrow's readers crash if two threads use one. So one thread at a time decodes a shard, and the others take the group
that it has decoded. Files are read, and not mapped: a mapped file that is cut ends the process with SIGBUS.

What can go wrong: pyarrow is not installed, the file is of another format or damaged. All are a `ShardError`, which
names the rows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from sharded_loader.data.columns import as_column
from sharded_loader.storage import arrow
from sharded_loader.storage.errors import ShardError
from sharded_loader.storage.files import ShardFile
from sharded_loader.storage.indexes import Index

KEPT = 2
"""Decoded groups that stay in memory, for each open shard."""


class _Table:
    """The format of a file of tables."""

    name = ""
    suffixes: tuple[str, ...] = ()

    def index(self, file: ShardFile) -> Index:
        """How many rows each group has."""
        try:
            counts, more = self._counted(file)
        except ImportError:
            raise ShardError(f"{file.name} is read by pyarrow, which is not installed: pip install pyarrow") from None
        except ShardError:
            raise
        except Exception as error:  # pyarrow's errors have several bases
            raise ShardError(
                f"{file.name} is no {self.name} file, or is damaged within bytes 0 to {file.size} "
                f"({_line(error)}): give its format, or copy it again"
            ) from None
        return {"ends": np.cumsum(counts), "length": np.array(counts.sum()), **more}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """The samples at these rows of the shard."""
        ends, where = index["ends"], np.array(rows, np.int64)
        groups = np.searchsorted(ends, where, side="right")
        samples: list[Any] = [None] * len(rows)
        for number in dict.fromkeys(groups.tolist()):
            here = np.flatnonzero(groups == number)
            columns = self._group(file, index, number)
            begin = int(ends[number - 1]) if number else 0
            for place, row in zip(here.tolist(), (where[here] - begin).tolist(), strict=True):
                samples[place] = {name: column[row] for name, column in columns.items()}
        return samples

    def _group(self, file: ShardFile, index: Index, number: int) -> dict[str, Any]:
        """The columns of a group, decoded."""
        # 8,000 rows by 4 threads on 2 cores, in order: 0.20 s, with a reader per thread 0.29 s; two shards in turns:
        # 0.12 and 0.11 s; in windows: 0.25 and 0.21 s (medians of 4, which spread by a factor of 3).
        with file.kept.setdefault("lock", threading.Lock()):
            kept: OrderedDict[int, dict[str, Any]] = file.kept.setdefault("groups", OrderedDict())
            if number not in kept:
                kept[number] = self._decoded(file, index, number)
                while len(kept) > KEPT:
                    kept.popitem(last=False)
            return kept[number]

    def _decoded(self, file: ShardFile, index: Index, number: int) -> dict[str, Any]:
        end = int(index["ends"][number])
        begin = int(index["ends"][number - 1]) if number else 0
        try:
            table = self._take(file, index, number)
            table.validate(full=True)  # 70 us for 1,000 rows of 0.7 MB, which take 20 ms to read, decode and stack
            if table.num_rows != end - begin:
                raise ValueError(f"there are {table.num_rows} rows")
            return {name: _column(table.column(name), name) for name in table.schema.names}
        except ImportError:
            raise
        except Exception as error:  # pyarrow's errors have several bases
            raise ShardError(
                f"{file.name} is damaged, or was cut: rows {begin} to {end} cannot be read ({_line(error)}). "
                "Copy it again"
            ) from None

    def _counted(self, file: ShardFile) -> tuple[Any, Index]:
        """How many rows each group has, and what else the index keeps."""
        raise NotImplementedError

    def _take(self, file: ShardFile, index: Index, number: int) -> Any:
        raise NotImplementedError


class Parquet(_Table):
    """The format of ``.parquet`` shards."""

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")

    def _open(self, file: ShardFile) -> Any:
        if "table" not in file.kept:
            from pyarrow import parquet

            file.kept["table"] = parquet.ParquetFile(file.stream(), page_checksum_verification=True)
        return file.kept["table"]

    def _counted(self, file: ShardFile) -> tuple[Any, Index]:
        metadata = self._open(file).metadata
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if sum(counts) != metadata.num_rows or min(counts, default=0) < 0:
            raise ValueError(f"its groups have {sum(counts)} rows, and the whole {metadata.num_rows}")
        return np.array(counts, np.int64), {}

    def _take(self, file: ShardFile, index: Index, number: int) -> Any:
        return self._open(file).read_row_group(number, use_threads=False)


class Arrow(_Table):
    """The format of ``.arrow`` and ``.feather`` shards: Arrow's IPC files (version 2) and IPC streams."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather")

    def _counted(self, file: ShardFile) -> tuple[Any, Index]:
        import pyarrow

        found = arrow.messages(file.stream(), file.size)
        [head] = file.ranges(*found[:1, 1:3].T.tolist())
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(head))
        if file.ranges([0], [len(arrow.MAGIC)]) == [arrow.MAGIC]:
            footer = pyarrow.ipc.open_file(file.stream())
            if footer.schema != schema or footer.num_record_batches != (found[:, 0] == arrow.BATCH).sum():
                raise ValueError("its footer does not fit")
        counts = found[found[:, 0] == arrow.BATCH, 3]
        for number in np.flatnonzero(counts == 0).tolist():  # they are not read later: a damaged length may be 0
            self._take(file, {"messages": found}, number).validate(full=True)
        return counts, {"messages": found}

    def _take(self, file: ShardFile, index: Index, number: int) -> Any:
        import pyarrow

        where = arrow.needed(index["messages"], number)
        parts = file.ranges(where[:, 1].tolist(), where[:, 2].tolist())
        for part in parts:
            arrow.check_layout(part)
        batch = pyarrow.ipc.open_stream(b"".join(parts)).read_next_batch()
        arrow.check_nulls(parts[-1], batch.columns)
        return batch


def _line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _column(column: Any, name: str) -> Any:
    try:
        return as_column(column, name)
    except ValueError:  # it has nulls
        return column.to_pylist()
