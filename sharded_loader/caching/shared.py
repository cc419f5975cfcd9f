"""Memory and files shared by processes: mutual exclusion, and rendezvous by label.

    with locked(fd): ...            # one process, and one of its threads, writes to a file
    open_nameless(label)            # new memory
    join_first(names, join)         # another process's memory, by its name
    meet(label, join, make)         # memory of a label: another process's of this user, or new
    Zeros(label, nbytes)            # memory that comes along when it is pickled

Memory is found through its holders' links in ``/proc/<pid>/fd``, so it survives the process that made it. It has no
name in a file system: the kernel frees it with its last holder, even if all are killed. Search and creation are
serialized by the lock of an empty file per user in the folder for temporary files, which stays. Memory that another
user owns, or may write to, is ignored.

A file system without locks is an OSError. In another container, each process makes its own memory. So does each
program without /proc (macOS, Windows): its processes share a temporary file. Windows deletes this file with its last
handle; on macOS a program that is killed leaves it.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

from sharded_loader.extend import Array
from sharded_loader.extend.engine import chosen_backend
from sharded_loader.extend.tools import MAP_OPTIONS, PREFIX, after_fork, is_owned, open_memory
from sharded_loader.recordio.positioned import LOCK_POLL, lock_at, read_at, seek_lock, write_at

if sys.platform != "win32":
    import fcntl

_file_lock = threading.RLock()
"""Held around each `locked`, and while closing such a file, because closing drops all locks of this process."""


@after_fork
def _begin_afresh() -> None:
    """Reset the lock in a forked child, where the thread that held it is gone."""
    global _file_lock
    _file_lock = threading.RLock()


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
    if is_owned(_file_lock):
        yield False
        return
    with _file_lock:
        set_lock(fd, True)
        try:
            yield True
        finally:
            set_lock(fd, False)


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


class Opened:
    """A descriptor that this object owns and closes, and the name by which other processes open it meanwhile."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, f"/proc/{os.getpid()}/fd/{fd}" if not name or name.startswith("/proc/") else name
        weakref.finalize(self, close_locked, fd).atexit = False  # at the end of the program the system closes it

    def map(self, nbytes: int) -> Array:
        """Map the first bytes."""
        return np.frombuffer(mmap.mmap(self.fd, nbytes, **MAP_OPTIONS), np.uint8)


def open_nameless(label: str) -> Opened:
    """Create memory for this user only; without /proc, a temporary file that is deleted with the object."""
    if HAS_LINKS:
        backend = chosen_backend()
        fd, _ = open_memory(f"{PREFIX}-{label}", None if backend == "named" else backend)
        os.fchmod(fd, 0o600)
        return Opened(fd, "")
    if sys.platform == "win32":  # a finalizer cannot delete what is mapped; O_TEMPORARY deletes with the last handle
        name = os.path.join(tempfile.gettempdir(), f"{PREFIX}-{label}-{os.urandom(8).hex()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_BINARY | os.O_NOINHERIT
        return Opened(os.open(name, flags | os.O_TEMPORARY, 0o600), name)
    opened = Opened(*tempfile.mkstemp(prefix=f"{PREFIX}-{label}-"))
    weakref.finalize(opened, _remove, opened.name, os.getpid())
    return opened


def _remove(name: str, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        with contextlib.suppress(OSError):
            os.unlink(name)


def _open(name: str) -> int:
    """Open a file that another process may have open."""
    if sys.platform != "win32":
        return os.open(name, os.O_RDWR)
    import _winapi
    import msvcrt

    # `os.open` fails where the maker may delete (O_TEMPORARY): it shares only the rights to read (1) and write (2).
    access, share, flags = _winapi.GENERIC_READ | _winapi.GENERIC_WRITE, 1 | 2 | 4, os.O_RDWR | os.O_BINARY
    return msvcrt.open_osfhandle(_winapi.CreateFile(name, access, share, 0, _winapi.OPEN_EXISTING, 0, 0), flags)


def is_own(found: os.stat_result) -> bool:
    """Return True if a file belongs to this user and no other user may write to it."""
    return sys.platform == "win32" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


Found = TypeVar("Found")


def join_first(names: Iterable[str], join: Callable[[Opened], Found | None]) -> Found | None:
    """Return the result of ``join`` for the first file that it accepts, or None."""
    for name in names:
        with contextlib.suppress(OSError):  # its process has ended, or runs on another machine
            opened = Opened(_open(name), name)
            if is_own(os.fstat(opened.fd)) and (found := join(opened)) is not None:
                return found
    return None


class Zeros:
    """Memory of zeros, mapped by each process that inherits or unpickles this object.

    It begins with a ``token``, so other memory is never taken for it. Memory that is out of reach is replaced by new.
    """

    def __init__(self, label: str, nbytes: int, name: str = "", token: bytes = b"") -> None:
        self.token = token or os.urandom(16)
        found = join_first([name], lambda one: one if read_at(one.fd, 16, 0) == token else None)
        self._opened = found or open_nameless(label)
        self.fd, self.name = self._opened.fd, self._opened.name
        if found is None:
            write_at(self.fd, self.token.ljust(nbytes, b"\0"), 0)
        self.memory = self._opened.map(nbytes)


PROCESSES = 1024
"""Rows of shared counts. Processes whose numbers share a row may lose a count."""


def tally(counts: Array, *numbers: int) -> Array:
    """Add to this process's row of shared counts, and return it. NumPy adds them at once, so threads need no lock."""
    mine: Array = counts[os.getpid() % PROCESSES]
    mine += numbers
    return mine


def links_of(label: str) -> Iterator[str]:
    """Yield the names by which this process can open memory that processes hold under a label."""
    for name in glob.iglob("/proc/[0-9]*/fd/*"):  # without those that this user may not see
        with contextlib.suppress(OSError):  # the process has ended
            if label in os.readlink(name):
                yield name


def meet(label: str, join: Callable[[Opened], Found | None], make: Callable[[str], Found]) -> Found:
    """Return the memory that another process of this user holds under a label (a word), or else make it.

    ``join`` takes over an `Opened`, and returns None if it is not what was looked for. ``make`` runs in one process at
    a time; if it raises, the next process calls its own.

    Example:
        >>> label = f"example-{os.getpid()}"
        >>> one = meet(label, lambda opened: None, open_nameless)
        >>> other = meet(label, lambda opened: opened, open_nameless)
        >>> os.path.sameopenfile(one.fd, other.fd)
        True
    """
    if not HAS_LINKS:
        return make(label)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # without locks, two processes may both make it
            stack.enter_context(lock_at(os.path.join(tempfile.gettempdir(), f"{PREFIX}-{os.getuid()}.lock")))
        found = join_first(links_of(label), join)
        return make(label) if found is None else found
