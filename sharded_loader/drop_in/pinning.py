"""``pin_memory=True`` without a device: a thread copies batches into pinned memory.

    Pinner.begin(batch) -> PinnedCopy      a thread copies
    PinnedCopy.finish() -> batch           waits for the copy

As in torch's loader, the program copies to the device itself. The thread holds no loader, and no batch while it waits;
`Pinner.close` ends it. An object that cannot be pinned is its batch's error. If torch can pin no more memory, one
warning says so, and batches stay in pageable memory.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from sharded_loader.extend.data import ATOMS, has_method, map_leaves
from sharded_loader.extend.engine import note_rejected
from sharded_loader.extend.tools import uninterrupted

CLOSING_SECONDS = 10.0
"""Seconds that `Pinner.close` waits for an object whose own ``pin_memory`` does not return."""

POLL_SECONDS = 0.1
"""Poll interval in seconds while waiting for a copy: on Windows a Ctrl-C does not interrupt the wait for a lock."""


class PinnedCopy:
    """Batch being copied into pinned memory; no device has to be waited for."""

    event = None

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self._error: BaseException | None = None
        self._done = threading.Event()

    def make(self, pin: Callable[[Any], object]) -> bool:
        """Copy; return True on success."""
        try:
            self._batch = pin(self._batch)
        except BaseException as error:
            self._error = error
        self._done.set()
        return self._error is None

    def drop(self) -> None:
        """Do nothing: the memory is freed with this object."""

    def finish(self) -> Any:
        """Return the batch in pinned memory, or raise the error of an object that cannot be pinned."""
        while not self._done.wait(POLL_SECONDS):
            pass
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # otherwise error -> traceback -> this frame -> error, and the batch waits for the collector
        return self._batch


def pinned(batch: object) -> Any:
    """Return the batch with its tensors, and the objects that pin themselves, in pinned memory."""
    return map_leaves(_pin, batch, own="pin_memory", skip=ATOMS)


def _pin(leaf: Any) -> Any:
    # One copy, by torch, which guards only its own memory if the user copies from the batch and drops it at once.
    if not has_method(leaf, "pin_memory"):
        return leaf
    try:
        return leaf.pin_memory()
    except RuntimeError:
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            return leaf  # torch does not pin all layouts
        raise


class Pinner:
    """Copies batches into pinned memory, in order of arrival, in a thread.

    Args:
        kind: Type of accelerator, such as ``"cuda"``. The thread pins for the device that is current at the first
            batch; otherwise it would create a context on device 0.
        in_thread: False copies at once, in the thread that calls `begin`.
        pin: Function that returns a pinned copy of a batch.

    Example:
        >>> pinner = Pinner("cpu", in_thread=False, pin=lambda batch: [*batch, "pinned"])
        >>> pinner.begin(["batch"]).finish()
        ['batch', 'pinned']
        >>> pinner.close()

    Source of the idea: the pinning thread of PyTorch's DataLoader. The copy uses one core, because a copy on all cores
    would slow down the program.
    """

    has_warned = False

    def __init__(self, kind: str, in_thread: bool = True, pin: Callable[[Any], object] = pinned) -> None:
        self._pin, self._kind, self._in_thread = pin, kind, in_thread
        self._tasks: queue.SimpleQueue[PinnedCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: object) -> PinnedCopy:
        """Start the copy of a batch."""
        pending = PinnedCopy(batch)
        if not self._in_thread:
            pending.make(self.pin)
            return pending
        if self._thread is None:
            module: Any = torch.get_device_module(self._kind)
            set_device = functools.partial(module.set_device, module.current_device())
            with uninterrupted():
                self._thread = threading.Thread(
                    target=_pin_all, args=(self, self._tasks, set_device), name="sharded_loader-pins", daemon=True
                )
                self._thread.start()
        self._tasks.put(pending)
        return pending

    def pin(self, batch: object) -> Any:
        """Return the batch in pinned memory, or unchanged if torch cannot pin any more."""
        try:
            return self._pin(batch)
        except RuntimeError as error:
            note_rejected(self, error)
            return batch

    def close(self) -> None:
        """End the thread; a later `begin` starts another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if thread is not threading.current_thread():
                thread.join(CLOSING_SECONDS)


def _pin_all(pinner: Pinner, tasks: queue.SimpleQueue[PinnedCopy | None], set_device: Callable[[], object]) -> None:
    """Run the thread of a `Pinner`; an error before the first copy is a batch's error, too."""

    def first(batch: object) -> Any:
        import threadpoolctl

        torch.get_num_threads()  # initializes the number for this thread
        # Not `torch.set_num_threads`: it also affects threads that the program starts later.
        threadpoolctl.threadpool_limits(1, user_api="openmp")
        set_device()
        return pinner.pin(batch)

    pin: Callable[[Any], Any] = first
    while (pending := tasks.get()) is not None:
        if pending.make(pin):
            pin = pinner.pin
        del pending
