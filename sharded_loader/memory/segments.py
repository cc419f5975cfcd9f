"""Memory that two processes share, and how the second process gets it.

    create(number, nbytes) -> Segment(descriptor or name, mapping)     in the main process
    attach(number, nbytes, fd, name) -> Segment                        in a worker
    Slot(segment, offset, nbytes)                                      the part of a segment that holds one batch

There are several back ends. The first that the system does not refuse is used (`system.open_memory`), unless
``SHARDED_LOADER_MEMORY`` names one, so that all are tested on Linux:

    memfd   Linux. Anonymous: no name to leak, and not counted against a container's small shm mount.
            The descriptor travels to running workers through the pipe (SCM_RIGHTS).
    shm     POSIX without memfd. ``shm_open``, unlinked at once, then like memfd.
    file    Where neither works: a file in the folder for temporary files, unlinked at once. Slower: the system
            writes it to the disk.
    named   Windows: a named mapping, which vanishes with its last handle. Elsewhere, for tests and where descriptors
            cannot be passed, the name of the main process's descriptor under /proc. It vanishes with that process.

A segment owns its mapping and its descriptor. It is allocated in full when it is created (`system.allocate`): memory
that is promised and not there ends in SIGBUS, in the process that touches it. `Arena` and `publish` ask before how
much memory is free (`limits.free_bytes`).

What can go wrong: the system call fails (OSError). Before Python 3.13 a mapping holds a second descriptor, which must
not be closed: it stays open after `close`, until the last array over the memory has died.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.system import MAP_OPTIONS, PORTABLE, PREFIX, allocate, can_pass_descriptors, open_memory

BACKENDS = ("memfd", "shm", "file", "named")


def chosen_backend() -> str | None:
    """The back end that the environment asks for; None: the best that works.

    Raises:
        ValueError: there is no such back end.
    """
    chosen = os.environ.get("SHARDED_LOADER_MEMORY")
    if chosen not in (None, *BACKENDS):
        raise ValueError(f'SHARDED_LOADER_MEMORY is {chosen!r}; it must be "memfd", "shm", "file" or "named"')
    return chosen


class Slot(NamedTuple):
    """The part of a segment that holds one batch: the segment's number, and bytes."""

    segment: int
    offset: int
    nbytes: int


@dataclass(eq=False)
class Segment:
    """Shared memory, mapped in this process.

    Attributes:
        number: identifies it between the main process and its workers.
        nbytes: its size.
        mapping: the memory.
        fd: its descriptor, where it has one.
        name: its name, where workers open it by name.
        unregister: to be called before the memory goes, where a device reads it by itself (`Arena`).
    """

    number: int
    nbytes: int
    mapping: mmap.mmap
    fd: int | None = None
    name: str | None = None
    unregister: Callable[[], Any] | None = None

    def __del__(self) -> None:
        self.close_descriptor()  # an exception may have struck before anybody could note that it is there

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor. The mapping goes when the last array over it does."""
        self.close_descriptor()
        with contextlib.suppress(BufferError):
            self.mapping.close()


def create(number: int, nbytes: int) -> Segment:
    """Make a segment of ``nbytes``.

    Args:
        number: of the segment.
        nbytes: its size.

    Raises:
        OSError: the system refuses (no memory, no room in the mount, no descriptors). Its ``filename`` is the folder
            that has no room, where the memory is a file there.
    """
    backend = chosen_backend()
    if sys.platform == "win32":
        name = f"{PREFIX}-{os.getpid()}-{os.urandom(8).hex()}"
        return Segment(number, nbytes, mmap.mmap(-1, nbytes, tagname=name), name=name)
    with uninterrupted():
        fd, folder = open_memory(f"{PREFIX}-{number}", None if backend == "named" else backend)
        try:
            os.ftruncate(fd, nbytes)
            allocate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes, **MAP_OPTIONS)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and folder is not None:
                raise OSError(error.errno, error.strerror, folder) from error
            raise
        by_name = backend == "named" or PORTABLE or not can_pass_descriptors()
        return Segment(number, nbytes, mapping, fd, f"/proc/{os.getpid()}/fd/{fd}" if by_name else None)


def attach(number: int, nbytes: int, fd: int | None, name: str | None, *, private: bool = False) -> Segment:
    """Map a segment of the main process in a worker.

    Args:
        number, nbytes, name: of the segment.
        fd: a descriptor of it, taken over and closed; None if it is opened by name.
        private: what this process writes stays its own (copy on write).
    """
    options: dict[str, Any] = {}
    if sys.platform == "win32":
        options = {"tagname": name, "access": mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE}
        return Segment(number, nbytes, mmap.mmap(-1, nbytes, **options))
    if fd is None:
        assert name is not None  # a segment has one or the other
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    try:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        return Segment(number, nbytes, mmap.mmap(fd, nbytes, flags=flags, prot=prot, **MAP_OPTIONS))
    finally:
        os.close(fd)
