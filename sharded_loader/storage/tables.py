"""Shards that are tables, Parquet and Arrow: a group of rows is read and decoded at once.

    Parquet().read(file, index, rows) -> [{"image": b"...", "label": 3}, ...]
    Parquet().pick(file, index, ascending rows) -> the columns of these rows, for each group that has some
    batch_of(groups, positions, empty) -> {"image": [b"...", b"...", ...], "label": array}

The unit of a Parquet file is the row group, and of an Arrow file the record batch. To read one row costs as much as to
read its group, so a process keeps groups decoded (`DecodedGroups`), up to `KEPT_BYTES`. Shuffle such shards in windows
(`ShardShuffleSampler`). A batch is made of columns, without a dict for each row. It takes its rows out of one group
after the other, so it never holds them all.

A sample is a dict of its columns: numbers as NumPy scalars or arrays, strings and bytes as Python's, nulls as None (of
dates and times as NaT). Its types come from the schema alone, never from the rows beside it. A list with a null inside
is Python's list.

pyarrow's readers crash if two threads use one. So one thread at a time decodes a shard, and the others take the group
that it has decoded. Files are read, and not mapped: a mapped file that is cut ends the process with SIGBUS.

pyarrow counts the rows of an Arrow file by reading all of it, so this module finds the messages of the file by itself:

    messages(_Pieces(file)) -> rows of kind, begin, end, number, adds: one for each message
    needed(messages, batch) -> the rows that decode a record batch: the schema, its dictionaries, the batch

An IPC file is an IPC stream between a mark and a footer. A message is a marker, the size of its head, the head (a
FlatBuffer) and a body of buffers.

What can go wrong: pyarrow is not installed, the file is of another format or damaged. All are a `ShardError`, which
names the rows.
"""

from __future__ import annotations

import contextlib
import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, in_fields, some
from sharded_loader.data.bulk import NOT_IN_BULK, Int64s, is_gathered
from sharded_loader.data.columns import as_column
from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.indexes import Index, by_part, in_order

KEPT, KEPT_BYTES = 2, 1 << 30
"""Decoded groups that a process keeps: more than ``KEPT`` only up to ``KEPT_BYTES``. That is the default window of 16
groups, of 64 MB each."""

OBJECT_BYTES = 64
"""About what Python adds to each string or list of a decoded column."""

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
MARK, MAGIC = b"\xff\xff\xff\xff", b"ARROW1"

Columns = dict[str, Any]
"""Arrays and lists of the same length, by name."""


class DecodedGroups:
    """The groups that a process keeps decoded. Those that were not read for longest go first. Threads may share it."""

    def __init__(self) -> None:
        self._lock, self._bytes = threading.Lock(), 0
        self._groups: OrderedDict[object, tuple[Columns, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._groups)

    def find(self, key: object) -> Columns | None:
        """A group; None if it is not kept."""
        with self._lock:
            if key not in self._groups:
                return None
            self._groups.move_to_end(key)
            return self._groups[key][0]

    def keep(self, key: object, columns: Columns, nbytes: int) -> None:
        """Keep a group that is not kept yet."""
        with self._lock:
            self._groups[key] = columns, nbytes
            self._bytes += nbytes
            while len(self._groups) > KEPT and self._bytes > KEPT_BYTES:
                self._bytes -= self._groups.popitem(last=False)[1][1]


class TableFormat:
    """The format of a file of tables.

    Attributes:
        columns: which columns are decoded; None: all.
    """

    name = ""
    suffixes: tuple[str, ...] = ()
    scans = False
    columns: tuple[str, ...] | None = None

    def with_columns(self, names: Iterable[str]) -> TableFormat:
        """The format that decodes only these columns."""
        found = copy(self)
        found.columns = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else ()
        if not found.columns or not all(isinstance(name, str) for name in found.columns):
            raise TypeError(f"columns is {names!r}: give a list of the names of columns")
        found.columns = tuple(dict.fromkeys(found.columns))
        return found

    def index(self, file: ShardFile) -> Index:
        """How many rows each group has."""
        said = f"{file.name} is no {self.name} file, or is damaged within bytes 0 to {file.size} ("
        with _damage_named(file, said, "): give its format"):
            counts, more = self._counted(file)
            return {"ends": np.cumsum(counts), "length": np.array(counts.sum()), **more}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[dict[str, Any]]:
        """The samples at these rows of the shard."""
        order, groups = by_part(np.array(rows, np.int64), index["ends"])
        samples: list[dict[str, Any]] = []
        for group, inside in groups:
            columns = self._group(file, index, group)
            samples += [{name: column[row] for name, column in columns.items()} for row in inside.tolist()]
        return in_order(order, samples)

    def pick(self, file: ShardFile, index: Index, rows: Int64s) -> list[Columns]:
        """The columns of ascending rows of the shard, of one group after the other."""
        _, groups = by_part(rows, index["ends"])
        return [taken(self._group(file, index, group), inside) for group, inside in groups]

    def _group(self, file: ShardFile, index: Index, number: int) -> Columns:
        """A group, decoded."""
        # 8,000 rows by 4 threads on 2 cores, in order: 0.20 s, with a reader per thread 0.29 s; two shards in turns:
        # 0.12 and 0.11 s; in windows: 0.25 and 0.21 s (medians of 4, which spread by a factor of 3).
        kept: DecodedGroups = file.shared.get("groups") or file.shared.setdefault("groups", DecodedGroups())
        lock = file.kept.get("lock") or file.kept.setdefault("lock", threading.Lock())
        key = lock, number  # of this opened file: a later one may have other bytes
        found = kept.find(key)
        if found is None:
            with lock:
                found = kept.find(key)  # another thread may have decoded it
                if found is None:
                    found, nbytes = self._decoded(file, index, number)
                    kept.keep(key, found, nbytes)
        return found

    def _decoded(self, file: ShardFile, index: Index, number: int) -> tuple[Columns, int]:
        """A group, and about how many bytes it takes."""
        end = int(index["ends"][number])
        begin = int(index["ends"][number - 1]) if number else 0
        with _damage_named(file, f"{file.name} is damaged, or was cut: rows {begin} to {end} cannot be read (", ")"):
            table = self._take(file, index, number)
            table.validate(full=True)  # 70 us for 1,000 rows of 0.7 MB, which take 20 ms to read, decode and stack
            if table.num_rows != end - begin:
                raise ValueError(f"there are {table.num_rows} rows")
            names = self.columns or table.schema.names
            found = {name: _column(table.column(name), name) for name in names}
            return found, sum(_bytes_of(found[name], table.column(name)) for name in names)

    def _check_names(self, file: ShardFile, names: Sequence[str]) -> None:
        for name in self.columns or names:
            if names.count(name) != 1:
                found = "several columns" if name in names else "no column"
                known = some(sorted(one for one in set(names) if names.count(one) == 1), 20)
                advice = f"give columns= names of its columns, {known}"
                raise ShardError(f"{file.name} has {found} {name!r}: {advice}")

    def _counted(self, file: ShardFile) -> tuple[Any, Index]:
        """How many rows each group has, and what else the index keeps."""
        raise NotImplementedError

    def _take(self, file: ShardFile, index: Index, number: int) -> Any:
        raise NotImplementedError


class Parquet(TableFormat):
    """The format of ``.parquet`` shards."""

    name = "parquet"
    suffixes: tuple[str, ...] = (".parquet", ".pq")

    def _counted(self, file: ShardFile) -> tuple[Any, Index]:
        from pyarrow import parquet  # first: without it, no byte is read

        tail = footer(file, b"PAR1")
        metadata = parquet.read_metadata(io.BytesIO(b"PAR1" + tail))
        counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        if sum(counts) != metadata.num_rows or min(counts, default=0) < 0:
            raise ValueError(f"its groups have {sum(counts)} rows, and the whole {metadata.num_rows}")
        return np.array(counts, np.int64), {"footer": np.frombuffer(tail, np.uint8)}

    def _take(self, file: ShardFile, index: Index, number: int) -> Any:
        if "table" not in file.kept:
            from pyarrow import parquet

            metadata = parquet.read_metadata(io.BytesIO(b"PAR1" + index["footer"].tobytes()))
            # pyarrow reads each chunk of a column at once. A buffer would read on, into columns that are not needed.
            stream = file.stream() if self.columns is None else file.stream().detach()
            opened = parquet.ParquetFile(stream, metadata=metadata, page_checksum_verification=True)
            self._check_names(file, opened.schema_arrow.names)
            file.kept["table"] = opened
        return file.kept["table"].read_row_group(number, self.columns, use_threads=False)


class Arrow(TableFormat):
    """The format of ``.arrow`` and ``.feather`` shards: Arrow's IPC files (version 2) and IPC streams."""

    name = "arrow"
    suffixes: tuple[str, ...] = (".arrow", ".feather")

    def _counted(self, file: ShardFile) -> tuple[Any, Index]:
        import pyarrow

        pieces = _Pieces(file)
        found = messages(pieces)
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(pieces.at(*found[0, 1:3].tolist())))
        if pieces.is_file:
            whole = pyarrow.ipc.open_file(pyarrow.py_buffer(MAGIC.ljust(8, b"\0") + pieces.footer))
            if whole.schema != schema or whole.num_record_batches != (found[:, 0] == BATCH).sum():
                raise ValueError("its footer does not fit")
        counts = found[found[:, 0] == BATCH, 3]
        for number in np.flatnonzero(counts == 0).tolist():  # they are not read later: a damaged length may be 0
            self._take(file, {"messages": found}, number).validate(full=True)
        return counts, {"messages": found}

    def _take(self, file: ShardFile, index: Index, number: int) -> Any:
        import pyarrow

        where = needed(index["messages"], number)
        parts = file.ranges(where[:, 1].tolist(), where[:, 2].tolist())
        batch = pyarrow.ipc.open_stream(b"".join(parts)).read_next_batch()
        self._check_names(file, batch.schema.names)
        return batch if self.columns is None else batch.select(self.columns)


@contextlib.contextmanager
def _damage_named(file: ShardFile, before: str, after: str) -> Iterator[None]:
    """Raise what is wrong with a shard as a `ShardError`. pyarrow's errors have several bases."""
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
    """A column whose numbers have the dtype of its schema, also where some of them are null."""
    if hasattr(column.type, "index_type"):  # a dictionary, whose values may be null too
        column = column.cast(column.type.value_type)
    if not column.null_count or not is_gathered(as_column(column[:0], name)):
        return as_column(column, name)
    values = iter(as_column(column.drop_null(), name))
    return [next(values) if has_value else None for has_value in column.is_valid().to_pylist()]


def _bytes_of(decoded: Any, column: Any) -> int:
    """About how many bytes a decoded column takes."""
    return int(decoded.nbytes if is_gathered(decoded) else column.nbytes + OBJECT_BYTES * len(column))


def taken(columns: Columns, rows: Int64s) -> Columns:
    """Some rows of columns.

    Example:
        >>> taken({"x": np.array([5, 6]), "y": ["a", "b"]}, np.array([1]))
        {'x': array([6]), 'y': ['b']}
    """
    return {
        name: [column[row] for row in rows.tolist()] if type(column) is list else column.take(rows, 0)
        for name, column in columns.items()
    }


def batch_of(groups: Sequence[Columns], where: Int64s, empty: Empty) -> Any:
    """The batch that the default rules make of the rows of groups; `NOT_IN_BULK` if their columns differ.

    Args:
        groups: the columns of rows of each.
        where: the position in the batch of each row.
        empty: gives the memory.

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
    """One column of a batch, out of parts whose values belong at the positions ``where``."""
    if is_gathered(parts[0]) and len({(getattr(of, "dtype", None), np.shape(of)[1:]) for of in parts}) == 1:
        out = empty((len(where), *parts[0].shape[1:]), parts[0].dtype)
        out[where] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return out
    return default_batchify_fn.assemble(in_order(where, chain.from_iterable(parts)), empty)


# -- heads and footers -------------------------------------------------------------------------------------------------


def footer(file: ShardFile, mark: bytes) -> bytes:
    """The end of a file: a footer, its length in four bytes, and a mark."""
    [tail] = file.ranges([file.size - file.guess], [file.size])
    length = int.from_bytes(tail[-4 - len(mark) : -len(mark)], "little") + 4 + len(mark)
    if not tail.endswith(mark) or length > file.size:
        raise ValueError(f"its end is missing at byte {file.size}")
    return tail[-length:] if length <= len(tail) else file.ranges([file.size - length], [file.size])[0]


class _Pieces:
    """The heads of the messages of an Arrow file, without what lies between them.

    Of an IPC file, the footer says where they are, so they are read at once. In a stream, each message says where the
    next one begins.

    Attributes:
        is_file: whether it is an IPC file; otherwise a stream.
        begin, end: where the messages lie.
        footer: of an IPC file, with its length and mark.
    """

    def __init__(self, file: ShardFile) -> None:
        self._file, self.begin, self.end, self.footer = file, 0, file.size, b""
        self._known = {0: file.ranges([0], [file.guess])[0]}
        self.is_file = self._known[0].startswith(MAGIC)
        if self.is_file:
            self.footer = footer(file, MAGIC)
            self.begin, self.end = 8, file.size - len(self.footer)
            spans = [(begin, end) for begin, end in _blocks(self.footer) if 0 <= begin < end <= self.end]
            begins, ends = [begin for begin, _ in spans], [end for _, end in spans]
            self._known.update(zip(begins, file.ranges(begins, ends), strict=True))

    def at(self, begin: int, end: int) -> bytes:
        """These bytes, as far as they lie before the end of the messages."""
        end = min(end, self.end)
        for known in (begin, 0):
            piece = self._known.get(known, b"")
            if end <= known + len(piece):
                return piece[begin - known : end - known]
        return self._file.ranges([begin], [end])[0]


def _blocks(tail: bytes) -> list[tuple[int, int]]:
    """Where the heads of batches and dictionaries lie, as the footer of an IPC file says."""
    (root,) = struct.unpack_from("<I", tail)
    found: list[tuple[int, int]] = []
    for field in (2, 3):
        if _field(tail, root, field):
            vector = _inside(tail, root, field)
            (count,) = struct.unpack_from("<I", tail, vector)
            kind = [("begin", "<i8"), ("head", "<i4"), ("", "<i4"), ("body", "<i8")]
            rows = np.frombuffer(tail, kind, count, vector + 4)
            found += zip(rows["begin"].tolist(), (rows["begin"] + rows["head"]).tolist(), strict=True)
    return found


# -- messages of Arrow files -------------------------------------------------------------------------------------------


def messages(pieces: _Pieces) -> Int64s:
    """One row for each message: kind, begin, end, number, adds.

    The number is that of the rows of a batch, or the id of a dictionary. ``adds`` is 1 if it adds to the dictionary.
    """
    offset, end, guess = pieces.begin, pieces.end, 512
    found: list[tuple[int, ...]] = []
    while offset < end:
        head = pieces.at(offset, offset + guess)
        begin, length = _head(head)
        if found and length == 0 and offset + begin == end:
            return np.array(found, np.int64).reshape(-1, 5)
        if 0 < length < end - offset and begin + length > len(head):
            head = pieces.at(offset, offset + begin + length)
        guess = begin + max(0, min(length, 1 << 16))  # the heads of most batches are equally long
        head = head[begin : begin + max(0, length)]
        if len(head) != length or not head:
            break
        kind, table, body = _message(head)
        number, adds = _number(head, table, 0, "<q"), _number(head, table, 2, "<?") if kind == DICTIONARY else 0
        after = offset + begin + length + body
        if not SCHEMA <= kind <= BATCH or (kind == SCHEMA) == bool(found) or min(body, number, end - after) < 0:
            break
        found.append((kind, offset, after, number if kind != SCHEMA else 0, int(adds)))
        offset = after
    if found and pieces.is_file and offset == end:  # old writers end without a mark
        return np.array(found, np.int64).reshape(-1, 5)
    raise ValueError(f"there is no whole message at byte {offset}")


def needed(rows: Int64s, batch: int) -> Int64s:
    """The rows of `messages` that decode a record batch, in their order."""
    last = int(np.flatnonzero(rows[:, 0] == BATCH)[batch])
    kept: dict[int, list[int]] = {}
    for position in np.flatnonzero(rows[:last, 0] == DICTIONARY).tolist():
        _, _, _, number, adds = rows[position].tolist()
        kept[number] = [*(kept.get(number, []) if adds else []), position]
    return rows[[0, *sorted(position for chain in kept.values() for position in chain), last]]


def _head(message: bytes) -> tuple[int, int]:
    """Where the head of a message begins, and how long it is. Writers before 2019 leave the mark out."""
    begin = 8 if message[:4] == MARK else 4
    return begin, struct.unpack_from("<i", message, begin - 4)[0]


def _message(head: bytes) -> tuple[int, int, int]:
    """The kind of a message, where its table lies, and the length of its body."""
    (root,) = struct.unpack_from("<I", head)
    return _number(head, root, 1, "<B"), _inside(head, root, 2), _number(head, root, 3, "<q")


def _field(head: bytes, table: int, field: int) -> int:
    """Where a field of a FlatBuffer's table lies; 0 if the table has none."""
    start = table - struct.unpack_from("<i", head, table)[0]
    (size,) = struct.unpack_from("<H", head, start)
    offset = struct.unpack_from("<H", head, start + 4 + 2 * field)[0] if 4 + 2 * field < size else 0
    return table + offset if offset else 0


def _number(head: bytes, table: int, field: int, kind: str) -> Any:
    offset = _field(head, table, field)
    return struct.unpack_from(kind, head, offset)[0] if offset else 0


def _inside(head: bytes, table: int, field: int) -> int:
    """Where the table or vector begins that a field points to."""
    offset = _field(head, table, field)
    if not offset:
        raise ValueError("a part of its head is missing")
    return offset + int(struct.unpack_from("<I", head, offset)[0])
