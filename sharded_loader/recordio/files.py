"""The RecordIO format: many byte strings in one file, read at any offset, written in a row.

A ``.rec`` file is a row of records, nothing else. All numbers are little-endian, all offsets multiples of 4::

    | magic 0xced7230a | flag << 29 | length | payload, `length` bytes | 0 to 3 zero bytes |
      4 bytes            4 bytes                                         up to a multiple of 4

``flag`` 0 is a whole record. A payload that contains the magic number at a multiple of 4 is cut there. So
the magic at a multiple of 4 of the file always begins a part. The first part has flag 1, those between 2, the
last 3. The four bytes of the magic are dropped at each cut and put back by the reader.

Reading: a ``RecordFile`` owns one descriptor and reads at positions (``os.pread``), so that all threads share
it; each process opens its own, after a fork as after unpickling. A descriptor is closed by ``close()``, or when
its owner is collected, once the last thread has finished its read.
Writing: one ``os.write`` per record and index line, nothing buffered: a killed writer leaves at most its last
record incomplete, and a forked child has nothing to write twice.

Many records at once: a run of records is one read. A shuffled batch is one read per record, in the order of the file,
or for several that lie within `GAP` bytes. The size of a record is not known before its header is read: until then it
is taken to reach to the next record of the index, and corrected as records are read. A read may not show a whole
record: a payload cut at magics, a record of more than `LARGE` bytes, damage. Then `RecordFile.read` reads the record,
and names the damage. Where records are large on average, all are read by it: a call for each then costs nothing beside
its bytes.

What can go wrong: a truncated or corrupt file raises `RecordIOError` with file and offset at the damaged record;
all records before it stay readable. A length is compared with the file's size before memory is allocated. A file that
is read by offsets is watched: if it is replaced or written again, that is an error too. It may be appended to.

The format is that of dmlc-core, as MXNet writes it. The classes for users are in `sharded_loader.recordio`.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, BinaryIO, TypeVar

import numpy as np

from sharded_loader.extend import Int64s
from sharded_loader.recordio.positioned import BINARY, PositionedFile, checksums, settled

MAGIC_NUMBER = 0xCED7230A
_MAGIC = struct.pack("<I", MAGIC_NUMBER)
_HEAD = struct.Struct("<II")
HEAD_SIZE = _HEAD.size
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_LENGTH_BITS = 29
MAX_LENGTH = (1 << _LENGTH_BITS) - 1
Key = TypeVar("Key")

GAP = 256
"""Bytes between two records that are read in vain: a read costs 0.6 us."""

LARGE = 1 << 18
"""A record that reaches further is read by itself: an index may list only a few records of a file."""

LARGE_MEAN = 1 << 15
"""Bytes of an average record; above, they are made one by one: memory for a large buffer costs more than the reads."""


def padded(length: Any) -> Any:
    """How many bytes of the file a payload of this length takes; also of an array of lengths."""
    return (length + 3) & ~3


class RecordIOError(ValueError):
    """A ``.rec`` file is truncated, corrupt, or no RecordIO file.

    Attributes:
        path: the file.
        offset: where the damaged record begins. The records before it are readable.
        problem: what is wrong there, and what to do.

    Example:
        >>> error = RecordIOError("letters.rec", 12, "the file ends at 20, within a record")
        >>> error.offset, str(error)
        (12, 'letters.rec, offset 12: the file ends at 20, within a record')
    """

    def __init__(self, path: str, offset: int, problem: str) -> None:
        super().__init__(path, offset, problem)
        self.path, self.offset, self.problem = path, offset, problem

    def __str__(self) -> str:
        return f"{self.path}, offset {self.offset}: {self.problem}"


class Closable(AbstractContextManager):  # type: ignore[type-arg]
    """A ``with`` block closes it at the end."""

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(self, *raised: object) -> None:
        self.close()


# -- reading -----------------------------------------------------------------------------------------------------------


class RecordBytes:
    """Bytes of a file of records that lie in memory, for `read_record`.

    Args:
        path: of the file, for errors.
        size: where in the file the bytes end.
        content: the bytes. For `scan_records` none are needed.
    """

    def __init__(self, path: str, size: int, content: bytes = b"") -> None:
        self.path, self.size, self._content, self._begin = path, size, content, size - len(content)

    def refresh_size(self) -> int:
        """Where the bytes end."""
        return self.size

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset`` of the file; fewer only at the end."""
        return self._content[offset - self._begin : offset - self._begin + size]


class _Descriptor(PositionedFile):
    """An open file of records."""

    __slots__ = ("path", "pid", "size")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path, self.pid = path, os.getpid()
        if stat.S_ISDIR(self.stat().st_mode):  # Linux notices it at the first read, without the path
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self.refresh_size()

    def refresh_size(self) -> int:
        """The size now: the file may still be written to."""
        self.size = self.stat().st_size
        return self.size

    def bytes_at(self, offset: int, size: int) -> bytes:
        if offset > self.size and offset > self.refresh_size():
            return b""  # no system knows offsets near 2**63
        return super().bytes_at(offset, size)


_Source = RecordBytes | _Descriptor


def read_record(source: _Source, begin: int) -> tuple[bytes, int]:
    """The record at ``begin``, and the offset of the next.

    Raises:
        RecordIOError: there is no whole record.
    """
    offset, whole = begin, io.BytesIO()  # a list of parts would take many times the bytes of small parts
    while True:
        flag, length, end = _part(source, source.bytes_at(offset, HEAD_SIZE), offset, begin, source.size)
        payload = source.bytes_at(offset + HEAD_SIZE, length)
        if len(payload) < length:
            ends = offset + HEAD_SIZE + len(payload)
            raise _damaged(source, begin, f"the file was truncated to {ends} bytes while it was read")
        if flag == _WHOLE:
            return payload, end
        whole.write(payload if flag == _FIRST else _MAGIC + payload)
        if flag == _LAST:
            return whole.getvalue(), end
        offset = end


def scan_records(source: _Source, stream: BinaryIO, offsets: list[int] | None = None) -> list[int]:
    """The offset of each record.

    Args:
        source: says how large the file is.
        stream: the file, from its beginning. Its buffer should hold many small records.
        offsets: the list to append to. After an error its last item is the offset of the damaged record.

    Raises:
        RecordIOError: the file is damaged.
    """
    offsets = [] if offsets is None else offsets
    begin = offset = 0
    size = source.refresh_size()
    while begin < size:
        if offset == begin:
            offsets.append(begin)
        stream.seek(offset)
        flag, _, offset = _part(source, stream.read(HEAD_SIZE), offset, begin, size)
        if flag in (_WHOLE, _LAST):
            begin = offset
    return offsets


def _part(source: _Source, head: bytes, offset: int, begin: int, size: int) -> tuple[int, int, int]:
    """Flag, length and end of the part that has this header at ``offset``, in a file of at least this size.

    ``begin`` is where its record begins. Raises a `RecordIOError` if such a part cannot stand there.
    """
    if len(head) < HEAD_SIZE:
        size = source.refresh_size()
        where = "within a record" if begin < size else "before it"
        raise _damaged(source, begin, f"the file ends at {size}, {where}")
    magic, word = _HEAD.unpack(head)
    if magic != MAGIC_NUMBER:
        raise _damaged(source, begin, f"no record at {offset}: 0x{magic:08x} stands for the magic 0x{MAGIC_NUMBER:x}")
    flag, length = word >> _LENGTH_BITS, word & MAX_LENGTH
    if flag > _LAST or (flag in (_WHOLE, _FIRST)) != (offset == begin):
        raise _damaged(source, begin, f"the part at {offset} has flag {flag}, which is not allowed there")
    end = offset + HEAD_SIZE + padded(length)
    if end > size and end > (size := source.refresh_size()):
        raise _damaged(source, begin, f"the part at {offset} says {length} bytes, the file ends at {size}")
    return flag, length, end


def _damaged(source: _Source, offset: int, problem: str) -> RecordIOError:
    advice = (
        "The file is truncated or corrupt here, the records before this offset are readable; copy or write it "
        "again. If the offset comes from an .idx of another file, delete the .idx to have it rebuilt."
    )
    return RecordIOError(source.path, offset, f"{problem}. {advice if offset else 'Is it a RecordIO file?'}")


class RecordFile:
    """Reads records at given offsets, from any thread and any process. Pickles as its path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.closed = False
        self._descriptor: _Descriptor | None = _Descriptor(self.path)
        self._version: tuple[int, list[int]] | None = None  # size when it was watched first, and its checksums
        self._seen: tuple[int, ...] = ()  # size, times and inode when it was last found to be that version

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_descriptor": None}

    def close(self) -> None:
        self.closed = True
        self._descriptor = None

    def _open(self) -> _Descriptor:
        descriptor = self._descriptor
        if descriptor is None or descriptor.pid != os.getpid():
            if self.closed:
                raise ValueError(f"{self.path} is closed: read before close(), or open it again")
            descriptor = self._descriptor = _Descriptor(self.path)
            if self.closed:  # by another thread, in the meantime
                self._descriptor = None
        return descriptor

    def read_stretches(self, offsets: list[int], sizes: list[int]) -> list[bytes]:
        """From each offset up to its size in bytes; fewer only at the end of the file."""
        file = self._open()
        pieces = list(map(file.read, sizes, offsets))
        return pieces if list(map(len, pieces)) == sizes else list(map(file.bytes_at, offsets, sizes))

    def watch(self) -> None:
        """From now on, `check` raises if the file is another one."""
        settled(self.path)
        file = self._open()
        found = file.stat()
        self._seen = _seen(found)
        self._version = found.st_size, checksums(file.bytes_at, found.st_size)

    def check(self) -> None:
        """Raise if the file was written again since `watch`, or the one that this process opened is another one.

        What was added or cut off is no change of the rest.
        """
        file = self._descriptor
        if file is None or self._version is None:  # closed by another thread, or not watched
            return
        found = file.stat()
        if self._seen != _seen(found):
            size, content = self._version
            left = checksums(file.bytes_at, size, found.st_size)
            if left != content[: len(left)]:
                text = "the file was replaced or written again since it was opened: open it again"
                raise RecordIOError(self.path, 0, text)
            self._seen = _seen(found)

    @property
    def size(self) -> int:
        """Bytes in the file, now."""
        return self._open().refresh_size()

    def read(self, begin: int) -> tuple[bytes, int]:
        """The record at ``begin``, and the offset of the next."""
        return read_record(self._open(), begin)

    def scan(self, stacklevel: int) -> list[int]:
        """The offset of each record.

        If the file is damaged, the last offset is that of the damaged record: who reads it gets the error. A warning
        says so, with this ``stacklevel``. If the first record is damaged, the error is raised here.
        """
        offsets: list[int] = []
        try:
            with open(self.path, "rb") as stream:
                scan_records(self._open(), stream, offsets)
        except RecordIOError as error:
            if not error.offset:
                raise
            text = f"While its index was rebuilt, {len(offsets) - 1} records were found before; the next one raises"
            warnings.warn(f"{error} {text} when it is read.", stacklevel=stacklevel)
        return offsets


def _seen(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


# -- many records at once ----------------------------------------------------------------------------------------------


def guessed_sizes(offsets: Int64s) -> Int64s:
    """How many bytes to read for each record: up to the next one of the index, at most `LARGE`.

    Example:
        >>> guessed_sizes(np.array([40, 0, 12])).tolist()
        [262144, 12, 28]
    """
    begins = np.unique(offsets)
    gaps: Int64s = np.minimum(np.diff(begins, append=begins[-1:]), LARGE)
    gaps[-1:] = LARGE
    return gaps[np.searchsorted(begins, offsets)]


def read_records(file: RecordFile, offsets: Int64s, sizes: Int64s) -> tuple[list[bytes], Int64s]:
    """The records at these offsets, and how many bytes each takes in the file.

    Args:
        file: where they are.
        offsets: int64, in any order, also several times the same.
        sizes: int64, how many bytes to read for each; a guess.

    Returns:
        The records in the order of ``offsets``, and their sizes with header and padding: ``sizes`` itself where the
        guesses were right.

    Raises:
        RecordIOError: the first that is damaged or is no record.
    """
    if not len(offsets):
        return [], sizes
    limits = np.minimum(sizes, file.size - offsets)
    if np.add.reduce(limits) > LARGE_MEAN * len(limits):
        found = [file.read(offset) for offset in offsets.tolist()]
        return [record for record, _ in found], np.array([following for _, following in found]) - offsets
    if not (offsets[1:] - offsets[:-1] - limits[:-1]).any() and limits[-1] >= HEAD_SIZE:  # one after the other
        begin, order = int(offsets[0]), None
        buffer = file.read_stretches([begin], [int(offsets[-1] + limits[-1]) - begin])[0]
        begins = offsets - begin
    else:
        inside = np.flatnonzero(limits >= HEAD_SIZE)
        order = inside[np.argsort(offsets[inside], kind="stable")]
        limits = limits[order]
        buffer, begins = _read_stretches(file, offsets[order], limits)
    lengths, all_as_guessed = _stored_lengths(buffer, begins, limits)
    starts = begins + HEAD_SIZE
    if order is not None:
        starts, lengths = _scattered(starts, order, len(offsets)), _scattered(lengths, order, len(offsets))
    records = [buffer[start:end] for start, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
    if all_as_guessed and len(begins) == len(offsets):
        return records, sizes
    sizes = padded(lengths) + HEAD_SIZE
    for number in np.flatnonzero(lengths < 0).tolist():
        records[number], following = file.read(int(offsets[number]))
        sizes[number] = following - offsets[number]
    return records, sizes


def _scattered(values: Int64s, places: Int64s, length: int) -> Int64s:
    """The values at their places, -1 elsewhere."""
    out = np.full(length, -1, np.int64)
    out[places] = values
    return out


def _read_stretches(file: RecordFile, begins: Int64s, sizes: Int64s) -> tuple[bytes, Int64s]:
    """What lies in the file at ascending offsets, and where each begins in the buffer."""
    if not len(begins):
        return b"", begins
    ends = begins + sizes
    first = np.concatenate(([0], np.flatnonzero(begins[1:] > ends[:-1] + GAP) + 1))
    offsets = begins[first]
    counts = np.maximum.reduceat(ends, first) - offsets
    buffer = b"".join(file.read_stretches(offsets.tolist(), counts.tolist()))
    moved = np.cumsum(counts) - counts - offsets
    return buffer, begins + np.repeat(moved, np.diff(first, append=len(begins)))


def _stored_lengths(buffer: bytes, begins: Int64s, limits: Int64s) -> tuple[Int64s, bool]:
    """The payload's length of each record that lies whole in the buffer, from its header, -1 for others; and whether
    each reaches just to its limit."""
    if not len(begins) or len(buffer) < begins[-1] + limits[-1] or np.bitwise_or.reduce(begins) & 3:
        # Nothing is there, or (the file was truncated just now) not where it is looked for, or not by words.
        return np.full_like(begins, -1), False
    words = np.frombuffer(buffer, "<u4", len(buffer) // 4)
    heads = begins >> 2
    lengths = words[heads + 1].astype(np.int64)  # of a part, the flag in the upper bits makes it exceed any limit
    is_head = words[heads] == MAGIC_NUMBER
    taken = padded(lengths) + HEAD_SIZE
    if np.logical_and.reduce(is_head & (taken == limits)):
        return lengths, True
    return np.where(is_head & (taken <= limits), lengths, -1), False


# -- writing -----------------------------------------------------------------------------------------------------------


class Writer:
    """A file that this process alone writes, unbuffered. Closes when it is collected."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = -1
        self.path = os.path.abspath(os.fspath(path))
        self._pid = os.getpid()
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
        self.offset = 0

    def check(self) -> None:
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed: write before close()")
        if self._pid != os.getpid():
            text = f"was opened for writing by process {self._pid}, this is process {os.getpid()}"
            advice = "two writers would overwrite each other. Write in one process, or one file per process"
            raise RuntimeError(f"{self.path} {text}: {advice}")

    def write(self, data: bytes) -> None:
        """Appends all of `data`, or nothing if anything is raised (a full disk, Ctrl-C)."""
        self.check()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            os.ftruncate(self._fd, self.offset)
            os.lseek(self._fd, self.offset, os.SEEK_SET)
            raise
        self.offset += len(data)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def framed(payload: bytes) -> bytes:
    """The bytes of a record as they stand in the file."""
    parts = [payload]
    if _MAGIC in payload:
        words = np.frombuffer(payload, "<u4", len(payload) // 4)
        cuts = (4 * np.flatnonzero(words == MAGIC_NUMBER)).tolist()
        parts = [payload[begin + 4 : end] for begin, end in pairwise([-4, *cuts, len(payload)])]
    flags = [_WHOLE] if len(parts) == 1 else [_FIRST, *[_MIDDLE] * (len(parts) - 2), _LAST]
    pieces = []
    for flag, part in zip(flags, parts, strict=True):
        pieces += [_HEAD.pack(MAGIC_NUMBER, flag << _LENGTH_BITS | len(part)), part, bytes(-len(part) % 4)]
    return b"".join(pieces)


def is_written(part: bytes, record: bytes) -> bool:
    """Whether a writer makes these bytes of the record: zeros fill it up, and no part begins within another."""
    if len(part) == HEAD_SIZE + padded(len(record)):
        has_one_part = np.count_nonzero(np.frombuffer(part, "<u4") == MAGIC_NUMBER) == 1
        return bool(has_one_part) and not part[HEAD_SIZE + len(record) :].strip(b"\0")
    return framed(record) == part


# -- indexes -----------------------------------------------------------------------------------------------------------


def index_line(key: object, offset: int) -> str:
    """A line of an index."""
    return f"{key}\t{offset}\n"


def load_index(path: str, key_type: Callable[[str], Key]) -> tuple[list[Key], list[int]]:
    """Keys and offsets, in the order of the file's lines."""
    keys, offsets = [], []
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            key, _, offset = line.rstrip("\r\n").partition("\t")
            try:
                if line.strip():
                    keys.append(key_type(key))
                    if not offset.strip(" ").isdecimal() or int(offset) >= 1 << 63:  # int() takes underscores and tabs
                        raise ValueError(f"the offset {offset!r} is no number below 2**63")
                    offsets.append(int(offset))
            except (ValueError, TypeError) as error:
                kind, advice = getattr(key_type, "__name__", key_type), "or delete the file to have it rebuilt"
                said = f"is no line 'key<TAB>offset' with a key of type {kind} ({str(error)[:200]})"
                text = f"{path}, line {number}: {line[:80]!r} {said}. Give another key_type, {advice}."
                raise ValueError(text) from error
    return keys, offsets
