"""Batches in Ray's object store, mapped into this process, while the user holds them.

    Lent.take(memory) -> writable bytes        mapped where they are, or copied out

Ray maps the object store into the driver and gives read-only arrays over it. No other process reads the object of a
batch, so it may be written to like any other batch: the array that is handed out is a second one over the same memory,
which says so. It holds Ray's array, and Ray keeps the object until that is gone. So the last view of a batch, in any
thread, gives its memory back. All batches of a group lie in one object, and go together.

In two cases a batch is copied out, and its object goes at once: the user holds `max_bytes` already, or a device is
going to copy the batch, from page-locked memory.

Nothing here waits. What can go wrong: no memory for a copy (MemoryError).
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from sharded_loader.base.notices import Notices
from sharded_loader.batching.protocol import Empty, new_array

Bytes = np.ndarray[Any, Any]


class _Owner:
    """Holds an array of Ray's, and offers its memory as writable."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        interface = dict(memory.__array_interface__)
        interface["data"] = interface["data"][0], False
        self.__array_interface__ = interface


class _Lease(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("nbytes",)
    nbytes: int


class Lent:
    """Counts what the user holds.

    Args:
        max_bytes: if the user holds more, batches are copied.

    Attributes:
        empty: gives the memory of copies.
        copies_all: whether all batches are copied into it.
        max_bytes: the bound.

    Example:
        >>> stored = np.arange(3, dtype=np.uint8)
        >>> stored.setflags(write=False)
        >>> lent = Lent(100)
        >>> batch = lent.take(stored)
        >>> batch[0], lent.nbytes
        (np.uint8(0), 3)
        >>> del batch
        >>> lent.nbytes
        0
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.empty: Empty = new_array
        self.copies_all = False
        self.notices = Notices()
        self._held = 0
        self._leases: set[_Lease] = set()
        self._ended: deque[_Lease] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes of the object store that the user holds."""
        while self._ended:
            lease = self._ended.popleft()
            self._leases.discard(lease)
            self._held -= lease.nbytes
        return self._held

    def take(self, memory: Bytes) -> Bytes:
        """The bytes of a group, for the user."""
        if self.copies_all or self.nbytes + memory.nbytes > self.max_bytes:
            if not self.copies_all:
                text = (
                    f"{memory.nbytes:,} bytes of batches are copied out of Ray's object store: {self._held:,} of the "
                    f"{self.max_bytes:,} bytes that may be held are in use; see RayPool(max_bytes=)"
                )
                self.notices.happened("slow_batches", text)
            copy = self.empty(memory.shape, memory.dtype)
            copy[...] = memory
            return copy
        owner = _Owner(memory)
        lease = _Lease(owner, self._ended.append)
        lease.nbytes = memory.nbytes
        self._leases.add(lease)
        self._held += memory.nbytes
        return np.asarray(owner)
