"""Loaders of all ranks, and what they read in each step."""

from collections.abc import Callable
from typing import Any

from sharded_loader import ShardedDataLoader


def ranks_of(replicas: int, make: Callable[..., ShardedDataLoader[Any]], state: Any = None) -> list[Any]:
    """The loader of each rank, all in the same place."""
    loaders = [make(num_replicas=replicas, rank=rank) for rank in range(replicas)]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state)
    return loaders


def steps_of(loaders: list[Any]) -> list[list[list[int]]]:
    """The batches of each rank, by steps. All ranks have as many."""
    return [[batch.tolist() for batch in step] for step in zip(*loaders, strict=True)]


def after_steps(loaders: list[Any], count: int) -> tuple[list[list[list[int]]], Any, list[list[list[int]]]]:
    """The first steps of an epoch, the state behind them, and the other steps."""
    iterators = list(map(iter, loaders))
    first = [[next(one).tolist() for one in iterators] for _ in range(count)]
    return first, loaders[-1].state_dict(), steps_of(iterators)
