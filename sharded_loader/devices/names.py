"""Parsing of the ``device`` and ``devices`` arguments.

    device=, devices=  --find_devices-->  torch.device objects, or None for host memory
    a list, or "auto"  --device_list-->   torch.device objects, each with its index

Invalid arguments (both, an int alone, an empty list, an unknown device) raise ValueError or TypeError. The messages
list the devices that this process can see. Looking creates no context on any device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from sharded_loader.base.described import an
from sharded_loader.base.notices import warn
from sharded_loader.base.system import LOCAL_RANKS

DeviceLike = str | int | torch.device
"""A device: a name such as ``"cuda:1"``, the index of an accelerator, or a ``torch.device``."""


def accelerators() -> list[torch.device]:
    """Return the accelerators that this process can see."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    if accelerator is not None and accelerator.is_available():
        kind = accelerator.current_accelerator().type
        return [torch.device(kind, i) for i in range(accelerator.device_count())]
    return [torch.device("mps", 0)] if torch.backends.mps.is_available() else []


def find_device(name: object) -> torch.device:
    """Return the device for a name, an index of an accelerator or a `torch.device`."""
    present = [torch.device("cpu"), *accelerators()]
    device_names = ", ".join(map(str, present))
    if isinstance(name, bool) or not isinstance(name, (str, int, torch.device)):
        raise TypeError(f"device {name!r} is {an(type(name))}; give a name, an index or a torch.device")
    if isinstance(name, int):
        if not 0 <= name < len(present) - 1:
            raise ValueError(f"there is no accelerator {name}; this process sees: {device_names}")
        return present[1 + name]
    try:
        device = torch.device(name)
    except RuntimeError:
        hint = '; devices="auto" means all accelerators' if name == "auto" else ""
        raise ValueError(f"device {name!r} is unknown; this process sees: {device_names}{hint}") from None
    # The meta device holds no data, so it is accepted only as an object (a stand-in, in tests), not by name.
    if device.type == "cpu" or name == torch.device("meta"):
        return device
    same_kind = [other for other in present if other.type == device.type]
    if not same_kind or (device.index is not None and device.index >= len(same_kind)):
        raise ValueError(f"device {str(device)!r} does not exist; this process sees: {device_names}")
    return device


def find_devices(device: object, devices: object) -> tuple[list[torch.device] | None, bool]:
    """Return the devices for the loader's arguments (None for host memory), and True if batches are lists of shards."""
    if device is not None and devices is not None:
        raise ValueError("give device (plain batches on it) or devices (a list: one shard for each), not both")
    if device is not None:
        return [find_device(device)], False
    return (None, False) if devices is None else (_find_all(devices, "; device= takes one"), True)


def device_list(devices: object) -> list[torch.device]:
    """Return the devices of a list or ``"auto"``, each with its index, so that equal ones compare equal.

    Example:
        >>> device_list(["cpu", "cpu"])
        [device(type='cpu'), device(type='cpu')]
    """
    return [indexed(device) for device in _find_all(devices)]


def _find_all(devices: object, hint: str = "") -> list[torch.device]:
    if isinstance(devices, int):
        text = f"devices={devices!r}: an int alone could be an index or a count"
        raise ValueError(f'{text}; give a list such as [0, 1], or "auto" for all{hint}')
    if isinstance(devices, str) and devices == "auto":
        found = accelerators() or [torch.device("cpu")]
        if len(found) > 1 and (ranks := os.environ.get("LOCAL_WORLD_SIZE", "1")) != "1":
            warn(
                f'devices="auto" means all {len(found)} accelerators, and each of the {ranks} processes on this '
                f"machine (LOCAL_WORLD_SIZE) would use all of them: give device=local_rank for one each"
            )
        return found
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        text = f"devices is {str(devices)!r}, and must be a list"
        raise TypeError(f'{text}: give one such as ["cuda:0", "cuda:1"], or "auto" for all{hint}')
    if not devices:
        raise ValueError('devices is empty; name at least one, or give "auto"')
    return [find_device(one) for one in devices]


def warn_of_rank(name: torch.device, found: torch.device) -> None:
    """Warn if ``cuda`` without an index resolves to the first device in a process that is not the machine's first.

    Several processes would then silently share one GPU. There is no warning if the process sees only one.
    """
    if name.index is not None or found.index != 0 or name.type in ("cpu", "meta"):
        return
    count = sum(one.type == found.type for one in accelerators())
    rank, source = _local_rank()
    if rank and count > 1:
        own = rank % count
        warn(
            f'device="{name.type}" means {found}, the current device of this process, but {source}: several processes '
            f"would share {found}. Call torch.{name.type}.set_device({own}) before the first batch, or give "
            f'device="{name.type}:{own}". To use {found} on purpose, give device="{found}"'
        )


def _local_rank() -> tuple[int, str]:
    """Return the rank of this process on its machine and its source; 0 if unknown."""
    for variable in LOCAL_RANKS:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value), f"{variable} is {value}"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        return rank, f"this is rank {rank} of the process group"
    return 0, ""


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index (``cuda`` is the current one), so that equal ones compare equal.

    Example:
        >>> indexed(torch.device("cpu", 0))
        device(type='cpu')
    """
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None or device.type == "meta":
        return device
    module = torch.get_device_module(device)
    return torch.device(device.type, module.current_device()) if hasattr(module, "current_device") else device
