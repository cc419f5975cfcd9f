"""What a loader and the datasets that read from servers say to each other, through any stack of wrappers.

    follow(dataset, batches, position, later) -> the ``follow`` of each dataset inside that has it, with its own indices
    retries_of(dataset)                       -> how many requests the datasets inside have tried again
    note_retry(), retries_here() -> int       the same for all of this process, whichever dataset asked

    batches(number) -> indices of a batch; None after the last one
    position() -> the number of the batch that the user receives next; None: nobody reads this epoch any more
    later(number) -> indices of a batch of the next epoch, counted from 0; None after the last one

`ShardDataset` fetches shards by it. All three functions are called by threads of the dataset, at any time in the epoch.
Nothing goes wrong here: a dataset without ``follow`` is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sharded_loader.data.datasets import ConcatDataset, Outer, View

Batches = Callable[[int], Any]
Position = Callable[[], "int | None"]


_retries: list[None] = []


def note_retry() -> None:
    """A request to a server is tried again (`storage.stores`). Any thread may call it.

    Example:
        >>> before = retries_here()
        >>> note_retry()
        >>> retries_here() - before
        1
    """
    _retries.append(None)  # no lock is needed, and none can be held by another thread when the process is forked


def retries_here() -> int:
    """How many there were since the process began, those of the process that it was forked from among them."""
    return len(_retries)


def can_follow(dataset: Any) -> bool:
    """Whether a dataset, or one inside it, wants to know which samples come.

    Example:
        >>> can_follow([1, 2])
        False
    """
    inside = dataset._inside if isinstance(dataset, Outer) else ()
    return callable(getattr(dataset, "follow", None)) or any(map(can_follow, inside))


def retries_of(dataset: Any) -> int:
    """How many requests a dataset, and those inside it, have had to try again in this process.

    Example:
        >>> retries_of([1, 2])
        0
    """
    counted = getattr(dataset, "retries", None) if callable(getattr(dataset, "follow", None)) else None
    inside = dataset._inside if isinstance(dataset, Outer) else ()
    return counted if isinstance(counted, int) else sum(map(retries_of, inside))


def follow(dataset: Any, batches: Batches, position: Position, later: Batches) -> None:
    """Tell a dataset, and those inside it.

    Example:
        >>> from sharded_loader import SimpleDataset
        >>> class Shards(SimpleDataset):
        ...     def follow(self, batches, position, later): print(batches(0).tolist(), position(), later(0).tolist())
        >>> follow(SimpleDataset(Shards(range(9))).take(5), lambda number: [4, 0], lambda: 0, lambda number: [3])
        [4, 0] 0 [3]
    """
    method = getattr(dataset, "follow", None)
    if callable(method):
        method(batches, position, later)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset._parts:
            if can_follow(part):
                inner = partial(_of_part, dataset, part)
                follow(part, partial(inner, batches), position, partial(inner, later))
    elif isinstance(dataset, View):
        inner = partial(_inner, dataset)
        follow(dataset._dataset, partial(inner, batches), position, partial(inner, later))
    elif isinstance(dataset, Outer):
        for inside in dataset._inside:
            follow(inside, batches, position, later)


def _inner(view: View, batches: Batches, number: int) -> Any:
    indices = batches(number)
    return None if indices is None else view._inner(indices)


def _of_part(joined: ConcatDataset, part: Any, batches: Batches, number: int) -> Any:
    indices = batches(number)
    if indices is None:
        return None
    chunks = [inner for owner, inner, _ in joined._chunks(indices) if owner is part]
    return np.concatenate([np.zeros(0, np.int64), *chunks])
