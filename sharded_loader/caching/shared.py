"""Memory and files shared by processes: mutual exclusion, and rendezvous by label.

    with locked(fd): ...            # one process, and one of its threads, writes to a file
    meet(label, join, make)         # memory of a label: another process's of this user, or new
    Opened(fd, name, ...)           # a descriptor, and the name by which other processes open it

Memory is found through its holders' links in ``/proc/<pid>/fd``, so it survives the process that made it. It has no
name in a file system: the kernel frees it with its last holder, even if all are killed. Search and creation are
serialized by the lock of an empty file per user in the folder for temporary files, which stays. Memory that another
user owns, or may write to, is ignored.

A file system without locks is an OSError. Without /proc (macOS, Windows), or in another container, each process makes
its own memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from sharded_loader.extend import Array
from sharded_loader.extend.engine import chosen_backend
from sharded_loader.extend.tools import MAP_OPTIONS, PREFIX, open_memory
from sharded_loader.recordio.positioned import LOCK_POLL, lock_at, seek_lock

if sys.platform != "win32":
    import fcntl

_file_lock = threading.RLock()
"""Held around each `locked`, and while closing such a file, because closing drops all locks of this process."""

_has_lock = False


def _begin_afresh() -> None:
    """Reset the lock in a forked child, where the thread that held it is gone."""
    global _file_lock, _has_lock
    _file_lock, _has_lock = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_afresh)

LOCKED_BYTE = 1 << 60
"""Locked byte, beyond all data: on Windows other processes cannot read a locked one."""


@contextlib.contextmanager
def locked(fd: int) -> Iterator[bool]:
    """Hold the lock of a file: one process, and one of its threads, at a time. OSError if the file system has none.

    Yields False in a signal handler or finalizer that interrupts such a block, which then must not change anything.

    Example:
        >>> with tempfile.TemporaryFile() as file, locked(file.fileno()) as alone, locked(file.fileno()) as nested:
        ...     alone, nested
        (True, False)
    """
    global _has_lock
    with _file_lock:
        if _has_lock:
            yield False
            return
        _has_lock = True
        try:
            set_lock(fd, True)
            try:
                yield True
            finally:
                set_lock(fd, False)
        finally:
            _has_lock = False


def set_lock(fd: int, is_taken: bool, byte: int = LOCKED_BYTE, block: bool = True) -> None:
    """Take or release the lock of a byte. It ends with the process. OSError: another process holds it, or no locks."""
    if sys.platform == "win32":
        import msvcrt

        while True:
            with seek_lock, contextlib.suppress(PermissionError if is_taken and block else ()):  # held elsewhere
                os.lseek(fd, byte, os.SEEK_SET)
                msvcrt.locking(fd, msvcrt.LK_NBLCK if is_taken else msvcrt.LK_UNLCK, 1)
                return
            time.sleep(LOCK_POLL)  # LK_LOCK would give up after 10 s, and readers would wait for it
    else:
        taken = fcntl.LOCK_EX if block else fcntl.LOCK_EX | fcntl.LOCK_NB
        fcntl.lockf(fd, taken if is_taken else fcntl.LOCK_UN, 1, byte)


def close_locked(fd: int) -> None:
    """Close a descriptor used with `locked`, without dropping the locks of other threads."""
    with _file_lock:
        os.close(fd)


# -- memory that other processes find ----------------------------------------------------------------------------------

HAS_LINKS = os.path.isdir("/proc/self/fd")
"""True if other processes can open this process's descriptors."""


def open_named(name: str) -> int:
    """Open a file, or another process's memory, by name."""
    return os.open(name, os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))


def name_of(fd: int) -> str:
    """Return the name by which other processes open a descriptor while it is open here. Linux."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_nameless(label: str) -> tuple[int, str]:
    """Create memory for this user only, a temporary file without /proc. Return its descriptor and its name."""
    if HAS_LINKS:
        backend = chosen_backend()
        fd, _ = open_memory(f"{PREFIX}-{label}", None if backend == "named" else backend)
        os.fchmod(fd, 0o600)
        return fd, name_of(fd)
    return tempfile.mkstemp(prefix=f"{PREFIX}-{label}-")


def is_own(found: os.stat_result) -> bool:
    """Return True if a file belongs to this user and no other user may write to it."""
    return sys.platform == "win32" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


class Opened:
    """A descriptor that this object owns and closes; with ``is_temporary``, the temporary file is deleted as well."""

    def __init__(self, fd: int, name: str, is_temporary: bool) -> None:
        self.fd, self.name = fd, name
        weakref.finalize(self, close_locked, fd).atexit = False  # at the end of the program the system closes it
        if is_temporary and not name.startswith("/proc/"):
            weakref.finalize(self, _remove, name, os.getpid())

    def map(self, nbytes: int) -> Array:
        """Map the first bytes."""
        return np.frombuffer(mmap.mmap(self.fd, nbytes, **MAP_OPTIONS), np.uint8)


def _remove(name: str, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        with contextlib.suppress(OSError):
            os.unlink(name)


Found = TypeVar("Found")


def links_of(label: str) -> Iterator[str]:
    """Yield the names by which this process can open memory that processes of this user hold under a label."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if label in os.readlink(name := f"/proc/{pid}/fd/{number}"):
                            yield name


def meet(label: str, join: Callable[[int], Found | None], make: Callable[[str], Found]) -> Found:
    """Return the memory that another process of this user holds under a label (a word), or else make it.

    ``join`` takes over a descriptor, and returns None if it is not what was looked for. ``make`` runs in one process at
    a time; if it raises, the next process calls its own.

    Example:
        >>> def make(label):
        ...     return Opened(*open_nameless(label), is_temporary=True)
        >>> one = meet("doctest", lambda fd: None, make)
        >>> other = meet("doctest", lambda fd: Opened(fd, name_of(fd), is_temporary=False), make)
        >>> os.path.sameopenfile(one.fd, other.fd)
        True
    """
    if not HAS_LINKS:
        return make(label)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # without locks, two processes may both make it
            stack.enter_context(lock_at(os.path.join(tempfile.gettempdir(), f"{PREFIX}-{os.getuid()}.lock")))
        for name in links_of(label):
            try:
                fd, found = open_named(name), None
            except OSError:  # its process has ended
                continue
            try:
                if is_own(os.fstat(fd)) and (found := join(fd)) is not None:
                    return found
            finally:
                if found is None:
                    close_locked(fd)
        return make(label)
