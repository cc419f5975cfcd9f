"""Memory that other processes find: by its name, or by a label that the ranks of a machine have in common.

    open_nameless(label) -> (fd, name)    new memory; other processes of this user open it by its name
    open_named(name) -> fd
    Opened(fd, name, is_temporary)        closes it
    links_of(label) -> names              of the memory with this label that processes of this user hold
    meet(label, join, make) -> Opened     what another process holds under this label, or else what this one makes

A process that holds memory has a link with its label in ``/proc/<pid>/fd``. So a newcomer finds it in any process that
holds it, also if the one that made it has ended. `system.alone` lets one process at a time look, and make what it does
not find. Nothing has a name in a folder, so nothing is left if processes are killed: the kernel frees memory and links
with their last process.

What can go wrong: elsewhere than on Linux, and where a process may not see the others (another container or user), each
process makes its own. Memory that another user could write to is never opened.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from sharded_loader.base.system import MAP_OPTIONS, PREFIX, alone, close_locked, open_memory
from sharded_loader.batching.protocol import Array
from sharded_loader.memory.segments import chosen_backend

HAS_LINKS = os.path.isdir("/proc/self/fd")
"""Whether other processes can open what a process holds."""

# -- by name -----------------------------------------------------------------------------------------------------------


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


def is_private(found: os.stat_result) -> bool:
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


# -- by a label --------------------------------------------------------------------------------------------------------

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


def meet(
    label: str,
    join: Callable[[int], Found | None],
    make: Callable[[str], Found],
    waiting: Callable[[int, int], object] = lambda seconds, pid: None,
) -> Found:
    """What another process of this user holds under a label, or else what this one makes.

    Args:
        label: a word.
        join: gets a descriptor of memory that only this user can write to, and takes it over; None: it is not what was
            looked for.
        make: makes memory of this label. It is called by one process at a time.
        waiting: see `system.alone`.

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
        with contextlib.suppress(OSError):  # in a sandbox without sockets, two processes may make it
            stack.enter_context(alone(f"{PREFIX}-{label}-{os.getuid()}", waiting))
        for name in links_of(label):
            try:
                fd, found = open_named(name), None
            except OSError:  # its process has ended
                continue
            try:
                if is_private(os.fstat(fd)) and (found := join(fd)) is not None:
                    return found
            finally:
                if found is None:
                    close_locked(fd)
        return make(label)
