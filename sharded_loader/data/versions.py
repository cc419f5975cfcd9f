"""Tells a file of this machine from a later one at the same path, by its size, times and inode.

    tag_of(settled(path)) -> "time inode last-change"        is_rewritten(tag, later tag)

What can go wrong: a file system with the times of a server may show a change seconds later (NFS: 3 to 60).
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable

CHECKS, CHECKED = 8, 4096
"""Parts of a file that have a checksum, and bytes of each."""

TICK, LONG_TICK = 0.03, 2.0
"""Seconds in which two changes of a file may get the same time: systems count in ticks of up to 16 ms, and some file
systems in whole seconds, or in two."""


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
    nor does a file system that numbers its files anew: they change either the last time or the inode.

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
    width = min(CHECKED, -(-size // CHECKS))
    begins = [part * (size - width) // (CHECKS - 1) for part in range(CHECKS)]
    return [zlib.crc32(read(begin, width)) for begin in begins if end is None or begin + width <= end]
