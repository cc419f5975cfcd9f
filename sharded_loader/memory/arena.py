"""Shared memory of a process pool: a few segments, divided into slots that each hold one batch at a time.

    free -> a worker writes -> borrowed by the user -> free

    RecentSizes.wanted -> nbytes              size of the next slot
    Arena.returned[worker] -> leases          of slots that this worker wrote and that are free again
    Arena.take(nbytes, worker) -> Slot        its own, else one that nobody has touched, else another worker's
    Arena.lend(slot, places, worker) -> buffers    when its batch has arrived; the arrays over them hold the lease
    Arena.give(slot)                          when the slot is unreferenced and its writer has exited

A segment is mapped once, and a slot stays with the worker that touched its pages, so a batch costs no system call and
no page fault. Segments grow by a few slots, and by an eighth when there are many, because each holds a descriptor in
every process. Slots are aligned to 64 bytes.

A lease is a weak reference to the borrowed array, the base of all its views and tensors. When that array dies, in any
thread or inside the garbage collector, the lease is appended to ``returned``, and the worker's next batch takes it from
there. Appending needs no lock, so it is safe even in a signal handler.

A child that the user forks can read the borrowed slots. They are held until the child has ended, which the kernel
tells: it holds the writing end of a pipe (`hold_for_child`).

`take` returns None, and the batch goes through the pipe, if all slots are borrowed at the bound. The same happens, with
a warning and occasional retries, if descriptors or the mount are exhausted. If the machine or a cgroup is out of
memory, `take` raises MemoryError, because the pipe would need the same memory. It never waits for memory that the user
holds.

Source of the idea: the slot rings of SeqTools and SPDL; leases instead of a fixed number of slots are ours.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import math
import mmap
import os
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from sharded_loader.base import limits, system
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.notices import warn
from sharded_loader.batching.protocol import Array, Empty
from sharded_loader.memory.codec import ALIGNMENT, MOVES, SIZE, aligned
from sharded_loader.memory.segments import Segment, Slot, create

T = TypeVar("T")

LEAST_BYTES = 1 << 20
"""Smaller arrays are newly allocated: the C library reuses their memory itself."""

KEPT = 32
"""Number of large allocations after which an unused block is freed (the working set of eight threads)."""

_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}

_STEPS = 8
"""Block sizes per factor of two, so that similar batches share blocks at a loss of at most an eighth."""


class MemoryLease(weakref.ref):  # type: ignore[type-arg]
    """Weak reference to a borrowed array, with the ``resource`` to release. Its callback, C code, is safe anywhere."""

    __slots__ = ("resource",)
    resource: Any


class Leases(Generic[T]):
    """Resources on loan, each bound to the lifetime of an array.

    Example:
        >>> leases, array = Leases(), np.zeros(3)
        >>> leases.lend(array, "memory")
        >>> del array
        >>> list(leases.ended())
        ['memory']
    """

    def __init__(self) -> None:
        self._leases: dict[int, MemoryLease] = {}  # by id; a lease that is dropped never calls back
        self._ended: deque[MemoryLease] = deque()

    def lend(self, array: object, resource: T) -> None:
        """Release ``resource`` when ``array`` dies."""
        lease = MemoryLease(array, self._ended.append)
        lease.resource = resource
        self._leases[id(lease)] = lease

    def ended(self) -> Iterator[T]:
        """Yield the resources released since the last call. Thread-safe, since each step is atomic."""
        with contextlib.suppress(IndexError):
            while True:
                lease = self._ended.popleft()
                del self._leases[id(lease)]
                yield lease.resource


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 256 MB of freed memory in this process, unless the environment sets its allocator.

    By itself it returns the memory of samples to the system after each batch, and reading the next batch costs a page
    fault per 4 KB. Measured (4,096 pictures of 560 KB, decoded by Pillow, batches of 64; two runs, interleaved): inline
    6.2 and 7.1 s instead of 9.0 and 9.3, by two threads 3.8 and 4.1 instead of 5.6 and 5.3. Members of tar shards, of
    100 KB each, of which a transform keeps one byte: inline 1,080 to 1,280 MB/s instead of 550 to 880 (three runs).
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        # M_MMAP_THRESHOLD, its maximum; M_TRIM_THRESHOLD. Errors are those of another C library.
        with contextlib.suppress(AttributeError, OSError, TypeError):
            _ = [ctypes.CDLL(None).mallopt(*setting) for setting in ((-3, 32 << 20), (-1, 256 << 20))]


class ReusedMemory:
    """Allocator (`sharded_loader.batching.protocol.Empty`) that recycles the memory of large arrays (``least_bytes``).

    New memory costs a page fault per 4 KB, 6 ms for 38 MB, and the C library returns large blocks to the system at
    once. So blocks, private mappings, are kept for later arrays, and freed if unused for `KEPT` calls.

    Example:
        >>> empty = ReusedMemory()
        >>> where = empty((3, 1 << 20), np.dtype(np.uint8)).ctypes.data  # the array goes at once
        >>> empty((3, 1 << 20), np.dtype(np.uint8)).ctypes.data == where
        True
    """

    least_bytes = LEAST_BYTES

    def __init__(self) -> None:
        keep_freed_memory()  # of samples
        self._leases: Leases[mmap.mmap] = Leases()
        # By size, most recently released last; each with the number of the call that found it free.
        self._free: dict[int, list[tuple[int, mmap.mmap]]] = {}
        self._calls = 0

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < LEAST_BYTES or dtype.hasobject:
            return np.empty(shape, dtype)
        self._calls, size = self._calls + 1, _rounded(nbytes)
        for block in self._leases.ended():
            self._free.setdefault(len(block), []).append((self._calls, block))
        for blocks in list(self._free.values()):
            with contextlib.suppress(IndexError):
                while self._calls - blocks[0][0] > KEPT:
                    blocks.pop(0)
        try:
            _, block = self._free[size].pop()  # the most recent one may still be in the core's cache
        except (KeyError, IndexError):
            block = mmap.mmap(-1, size, **_PRIVATE)
        # A separate array per lease: NumPy makes it the base of all its views.
        memory = np.frombuffer(block, np.uint8)
        self._leases.lend(memory, block)
        return np.ndarray(shape, dtype, memory)

    def clear(self) -> None:
        """Release the free blocks; borrowed ones are released with their last holder."""
        self._leases, self._free = Leases(), {}


def _rounded(nbytes: int) -> int:
    """Return the block size for ``nbytes``: a multiple of a page, and of an eighth of the next lower power of two.

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
"""Number of batches before a denied system call is retried (0.2 ms each)."""

WINDOW = 64
"""Number of recent sizes: if sizes are random, one batch in 64 exceeds its slot and is copied once more."""

STILL_READ: list[Segment] = []
"""Segments of closed arenas that a device may still read; they stay mapped. Arenas check them on close and growth."""

Register = Callable[[mmap.mmap], Callable[[], Any] | None]


class RecentSizes:
    """Predictor of slot sizes: exactly the first batch, then what holds the largest one; 0 bytes before the first.

    Not the mean: a batch that exceeds its slot waits for another one, a slot that is too large costs only memory. Sizes
    are coarse once they vary, and shrink only by half: a worker has no slot of a new size that it has touched.

    Example:
        >>> sizes = RecentSizes(window=2)
        >>> for nbytes in (100_000, 90_000, 100_100, 40_000, 40_000):
        ...     sizes.note(nbytes)
        ...     print(sizes.wanted)
        100032
        100032
        106496
        106496
        40960
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._sizes: deque[int] = deque(maxlen=window)
        self.wanted = 0

    def note(self, nbytes: int) -> None:
        """Record the size of a batch that has arrived."""
        self._sizes.append(nbytes)
        if nbytes > self.wanted:
            self.wanted = _rounded(nbytes) if self.wanted else aligned(nbytes)
        elif 2 * nbytes < self.wanted and 2 * (largest := max(self._sizes)) < self.wanted:
            self.wanted = _rounded(max(1, largest))


class Arena:
    """Slots of one pool. Used by one thread at a time; leases may end in any thread.

    Args:
        max_bytes: bound on all segments together; None: a quarter of the memory free when the first one is created,
            divided by the number of processes on this machine (LOCAL_WORLD_SIZE).
        register: called with the memory of each new segment that a device reads directly; may return a function to call
            before that memory is unmapped.
        pinned: allocator of pinned memory for the tensors of objects that move themselves; None if there is none.
    """

    def __init__(
        self, max_bytes: int | None = None, register: Register | None = None, pinned: Empty | None = None
    ) -> None:
        self.register = register
        self.pinned = pinned
        self.segments: list[Segment] = []
        self._max_bytes = max_bytes
        self._free: list[list[tuple[int, int]]] = []
        self._take_count = 0
        self._borrowed: dict[Slot, MemoryLease] = {}
        self.returned: defaultdict[int, deque[MemoryLease]] = defaultdict(deque)
        self._children: list[tuple[int, list[Any]]] = []
        self._warned = False
        self._paused_until = 0

    @property
    def nbytes(self) -> int:
        """Bytes in all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def lent(self) -> int:
        """Number of batches that the user holds, or a child of the user's program. Thread-safe."""
        return sum(lease() is not None for lease in list(self._borrowed.values()))

    def take(self, nbytes: int, worker: int = 0, waiting: int = 0) -> Slot | None:
        """Return a free slot of at least ``nbytes``; None at the bound. MemoryError: the system is out of memory.

        ``waiting`` batches under way have no slot yet. If free ones are fewer, the memory grows at once, so that no
        worker touches a slot of another.
        """
        self._take_count += 1
        wanted = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT  # a call of `aligned` less
        slot = self._reuse(self.returned[worker], wanted) or self._carve(wanted)
        if slot is None:
            self._release_children()
            if waiting > sum(map(len, self.returned.values())) and self._grow(wanted):
                return self._carve(wanted)
            for returned in sorted(self.returned.values(), key=len, reverse=True):
                slot = slot or self._reuse(returned, wanted)
        return slot or self._carve(wanted) or (self._carve(wanted) if self._grow(wanted) else None)

    def _reuse(self, returned: deque[MemoryLease], nbytes: int) -> Slot | None:
        while returned:
            slot: Slot = returned.popleft().resource
            self._borrowed.pop(slot, None)
            if slot.nbytes == nbytes:
                return slot
            self.give(slot)
        return None

    def give(self, slot: Slot) -> None:
        """Free a slot that is not borrowed, and merge it with free neighbours."""
        free = self._free[slot.segment]
        start, end = slot.offset, slot.offset + slot.nbytes
        index = bisect.bisect(free, (start, end))
        if index < len(free) and free[index][0] == end:
            end = free.pop(index)[1]
        if index and free[index - 1][1] == start:
            index -= 1
            start = free.pop(index)[0]
        free.insert(index, (start, end))

    def lend(self, slot: Slot, places: Sequence[object], worker: int = 0) -> list[Any]:
        """Return the buffers of a batch that ``worker`` wrote. The slot is released when the last array over it dies.

        ``places`` holds (offset, size) in the slot for each buffer, or the buffer itself if it lies elsewhere. A
        negative size marks an object that the library does not copy to a device. If a device reads the segment, such a
        buffer is copied: PyTorch would not keep the slot alive for a copy that the user has started.
        """
        segment = self.segments[slot.segment]
        # A separate array per lease: NumPy makes it the base of all its views.
        memory = np.frombuffer(segment.mapping, np.uint8, slot.nbytes, slot.offset)
        lease = MemoryLease(memory, self.returned[worker].append)
        lease.resource = slot
        self._borrowed[slot] = lease
        buffers = []
        for buffer in places:
            if type(buffer) is tuple:
                offset, nbytes = buffer
                buffer = part = memory[offset : offset + (abs(nbytes) & SIZE)]
                if nbytes < 0 and segment.unregister is not None:
                    # Objects that move themselves do so from pinned memory; others may be held forever.
                    if self.pinned is not None and -nbytes & MOVES:
                        buffer = self.pinned(part.shape, part.dtype)
                        buffer[:] = part
                    else:
                        buffer = part.copy()
            buffers.append(buffer)
        return buffers

    def hold_for_child(self) -> int | None:
        """Hold the borrowed slots until a child that the user is about to fork has ended. Thread-safe.

        Returns:
            A descriptor for this process to close after the fork; None if there is nothing to hold.
        """
        self._release_children()  # or the program, which may fork many, would run out of descriptors
        arrays = [array for lease in list(self._borrowed.values()) if (array := lease()) is not None]
        if not arrays:
            return None
        try:
            reader, writer = os.pipe()
        except OSError:  # the limit of open files
            self._borrowed.clear()  # for good: a lease that is dropped never calls back
            return None
        self._children.append((reader, arrays))
        return writer

    def _release_children(self) -> None:
        """Release what children that have ended held. Thread-safe."""
        for child in [child for child in self._children if system.is_readable(child[0])]:
            with contextlib.suppress(ValueError):  # another thread has released it
                self._children.remove(child)
                os.close(child[0])
                child[1].clear()

    def close_descriptors(self) -> None:
        """Close the main process's descriptors in a forked child, which holds nothing for children of its own."""
        for segment in self.segments:
            segment.close_descriptor()
        for reader, _ in self._children:
            os.close(reader)
        self._children, self._borrowed = [], {}

    def close(self) -> None:
        """Close all segments. Memory under borrowed batches stays mapped until they die."""
        segments, self.segments, self._free = self.segments, [], []
        # New containers: a lease that ends later must not free a slot of a later segment.
        self._borrowed, self.returned = {}, defaultdict(deque)
        children, self._children = self._children, []
        with contextlib.ExitStack() as steps:  # each step runs, even if another one raises
            for segment in (*segments, *STILL_READ):
                steps.callback(_close_segment, segment)
            for reader, _ in children:
                steps.callback(os.close, reader)

    def _carve(self, nbytes: int) -> Slot | None:
        for number, free in enumerate(self._free):
            for index, (start, end) in enumerate(free):
                if end - start >= nbytes:
                    free[index : index + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                    return Slot(number, start, nbytes)
        return None

    def _grow(self, nbytes: int) -> bool:
        """Add a segment that holds at least one slot; return False at the bound."""
        if self._take_count < self._paused_until:
            return False
        have, free = self.nbytes, None
        if self._max_bytes is None:
            self._max_bytes = (free := limits.free_bytes()).nbytes // 4 // limits.processes_here()
        room = _pages(self._max_bytes - have)
        least = _pages(nbytes + PAGE - 1)
        if room < least:
            return False
        slots = max(4, FIRST_SEGMENT // nbytes, have // 8 // nbytes)
        size = min(_pages(slots * nbytes + PAGE - 1), room)
        free = free or limits.free_bytes()  # 0.3 ms where cgroups nest
        if free.nbytes < size + size // 4:
            # Half of the allowed memory rather than one slot, to keep descriptors few even near a limit.
            size = max(least, min(size, _pages(free.nbytes * 2 // 5)))
        if free.nbytes < size + size // 4:
            raise MemoryError(
                f"no room for a batch in shared memory: {size:,} bytes wanted, {have:,} in use, and "
                f"{free.what} leaves {free.nbytes:,}: use smaller batches, fewer workers or a smaller prefetch"
            )
        for leftover in tuple(STILL_READ):
            _close_segment(leftover)
        with uninterrupted():  # a segment lost halfway would keep its descriptor and registration
            segment = self._create(size, least, have)
            if segment is None:
                self._paused_until = self._take_count + PAUSE
                return False
            self.segments.append(segment)
            self._free.append([(0, segment.nbytes)])
            if self.register is not None:
                segment.unregister = self.register(segment.mapping)
        return True

    def _create(self, size: int, least: int, have: int) -> Segment | None:
        """Create a segment of ``size``, or less on a small mount; return None if shared memory is exhausted."""
        while True:
            try:
                return create(len(self.segments), size)
            except OSError as error:
                full = error.errno in system.NO_SPACE
                if full and size > least:
                    size = max(least, _pages(size // 2))
                    continue
                text = f"{size:,} bytes of shared memory wanted, {have:,} in use: {system.why_refused(error)}"
                # If the machine is out of memory, the pipe would fail too; a full mount (`filename`) is different.
                # An arena with segments may itself be what fills the machine, and continues with those.
                if full and not have and error.filename is None:
                    raise MemoryError(text) from error
                if not self._warned:
                    self._warned = True
                    warn(f"{text}. Meanwhile, batches go through the pipe, which is slower")
                return None


def _pages(nbytes: int) -> int:
    """Round down to whole pages."""
    return nbytes // PAGE * PAGE


def _close_segment(segment: Segment) -> None:
    """Close a segment, but keep its mapping if a device may still read it."""
    is_read = False
    try:
        is_read = segment.unregister is not None and segment.unregister() is False
    finally:  # if this raises, the device is broken and reads nothing more
        if is_read:
            if segment not in STILL_READ:
                STILL_READ.append(segment)
            segment.close_descriptor()
        else:
            with contextlib.suppress(ValueError):
                STILL_READ.remove(segment)
            segment.close()
