"""``pin_memory=True`` without a device: a thread copies batches into pinned memory.

    Pinner.begin(batch) -> PinnedCopy      a thread copies
    PinnedCopy.finish() -> batch           waits for the copy

As in torch's loader, the program copies to the device itself. The thread holds no loader, and no batch while it waits;
`Pinner.close` ends it. An object that cannot be pinned is its batch's error. If torch can pin no more memory, one
warning says so, and batches stay in pageable memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sharded_loader.extend.data import ATOMS, has_method, map_leaves
from sharded_loader.extend.engine import Background, Later, note_rejected, use_one_core


class PinnedCopy:
    """Batch being copied into pinned memory; no device has to be waited for."""

    event = None

    def __init__(self, copy: Later) -> None:
        self._copy = copy

    def drop(self) -> None:
        """Do nothing: the memory is freed with this object."""

    def finish(self) -> Any:
        """Return the batch in pinned memory, or raise the error of an object that cannot be pinned."""
        return self._copy.wait()


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

    Source of the idea: the pinning thread of PyTorch's DataLoader.
    """

    has_warned = False

    def __init__(self, kind: str, in_thread: bool = True, pin: Callable[[Any], object] = pinned) -> None:
        self._pin, self._kind = pin, kind
        self._background = Background("sharded_loader-pins") if in_thread else None

    def begin(self, batch: object) -> PinnedCopy:
        """Start the copy of a batch."""
        copy = functools.partial(self.pin, batch)
        if self._background is None:
            later = Later(copy)
            later.make()
            return PinnedCopy(later)
        module: Any = torch.get_device_module(self._kind)
        return PinnedCopy(self._background.submit(copy, functools.partial(_set_up, module, module.current_device())))

    def pin(self, batch: object) -> Any:
        """Return the batch in pinned memory, or unchanged if torch cannot pin any more."""
        try:
            return self._pin(batch)
        except RuntimeError as error:
            note_rejected(self, error)
            return batch

    def close(self) -> None:
        """End the thread; a later `begin` starts another one."""
        if self._background is not None:
            self._background.close()


def _set_up(module: Any, device: int) -> None:
    use_one_core()
    module.set_device(device)
