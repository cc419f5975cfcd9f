"""Memory and files that several processes have: one process at a time, and how the others find it.

    with locked(fd): ...            # one process, and one of its threads, writes to a file
    close_locked(fd)                # closes such a file without dropping the locks of other threads
    meet(label, join, make)         # memory of a label: that of another process of this user, or new
    Opened(fd, name, ...)           # a descriptor, and the name by which other processes open it

*Finding it.* A process that holds memory has a link with its label in ``/proc/<pid>/fd``. So a newcomer finds it in any
process that holds it, also if the one that made it has ended. A lock lets one process at a time search, and create the
memory if there is none. The memory has no name in a folder, so nothing is left of it if processes are killed: the
kernel frees it with its last process. The lock is that of an empty file in the folder for temporary files, one for each
user, which stays.

Only memory of this user, that no other user may write to, is used. What can go wrong: a file system without locks
(OSError). Where processes do not find each other, as without /proc (macOS, Windows) and in another container, each one
makes its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from sharded_loader.extend import Array
from sharded_loader.extend.engine import chosen_backend
from sharded_loader.extend.tools import MAP_OPTIONS, PREFIX, lock_at, open_memory

if sys.platform != "win32":
    import fcntl

_file_lock = threading.RLock()
"""Held around each `locked`, and while a descriptor of such a file is closed, which would drop this process's locks."""

_has_lock = False


def _begin_afresh() -> None:
    """In a forked child: another thread, which is gone there, may have held the lock."""
    global _file_lock, _has_lock
    _file_lock, _has_lock = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_afresh)

LOCKED_BYTE = 1 << 60
"""The byte that is locked, behind all data: Windows lets no other process read a locked one."""


@contextlib.contextmanager
def locked(fd: int) -> Iterator[bool]:
    """Hold the lock of a file inside the block: one process, and one of its threads, at a time.

    It gives False in a signal handler, or a finalizer, that runs in the middle of such a block: change nothing then.

    Raises:
        OSError: the file system has no locks.

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
            _set_lock(fd, True)
            try:
                yield True
            finally:
                _set_lock(fd, False)
        finally:
            _has_lock = False


def _set_lock(fd: int, is_taken: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_LOCK if is_taken else msvcrt.LK_UNLCK, 1)
    else:
        fcntl.lockf(fd, fcntl.LOCK_EX if is_taken else fcntl.LOCK_UN, 1, LOCKED_BYTE)


def close_locked(fd: int) -> None:
    """Close a descriptor of a file that `locked` is used for."""
    with _file_lock:
        os.close(fd)


# -- memory that other processes find ----------------------------------------------------------------------------------

HAS_LINKS = os.path.isdir("/proc/self/fd")
"""Whether other processes can open what a process holds."""


def open_named(name: str) -> int:
    """A descriptor of a file, or of another process's memory.

    Raises:
        OSError: there is none of this name.
    """
    return os.open(name, os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))


def name_of(fd: int) -> str:
    """The name by which other processes open this descriptor while this process has it open. Linux."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_nameless(label: str) -> tuple[int, str]:
    """New memory, and the name by which other processes open it while this process has it open.

    Where the system has no such names, the memory is a temporary file (see `Opened`). Only this user can open it.
    """
    if HAS_LINKS:
        backend = chosen_backend()
        fd, _ = open_memory(f"{PREFIX}-{label}", None if backend == "named" else backend)
        os.fchmod(fd, 0o600)
        return fd, name_of(fd)
    return tempfile.mkstemp(prefix=f"{PREFIX}-{label}-")


def is_own(found: os.stat_result) -> bool:
    """Whether a file belongs to this user, and no other user may write to it."""
    return sys.platform == "win32" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


class Opened:
    """A descriptor that is closed with this object, and its mapping. A temporary file is deleted with it.

    Args:
        fd: taken over.
        name: see `open_nameless`.
        is_temporary: the name is that of a temporary file of this process.
    """

    def __init__(self, fd: int, name: str, is_temporary: bool) -> None:
        self.fd, self.name = fd, name
        weakref.finalize(self, close_locked, fd).atexit = False  # at the end of the program the system closes it
        if is_temporary and not name.startswith("/proc/"):
            weakref.finalize(self, _remove, name, os.getpid())

    def map(self, nbytes: int) -> Array:
        """The first bytes, over the shared memory."""
        return np.frombuffer(mmap.mmap(self.fd, nbytes, **MAP_OPTIONS), np.uint8)


def _remove(name: str, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        with contextlib.suppress(OSError):
            os.unlink(name)


Found = TypeVar("Found")


def links_of(label: str) -> Iterator[str]:
    """By which names this process can open what processes of this user hold under a label."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if label in os.readlink(name := f"/proc/{pid}/fd/{number}"):
                            yield name


def meet(label: str, join: Callable[[int], Found | None], make: Callable[[str], Found]) -> Found:
    """What another process of this user holds under a label, or else what this one makes.

    Args:
        label: a word.
        join: gets a descriptor of memory that only this user can write to, and takes it over; None: it is not what was
            looked for.
        make: makes memory of this label. It is called by one process at a time.

    Raises:
        What ``make`` raises. The next process then calls its own.

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
        with contextlib.suppress(OSError, NotImplementedError):  # without locks, two processes may make it
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
