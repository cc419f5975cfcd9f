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

What can go wrong:
  * the bound is reached, all of it held: `take` returns None, the batch goes through the pipe;
  * there are no descriptors, or no room in the mount: a bound too, found by reaching it, and tried again from time
    to time. One warning names it and the bytes, and `take` returns None: the pipe needs neither;
  * the machine or a cgroup has no memory left: MemoryError, naming it and the bytes. The pipe would need as much.
Never waiting: nothing here waits for memory that the user holds.

A process that the user forks holds what was lent when it began (`memory.forks`): those slots are used again when their
lease is over and it has ended too.

Source of the idea: the slot rings of SeqTools and SPDL; leases instead of a fixed number of slots are ours.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader.interrupts import uninterrupted
from sharded_loader.memory import limits
from sharded_loader.memory.codec import ALIGNMENT
from sharded_loader.memory.forks import Fork
from sharded_loader.memory.segments import Segment, create
from sharded_loader.memory.slot import Slot as Slot

PAGE = 4096
FIRST_SEGMENT = 4 << 20
"""Enough for the batches in flight of most small datasets; allocating it takes 1 ms."""

HELD_LONG = 32
"""A batch that is lent while so many others are begun is held, not in flight: a window is that deep with 16
workers."""

PAUSE = 256
"""Batches before the system is asked again for what it has refused: to ask takes 0.2 ms."""


LEFT_ALONE: list[mmap.mmap] = []
"""Memory that a device may still read when its arena is closed: it stays mapped until the program ends."""

Register = Callable[[mmap.mmap], Callable[[], Any] | None]


def round_up(nbytes: int, multiple: int) -> int:
    """The least multiple that holds ``nbytes``."""
    return -(-nbytes // multiple) * multiple


class Arena:
    """Slots for one pool.

    Args:
        max_bytes: bound on all segments together; None: a quarter of what is free when the first is made,
            shared by the processes of this machine (LOCAL_WORLD_SIZE).
        register: called with the memory of each new segment (a device is to read it by itself); returns what is to be
            called before that memory goes, or None.
    """

    def __init__(self, max_bytes: int | None = None, register: Register | None = None) -> None:
        self.register = register
        self._registered: list[Callable[[], Any] | None] = []
        self.segments: list[Segment] = []
        self._max_bytes = max_bytes
        self._free: list[list[tuple[int, int]]] = []
        self._taken = 0
        self._returned: deque[Slot | Fork] = deque()
        self._forks: list[tuple[Fork, set[Slot]]] = []
        self._retired: set[Slot] = set()
        self._out: dict[Slot, int] = {}
        self._warned = self._warned_of_refusal = False
        self._paused_until = 0
        self._pid = os.getpid()

    @property
    def nbytes(self) -> int:
        """Bytes in all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def lent(self) -> int:
        """Slots whose batches somebody holds."""
        self._reclaim()
        return len(self._out)

    def take(self, nbytes: int) -> Slot | None:
        """A free slot of at least ``nbytes``; None at the bound.

        Raises:
            MemoryError: the arena may grow, but the system has not got the memory.
        """
        self._reclaim()
        self._taken += 1
        if len(self._registered) < len(self._free):
            self._register()
        wanted = round_up(max(1, nbytes), ALIGNMENT)
        slot = self._carve(wanted)
        if slot is None and self._forks:
            self._revive()
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
        # From here on the lease counts: after an interruption before this line the slot is still its taker's.
        slot.lent = True
        self._out[slot] = self._taken
        return whole

    def is_registered(self, slot: Slot) -> bool:
        """Whether a device reads the slot's memory by itself."""
        return slot.segment < len(self._registered) and self._registered[slot.segment] is not None

    def retire_lent(self, fork: Fork) -> None:
        """The process is being forked by its user: what is lent may be held by the child too, until that ends.

        Any thread may fork, in the middle of another one's `take`: this leaves a mark, which `_reclaim` comes
        to before it comes to anything that is returned after the fork.
        """
        try:
            last: Slot | Fork | None = self._returned[-1]
        except IndexError:  # no look before: another thread may take out the only one in between
            last = None
        if fork.is_followed or not isinstance(last, Fork) or last.is_followed:  # else that one says the same
            self._returned.append(fork)

    def has_lent(self) -> bool:
        """Whether somebody holds a batch; any thread may ask."""
        out, returned = list(self._out), list(self._returned)  # each in one step: another thread may be at work
        return not set(out) <= set(returned)

    def close_descriptors(self) -> None:
        """In a forked child: the descriptors are the trainer's."""
        for segment in self.segments:
            segment.close_descriptor()

    def close(self) -> None:
        """Give the segments up. Memory under batches that are held stays until they go."""
        # Each step is done, whatever another one raises.
        with contextlib.ExitStack() as steps:
            registered, segments = self._registered, self.segments
            for number, segment in enumerate(segments):
                steps.callback(_give_up, segment, number, registered)
            try:
                self._register()
                registered += [None] * (len(segments) - len(registered))  # one without slots was not registered
            finally:
                self._registered, self.segments, self._free = [], [], []
                # A new deque: what is still lent comes back to the old one, and is no slot of a later segment.
                self._returned, self._out, self._retired, self._forks = deque(), {}, set(), []

    def _reclaim(self) -> None:
        while self._returned:
            slot = self._returned[0]
            if isinstance(slot, Fork):
                # Taken out last: an interruption marks twice, which does no harm.
                self._forks.append((slot, set(self._out)))
                self._returned.popleft()
                self._revive()
                continue
            self._returned.popleft()
            if not slot.lent:
                continue
            self._out.pop(slot, None)
            if self._forks and any(slot in held for _, held in self._forks):
                self._retired.add(slot)
            else:
                self.give(slot)

    def _revive(self) -> None:
        """Give back what only processes held that have ended."""
        self._forks = [(fork, held) for fork, held in self._forks if held and not fork.has_ended()]
        for slot in list(self._retired):
            if not any(slot in held for _, held in self._forks):
                self._retired.discard(slot)
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
        if self._taken < self._paused_until:
            return False
        have = self.nbytes
        if self._max_bytes is None:
            self._max_bytes = limits.free_bytes().nbytes // 4 // limits.processes_here()
        room = (self._max_bytes - have) // PAGE * PAGE
        least = round_up(nbytes, PAGE)
        if room < least:
            self._warn_of_bound(have)
            return False
        size = min(round_up(max(FIRST_SEGMENT, 4 * nbytes, have), PAGE), room)
        free = limits.free_bytes()
        if free.nbytes < size + size // 4:
            # Half of what may be taken, not only one slot: near a limit, too, there are to be few descriptors.
            size = max(least, min(size, free.nbytes * 2 // 5 // PAGE * PAGE))
        if free.nbytes < size + size // 4:
            raise MemoryError(
                f"no room for a batch in shared memory: {size:,} bytes wanted, {have:,} in use, and "
                f"{free.what} leaves {free.nbytes:,}: use smaller batches, fewer workers or a smaller prefetch"
            )
        with uninterrupted():  # a segment that nobody knows would keep its descriptor
            segment = self._create(size, least, have)
            if segment is None:
                self._paused_until = self._taken + PAUSE
                return False
            self.segments.append(segment)
            self._free.append([(0, segment.nbytes)])
        self._register()
        return True

    def _register(self) -> None:
        """Register the segments that are not noted as registered: an interruption may have come before the note."""
        while len(self._registered) < len(self._free):
            mapping = self.segments[len(self._registered)].mapping
            self._registered.append(None if self.register is None else self.register(mapping))

    def _create(self, size: int, least: int, have: int) -> Segment | None:
        """A segment of ``size``, or of as much as a small mount takes; None if shared memory goes no further."""
        while True:
            try:
                return create(len(self._free), size)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.ENOMEM)
                if full and size > least:
                    size = max(least, size // 2 // PAGE * PAGE)
                    continue
                text = _refused(error, size, have)
                # What the machine has not got would be missing in the pipe too; not so a small mount (`filename`). With
                # segments of its own the arena may be what fills the machine, and goes on with those.
                if full and not have and error.filename is None:
                    raise MemoryError(text) from error
                if not self._warned_of_refusal:
                    self._warned_of_refusal = True
                    warnings.warn(f"{text}. Until then batches go through the pipe, which is slower", stacklevel=2)
                return None

    def _warn_of_bound(self, have: int) -> None:
        # Not the batches in flight, however many: those that stay while others come and go.
        held = sum(self._taken - since >= HELD_LONG for since in self._out.values())
        if not self._warned and held and 2 * held >= len(self._out):
            self._warned = True
            warnings.warn(
                f"{len(self._out)} batches are held, and with them all of the {have:,} bytes of shared memory that "
                f"this pool may use: batches are copied out from here on, which is slower. If they are not meant to be "
                f"held, look for a list or a graph that keeps them; else raise ProcessPool(max_bytes=)",
                stacklevel=2,
            )


def _refused(error: OSError, size: int, have: int) -> str:
    wanted = f"{size:,} bytes of shared memory wanted, {have:,} in use"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = "" if (most := limits.open_files()) is None else f" of {most}"
        return f"{wanted}: the limit{limit} of open files is reached ({error}): raise it (ulimit -n), or close some"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return (
            f"{wanted}: the system refused ({error}); with SHARDED_LOADER_MEMORY=shm, or where the system refuses "
            f"memfd_create, the size of the /dev/shm mount is the limit: enlarge it (docker run --shm-size), or use "
            f"smaller batches"
        )
    return f"{wanted}: the system refused ({error})"


def _give_up(segment: Segment, number: int, registered: list[Callable[[], Any] | None]) -> None:
    """Close a segment; leave its mapping alone if a device may still read it."""
    left_alone = True
    try:
        if number < len(registered):
            undo = registered[number]
            left_alone = undo is not None and undo() is False
    except Exception:
        left_alone = False  # the device is broken, and reads nothing any more
        raise
    finally:
        if left_alone:
            LEFT_ALONE.append(segment.mapping)
            segment.close_descriptor()
        else:
            segment.close()


def _return(returned: deque[Slot | Fork], slot: Slot, pid: int) -> None:
    if os.getpid() == pid:
        returned.append(slot)
