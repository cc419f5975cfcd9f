"""The copies to one accelerator: ahead of the consumer, past the host, in memory that is neither lost nor reused early.

    begin(host batch) -> PendingCopy     targets are allocated, the copy stream is given the copies
    finish(transit)   -> batch       ready on the caller's current stream; objects move themselves now, on this stream
    close()                          wait for the copies, but not for ever

    caller's stream  --- step k-1 --o-------- step k --------- step k+1 ---
                                    |g                        ^ f
    copy stream      -------------- v copy k+2 -----------> e |

  g  The targets of a copy are allocated on the *caller's* stream, then an event is recorded there, and the copy waits
     for it. So the copy runs when what the caller had given its stream by then is done, and the memory of batches that
     were dropped by then is used again without asking anybody: however far the host runs ahead of the device, there
     are never more batches on it than those copied ahead and those that somebody holds.
  e  An event after the copy. The host batch is held until it has passed, and with it the lease on its slot.
  f  The caller's stream waits for e before the batch is handed out. If it is another stream than at g, the targets are
     recorded on it (``record_stream``). Where it is the same they need not be: they belong to it, like any tensor that
     the user makes there. Recording them anyway would keep their memory until the *host* sees the consumer's work done,
     which is what makes memory pile up under a host that runs ahead.

The host waits in two places. With `HOST_AHEAD` copies not done yet it waits for the oldest, because the memory that
they are made from is held. The device has that many steps to do then. And at the end of an epoch it waits for the last
copies, so that their host memory is free. The device still has the last steps to do then.

A lane belongs to a loader and lives as long as it; so does its stream (a new one per epoch strands the memory that
torch caches for each). Any thread may call it.

What can go wrong: no memory on the device: torch's error, and nothing has been given to the copy stream. A batch that
was begun and never finished (``break``) is kept until its copy has passed. A device that hangs (a collective that waits
for a rank that died) never does its copies: after `CLOSING_SECONDS` `close` leaves their memory alone.

Source of the idea: the copy streams of NVIDIA's and TorchRec's prefetchers; allocating on the consumer's stream is
the pattern that PyTorch's notes on CUDA semantics recommend for work on side streams.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sharded_loader.batching.tree import ATOMS, map_leaves
from sharded_loader.devices.streams import Streams
from sharded_loader.interrupts import program_ends, uninterrupted

HOST_AHEAD = 4
"""Copies to one device that may be under way. Each holds a batch of pinned host memory, so 16 batches of 100 MB would
hold 1.6 GB per process. Some three are under way while the host keeps step. With four the device has steps to do
while the host waits."""

CLOSING_SECONDS = 10.0
"""How long `CopyStream.close` waits. The copies under way belong to a few steps, which take seconds at most.
A collective that hangs is given up by its own library after minutes only."""

LEFT_ALONE: list[Any] = []
"""Host memory that a device may still read when its loader has been closed: kept until the program ends."""


class PendingCopy:
    """A batch on its way to a device.

    Attributes:
        batch: of tensors on the device, to be handed out by `CopyStream.finish` only.
        moves: whether there are objects in it that `CopyStream.finish` asks to move themselves (each in a `_Staged`).
        moved: the event after they did.
    """

    finished = False
    event: Any = None
    moved: Any = None

    def __init__(
        self, lane: CopyStream, batch: Any, targets: list[torch.Tensor], home: Any, event: Any, moves: bool = False
    ) -> None:
        self.batch = batch
        self.targets = targets
        self.home = home
        self.moves = moves
        self._kept = lane.kept
        self.event = event

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Anywhere, also inside the collector: a deque's append and nothing else.
        if not self.finished and self.event is not None and not _is_finalizing():
            self._kept.append((self.event, self.targets))


class _Staged:
    """An object that is going to move itself, in host memory that is not a pinned slot."""

    def __init__(self, what: Any) -> None:
        self.what = what


class CopyStream:
    """Copies to one device.

    Args:
        streams: of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._stream: Any = None
        self._lock = threading.RLock()
        self.kept: deque[tuple[Any, Any]] = deque()
        """What is needed until its event has passed: sources of copies, targets that nobody waits for."""
        self._moved: deque[tuple[Any, Any]] = deque()
        self._left_alone = False

    @property
    def device(self) -> torch.device:
        """Where the copies go."""
        return self._streams.device

    def begin(self, host: Any) -> PendingCopy:
        """Start to copy a batch.

        Args:
            host: a structure of host tensors; other leaves stay as they are, or are asked to move themselves.

        Raises:
            torch.OutOfMemoryError: the device has no memory for it.
            Exception: what an object that moves itself raises.
        """
        streams = self._streams
        # Not in the caller's inference mode: what is begun in it may be handed out after it.
        with self._lock, uninterrupted(), torch.inference_mode(False), streams.current():
            self._let_go()
            if self._stream is None:
                self._stream = streams.new_stream()
            home = streams.caller_stream()
            sources: list[torch.Tensor] = []
            targets: list[torch.Tensor] = []
            staged: list[_Staged] = []

            def place(leaf: Any) -> Any:
                if not _is_plain(leaf):
                    if not self._moves_itself(leaf):
                        return leaf
                    staged.append(_Staged(self._stage(leaf)))
                    return staged[-1]
                target = streams.empty_like(leaf)
                sources.append(self._source(leaf, target))
                targets.append(target)
                return target

            batch = map_leaves(place, host, own="to", skip=ATOMS)
            if not targets:
                return PendingCopy(self, batch, targets, home, None, bool(staged))
            # After the targets were allocated: their memory may be that of a batch which was dropped a moment ago.
            streams.wait(self._stream, streams.record(home))
            try:
                with streams.on(self._stream):
                    for target, source in zip(targets, sources, strict=True):
                        streams.copy(target, source)
                event = streams.record(self._stream)
                self.kept.append((event, sources))
                return PendingCopy(self, batch, targets, home, event, bool(staged))
            except BaseException:
                self.kept.append((streams.record(self._stream), (sources, targets)))
                raise

    def finish(self, transit: PendingCopy) -> Any:
        """The batch, ready on the current stream of this thread.

        Raises:
            torch.OutOfMemoryError: the device has no memory for an object that moves itself.
            Exception: what such an object raises.
        """
        streams = self._streams
        if transit.event is not None:
            current = streams.caller_stream()
            streams.wait(current, transit.event)
            if current != transit.home:
                for target in transit.targets:
                    streams.used_on(target, current)
        if transit.moved is not None:  # an interruption came after they had moved
            streams.wait(streams.caller_stream(), transit.moved)
        if transit.moves:
            self._move(transit)
        transit.finished = True
        return transit.batch

    def drain(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all copies are done.

        Args:
            seconds: how long at most.

        Returns:
            Whether they are done. They also are if the device's context is broken: then nothing is copied any more.
        """
        with self._lock:  # or another thread's `begin` would take out what is waited for, and this its next
            waiting = [*self.kept, *self._moved]
            done = self._wait([event for event, _ in waiting], seconds)
            if done:
                for kept in (self.kept, self._moved):
                    while kept and any(kept[0] is one for one in waiting):
                        kept.popleft()
            return done

    def _wait(self, events: list[Any], seconds: float) -> bool:
        streams, done = self._streams, []
        try:
            events = [event for event in events if not streams.has_passed(event)]
        except RuntimeError:  # as `block` raises it below
            return True
        if not events:
            return True

        def wait() -> None:
            try:
                for event in events:
                    streams.block(event)
                done.append(True)
            except RuntimeError:  # the context is broken: an error of an earlier kernel, which the user gets to see
                done.append(True)

        # An event can only be waited for without end. So a thread does it, which is left behind if the device hangs.
        waiter = threading.Thread(target=wait, name="sharded_loader-waits-for-device", daemon=True)
        waiter.start()
        waiter.join(seconds)
        return bool(done)

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """Wait until all copies are done, but not for ever, and not while the program ends.

        Returns:
            Whether they are done. If not, the memory that they read must stay as it is.
        """
        with self._lock:
            if not self._left_alone and not program_ends() and self.drain(seconds):
                return True
            if not self._left_alone:
                self._left_alone = True
                LEFT_ALONE.extend((*self.kept, *self._moved))
                self.kept.clear()
                self._moved.clear()
                if not program_ends():
                    warnings.warn(
                        f"{self.device} has not done its copies within {CLOSING_SECONDS:g} s: a kernel or a collective "
                        f"may hang. The pinned memory that the copies read stays as it is until the program ends. Look "
                        f"for a rank that has died, or that takes other steps than the others",
                        stacklevel=2,
                    )
            return False

    def make_room(self) -> None:
        """Give back what memory can be given back, at the cost of waiting for the copies."""
        with self._lock:
            self.drain()
            self._streams.empty_cache()

    def _let_go(self) -> None:
        streams = self._streams
        for kept in (self.kept, self._moved):
            if len(kept) >= HOST_AHEAD:
                streams.block(kept[0][0])
            while kept and streams.has_passed(kept[0][0]):
                kept.popleft()

    def _source(self, host: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory and in the layout of its target: anything else makes the host wait."""
        ready = host.stride() == target.stride() and not (host.is_conj() or host.is_neg())
        return host if ready and self._streams.is_pinned(host) else self._streams.pin(host, target.stride())

    def _moves_itself(self, leaf: Any) -> bool:
        can = callable(getattr(leaf, "to", None)) and not isinstance(leaf, type)
        return can and getattr(leaf, "device", None) != self.device

    def _stage(self, leaf: Any) -> Any:
        """The object with its tensors in pinned memory of torch's own, as torch's loader makes it, where that works."""
        if isinstance(leaf, torch.Tensor):
            return leaf
        pin = getattr(leaf, "pin_memory", None)
        if callable(pin):
            return pin()
        try:
            pinned = map_leaves(self._pin_leaf, leaf, skip=ATOMS)
        except Exception:  # a container that does not take new values moves as it is
            return leaf
        return pinned if type(pinned) is type(leaf) else leaf

    def _pin_leaf(self, leaf: Any) -> Any:
        if not _is_plain(leaf):
            return leaf
        return self._streams.pin(leaf, torch.empty_like(leaf, device="meta").stride())

    def _move(self, transit: PendingCopy) -> None:
        """Let objects move themselves, on the caller's own stream: their tensors cannot be told one by one."""
        streams = self._streams
        sources: list[Any] = []

        def move(leaf: Any) -> Any:
            if type(leaf) is not _Staged:
                return leaf
            sources.append(leaf.what)
            try:
                return leaf.what.to(self.device, non_blocking=True)
            except TypeError:
                return leaf.what.to(self.device)

        with torch.inference_mode(False), streams.current():
            try:
                batch = map_leaves(move, transit.batch, own="to", skip=ATOMS)
            finally:
                event = streams.record(streams.caller_stream())
                self._moved.append((event, sources))
            transit.batch, transit.moved, transit.moves = batch, event, False


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor in host memory whose values are all there is to it."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.is_quantized or leaf.is_nested or leaf.requires_grad)
    )
