"""The trainer's shared memory: a few segments, carved into slots, each of which holds one batch at a time.

    free -> filling (a worker writes) -> ready -> lent to the user -> free

    Arena.take(nbytes) -> Slot              when a task is dispatched
    Arena.lend(slot)   -> buffer over it    when its batch is decoded; arrays over the buffer keep the lease
    Arena.give(slot)                        when nothing in it is wanted, and its writer has let go of it

A segment is mapped once and used for ever, so a batch costs no system call and no page fault. Segments grow
geometrically: each holds a descriptor in every process, and one per batch would exhaust 1,024. Slots begin at
multiples of 64 bytes.

The lease is a finalizer on the lent buffer: a fresh exporter per lend, because NumPy collapses ``.base``
chains past an array view, and a lease on a view would end while tensors are held. It runs in any thread and
inside the garbage collector, so it appends to a deque and does nothing else.

What can go wrong: the bound is reached (`take` returns None, the batch goes through the pipe); memory or
descriptors run out (MemoryError, saying which and how much). Never waiting: nothing here waits for memory that
the user holds.

Source of the idea: the slot rings of SeqTools and SPDL; leases instead of a fixed number of slots are ours.
"""

from __future__ import annotations

import bisect
import errno
import os
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharded_loader.memory import limits
from sharded_loader.memory.codec import ALIGNMENT
from sharded_loader.memory.segments import Segment, create

PAGE = 4096
FIRST_SEGMENT = 4 << 20
"""Enough for the batches in flight of most small datasets; allocating it takes 1 ms."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of a segment."""

    segment: int
    offset: int
    nbytes: int


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple that holds ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class Arena:
    """Slots for one pool.

    Args:
        max_bytes: bound on all segments together; None: a quarter of what is free when the first is made,
            shared by the processes of this machine (LOCAL_WORLD_SIZE).
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self.segments: list[Segment] = []
        self._max_bytes = max_bytes
        self._free: list[list[tuple[int, int]]] = []
        self._lent = 0
        self._returned: deque[Slot] = deque()
        self._retired: set[Slot] = set()
        self._out: set[Slot] = set()
        self._warned = False
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes in all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def lent(self) -> int:
        """Slots whose batches somebody holds."""
        self._reclaim()
        return self._lent

    def take(self, nbytes: int) -> Slot | None:
        """A free slot of at least ``nbytes``; None at the bound.

        Raises:
            MemoryError: the arena may grow, but the system has not got the memory or the descriptor.
        """
        self._reclaim()
        wanted = round_up(max(1, nbytes), ALIGNMENT)
        slot = self._carve(wanted)
        if slot is None and self._grow(wanted):
            slot = self._carve(wanted)
        return slot

    def give(self, slot: Slot) -> None:
        """Nothing in the slot is wanted any more."""
        free = self._free[slot.segment]
        start, end = slot.offset, slot.offset + slot.nbytes
        place = bisect.bisect(free, (start, end))
        if place < len(free) and free[place][0] == end:
            end = free.pop(place)[1]
        if place and free[place - 1][1] == start:
            start = free.pop(place - 1)[0]
            place -= 1
        free.insert(place, (start, end))

    def lend(self, slot: Slot) -> np.ndarray[Any, Any]:
        """The slot's memory, as bytes; the slot comes back when the last array over it has died."""
        whole = np.frombuffer(self.segments[slot.segment].mapping, np.uint8, slot.nbytes, slot.offset)
        finalizer = weakref.finalize(whole, _return, self._returned, slot, self._pid)
        finalizer.atexit = False
        self._lent += 1
        self._out.add(slot)
        return whole

    def retire_lent(self) -> None:
        """The process is being forked by its user: what is lent may be held by the child too, from now on."""
        self._reclaim()
        self._retired |= self._out

    def close_descriptors(self) -> None:
        """In a forked child: the descriptors are the trainer's."""
        for segment in self.segments:
            segment.close_descriptor()

    def close(self) -> None:
        """Give the segments up. Memory under batches that are held stays until they go."""
        segments, self.segments, self._free = self.segments, [], []
        self._returned.clear()
        for segment in segments:
            segment.close()

    def _reclaim(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._lent -= 1
            self._out.discard(slot)
            if slot in self._retired:
                self._retired.discard(slot)
            elif slot.segment < len(self._free):
                self.give(slot)

    def _carve(self, nbytes: int) -> Slot | None:
        # The first that fits: slots that were just used are reused before memory that was never touched.
        for number, free in enumerate(self._free):
            for place, (start, end) in enumerate(free):
                if end - start >= nbytes:
                    if end - start == nbytes:
                        free.pop(place)
                    else:
                        free[place] = (start + nbytes, end)
                    return Slot(number, start, nbytes)
        return None

    def _grow(self, nbytes: int) -> bool:
        """Another segment that holds at least one slot; False at the bound."""
        have = self.nbytes
        if self._max_bytes is None:
            share = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
            self._max_bytes = limits.free_bytes().nbytes // 4 // share
        room = self._max_bytes - have
        if room < nbytes:
            self._warn_of_bound(have)
            return False
        size = round_up(min(max(FIRST_SEGMENT, 4 * nbytes, have), room), PAGE)
        if size > room:
            size = max(room // PAGE * PAGE, round_up(nbytes, PAGE))
        free = limits.free_bytes()
        if free.nbytes < size + size // 4:
            size = round_up(nbytes, PAGE)
        if free.nbytes < size + size // 4:
            raise MemoryError(
                f"no room for a batch in shared memory: {size:,} bytes wanted, {have:,} in use, and "
                f"{free.what} leaves {free.nbytes:,}: use smaller batches, fewer workers or a smaller prefetch"
            )
        try:
            segment = create(len(self.segments), size)
        except OSError as error:
            raise MemoryError(_refused(error, size, have)) from error
        self.segments.append(segment)
        self._free.append([(0, size)])
        return True

    def _warn_of_bound(self, have: int) -> None:
        if not self._warned and self._lent > 8:
            self._warned = True
            warnings.warn(
                f"{self._lent} batches are held, and with them all of the {have:,} bytes of shared memory that this "
                f"pool may use: batches are copied out from here on, which is slower. If they are not meant to be "
                f"held, look for a list or a graph that keeps them; else raise ProcessPool(max_bytes=)",
                stacklevel=2,
            )


def _refused(error: OSError, size: int, have: int) -> str:
    wanted = f"{size:,} bytes of shared memory wanted, {have:,} in use"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{wanted}: the limit of open files is reached ({error}): raise it (ulimit -n), or close some"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return (
            f"{wanted}: the system refused ({error}); with SHARDED_LOADER_MEMORY=shm the size of the /dev/shm mount is "
            f"the limit: enlarge it (docker run --shm-size), or use smaller batches"
        )
    return f"{wanted}: the system refused ({error})"


def _return(returned: deque[Slot], slot: Slot, pid: int) -> None:
    if os.getpid() == pid:
        returned.append(slot)
