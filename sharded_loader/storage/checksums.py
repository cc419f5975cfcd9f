"""Whether a file in the cache still has the content that was fetched.

    seal(part, path)        gives a new shard its name, and notes its checksum beside it, in <hash>-<size>.sum
    is_sound(path, ...)     compares

A shard has the time `UNTOUCHED`, so each write to it leaves another time. The time of its last change is noted too: no
program can set that one back. The whole file is compared only if it has other times, or if the machine was restarted
since the last comparison: that takes 0.3 s for 1 GB.

What can go wrong: OSError.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from pathlib import Path

UNTOUCHED = 10**9
"""The time of each shard, in the year 2001."""


def beside(path: Path) -> Path:
    """Where the checksum of a shard is kept."""
    return path.with_suffix(".sum")


def seal(part: Path, path: Path) -> None:
    """Make ``part`` the shard ``path``, and note its content as the right one."""
    checksum = _checksum(part)
    os.replace(part, path)
    _note(path, checksum)


def _note(path: Path, checksum: int) -> None:
    with contextlib.suppress(OSError):  # some file systems keep no times: then each opening compares the checksum
        os.utime(path, (UNTOUCHED, UNTOUCHED))
    beside(path).write_text(f"{checksum:08x} {_started()} {os.stat(path).st_ctime_ns}")


def is_sound(path: Path, size: int, may_read: bool) -> bool:
    """Whether a shard has the content that was sealed; False also if that cannot be told without ``may_read``.

    Args:
        path: of the shard.
        size: that it must have, in bytes.
        may_read: compare the checksum, if another program may have changed the file.
    """
    try:
        checksum, started, changed = beside(path).read_text().split()
        found = os.stat(path)
        if found.st_size != size:
            return False
        if (found.st_mtime, found.st_ctime_ns, _started()) == (UNTOUCHED, int(changed), int(started)):
            return True
        if not may_read or _checksum(path) != int(checksum, 16):
            return False
    except (FileNotFoundError, ValueError):
        return False
    with contextlib.suppress(OSError):  # of another user
        _note(path, int(checksum, 16))
    return True


def _checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            found = zlib.crc32(chunk, found)
    return found


def _started() -> int:
    """When this machine was started, in steps of ten minutes: another number after each restart."""
    return int(time.time() - time.monotonic()) // 600
