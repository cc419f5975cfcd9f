"""One shard as bytes by their place: on this machine, or read over the network in parts.

    LocalFile(path) | RemoteFile(store, url, stat)
        .ranges(begins, ends) -> list of bytes        .stream() -> a binary file for libraries that want one

Formats see nothing else, so each of them reads local shards, cached ones and remote ones in the same way. A local file
is held by a descriptor: if it is deleted meanwhile, it can still be read (not on Windows, where it cannot be
deleted meanwhile). Threads may share a file; a forked child opens its own.

`local_stat` tells a file from a later one at the same path (`data.files`).

What can go wrong: `ShardError` for a file that is missing, must not be read, or is shorter than it was.
"""

from __future__ import annotations

import io
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sharded_loader.data.files import PositionedFile, settled, tag_of
from sharded_loader.storage.errors import ShardError, missing_or_forbidden, shown
from sharded_loader.storage.stores import PIECE, Stat, Store


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
        try:
            self._file = PositionedFile(path)
        except OSError as error:
            found = missing_or_forbidden(self.name, error, str(error.strerror))
            if found is None:
                raise
            raise found from error
        self._found = self._file.stat()
        self.size = self._found.st_size

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        return list(map(self._part, begins, ends))

    def stat(self) -> Stat:
        """What lies at the path now; the open file, if it was deleted."""
        try:
            return _stat_of(os.stat(str(self.path)))
        except FileNotFoundError:
            return _stat_of(self._file.stat())

    def is_touched(self) -> bool:
        """Whether another program has written to the open file. Only that it was deleted does not count."""
        now, then = self._file.stat(), self._found
        is_other = (now.st_mtime_ns, now.st_size) != (then.st_mtime_ns, then.st_size)
        return is_other or (now.st_nlink > 0 and now.st_ctime_ns != then.st_ctime_ns)

    def _part(self, begin: int, end: int) -> bytes:
        found = self._file.bytes_at(begin, end - begin)
        if len(found) < end - begin:
            raise self.cut(begin, end, len(found))
        return found

    def close(self) -> None:
        super().close()
        self._file.close()


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
    found = settled(path)
    if not stat.S_ISREG(found.st_mode):
        raise ShardError(f"{path} is no file: give the names of shards, or a pattern such as {path}/*.tar")
    return _stat_of(found)


def _stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, tag_of(found))


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
