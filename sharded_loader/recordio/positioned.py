"""A file of this machine: read at positions, and told from a later one at the same path.

    PositionedFile(path).bytes_at(offset, size) -> bytes      any thread may read; nothing is shared but the descriptor
    tag_of(settled(path)) -> "time inode last-change"         is_rewritten(tag, later tag)

What can go wrong: an OSError of the system. A file system with the times of a server may show a change seconds later
(NFS: 3 to 60).
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from functools import partial

from sharded_loader.extend.tools import read_at

BINARY = getattr(os, "O_BINARY", 0)
"""For `os.open`: Windows translates line ends without it."""

CHECKS, CHECKED = 8, 4096
"""Parts of a file that have a checksum, and bytes of each."""

TICK, LONG_TICK = 0.03, 2.0
"""Seconds in which two changes of a file may get the same time: systems count in ticks of up to 16 ms, and some file
systems in whole seconds, or in two."""


class PositionedFile:
    """A file that is open for reading. It closes when its last reference goes: a thread that reads holds one.

    Args:
        path: where it lies.

    Attributes:
        fd: its descriptor; -1: closed.
        read: ``read(size, offset)`` is the system call alone. A method around each takes a quarter as long again.
    """

    __slots__ = ("fd", "read")

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | BINARY)
        self.read: Callable[[int, int], bytes] = partial(getattr(os, "pread", read_at), self.fd)

    def stat(self) -> os.stat_result:
        """Of the open file."""
        return os.fstat(self.fd)

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset``; fewer only at the end of the file."""
        data = self.read(size, offset)
        while len(data) < size:  # signals and network file systems shorten reads
            more = self.read(size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self, _close: Callable[[int], None] = os.close) -> None:  # at the program's end `os` may be gone
        """Close the file. Again is no error."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            _close(fd)

    def __del__(self) -> None:
        self.close()


def settled(path: str) -> os.stat_result:
    """The stat of a file. One that was changed in this tick of the clock is waited for: another change in the tick
    would not be seen."""
    for _ in range(10):  # not for ever: another program may be writing
        found = os.stat(path)
        changed = max(found.st_mtime_ns, found.st_ctime_ns)
        age = (time.time_ns() - changed) / 1e9
        tick = TICK if changed % 1_000_000_000 else LONG_TICK
        if not 0 <= age < tick:
            break
        time.sleep(tick - age)
    return found


def tag_of(found: os.stat_result) -> str:
    """A text that any change of the file changes."""
    return f"{found.st_mtime_ns} {found.st_ino} {found.st_ctime_ns}"


def is_rewritten(then: str, now: str) -> bool:
    """Whether a file was written again or replaced, by its tags. A change of its mode or of its links does not count,
    nor does a file system that gives its files new numbers: they change either the last time or the inode.

    Example:
        >>> is_rewritten("100 7 100", "100 7 200"), is_rewritten("100 7 100", "100 8 200")
        (False, True)
    """
    is_other, has_other_inode, is_changed = (a != b for a, b in zip(then.split(), now.split(), strict=True))
    return is_other or (has_other_inode and is_changed)


def checksums(read: Callable[[int, int], bytes], size: int, end: int | None = None) -> list[int]:
    """Of some parts of a file, from its beginning to its end: a file of other samples most likely has others.

    Args:
        read: offset and size -> bytes.
        size: of the file.
        end: only of the parts before it.
    """
    begins, width = checked_parts(size)
    return [zlib.crc32(read(begin, width)) for begin in begins if end is None or begin + width <= end]


def checked_parts(size: int) -> tuple[list[int], int]:
    """Where the parts of a file begin that have a checksum, and how long each is."""
    width = min(CHECKED, -(-size // CHECKS))
    return [part * (size - width) // (CHECKS - 1) for part in range(CHECKS)], width
