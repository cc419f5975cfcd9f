"""What a loader's arguments mean, and which are refused: pure functions, called by the constructor.

Each error says what was given, and what to write instead.
"""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharded_loader.data.columns import as_dataset, named_columns
from sharded_loader.data.default import Batchify
from sharded_loader.data.errors import some
from sharded_loader.execution.plan import Split
from sharded_loader.execution.pools.base import Pool
from sharded_loader.execution.pools.inline import InlinePool
from sharded_loader.execution.pools.process import ProcessPool
from sharded_loader.execution.pools.thread import ThreadPool
from sharded_loader.sampling.shards import check_shares

TORCH_SPELLING = {
    "collate_fn": "batchify_fn=",
    "drop_last": 'last_batch="discard" (or "keep", "rollover")',
    "prefetch_factor": "prefetch= (batches in flight in all, not per worker)",
    "generator": "seed= (an int)",
    "persistent_workers": "no argument for it: workers live as long as the loader",
    "worker_init_fn": "pool=ProcessPool(n, worker_init_fn=...) or ThreadPool(n, worker_init_fn=...)",
    "timeout": "pool=ProcessPool(n, timeout=...) or ThreadPool(n, timeout=...)",
    "multiprocessing_context": 'pool=ProcessPool(n, start_method="spawn")',
    "pin_memory_device": "device= or devices=",
    "in_order": "no argument for it: batches always come in order",
}
"""What torch's DataLoader calls it, and what to write here."""

GLUON_SPELLING = {
    "pin_device_id": "device= or devices=; pinning is the loader's affair",
    "try_nopython": "no argument for it",
}
"""Likewise of MXNet Gluon's."""


def length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def refuse_unknown(unknown: Mapping[str, Any], owner: Callable[..., Any]) -> None:
    for name in unknown:
        for whose, spelling in ("torch's", TORCH_SPELLING), ("Gluon's", GLUON_SPELLING):
            if name in spelling:
                raise TypeError(f"ShardedDataLoader has no argument {name!r}, which is {whose}; here: {spelling[name]}")
        known = inspect.signature(owner).parameters
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else "see help(ShardedDataLoader) for those it has"
        raise TypeError(f"ShardedDataLoader has no argument {name!r}; {hint}")


def check_dataset(dataset: Any, has_sampler: bool = False) -> Any:
    """The dataset, read by position (see `as_dataset`); refuses what has no samples by index.

    Args:
        dataset: what the user gave.
        has_sampler: whether the indices come from a sampler of the user's.
    """
    name = type(dataset).__name__
    if any(cls.__name__ in ("IterableDataset", "IterDataPipe") for cls in type(dataset).__mro__):
        raise TypeError(
            f"{name} is an IterableDataset, which has no indices to shuffle, shard or resume by: give a dataset "
            f"with __getitem__ and __len__ (or list(dataset), if it fits in memory)"
        )
    if isinstance(dataset, type):
        kind = dataset.__name__
        raise TypeError(f"the dataset is the class {kind} itself: give an object of it, {kind}(...)")
    if not hasattr(type(dataset), "__getitem__"):
        raise TypeError(f"a dataset needs __getitem__ and __len__; {name} has no __getitem__")
    if isinstance(dataset, Mapping) and not has_sampler and dataset and named_columns(dataset) is not None:
        raise TypeError(
            f"the dataset is a {name} with the keys {some(list(map(repr, dataset)))}, and the default order asks for "
            f"the keys 0 to {len(dataset) - 1}: give ArrayDataset(data) for a dict of columns, or sampler=list(data)"
        )
    return as_dataset(dataset, "ShardedDataLoader")


def check_batchify_fn(batchify_fn: Any) -> None:
    """Refuse what cannot make a batch of samples."""
    if batchify_fn is not None and not callable(batchify_fn):
        raise TypeError(f"batchify_fn is {batchify_fn!r}; it must be a function of a list of samples")
    if isinstance(batchify_fn, type) and issubclass(batchify_fn, Batchify):
        raise TypeError(f"batchify_fn is the class {batchify_fn.__name__}; give an object: {batchify_fn.__name__}()")


def check_on_error(on_error: Any) -> None:
    if not callable(on_error) and on_error not in ("raise", "skip", "replace"):
        raise ValueError(
            f'on_error is {on_error!r}; it must be "raise", "skip", "replace", or a callable (SampleError) -> sample'
        )


def make_split(devices: list[Any] | None, sharded: bool, num_shards: Any) -> Split:
    if num_shards is not None:
        if isinstance(num_shards, bool) or not hasattr(num_shards, "__index__"):
            raise TypeError(f"num_shards is {num_shards!r}; it must be an int")
        if num_shards < 1:
            raise ValueError(f"num_shards is {num_shards}; it must be at least 1")
        if devices is not None and not sharded:
            raise ValueError("num_shards makes lists of shards, device makes plain batches: use devices=[...]")
        if devices is not None and num_shards > len(devices):
            raise ValueError(f"num_shards is {num_shards}, but there are only {len(devices)} devices")
        return Split(int(num_shards), None if devices is None else len(devices))
    if devices is None:
        return Split()
    return Split(len(devices) if sharded else None, len(devices))


def make_pool(pool: Any, num_workers: Any, thread_pool: bool) -> Pool:
    if isinstance(num_workers, bool) or not hasattr(num_workers, "__index__"):
        raise TypeError(f"num_workers is {num_workers!r}; it must be an int, the number of workers")
    count = max(0, int(num_workers))
    if isinstance(pool, Pool):
        if count or thread_pool:
            raise ValueError(f"pool={pool!r} has its own workers: leave out num_workers and thread_pool")
        return pool
    if pool is None:
        pool = "inline" if count == 0 else "thread" if thread_pool else "process"
    elif thread_pool and pool != "thread":
        raise ValueError(f"pool={pool!r} and thread_pool=True contradict each other: leave out one of them")
    if pool == "inline":
        return InlinePool()
    if pool not in ("thread", "process"):
        raise ValueError(f'pool is {pool!r}; it must be "inline", "thread", "process", or a pool object')
    if count == 0:
        raise ValueError(f"pool={pool!r} needs workers: give num_workers=, at least 1")
    return ThreadPool(count) if pool == "thread" else ProcessPool(count)


_owned: weakref.WeakSet[Pool] = weakref.WeakSet()


def claim(pool: Pool) -> None:
    if pool in _owned:
        raise ValueError(f"{pool!r} belongs to another loader: make a pool for each")
    _owned.add(pool)


def check_prefetch(prefetch: Any, num_workers: int) -> int:
    """Batches in flight; None is twice the workers."""
    return check_count("prefetch", 2 * num_workers if prefetch is None else prefetch)


def check_count(name: str, count: Any) -> int:
    """A number of batches."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TypeError(f"{name} is {count!r}; it must be an int, the number of batches in flight")
    return max(0, int(count))


def check_shard_weights(weights: Sequence[float] | None, split: Split) -> list[float] | None:
    """Shares of the shards of ``split``; None: equal ones."""
    if weights is None:
        return None
    if split.num_shards is None:
        raise ValueError("shard_weights need shards: give devices=[...] or num_shards= as well")
    return check_shares(weights, split.num_shards)
