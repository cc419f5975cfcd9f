"""One process at a time: the lock of a file, and names that one process of a machine holds.

    with locked(fd): ...            # one process, and one of its threads, writes to a file
    close_locked(fd)                # closes such a file without dropping the locks of other threads
    with alone("name", waiting): ...    # one process of this machine

Owns the sockets whose names this process holds. What can go wrong: a file system without locks, and a name that another
user holds; both are an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

from sharded_loader.base.system import lock_at

if sys.platform != "win32":
    import fcntl

_file_lock = threading.RLock()
"""Held around each `locked`, and while a descriptor of such a file is closed, which would drop this process's locks."""

_has_lock = False

_names: set[socket.socket] = set()
"""Sockets whose names this process holds, or asks for."""


def _begin_afresh() -> None:
    """In a forked child: another thread, which is gone there, may have held the lock. The names are the parent's."""
    global _file_lock, _has_lock
    _file_lock, _has_lock = threading.RLock(), False
    for name in _names:
        name.close()
    _names.clear()


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


POLLS_PER_SECOND = 100
"""Tries to get a name that others hold: 0.1 % of a core."""


@contextlib.contextmanager
def alone(name: str, waiting: Callable[[int, int], object]) -> Iterator[None]:
    """Hold a name inside the block: one process of this machine, and one of its threads, at a time.

    A process that dies loses it. On Linux it is the name of a socket, which is in no folder. Elsewhere it is the lock
    of an empty file in the folder for temporary files, and the file stays.

    Args:
        name: the name.
        waiting: called each second until the name is free, with the seconds so far, and the process that holds it
            (0: unknown).

    Raises:
        PermissionError: another user holds it.

    Example:
        >>> with alone("sharded_loader-example", print):
        ...     pass
    """
    if not sys.platform.startswith("linux"):
        with lock_at(os.path.join(tempfile.gettempdir(), f"{name}.lock")):
            yield
        return
    with socket.socket(socket.AF_UNIX) as holder:
        _names.add(holder)
        try:
            for tries in itertools.count():
                try:
                    holder.bind(f"\0{name}")
                    holder.listen()
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                if tries % POLLS_PER_SECOND == 0:
                    waiting(tries // POLLS_PER_SECOND, _holder_of(name))
                time.sleep(1 / POLLS_PER_SECOND)
            yield
        finally:
            _names.discard(holder)


def _holder_of(name: str) -> int:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(f"\0{name}")
        except OSError:  # it is free by now, or its process does not listen yet
            return 0
        pid, uid, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"another user (process {pid}) holds the name {name}: use another key")
    return int(pid)
