"""The user's ``device_transform``, and the fields that stay on the host.

    keep_on_host(shard)          -> shard    host fields are wrapped, so that they are not copied to the device
    apply(shard, task, number)   -> batch    host fields are unwrapped, then ``fn(batch)`` or ``fn(batch, rng)``

On a device with streams `apply` runs on the copy stream, ahead of the user's program. The generator is keyed by the
seed, the epoch, the batch's position in the epoch and the shard number. So its numbers are the same in every pool,
after a resume, and on the CPU. A missing field and an exception of the function are errors of the batch.

Source of the idea: FFCV and DALI, which normalise images and change their layout on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sharded_loader.base.described import an
from sharded_loader.base.errors import add_note, notes_of
from sharded_loader.batching.protocol import elide, refuse_async
from sharded_loader.batching.tree import children, field_names, map_leaves, rebuild, to_torch
from sharded_loader.devices.accelerator import NOTHING
from sharded_loader.engine.messages import Task
from sharded_loader.randomness.rng import philox

_AUTOCAST = ("cpu", "cuda", "xpu")
"""Kinds of devices that `torch.autocast` takes in every version."""

TRANSFORM_NOTE = "raised by device_transform"
"""Note on an exception of the user's function."""


class HostValue:
    """Wrapper of a host field, or of an object that moves itself. Containers call ``to`` on it, which does nothing.

    Attributes:
        value: the field; or an object that moves itself, and later its moved version.
        has_moved: the object has moved itself.
    """

    has_moved = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def to(self, *args: object, **named: object) -> HostValue:
        """Return self; nothing is copied."""
        return self

    def pin_memory(self, *args: object) -> HostValue:
        """Return self; nothing is pinned."""
        return self


class BatchTransform:
    """The function that each shard, or each plain batch, passes through on its device.

    Args:
        fn: ``fn(batch)`` or ``fn(batch, rng)``; None: identity.
        takes_rng: call ``fn(batch, rng)``.
        host_fields: fields that stay on the host: keys of a dict, fields of a dataclass or named tuple, positions in a
            tuple or list.
        seed: returns the loader's current seed. Loading a state changes it, but not for runs that have begun.

    Example:
        >>> transform = BatchTransform(lambda batch, rng: batch["x"] * rng.integers(2, 3), True, (), lambda: 0)
        >>> transform.apply({"x": torch.ones(2)}, Task(0, 0, 0, 0, ([0, 1],), False), 0)
        tensor([2., 2.])
    """

    def __init__(
        self,
        fn: Callable[..., object] | None,
        takes_rng: bool,
        host_fields: Sequence[str | int],
        seed: Callable[[], int],
    ) -> None:
        self.fn, self._takes_rng, self._host_fields = fn, takes_rng, frozenset(host_fields)
        self._seed = functools.lru_cache(maxsize=64)(lambda run: seed())  # fixed at the run's first batch

    def keep_on_host(self, shard: object) -> Any:
        """Wrap the host fields of a shard, with their tensors copied into memory that is not pinned.

        Raises:
            TypeError: the batch has no such field.
        """
        if not self._host_fields:
            return shard
        names, parts = _field_names(shard), [*(children(shard) or ())]
        if missing := self._host_fields.difference(names):
            what = f"with the fields {elide([*map(repr, names)])}" if names else "without fields"
            text = f"host_fields has {elide(sorted(map(repr, missing)))}, and the batch is {an(type(shard))}"
            raise TypeError(f"{text} {what}")
        for place in [names.index(name) for name in self._host_fields]:
            parts[place] = HostValue(map_leaves(_clone_tensor, to_torch(parts[place])))
        return rebuild(shard, parts)

    def apply(self, shard: object, task: Task, number: int, kind: str = "cpu") -> Any:
        """Return the batch that the user's program receives. ``number`` is that of the shard, 0 for a plain batch.

        ``kind`` is that of the device. Modes of the caller (no_grad, autocast) do not reach the function.
        """
        if self._host_fields:
            shard = unwrap_host_values(shard)
        if self.fn is None:
            return shard
        try:
            autocast = torch.autocast(kind, enabled=False) if kind in _AUTOCAST else NOTHING
            with torch.no_grad(), autocast:  # inference mode is left by the caller
                if self._takes_rng:
                    rng = philox(self._seed(task.run), "device transform", task.epoch, task.position, number)
                made = self.fn(shard, rng) if self._takes_rng else self.fn(shard)
            refuse_async([made], "device_transform")
            return made
        except Exception as error:
            if TRANSFORM_NOTE not in notes_of(error):
                add_note(error, TRANSFORM_NOTE)
            raise


def unwrap_host_values(shard: object) -> Any:
    """Return a shard with its host fields unwrapped."""
    parts = children(shard) or []
    if HostValue not in map(type, parts):
        return shard
    return rebuild(shard, [part.value if type(part) is HostValue else part for part in parts])


def _field_names(shard: object) -> list[Any]:
    """Return the field names that belong to `children`."""
    if isinstance(shard, Mapping):
        return list(shard.keys())
    if isinstance(shard, (list, tuple)):
        return list(getattr(shard, "_fields", range(len(shard))))
    return [] if children(shard) is None else field_names(shard)


def _clone_tensor(leaf: object) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
