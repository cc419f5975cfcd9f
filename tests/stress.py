"""A consumer that uses batches in every way that is allowed, and compares: the same on a GPU and on a simulated one.

    stress(target, loader, steps, seed)  batches -> used at once, late, on a side stream, or not at all

The data says where it comes from (`rows`): row i of the first column is i * width + 0, 1, 2 ..., and the second column
is i. So a target compares a batch with nothing but the indices that it should have, in work that it gives to a stream;
the host looks at the result once, at the end.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from sharded_loader import ArrayDataset, ShardedDataLoader

HELD = 4
"""Batches that are held back at most."""


class Target(Protocol):
    """A device and how to give it work. Nothing here may wait for it but `wrong`."""

    def begin_epoch(self, indices: list[int]) -> None:
        """These samples are going to come, in this order."""

    def compare(self, batch: Any, first: int) -> None:
        """Let the current stream compare a batch with the samples from ``first`` on."""

    def beside(self, batch: Any) -> AbstractContextManager[Any]:
        """Make a side stream current, for a batch that came on another one."""

    def delay(self, rng: random.Random, loader: ShardedDataLoader) -> None:
        """Keep streams busy for a random time, the one of the copies too."""

    def poison(self, shapes: list[tuple[Any, Any]]) -> None:
        """Write over memory that the current stream may have, for tensors of these shapes and dtypes."""

    def wrong(self) -> tuple[int, int]:
        """How many batches were compared, and how many values differed, when all is done."""


def rows(count: int, width: int) -> ArrayDataset:
    """The data: int32[count, width] and int64[count]."""
    return ArrayDataset(np.arange(count * width, dtype=np.int32).reshape(count, width), np.arange(count))


def order_of(loader: ShardedDataLoader, epoch: int) -> list[int]:
    """The samples of an epoch, in their order, by a loader of the row numbers."""
    twin = ShardedDataLoader(range(len(loader.dataset)), loader.batch_size, shuffle=True, seed=loader.seed)
    twin.set_epoch(epoch)
    return [index for batch in twin for index in batch.tolist()]


def stress(target: Target, loader: ShardedDataLoader, steps: int, seed: int) -> tuple[int, int]:
    """Use ``steps`` batches of a shuffled loader of `rows`.

    Returns:
        Batches compared, and values that differed.
    """
    rng, size, done, epoch = random.Random(seed), loader.batch_size or 1, 0, 0
    while done < steps:
        loader.set_epoch(epoch)
        target.begin_epoch(order_of(loader, epoch))
        epoch += 1
        leave = rng.choice([None, None, len(loader) // 2])
        held: list[tuple[Any, int]] = []
        for number, batch in enumerate(loader):
            done += 1
            first = number * size
            use = rng.random()
            if use < 0.5:
                target.compare(batch, first)
            elif use < 0.7:
                held.append((batch, first))
            elif use < 0.9:
                with target.beside(batch):
                    target.compare(batch, first)
            shapes = [(field.shape, field.dtype) for field in batch]
            del batch  # in one case of ten nobody has looked at it
            if len(held) > HELD:
                target.compare(*held.pop(rng.randrange(len(held))))
            if rng.random() < 0.3:
                target.delay(rng, loader)
            if rng.random() < 0.5:
                target.poison(shapes)
            if number == leave or done >= steps:
                break
        while held:
            target.compare(*held.pop())
    return target.wrong()
