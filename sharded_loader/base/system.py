"""System calls, each with a fallback where it may be missing or forbidden, and environment variables.

    open_pidfd(pid)             else None: the caller watches a pipe that the process holds
    open_memory(label, kind)    memfd_create, else shm_open, else an unnamed file
    allocate(fd, nbytes)        posix_fallocate, else zeros are written
    can_pass_descriptors()      else the other process opens them by name, under /proc
    after_fork(call)            else there are no forks

A call is tried, and the fallback is used if it fails. ``hasattr`` reflects only the build of Python: an old kernel says
ENOSYS, a container's seccomp profile says EPERM, EACCES or whatever its author chose. Callers own and close all
descriptors. This module imports neither NumPy nor torch.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sharded_loader.base.private import posix_shared_memory

Call = TypeVar("Call", bound=Callable[[], object])

MAP_OPTIONS: dict[str, Any] = {} if sys.version_info < (3, 13) or sys.platform == "win32" else {"trackfd": False}
"""Options of ``mmap.mmap`` that avoid a duplicate of the descriptor, where supported."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Error numbers of an exhausted descriptor limit, which may be temporary."""

PREFIX = "sharded_loader"
"""Prefix of every name that the library gives to shared memory, however short-lived."""

ALLOCATED_AT_ONCE = 32 << 20
"""Bytes per `posix_fallocate` (8 ms)."""

NO_SPACE = (errno.ENOSPC, errno.ENOMEM, getattr(errno, "EDQUOT", errno.ENOSPC))
"""Error numbers of a full disk, memory or quota."""


def write_to_stderr(text: str) -> None:
    """Write a text to descriptor 2 in one call. In a notebook that may be the console instead of the cell."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; None if the kernel does not support it.

    Example:
        >>> fd = open_pidfd(os.getpid())
        >>> if fd is not None:
        ...     os.close(fd)
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, before 5.3, or forbidden
        return None


# -- shared memory --------------------------------------------------------------------------------------------


def _open_memfd(label: str) -> tuple[int, None]:
    return os.memfd_create(label, os.MFD_CLOEXEC), None


def _open_shm(_label: str) -> tuple[int, str]:
    # macOS takes at most 31 characters, and pids of five digits; Linux has seven.
    shared, name = posix_shared_memory(), f"/{PREFIX}-{os.getpid()}-{os.urandom(3).hex()}"
    try:
        fd: int = shared.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    finally:  # also on Ctrl-C
        with contextlib.suppress(OSError):
            shared.shm_unlink(name)
    os.set_inheritable(fd, False)
    return fd, "/dev/shm"


def _open_file(label: str) -> tuple[int, str]:
    fd, path = tempfile.mkstemp(prefix=f"{label}-")
    os.unlink(path)
    return fd, os.path.dirname(path)


def open_memory(label: str, kind: str | None = None) -> tuple[int, str | None]:
    """Open new, empty shared memory without a name that could outlive the process.

    Args:
        label: name of a memfd or a file, shown by system tools.
        kind: ``"memfd"``, ``"shm"`` or ``"file"``; None: the first that works. OSError if none does.

    Returns:
        The descriptor, and the folder if the memory is a file in one, else None.
    """
    for name, opener in (("memfd", _open_memfd), ("shm", _open_shm), ("file", _open_file)):
        if kind in (None, name):
            try:
                return opener(label)
            except (AttributeError, ImportError):  # missing on this system
                last = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    raise
                last = error
    raise last


def allocate(fd: int, nbytes: int) -> None:
    """Allocate the memory behind a descriptor of this size now. A lack of space raises an OSError."""
    if not hasattr(os, "posix_fallocate"):
        return
    # In chunks: before Linux 5.19 any signal restarts the call, and a profiler's timer does so forever.
    for offset in range(0, nbytes, ALLOCATED_AT_ONCE):
        size = min(ALLOCATED_AT_ONCE, nbytes - offset)
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            if error.errno in (*NO_SPACE, errno.EFBIG, errno.EIO):  # others mean that the call is not supported
                raise
            _write_zeros(fd, offset, size)


def _write_zeros(fd: int, offset: int, size: int) -> None:
    zeros = memoryview(bytes(min(size, 1 << 20)))
    end = offset + size
    while offset < end:
        offset += os.pwrite(fd, zeros[: end - offset], offset)


# -- forks ----------------------------------------------------------------------------------------------------


def after_fork(call: Call) -> Call:
    """Call a function in each child that is forked from now on, and return it. A child has no other threads."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=call)
    return call


# -- files ---------------------------------------------------------------------------------------------------


def write_whole(path: Any, data: bytes) -> None:
    """Write a file atomically: on failure (OSError) an older file of this name stays."""
    part = Path(f"{os.fspath(path)}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


# -- descriptors ----------------------------------------------------------------------------------------------


def can_pass_descriptors() -> bool:
    """Return True if this process can send and receive descriptors through a socket. The check takes 30 us."""
    if sys.platform == "win32":
        return False
    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(ours, [b"\0"], [ours.fileno()])
            _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
    except OSError as error:
        return error.errno in NO_DESCRIPTORS  # out of descriptors, but the system can pass them
    for descriptor in descriptors:
        os.close(descriptor)
    return bool(descriptors)


def is_readable(fd: int) -> bool:
    """Return True if a read would not block. POSIX; unlike ``select``, not limited to low descriptor numbers.

    Example:
        >>> reader, writer = os.pipe()
        >>> is_readable(reader), os.write(writer, b"x"), is_readable(reader), os.close(reader), os.close(writer)
        (False, 1, True, None, None)
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def why_refused(error: OSError) -> str:
    """Explain why shared memory could not be allocated, with advice."""
    if error.errno in NO_DESCRIPTORS:
        limit = ""
        with contextlib.suppress(ImportError):  # Windows
            import resource

            limit = f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        return f"the limit{limit} of open files is reached ({error}): raise it (ulimit -n), or close some"
    if error.errno in NO_SPACE:
        return (
            f"the system call failed ({error}); with SHARDED_LOADER_MEMORY=shm, or where the system has no "
            f"memfd_create, the size of the /dev/shm mount is the limit: enlarge it (docker run --shm-size), or use "
            f"smaller batches"
        )
    return f"the system call failed ({error})"


# -- time -----------------------------------------------------------------------------------------------------


def core_seconds() -> tuple[float, float]:
    """Return the seconds that this thread has run, and has waited for a core; it takes 13 us.

    Only Linux reports waits for a core; elsewhere they are 0.

    Example:
        >>> began, _ = core_seconds()
        >>> _ = sum(range(100_000))
        >>> core_seconds()[0] > began
        True
    """
    waited = 0
    # A file object closes itself if an interruption leaves it behind.
    with contextlib.suppress(OSError, ValueError, IndexError), io.FileIO("/proc/thread-self/schedstat") as file:
        waited = int(file.read(100).split()[1])
    return time.thread_time(), waited / 1e9


# -- environment variables --------------------------------------------------------------------------------------------


def integer(name: str, default: int, *, least: int, advice: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number in an environment variable, or ``default`` if it is unset or empty.

    Anything but an integer of at least ``least`` raises a ValueError that ends with ``advice``.

    Example:
        >>> integer("RANK", 0, least=0, advice="unset it", environ={"RANK": "3"})
        3
        >>> integer("RANK", 0, least=0, advice="unset it", environ={"RANK": "abc"})
        Traceback (most recent call last):
        ...
        ValueError: the environment variable RANK is 'abc'; it must be an integer of at least 0: unset it
    """
    given = environ.get(name)
    with contextlib.suppress(ValueError):
        number = int((given or "").strip() or default)
        if number >= least:
            return number
    raise ValueError(
        f"the environment variable {name} is {given!r}; it must be an integer of at least {least}: {advice}"
    )


LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Environment variables that hold the rank within the machine."""


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if an environment variable is set, and neither empty nor 0.

    Example:
        >>> [is_on("X", environ) for environ in ({}, {"X": ""}, {"X": "0"}, {"X": "1"})]
        [False, False, False, True]
    """
    return environ.get(name, "").strip() not in ("", "0")


PORTABLE = not hasattr(select, "poll") or is_on("SHARDED_LOADER_PORTABLE")
"""Use only calls available on every system: no ``poll``, and no descriptors passed to workers."""

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Variables that numerical libraries read once, on load, so that a worker process uses one thread of each."""
