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

The host waits in two places. While `HOST_AHEAD` copies are under way it waits for the oldest, because the copies hold
host memory. The device has that many steps to do then. At the end of an epoch the host waits for the last copies, so
that their host memory is free. The device still has the last steps to do then.

A `CopyStream` belongs to a loader and lives as long as the loader, and so does its stream of the device. (A new stream
per epoch would strand the memory that torch caches for each.) Any thread may call it.

What can go wrong: the device has no memory. Torch raises its error, and the copy stream was given nothing. A batch that
was begun and never finished (``break``) is kept until its copy is done. So is a batch whose `begin` was interrupted (a
Ctrl-C) after the copy stream was given copies: the next call of `begin` or `drain` sees to it. A device that hangs (a
collective that waits for a dead rank) never does its copies: after `CLOSING_SECONDS` `close` leaves their memory alone.

Source of the idea: the copy streams of NVIDIA's and TorchRec's prefetchers; allocating on the consumer's stream is
the pattern that PyTorch's notes on CUDA semantics recommend for work on side streams.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sharded_loader.base.errors import add_note
from sharded_loader.base.interrupts import program_ends
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.batching.tree import ATOMS, map_leaves, to_torch
from sharded_loader.devices.streams import Streams, note_late

HOST_AHEAD = 4
"""Copies to one device that may be under way. Each holds a batch of pinned host memory, so 16 batches of 100 MB would
hold 1.6 GB per process. With four the device has steps to do while the host waits. The number was not measured."""

CLOSING_SECONDS = 10.0
"""How long `CopyStream.close` waits. The copies under way belong to a few steps, which take seconds at most.
A collective that hangs is given up by its own library after minutes only."""

LEFT_ALONE: list[Any] = []
"""Host memory that a device may still read when its loader has been closed: kept until the program ends."""

Kept = deque[tuple[Any, Any]]
"""Events, each with what is needed until the event has passed."""


@dataclass(eq=False)
class PendingCopy:
    """A shard, or a plain batch, on its way to a device.

    Attributes:
        copies: the copy stream that has begun it.
        home: the stream that the targets belong to.
        batch: of tensors on the device. Only `finish` may hand it out.
        sources: the tensors that are copied from.
        targets: the tensors that are copied to, until `finish` hands them out. `CopyStream.kept` holds this list.
        event: passes when the copies are done. None: nothing is copied.
        staged: the objects in the batch that `finish` asks to move themselves.
    """

    copies: CopyStream
    home: Any
    batch: Any = None
    sources: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    event: Any = None
    staged: list[_Staged] = field(default_factory=list)

    def finish(self) -> Any:
        """The batch, ready on the current stream of this thread.

        Raises:
            torch.OutOfMemoryError: the device has no memory for an object that moves itself.
            Exception: what such an object raises.
        """
        if self.event is not None:
            streams = self.copies.streams
            with streams.current():
                current = streams.caller_stream()
                current.wait_event(self.event)
                if current != self.home:
                    streams.used_on(self.targets, current)
            self.targets.clear()
        if self.staged:
            self.copies.move(self)
        return self.batch


class Placed:
    """A shard, or a plain batch, that is on its device already: a pool has made it there, or the host has waited."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    def finish(self) -> Any:
        """The shard; see `PendingCopy.finish`."""
        return self.shard


@dataclass(eq=False)
class PendingBatch:
    """A batch on its way to its devices.

    Attributes:
        sharded: whether it is a list of shards.
        shards: each with its device.
    """

    sharded: bool
    shards: list[tuple[torch.device, PendingCopy | Placed]] = field(default_factory=list)

    def finish(self) -> Any:
        """The batch, ready on the current stream of this thread; see `PendingCopy.finish`."""
        shards = []
        for device, shard in self.shards:
            try:
                shards.append(shard.finish())
            except Exception as error:
                note_device(error, device)
                raise
        return shards if self.sharded else shards[0]


def note_device(error: Exception, device: torch.device) -> None:
    """Note on the error of a copy where the batch was copied to."""
    if not isinstance(error, BatchifyError) and not note_late(error):
        add_note(error, f"raised while the batch was copied to {device}")


class _Staged:
    """An object that is going to move itself, in host memory that is not a pinned slot."""

    def __init__(self, what: Any) -> None:
        self.what = what


class CopyStream:
    """Copies to one device.

    Args:
        streams: of the device.

    Attributes:
        streams: as given.
        kept: of each copy, its event, its sources and its `PendingCopy.targets`, until the event has passed.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._stream: Any = None
        self._lock = threading.RLock()
        self.kept: Kept = deque()
        self._moved: Kept = deque()
        self._given: Any = None  # sources and targets of the copies that `begin` is giving to the stream
        self._left_alone = False

    def begin(self, batch: Any) -> PendingCopy:
        """Start to copy a batch.

        Args:
            batch: a structure of arrays and host tensors; other leaves stay as they are, or are asked to move
                themselves.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
            Exception: what an object that moves itself raises.
        """
        streams = self.streams
        # Not in the caller's inference mode: what is begun in it may be handed out after it.
        with self._lock, torch.inference_mode(False), streams.current():
            self._let_go()
            pending = PendingCopy(self, streams.caller_stream())
            pending.batch = to_torch(batch, functools.partial(self._place, pending))
            if not pending.targets:
                return pending
            if self._stream is None:
                self._stream = streams.new_stream()
            # After the targets were allocated: their memory may be that of a batch which was dropped a moment ago.
            self._stream.wait_event(pending.home.record_event())
            self._given = pending.sources, pending.targets
            with streams.on(self._stream):
                for target, source in zip(pending.targets, pending.sources, strict=True):
                    streams.copy(target, source)
            pending.event = self._stream.record_event()
            self.kept.append((pending.event, self._given))
            self._given = None
            return pending

    def _place(self, pending: PendingCopy, leaves: Sequence[Any]) -> list[Any]:
        """What stands in the places of leaves: memory on the device for plain tensors, which are not copied yet."""
        streams, places = self.streams, []
        for leaf in leaves:
            if _is_plain(leaf):
                target = streams.empty_like(leaf)
                # In pinned memory and in the layout of its target: anything else makes the host wait.
                ready = leaf.stride() == target.stride() and not (leaf.is_conj() or leaf.is_neg())
                ready = ready and streams.is_pinned(leaf)
                pending.sources.append(leaf if ready else streams.pin(leaf, target.stride()))
                pending.targets.append(target)
                leaf = target
            elif has_method(leaf, "to") and getattr(leaf, "device", None) != streams.device:
                leaf = _Staged(self._stage(leaf))
                pending.staged.append(leaf)
            places.append(leaf)
        return places

    def move(self, pending: PendingCopy) -> None:
        """Let objects move themselves, on the caller's stream: no tensor of theirs needs `used_on` then."""
        streams = self.streams
        with torch.inference_mode(False), streams.current():
            try:
                pending.batch = map_leaves(self._moved_leaf, pending.batch, own="to", skip=ATOMS)
            finally:
                self._moved.append((streams.caller_stream().record_event(), pending.staged))
            pending.staged = []

    def _moved_leaf(self, leaf: Any) -> Any:
        if type(leaf) is not _Staged:
            return leaf
        try:
            return leaf.what.to(self.streams.device, non_blocking=True)
        except TypeError:
            return leaf.what.to(self.streams.device)

    # -- the end of copies ----------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Drop what copies have read, where their events have passed. Wait for the oldest of `HOST_AHEAD` copies."""
        if self._given is not None:
            self._keep_given()
        for kept in (self.kept, self._moved):
            if len(kept) >= HOST_AHEAD:
                kept[0][0].synchronize()
            while kept and kept[0][0].query():
                kept.popleft()

    def _keep_given(self) -> None:
        """Keep the sources and targets of an interrupted `begin` until its copies are done."""
        if self._given is not None:
            with contextlib.suppress(RuntimeError):  # the context is broken: nothing is copied any more
                self.kept.append((self._stream.record_event(), self._given))
            self._given = None

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
            waiting = [(kept, list(kept)) for kept in (self.kept, self._moved)]
            done = self._wait([event for _, items in waiting for event, _ in items], seconds)
            if done:
                for kept, items in waiting:
                    for item in items:
                        if kept and kept[0] is item:  # a signal handler may have closed the stream meanwhile
                            kept.popleft()
            return done

    def _wait(self, events: list[Any], seconds: float) -> bool:
        def wait() -> None:
            # Torch raises it if the context is broken: an error of an earlier kernel. The user's program sees it too.
            # Device 0 is current in a new thread. To ask there for an event would make a context on it: 0.5 GB.
            with contextlib.suppress(RuntimeError), self.streams.current():
                for event in events:
                    event.synchronize()

        with contextlib.suppress(RuntimeError):
            events = [event for event in events if not event.query()]
        if not events:
            return True
        # An event can only be waited for without end. So a thread does it, which is left behind if the device hangs.
        waiter = threading.Thread(target=wait, name="sharded_loader-waits-for-device", daemon=True)
        waiter.start()
        waiter.join(seconds)
        return not waiter.is_alive()

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all copies are done, but not for ever, and not while the program ends.

        Returns:
            Whether they are done. If not, the memory that they read must stay as it is.
        """
        with self._lock:
            if self._left_alone or (not program_ends() and self.drain(seconds)):
                return not self._left_alone
            self._left_alone = True
            LEFT_ALONE.extend((*self.kept, *self._moved))
            self.kept.clear()
            self._moved.clear()
        if not program_ends():
            warnings.warn(
                f"{self.streams.device} has not done its copies within {CLOSING_SECONDS:g} s: a kernel or a "
                f"collective may hang. The pinned memory that the copies read stays as it is until the program ends. "
                f"Look for a rank that has died, or that takes other steps than the others",
                stacklevel=2,
            )
        return False

    def make_room(self) -> None:
        """Give back what memory can be given back, at the cost of waiting for the copies."""
        self.drain()
        self.streams.empty_cache()

    # -- objects that move themselves ------------------------------------------------------------------------

    def _stage(self, leaf: Any) -> Any:
        """The object with its tensors in pinned memory of torch's own, as torch's loader makes it, where that works."""
        if isinstance(leaf, torch.Tensor):
            return leaf
        if callable(getattr(leaf, "pin_memory", None)):
            return leaf.pin_memory()
        try:
            pinned = map_leaves(self._pin_leaf, leaf, skip=ATOMS)
        except Exception:  # a container that does not take new values moves as it is
            return leaf
        return pinned if type(pinned) is type(leaf) else leaf

    def _pin_leaf(self, leaf: Any) -> Any:
        return self.streams.pin(leaf, torch.empty_like(leaf, device="meta").stride()) if _is_plain(leaf) else leaf


def has_method(leaf: Any, name: str) -> bool:
    """Whether an object has a method of this name; classes themselves are no objects to move.

    Example:
        >>> has_method(torch.ones(1), "to"), has_method(torch.Tensor, "to"), has_method("text", "to")
        (True, False, False)
    """
    return callable(getattr(leaf, name, None)) and not isinstance(leaf, type)


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor in host memory whose values are all there is to it."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.is_quantized or leaf.is_nested or leaf.requires_grad)
    )
