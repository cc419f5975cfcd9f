"""Memory that is lent, and comes back when the last array over it has gone.

    Leases().lend(array, held)                 `held` comes back when the array has gone
    Leases().ended() -> what has come back
    ReusedMemory(shape, dtype) -> array        for large batches; small arrays are `numpy.empty`'s

A lease is a weak reference to the array that is lent, which is the base of all its views and tensors. When that
array dies, in any thread or inside the garbage collector, the reference is appended to a deque. The lender finds it
there. No lock is needed: any thread may call, also a signal handler inside a call.

*ReusedMemory.* New memory costs a page fault per 4 KB when it is written to: 6 ms for a batch of 38 MB. The C library
returns memory of this size to the system as soon as a batch is dropped. So this library keeps the block, and uses it
for a later batch.

A block is an anonymous mapping, private to this process: a process that the user forks has its own copy of it. A block
that was not wanted for `KEPT` calls is given back to the system.

What can go wrong: the system has no memory (MemoryError, as with `numpy.empty`).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")

LEAST_BYTES = 1 << 20
"""Smaller arrays are new: the C library uses their memory again by itself."""

KEPT = 32
"""Large arrays that are made before a block that is not wanted goes: as many as eight threads have in flight."""

_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}

_STEPS = 8
"""Sizes of blocks in each factor of two: batches of slightly different sizes share blocks, at a loss of an eighth."""


class Lease(weakref.ref):  # type: ignore[type-arg]
    """A reference to an array that is lent. Its callback is C code, which runs safely anywhere.

    Attributes:
        held: what comes back when the array has gone.
    """

    __slots__ = ("held",)
    held: Any


class Leases(Generic[T]):
    """What is lent, and what has come back.

    Example:
        >>> leases, array = Leases(), np.zeros(3)
        >>> leases.lend(array, "memory")
        >>> del array
        >>> list(leases.ended())
        ['memory']
    """

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}  # by their ids; a lease that is not kept would not tell of its end
        self._ended: deque[Lease] = deque()

    def lend(self, array: Any, held: T) -> None:
        """Have ``held`` come back when ``array`` has gone."""
        lease = Lease(array, self._ended.append)
        lease.held = held
        self._leases[id(lease)] = lease

    def ended(self) -> Iterator[T]:
        """What has come back since the last call. Each step is one that no other thread can divide."""
        with contextlib.suppress(IndexError):
            while True:
                lease = self._ended.popleft()
                del self._leases[id(lease)]
                yield lease.held


class ReusedMemory:
    """An allocator (`sharded_loader.batching.protocol.Empty`). Large arrays lie in memory that is used again.

    Attributes:
        least_bytes: smaller arrays are `numpy.empty`'s.

    Example:
        >>> empty = ReusedMemory()
        >>> where = empty((3, 1 << 20), np.dtype(np.uint8)).ctypes.data  # the array goes at once
        >>> empty((3, 1 << 20), np.dtype(np.uint8)).ctypes.data == where
        True
    """

    least_bytes = LEAST_BYTES

    def __init__(self) -> None:
        self._leases: Leases[mmap.mmap] = Leases()
        # By size, those that came back last at the end; each with the number of the call that found it free.
        self._free: dict[int, list[tuple[int, mmap.mmap]]] = {}
        self._calls = 0

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        whole = self._lend(_rounded(nbytes))
        return np.ndarray(shape, dtype, whole)

    def clear(self) -> None:
        """Give back what is not held; what is held goes with its last holder."""
        self._leases, self._free = Leases(), {}

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for later batches, and not lent."""
        return sum(len(block) for blocks in list(self._free.values()) for _, block in blocks)

    def _lend(self, size: int) -> np.ndarray[Any, np.dtype[Any]]:
        self._calls += 1
        self._find_ended()
        try:
            _, block = self._free[size].pop()  # it may still be in the core's cache
        except (KeyError, IndexError):
            block = mmap.mmap(-1, size, **_PRIVATE)
        # An array of its own for each lease: NumPy makes it the base of all views of it.
        whole = np.frombuffer(block, np.uint8)
        self._leases.lend(whole, block)
        return whole

    def _find_ended(self) -> None:
        """Put what has come back among the free blocks."""
        for block in self._leases.ended():
            self._free.setdefault(len(block), []).append((self._calls, block))
        for blocks in list(self._free.values()):
            with contextlib.suppress(IndexError):
                while self._calls - blocks[0][0] > KEPT:
                    blocks.pop(0)


def _rounded(nbytes: int) -> int:
    """The size of the block for this number of bytes: a multiple of an eighth of the power of two below, and of a page.

    Example:
        >>> [_rounded(size) // mmap.PAGESIZE for size in (1 << 20, 9_000_000)]
        [256, 2304]
    """
    step = max(mmap.PAGESIZE, (1 << (nbytes.bit_length() - 1)) // _STEPS)
    return -(-nbytes // step) * step
