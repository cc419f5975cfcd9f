"""A consumer that uses batches in every way that is allowed, and compares: the same on a GPU and on a simulated one.

    stress(target, loader, steps, seed)  batches -> used at once, late, on a side stream, or not at all

The data says where it comes from (`rows`): row i of the first column is i * width + 0, 1, 2 ..., and the second column
is i. So a target compares a batch with nothing but the indices that it should have, in work that it gives to a stream;
the host looks at the result once, at the end.
"""

import random
from typing import Any

import numpy as np

from sharded_loader import ArrayDataset, ShardedDataLoader


def rows(count: int, width: int) -> ArrayDataset:
    """The data: int32[count, width] and int64[count]."""
    return ArrayDataset(np.arange(count * width, dtype=np.int32).reshape(count, width), np.arange(count))


def order_of(loader: ShardedDataLoader, epoch: int) -> list[int]:
    """The samples of an epoch, in their order, by a loader of the row numbers."""
    twin = ShardedDataLoader(range(len(loader.dataset)), loader.batch_size, shuffle=True, seed=loader.seed)
    twin.set_epoch(epoch)
    return [index for batch in twin for index in batch.tolist()]


def stress(target: Any, loader: ShardedDataLoader, steps: int, seed: int) -> tuple[int, int]:
    """Use ``steps`` batches of a shuffled loader of `rows`; batches compared, and values that differed.

    The target is a device and how to give it work. Only ``wrong`` may wait for it: ``begin_epoch(indices)``,
    ``compare(batch, first)`` in the current stream, ``beside(batch)`` makes a side stream current,
    ``delay(rng, loader)`` keeps streams busy, ``poison(shapes)`` writes over what the current one may have.
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
            if len(held) > 4:
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
