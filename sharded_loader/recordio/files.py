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

What can go wrong: a truncated or corrupt file raises `RecordIOError` with file and offset at the damaged record;
all records before it stay readable. A length is compared with the file's size before memory is allocated. A file that
is read by offsets is watched: if it is replaced or written again, that is an error too. It may be appended to.

The format is that of dmlc-core, as MXNet writes it. The classes for users are in `sharded_loader.recordio`.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import stat
import struct
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from sharded_loader.data.files import BINARY, PositionedFile, checksums, is_rewritten, settled, tag_of

if TYPE_CHECKING:
    from typing_extensions import Self

MAGIC_NUMBER = 0xCED7230A
_MAGIC = struct.pack("<I", MAGIC_NUMBER)
_HEAD = struct.Struct("<II")
HEAD_SIZE = _HEAD.size
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_LENGTH_BITS = 29
MAX_LENGTH = (1 << _LENGTH_BITS) - 1


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
        self.path = path
        self.offset = offset
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}, offset {self.offset}: {self.problem}"


class Closable:
    """A ``with`` block closes it at the end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

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
    offset = begin
    while True:
        flag, length, end = _part(source, source.bytes_at(offset, HEAD_SIZE), offset, begin, source.size)
        payload = source.bytes_at(offset + HEAD_SIZE, length)
        if len(payload) < length:
            ends = offset + HEAD_SIZE + len(payload)
            raise _damaged(source, begin, f"the file was truncated to {ends} bytes while it was read")
        if flag == _WHOLE:
            return payload, end
        if flag == _FIRST:
            whole = io.BytesIO(payload)  # a list of parts would take many times the bytes of small parts
            whole.seek(0, os.SEEK_END)
        else:
            whole.write(_MAGIC + payload)
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
        self._version: tuple[str, int, list[int]] | None = None  # tag; size when it was opened, and its checksums
        self._seen: tuple[int, ...] = ()  # size and times when it was last found to be that version

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_descriptor": None, "_machine": platform.node()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_machine") != platform.node():
            state["_version"] = None  # another machine has a copy, with another time and inode
        vars(self).update(state)

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
        self._seen = found.st_size, found.st_mtime_ns, found.st_ctime_ns
        self._version = tag_of(found), found.st_size, checksums(file.bytes_at, found.st_size)

    def check(self) -> None:
        """Raise if the file was written again since `watch`, or the one that this process opened is another one. What
        was cut off is no change of the rest."""
        file = self._descriptor
        if file is None or self._version is None:  # closed by another thread, or not watched
            return
        tag, size, content = self._version
        for pause in (0.05, 0.0):
            found = file.stat()
            seen = found.st_size, found.st_mtime_ns, found.st_ctime_ns
            if self._seen == seen:
                return
            has_other_length = found.st_size != self._seen[0] and found.st_ino == int(tag.split()[1])
            if has_other_length or (found.st_size == self._seen[0] and not is_rewritten(tag, tag_of(found))):
                left = checksums(file.bytes_at, size, found.st_size)
                if left == content[: len(left)]:
                    self._seen, self._version = seen, (tag_of(found), size, content)
                    return
                break
            time.sleep(pause)  # while records are appended, a system may set the time before the size
        raise RecordIOError(self.path, 0, "the file was replaced or written again since it was opened: open it again")

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
            warnings.warn(
                f"{error} While its index was rebuilt, {len(offsets) - 1} records were found before; the next one "
                "raises when it is read.",
                stacklevel=stacklevel,
            )
        return offsets


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
            raise RuntimeError(
                f"{self.path} was opened for writing by process {self._pid}, this is process {os.getpid()}: "
                "two writers would overwrite each other. Write in one process, or one file per process."
            )

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
    parts = []
    begin = at = 0
    while (at := payload.find(_MAGIC, at)) >= 0:
        if at % 4:
            at += 1
        else:
            parts.append(payload[begin:at])
            begin = at = at + len(_MAGIC)
    parts.append(payload[begin:] if begin else payload)
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


def index_line(key: Any, offset: int) -> str:
    """A line of an index."""
    return f"{key}\t{offset}\n"


def load_index(path: str, key_type: Callable[[str], Any]) -> tuple[list[Any], list[int]]:
    """Keys and offsets, in the order of the file's lines."""
    keys, offsets = [], []
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            key, _, offset = line.rstrip("\r\n").partition("\t")
            try:
                keys.append(key_type(key))
                if not offset.strip(" ").isdecimal() or int(offset) >= 1 << 63:  # int() takes underscores and tabs
                    raise ValueError(f"the offset {offset!r} is no number below 2**63")
                offsets.append(int(offset))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: {line[:80]!r} is no line 'key<TAB>offset' with a key of type "
                    f"{getattr(key_type, '__name__', key_type)} ({str(error)[:200]}). Give another key_type, or delete "
                    "the file to have it rebuilt."
                ) from error
    return keys, offsets
