"""The seam: what you build on to give the loader something of your own, and what its own satellites build on.

    Sampler, WrapperSampler, Table       an order of your own: give an object as ``sampler=`` or ``batch_sampler=``
    Pool, WorkerPool                     readers of your own: give an object as ``pool=``
      Job, Task, Result, PoolBroken        what the pool is given, and what it gives back
      SupervisedPool, Transport, Worker    a pool whose workers may die, over a way to reach them
      reader_for, TaskReader               what reads one task, here or in a worker
    Order, Epoch, Position               batches that no sampler can yield
      Pipeline, Run, Entry, Split          what has them read, in order
    Observer, BatchTimes                 what is told of each batch
    Dataset, Wrapper, Cache              datasets around others; what ``dataset.cache()`` makes
    provide                              has the loader use your class by its name

Each of these keeps its name, and says in its docstring what it is called with and when. Everything else of the core may
change without notice. The names are looked up when they are used: a worker process imports what it needs.

Example:
    >>> class OddsFirst(Sampler[int]):
    ...     def __init__(self, length): self._length = length
    ...     def len_epoch(self, epoch): return self._length
    ...     def iter_epoch(self, epoch, start=0):
    ...         return iter([*range(1, self._length, 2), *range(0, self._length, 2)][start:])
    >>> from sharded_loader import ShardedDataLoader
    >>> [batch.tolist() for batch in ShardedDataLoader(range(6), 3, sampler=OddsFirst(6))]
    [[1, 3, 5], [0, 2, 4]]
"""

from __future__ import annotations

import importlib
from typing import Any

HOMES = {
    "base.imports": "provide",
    "data.datasets": "Cache Dataset Wrapper",
    "engine.messages": "BatchTimes Job Result Task",
    "engine.order": "Epoch Order Position",
    "engine.pipeline": "Entry Pipeline Run",
    "engine.pool": "Pool PoolBroken WorkerPool",
    "engine.split": "Split",
    "loader.observer": "Observer",
    "pools.supervised": "SupervisedPool Transport Worker",
    "pools.task_reader": "TaskReader reader_for",
    "sampling.base": "Sampler WrapperSampler",
    "sampling.tables": "Table",
}
"""The names of each module; `extend.pyi` has the same names for type checkers."""

_HOME_OF = {name: f"sharded_loader.{home}" for home, names in HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'sharded_loader.extend' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
