"""Copies to one accelerator, ahead of the consumer and asynchronous to the host.

    CopyStream.begin(batch) -> PendingCopy       allocate memory on the device; a thread enqueues copies and transform
    PendingCopy.finish()    -> batch             ready on the caller's current stream; objects move themselves now
    CopyStream.close()                           wait for the copies, with a limit

    caller's stream  --- step k-1 --o-------- step k --------- step k+1 ---
                                    |g                        ^ f
    copy stream      -------------- v copy k+2 -----------> e |

  g  Targets are allocated on the *caller's* stream. The copy waits for an event recorded there after that, so it runs
     when the caller's earlier work is done, and may use the memory of batches dropped by then. However far the host
     runs ahead, the device holds only the batches copied ahead and those that the user's program holds.
  e  An event after the copy. The host batch is held until it has passed, and with it the lease on its slot.
  f  The caller's stream waits for e before the batch is handed out. If it is not the stream of g, the targets are
     recorded on it (``record_stream``), but only then: recording keeps their memory until the *host* sees the
     consumer's work done, so a host that runs ahead would use more and more device memory.

Small tensors of a batch are packed on the host into one pinned buffer and share one buffer on the device, so a batch of
256 columns costs one copy. A `PlacementPlan`, reused for the next batch, knows the small arrays of a flat batch.

Everything between g and e is done by a thread, so that none of it delays the caller: packing, copies from memory that
is not pinned, the user's ``device_transform``, and the moves of objects that move themselves, if all their tensors can
be found (containers, objects with ``record_stream``). What these return is memory of the copy stream, so it is recorded
on the caller's stream at f. Other objects move at f, on the caller's stream. Only the thread makes the copy stream
current. Without anything to copy there is no thread.

The host waits in two places, while the device still has steps to do. The thread waits for the oldest copy if those of
`HOST_AHEAD` batches are under way, because they hold host memory. The caller waits for the last copies of an epoch.
They poll and sleep, because a wait of the device's own would keep a core busy and could not be interrupted by Ctrl-C.

Two timed events on the caller's stream measure how long the device waits for data: one when ``next`` is called
(`Clock`), one when the batch is ready. A busy device reaches both at once. They are read when the second has passed.

A `CopyStream` and its stream live as long as the loader, because torch would strand cached memory with each new stream.
Any thread may call it.

If the device has no memory, `begin` or `finish` raises torch's error. Errors of the thread are raised by `finish`. If a
batch is never finished (``break``), its device memory is freed when its copy is done, its host memory with the next
copy. If a device hangs (a collective that waits for a dead rank), or the transform, `close` leaves the memory alone
after `CLOSING_SECONDS`, and each later `close` tries again.

Source of the idea: the copy streams of NVIDIA's and TorchRec's prefetchers; PyTorch's notes on CUDA semantics recommend
allocating on the consumer's stream for work on side streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sharded_loader.base import host_clock
from sharded_loader.base.errors import add_note, notes_of
from sharded_loader.base.interrupts import ENDING_SECONDS, program_ends, should_stop
from sharded_loader.base.notices import warn
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.batching.tree import ATOMS, TORCH_TAKES, children, has_method, is_plain, map_leaves, to_torch
from sharded_loader.devices.accelerator import NOTHING, REGISTERED, Streams, note_late, pinned_copy, pinned_empty
from sharded_loader.devices.background import Background, Later, use_one_core
from sharded_loader.devices.transform import TRANSFORM_NOTE, HostValue, unwrap_host_values
from sharded_loader.memory.codec import ALIGNMENT, aligned

HOST_AHEAD = 4
"""Batches whose copies to one device may be under way. Each holds pinned host memory: 16 batches of 100 MB would hold
1.6 GB per process. With four, the device has steps to do while the host waits. The number was not measured."""

HOST_BYTES = 256 << 20
"""Bytes of batches under way up to which there may be more of them, if more are begun ahead: with gradient accumulation
trainers ask for all micro-batches of a step at once, and their copies wait for the step before."""

SMALL = 32 * 1024
"""Size in bytes up to which tensors are packed. Copying 32 KB on the host takes 3 us, as long as torch's calls for a
copy. The device's cost of a separate copy was not measured."""

MANY, MEDIUM, ONE_COPY = 16, 256 << 10, 32 << 20
"""Least number of tensors, and their largest size in bytes, alone and together, to be one copy where they lie side by
side in a slot. 256 of 62 KB took 4.3 ms of calls on an H200's host. If one of them is kept, all are."""

CLOCK_EVERY = 7
"""Batches of which the middle one is measured, for all of them, behind the first seven of an epoch: it takes three
calls of torch, each of which may wait for the interpreter beside busy threads. Two, four or eight slow workers finish
as many batches at once, and the device waits only for the first of them. With a measurement of every eighth batch, that
would be the first one always, or never."""

SHORTEST_REST, LONGEST_REST = 0.2e-3, 2e-3
"""Seconds between two queries of an event. The delay does not matter, because the device has steps to do meanwhile."""

CLOSING_SECONDS = 10.0
"""Limit of `CopyStream.close`. Copies under way belong to a few steps, which take seconds at most, whereas libraries
abort a hanging collective only after minutes."""

STILL_READ: set[CopyStream] = set()
"""Copy streams with copies under way when their loader was closed, held with the memory that the copies use."""

LOST: list[Any] = []
"""Memory of copies that were under way when a kernel failed, held to the end of the process. Freeing memory used on a
second stream records an event; after such a failure torch cannot, and ends the process (seen on an H200)."""


class Clock:
    """State shared by the iterator and its copy streams, such as who waits for whom.

    Attributes:
        ahead: batches that are begun ahead.
        timeout: seconds that the transform of a batch may take.
        behind: seconds in which the host has waited for a device.
        times: record of the epoch whose ``next`` was called; None before the first call.
        calls: number of calls of ``next``.
        records: per device, the function that records an event, called in each ``next``. It is torch's own.
    """

    def __init__(self) -> None:
        self.ahead, self.timeout = 0, math.inf
        self.behind = 0.0
        self.times: Any = None  # its `device_waiting_seconds` and `batches` are counted
        self.calls = 0
        self.records: dict[torch.device, Callable[[], Any]] = {}


@dataclass(eq=False)
class PendingCopy:
    """A shard, or a plain batch, on its way to a device, or already there because a pool made it there.

    Attributes:
        batch: of tensors on the device. Only `finish` may hand it out.
        copies: the copy stream; None: the batch is already there.
        owner_stream: the stream that the targets belong to.
        sources: host tensors, and the objects that have moved themselves.
        targets: device memory, until `finish`. `CopyStream.in_use` holds this list.
        event: passes when the copies are done. None: nothing is copied.
        enqueued: what the thread does; None: nothing.
        behind: seconds in which the thread has waited for the device before.
        staged: wrappers of objects that move themselves. Their memory lies outside pinned slots.
        made: results in memory of the copy stream, which `finish` records on the caller's stream.
        small: small tensors, each with its device tensor, which has no memory yet.
    """

    batch: Any = None
    copies: CopyStream | None = None
    owner_stream: Any = None
    sources: list[Any] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    event: Any = None
    enqueued: Later | None = None
    behind: float = 0.0
    staged: list[HostValue] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    small: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def finish(self) -> Any:
        """Return the batch, ready on the current stream of this thread. Objects that move themselves may raise."""
        copies = self.copies
        if copies is not None and (self.enqueued is not None or self.staged):
            try:
                copies.hand_out(self)
            except Exception as error:
                note_device(error, copies.streams.device)
                raise
        return self.batch

    def drop(self) -> None:
        """Discard the batch. Its device memory is freed when its copies are done, or at the next one."""
        if self.copies is not None and self.event is not None:
            self.copies.drop(self.targets, self.event)


def note_device(error: Exception, device: torch.device) -> None:
    """Note the target device on the error of a copy."""
    if not isinstance(error, BatchifyError) and not note_late(error) and TRANSFORM_NOTE not in notes_of(error):
        add_note(error, f"raised while the batch was copied to {device}")


class PlacementPlan:
    """Layout of a flat batch (one array, or a list, tuple or dict of them), reused for later batches like it.

    Attributes:
        small: for each array, True if it is packed with others; empty for other structures.
        is_one_copy: there are many arrays of medium size (`MANY`), which may lie side by side.

    Example:
        >>> PlacementPlan([np.zeros(2), np.zeros(3), np.zeros(9999)]).small, PlacementPlan([["text"]]).small
        ([True, True, False], [])
    """

    def __init__(self, batch: Any) -> None:
        self._kind = kind = type(batch)
        arrays: Sequence[Any] = list(batch.values()) if kind is dict else batch if kind in (list, tuple) else (batch,)
        if not all(type(array) is np.ndarray and array.size and array.dtype.num in TORCH_TAKES for array in arrays):
            arrays = ()
        self._layouts = [(array.dtype.num, array.shape) for array in arrays]
        small = [array.nbytes <= SMALL for array in arrays]
        self.small = small if sum(small) > 1 else [False] * len(small)
        sizes = [array.nbytes for array in arrays]
        self.is_one_copy = len(sizes) >= MANY and max(sizes) <= MEDIUM and sum(sizes) <= ONE_COPY

    def tensors(self, batch: Any) -> list[torch.Tensor]:
        """Return the arrays of a batch as tensors over the same memory; empty if its layout differs."""
        kind, tensors = self._kind, list[torch.Tensor]()
        if not self._layouts or type(batch) is not kind:
            return []
        arrays = batch.values() if kind is dict else (batch,) if kind is np.ndarray else batch
        if not len(self._layouts) == len(arrays) == len(set(map(id, arrays))):
            return []
        for array, (number, shape) in zip(arrays, self._layouts, strict=True):
            is_same = type(array) is np.ndarray and array.dtype.num == number and array.shape == shape
            if not (is_same and array.flags.carray and array.dtype.isnative):
                return []
            tensors.append(torch.from_numpy(array))
        return tensors

    def memory_of(self, tensors: Sequence[torch.Tensor], batch: Any) -> tuple[torch.Tensor, list[int]] | None:
        """Return the memory that all tensors lie in, and where; None if it is not one slot, or has large gaps."""
        base = next(iter(batch.values() if self._kind is dict else batch)).base
        arrays = batch.values() if self._kind is dict else batch
        if not (type(base) is np.ndarray and base.flags.carray and all(array.base is base for array in arrays)):
            return None
        memory, places = torch.from_numpy(base).view(torch.uint8), [tensor.data_ptr() for tensor in tensors]
        first, end = min(places), max(place + tensor.nbytes for place, tensor in zip(places, tensors, strict=True))
        start = first - memory.data_ptr()
        if any((place - first) % ALIGNMENT for place in places) or 2 * sum(t.nbytes for t in tensors) < end - first:
            return None
        return memory[start : start + end - first], [place - first for place in places]

    def filled(self, batch: Any, leaves: Sequence[Any]) -> Any:
        """Return a batch with these leaves in place of its arrays."""
        if self._kind is dict:
            return dict(zip(batch, leaves, strict=True))
        return leaves[0] if self._kind is np.ndarray else self._kind(leaves)


class CopyStream:
    """Copies to one device.

    Args:
        streams: of the device.
        clock: of the loader; None: a new one.
        shards: number of shards per batch for this device.

    Attributes:
        in_use: event, sources and `PendingCopy.targets` of each copy, until the event has passed.
    """

    def __init__(self, streams: Streams, clock: Clock | None = None, shards: int = 1) -> None:
        self.streams, self._clock, self._shards = streams, clock or Clock(), shards
        self._plan = PlacementPlan([])  # of the last batch
        self._stream: Any = None
        self._lock = threading.RLock()
        self.in_use: deque[tuple[Any, list[Any]]] = deque()
        self._moved: deque[tuple[Any, list[Any]]] = deque()
        self._thread = Background(f"sharded_loader-copies-{streams.device}")
        self._pid = os.getpid()
        self._hung_event: Any = None  # the event for which `close` has timed out
        # The event that the next call of ``next`` records, its stream, and the number of calls before.
        self._call_event: tuple[Any, Any, int] | None = None
        self._waits: deque[tuple[Any, Any, Any, int]] = deque()  # events of a call and of its batch, times, weight
        self._free_events: list[Any] = []  # timed events for reuse

    def begin(self, batch: Any, transform: Callable[[Any], Any] | None = None) -> PendingCopy:
        """Start to copy a batch.

        Args:
            batch: a structure of arrays and host tensors; other leaves stay as they are, or move themselves.
            transform: applied to the batch on the device.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
        """
        streams = self.streams
        # Leave the caller's inference mode, because the batch may be handed out after it.
        is_current = streams.current_device() == streams.device.index and not torch.is_inference_mode_enabled()
        with self._lock, NOTHING if is_current else streams.current():
            pending = PendingCopy(None, self, streams.caller_stream())
            if not (tensors := self._plan.tensors(batch)):
                self._plan = PlacementPlan(batch)
                tensors = self._plan.tensors(batch)
            found = self._plan.memory_of(tensors, batch) if tensors and self._plan.is_one_copy else None
            if found is not None:
                parts = [streams.empty(0, dtype=tensor.dtype) for tensor in tensors]
                self._share(pending, found[0], found[0].nbytes, tensors, parts, found[1])
                pending.batch = self._plan.filled(batch, parts)
            elif tensors:
                pending.batch = self._plan.filled(batch, self._allocate(pending, tensors, self._plan.small))
            else:
                pending.batch = map_leaves(functools.partial(self._place_leaf, pending), batch, own="to", skip=ATOMS)
            if pending.small:
                self._allocate_small(pending)
            if pending.targets or pending.staged or transform is not None:
                if self._stream is None:
                    self._stream = streams.new_stream()
                # Must follow the allocation of the targets, whose memory may be that of a batch dropped just before.
                allocated = pending.owner_stream.record_event()
                enqueue = functools.partial(self._enqueue, pending, allocated, transform)
                pending.enqueued = self._thread.submit(enqueue, self._set_up_thread)
            return pending

    def _set_up_thread(self) -> None:
        use_one_core()
        self.streams.leave_captures_alone()

    def _enqueue(self, pending: PendingCopy, allocated: Any, transform: Callable[[Any], Any] | None) -> None:
        """Enqueue the copies of a batch and what follows them, in the thread. Waits for the device if it is behind."""
        streams, sources, targets = self.streams, pending.sources, pending.targets
        with streams.current():
            pending.behind = self._release_finished()
            for number, target in enumerate(targets):
                sources[number] = self._pinned(sources[number], target)
            for wrapper in pending.staged:
                wrapper.value = self._stage(wrapper.value)
            self._stream.wait_event(allocated)
            streams.set_stream(self._stream)
            try:
                for target, source in zip(targets, sources, strict=True):
                    streams.copy(target, source)
                for wrapper in pending.staged:
                    if transform is not None or _can_move_ahead(wrapper.value):
                        sources.append(wrapper.value)
                        pending.made.append(self._move(wrapper))
                if transform is not None:
                    self._transform(pending, transform)
            finally:
                self._record(pending, [sources, targets])

    def _record(self, pending: PendingCopy, memory: list[Any]) -> None:
        """Record that the copies of a batch are enqueued, and hold the memory that they use until they are done."""
        try:
            event = self._stream.record_event()
        except RuntimeError:  # a kernel has failed: nothing is copied any more
            LOST.append(memory)
            raise
        self.in_use.append((event, memory))
        pending.event = event

    def _allocate(
        self, pending: PendingCopy, leaves: Sequence[torch.Tensor], small: Sequence[bool]
    ) -> list[torch.Tensor]:
        """Allocate targets for plain tensors. `_allocate_small` follows for the small ones."""
        streams, targets = self.streams, []
        for leaf, is_small in zip(leaves, small, strict=True):
            if is_small:
                target = streams.empty(0, dtype=leaf.dtype)
                pending.small.append((leaf, target))
            else:
                target = streams.empty_like(leaf)
                pending.sources.append(leaf)
                pending.targets.append(target)
            targets.append(target)
        return targets

    def _allocate_small(self, pending: PendingCopy) -> None:
        """Give the small tensors memory in one buffer on the device."""
        small, pending.small = pending.small, []
        if len(small) == 1:
            ((leaf, part),) = small
            part.set_(self._allocate(pending, [leaf], [False])[0].untyped_storage(), 0, leaf.shape, leaf.stride())
            return
        leaves, parts = zip(*small, strict=True)
        ends = list(itertools.accumulate(aligned(leaf.nbytes) for leaf in leaves))
        self._share(pending, [*leaves], ends[-1], leaves, parts, (0, *ends))

    def _share(
        self, pending: PendingCopy, source: Any, nbytes: int, leaves: Sequence[torch.Tensor], parts: Any, starts: Any
    ) -> None:
        """Give tensors on the device memory in one buffer there, which is copied at once from ``source``."""
        target = self.streams.empty(nbytes, dtype=torch.uint8)
        for leaf, part, start in zip(leaves, parts, starts, strict=False):
            # Not a view: parts share no version counter, so one may change while autograd needs another.
            part.set_(target.untyped_storage(), start // leaf.element_size(), leaf.shape, leaf.stride())
        pending.sources.append(source)
        pending.targets.append(target)

    def _pinned(self, source: Any, target: torch.Tensor) -> torch.Tensor:
        """Return a source of a copy in pinned memory and in the layout of its target: otherwise the host waits."""
        if type(source) is not list:
            address, is_ready = source.data_ptr(), not (source.is_conj() or source.is_neg())
            is_ours = any(begin <= address < end for begin, end in [*REGISTERED.items()])
            is_ready = is_ready and source.stride() == target.stride() and (is_ours or self.streams.is_pinned(source))
            return source if is_ready else pinned_copy(self.streams, source, target.stride())
        packed = torch.from_numpy(pinned_empty(self.streams, (target.nbytes,), np.dtype(np.uint8)))
        address = packed.data_ptr()
        for leaf in source:
            ctypes.memmove(address, leaf.data_ptr(), leaf.nbytes)
            address += aligned(leaf.nbytes)
        return packed

    def _transform(self, pending: PendingCopy, transform: Callable[[Any], Any]) -> None:
        """Replace the batch by the result of the user's function. Its input is held with the sources."""
        pending.batch = transform(_insert_moved(pending) if pending.staged else pending.batch)
        pending.staged, pending.made, pending.targets = [], [pending.batch], []
        here = filter(self.streams.holds, _tensors_in(pending.batch))
        if not all(_is_recorded(tensor) or tensor.layout is torch.jagged for tensor in here):
            text = "device_transform has returned a sparse or nested tensor, whose memory torch"
            raise TypeError(f"{text} cannot guard while another stream uses it: return dense tensors")

    def _place_leaf(self, pending: PendingCopy, leaf: Any) -> Any:
        """Return the device tensor for a plain tensor, a wrapper for an object that moves itself, or the leaf."""
        leaf = to_torch(leaf)
        if _is_plain(leaf):
            # Small tensors are packed once the whole batch has been seen.
            is_small = 0 < leaf.nbytes <= SMALL and leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg())
            return self._allocate(pending, [leaf], [is_small])[0]
        if type(leaf) is HostValue:
            return leaf.value
        if has_method(leaf, "to") and getattr(leaf, "device", None) != self.streams.device:
            leaf = HostValue(leaf)
            pending.staged.append(leaf)
        return leaf

    def hand_out(self, pending: PendingCopy) -> None:
        """Make the caller's stream wait for the copies of a batch, and insert the moved objects."""
        enqueued = pending.enqueued
        if enqueued is not None and (enqueued.error is not None or not enqueued.done.is_set()):
            self._await_enqueued(enqueued, pending)
        streams, current = self.streams, self.streams.caller_stream()
        if pending.event is not None:
            current.wait_event(pending.event)
            if current != pending.owner_stream:
                streams.record_use(pending.targets, current)
            for made in pending.made:
                record(streams, made, current)
            if self._clock.times is not None:
                self._record_ready(self._clock.times, current)
            pending.targets.clear()
        if pending.staged:
            with streams.current():
                self._move_remaining(pending, current)

    def _await_enqueued(self, enqueued: Later, pending: PendingCopy) -> None:
        began, timeout = host_clock.now(), self._clock.timeout
        if not enqueued.is_made(timeout):
            text = f"device_transform has not returned for {timeout:g} s, the timeout of the pool. Its thread cannot be"
            raise TimeoutError(f"{text} ended, and later batches wait for it, too: look at what it does (py-spy dump)")
        enqueued.wait()
        self._clock.behind += min(pending.behind, host_clock.now() - began)

    def _move_remaining(self, pending: PendingCopy, current: Any) -> None:
        """Insert the moved objects. The remaining ones move now, on the caller's stream, and need no `record_use`."""
        remaining = [wrapper for wrapper in pending.staged if not wrapper.has_moved]
        sources = [wrapper.value for wrapper in remaining]
        try:
            for wrapper in remaining:
                self._move(wrapper)
            pending.batch = _insert_moved(pending)
        finally:
            if sources:
                pending.event = current.record_event()
                self._moved.append((pending.event, sources))
        pending.staged = []

    def _record_ready(self, times: Any, current: Any) -> None:
        """Record that the stream has the batch of this ``next``, and make an event for the next call."""
        clock, device = self._clock, self.streams.device
        # This order survives a Ctrl-C: no event is read after it was dropped, or recorded while it waits to be read.
        call_event, self._call_event = self._call_event, None
        clock.records.pop(device, None)
        weight = 1 if times.batches < CLOCK_EVERY else CLOCK_EVERY
        if call_event is not None and call_event[1] == current and call_event[2] < clock.calls:
            if times.batches % weight == weight // 2:
                ready = self._free_events.pop() if self._free_events else self.streams.timed_event()
                ready.record(current)
                self._waits.append((call_event[0], ready, times, weight))
            else:
                self._free_events.append(call_event[0])
        event = self._free_events.pop() if self._free_events else self.streams.timed_event()
        clock.records[device] = functools.partial(event.record, current)
        self._call_event = event, current, clock.calls  # last, for the same reason

    def _move(self, wrapper: HostValue) -> Any:
        """Let an object move itself on the current stream, and return the result."""
        try:
            moved = wrapper.value.to(self.streams.device, non_blocking=True)
        except TypeError:
            moved = wrapper.value.to(self.streams.device)
        wrapper.value, wrapper.has_moved = unwrap_host_values(moved), True
        return wrapper.value

    # -- the end of copies ----------------------------------------------------------------------------------

    def _release_finished(self) -> float:
        """Release the memory of copies that are done. Waits for the oldest one at `HOST_AHEAD` batches.

        Returns:
            The seconds in which it has waited.
        """
        began, waited = host_clock.now(), 0.0
        under_way = sum(getattr(source, "nbytes", 0) for _, memory in self.in_use for source in memory[0])
        most = self._shards * (HOST_AHEAD if under_way > HOST_BYTES else max(HOST_AHEAD, self._clock.ahead + 2))
        if self._hung_event is not None and self._hung_event.query():
            self._hung_event = None
        for queue in (self.in_use, self._moved):
            if len(queue) >= most and self._hung_event is None:
                self._wait(queue[0][0])
                waited = host_clock.now() - began
            while queue and queue[0][0].query():
                queue.popleft()
        while self._waits and self._waits[0][1].query():
            call_event, ready, times, weight = self._waits.popleft()
            times.device_waiting_seconds += weight * max(0.0, call_event.elapsed_time(ready) / 1000)
            self._free_events += call_event, ready
        return waited

    def drop(self, targets: list[torch.Tensor], event: Any) -> None:
        """Free the targets of an unused batch when its copy is done.

        The event raises if a kernel has failed: then nothing is copied any more; see `LOST`.
        """
        if os.getpid() == self._pid and not program_ends():
            with contextlib.suppress(RuntimeError), self.streams.current():
                if not event.query():
                    self.streams.record_use(targets, self._stream)
            targets.clear()

    def drain(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait at most ``seconds`` until all copies are done, and return True if they are.

        If the device's context is broken, they count as done: nothing is copied any more.
        """
        # Without the lock, copies that another thread begins would release what is waited for here.
        with self._lock, self.streams.current():
            deadline = host_clock.now() + seconds
            if not self._thread.wait(seconds):
                return False
            for queue in (self.in_use, self._moved):
                while queue:
                    first = queue[0]
                    try:
                        if not self._wait(first[0], deadline):
                            return False
                    except RuntimeError:  # an earlier kernel has failed, which the user's program will see
                        LOST.append(first)
                    if queue and queue[0] is first:  # a signal handler may have closed the stream
                        queue.popleft()
            return True

    def _wait(self, event: Any, deadline: float = math.inf) -> bool:
        """Wait for an event. Returns False at the deadline, at the program's end, and after a deferred Ctrl-C."""
        rest = SHORTEST_REST
        while not event.query():
            if host_clock.now() >= deadline or should_stop() or program_ends():
                return False
            self.streams.rest(rest)
            rest = min(2 * rest, LONGEST_REST)
        return True

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait at most ``seconds`` until all copies are done, and return True if they are.

        If they are not, the memory that they read must stay as it is. Does not wait for the device at the program's
        end, only for the thread; nor for a device that has hung before.
        """
        is_ending, has_hung = program_ends(), self._hung_event is not None
        for other in [] if is_ending else list(STILL_READ):  # atomic, even without the GIL
            if other is not self and other._drain_with_lock(0.0):
                STILL_READ.discard(other)
        is_done = not is_ending and self._drain_with_lock(0.0 if has_hung else seconds)
        self._thread.close(CLOSING_SECONDS if is_done else ENDING_SECONDS if is_ending else 0.0)
        if is_done:
            self._hung_event = None
            STILL_READ.discard(self)
            return True
        self._hung_event = next((queue[0][0] for queue in (self.in_use, self._moved) if queue), None)
        STILL_READ.add(self)
        if not (is_ending or has_hung or should_stop()):
            warn(
                f"{self.streams.device} has not done its copies within {CLOSING_SECONDS:g} s: a kernel or a "
                f"collective may hang. The pinned memory that the copies read stays as it is until they are done. "
                f"Look for a rank that has died, or that takes other steps than the others"
            )
        return False

    def _drain_with_lock(self, seconds: float) -> bool:
        """Drain. Returns False, too, if a thread that waits for the device holds the lock for that long."""
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            return self.drain(seconds)
        finally:
            self._lock.release()

    def make_room(self) -> None:
        """Free all memory that can be freed, at the cost of waiting for the copies."""
        self.drain()
        with self.streams.current():
            self.streams.empty_cache()

    # -- objects that move themselves ------------------------------------------------------------------------

    def _stage(self, leaf: Any) -> Any:
        """Return the object with its tensors in memory pinned by torch, as in torch's loader, where that works."""
        if isinstance(leaf, torch.Tensor):
            return leaf
        if has_method(leaf, "pin_memory"):
            return leaf.pin_memory()
        try:
            pinned = map_leaves(self._pin_leaf, leaf, skip=ATOMS)
        except Exception:  # the container does not accept new values
            return leaf
        return pinned if type(pinned) is type(leaf) else leaf

    def _pin_leaf(self, leaf: Any) -> Any:
        if not _is_plain(leaf) or self.streams.is_pinned(leaf):  # pinned by the pool, in memory that torch guards
            return leaf
        return pinned_copy(self.streams, leaf, torch.empty_like(leaf, device="meta").stride())


def _insert_moved(pending: PendingCopy) -> Any:
    """Return the batch with wrappers replaced by the moved objects."""
    return map_leaves(lambda leaf: leaf.value if type(leaf) is HostValue else leaf, pending.batch, own="to", skip=ATOMS)


def _can_move_ahead(leaf: Any) -> bool:
    """Return True if an object may move on a side stream, because it, or all its tensors, can be recorded there."""
    if isinstance(leaf, torch.Tensor) or not (has_method(leaf, "record_stream") or children(leaf) is not None):
        return False
    return all(map(_is_recorded, _tensors_in(leaf)))


def record(streams: Streams, made: Any, stream: Any) -> None:
    """Let a stream use memory of the copy stream; see `Streams.record_use`."""
    if has_method(made, "record_stream") and not isinstance(made, torch.Tensor):
        made.record_stream(stream)
    else:
        streams.record_use(filter(_is_recorded, _tensors_in(made)), stream)


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a structure, and in the attributes of objects that have a method ``to``."""
    seen, parts = {}, [tree]
    while parts:
        part = parts.pop()
        if type(part) in ATOMS or id(part) in seen:
            continue
        seen[id(part)] = part  # keeps temporaries of a mapping alive, so that no id is reused
        if isinstance(part, torch.Tensor):
            yield part
            continue
        parts += children(part) or ()
        if has_method(part, "to"):
            parts += getattr(part, "__dict__", {}).values()


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return True if torch can record this tensor, which excludes sparse and nested ones."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_plain(leaf: Any) -> bool:
    """Return True for a tensor in host memory without a gradient or a class of its own."""
    return is_plain([leaf]) and not leaf.requires_grad
