"""Placement: from a worker's batch to tensors in host memory or on devices.

    batch of NumPy arrays and tensors  -->  tensors in host memory, or on a device
    list of such batches (shards)           shards[i] on devices[i]

Each device has a copy stream (`devices.copies`); all copy at the same time. `Placer.place` finishes the first entry and
begins up to `ahead` batches behind it. The first batch creates the copy streams, so constructing a loader touches no
device.

Leaves other than arrays and tensors stay as they are. Objects with a ``to`` method (a tokenizer's encoding, a
`PackedSequence`) and containers whose class has one move themselves, since they know which tensors belong on the host.
An array that occurs several times in a shard is copied once.

If a device has no memory, one batch less is copied ahead, torch's cached memory is released, and the copy is retried.
If that fails, it is the batch's error. After `PAUSE` batches one more is copied ahead again.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sharded_loader.base import host_clock
from sharded_loader.base.errors import Location, as_batch_error
from sharded_loader.base.imports import provided
from sharded_loader.base.notices import warn
from sharded_loader.batching.protocol import Empty
from sharded_loader.batching.tree import ATOMS, TensorBatch, has_method, map_leaves, to_torch
from sharded_loader.devices import accelerator
from sharded_loader.devices.accelerator import Registrar, Streams, streams_of
from sharded_loader.devices.copies import CLOSING_SECONDS, Clock, CopyStream, PendingCopy, note_device
from sharded_loader.devices.names import accelerators, indexed, warn_of_rank
from sharded_loader.devices.transform import BatchTransform
from sharded_loader.engine.messages import NOTHING, Task
from sharded_loader.engine.pipeline import Entry
from sharded_loader.memory.arena import ReusedMemory

AHEAD = 2
"""Batches copied ahead: one is being copied while the previous one waits for the consumer."""

PAUSE = 64
"""Batches until a full device is tried again. A failed try costs one wait for the device, so the pause doubles with
each, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 1024

_CPU = torch.device("cpu")


class CopyDepth:
    """Number of batches copied ahead: at most ``wanted``, and less for some time after a device was full."""

    def __init__(self, wanted: int) -> None:
        self.count = self.wanted = wanted
        self._pause, self._until_retry, self._retried = PAUSE, 0, False

    def retry(self) -> None:
        """Count a batch that begins at reduced depth. After the pause, the depth grows by one."""
        self._until_retry -= 1
        if self._until_retry <= 0:
            self.count, self._until_retry, self._retried = self.count + 1, self._pause, True

    def lower(self) -> None:
        """Reduce the depth, because a device is full."""
        if self._retried:
            self._pause, self._retried = min(2 * self._pause, LONGEST_PAUSE), False
        self.count, self._until_retry = max(0, self.count - 1), self._pause


class Placer:
    """Puts batches where they belong.

    Args:
        devices: of the shards, or of plain batches (the first); None: host memory.
        pin_memory: without devices, put batches into pinned host memory.
        in_background: pin in a thread.
        transform: applied to each shard on its device.
        in_host_memory: applied to each shard that stays in host memory.
        pinner: a `drop_in.pinning.Pinner` that pins the batches; None: makes one if needed.

    Attributes:
        is_plain: batches stay in host memory that is not pinned, so `to_torch` suffices.
        asynchronous: devices that are copied to by a stream.
        capture_probes: functions that detect graph captures on the accelerators in use.
        copies: the `CopyStream` of each device; None if it has no streams.
        clock: the iterator records each ``next`` there.
    """

    def __init__(
        self,
        devices: list[torch.device] | None,
        pin_memory: bool,
        in_background: bool = True,
        transform: BatchTransform | None = None,
        in_host_memory: Callable[[Any], object] = to_torch,
        pinner: Any = None,
    ) -> None:
        self.devices, self._transform, self._in_host_memory, self._pinner = devices, transform, in_host_memory, pinner
        kinds = {device.type for device in accelerators()} if pin_memory else set()
        can_pin = sorted(kinds - {"mps"}) if devices is None else []
        if can_pin:
            self._pinner = provided("pinner", "thread")(can_pin[0], in_background)
        elif pin_memory and (devices is None or not kinds):
            why = "torch has no pinned memory on mps, a Mac" if kinds else "this process sees no accelerator to copy to"
            warn(f"pin_memory=True has no effect: {why}")
        self._on_host = all(device.type == "cpu" for device in devices or ())
        self._is_passthrough = self._on_host and self._pinner is None and transform is None
        self.is_plain = self._is_passthrough and in_host_memory is to_torch
        self.asynchronous = [device for device in devices or () if streams_of(device) is not None]
        touched = kinds if can_pin else {device.type for device in self.asynchronous}
        self.capture_probes = [probe for probe in map(accelerator.capture_probe, touched) if probe is not None]
        self.clock = Clock()
        self.copies = _CopyStreams(self.clock, devices or [])
        self._reused = ReusedMemory()
        self._latest_events: tuple[list[Any], bool] | None = None  # of the shards; True for a list of shards
        self.copy_ahead(AHEAD)

    @property
    def ahead(self) -> int:
        """Number of batches that are begun behind the next one."""
        return self._ahead.count

    def copy_ahead(self, count: int) -> None:
        """Set `ahead`, which stays 0 if nothing is done in the background."""
        self._ahead = CopyDepth(count if self.asynchronous or self._pinner is not None else 0)
        self.clock.ahead = count

    def check_not_capturing(self) -> None:
        """Raise RuntimeError inside a graph capture, before anything is done that would break it."""
        if any(is_capturing() for is_capturing in self.capture_probes):
            raise RuntimeError(
                "next() was called on a loader while a graph is being captured, and the loader's copies cannot be part "
                "of a graph. Call next() before the capture. For each replay copy the batch into the tensor that was "
                "captured: static.copy_(next(batches)); graph.replay()"
            )

    # -- memory of batches ----------------------------------------------------------------------------------

    def register(self, mapping: mmap.mmap) -> accelerator.Undo | None:
        """Pin a segment for the devices; see `Registrar.register`."""
        return self._registrar.register(mapping) if self.asynchronous else None

    @functools.cached_property
    def _registrar(self) -> Registrar:
        return Registrar(self._first_streams, self.closer())

    def create_streams(self) -> None:
        """Create the copy streams in this thread, so that ``cuda`` without an index means its current device."""
        for device in self.asynchronous:
            self.copies[device]

    @property
    def _first_streams(self) -> Streams:
        copies = self.copies[self.asynchronous[0]]
        assert copies is not None  # the device is asynchronous
        return copies.streams

    @property
    def empty(self) -> Empty:
        """Allocator for batches of threads and of the main process: pinned if they will be copied, else reused."""
        return self._pinned if self.asynchronous else self._reused

    @property
    def pinned(self) -> Empty | None:
        """Allocator of pinned memory; None if nothing is copied by a stream."""
        return self._pinned if self.asynchronous else None

    def _pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        try:
            return accelerator.pinned_empty(self._first_streams, shape, dtype)
        except RuntimeError as error:
            if not accelerator.is_late(error):
                raise
            return np.empty(shape, dtype)  # the batch's copy raises the error again, so no reader is blamed

    # -- batches --------------------------------------------------------------------------------------------

    def place(self, window: Sequence[Entry], following: Sequence[Entry] | None = None) -> Any:
        """Put the batch of the first entry where it belongs, and begin those behind it.

        Args:
            window: entries in order. The first has a batch.
            following: prefetched entries of the next epoch. None: not called by ``next``, so `ready_event` ignores this
                batch.

        Returns:
            The batch, ready on the current stream of this thread.

        Raises:
            Exception: a device has no memory for it, or an object in it cannot be moved. Errors of later batches are
                raised in their turn.
        """
        first = window[0]
        result, task = first.result, first.task
        assert result is not None and task is not None  # it has a batch
        if self._is_passthrough:
            convert = self._in_host_memory
            return list(map(convert, result.batch)) if task.sharded else convert(result.batch)
        for is_last_try in (False, True):
            try:
                if first.begun is None:
                    first.begun = self._begin(result.batch, task)
                if self._ahead.count:
                    self._begin_following(window, following or ())
                shards, events = [], []
                for copy in first.begun:
                    shards.append(copy.finish())
                    events.append(copy.event)
                if following is not None:
                    self._latest_events = events, task.sharded
                return shards if task.sharded else shards[0]
            except Exception as error:
                first.begun = None
                if is_last_try or self._pinner is not None or not isinstance(error, accelerator.OUT_OF_MEMORY):
                    raise
            # Outside the handler, because the error's traceback holds the parts that were allocated.
            for entry in itertools.chain(itertools.islice(window, 1, None), following or ()):
                entry.begun = None
            self.make_room()
        raise AssertionError("the last try returns")

    def _begin_following(self, window: Sequence[Entry], following: Sequence[Entry]) -> None:
        """Begin up to `ahead` batches behind the first, stopping at one that is not finished."""
        for entry in itertools.islice(itertools.chain(window, following), 1, 1 + self._ahead.count):
            result = entry.result
            if result is None:
                return
            if entry.begun is not None or entry.task is None or result.error is not None or result.batch is NOTHING:
                continue
            try:
                entry.begun = self._begin(result.batch, entry.task)
            except accelerator.OUT_OF_MEMORY:
                break
            except Exception as raised:
                as_batch_error(raised, "while the batch was placed")  # passes on exceptions of signal handlers
                return
        else:
            return
        self.make_room()  # outside the handler, as in `place`

    def _begin(self, batch: Any, task: Task) -> list[Any]:
        """Start to put a batch where it belongs. Copies of its shards may be under way afterwards."""
        shards = batch if task.sharded else (batch,)
        if self._pinner is not None:
            return [self._pinner.begin(self._in_host_memory(shard)) for shard in shards]
        if self._ahead.count < self._ahead.wanted:
            self._ahead.retry()
        copies_begun: list[PendingCopy] = []
        for number, (device, shard) in enumerate(zip(itertools.cycle(self.devices or [_CPU]), shards, strict=False)):
            try:
                copies = self.copies[device]
                if type(shard) is TensorBatch:
                    shard = shard.arrays
                if copies is None or self._transform is not None:
                    copies_begun.append(self._begin_shard(device, shard, task, number))
                else:
                    copies_begun.append(shard if type(shard) is PendingCopy else copies.begin(shard))
            except Exception as error:
                if not self._on_host:
                    note_device(error, device)
                raise
        return copies_begun

    def _begin_shard(self, device: torch.device, shard: object, task: Task, number: int) -> PendingCopy:
        """Start to put shard ``number`` of a task on a device without streams, or through the user's function."""
        copies, transform, apply = self.copies[device], self._transform, None
        with torch.inference_mode(False):  # as in `CopyStream.begin`
            if transform is not None:
                apply = functools.partial(transform.apply, task=task, number=number, kind=device.type)
                shard = transform.keep_on_host(shard)
            if type(shard) is PendingCopy:
                placed = shard.batch
            elif copies is not None:
                return copies.begin(shard, None if transform is None or transform.fn is None else apply)
            elif self._on_host:
                placed = self._in_host_memory(shard)
            else:
                placed = map_leaves(functools.partial(_move_leaf, device), shard, own="to", skip=ATOMS)
            return PendingCopy(placed if apply is None else apply(placed))

    def ready_event(self) -> Any:
        """Return the event of the last batch handed out, or one per shard; None if there is nothing to wait for."""
        if self._latest_events is None or not self.asynchronous:
            return None
        events, sharded = list(self._latest_events[0]), self._latest_events[1]
        for number, (device, event) in enumerate(zip(itertools.cycle(self.devices or ()), events, strict=False)):
            if event is None and (copies := self.copies[device]) is not None:
                with copies.streams.current():  # the batch was made on this stream
                    events[number] = copies.streams.caller_stream().record_event()
        return events if sharded else events[0]

    def make_room(self) -> None:
        """Reduce `ahead` and release unused memory, because a device has no memory left."""
        self._ahead.lower()
        for copies in filter(None, self.copies.values()):
            copies.make_room()

    def end_epoch(self) -> None:
        """Wait for the last copies of an epoch, so that they hold no host memory until the next one."""
        for copies in filter(None, self.copies.values()):
            copies.drain()

    def closer(self) -> Callable[[], bool]:
        """Return a function that waits for the copies under way and holds no reference to this object.

        It returns False if the memory that the copies read must stay as it is.
        """
        return functools.partial(_close, self.copies, self._reused, self._pinner, os.getpid())


class _CopyStreams(dict[torch.device, "CopyStream | None"]):
    """Copy streams by device, created on first access, when ``cuda`` resolves to the current device."""

    def __init__(self, clock: Clock, devices: list[torch.device]) -> None:
        self._clock, self._devices = clock, devices

    def __missing__(self, device: torch.device) -> CopyStream | None:
        indexed_device = indexed(device)
        warn_of_rank(device, indexed_device)
        streams, shards = streams_of(indexed_device), max(1, self._devices.count(device))
        self[device] = None if streams is None else CopyStream(streams, self._clock, shards)
        return self[device]


def placement_error(task: Task, raised: BaseException, where: str) -> Exception:
    """Return the error of a batch that could not be placed. Exceptions of a signal handler are raised again.

    ``raised`` is an exception caught just now, ``where`` the step that raised it.
    """
    error = as_batch_error(raised, where)
    # No sample is the cause of an earlier kernel's error.
    Location(task.epoch, task.seq).note(error, samples=() if accelerator.note_late(error) else task.shards[0])
    return error


def _close(streams: dict[torch.device, CopyStream | None], reused: ReusedMemory, pinner: Any, pid: int) -> bool:
    reused.clear()
    if os.getpid() != pid:  # a forked child has neither the device nor the threads that hold locks
        return False
    if pinner is not None:
        pinner.close()
    until = host_clock.now() + CLOSING_SECONDS
    done = [copies.close(max(0.0, until - host_clock.now())) for copies in list(streams.values()) if copies is not None]
    return all(done)


def _move_leaf(device: torch.device, leaf: Any) -> Any:
    leaf = to_torch(leaf)
    if device.type == "cpu":
        # Copied out of pinned segments, since torch would not guard them during the user's own asynchronous copies.
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    return leaf.to(device) if has_method(leaf, "to") else leaf
