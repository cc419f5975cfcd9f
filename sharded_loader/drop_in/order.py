"""The order of `ShardedDataLoader` under torch's class: ranks, costs, evaluation, epochs of a number of steps.

    make_sharded(loader) -> ShardedDataLoader    reads in the loader's stead, with the same arguments

Owns nothing. What can go wrong: arguments that contradict each other, as there; and those that only torch's order has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.drop_in.iterator import make_pool
from sharded_loader.loader.arguments import INSTEAD
from sharded_loader.loader.loader import ShardedDataLoader

if TYPE_CHECKING:
    from sharded_loader.torch import DataLoader

NAMES = ("num_replicas", "rank", "mesh", "costs", "evaluate", "steps_per_epoch")
"""Arguments of `ShardedDataLoader` that torch's order cannot have."""

_KEPT = ("pin_memory", "drop_last", "device", "devices", "num_shards", "seed", "on_error", "streams")


def is_sharded(loader: DataLoader[Any]) -> bool:
    """Whether a loader was given one of `NAMES`."""
    return any(getattr(loader, name) is not None and getattr(loader, name) is not False for name in NAMES)


def need_sharded(inner: ShardedDataLoader[Any] | None, method: str) -> ShardedDataLoader[Any]:
    """What reads in a loader's stead; a TypeError where nothing does."""
    if inner is None:
        raise TypeError(f"{method} needs the order of ShardedDataLoader, and this is torch's: give num_replicas=1")
    return inner


def make_sharded(loader: DataLoader[Any]) -> ShardedDataLoader[Any]:
    """A `ShardedDataLoader` with the arguments of a drop-in.

    Raises:
        TypeError, ValueError: they contradict each other.
    """
    shuffle, sampler, batch_sampler = loader._given_order
    wrong = {"generator": loader.generator is not None, "in_order": not loader.in_order}
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ValueError(f"{name} goes with torch's order, and {' and '.join(NAMES)} with another: {INSTEAD[name]}")
    if batch_sampler is None and loader.batch_size is None:
        raise ValueError("batch_size=None gives single samples, and this order is one of batches: give a batch_size")
    options = {name: getattr(loader, name) for name in (*NAMES, *_KEPT)}
    return ShardedDataLoader(
        loader.dataset,
        batch_size=loader.batch_size if batch_sampler is None else None,
        shuffle=shuffle or False,
        sampler=sampler,
        batch_sampler=batch_sampler,
        collate_fn=batchify_fn_of(loader.collate_fn, batched=True),
        num_workers=0 if loader._tuner is None else "auto",
        pool=make_pool(loader),
        prefetch_factor=None if loader._scales_prefetch else loader.prefetch_factor,
        skip=loader._given_skip or None,
        **options,
    )
