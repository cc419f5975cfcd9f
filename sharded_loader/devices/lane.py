"""The copies to one accelerator: ahead of the consumer, past the host, in memory that is neither lost nor reused early.

    begin(host batch) -> Transit     targets are allocated, the copy stream is given the copies
    finish(transit)   -> batch       ready on the caller's current stream

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

Nothing blocks the host, but for one thing: with `HOST_AHEAD` copies not done yet it waits for the oldest, because the
memory that they are made from is held. The device has that many steps to do then.

A lane belongs to a loader and lives as long as it; so does its stream (a new one per epoch strands the memory that
torch caches for each). Any thread may call it.

What can go wrong: no memory on the device: torch's error, and nothing has been given to the copy stream. A batch that
was begun and never finished (``break``) is kept until its copy has passed.

Source of the idea: the copy streams of NVIDIA's and TorchRec's prefetchers; allocating on the consumer's stream is
the pattern that PyTorch's notes on CUDA semantics recommend for work on side streams.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sharded_loader.data.structure import map_leaves
from sharded_loader.devices.streams import Streams
from sharded_loader.interrupts import uninterrupted

HOST_AHEAD = 16
"""Copies to one device that may be under way. Some three are while the host keeps step; a host that is 16 steps ahead
gains nothing by more, and each holds a batch of host memory."""


class Transit:
    """A batch on its way to a device.

    Attributes:
        batch: of tensors on the device, to be handed out by `Lane.finish` only.
    """

    finished = False
    event: Any = None

    def __init__(self, lane: Lane, batch: Any, targets: list[torch.Tensor], home: Any, event: Any) -> None:
        self.batch = batch
        self.targets = targets
        self.home = home
        self._kept = lane.kept
        self.event = event

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Anywhere, also inside the collector: a deque's append and nothing else.
        if not self.finished and self.event is not None and not _is_finalizing():
            self._kept.append((self.event, self.targets))


class Lane:
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

    @property
    def device(self) -> torch.device:
        """Where the copies go."""
        return self._streams.device

    def begin(self, host: Any) -> Transit:
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
            moved: list[Any] = []

            def place(leaf: Any) -> Any:
                if not _is_plain(leaf):
                    return self._move(leaf, moved)
                target = streams.empty_like(leaf)
                sources.append(self._source(leaf, target))
                targets.append(target)
                return target

            try:
                batch = map_leaves(place, host)
            finally:
                if moved:
                    self.kept.append((streams.record(home), moved))
            if not targets:
                return Transit(self, batch, targets, home, None)
            # After the targets were allocated: their memory may be that of a batch which was dropped a moment ago.
            streams.wait(self._stream, streams.record(home))
            try:
                with streams.on(self._stream):
                    for target, source in zip(targets, sources, strict=True):
                        streams.copy(target, source)
                event = streams.record(self._stream)
                self.kept.append((event, sources))
                return Transit(self, batch, targets, home, event)
            except BaseException:
                self.kept.append((streams.record(self._stream), (sources, targets)))
                raise

    def finish(self, transit: Transit) -> Any:
        """The batch, ready on the current stream of this thread."""
        if transit.event is not None:
            streams = self._streams
            current = streams.caller_stream()
            streams.wait(current, transit.event)
            if current != transit.home:
                for target in transit.targets:
                    streams.used_on(target, current)
        transit.finished = True
        return transit.batch

    def drain(self) -> None:
        """Wait until all copies are done."""
        with self._lock:  # or another thread's `begin` would take out what is waited for, and this its next
            while self.kept:
                event, _ = self.kept[0]
                self._streams.block(event)
                self.kept.popleft()

    def make_room(self) -> None:
        """Give back what memory can be given back, at the cost of waiting for the copies."""
        with self._lock:
            self.drain()
            self._streams.empty_cache()

    def _let_go(self) -> None:
        kept, streams = self.kept, self._streams
        if len(kept) >= HOST_AHEAD:
            streams.block(kept[0][0])
        while kept and streams.has_passed(kept[0][0]):
            kept.popleft()

    def _source(self, host: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory and in the layout of its target: anything else makes the host wait."""
        ready = host.stride() == target.stride() and not (host.is_conj() or host.is_neg())
        return host if ready and self._streams.is_pinned(host) else self._streams.pin(host, target.stride())

    def _move(self, leaf: Any, moved: list[Any]) -> Any:
        """Let an object move itself, on the caller's own stream: its tensors cannot be told one by one."""
        move = getattr(leaf, "to", None)
        if not callable(move) or isinstance(leaf, type):
            return leaf
        if getattr(leaf, "device", None) == self.device:
            return leaf
        pin = None if isinstance(leaf, torch.Tensor) else getattr(leaf, "pin_memory", None)
        pinned = pin() if callable(pin) else leaf
        moved.append(pinned)
        try:
            return pinned.to(self.device, non_blocking=True)
        except TypeError:
            return pinned.to(self.device)


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is a tensor in host memory whose values are all there is to it."""
    return (
        type(leaf) is torch.Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not (leaf.is_quantized or leaf.is_nested or leaf.requires_grad)
    )
