"""The shared memory of a process pool: a few segments, divided into slots, each of which holds one batch at a time.

    free -> a worker writes -> lent to the user -> free

    RecentSizes.wanted -> nbytes            how large the next slot should be
    Arena.take(nbytes) -> Slot              when a task is sent
    Arena.lend(slot, places) -> buffers     when its batch has arrived; the arrays over the buffers keep the lease
    Arena.give(slot)                        when nobody wants the slot, and its writer has ended

A segment is mapped once, so a batch costs no system call and no page fault. Segments grow geometrically, because each
of them holds a descriptor in every process. Slots begin at multiples of 64 bytes.

A slot is lent by a `memory.leases.Lease`: when the array that the buffers are views of has died, the next `take` uses
the slot again.

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
import mmap
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sharded_loader.base import limits, system
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.batching.protocol import Empty
from sharded_loader.memory.codec import ALIGNMENT, MOVES, SIZE
from sharded_loader.memory.leases import Lease
from sharded_loader.memory.segments import Segment, Slot, create

PAGE = 4096
FIRST_SEGMENT = 4 << 20
"""Enough for the batches in flight of most small datasets; allocating it takes 1 ms."""

HELD_LONG = 32
"""A batch is held, not in flight, if it stays lent while 32 others are begun: 16 workers have that many in flight."""

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
        self,
        max_bytes: int | None = None,
        register: Register | None = None,
        pinned: Empty | None = None,
    ) -> None:
        self.register = register
        self.pinned = pinned
        self.segments: list[Segment] = []
        self._max_bytes = max_bytes
        self._free: list[list[tuple[int, int]]] = []
        self._taken = 0
        self._out: dict[Slot, tuple[Lease, int]] = {}  # of each slot that is lent how many had been taken then
        self._shared: set[Slot] = set()  # a process that the user has forked can read these
        self._returned: deque[Lease] = deque()
        self._warned = self._warned_of_refusal = False
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

    def lend(self, slot: Slot, places: Sequence[Any]) -> list[Any]:
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
        self._out[slot] = lease, self._taken
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
        self._shared.update(slot for slot, (lease, _) in list(self._out.items()) if lease() is not None)

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
            self._warn_of_bound(have)
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
                if not self._warned_of_refusal:
                    self._warned_of_refusal = True
                    warnings.warn(f"{text}. Until then batches go through the pipe, which is slower", stacklevel=2)
                return None

    def _warn_of_bound(self, have: int) -> None:
        # Not the batches in flight, however many: those that stay while others come and go.
        held = sum(self._taken - since >= HELD_LONG for _, since in self._out.values())
        if not self._warned and held and 2 * held >= len(self._out):
            self._warned = True
            warnings.warn(
                f"{len(self._out)} batches are held, and with them all of the {have:,} bytes of shared memory that "
                f"this pool may use: batches are copied out from here on, which is slower. If they are not meant to be "
                f"held, look for a list or a graph that keeps them; otherwise raise ProcessPool(max_bytes=)",
                stacklevel=2,
            )


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
