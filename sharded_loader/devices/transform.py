"""What a batch goes through on its device: the user's ``device_transform``, and the fields that stay on the host.

    hold_back(shard)             -> shard    its host fields are wrapped, so that nothing copies them to the device
    apply(shard, task, number)   -> batch    they are unwrapped, then ``fn(batch)`` or ``fn(batch, rng)``

`devices.placement` calls both. On a device with streams `apply` runs on the copy stream, ahead of the user's program.
The generator is keyed by the seed, the epoch, the batch's position in the epoch and the number of the shard. So the
numbers are the same in every pool, after a resume, and on the CPU.

What can go wrong: a batch has no such field, or the function raises. Both are the batch's error.

Source of the idea: FFCV and DALI, which normalise images and change their layout on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sharded_loader.base.described import an
from sharded_loader.base.errors import add_note, notes_of
from sharded_loader.batching.protocol import refuse_async, some
from sharded_loader.batching.tree import children, field_names, map_leaves, rebuild, to_torch
from sharded_loader.engine.messages import Task
from sharded_loader.randomness.rng import philox

RAISED = "raised by device_transform"
"""The note on an error of the user's function."""


class OnHost:
    """The value of a host field. A container that moves itself asks it to move, and it stays what it is.

    Attributes:
        value: of the field; or an object that moves itself, and then what it has become.
        has_moved: it was such an object.
    """

    has_moved = False

    def __init__(self, value: Any) -> None:
        self.value = value

    def to(self, *args: object, **named: object) -> OnHost:
        """Nothing is copied."""
        return self

    def pin_memory(self, *args: object) -> OnHost:
        """Nothing is pinned."""
        return self


class BatchTransform:
    """What each shard, or each plain batch, goes through on its device.

    Args:
        fn: ``fn(batch)`` or ``fn(batch, rng)``; None: nothing.
        takes_rng: which of both.
        host_fields: the fields that stay on the host: keys of a dict, fields of a dataclass or named tuple, numbers in
            a tuple or list.
        seed: the loader's seed now. A loaded state changes it, but not for the runs that have begun.

    Attributes:
        fn: as given.

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
        self._seed = functools.lru_cache(maxsize=64)(lambda run: seed())  # as it was at the run's first batch

    def hold_back(self, shard: object) -> Any:
        """The shard with its host fields wrapped. Their tensors get memory of their own, which is not pinned.

        Raises:
            TypeError: the batch has no such field.
        """
        if not self._host_fields:
            return shard
        names, parts = _names(shard), children(shard) or []
        if missing := self._host_fields.difference(names):
            raise TypeError(
                f"host_fields has {some(sorted(map(repr, missing)))}, and the batch is {an(type(shard))} "
                + (f"with the fields {some([*map(repr, names)])}" if names else "without fields")
            )
        return rebuild(
            shard,
            [
                OnHost(map_leaves(_copied, to_torch(part))) if name in self._host_fields else part
                for name, part in zip(names, parts, strict=True)
            ],
        )

    def apply(self, shard: object, task: Task, number: int) -> Any:
        """What the user's program gets.

        Args:
            shard: on its device, but for the host fields.
            task: what was read.
            number: of the shard; 0 for a plain batch.

        Raises:
            Exception: what the function raises.
        """
        if self._host_fields:
            shard = shown(shard)
        if self.fn is None:
            return shard
        try:
            with torch.no_grad():  # however the program calls ``next``; who calls this sees to the inference mode
                if self._takes_rng:
                    rng = philox(self._seed(task.run), "device transform", task.epoch, task.position, number)
                made = self.fn(shard, rng) if self._takes_rng else self.fn(shard)
            refuse_async([made], "device_transform")
            return made
        except Exception as error:
            if RAISED not in notes_of(error):
                add_note(error, RAISED)
            raise


def shown(shard: object) -> Any:
    """A shard with the values of its host fields in their places."""
    parts = children(shard) or []
    if OnHost not in map(type, parts):
        return shard
    return rebuild(shard, [part.value if type(part) is OnHost else part for part in parts])


def _names(shard: object) -> list[Any]:
    """The names of what `children` gives."""
    if isinstance(shard, Mapping):
        return list(shard.keys())
    if isinstance(shard, (list, tuple)):
        return list(getattr(shard, "_fields", range(len(shard))))
    return [] if children(shard) is None else field_names(shard)


def _copied(leaf: object) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
