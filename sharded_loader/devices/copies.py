"""The copies to one accelerator: ahead of the consumer, past the host, in memory that is neither lost nor reused early.

    CopyStream.begin(batch) -> PendingCopy       memory is allocated on the device, the copy stream is given the copies
    PendingCopy.finish()    -> batch             ready on the caller's current stream; objects move themselves now
    CopyStream.close()                           wait for the copies, but not for ever

    caller's stream  --- step k-1 --o-------- step k --------- step k+1 ---
                                    |g                        ^ f
    copy stream      -------------- v copy k+2 -----------> e |

  g  The targets of a copy are allocated on the *caller's* stream. Then an event is recorded there, and the copy waits
     for it. So the copy runs when the caller's earlier work is done, and it may use the memory of batches that were
     dropped by then. However far the host runs ahead of the device, the device holds two kinds of batches only: those
     copied ahead, and those that the user's program holds.
  e  An event after the copy. The host batch is held until the event has passed, and with it the lease on its slot.
  f  The caller's stream waits for e before the batch is handed out. If it is another stream than at g, the targets are
     recorded on it (``record_stream``). On the same stream this is not needed: the targets belong to it, like any
     tensor that the user makes there. To record them anyway would keep their memory until the *host* sees the
     consumer's work done. Then a host that runs ahead uses more and more device memory.

Small tensors of a batch travel together: the host copies them into one piece of pinned memory, and they are parts of
one piece of the device's. So a batch of 256 columns costs one copy, and not 256. A `PlacementPlan` notes which of the
arrays of a flat batch are small; it is kept for the next batch.

The user's ``device_transform`` runs on the copy stream, behind the copy and before e. So do the moves of objects that
move themselves, if all their tensors can be found: of containers, and of objects with ``record_stream``. What these two
make is memory of the copy stream, so it is recorded on the caller's stream at f. Other objects move at f, on the
caller's stream.

The host waits in two places. While the copies of `HOST_AHEAD` batches are under way it waits for the oldest, because
the copies hold host memory. The device has that many steps to do then. At the end of an epoch the host waits for the
last copies, so that their host memory is free. The device still has the last steps to do then. To wait is to ask, and
to sleep in between: a wait of the device's own would keep a core busy, and no Ctrl-C could end it.

Two events with times are recorded on the caller's stream: the first when ``next`` is called (`Clock`), the second when
the batch is ready. A device that is behind comes to both at once. A device that has nothing to do waits
for data from the first to the second. The times are read when the second one has passed.

A `CopyStream` belongs to a loader and lives as long as the loader, and so does its stream of the device. (A new stream
per epoch would strand the memory that torch caches for each.) Any thread may call it.

What can go wrong: the device has no memory. Torch raises its error, and the copy stream was given nothing. Of a batch
that was begun and never finished (``break``), the device's memory is given back when its copy is done, and the host's
at the next call. A `begin` that was interrupted (a Ctrl-C) after the copy stream was given copies: the next call of
`begin` or `drain` sees to it. A device that hangs (a collective that waits for a dead rank) never does its copies:
after `CLOSING_SECONDS` `close` leaves their memory alone, and each later `close` looks again.

Source of the idea: the copy streams of NVIDIA's and TorchRec's prefetchers; allocating on the consumer's stream is
the pattern that PyTorch's notes on CUDA semantics recommend for work on side streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from sharded_loader.base import host_clock
from sharded_loader.base.errors import add_note, notes_of
from sharded_loader.base.interrupts import program_ends, should_stop
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.batching.tree import ATOMS, TORCH_TAKES, children, has_method, is_plain, map_leaves, to_torch
from sharded_loader.devices.accelerator import NOTHING, Streams, note_late, pinned_copy, pinned_empty
from sharded_loader.devices.transform import RAISED, OnHost, shown
from sharded_loader.memory.codec import aligned

HOST_AHEAD = 4
"""Batches whose copies to one device may be under way. Each holds pinned host memory, so 16 batches of 100 MB would
hold 1.6 GB per process. With four the device has steps to do while the host waits. The number was not measured."""

SMALL = 32 * 1024
"""Bytes of the largest tensor that travels with others. To copy 32 KB on the host takes 3 us, as long as torch's own
calls for a copy. What a copy of its own costs the device was not measured."""

SHORTEST_REST, LONGEST_REST = 0.2e-3, 2e-3
"""Seconds between two looks at an event. The device has steps to do meanwhile, so it does not matter when the host sees
that the event has passed."""

CLOSING_SECONDS = 10.0
"""How long `CopyStream.close` waits. The copies under way belong to a few steps, which take seconds at most.
A collective that hangs is given up by its own library after minutes only."""

LEFT_ALONE: set[CopyStream] = set()
"""Those with copies under way when their loader was closed. They are held, with what the copies read and write."""

LOST: list[Any] = []
"""What copies had read and written when a kernel failed. It is held to the end: torch records an event when it frees
memory that a second stream has used. After such a failure it cannot, and then it ends the process (seen on an H200)."""


class DeviceTimes(Protocol):
    """Where the seconds are counted in which devices have waited for data."""

    device_waiting_seconds: float


class Clock:
    """Who waits for whom. For each ``next`` the iterator sets `times`, counts `calls`, and calls the `records`.

    Attributes:
        behind: seconds in which the host has waited for a device.
        times: counts how long devices wait, of the epoch whose ``next`` was called; None before the first call.
        calls: the number of calls.
        records: for each device, what records an event there. The function is torch's own.
    """

    def __init__(self) -> None:
        self.behind = 0.0
        self.times: DeviceTimes | None = None
        self.calls = 0
        self.records: dict[torch.device, Callable[[], Any]] = {}


@dataclass(eq=False)
class PendingCopy:
    """A shard, or a plain batch, on its way to a device, or there already because a pool has made it there.

    Attributes:
        batch: of tensors on the device. Only `finish` may hand it out.
        copies: the copy stream that has begun it; None: it is there already.
        home: the stream that the targets belong to.
        sources: the tensors that are copied from, and the objects that have moved themselves.
        targets: the tensors that are copied to, until `finish` hands them out. `CopyStream.kept` holds this list.
        event: passes when the copies are done. None: nothing is copied.
        staged: what stands in the batch for objects that move themselves, here or in `finish`. Each holds the object,
            in host memory that is no pinned slot; when it has moved, what it has become.
        made: what the copy stream's own memory is in: `finish` records it on the caller's stream.
        small: small tensors, each with the one on the device that has no memory yet.
    """

    batch: Any = None
    copies: CopyStream | None = None
    home: Any = None
    sources: list[Any] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    event: Any = None
    staged: list[OnHost] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    small: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def finish(self) -> Any:
        """The batch, ready on the current stream of this thread.

        Raises:
            torch.OutOfMemoryError: the device has no memory for an object that moves itself.
            Exception: what such an object raises.
        """
        copies = self.copies
        if copies is not None and (self.event is not None or self.staged):
            try:
                copies.hand_out(self)
            except Exception as error:
                note_device(error, copies.streams.device)
                raise
        return self.batch

    def drop(self) -> None:
        """No program takes the batch: its memory on the device is free when its copies are done."""
        if self.copies is not None and self.event is not None:
            self.copies.drop(self.targets, self.event)


def note_device(error: Exception, device: torch.device) -> None:
    """Note on the error of a copy where the batch was copied to."""
    if not isinstance(error, BatchifyError) and not note_late(error) and RAISED not in notes_of(error):
        add_note(error, f"raised while the batch was copied to {device}")


class PlacementPlan:
    """What becomes of the arrays of a flat batch: one array, or a list, tuple or dict of them.

    The first batch is looked at. Those behind it with arrays of the same types and shapes go the same way.

    Args:
        batch: the first batch.

    Attributes:
        small: for each array, whether it travels with others; none: the batch has another structure.

    Example:
        >>> PlacementPlan([np.zeros(2), np.zeros(3), np.zeros(9999)]).small, PlacementPlan([["text"]]).small
        ([True, True, False], [])
    """

    def __init__(self, batch: Any) -> None:
        self._kind = kind = type(batch)
        arrays: Sequence[Any] = list(batch.values()) if kind is dict else batch if kind in (list, tuple) else (batch,)
        if not all(type(one) is np.ndarray and one.size and one.dtype.num in TORCH_TAKES for one in arrays):
            arrays = ()
        self._layouts = [(one.dtype.num, one.shape) for one in arrays]
        small = [one.nbytes <= SMALL for one in arrays]
        self.small = small if sum(small) > 1 else [False] * len(small)

    def tensors(self, batch: Any) -> list[torch.Tensor]:
        """The arrays of a batch as tensors over the same memory; none: it does not go this way."""
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

    def filled(self, batch: Any, leaves: Sequence[Any]) -> Any:
        """A batch with these leaves in the places of its arrays."""
        if self._kind is dict:
            return dict(zip(batch, leaves, strict=True))
        return leaves[0] if self._kind is np.ndarray else self._kind(leaves)


class CopyStream:
    """Copies to one device.

    Args:
        streams: of the device.
        clock: of the loader; None: one of its own.
        shards: of a batch, that go to this device.

    Attributes:
        streams: as given.
        kept: of each copy the event, the sources and its `PendingCopy.targets`, until the event has passed.
    """

    def __init__(self, streams: Streams, clock: Clock | None = None, shards: int = 1) -> None:
        self.streams, self._clock, self._most = streams, clock or Clock(), HOST_AHEAD * shards
        self._plan = PlacementPlan([])  # of the last batch
        self._stream: Any = None
        self._lock = threading.RLock()
        self.kept: deque[tuple[Any, list[Any]]] = deque()
        self._moved: deque[tuple[Any, list[Any]]] = deque()
        self._given: list[Any] | None = None  # what the copies need that `begin` gives to the stream
        self._pid = os.getpid()
        self._hangs: Any = None  # the event that `close` has waited for in vain
        # The event that the next call of ``next`` records, on this stream; how many calls there were before.
        self._called: tuple[Any, Any, int] | None = None
        self._waits: deque[tuple[Any, Any, DeviceTimes]] = deque()  # events of a call and of its batch
        self._unused: list[Any] = []  # events with times

    def begin(self, batch: Any, transform: Callable[[Any], Any] | None = None) -> PendingCopy:
        """Start to copy a batch.

        Args:
            batch: a structure of arrays and host tensors; other leaves stay as they are, or are asked to move
                themselves.
            transform: what makes the batch that is handed out of the one on the device.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
            Exception: what an object that moves itself raises, or ``transform``.
        """
        streams = self.streams
        # Not in the caller's inference mode: what is begun in it may be handed out after it.
        is_current = streams.current_device() == streams.device.index and not torch.is_inference_mode_enabled()
        with self._lock, NOTHING if is_current else streams.current():
            pending = PendingCopy(None, self, streams.caller_stream())
            self._let_go()
            if not (tensors := self._plan.tensors(batch)):
                self._plan = PlacementPlan(batch)
                tensors = self._plan.tensors(batch)
            if tensors:
                pending.batch = self._plan.filled(batch, self._places(pending, tensors, self._plan.small))
            else:
                pending.batch = map_leaves(functools.partial(self._place, pending), batch, own="to", skip=ATOMS)
            if pending.small:
                self._bundle(pending)
            ahead = pending.staged and [
                one for one in pending.staged if transform is not None or _can_be_seen(one.value)
            ]
            if not (pending.targets or ahead or transform is not None):
                return pending
            if self._stream is None:
                self._stream = streams.new_stream()
            # After the targets were allocated: their memory may be that of a batch which was dropped a moment ago.
            self._stream.wait_event(pending.home.record_event())
            self._given = given = [pending.sources, pending.targets]
            try:
                streams.set_stream(self._stream)
                for target, source in zip(pending.targets, pending.sources, strict=True):
                    streams.copy(target, source)
                for one in ahead:
                    pending.sources.append(one.value)
                    pending.made.append(self._move(one))
                if transform is not None:
                    self._transform(pending, transform)
            finally:
                streams.set_stream(pending.home)
            pending.event = self._stream.record_event()
            self.kept.append((pending.event, given))
            self._given = None
            return pending

    def _places(
        self, pending: PendingCopy, leaves: Sequence[torch.Tensor], small: Sequence[bool]
    ) -> list[torch.Tensor]:
        """Memory on the device for plain tensors, which are not copied yet; `_bundle` gives it to the small ones."""
        streams, places = self.streams, []
        for leaf, is_small in zip(leaves, small, strict=True):
            if is_small:
                place = streams.hollow(dtype=leaf.dtype)
                pending.small.append((leaf, place))
            else:
                place = streams.empty_like(leaf)
                # In pinned memory and in the layout of its target: anything else makes the host wait.
                ready = leaf.stride() == place.stride() and not (leaf.is_conj() or leaf.is_neg())
                ready = ready and streams.is_pinned(leaf)
                pending.sources.append(leaf if ready else pinned_copy(streams, leaf, place.stride()))
                pending.targets.append(place)
            places.append(place)
        return places

    def _bundle(self, pending: PendingCopy) -> None:
        """Put the small tensors into one piece of pinned memory, and give them parts of one piece of the device's."""
        streams, (small, pending.small) = self.streams, (pending.small, [])
        if len(small) == 1:
            ((leaf, place),) = small
            place.set_(self._places(pending, [leaf], [False])[0].untyped_storage(), 0, leaf.shape, leaf.stride())
            return
        ends = list(itertools.accumulate(aligned(leaf.nbytes) for leaf, _ in small))
        source = torch.from_numpy(pinned_empty(streams, (ends[-1],), np.dtype(np.uint8)))
        target, address = streams.empty_like(source), source.data_ptr()
        for (leaf, place), start in zip(small, (0, *ends), strict=False):
            ctypes.memmove(address + start, leaf.data_ptr(), leaf.nbytes)
            # Not a view: the parts have nothing in common but the memory, so one may change while another is needed.
            place.set_(target.untyped_storage(), start // leaf.element_size(), leaf.shape, leaf.stride())
        pending.sources.append(source)
        pending.targets.append(target)

    def _transform(self, pending: PendingCopy, transform: Callable[[Any], Any]) -> None:
        """Put what the user's function makes in the place of the batch. What it is made of is kept with the sources."""
        pending.batch = transform(_with_moved(pending) if pending.staged else pending.batch)
        pending.staged, pending.made, pending.targets = [], [pending.batch], []
        here = filter(self.streams.holds, _tensors_in(pending.batch))
        if not all(_is_recorded(tensor) or tensor.layout is torch.jagged for tensor in here):
            raise TypeError(
                "device_transform has returned a sparse or nested tensor, whose memory torch cannot guard while "
                "another stream uses it: return dense tensors"
            )

    def _place(self, pending: PendingCopy, leaf: Any) -> Any:
        """What stands in the place of a leaf: memory on the device for a plain tensor, which is not copied yet."""
        leaf = to_torch(leaf)
        if _is_plain(leaf):
            # There may be others beside it: that is known when all of the batch has been seen.
            return self._places(pending, [leaf], [_is_small(leaf)])[0]
        if type(leaf) is OnHost:
            return leaf.value
        if has_method(leaf, "to") and getattr(leaf, "device", None) != self.streams.device:
            leaf = OnHost(self._stage(leaf))
            pending.staged.append(leaf)
        return leaf

    def hand_out(self, pending: PendingCopy) -> None:
        """Let the caller's stream wait for the copies of a batch, and put what objects have become in their places.

        No tensor of objects that move now, on the caller's stream, needs `used_on`.
        """
        streams, current = self.streams, self.streams.caller_stream()
        if pending.event is not None:
            current.wait_event(pending.event)
            if current != pending.home:
                streams.used_on(pending.targets, current)
            for made in pending.made:
                record(streams, made, current)
            if self._clock.times is not None:
                self._note_ready(self._clock.times, current)
            pending.targets.clear()
        if pending.staged:
            with streams.current():
                self._move_late(pending, current)

    def _move_late(self, pending: PendingCopy, current: Any) -> None:
        """Put what objects have become in their places. Those that have not moved do so now, on the caller's stream."""
        late = [one for one in pending.staged if not one.has_moved]
        sources = [one.value for one in late]
        try:
            for one in late:
                self._move(one)
            pending.batch = _with_moved(pending)
        finally:
            if sources:
                pending.event = current.record_event()
                self._moved.append((pending.event, sources))
        pending.staged = []

    def _note_ready(self, times: DeviceTimes, current: Any) -> None:
        """The stream has the batch that ``next`` was called for. Make an event for the next call."""
        clock, device = self._clock, self.streams.device
        called, self._called = self._called, None  # first: an event that is not recorded any more must not be read
        clock.records.pop(device, None)  # before it waits to be read: then it must not be recorded again
        if called is not None and called[1] == current and called[2] < clock.calls:
            ready = self._unused.pop() if self._unused else self.streams.timed_event()
            ready.record(current)
            self._waits.append((called[0], ready, times))
        event = self._unused.pop() if self._unused else self.streams.timed_event()
        clock.records[device] = functools.partial(event.record, current)
        self._called = event, current, clock.calls  # last, for the same reason

    def _move(self, one: OnHost) -> Any:
        """Let an object move itself on the current stream; what it has become."""
        try:
            moved = one.value.to(self.streams.device, non_blocking=True)
        except TypeError:
            moved = one.value.to(self.streams.device)
        one.value, one.has_moved = shown(moved), True
        return one.value

    # -- the end of copies ----------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Drop what copies have read, where their events have passed. Wait for the oldest of `HOST_AHEAD` batches."""
        if self._given is not None:
            self._keep_given()
        if self._hangs is not None and self._hangs.query():
            self._hangs = None
        for kept in (self.kept, self._moved):
            if len(kept) >= self._most and self._hangs is None:
                began = host_clock.now()
                self._wait(kept[0][0])
                self._clock.behind += host_clock.now() - began
            while kept and kept[0][0].query():
                kept.popleft()
        while self._waits and self._waits[0][1].query():
            called, ready, times = self._waits.popleft()
            times.device_waiting_seconds += max(0.0, called.elapsed_time(ready) / 1000)
            self._unused += called, ready

    def _keep_given(self) -> None:
        """Keep the sources and targets of an interrupted `begin` until its copies are done."""
        if self._given is not None:
            try:
                self.kept.append((self._stream.record_event(), self._given))
            except RuntimeError:  # a kernel has failed: nothing is copied any more
                LOST.append(self._given)
            self._given = None

    def drop(self, targets: list[torch.Tensor], event: Any) -> None:
        """No program takes this batch: its memory on the device is free when its copy is done.

        Args:
            targets: the memory.
            event: of the copy. It raises where a kernel has failed: then nothing is copied any more; see `LOST`.
        """
        if os.getpid() == self._pid and not program_ends():
            with contextlib.suppress(RuntimeError), self.streams.current():
                if not event.query():
                    self.streams.used_on(targets, self._stream)
            targets.clear()

    def drain(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all copies are done.

        Args:
            seconds: how long at most.

        Returns:
            Whether they are done. They also are if the device's context is broken: then nothing is copied any more.
        """
        # The lock: otherwise `begin` in another thread would let go of what is waited for here.
        with self._lock, self.streams.current():
            self._keep_given()
            until = host_clock.now() + seconds
            for kept in (self.kept, self._moved):
                while kept:
                    first = kept[0]
                    try:
                        if not self._wait(first[0], until):
                            return False
                    except RuntimeError:  # an earlier kernel has failed; the user's program sees it
                        LOST.append(first)
                    if kept and kept[0] is first:  # a signal handler may have closed the stream meanwhile
                        kept.popleft()
            return True

    def _wait(self, event: Any, until: float = math.inf) -> bool:
        """Whether an event has passed before some time, or before a Ctrl-C that waits for an `uninterrupted` block."""
        rest = SHORTEST_REST
        while not event.query():
            if host_clock.now() >= until or should_stop():
                return False
            self.streams.rest(rest)
            rest = min(2 * rest, LONGEST_REST)
        return True

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all copies are done, but not for ever, and not while the program ends.

        Args:
            seconds: how long at most. What was waited for in vain is only looked at.

        Returns:
            Whether they are done. If not, the memory that they read must stay as it is.
        """
        ends, gave_up = program_ends(), self._hangs is not None
        for other in () if ends else tuple(LEFT_ALONE):
            if other is not self and other._is_done(0.0):
                LEFT_ALONE.discard(other)
        if not ends and self._is_done(0.0 if gave_up else seconds):
            self._hangs = None
            LEFT_ALONE.discard(self)
            return True
        self._hangs = next((kept[0][0] for kept in (self.kept, self._moved) if kept), None)
        LEFT_ALONE.add(self)
        if not (ends or gave_up or should_stop()):
            warnings.warn(
                f"{self.streams.device} has not done its copies within {CLOSING_SECONDS:g} s: a kernel or a "
                f"collective may hang. The pinned memory that the copies read stays as it is until they are done. "
                f"Look for a rank that has died, or that takes other steps than the others",
                stacklevel=2,
            )
        return False

    def _is_done(self, seconds: float) -> bool:
        """As `drain`. Also False if a thread that waits for the device has the lock for so long."""
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            return self.drain(seconds)
        finally:
            self._lock.release()

    def make_room(self) -> None:
        """Give back what memory can be given back, at the cost of waiting for the copies."""
        self.drain()
        with self.streams.current():
            self.streams.empty_cache()

    # -- objects that move themselves ------------------------------------------------------------------------

    def _stage(self, leaf: Any) -> Any:
        """The object with its tensors in pinned memory of torch's own, as torch's loader makes it, where that works."""
        if isinstance(leaf, torch.Tensor):
            return leaf
        if has_method(leaf, "pin_memory"):
            return leaf.pin_memory()
        try:
            pinned = map_leaves(self._pin_leaf, leaf, skip=ATOMS)
        except Exception:  # a container that does not take new values moves as it is
            return leaf
        return pinned if type(pinned) is type(leaf) else leaf

    def _pin_leaf(self, leaf: Any) -> Any:
        if not _is_plain(leaf) or self.streams.is_pinned(leaf):  # the pool has done it, in memory that torch guards
            return leaf
        return pinned_copy(self.streams, leaf, torch.empty_like(leaf, device="meta").stride())


def _with_moved(pending: PendingCopy) -> Any:
    """The batch with what objects have become in their places."""
    return map_leaves(lambda leaf: leaf.value if type(leaf) is OnHost else leaf, pending.batch, own="to", skip=ATOMS)


def _can_be_seen(leaf: Any) -> bool:
    """Whether an object may move on another stream than the caller's: it records itself there, or it is a container,
    whose tensors can be found and recorded."""
    if isinstance(leaf, torch.Tensor) or not (has_method(leaf, "record_stream") or children(leaf) is not None):
        return False
    return all(map(_is_recorded, _tensors_in(leaf)))


def record(streams: Streams, made: Any, stream: Any) -> None:
    """Let a stream use what the copy stream has made; see `Streams.used_on`."""
    if has_method(made, "record_stream") and not isinstance(made, torch.Tensor):
        made.record_stream(stream)
    else:
        streams.used_on(filter(_is_recorded, _tensors_in(made)), stream)


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in a structure, and in the attributes of objects that have a method ``to``."""
    seen, parts = {}, [tree]
    while parts:
        part = parts.pop()
        if type(part) in ATOMS or id(part) in seen:
            continue
        seen[id(part)] = part  # a mapping may make its values on access: an id must not come again
        if isinstance(part, torch.Tensor):
            yield part
            continue
        parts += children(part) or ()
        if has_method(part, "to"):
            parts += getattr(part, "__dict__", {}).values()


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether torch can record this tensor; it cannot where others hold its values."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_small(leaf: torch.Tensor) -> bool:
    """Whether a plain tensor travels with others."""
    return 0 < leaf.nbytes <= SMALL and leaf.is_contiguous() and not (leaf.is_conj() or leaf.is_neg())


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor in host memory whose values are all there is to it."""
    return is_plain([leaf]) and not leaf.requires_grad
