"""What the operating system gives: calls that it may not allow, each with its twin, and environment variables.

    open_pidfd(pid)             None: the caller watches a pipe that the process holds
    open_memory(label, kind)    memfd_create, else shm_open, else a file without a name
    allocate(fd, nbytes)        posix_fallocate, else zeros are written
    can_pass_descriptors()      False: the other process opens them by name, under /proc

    is_readable(fd)             whether a read would return at once
    write_whole(path, data)     a file that appears when it is whole
    with lock_at(path):         a file that only serves as a lock: one thread of one process at a time
    write_to_stderr(text)       straight to descriptor 2, where the processes of a program write side by side
    core_seconds()              how long this thread has run, and has waited for a core
    why_refused(error)          an OSError of these calls in words

    integer("RANK", 0, least=0, advice="")   the number that an environment variable holds; an error names the variable
    is_on("SHARDED_LOADER_PORTABLE")         whether an environment variable switches something on

A call is tried, and its twin is used when the call fails. ``hasattr`` tells only what Python was built with: an old
kernel says ENOSYS, a seccomp profile of a container says EPERM, EACCES or what its author chose.

Owns nothing: the caller closes the descriptors. Nothing here imports NumPy or torch.
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
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharded_loader.base.private import posix_shared_memory

MAP_OPTIONS: dict[str, Any] = {} if sys.version_info < (3, 13) else {"trackfd": False}
"""For ``mmap.mmap``: it makes no duplicate of the descriptor, where that can be said."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""A limit is reached: for now there are no descriptors."""

PREFIX = "sharded_loader"
"""How every name begins that the library gives to shared memory, however briefly it exists."""

ALLOCATED_AT_ONCE = 32 << 20
"""Bytes per `posix_fallocate`: 8 ms."""

LOCK_POLL = 0.005
"""Seconds between two looks at a lock that others hold."""

_NO_ROOM = {getattr(errno, name) for name in ("ENOSPC", "ENOMEM", "EDQUOT", "EFBIG", "EIO") if hasattr(errno, name)}
"""Errors of an allocation that mean what they say: there is no room. All others mean that the call does not work."""


def write_to_stderr(text: str) -> None:
    """Write a text to descriptor 2 in one piece. In a notebook that may be the console, not the cell."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))


def open_pidfd(pid: int) -> int | None:
    """A descriptor that can be read when the process has ended; None where the kernel gives none.

    Example:
        >>> fd = open_pidfd(os.getpid())
        >>> if fd is not None:
        ...     os.close(fd)
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, before 5.3, or not allowed
        return None


# -- shared memory --------------------------------------------------------------------------------------------


def _open_memfd(label: str) -> tuple[int, None]:
    return os.memfd_create(label, os.MFD_CLOEXEC), None


def _open_shm(label: str) -> tuple[int, str]:
    shared, name = posix_shared_memory(), f"/{label}-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        fd: int = shared.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    finally:  # also when a Ctrl-C comes in between
        with contextlib.suppress(OSError):
            shared.shm_unlink(name)
    os.set_inheritable(fd, False)
    return fd, "/dev/shm"


def _open_file(label: str) -> tuple[int, str]:
    fd, path = tempfile.mkstemp(prefix=f"{label}-")
    os.unlink(path)
    return fd, os.path.dirname(path)


def open_memory(label: str, kind: str | None = None) -> tuple[int, str | None]:
    """A descriptor of new, empty memory that processes can share, without a name that could stay behind.

    Args:
        label: shown by the system's own tools.
        kind: ``"memfd"``, ``"shm"`` or ``"file"``; None: the first of them that works.

    Returns:
        The descriptor, and the folder where the memory is a file; None if it is in no folder.

    Raises:
        OSError: none works, or there are no descriptors.
    """
    for name, opener in (("memfd", _open_memfd), ("shm", _open_shm), ("file", _open_file)):
        if kind in (None, name):
            try:
                return opener(label)
            except (AttributeError, ImportError):  # this system has no such call
                last = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            except OSError as error:
                if error.errno in NO_DESCRIPTORS:
                    raise
                last = error
    raise last


def allocate(fd: int, nbytes: int) -> None:
    """Have the system set aside the memory of a descriptor that was made this large, now.

    Raises:
        OSError: there is no room.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    # In pieces: before Linux 5.19 any signal made one call start over, and a profiler's timer for ever.
    for offset in range(0, nbytes, ALLOCATED_AT_ONCE):
        size = min(ALLOCATED_AT_ONCE, nbytes - offset)
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            _write_zeros(fd, offset, size)


def _write_zeros(fd: int, offset: int, size: int) -> None:
    zeros = memoryview(bytes(min(size, 1 << 20)))
    end = offset + size
    while offset < end:
        offset += os.pwrite(fd, zeros[: end - offset], offset)


# -- files that processes share -------------------------------------------------------------------------------

_at_place = threading.Lock()
"""Held where a read or a write at a place takes two calls."""


def lock_at(path: Any) -> Any:
    """A lock that all processes of this machine share by the name of a file. Each call makes another lock object.

    Raises:
        OSError, NotImplementedError: when it is taken, if the file system has no locks, or the file cannot be made.
    """
    from filelock import FileLock

    return FileLock(path, thread_local=False, poll_interval=LOCK_POLL)


def write_at(fd: int, data: Any, offset: int) -> None:
    """Write bytes to a place in a file. Unlike a write to a mapping, it tells by an error that there is no room.

    Args:
        fd: of the file.
        data: bytes, or a flat view of bytes.
        offset: the place.

    Raises:
        OSError: a full disk, a limit of the file's size.
    """
    data = memoryview(data)
    if not hasattr(os, "pwrite"):  # Windows
        with _at_place:
            os.lseek(fd, offset, os.SEEK_SET)
            while data:
                data = data[os.write(fd, data) :]
        return
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read bytes from a place in a file; less at its end."""
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    with _at_place:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, nbytes)


def write_whole(path: Any, data: bytes) -> None:
    """Write a file whole or not at all: then an older file of this name stays.

    Raises:
        OSError: it cannot be written.
    """
    part = Path(f"{os.fspath(path)}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


# -- descriptors ----------------------------------------------------------------------------------------------


def can_pass_descriptors() -> bool:
    """Whether this process may send a descriptor through a socket, and receive one. To find out takes 30 us."""
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
    """Whether a read would return at once. POSIX; unlike ``select``, for any number of open descriptors.

    Example:
        >>> reader, writer = os.pipe()
        >>> is_readable(reader), os.write(writer, b"x"), is_readable(reader), os.close(reader), os.close(writer)
        (False, 1, True, None, None)
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def why_refused(error: OSError) -> str:
    """Why there was no shared memory, and what to do."""
    if error.errno in NO_DESCRIPTORS:
        limit = ""
        with contextlib.suppress(ImportError):  # Windows
            import resource

            limit = f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        return f"the limit{limit} of open files is reached ({error}): raise it (ulimit -n), or close some"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return (
            f"the system call failed ({error}); with SHARDED_LOADER_MEMORY=shm, or where the system has no "
            f"memfd_create, the size of the /dev/shm mount is the limit: enlarge it (docker run --shm-size), or use "
            f"smaller batches"
        )
    return f"the system call failed ({error})"


# -- time -----------------------------------------------------------------------------------------------------


def core_seconds() -> tuple[float, float]:
    """Seconds in which a core ran this thread, and in which the thread waited for a core. In the others it waited for
    something else. It takes 13 us.

    Only Linux tells of waits for a core. Elsewhere they are 0.

    Example:
        >>> began, _ = core_seconds()
        >>> _ = sum(range(100_000))
        >>> core_seconds()[0] > began
        True
    """
    waited = 0
    # A file object: one that an interruption leaves behind closes itself.
    with contextlib.suppress(OSError, ValueError, IndexError), io.FileIO("/proc/thread-self/schedstat") as file:
        waited = int(file.read(100).split()[1])
    return time.thread_time(), waited / 1e9


# -- environment variables --------------------------------------------------------------------------------------------


def integer(name: str, default: int, *, least: int, advice: str, environ: Mapping[str, str] = os.environ) -> int:
    """The number that an environment variable holds.

    Args:
        name: name of the variable.
        default: what an unset or empty variable means.
        least: the smallest number allowed.
        advice: what to do instead; the end of the error message.
        environ: where to look.

    Raises:
        ValueError: the variable holds something else.

    Example:
        >>> integer("RANK", 0, least=0, advice="unset it", environ={"RANK": "3"})
        3
        >>> integer("RANK", 0, least=0, advice="unset it", environ={"RANK": "abc"})
        Traceback (most recent call last):
        ...
        ValueError: the environment variable RANK is 'abc'; it must be an integer of at least 0: unset it
    """
    given = environ.get(name)
    try:
        number = int((given or "").strip() or default)
        if number >= least:
            return number
    except ValueError:
        pass
    raise ValueError(
        f"the environment variable {name} is {given!r}; it must be an integer of at least {least}: {advice}"
    )


LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Environment variables that number the ranks of a machine."""


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an environment variable switches something on: it is set, and neither empty nor 0.

    Example:
        >>> [is_on("X", environ) for environ in ({}, {"X": ""}, {"X": "0"}, {"X": "1"})]
        [False, False, False, True]
    """
    return environ.get(name, "").strip() not in ("", "0")


PORTABLE = not hasattr(select, "poll") or is_on("SHARDED_LOADER_PORTABLE")
"""Use only what there is on every system: no ``poll``, and no descriptors that are passed to workers."""

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Variables that numerical libraries read once, when they are loaded: a worker process wants one thread of each."""
