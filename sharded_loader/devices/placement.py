"""From a batch as a worker made it to tensors where the user wants them.

    batch of NumPy arrays and tensors  -->  tensors in host memory, or on a device
    list of such batches (shards)           shards[i] on devices[i]

    window of entries --place--> batch      begin the first entry and those behind it, finish the first

Each device has a copy stream (`devices.copies`). All copy at the same time, none by way of another device.
`place` copies ahead: it begins up to `ahead` batches behind the one that is handed out next. `devices.accelerator`
gives the memory that the batches of threads lie in, and pins segments. The first batch makes the copy streams, so a
loader that is only constructed touches no device.

Anything that is no array, tensor or structure of them stays as it is. An object with a ``to`` method (a tokenizer's
encoding, a `PackedSequence`) is asked to move itself. A container whose class has ``to`` is asked too: it knows which
of its tensors belong on the host. An array that stands in several places of a shard is copied once.

What can go wrong: no memory on a device. Then one batch less is copied ahead, down to none. What torch has cached is
given back, and the copy is tried again. If that fails, it is that batch's error. After `PAUSE` batches one batch more
is copied ahead again.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sharded_loader.base import host_clock
from sharded_loader.base.errors import Location, as_batch_error
from sharded_loader.base.imports import provided
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
"""Batches copied ahead: one is being copied while the one before it waits for the consumer."""

PAUSE = 64
"""Batches after which a device that was full is tried again. A try that fails costs one wait for the device, so the
pause doubles with each, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 1024

_CPU = torch.device("cpu")


class CopyDepth:
    """How many batches are copied ahead: fewer for some time after a device was full.

    Args:
        wanted: how many, where there is room.

    Attributes:
        wanted: as given.
        count: how many now.
    """

    def __init__(self, wanted: int) -> None:
        self.count = self.wanted = wanted
        self._pause, self._until_retry, self._retried = PAUSE, 0, False

    def retry(self) -> None:
        """A batch is begun while fewer are wanted: try one more, after a pause."""
        self._until_retry -= 1
        if self._until_retry <= 0:
            self.count, self._until_retry, self._retried = self.count + 1, self._pause, True

    def lower(self) -> None:
        """A device is full."""
        if self._retried:
            self._pause, self._retried = min(2 * self._pause, LONGEST_PAUSE), False
        self.count, self._until_retry = max(0, self.count - 1), self._pause


class Placer:
    """Puts batches where they belong.

    Args:
        devices: of the shards, or of plain batches (the first); None: host memory.
        pin_memory: without devices, put batches into pinned host memory.
        in_background: pin in a thread.
        transform: what each shard goes through on its device.
        in_host_memory: what each shard goes through that stays in host memory.
        pinner: pins the batches, in the place of one of its own: `drop_in.pinning.Pinner`.

    Attributes:
        is_plain: batches stay in host memory that is not pinned: `to_torch` is all there is to do.
        asynchronous: the devices that copies go to by a stream.
        capture_probes: each tells whether a graph is being captured on an accelerator that a batch is copied or pinned
            for. See `check_not_capturing`.
        copies: the `CopyStream` of each device; None where it has no streams.
        clock: the iterator notes each ``next`` there.
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
        kinds = {one.type for one in accelerators()} if pin_memory else set()
        can_pin = sorted(kinds - {"mps"}) if devices is None else []
        if can_pin:
            self._pinner = provided("pinner", "thread")(can_pin[0], in_background)
        elif pin_memory and (devices is None or not kinds):
            why = "torch has no pinned memory on mps, a Mac" if kinds else "this process sees no accelerator to copy to"
            warnings.warn(f"pin_memory=True has no effect: {why}", stacklevel=3)
        self._on_host = all(one.type == "cpu" for one in devices or ())
        self._stays = self._on_host and self._pinner is None and transform is None
        self.is_plain = self._stays and in_host_memory is to_torch
        self.asynchronous = [one for one in devices or () if streams_of(one) is not None]
        touched = kinds if can_pin else {one.type for one in self.asynchronous}
        self.capture_probes = [probe for probe in map(accelerator.capture_probe, touched) if probe is not None]
        self.clock = Clock()
        self.copies = _CopyStreams(self.clock, devices or [])
        self._reused = ReusedMemory()
        self._latest: tuple[list[Any], bool] | None = None  # the events of the shards, and whether they are a list
        self.copy_ahead(AHEAD)

    @property
    def ahead(self) -> int:
        """How many batches are begun behind the next one."""
        return self._ahead.count

    def copy_ahead(self, count: int) -> None:
        """Set `ahead`; it stays 0 where nothing is done in the background."""
        self._ahead = CopyDepth(count if self.asynchronous or self._pinner is not None else 0)

    def check_not_capturing(self) -> None:
        """Reject a call inside a graph capture, before anything is done that would break the capture.

        Raises:
            RuntimeError: the current stream is being captured.
        """
        if any(is_capturing() for is_capturing in self.capture_probes):
            raise RuntimeError(
                "next() was called on a loader while a graph is being captured, and the loader's copies cannot be part "
                "of a graph. Call next() before the capture. For each replay copy the batch into the tensor that was "
                "captured: static.copy_(next(batches)); graph.replay()"
            )

    # -- memory that batches come from ----------------------------------------------------------------------

    def register(self, mapping: mmap.mmap) -> accelerator.Undo | None:
        """Make a segment readable for the devices; what undoes that, or None."""
        return self._registrar.register(mapping) if self.asynchronous else None

    @functools.cached_property
    def _registrar(self) -> Registrar:
        return Registrar(self._first_streams, self.closer())

    def settle(self) -> None:
        """Settle which device a ``cuda`` without a number is: the current one of this thread, not of one that reads."""
        for device in self.asynchronous:
            self.copies[device]

    @property
    def _first_streams(self) -> Streams:
        copies = self.copies[self.asynchronous[0]]
        assert copies is not None  # the device is asynchronous
        return copies.streams

    @property
    def empty(self) -> Empty:
        """Gives memory for the batches of threads and of the main process: pinned, if they are going to be copied.

        Other large batches lie in memory that is used again.
        """
        return self._pinned if self.asynchronous else self._reused

    @property
    def pinned(self) -> Empty | None:
        """Gives pinned memory for one array; None where nothing is copied by a stream."""
        return self._pinned if self.asynchronous else None

    def _pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        try:
            return accelerator.pinned_empty(self._first_streams, shape, dtype)
        except RuntimeError as error:
            if not accelerator.is_late(error):
                raise
            return np.empty(shape, dtype)  # the copy of the batch meets the error again, so no reader is blamed

    # -- batches --------------------------------------------------------------------------------------------

    def place(self, window: Sequence[Entry], following: Sequence[Entry] | None = None) -> Any:
        """Put the batch of the first entry where it belongs, and send those behind it on their way.

        Args:
            window: entries in order. The first has a batch.
            following: those of the next epoch, which are prefetched. None: no ``next`` asks, so `ready_event` tells
                nothing of this batch.

        Returns:
            The batch, ready on the current stream of this thread.

        Raises:
            Exception: a device has no memory for it, or an object in it cannot be moved. What goes wrong with a batch
                behind the first comes again in its turn.
        """
        head = window[0]
        result, task = head.result, head.task
        assert result is not None and task is not None  # it has a batch
        if self._stays:
            convert = self._in_host_memory
            return list(map(convert, result.batch)) if task.sharded else convert(result.batch)
        for is_last_try in (False, True):
            try:
                if head.begun is None:
                    head.begun = self._begin(result.batch, task)
                if self._ahead.count:
                    self._begin_behind(window, following or ())
                shards, events = [], []
                for copy in head.begun:
                    shards.append(copy.finish())
                    events.append(copy.event)
                if following is not None:
                    self._latest = events, task.sharded
                return shards if task.sharded else shards[0]
            except accelerator.OUT_OF_MEMORY:
                if is_last_try or self._pinner is not None:
                    raise
            # Not done above: the error's traceback holds the parts that had found room.
            for entry in itertools.chain(itertools.islice(window, 1, None), following or ()):
                entry.begun = None
            self.make_room()
        raise AssertionError("the last try returns")

    def _begin_behind(self, window: Sequence[Entry], following: Sequence[Entry]) -> None:
        """Begin up to `ahead` batches behind the first, up to one that is not finished."""
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
                as_batch_error(raised, "while the batch was placed")  # raises what a signal handler has raised
                return
        else:
            return
        self.make_room()  # not done above, as in `place`

    def _begin(self, batch: Any, task: Task) -> list[Any]:
        """Start to put a batch where it belongs. The copies of its shards may still be under way after this."""
        shards = batch if task.sharded else (batch,)
        if self._pinner is not None:
            return [self._pinner.begin(self._in_host_memory(shard)) for shard in shards]
        if self._ahead.count < self._ahead.wanted:
            self._ahead.retry()
        begun: list[PendingCopy] = []
        for place, (device, shard) in enumerate(zip(self.devices or itertools.repeat(_CPU), shards, strict=False)):
            try:
                copies = self.copies[device]
                if type(shard) is TensorBatch:
                    shard = shard.arrays
                if copies is None or self._transform is not None:
                    begun.append(self._begin_shard(device, shard, task, place))
                else:
                    begun.append(shard if type(shard) is PendingCopy else copies.begin(shard))
            except Exception as error:
                if not self._on_host:
                    note_device(error, device)
                raise
        return begun

    def _begin_shard(self, device: torch.device, shard: object, task: Task, place: int) -> PendingCopy:
        """Start to put shard ``place`` of a task on a device without streams, or through the user's function."""
        copies, transform, apply = self.copies[device], self._transform, None
        with torch.inference_mode(False):  # as in `CopyStream.begin`
            if transform is not None:
                apply = functools.partial(transform.apply, task=task, number=place)
                shard = transform.hold_back(shard)
            if type(shard) is PendingCopy:
                placed = shard.batch
            elif copies is not None:
                return copies.begin(shard, None if transform is None or transform.fn is None else apply)
            elif self._on_host:
                placed = self._in_host_memory(shard)
            else:
                placed = map_leaves(functools.partial(_move, device), shard, own="to", skip=ATOMS)
            return PendingCopy(placed if apply is None else apply(placed))

    def ready_event(self) -> Any:
        """What passes when the batch that was handed out last is ready; of each shard, if it is a list of shards.

        None where nothing has to be waited for: in host memory, and before the first batch.
        """
        if self._latest is None or not self.asynchronous:
            return None
        events, sharded = list(self._latest[0]), self._latest[1]
        for place, (device, event) in enumerate(zip(self.devices or (), events, strict=False)):
            if event is None and (copies := self.copies[device]) is not None:
                with copies.streams.current():  # it was made on this stream
                    events[place] = copies.streams.caller_stream().record_event()
        return events if sharded else events[0]

    def make_room(self) -> None:
        """A device has no memory left: copy one batch less ahead for some time, and give back what is not used."""
        self._ahead.lower()
        for copies in filter(None, self.copies.values()):
            copies.make_room()

    def end_epoch(self) -> None:
        """Wait for the last copies of an epoch, so that no host memory is held for them until the next one."""
        for copies in filter(None, self.copies.values()):
            copies.drain()

    def closer(self) -> Callable[[], bool]:
        """What waits for the copies under way, as a function that does not hold this object.

        It returns whether they are done. If not, the memory that they read must stay as it is.
        """
        return functools.partial(_close, self.copies, self._reused, self._pinner, os.getpid())


class _CopyStreams(dict[torch.device, "CopyStream | None"]):
    """The copies to each device; None where it has no streams. ``cuda`` is the current device at the first look.

    Args:
        clock: of the loader.
        devices: of the shards.
    """

    def __init__(self, clock: Clock, devices: list[torch.device]) -> None:
        self._clock, self._devices = clock, devices

    def __missing__(self, device: torch.device) -> CopyStream | None:
        number = indexed(device)
        warn_of_rank(device, number)
        streams, shards = streams_of(number), max(1, self._devices.count(device))
        self[device] = None if streams is None else CopyStream(streams, self._clock, shards)
        return self[device]


def not_placed(task: Task, raised: BaseException, where: str) -> Exception:
    """The error of a batch that could not be put on its devices. What a signal handler has raised is raised again.

    Args:
        task: what was to be read.
        raised: an exception that was caught just now.
        where: by what it was raised.
    """
    error = as_batch_error(raised, where)
    # Of an error of an earlier kernel no sample is the cause.
    Location(task.epoch, task.seq).note(error, samples=() if accelerator.note_late(error) else task.shards[0])
    return error


def _close(streams: dict[torch.device, CopyStream | None], reused: ReusedMemory, pinner: Any, pid: int) -> bool:
    reused.clear()
    if os.getpid() != pid:  # a forked child has no device, and not the threads that may hold a lock
        return False
    if pinner is not None:
        pinner.close()
    until = host_clock.now() + CLOSING_SECONDS
    done = [copies.close(max(0.0, until - host_clock.now())) for copies in list(streams.values()) if copies is not None]
    return all(done)


def _move(device: torch.device, leaf: Any) -> Any:
    leaf = to_torch(leaf)
    if device.type == "cpu":
        # Pinned segments are not for the user's own asynchronous copies: torch would not know of them.
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    return leaf.to(device) if has_method(leaf, "to") else leaf
