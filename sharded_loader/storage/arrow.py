"""Where the record batches of an Arrow file lie, and whether its buffers are where they should be, without pyarrow.

    messages(stream, size)  -> rows of kind, begin, end, number, adds: one for each message
    needed(messages, batch) -> the rows that decode a record batch: the schema, its dictionaries, the batch
    check_layout(message)   -> ValueError if the buffers of a message do not lie end to end
    check_nulls(message, columns) -> ValueError if a column has nulls, and its damaged head says that it has none

An IPC file is an IPC stream between a mark and a footer. A message is a marker, the size of its head, the head (a
FlatBuffer) and a body of buffers. pyarrow takes each buffer from where the head says: damage gives it other bytes.

What can go wrong: ValueError or struct.error for a damaged file; the caller names the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, BinaryIO

import numpy as np

from sharded_loader.data.bulk import Int64s

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
MARK, MAGIC = b"\xff\xff\xff\xff", b"ARROW1"
PADDING = 64
"""Bytes to which writers pad each buffer, at most."""


def messages(stream: BinaryIO, size: int) -> Int64s:
    """One row for each message: kind, begin, end, number, adds.

    The number is that of the rows of a batch, or the id of a dictionary. ``adds`` is 1 if it adds to the dictionary.
    """
    is_file = stream.read(6) == MAGIC
    at, end = (8, _end(stream, size)) if is_file else (0, size)
    found: list[tuple[int, ...]] = []
    while at < end:
        stream.seek(at)
        first = stream.read(8)
        begin, length = _head(first)
        if found and length == 0 and at + begin == end:
            return np.array(found, np.int64).reshape(-1, 5)
        stream.seek(at + begin)
        head = stream.read(length) if 0 < length < end - at else b""
        if len(head) != length or not head:
            break
        kind, table, body = _message(head)
        number, adds = _number(head, table, 0, "<q"), _number(head, table, 2, "<?") if kind == DICTIONARY else 0
        after = at + begin + length + body
        if not SCHEMA <= kind <= BATCH or (kind == SCHEMA) == bool(found) or min(body, number, end - after) < 0:
            break
        found.append((kind, at, after, number if kind != SCHEMA else 0, int(adds)))
        at = after
    if found and is_file and at == end:  # old writers end without a mark
        return np.array(found, np.int64).reshape(-1, 5)
    raise ValueError(f"there is no whole message at byte {at}")


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
        at, size = struct.unpack_from("<qq", head, vector + 4 + 16 * number)
        if size and column.null_count == 0:
            bits = np.unpackbits(np.frombuffer(message, np.uint8, size, body + at), bitorder="little")
            if not bits[: len(column)].all():
                raise ValueError("its head says that a column has no nulls, but it has some")


def _end(stream: BinaryIO, size: int) -> int:
    """Where the footer of an IPC file begins."""
    stream.seek(max(0, size - 10))
    tail = stream.read(10)
    end = size - 10 - int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or end < 8:
        raise ValueError(f"its end is missing at byte {size}")
    return end


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
    at = _field(head, table, field)
    return struct.unpack_from(kind, head, at)[0] if at else 0


def _inside(head: bytes, table: int, field: int) -> int:
    """Where the table or vector begins that a field points to."""
    at = _field(head, table, field)
    if not at:
        raise ValueError("a part of its head is missing")
    return at + int(struct.unpack_from("<I", head, at)[0])
