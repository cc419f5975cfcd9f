"""From a batch as a worker made it to tensors where the user wants them.

    batch of NumPy arrays and tensors  --begin, finish-->  tensors in host memory, or on a device
    list of such (shards)              --begin, finish-->  shards[i] on devices[i]

Towards an accelerator a tensor is pinned first, in memory that torch's own pinned allocator owns, and then
copied without blocking the host: torch keeps that memory until the copy has passed.

Anything that is no array, tensor or structure of them stays as it is, except that an object with a ``to``
method (a ``PackedSequence``, a tokenizer's encoding) is asked to move itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from sharded_loader.data.structure import map_leaves, to_torch


def accelerators() -> list[torch.device]:
    """The accelerators that this process can see."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    if accelerator is not None and accelerator.is_available():
        kind = accelerator.current_accelerator().type
        return [torch.device(kind, i) for i in range(accelerator.device_count())]
    if torch.backends.mps.is_available():
        return [torch.device("mps", 0)]
    return []


def find_device(name: Any) -> torch.device:
    """The device that ``name`` means: a string, an index of an accelerator, or a `torch.device`.

    Raises:
        ValueError: there is no such device; the message lists those that there are.
        TypeError: ``name`` is none of these.
    """
    present = [torch.device("cpu"), *accelerators()]
    listed = ", ".join(map(str, present))
    if isinstance(name, bool) or not isinstance(name, (str, int, torch.device)):
        raise TypeError(f"device {name!r} is a {type(name).__name__}; give a name, an index or a torch.device")
    if isinstance(name, int):
        if not 0 <= name < len(present) - 1:
            raise ValueError(f"there is no accelerator {name}; this process sees: {listed}")
        return present[1 + name]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown; this process sees: {listed}") from None
    # The meta device holds no data: only who makes the object himself can mean it (as a stand-in, in tests).
    if device.type == "cpu" or name == torch.device("meta"):
        return device
    same_kind = [one for one in present if one.type == device.type]
    if not same_kind or (device.index is not None and device.index >= len(same_kind)):
        raise ValueError(f"device {str(device)!r} is not there; this process sees: {listed}")
    return device


def find_devices(device: Any, devices: Any) -> tuple[list[torch.device] | None, bool]:
    """The devices that the loader's arguments ask for.

    Returns:
        The devices, or None for host memory; and whether batches are lists of shards.

    Raises:
        ValueError, TypeError: both are given, an int alone, an empty list, or an unknown device.
    """
    if device is not None and devices is not None:
        raise ValueError("give device (plain batches on it) or devices (a list: one shard for each), not both")
    for name, value in (("device", device), ("devices", devices)):
        if isinstance(value, int):
            raise ValueError(
                f"{name}={value!r}: an int alone could be an index or a count; "
                f'say device="cuda:{value}" for one device, devices=[0, 1] for several, devices="auto" for all'
            )
    if device is not None:
        return [find_device(device)], False
    if devices is None:
        return None, False
    if devices == "auto":
        return accelerators() or [torch.device("cpu")], True
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise TypeError(
            f'devices is {devices!r}; give a list such as ["cuda:0", "cuda:1"], or "auto"; device= takes one'
        )
    if not devices:
        raise ValueError('devices is empty; name at least one, or give "auto"')
    return [find_device(one) for one in devices], True


class Placement:
    """Puts batches where they belong.

    Args:
        devices: of the shards, or of plain batches (the first); None: host memory.
        pin_memory: without devices, put batches into pinned host memory.
    """

    def __init__(self, devices: list[torch.device] | None, pin_memory: bool) -> None:
        self.devices = devices
        self._pin = pin_memory and devices is None
        if pin_memory and not accelerators():
            warnings.warn("pin_memory=True has no effect: this process sees no accelerator to copy to", stacklevel=3)
            self._pin = False

    def begin(self, batch: Any, sharded: bool) -> Any:
        """Start to put ``batch`` where it belongs. Copies to an accelerator may still be under way after this.

        Args:
            batch: what a worker made.
            sharded: whether it is a list of shards.

        Returns:
            What `finish` makes the user's batch of.
        """
        devices = self.devices
        if devices is None:
            host = to_torch(batch)
            return map_leaves(_pin, host) if self._pin else host
        if not sharded:
            return self._move(batch, devices[0])
        return [self._move(shard, device) for shard, device in zip(batch, devices, strict=False)]

    def finish(self, begun: Any) -> Any:
        """The batch, ready on the current stream of this thread (here copies run on that stream anyway)."""
        return begun

    @staticmethod
    def _move(batch: Any, device: torch.device) -> Any:
        host = to_torch(batch)
        if device.type == "cpu":
            return host
        return map_leaves(lambda leaf: _to_device(leaf, device), host)


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf


def _to_device(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        pinned = leaf.pin_memory() if device.type == "cuda" and leaf.device.type == "cpu" else leaf
        return pinned.to(device, non_blocking=True)
    return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf
