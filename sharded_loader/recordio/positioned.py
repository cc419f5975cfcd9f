"""Local files: positioned reads and writes, locks, and detection of changes.

File systems with timestamps of a server may reveal changes only seconds later (NFS: 3 to 60).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

BINARY = getattr(os, "O_BINARY", 0)
"""Flag for `os.open`, without which Windows translates line ends."""

CHECKS, CHECKED = 8, 4096
"""Number of ranges of a file that have a checksum, and their size in bytes."""

TICK, LONG_TICK = 0.03, 2.0
"""Seconds within which two changes may get the same timestamp: clocks advance in ticks of up to 16 ms, and some file
systems store whole seconds, or two."""

LOCK_POLL = 0.005
"""Seconds between attempts to acquire a file lock."""

seek_lock = threading.Lock()
"""Serializes seek and read or write on systems without `pread` and `pwrite`, such as Windows."""


def lock_at(path: Any) -> Any:
    """Return a new lock object, shared by all processes of this machine through the name of a file.

    Acquiring it raises OSError or NotImplementedError if the file cannot be created, or its file system has no locks.
    """
    from filelock import FileLock

    return FileLock(path, thread_local=False, poll_interval=LOCK_POLL)


def write_at(fd: int, data: Any, offset: int) -> None:
    """Write bytes, or a flat view of bytes, at an offset. Unlike a mapping, this raises OSError on a full disk."""
    data = memoryview(data)
    while data:
        done = os.pwrite(fd, data, offset) if hasattr(os, "pwrite") else _seek_and(os.write, fd, data, offset)
        data, offset = data[done:], offset + done


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read bytes at an offset; fewer at the end of the file."""
    return os.pread(fd, nbytes, offset) if hasattr(os, "pread") else _seek_and(os.read, fd, nbytes, offset)


def _seek_and(call: Callable[[int, Any], Any], fd: int, value: object, offset: int) -> Any:
    with seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return call(fd, value)


def regular(path: Any) -> Any:
    """Return a path, or raise OSError if it is not that of a file: a named pipe would wait for a writer."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a file", path)
    return path


def walk(
    folder: str, onerror: Callable[[OSError], object] | None = None, above: frozenset[str] = frozenset()
) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder from this one on, and the names of its files. Hidden folders are left out, links are followed.

    Raises OSError for a link that leads back to a folder that it is in. ``onerror`` is that of `os.walk`.
    """
    if (real := os.path.realpath(folder)) in above:
        raise OSError(errno.ELOOP, "this link leads back to a folder that it is in", folder)
    for at, folders, files in islice(os.walk(folder, onerror=onerror), 1):
        yield at, files
        for name in folders:
            if not name.startswith("."):
                yield from walk(os.path.join(at, name), onerror, above | {real})


class PositionedFile:
    """File open for reading, which threads may share. It closes with its last reference; a reading thread holds one.

    ``fd`` is -1 once closed. ``read(size, offset)`` is the bare system call: a wrapping method takes a quarter longer.
    """

    __slots__ = ("fd", "read")

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(regular(path), os.O_RDONLY | BINARY)
        self.read: Callable[[int, int], bytes] = partial(getattr(os, "pread", read_at), self.fd)

    def stat(self) -> os.stat_result:
        return os.fstat(self.fd)

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``; fewer only at the end of the file."""
        data = self.read(size, offset)
        # Signals and network file systems cause short reads.
        while len(data) < size and (more := self.read(size - len(data), offset + len(data))):
            data += more
        return data

    def close(self, _close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at interpreter exit
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _close(fd)

    def __del__(self) -> None:
        self.close()


def stable_stat(path: str) -> os.stat_result:
    """Return the stat of a file, after waiting until a further change would get another timestamp."""
    for _ in range(10):  # bounded, because another program may keep writing
        found = os.stat(path)
        changed = max(found.st_mtime_ns, found.st_ctime_ns)
        age = (time.time_ns() - changed) / 1e9
        tick = TICK if changed % 1_000_000_000 else LONG_TICK
        if not 0 <= age < tick:
            break
        time.sleep(tick - age)
    return found


def tag_of(found: os.stat_result) -> str:
    """Return a text that any change of the file changes."""
    return f"{found.st_mtime_ns} {found.st_ino} {found.st_ctime_ns}"


def is_rewritten(then: str, now: str) -> bool:
    """Return True if tags show that a file was rewritten or replaced.

    Changes of mode or links do not count, nor do new inode numbers alone.

    Example:
        >>> is_rewritten("100 7 100", "100 7 200"), is_rewritten("100 7 100", "100 8 200")
        (False, True)
    """
    is_other, has_other_inode, is_changed = (a != b for a, b in zip(then.split(), now.split(), strict=True))
    return is_other or (has_other_inode and is_changed)


def checksums(read: Callable[[int, int], bytes], size: int, end: int | None = None) -> list[int]:
    """Return checksums of a few ranges of a file of this size, optionally only those before ``end``."""
    begins, width = checked_parts(size)
    return [zlib.crc32(read(begin, width)) for begin in begins if end is None or begin + width <= end]


def checked_parts(size: int) -> tuple[list[int], int]:
    """Return the begins and the width of the ranges that have a checksum."""
    width = min(CHECKED, -(-size // CHECKS))
    return [part * (size - width) // (CHECKS - 1) for part in range(CHECKS)], width
