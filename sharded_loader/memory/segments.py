"""Shared memory segments, and how workers attach to them.

    create(number, nbytes) -> Segment(descriptor or name, mapping)     in the main process
    attach(number, nbytes, fd, name) -> Segment                        in a worker
    Slot(segment, offset, nbytes)                                      part of a segment that holds one batch

The first back end that the system supports is used (`system.open_memory`), unless ``SHARDED_LOADER_MEMORY`` names one:

    memfd   Linux. Anonymous: no name to leak, and not counted against a container's small shm mount.
            The descriptor is sent to running workers through the pipe (SCM_RIGHTS).
    shm     POSIX without memfd. ``shm_open``, unlinked at once, then like memfd. macOS maps it as shared memory only,
            so what a worker maps for itself (a dataset, with a negative number) lies in a file there.
    file    Fallback: a temporary file, unlinked at once. Slower, because the system writes it to disk.
    named   Windows: a named mapping, which disappears with its last handle. Elsewhere, for tests and where descriptors
            cannot be passed, the main process's descriptor under /proc, which disappears with that process.

A segment owns its mapping and descriptor, and is fully allocated on creation (`system.allocate`): touching
overcommitted memory ends in SIGBUS. Callers check the free memory first (`limits.free_bytes`). Before Python 3.13 a
mapping holds a second descriptor, which stays open after `close` until the last array over the memory has died.
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
    """Return the back end that the environment requests; None: the best available. Unknown names raise a ValueError."""
    chosen = os.environ.get("SHARDED_LOADER_MEMORY")
    if chosen not in (None, *BACKENDS):
        raise ValueError(f'SHARDED_LOADER_MEMORY is {chosen!r}; it must be "memfd", "shm", "file" or "named"')
    return chosen


class Slot(NamedTuple):
    """Part of a segment that holds one batch; ``offset`` and ``nbytes`` are in bytes."""

    segment: int
    offset: int
    nbytes: int


@dataclass(eq=False)
class Segment:
    """Shared memory, mapped in this process.

    Attributes:
        number: identifies the segment in the main process and its workers.
        fd, name: descriptor, and the name by which workers open the segment, if it has one.
        unregister: called before the memory is unmapped, if a device reads it directly (`Arena`).
    """

    number: int
    nbytes: int
    mapping: mmap.mmap
    fd: int | None = None
    name: str | None = None
    unregister: Callable[[], Any] | None = None

    def __del__(self) -> None:
        self.close_descriptor()  # an exception may strike before it has an owner

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor. The memory is unmapped with the last array over it."""
        self.close_descriptor()
        with contextlib.suppress(BufferError):
            self.mapping.close()


def create(number: int, nbytes: int) -> Segment:
    """Create a segment.

    Raises:
        OSError: out of memory, space or descriptors. ``filename`` is the folder if the memory is a file in it.
    """
    backend = chosen_backend()
    if sys.platform == "win32":
        name = f"{PREFIX}-{os.getpid()}-{os.urandom(8).hex()}"
        return Segment(number, nbytes, mmap.mmap(-1, nbytes, tagname=name), name=name)
    kind = "file" if sys.platform == "darwin" and number < 0 else None if backend == "named" else backend
    with uninterrupted():
        fd, folder = open_memory(f"{PREFIX}-{number}", kind)
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
        fd: its descriptor, which this call closes; None: open it by name.
        private: map copy-on-write, so that writes stay in this process.
    """
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
    if sys.platform == "win32":
        return Segment(number, nbytes, mmap.mmap(-1, nbytes, tagname=name, access=access))
    if fd is None:
        assert name is not None  # a segment has one or the other
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
    try:
        return Segment(number, nbytes, mmap.mmap(fd, nbytes, access=access, **MAP_OPTIONS))
    finally:
        os.close(fd)
