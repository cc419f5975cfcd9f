"""The shared memory of a process pool: a few segments, divided into slots, each of which holds one batch at a time.

    free -> a worker writes -> lent to the user -> free

    RecentSizes.wanted -> nbytes            how large the next slot should be
    Arena.take(nbytes) -> Slot              when a task is sent
    Arena.lend(slot, places) -> buffers     when its batch has arrived; the arrays over the buffers keep the lease
    Arena.give(slot)                        when nobody wants the slot, and its writer has ended

A segment is mapped once, so a batch costs no system call and no page fault. Segments grow geometrically, because each
of them holds a descriptor in every process. Slots begin at multiples of 64 bytes.

A lease is a weak reference to the array that is lent, which is the base of all its views and tensors. When that
array dies, in any thread or inside the garbage collector, the reference is appended to a deque. The lender finds it
there. No lock is needed: any thread may call, also a signal handler inside a call. The next `take` uses the slot again.

*ReusedMemory* is an allocator for large batches. New memory costs a page fault per 4 KB when it is written to: 6 ms for
a batch of 38 MB. The C library returns memory of this size to the system as soon as a batch is dropped. So this library
keeps the block, an anonymous mapping that is private to this process, and uses it for a later batch. A block that was
not wanted for `KEPT` calls is given back to the system.

What can go wrong:
  * the bound is reached and all slots are held: `take` returns None, and the batch goes through the pipe;
  * the system gives no descriptor, or the mount has no room: a warning, and `take` returns None too. The arena asks
    again from time to time;
  * the machine or a cgroup has no memory left: MemoryError, because the pipe would need the same memory.
Nothing here waits for memory that the user holds.

A process that the user forks can read the batches that are lent at that moment. Their slots are never used again.

Source of the idea: the slot rings of SeqTools and SPDL; leases instead of a fixed number of slots are ours.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import math
import mmap
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from sharded_loader.base import limits, system
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.batching.protocol import Array, Empty
from sharded_loader.memory.codec import ALIGNMENT, MOVES, SIZE
from sharded_loader.memory.segments import Segment, Slot, create

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

    def lend(self, array: object, held: T) -> None:
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

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        whole = self._lend(_rounded(nbytes))
        return np.ndarray(shape, dtype, whole)

    def clear(self) -> None:
        """Give back what is not held; what is held goes with its last holder."""
        self._leases, self._free = Leases(), {}

    def _lend(self, size: int) -> Array:
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


PAGE = 4096
FIRST_SEGMENT = 4 << 20
"""Enough for the batches in flight of most small datasets; allocating it takes 1 ms."""

PAUSE = 256
"""Batches before the system is asked again for what it has denied: to ask takes 0.2 ms."""

WINDOW = 64
"""Batches: where sizes vary at random, one batch in 64 does not fit its slot, and is copied once more."""

LEFT_ALONE: list[Segment] = []
"""Those that a device may still read when their arena was closed. They stay mapped. An arena looks again whenever it
closes, or makes a segment."""

Register = Callable[[mmap.mmap], Callable[[], Any] | None]


class RecentSizes:
    """How large the next slot should be: the largest of the last ``window`` batches, and a sixteenth more.

    Not the mean: a slot that is too small costs a copy through the pipe, one that is too large costs only memory.

    Args:
        window: how many sizes are remembered.

    Attributes:
        wanted: bytes; 0 before the first batch.

    Example:
        >>> sizes = RecentSizes(window=2)
        >>> for nbytes in (1600, 160, 160):
        ...     sizes.note(nbytes)
        ...     print(sizes.wanted)
        1700
        1700
        170
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._sizes: deque[int] = deque(maxlen=window)
        self.wanted = 0

    def note(self, nbytes: int) -> None:
        """A batch of ``nbytes`` has arrived."""
        self._sizes.append(nbytes)
        largest = max(self._sizes)
        self.wanted = largest + largest // 16


class Arena:
    """Slots for one pool. One thread at a time uses it; leases end in any thread.

    Args:
        max_bytes: bound on all segments together; None: a quarter of what is free when the first is made,
            shared by the processes of this machine (LOCAL_WORLD_SIZE).
        register: called with the memory of each new segment, which a device is to read by itself. It returns a function
            to call before that memory goes, or None.
        pinned: gives pinned memory, for the tensors of objects that move themselves; None: there is none.
    """

    def __init__(
        self, max_bytes: int | None = None, register: Register | None = None, pinned: Empty | None = None
    ) -> None:
        self.register = register
        self.pinned = pinned
        self.segments: list[Segment] = []
        self._max_bytes = max_bytes
        self._free: list[list[tuple[int, int]]] = []
        self._taken = 0
        self._out: dict[Slot, Lease] = {}  # of each slot that is lent
        self._shared: set[Slot] = set()  # a process that the user has forked can read these
        self._returned: deque[Lease] = deque()
        self._warned = False
        self._paused_until = 0

    @property
    def nbytes(self) -> int:
        """Bytes in all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def lent(self) -> int:
        """How many batches the user holds. Any thread may ask: it counts, and changes nothing."""
        return len(self._out) - len(self._returned)

    def take(self, nbytes: int) -> Slot | None:
        """A free slot of at least ``nbytes``; None at the bound.

        Raises:
            MemoryError: the arena may grow, but the system does not have the memory.
        """
        self._taken += 1
        wanted = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        while self._returned:
            slot: Slot = self._returned.popleft().held
            del self._out[slot]
            if slot in self._shared:
                continue
            if slot.nbytes == wanted:
                return slot  # as it is, where all batches are equally large
            self.give(slot)
        found = self._carve(wanted)
        if found is None and self._grow(wanted):
            found = self._carve(wanted)
        return found

    def give(self, slot: Slot) -> None:
        """Free a slot that is not lent, and join it with its free neighbours."""
        free = self._free[slot.segment]
        start, end = slot.offset, slot.offset + slot.nbytes
        place = bisect.bisect(free, (start, end))
        if place < len(free) and free[place][0] == end:
            end = free.pop(place)[1]
        if place and free[place - 1][1] == start:
            place -= 1
            start = free.pop(place)[0]
        free.insert(place, (start, end))

    def lend(self, slot: Slot, places: Sequence[object]) -> list[Any]:
        """The buffers of a batch. The slot comes back when the last array over it has died.

        Args:
            slot: the slot.
            places: of each buffer, (offset, size) in the slot, or the buffer itself if it is not there. A negative size
                marks an object that the library does not copy to a device itself. It is copied out of memory that a
                device reads: PyTorch would not keep the slot for a copy that the user has begun.
        """
        segment = self.segments[slot.segment]
        # An array of its own for each lease: NumPy makes it the base of all views of it.
        whole = np.frombuffer(segment.mapping, np.uint8, slot.nbytes, slot.offset)
        lease = Lease(whole, self._returned.append)
        lease.held = slot
        self._out[slot] = lease
        buffers = []
        for place in places:
            if type(place) is tuple:
                offset, nbytes = place
                place = part = whole[offset : offset + (abs(nbytes) & SIZE)]
                if nbytes < 0 and segment.unregister is not None:
                    # What moves itself moves from pinned memory. What does not may be held for ever.
                    if self.pinned is not None and -nbytes & MOVES:
                        place = self.pinned(part.shape, part.dtype)
                        place[:] = part
                    else:
                        place = part.copy()
            buffers.append(place)
        return buffers

    def retire_lent(self) -> None:
        """Never use the slots again that are lent now: the user is about to fork. Any thread may call this."""
        self._shared.update(slot for slot, lease in list(self._out.items()) if lease() is not None)

    def close_descriptors(self) -> None:
        """In a forked child: the descriptors belong to the main process."""
        for segment in self.segments:
            segment.close_descriptor()

    def close(self) -> None:
        """Give the segments up. Memory under batches that are held stays until they go."""
        segments = self.segments
        self.segments, self._free = [], []
        # New ones: a lease that ends later must not free a slot of a later segment.
        self._out, self._returned, self._shared = {}, deque(), set()
        with contextlib.ExitStack() as steps:  # each step is done, whatever another one raises
            for segment in (*segments, *LEFT_ALONE):
                steps.callback(_give_up, segment)

    def _carve(self, nbytes: int) -> Slot | None:
        # The first that fits: memory that was just used is used again before memory that was never touched.
        for number, free in enumerate(self._free):
            for place, (start, end) in enumerate(free):
                if end - start >= nbytes:
                    free[place : place + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return Slot(number, start, nbytes)
        return None

    def _grow(self, nbytes: int) -> bool:
        """Another segment that holds at least one slot; False at the bound."""
        if self._taken < self._paused_until:
            return False
        have = self.nbytes
        if self._max_bytes is None:
            self._max_bytes = limits.free_bytes().nbytes // 4 // limits.processes_here()
        room = _pages(self._max_bytes - have)
        least = _pages(nbytes + PAGE - 1)
        if room < least:
            return False
        size = min(_pages(max(FIRST_SEGMENT, 4 * nbytes, have) + PAGE - 1), room)
        free = limits.free_bytes()
        if free.nbytes < size + size // 4:
            # Half of what may be taken, not only one slot: near a limit, too, there are to be few descriptors.
            size = max(least, min(size, _pages(free.nbytes * 2 // 5)))
        if free.nbytes < size + size // 4:
            raise MemoryError(
                f"no room for a batch in shared memory: {size:,} bytes wanted, {have:,} in use, and "
                f"{free.what} leaves {free.nbytes:,}: use smaller batches, fewer workers or a smaller prefetch"
            )
        for left in tuple(LEFT_ALONE):
            _give_up(left)
        with uninterrupted():  # a segment that is not noted would keep its descriptor, and stay registered
            segment = self._create(size, least, have)
            if segment is None:
                self._paused_until = self._taken + PAUSE
                return False
            self.segments.append(segment)
            self._free.append([(0, segment.nbytes)])
            if self.register is not None:
                segment.unregister = self.register(segment.mapping)
        return True

    def _create(self, size: int, least: int, have: int) -> Segment | None:
        """A segment of ``size``, or of as much as a small mount takes; None if shared memory goes no further."""
        while True:
            try:
                return create(len(self.segments), size)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.ENOMEM)
                if full and size > least:
                    size = max(least, _pages(size // 2))
                    continue
                text = f"{size:,} bytes of shared memory wanted, {have:,} in use: {system.why_refused(error)}"
                # What the machine does not have would be missing in the pipe too; not so a small mount (`filename`).
                # With segments of its own the arena may be what fills the machine, and goes on with those.
                if full and not have and error.filename is None:
                    raise MemoryError(text) from error
                if not self._warned:
                    self._warned = True
                    warnings.warn(f"{text}. Until then batches go through the pipe, which is slower", stacklevel=2)
                return None


def _pages(nbytes: int) -> int:
    """The bytes of the whole pages in ``nbytes``."""
    return nbytes // PAGE * PAGE


def _give_up(segment: Segment) -> None:
    """Close a segment; leave its mapping alone if a device may still read it."""
    left_alone = False
    try:
        left_alone = segment.unregister is not None and segment.unregister() is False
    finally:  # where this raises, the device is broken, and reads nothing any more
        if left_alone:
            if segment not in LEFT_ALONE:
                LEFT_ALONE.append(segment)
            segment.close_descriptor()
        else:
            with contextlib.suppress(ValueError):
                LEFT_ALONE.remove(segment)
            segment.close()
