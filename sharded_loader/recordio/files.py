"""The RecordIO format of dmlc-core and MXNet: byte strings in one file, read at any offset, appended by a writer.

A ``.rec`` file is a sequence of records. Numbers are little-endian, offsets multiples of 4::

    | magic 0xced7230a | flag << 29 | length | payload, `length` bytes | 0 to 3 zero bytes |
      4 bytes            4 bytes                                         up to a multiple of 4

Flag 0 is a whole record. Payloads that contain the magic at a multiple of 4 are split there into parts with the flags
1, 2, ..., 2, 3, and the magic is dropped. So the magic at a multiple of 4 always begins a part.

`RecordFile` owns one descriptor per process and uses positioned reads, so threads share it. It closes with its last
reference. `Writer` writes each record and index line at once, unbuffered: a killed writer leaves at most its last
record incomplete, and a forked child has nothing buffered to write twice.

`read_records` merges records that are at most `GAP` bytes apart into one read. Sizes are guessed from the index;
records that do not fit their guess, or are damaged, are read again one by one. If guesses are large on average, because
the records are, or because the index lists few of them, all are read one by one.

Damage is a `RecordIOError` at the damaged record. Lengths are checked against the file size before memory is allocated.
Files that are read by offsets are watched: it is an error if they are replaced or rewritten, but not if they grow.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, BinaryIO, TypeVar

import numpy as np

from sharded_loader.extend import Int64s
from sharded_loader.extend.tools import warn
from sharded_loader.recordio.positioned import BINARY, PositionedFile, checksums, regular, stable_stat, write_at

MAGIC_NUMBER = 0xCED7230A
_MAGIC = struct.pack("<I", MAGIC_NUMBER)
_HEAD = struct.Struct("<II")
HEAD_SIZE = _HEAD.size
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_LENGTH_BITS = 29
MAX_LENGTH = (1 << _LENGTH_BITS) - 1
Key = TypeVar("Key")

GAP = 256
"""Maximum bytes between two records that are read together: a read costs 0.6 us."""

LARGE_MEAN = 1 << 15
"""Mean size above which records are read one by one: memory for a large buffer costs more than the calls."""


def padded(length: Any) -> Any:
    """Return the bytes that a payload takes in the file, also for an array of lengths."""
    return (length + 3) & ~3


class RecordIOError(ValueError):
    """Error for a ``.rec`` file that is truncated, corrupt, or not RecordIO.

    Attributes:
        path: path of the file.
        offset: beginning of the damaged record. The records before it are readable.
        problem: description and advice.

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
    """Base class of context managers that call ``close``."""

    close: Callable[[], None]

    def __exit__(self, *raised: object) -> None:
        self.close()


# -- reading -----------------------------------------------------------------------------------------------------------


class RecordBytes:
    """Bytes in memory for `read_record`, which end at the offset ``size`` of the file."""

    def __init__(self, path: str, size: int, content: bytes = b"") -> None:
        self.path, self.size, self._content, self._begin = path, size, content, size - len(content)

    def refresh_size(self) -> int:
        return self.size

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset`` of the file; fewer only at the end."""
        return self._content[offset - self._begin : offset - self._begin + size]


class _Descriptor(PositionedFile):
    """Open file of records."""

    __slots__ = ("path", "pid", "size")

    def __init__(self, path: str) -> None:
        self.fd = -1
        super().__init__(path)
        self.path, self.pid = path, os.getpid()
        self.refresh_size()

    def refresh_size(self) -> int:
        """Update the size: the file may still be written to."""
        self.size = self.stat().st_size
        return self.size

    def bytes_at(self, offset: int, size: int) -> bytes:
        if offset > self.size and offset > self.refresh_size():
            return b""  # offsets near 2**63 are system errors
        return super().bytes_at(offset, size)


_Source = RecordBytes | _Descriptor


def read_record(source: _Source, begin: int) -> tuple[bytes, int]:
    """Return the record at ``begin``, and the offset of the next; raise `RecordIOError` if it is damaged."""
    offset, whole = begin, io.BytesIO()  # a list would take many times the memory of small parts
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


def scan_records(source: _Source, stream: BinaryIO) -> Iterator[int]:
    """Yield the offset of each record; that of a damaged one before its `RecordIOError`.

    ``stream`` is the file from its beginning, with a large buffer.
    """
    begin = offset = 0
    size = source.refresh_size()
    while begin < size:
        if offset == begin:
            yield begin
        stream.seek(offset)
        flag, _, offset = _part(source, stream.read(HEAD_SIZE), offset, begin, size)
        if flag in (_WHOLE, _LAST):
            begin = offset


def _part(source: _Source, head: bytes, offset: int, begin: int, size: int) -> tuple[int, int, int]:
    """Return flag, length and end of the part with this header at ``offset``, of the record at ``begin``.

    Raises `RecordIOError` if such a part is impossible there, in a file of at least ``size`` bytes.
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
    """Reader of records by offset, from any thread and process. Pickled as its path."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.closed = False
        self._descriptor: _Descriptor | None = _Descriptor(self.path)
        self._version: tuple[int, list[int]] | None = None  # size and checksums when `watch` was called
        self._verified: tuple[int, ...] = ()  # size, times and inode when that version was last verified

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
            if self.closed:  # by another thread meanwhile
                self._descriptor = None
        return descriptor

    def read_ranges(self, offsets: list[int], sizes: list[int]) -> list[bytes]:
        """Return the bytes of each range; fewer only at the end of the file."""
        file = self._open()
        pieces = list(map(file.read, sizes, offsets))
        return pieces if list(map(len, pieces)) == sizes else list(map(file.bytes_at, offsets, sizes))

    def index(self, path: str, key_type: Callable[[str], Key]) -> tuple[list[Key], list[int]]:
        """Return keys and offsets of the index at ``path``, or if it is missing, 0, 1, 2, ... and those of a scan.

        The file is watched from now on.
        """
        self.watch()
        if os.path.exists(path):
            keys, places = load_index(path, key_type)
            if repeated := int((np.diff(np.sort(np.array(places, np.int64), kind="stable")) == 0).sum()):
                text = f"{repeated} lines name a record that another line names, which is read for each of them"
                warn(f"{path}: {text}: if that is not meant, it is damaged. Copy it again, or delete it")
            return keys, places
        offsets = self.scan()
        return [key_type(str(number)) for number in range(len(offsets))], offsets

    def watch(self) -> None:
        """Remember this version of the file for `check`."""
        stable_stat(self.path)
        file = self._open()
        found = file.stat()
        self._verified = _stat_key(found)
        self._version = found.st_size, checksums(file.bytes_at, found.st_size)

    def check(self) -> None:
        """Raise an error if the file, or the one that this process opened, is not the version of `watch`.

        Appending and truncating do not count as changes of the rest.
        """
        file = self._descriptor
        if file is None or self._version is None:  # closed by another thread, or `watch` was not called
            return
        found = file.stat()
        if self._verified != _stat_key(found):
            size, content = self._version
            left = checksums(file.bytes_at, size, found.st_size)
            if left != content[: len(left)]:
                text = "the file was replaced or written again since it was opened: open it again"
                raise RecordIOError(self.path, 0, text)
            self._verified = _stat_key(found)

    @property
    def size(self) -> int:
        return self._open().refresh_size()

    def read(self, begin: int) -> tuple[bytes, int]:
        return read_record(self._open(), begin)

    def scan(self) -> list[int]:
        """Return the offset of each record.

        A damaged record ends the scan with a warning. Its offset is the last, so reading it raises the error; if it is
        the first record, the error is raised here.
        """
        offsets: list[int] = []
        try:
            with open(self.path, "rb") as stream:
                for offset in scan_records(self._open(), stream):
                    offsets.append(offset)
        except RecordIOError as error:
            if not error.offset:
                raise
            text = f"While its index was rebuilt, {len(offsets) - 1} records were found before; the next one raises"
            warn(f"{error} {text} when it is read.")
        return offsets


def _stat_key(found: os.stat_result) -> tuple[int, ...]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


# -- many records at once ----------------------------------------------------------------------------------------------


def guessed_sizes(offsets: Int64s, size: int) -> Int64s:
    """Return the bytes to read for each record: up to the next one of the index, or to the end of a file of this size.

    Example:
        >>> guessed_sizes(np.array([40, 0, 12, 70]), 60).tolist()
        [20, 12, 28, 0]
    """
    inside = np.minimum(offsets, size)
    begins = np.unique(np.append(inside, size))
    gaps: Int64s = np.diff(begins, append=size)
    return gaps[np.searchsorted(begins, inside)]


def read_records(file: RecordFile, offsets: Int64s, sizes: Int64s) -> list[bytes]:
    """Read many records, in the order of ``offsets``, which may repeat; ``sizes`` are those of `guessed_sizes`.

    Raises the `RecordIOError` of the first damaged record.
    """
    if not len(offsets) or np.minimum.reduce(sizes) < HEAD_SIZE or np.add.reduce(sizes) > LARGE_MEAN * len(sizes):
        return [file.read(offset)[0] for offset in offsets.tolist()]
    order = offsets.argsort(kind="stable")
    begins, sizes = offsets[order], sizes[order]
    is_first = np.ones(len(order), bool)  # of those that are read together
    np.greater(begins[1:], (begins + sizes)[:-1] + GAP, out=is_first[1:])
    firsts = is_first.nonzero()[0]
    starts = begins[firsts]
    counts = np.maximum.reduceat(begins + sizes, firsts) - starts
    buffer = b"".join(file.read_ranges(starts.tolist(), counts.tolist()))
    begins += (counts.cumsum() - counts - starts)[is_first.cumsum() - 1]
    places = np.empty((2, len(order)), np.int64)
    places[:, order] = begins + HEAD_SIZE, begins + HEAD_SIZE + _stored_lengths(buffer, begins, sizes)
    records = [buffer[begin:end] for begin, end in zip(*places.tolist(), strict=True)]
    for at in (places[1] < places[0]).nonzero()[0].tolist():
        records[at] = file.read(int(offsets[at]))[0]
    return records


def _stored_lengths(buffer: bytes, begins: Int64s, sizes: Int64s) -> Int64s:
    """Return the payload length of each whole record that fits its size, otherwise -1."""
    if len(buffer) < begins[-1] + sizes[-1] or np.bitwise_or.reduce(begins) & 3:  # truncated meanwhile, or not aligned
        return np.full_like(begins, -1)
    words = np.frombuffer(buffer, "<u4", len(buffer) // 4)
    heads = begins >> 2
    lengths = words[heads + 1].astype(np.int64)  # flags of parts, in the upper bits, exceed any size
    is_whole = (words[heads] == MAGIC_NUMBER) & (padded(lengths) + HEAD_SIZE <= sizes)
    return np.where(is_whole, lengths, -1)


# -- writing -----------------------------------------------------------------------------------------------------------


class Writer:
    """Unbuffered file that only this process writes. Closes when it is collected."""

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
        """Append all of ``data``, or nothing if an exception is raised (a full disk, Ctrl-C)."""
        self.check()
        try:
            write_at(self._fd, data, self.offset)
        except BaseException as error:
            os.ftruncate(self._fd, self.offset)
            if isinstance(error, OSError):
                error.filename = self.path
            raise
        self.offset += len(data)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def framed(payload: bytes) -> bytes:
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
    """Return True if these bytes are what a writer makes of the record: padded with zeros, and split at each magic."""
    if len(part) == HEAD_SIZE + padded(len(record)):
        has_one_part = np.count_nonzero(np.frombuffer(part, "<u4") == MAGIC_NUMBER) == 1
        return bool(has_one_part) and not part[HEAD_SIZE + len(record) :].strip(b"\0")
    return framed(record) == part


# -- indexes -----------------------------------------------------------------------------------------------------------


def index_line(key: object, offset: int) -> str:
    return f"{key}\t{offset}\n"


def load_index(path: str, key_type: Callable[[str], Key]) -> tuple[list[Key], list[int]]:
    """Return keys and offsets, in the order of the lines."""
    keys, offsets = [], []
    with open(regular(path), encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            key, _, offset = line.rstrip("\r\n").partition("\t")
            try:
                if line.strip():
                    keys.append(key_type(key))
                    if not offset.strip(" ").isdecimal() or int(offset) >= 1 << 63:  # int() accepts underscores, tabs
                        raise ValueError(f"the offset {offset!r} is not a number below 2**63")
                    offsets.append(int(offset))
            except (ValueError, TypeError) as error:
                kind, advice = getattr(key_type, "__name__", key_type), "or delete the file to have it rebuilt"
                said = f"is not a line 'key<TAB>offset' with a key of type {kind} ({str(error)[:200]})"
                text = f"{path}, line {number}: {line[:80]!r} {said}. Give another key_type, {advice}."
                raise ValueError(text) from error
    return keys, offsets
