"""From a batch as a worker made it to tensors where the user wants them.

    batch of NumPy arrays and tensors  --begin-->  on its way  --finish-->  tensors in host memory, or on a device
    list of such (shards)                  "                       "        shards[i] on devices[i]

A shard's copy goes by the lane of its device (`devices.lane`), each with a stream of its own, all at the same time,
none by way of another device. `begin` is called ahead, for `ahead` batches behind the one that is handed out next. What
is page-locked, and what the batches of threads lie in, is in `devices.pinning`. Lanes are made at the first batch, so
that a loader that is only constructed touches no device.

Anything that is no array, tensor or structure of them stays as it is, except that an object with a ``to`` method (a
tokenizer's encoding, a `PackedSequence`) is asked to move itself. A container whose class has ``to`` is asked too: it
knows which of its tensors belong on the host. An array that stands in several places of a batch is copied once.

What can go wrong: no memory on a device. Then one batch less is copied ahead, down to none, what torch has cached is
given back, and the copy is tried again; if that fails, it is that batch's error. After `PAUSE` batches one batch more
is copied ahead again.
"""

from __future__ import annotations

import mmap
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sharded_loader.batching.tree import ATOMS, map_leaves, to_torch
from sharded_loader.devices.copies import CLOSING_SECONDS, CopyStream
from sharded_loader.devices.names import accelerators, indexed, warn_of_rank
from sharded_loader.devices.pinning import PinnedMemory, Registrar, Undo
from sharded_loader.devices.streams import Streams, is_capturing, note_late, streams_of
from sharded_loader.errors import add_note

AHEAD = 2
"""Batches copied ahead: one is being copied while the one before it waits for the consumer."""

PAUSE = 64
"""Batches after which a device that was full is tried again. A try that fails costs one wait for the device, so the
pause doubles with each, up to `LONGEST_PAUSE`."""

LONGEST_PAUSE = 1024


class Placement:
    """Puts batches where they belong.

    Args:
        devices: of the shards, or of plain batches (the first); None: host memory.
        pin_memory: without devices, put batches into pinned host memory.

    Attributes:
        asynchronous: the devices that copies go to by a stream.
    """

    def __init__(self, devices: list[torch.device] | None, pin_memory: bool) -> None:
        self.devices = devices
        self._pin = pin_memory and devices is None
        kinds = {one.type for one in accelerators()} if pin_memory else set()
        if pin_memory and not kinds:
            warnings.warn("pin_memory=True has no effect: this process sees no accelerator to copy to", stacklevel=3)
            self._pin = False
        elif self._pin and kinds == {"mps"}:
            warnings.warn("pin_memory=True has no effect: torch has no pinned memory on mps (a Mac)", stacklevel=3)
            self._pin = False
        self._on_host = all(one.type == "cpu" for one in devices or ())
        self.asynchronous = [one for one in devices or () if streams_of(one) is not None]
        self._kinds = kinds if self._pin else {one.type for one in self.asynchronous}
        self.ahead = AHEAD if self.asynchronous else 0
        self._numbers: dict[torch.device, torch.device] = {}
        self._lanes: dict[torch.device, CopyStream] = {}
        self._registrar: Registrar | None = None
        self._memory: PinnedMemory | None = None

    @property
    def ahead(self) -> int:
        """How many batches to begin behind the next one; 0 where nothing is copied by a stream."""
        return self._ahead

    @ahead.setter
    def ahead(self, ahead: int) -> None:
        self._ahead = self._wanted = ahead
        self._pause, self._until_retry, self._retried = PAUSE, 0, False

    def numbered(self, device: torch.device) -> torch.device:
        """The device with its number: ``cuda`` is the current one when this is first asked."""
        if device not in self._numbers:
            self._numbers[device] = indexed(device)
            warn_of_rank(device, self._numbers[device])
        return self._numbers[device]

    def check_not_capturing(self) -> None:
        """Reject a call inside a graph capture, before anything is done that would break the capture.

        Raises:
            RuntimeError: the current stream is being captured.
        """
        if any(map(is_capturing, self._kinds)):
            raise RuntimeError(
                "next() was called on a loader while a graph is being captured, and the loader's copies cannot be part "
                "of a graph. Call next() before the capture. For each replay copy the batch into the tensor that was "
                "captured: static.copy_(next(batches)); graph.replay()"
            )

    # -- memory that batches come from ----------------------------------------------------------------------

    def register(self, mapping: mmap.mmap) -> Undo | None:
        """Make a segment readable for the devices; what undoes that, or None."""
        if not self.asynchronous:
            return None
        if self._registrar is None:
            self._registrar = Registrar(self._streams(), self.closer())
        return self._registrar.register(mapping)

    def settle(self) -> None:
        """Say which device a ``cuda`` without a number is: the current one of this thread, not of those that read."""
        if self.asynchronous and self._memory is None:
            self._memory = PinnedMemory(self._streams())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Memory for the batches of threads, and of the loop itself: pinned, if they are going to be copied."""
        if not self.asynchronous:
            return np.empty(shape, dtype)
        self.settle()
        assert self._memory is not None  # it has been settled
        return self._memory.empty(shape, dtype)

    def _streams(self) -> Streams:
        found = streams_of(self.numbered(self.asynchronous[0]))
        assert found is not None  # these devices have some
        return found

    # -- batches --------------------------------------------------------------------------------------------

    def begin(self, batch: Any, sharded: bool) -> Any:
        """Start to put ``batch`` where it belongs. Copies to an accelerator may still be under way after this.

        Args:
            batch: what a worker made.
            sharded: whether it is a list of shards.

        Returns:
            What `finish` makes the user's batch of.

        Raises:
            Exception: a device has no memory for it, or an object in it cannot be moved.
        """
        host = to_torch(batch)
        if self.devices is None:
            return map_leaves(_pin, host, own="pin_memory", skip=ATOMS) if self._pin else host
        if self._on_host:
            return host
        if self._ahead < self._wanted:
            self._until_retry -= 1
            if self._until_retry <= 0:
                self._ahead, self._until_retry, self._retried = self._ahead + 1, self._pause, True
        shards = host if sharded else [host]
        # Shards of one device in one go: an array that stands in several of them is copied once.
        groups: dict[torch.device, list[int]] = {}
        for number, device in zip(range(len(shards)), self.devices, strict=False):
            groups.setdefault(device, []).append(number)
        parts = [(numbers, self.send(device, [shards[n] for n in numbers])) for device, numbers in groups.items()]
        return Begun(parts, len(shards), sharded)

    def finish(self, begun: Any) -> Any:
        """The batch, ready on the current stream of this thread."""
        if type(begun) is not Begun:
            return begun
        batch: list[Any] = [None] * begun.count
        for numbers, part in begun.parts:
            lane, part = part if isinstance(part, tuple) else (None, part)
            try:
                shards = part if lane is None else lane.finish(part)
            except Exception as error:
                _note(error, lane.device)
                raise
            for number, shard in zip(numbers, shards, strict=True):
                batch[number] = shard
        return batch if begun.sharded else batch[0]

    def make_room(self) -> None:
        """A device has no memory left: copy one batch less ahead for some time, and give back what is not used."""
        if self._retried:
            self._pause, self._retried = min(2 * self._pause, LONGEST_PAUSE), False
        self._ahead, self._until_retry = max(0, self._ahead - 1), self._pause
        for lane in self._lanes.values():
            lane.make_room()

    def end_epoch(self) -> None:
        """Wait for the last copies of an epoch, so that no host memory is held for them until the next one."""
        for lane in self._lanes.values():
            lane.drain()

    def closer(self) -> Callable[[], bool]:
        """What waits for the copies under way, as a function that does not hold this object.

        It returns whether they are done. If not, the memory that they read must stay as it is.
        """
        lanes, pid = self._lanes, os.getpid()
        return lambda: _close(lanes, pid)

    def send(self, device: torch.device, shards: list[Any]) -> Any:
        """Begin to copy some shards, of tensors, to one device.

        Returns:
            What stands in a `Begun` for them: the lane and the transit, or the shards where there is no stream.
        """
        try:
            if device.type == "cpu":
                # What lies in page-locked segments is not for the user's own asynchronous copies: torch would not
                # know of it.
                return map_leaves(_clone, shards, own="to", skip=ATOMS)
            lane = self._lanes.get(device)
            if lane is None:
                streams = streams_of(self.numbered(device))
                if streams is None:
                    return map_leaves(lambda leaf: _to(leaf, device), shards, own="to", skip=ATOMS)
                lane = self._lanes[device] = CopyStream(streams)
            return lane, lane.begin(shards)
        except Exception as error:
            _note(error, device)
            raise


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch of which some shards are on their way.

    Attributes:
        parts: for each device the numbers of its shards, and the shards, or the lane and the transit that they are in.
        count: how many shards.
        sharded: whether the batch is the list of them.
    """

    parts: list[tuple[list[int], Any]]
    count: int
    sharded: bool


def _note(error: Exception, device: torch.device) -> None:
    if not note_late(error):
        add_note(error, f"raised while the batch was copied to {device}")


def _close(lanes: dict[torch.device, CopyStream], pid: int) -> bool:
    if os.getpid() != pid:  # a child that the user has forked has neither the device nor who might hold a lock
        return False
    until = time.monotonic() + CLOSING_SECONDS
    done = [lane.close(max(0.0, until - time.monotonic())) for lane in list(lanes.values())]
    return all(done)


def _pin(leaf: Any) -> Any:
    # By torch, one copy: only memory of its own does it guard when the user copies from it and drops the batch at once.
    if isinstance(leaf, type) or not callable(getattr(leaf, "pin_memory", None)):
        return leaf
    try:
        return leaf.pin_memory()
    except RuntimeError:
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            return leaf  # torch does not pin all layouts
        raise


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _to(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if callable(getattr(leaf, "to", None)) and not isinstance(leaf, type) else leaf
