"""Shards that are tables, Parquet and Arrow: a group of rows is read and decoded at once.

    Parquet().read(file, index, rows) -> [{"image": b"...", "label": 3}, ...]

The unit of a Parquet file is the row group, and of an Arrow file the record batch. To read one row costs as much as to
read its group, so the last `KEPT` groups of a shard stay decoded. Shuffle such shards in windows
(`ShardShuffleSampler`).

A sample is a dict of its columns: numbers as NumPy scalars or arrays, strings and bytes as Python's, nulls as None.

pyarrow's readers crash if two threads use one. So one thread at a time decodes a shard, and the others take the group
that it has decoded. Files are read, and not mapped: a mapped file that is cut ends the process with SIGBUS.

pyarrow takes each buffer of an Arrow file from where the file says: damage gives it other bytes. So this module finds
and checks the messages of the file by itself:

    messages(_Pieces(file)) -> rows of kind, begin, end, number, adds: one for each message
    needed(messages, batch) -> the rows that decode a record batch: the schema, its dictionaries, the batch
    check_layout(message)   -> ValueError if the buffers of a message do not lie end to end
    check_nulls(message, columns) -> ValueError if a column has nulls, and its damaged head says that it has none

An IPC file is an IPC stream between a mark and a footer. A message is a marker, the size of its head, the head (a
FlatBuffer) and a body of buffers.

What can go wrong: pyarrow is not installed, the file is of another format or damaged. All are a `ShardError`, which
names the rows.
"""

from __future__ import annotations

import io
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharded_loader.data.bulk import Int64s
from sharded_loader.data.columns import as_column
from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.indexes import Index, by_part

KEPT = 2
"""Decoded groups that stay in memory, for each open shard."""

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
MARK, MAGIC = b"\xff\xff\xff\xff", b"ARROW1"
PADDING = 64
"""Bytes to which writers pad each buffer, at most."""


class _TableFormat:
    """The format of a file of tables."""

    name = ""
    suffixes: tuple[str, ...] = ()
    scans = False

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
        samples: list[Any] = [None] * len(rows)
        for group, positions, rows_of_group in by_part(np.array(rows, np.int64), index["ends"]):
            columns = self._group(file, index, group)
            for position, row in zip(positions, rows_of_group, strict=True):
                samples[position] = {name: column[row] for name, column in columns.items()}
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


class Parquet(_TableFormat):
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
            file.kept["table"] = parquet.ParquetFile(file.stream(), metadata=metadata, page_checksum_verification=True)
        return file.kept["table"].read_row_group(number, use_threads=False)


class Arrow(_TableFormat):
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
        for part in parts:
            check_layout(part)
        batch = pyarrow.ipc.open_stream(b"".join(parts)).read_next_batch()
        check_nulls(parts[-1], batch.columns)
        return batch


def _line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _column(column: Any, name: str) -> Any:
    try:
        return as_column(column, name)
    except ValueError:  # it has nulls
        return column.to_pylist()


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
            rows = np.frombuffer(
                tail, [("begin", "<i8"), ("head", "<i4"), ("", "<i4"), ("body", "<i8")], count, vector + 4
            )
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


def check_layout(message: bytes) -> None:
    """Check that the buffers of a message lie end to end, as the format demands."""
    begin, length = _head(message)
    head = message[begin : begin + length]
    kind, table, body = _message(head)
    if kind == SCHEMA:
        return
    if kind == DICTIONARY:
        table = _inside(head, table, 1)
    vector = _inside(head, table, 2)
    (count,) = struct.unpack_from("<I", head, vector)
    begins, lengths = np.frombuffer(head, "<i8", 2 * count, vector + 4).reshape(-1, 2).T
    gaps = np.append(begins, body) - np.append(0, begins + lengths)
    if (lengths < 0).any() or (gaps < 0).any() or (gaps >= PADDING).any():
        raise ValueError("its buffers do not lie end to end")


def check_nulls(message: bytes, columns: Sequence[Any]) -> None:
    """Check the bitmaps of columns that have no nulls by their head: pyarrow ignores these bitmaps.

    Writers leave out such a bitmap, so this takes 2 us for a column. Columns within columns are not checked, nor are
    compressed ones.
    """
    begin, length = _head(message)
    head, body = message[begin : begin + length], begin + length
    table = _message(head)[1]
    vector = _inside(head, table, 2)
    first = np.cumsum([0, *(len(column.buffers()) for column in columns)]).tolist()
    if _field(head, table, 3) or first.pop() != struct.unpack_from("<I", head, vector)[0]:
        return  # compressed; or of a type that has fewer buffers in a file, such as null
    for column, number in zip(columns, first, strict=True):
        offset, size = struct.unpack_from("<qq", head, vector + 4 + 16 * number)
        if size and column.null_count == 0:
            bits = np.unpackbits(np.frombuffer(message, np.uint8, size, body + offset), bitorder="little")
            if not bits[: len(column)].all():
                raise ValueError("its head says that a column has no nulls, but it has some")


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
