"""One shard as bytes by their place: on this machine, or read over the network in parts.

    LocalFile(path) | RemoteFile(store, url, stat)
        .ranges(begins, ends) -> list of bytes        .stream() -> a binary file for libraries that want one

Formats see nothing else, so each of them reads local shards, cached ones and remote ones in the same way. A local file
is held by a descriptor: if somebody deletes it meanwhile, it can still be read (not on Windows, where it cannot be
deleted meanwhile). Threads may share a file; a forked child opens its own.

`local_stat` tells a file from a later one at the same path, by its size, times and inode.

What can go wrong: `ShardError` for a file that is shorter than it was, FileNotFoundError, PermissionError.
"""

from __future__ import annotations

import io
import os
import stat
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from sharded_loader.storage.redacted import shown
from sharded_loader.storage.stores import PIECE, ShardError, Stat, Store

_BINARY = getattr(os, "O_BINARY", 0)

CHECKS, CHECKED = 8, 4096
"""Parts of a file for a checksum, and bytes of each."""

TICK, LONG_TICK = 0.03, 2.0
"""Seconds in which two changes of a file may get the same time: systems count in ticks of up to 16 ms, and some file
systems in whole seconds, or in two."""


class ShardFile(ABC):
    """A file of which any part can be read.

    Attributes:
        name: how errors name it.
        size: in bytes.
        path: where it lies on this machine; None if it does not.
        kept: what a format keeps of the file while it is open.
    """

    name: str
    size: int
    path: str | None = None

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    @abstractmethod
    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Parts of the file, in the order in which they are asked for."""

    def close(self) -> None:
        """Give the file back."""
        self.kept.clear()

    def stream(self) -> io.BufferedReader:
        """The file for libraries that read from a binary file: it seeks, and reads ahead."""
        return io.BufferedReader(_Stream(self), PIECE if self.path is None else 1 << 16)

    def cut(self, begin: int, end: int, found: int) -> ShardError:
        """The error for a part that is not whole."""
        return ShardError(
            f"{self.name} ends within bytes {begin} to {end}, of which {found} are there: it is shorter than when it "
            "was indexed. Copy it again. If it is to be so, make the dataset again, which indexes it again"
        )


class LocalFile(ShardFile):
    """A file of this machine.

    Args:
        path: where it lies.
        name: how errors name it.
    """

    def __init__(self, path: str, name: str | None = None) -> None:
        super().__init__()
        self.path, self.name = path, name or path
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | _BINARY)
        self.size = os.fstat(self._fd).st_size
        self._read: Any = (
            partial(os.pread, self._fd) if hasattr(os, "pread") else partial(_seek_and_read, threading.Lock(), self._fd)
        )

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        return list(map(self._part, begins, ends))

    def stat(self) -> Stat:
        """What lies at the path now; the open file, if it was deleted."""
        try:
            return _stat_of(os.stat(str(self.path)))
        except FileNotFoundError:
            return _stat_of(os.fstat(self._fd))

    def _part(self, begin: int, end: int) -> bytes:
        found: bytes = self._read(end - begin, begin)
        while len(found) < end - begin:  # signals and network file systems shorten reads
            more = self._read(end - begin - len(found), begin + len(found))
            if not more:
                raise self.cut(begin, end, len(found))
            found += more
        return found

    def close(self) -> None:
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class RemoteFile(ShardFile):
    """A file of a server.

    Args:
        store: reads it.
        url: where it lies.
        stat: what it was when it was found.
    """

    def __init__(self, store: Store, url: str, stat: Stat) -> None:
        super().__init__()
        self._store, self._url, self._stat = store, url, stat
        self.name, self.size = shown(url), stat.size

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        return self._store.ranges(self._url, begins, ends, self._stat)


def local_stat(path: str) -> Stat:
    """The size of a file of this machine, and a tag that any later change changes.

    Raises:
        ShardError: it is no file.
    """
    for _ in range(10):  # not for ever: somebody may be writing
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ShardError(f"{path} is no file: give the names of shards, or a pattern such as {path}/*.tar")
        changed = max(found.st_mtime_ns, found.st_ctime_ns)
        age = (time.time_ns() - changed) / 1e9
        tick = TICK if changed % 1_000_000_000 else LONG_TICK
        if not 0 <= age < tick:
            break
        time.sleep(tick - age)  # a change in this tick would not be seen
    return _stat_of(found)


def _stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, f"{found.st_mtime_ns} {found.st_ino} {found.st_ctime_ns}")


def is_rewritten(then: Stat, now: Stat) -> bool:
    """Whether a local file was written again or replaced. A change of its mode or of its links does not count, nor does
    a file system that numbers its files anew: they change either the last time or the inode.

    Example:
        >>> made = Stat(9, "100 7 100")
        >>> is_rewritten(made, Stat(9, "100 7 200")), is_rewritten(made, Stat(9, "100 8 200"))
        (False, True)
    """
    pairs = zip(then.tag.split(), now.tag.split(), strict=True)
    is_other, has_other_inode, is_changed = (one != other for one, other in pairs)
    return then.size != now.size or is_other or (has_other_inode and is_changed)


def checksum(file: ShardFile) -> int:
    """Of some parts of a file, from its beginning to its end: a file with other samples has most likely another one."""
    begins = [part * max(0, file.size - CHECKED) // (CHECKS - 1) for part in range(CHECKS)]
    return zlib.crc32(b"".join(file.ranges(begins, [min(file.size, begin + CHECKED) for begin in begins])))


def _seek_and_read(lock: threading.Lock, fd: int, size: int, offset: int) -> bytes:
    """`os.pread` for Windows, which has none."""
    with lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


class _Stream(io.RawIOBase):
    """A `ShardFile` that is read from a position on."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._file.size)
        if end <= self._position:
            return 0
        [found] = self._file.ranges([self._position], [end])
        buffer[: len(found)] = found
        self._position = end
        return len(found)
