"""What the tests of iterable data share: every kind of it, and loaders with a part for each of `LENGTHS`."""

from __future__ import annotations

from typing import Any

from conftest import made, make_pool
from stream_samples import LENGTHS, GoOn, ItsOwnIterator, Own, Parts, Stateful, Told, WithStatefulRows, values

from sharded_loader import ShardedDataLoader

SIZE = 4
ASK_TORCH = (Own, Told, ItsOwnIterator, Stateful)
"""Datasets that ask torch which part they are to yield."""
WITHOUT_STATE = (Parts, GoOn, Own, Told, ItsOwnIterator)
WITH_STATE = (WithStatefulRows, Stateful)
KINDS = (*WITHOUT_STATE, *WITH_STATE)


def loader_of(dataset: Any, pool: Any = "inline", workers: int = 2, **options: Any) -> ShardedDataLoader:
    """A loader of batches of `SIZE` samples. ``pool`` is a pool or the name of one."""
    pool = make_pool(pool, workers) if isinstance(pool, str) else pool
    options = {"streams": len(LENGTHS), "seed": 5, **options}
    return made(dataset, options.pop("batch_size", SIZE), pool=pool, **options)


def epochs_of(dataset: Any, *given: Any, epochs: int = 1, **options: Any) -> list[list[Any]]:
    """The batches of the first epochs, as lists."""
    with loader_of(dataset, *given, **options) as loader:
        return [[values(batch) for batch in loader] for _ in range(epochs)]
