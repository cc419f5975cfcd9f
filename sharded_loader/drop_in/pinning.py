"""``pin_memory=True``, without a device: batches are copied into pinned memory, by a thread.

    Pinner.begin(batch) -> PinnedCopy      a thread copies
    PinnedCopy.finish() -> batch           waits for it

As in torch's loader, the user's program copies to the device itself. The core asks for a `Pinner` by kind and name,
where it is given. The thread holds no batch while it waits, and no loader. It ends with `Pinner.close`.

What can go wrong: an object cannot be pinned, which is its batch's error. Where torch can pin no more, one warning says
so, and batches lie in plain memory.
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

LOOKS = 0.1
"""Seconds between two looks of who waits for a copy: on Windows a Ctrl-C does not end the wait for a lock."""


class PinnedCopy:
    """A batch that is being copied into pinned memory.

    Attributes:
        event: None: no device has to be waited for.
    """

    event = None

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self._error: BaseException | None = None
        self._done = threading.Event()

    def make(self, pin: Callable[[Any], object]) -> bool:
        """Copy; whether it has worked."""
        try:
            self._batch = pin(self._batch)
        except BaseException as error:
            self._error = error
        self._done.set()
        return self._error is None

    def drop(self) -> None:
        """Nothing is to be done: the memory goes with this object."""

    def finish(self) -> Any:
        """The batch in pinned memory.

        Raises:
            Exception: an object in it cannot be pinned.
        """
        while not self._done.wait(LOOKS):
            pass
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # otherwise error -> traceback -> this frame -> error, and the batch waits for the collector
        return self._batch


def pinned(batch: object) -> Any:
    """The batch with its tensors, and the objects that pin themselves, in pinned memory."""
    return map_leaves(_pin, batch, own="pin_memory", skip=ATOMS)


def _pin(leaf: Any) -> Any:
    # By torch, one copy. The user may copy from the batch and drop it at once: torch guards memory of its own only.
    if not has_method(leaf, "pin_memory"):
        return leaf
    try:
        return leaf.pin_memory()
    except RuntimeError:
        if isinstance(leaf, torch.Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            return leaf  # torch does not pin all layouts
        raise


class Pinner:
    """Copies batches into pinned memory, in the order in which they come, in a thread.

    Args:
        kind: the type of accelerator, such as ``"cuda"``. The thread pins for the device that is current at the first
            batch. By itself it would use device 0, and create a context there.
        in_thread: False: copies at once, in the thread that calls `begin`.
        pin: makes a pinned batch of a batch.

    Attributes:
        has_warned: a warning has said that torch cannot pin host memory.

    Example:
        >>> pinner = Pinner("cpu", in_thread=False, pin=lambda batch: [*batch, "pinned"])
        >>> pinner.begin(["batch"]).finish()
        ['batch', 'pinned']
        >>> pinner.close()

    Source of the idea: PyTorch's DataLoader, which has such a thread. The copy uses one core, because a copy on all
    cores would slow down the program.
    """

    has_warned = False

    def __init__(self, kind: str, in_thread: bool = True, pin: Callable[[Any], object] = pinned) -> None:
        self._pin, self._kind, self._in_thread = pin, kind, in_thread
        self._tasks: queue.SimpleQueue[PinnedCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: object) -> PinnedCopy:
        """Have a batch copied."""
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
        """The batch in pinned memory, or as it is where torch cannot pin any more."""
        try:
            return self._pin(batch)
        except RuntimeError as error:
            note_rejected(self, error)
            return batch

    def close(self) -> None:
        """End the thread. A later `begin` starts another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if thread is not threading.current_thread():
                thread.join(CLOSING_SECONDS)


def _pin_all(pinner: Pinner, tasks: queue.SimpleQueue[PinnedCopy | None], set_device: Callable[[], object]) -> None:
    """The thread of a `Pinner`. What goes wrong before the first copy is the error of a batch, too."""

    def first(batch: object) -> Any:
        import threadpoolctl

        torch.get_num_threads()  # which sets the number for this thread, if nothing has done so before
        # Not `torch.set_num_threads`: it counts for each thread that the program starts later, too.
        threadpoolctl.threadpool_limits(1, user_api="openmp")
        set_device()
        return pinner.pin(batch)

    pin: Callable[[Any], Any] = first
    while (pending := tasks.get()) is not None:
        if pending.make(pin):
            pin = pinner.pin
        del pending
