"""Stretches of memory that two processes share, and how the second one gets at them.

    create(nbytes) -> Segment(descriptor or name, mapping)     in the trainer
    attach(handle) -> Segment                                  in a worker

Three back ends; ``SHARDED_LOADER_MEMORY`` chooses one, so that all are tested on Linux:

    memfd   Linux. Anonymous: no name to leak, and not counted against a container's small shm mount.
            The descriptor travels to running workers through the pipe (SCM_RIGHTS).
    shm     POSIX without memfd. ``shm_open``, unlinked at once, then like memfd.
    named   Windows: a named mapping, which vanishes with its last handle. Elsewhere, for tests, the name is
            that of the trainer's descriptor under /proc, which vanishes with the trainer.

A segment is allocated in full when it is created (`posix_fallocate`): memory that is promised and not there
ends in SIGBUS, in whoever touches it. What may be taken is decided before, by `limits`.

Before Python 3.13 a mapping holds a descriptor of its own, a duplicate that nobody may close: until the last array
over it has gone, one per segment stays open, also after `close`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from sharded_loader.interrupts import uninterrupted

PREFIX = "sharded_loader"
"""How every name begins that the library gives to shared memory, however briefly it exists."""


# From Python 3.13 on no duplicate of the descriptor.
_MAPPING: dict[str, Any] = {} if sys.version_info < (3, 13) else {"trackfd": False}

ALLOCATED_AT_ONCE = 32 << 20
"""Bytes per `posix_fallocate`: 8 ms."""


def choose_backend() -> str:
    """The back end of this process: as the environment says, else the best that the platform has."""
    chosen = os.environ.get("SHARDED_LOADER_MEMORY")
    if chosen is None:
        if hasattr(os, "memfd_create"):
            return "memfd"
        return "named" if sys.platform == "win32" else "shm"
    if chosen not in ("memfd", "shm", "named"):
        raise ValueError(f'SHARDED_LOADER_MEMORY is {chosen!r}; it must be "memfd", "shm" or "named"')
    return chosen


@dataclass
class Segment:
    """Shared memory, mapped in this process.

    Attributes:
        number: identifies it between the trainer and its workers.
        nbytes: its size.
        mapping: the memory.
        fd: its descriptor, where it has one.
        name: its name, where workers open it by name.
    """

    number: int
    nbytes: int
    mapping: mmap.mmap
    fd: int | None = None
    name: str | None = None
    _pid: int = field(default_factory=os.getpid, repr=False)

    def __del__(self) -> None:
        # A Ctrl-C may have come before anybody could note that it is there.
        if self.fd is not None and os.getpid() == self._pid:
            self.close_descriptor()

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
    """Make a segment of ``nbytes``, a multiple of the page size.

    Raises:
        OSError: the system refuses (no memory, no room in the mount, no descriptors).
    """
    backend = choose_backend()
    if sys.platform == "win32":
        name = f"{PREFIX}-{os.getpid()}-{os.urandom(8).hex()}"
        return Segment(number, nbytes, mmap.mmap(-1, nbytes, tagname=name), name=name)
    with uninterrupted():
        fd = _open_shm() if backend == "shm" else os.memfd_create(f"{PREFIX}-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            if hasattr(os, "posix_fallocate"):
                # In pieces: before Linux 5.19 any signal made one call start over, and a profiler's timer for ever.
                for offset in range(0, nbytes, ALLOCATED_AT_ONCE):
                    os.posix_fallocate(fd, offset, min(ALLOCATED_AT_ONCE, nbytes - offset))
            mapping = mmap.mmap(fd, nbytes, **_MAPPING)
        except BaseException:
            os.close(fd)
            raise
        name = f"/proc/{os.getpid()}/fd/{fd}" if backend == "named" else None
        return Segment(number, nbytes, mapping, fd, name)


def _open_shm() -> int:
    import _posixshmem  # type: ignore[import-not-found]

    name = f"/{PREFIX}-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    finally:  # also when a Ctrl-C comes in between
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(name)
    os.set_inheritable(fd, False)
    return fd


def attach(number: int, nbytes: int, fd: int | None, name: str | None, *, private: bool = False) -> Segment:
    """Map a segment of the trainer's in a worker.

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
        return Segment(number, nbytes, mmap.mmap(fd, nbytes, flags=flags, prot=prot, **_MAPPING))
    finally:
        os.close(fd)
