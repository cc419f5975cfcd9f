"""Memory that other processes find: by its name, or by a key that the ranks of a machine have in common.

    open_nameless(label) -> (fd, name)    new memory; other processes of this user open it by its name
    open_named(name) -> fd
    Opened(fd, name, is_temporary)        closes it; as long as it lives, it may offer its memory
    meet(key, join, make) -> Opened       what another process offers under this key, or else what this one makes

``meet`` leaves nothing behind, whoever is killed: all that it uses are sockets with abstract names (Linux), which the
kernel drops with their last process.

    @sharded_loader/<key>                         *claimed*: its process looks, makes, and offers; others wait
    @sharded_loader/<key>/<pid>/<fd>/<number>     *offered*: /proc/<pid>/fd/<fd> is memory of this key

No process answers: a newcomer finds the names in /proc/net/unix, and opens the memory by itself. Each one that joins
offers it too, so that it can be found when the first process has ended. A claim ends with its process. The kernel then
ends the connections of those who wait, and the next one makes what is missing.

What can go wrong: elsewhere than on Linux, and where a process may not open the other's memory (other containers or
users), each process makes its own. Memory of another user is never opened.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import re
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from sharded_loader.base.private import blake2b
from sharded_loader.base.system import MAP_OPTIONS, PREFIX, close_locked, open_memory
from sharded_loader.batching.protocol import Array

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

    Where the system has no such names, the memory is a temporary file (see `Opened`).
    """
    if os.path.isdir("/proc/self/fd"):
        fd, _ = open_memory(f"{PREFIX}-{label}")
        return fd, name_of(fd)
    return tempfile.mkstemp(prefix=f"{PREFIX}-{label}-")


class Opened:
    """A descriptor that is closed with this object, and its mapping. A temporary file is deleted with it.

    Args:
        fd: taken over.
        name: see `open_nameless`.
        is_temporary: the name is that of a temporary file of this process.
    """

    offer: Any = None
    """The socket by which other processes find the memory."""

    def __init__(self, fd: int, name: str, is_temporary: bool) -> None:
        self.fd, self.name = fd, name
        if is_temporary and not name.startswith("/proc/"):
            weakref.finalize(self, _remove, name, os.getpid())

    def map(self, nbytes: int) -> Array:
        """The first bytes, over the shared memory."""
        return np.frombuffer(mmap.mmap(self.fd, nbytes, **MAP_OPTIONS), np.uint8)

    def __del__(self) -> None:
        if self.offer is not None:
            self.offer.close()
        close_locked(self.fd)


def _remove(name: str, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        with contextlib.suppress(OSError):
            os.unlink(name)


# -- by a key ----------------------------------------------------------------------------------------------------------

Found = TypeVar("Found", bound=Opened)

_numbers = itertools.count()
_claims: set[socket.socket] = set()


def _drop_claims() -> None:
    """In a forked child: the claims are those of the process that may die."""
    while _claims:
        _claims.pop().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_claims)


def meet(key: str, join: Callable[[int], Found | None], make: Callable[[], Found]) -> Found:
    """What another process of this user offers under a key, or else what this one makes. Then this one offers it too.

    Args:
        key: any text.
        join: gets a descriptor of memory that is offered, and takes it over; None: it is not what was looked for.
        make: makes the memory. It is called by one process at a time.

    Raises:
        What ``make`` raises. The next process then calls its own.

    Example:
        >>> one = meet("doctest", lambda fd: None, lambda: Opened(*open_nameless("one"), is_temporary=True))
        >>> other = meet("doctest", lambda fd: Opened(fd, name_of(fd), False), lambda: one)
        >>> os.path.sameopenfile(one.fd, other.fd)
        True
    """
    if not os.path.exists("/proc/self/ns/pid"):
        return make()
    label = label_of(key)
    while True:
        if (found := _joined(label, join)) is not None:
            return found
        with _claimed(label) as alone:
            if alone:
                return _joined(label, join) or _offered(label, make())


def label_of(key: str) -> str:
    """How the names of the sockets of a key begin: those of this user, for processes that see each other. Linux."""
    place = f"{os.geteuid()} {os.stat('/proc/self/ns/pid').st_ino} {key}"
    return f"{PREFIX}/{blake2b(place.encode(errors='replace'), digest_size=16).hexdigest()}"


def _joined(label: str, join: Callable[[int], Found | None]) -> Found | None:
    names = b""
    with contextlib.suppress(OSError), open("/proc/net/unix", "rb") as file:
        names = file.read()
    for pid, number in re.findall(rf"@{label}/(\d+)/(\d+)/".encode(), names):
        with contextlib.suppress(OSError):  # its process has ended
            fd, found = open_named(f"/proc/{int(pid)}/fd/{int(number)}"), None
            try:
                if os.fstat(fd).st_uid == os.geteuid() and (found := join(fd)) is not None:
                    return _offered(label, found)
            finally:
                if found is None:
                    close_locked(fd)
    return None


def _offered(label: str, found: Found) -> Found:
    with contextlib.suppress(OSError):
        found.offer = socket.socket(socket.AF_UNIX)
        found.offer.bind(f"\0{label}/{os.getpid()}/{found.fd}/{next(_numbers)}")
    return found


@contextlib.contextmanager
def _claimed(label: str) -> Iterator[bool]:
    """Give True to one process at a time. Another one waits until that is done, or has ended, and gets False."""
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(socket.socket(socket.AF_UNIX))
            own.bind(f"\0{label}")
            own.listen()
        except OSError as error:  # in a sandbox without sockets, each process makes its own
            yield error.errno != errno.EADDRINUSE or not _has_waited(label)
            return
        _claims.add(own)
        try:
            yield True
        finally:
            _claims.discard(own)


def _has_waited(label: str) -> bool:
    """Wait for the end of a claim; False if it is that of another user.

    Nobody accepts the connection. The kernel ends it with the claim.
    """
    with socket.socket(socket.AF_UNIX) as own:
        try:
            own.connect(f"\0{label}")
            peer = struct.unpack("3i", own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            if peer[1] != os.geteuid():
                return False
            own.recv(1)
        except ConnectionError:  # it has ended already, or does not listen yet
            time.sleep(0.001)
    return True
