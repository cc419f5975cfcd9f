"""Many short stretches of a file in one buffer, with two system calls: Linux only. `RecordFile` reads them else.

    file --map--> pages --pwritev, with the table of all stretches--> scratch (memfd) --pread--> bytes

A read of its own for each of 1,024 records of 300 bytes takes 1.3 ms, the batch with it 2.1 ms; this way 0.8 (a plain
reader takes 4.7). Nothing here touches the map: only the kernel copies out of it. So a file that is truncated, or whose
disk fails, makes the call fail or return too little. A process that read the map itself would die of SIGBUS.

Only for short records (`MEAN_BYTES`). If a file is not in the system's cache, each page of a map is read alone: 256
records of 1 KB take 7.7 ms (8.2 with a read for each), of 2 KB 11.2 (9.5), of 12 KB 33 (12).

Owns: a map per file, for at most `MAPS` files, each with a descriptor. The process owns one scratch file per thread
that reads at the same time. Some tools count a map as memory of the process. It is the system's cache of the file,
which goes when memory is wanted.
What can go wrong: no map or no scratch (another system, a limit), a file that has shrunk, a call that is cut short. All
of these are None: the caller reads in another way, which also names what is damaged.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections import deque
from typing import Any

import numpy as np

from sharded_loader.data.bulk import Int64s

LEAST = 32
"""Stretches for which a table pays."""

MOST = 1024
"""Stretches in one call: what Linux takes."""

MEAN_BYTES = 1024
"""Of a stretch; longer ones are left to single reads."""

MAPS = 64
"""Files that are mapped at the same time: a program may have hundreds open, and few descriptors."""

KEPT_BYTES = 4 << 20
"""A scratch file that has grown beyond this gives its memory back."""


def _system_call() -> Any:
    """``pwritev`` by addresses: the slices of a map that `os.pwritev` wants take 0.4 ms to make. None elsewhere."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or not hasattr(os, "memfd_create"):
        return None
    try:
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).pwritev
    except (ImportError, OSError, AttributeError):  # a Python without ctypes, a C library without the call
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    call.restype = ctypes.c_ssize_t
    return call


_pwritev = _system_call()


class _Scratch:
    """An unnamed file in memory. Closes when it is collected."""

    def __init__(self) -> None:
        self.fd = -1
        self.fd = os.memfd_create("sharded_loader-records", os.MFD_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


_scratches: deque[_Scratch] = deque()
"""Those of this process that nobody uses now. They go with the last map."""

_mapping: weakref.WeakSet[Gatherer] = weakref.WeakSet()
"""Those that have a map."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_scratches.clear)  # they are the parent's


class Gatherer:
    """Reads stretches of one open file, in any thread of the process that made it.

    Args:
        fd: the file, open for reading. It stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._map: Any = None
        self._works = _pwritev is not None

    def __del__(self) -> None:
        if self._map is not None:
            _mapping.discard(self)
            if not _mapping:
                _scratches.clear()

    def read(self, offsets: Int64s, sizes: Int64s) -> bytes | None:
        """The stretches one after the other; None if they cannot be had in this way.

        Args:
            offsets: where each begins.
            sizes: bytes of each, at least 1.
        """
        total = int(np.add.reduce(sizes))
        if not self._works or len(offsets) < LEAST or total > MEAN_BYTES * len(offsets):
            return None
        try:
            end = int(np.maximum.reduce(offsets + sizes))
            mapped = self._map
            if mapped is None or len(mapped) < end:
                if os.fstat(self._fd).st_size < end or (mapped is None and len(_mapping) >= MAPS):
                    return None
                mapped = self._map = mmap.mmap(self._fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                mapped.madvise(mmap.MADV_RANDOM)  # the system need not read the neighbours of a record too
                _mapping.add(self)
            try:
                scratch = _scratches.pop()
            except IndexError:
                scratch = _Scratch()
        except (OSError, ValueError):  # a file that cannot be mapped, no descriptor left
            self._works = False
            return None
        table = np.empty((len(offsets), 2), np.int64)  # of `struct iovec`: address and length
        address = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
        np.add(offsets, address, out=table[:, 0])
        table[:, 1] = sizes
        place = table.__array_interface__["data"][0]
        found = None
        done = 0
        for begin in range(0, len(table), MOST):
            wanted = int(np.add.reduce(sizes[begin : begin + MOST]))
            if _pwritev(scratch.fd, place + 16 * begin, min(MOST, len(table) - begin), done) != wanted:
                break
            done += wanted
        # In the last page behind a new end of the file zeros are read.
        if done == total and os.fstat(self._fd).st_size >= end:
            found = os.pread(scratch.fd, total, 0)
        if total > KEPT_BYTES:
            with contextlib.suppress(OSError):
                os.ftruncate(scratch.fd, 0)
        _scratches.append(scratch)
        return found if found is not None and len(found) == total else None
