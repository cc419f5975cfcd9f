"""System calls that a kernel, a container or a platform may refuse, each with its twin.

    open_pidfd(pid)             None: the caller watches a pipe that the process holds
    open_memory(label, kind)    memfd_create, else shm_open, else a file without a name
    allocate(fd, nbytes)        posix_fallocate, else zeros are written
    is_readable(fd)             poll, else select
    can_pass_descriptors()      False: the other process opens them by name, under /proc

A call is tried, and its twin is used when the call fails. ``hasattr`` tells only what Python was built with: an old
kernel says ENOSYS, a seccomp profile of a container says EPERM, EACCES or what its author chose.

Owns nothing: the caller closes the descriptors. Nothing here imports NumPy or torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import tempfile
from collections.abc import Callable

PREFIX = "sharded_loader"
"""How every name begins that the library gives to shared memory, however briefly it exists."""

ALLOCATED_AT_ONCE = 32 << 20
"""Bytes per `posix_fallocate`: 8 ms."""

_WRITTEN_AT_ONCE = 1 << 20

_NO_ROOM = {getattr(errno, name) for name in ("ENOSPC", "ENOMEM", "EDQUOT", "EFBIG", "EIO") if hasattr(errno, name)}
"""Errors of an allocation that mean what they say: there is no room. All others mean that the call does not work."""

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


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


def _open_memfd(label: str) -> int:
    try:
        return os.memfd_create(label, os.MFD_CLOEXEC)
    except AttributeError as error:  # not Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error


def _open_shm(label: str) -> int:
    try:
        import _posixshmem  # type: ignore[import-not-found]
    except ImportError as error:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
    name = f"/{PREFIX}-{os.getpid()}-{os.urandom(8).hex()}"
    try:
        fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    finally:  # also when a Ctrl-C comes in between
        with contextlib.suppress(OSError):
            _posixshmem.shm_unlink(name)
    os.set_inheritable(fd, False)
    return fd


def _open_file(label: str) -> int:
    fd, path = tempfile.mkstemp(prefix=f"{label}-")
    os.unlink(path)
    return fd


_MEMORY: dict[str, Callable[[str], int]] = {"memfd": _open_memfd, "shm": _open_shm, "file": _open_file}


def open_memory(label: str, kind: str | None = None) -> tuple[int, str]:
    """A descriptor of new, empty memory that processes can share, without a name that could stay behind.

    Args:
        label: shown by the system's own tools.
        kind: ``"memfd"``, ``"shm"`` or ``"file"``; None: the first of them that works.

    Returns:
        The descriptor, and the kind.

    Raises:
        OSError: none works, or there are no descriptors.
    """
    for name in _MEMORY if kind is None else (kind,):
        try:
            return _MEMORY[name](label), name
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
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
    zeros = memoryview(bytes(min(size, _WRITTEN_AT_ONCE)))
    end = offset + size
    while offset < end:
        offset += os.pwrite(fd, zeros[: end - offset], offset)


# -- descriptors ----------------------------------------------------------------------------------------------


def is_readable(fd: int) -> bool:
    """Whether a read would return at once; for any number of open descriptors, where the platform has ``poll``."""
    if hasattr(select, "poll"):  # `select` takes no descriptor above 1,023
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(0))
    return bool(select.select([fd], [], [], 0)[0])


def can_pass_descriptors() -> bool:
    """Whether this process may send a descriptor through a socket, and receive one. To find out takes 30 us."""
    try:
        return _pass_one()
    except OSError as error:
        return error.errno in _NO_DESCRIPTORS  # then nothing was refused


def _pass_one() -> bool:
    if sys.platform == "win32":
        return False
    ours, theirs = socket.socketpair()
    try:
        socket.send_fds(ours, [b"\0"], [ours.fileno()])
        _, descriptors, _, _ = socket.recv_fds(theirs, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(descriptors)
    finally:
        ours.close()
        theirs.close()
