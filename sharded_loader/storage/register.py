"""Which readers fetch ahead into one cache folder, in all processes.

    with reading(folder) as count:      this reader is in the register
        count()                         -> how many readers there are, this one included

    <folder>/<hex>     a file for each reader, which the reader keeps locked until it ends or dies
    <folder>/all       the lock for a look at the register

Readers divide the room of the cache by their number. So they need not be told how many processes a launcher has
started. A file without a holder of its lock is of a dead reader, and the next count deletes it. If another program
deletes the folder, the next count makes it again.

The lock is a local variable of the thread that reads. A forked child has no such thread, so the child never gives the
lock of its parent back.

What can go wrong: nothing is raised. If the folder cannot be used, a reader is alone.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from sharded_loader.base.system import job_of_ranks, lock_at

SETTLE = 2.0
"""Seconds in which the ranks of a machine join, after the first read."""


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Callable[[], int]]:
    """Be in the register inside the block.

    Args:
        folder: of the register. It is made if it does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, reading(Path(name)) as count:
        ...     with reading(Path(name)) as other:
        ...         _ = other(), count()
        ...         both = count()
        ...     both, count()
        (2, 1)
    """
    path = folder / uuid.uuid4().hex
    mine = lock_at(path)

    def count() -> int:
        found = 1
        with contextlib.suppress(OSError):  # another program deletes the folder, or it cannot be written to
            folder.mkdir(parents=True, exist_ok=True)
            with lock_at(folder / "all"):
                if not path.exists():
                    mine.release(force=True)
                    mine.acquire()
                found += sum(_lives(other) for other in folder.iterdir() if other not in (path, folder / "all"))
        return found

    try:
        yield count
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        mine.release(force=True)


def _lives(path: Path) -> bool:
    """Whether a reader holds the lock of its file. The file of a dead one is deleted."""
    try:
        with lock_at(path).acquire(timeout=0), contextlib.suppress(OSError):
            path.unlink()
    except TimeoutError:
        return True
    return False


def is_settling(folder: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether other ranks of this machine may still join the register. torchrun says how many there are."""
    if environ.get("LOCAL_WORLD_SIZE") or job_of_ranks(environ) is None:
        return False
    return time.monotonic() < _first_read(folder, os.getpid()) + SETTLE


@lru_cache
def _first_read(folder: Path, pid: int) -> float:
    """When this process asked first."""
    return time.monotonic()
