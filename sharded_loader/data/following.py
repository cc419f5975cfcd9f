"""Tells the datasets that want to know it which samples come, and asks them for retries, through any stack of wrappers.

    follow(dataset, batches, position, later) -> the ``follow`` of each dataset inside that has it, with its own indices

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

from sharded_loader.data.wrappers import Joined, Outer, View

Batches = Callable[[int], Any]
Position = Callable[[], "int | None"]


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
    own = getattr(dataset, "retries", None) if callable(getattr(dataset, "follow", None)) else None
    inside = dataset._inside if isinstance(dataset, Outer) else ()
    return own if isinstance(own, int) else sum(map(retries_of, inside))


def follow(dataset: Any, batches: Batches, position: Position, later: Batches) -> None:
    """Tell a dataset, and those inside it.

    Example:
        >>> from sharded_loader import SimpleDataset
        >>> class Told(SimpleDataset):
        ...     def follow(self, batches, position, later): print(batches(0).tolist(), position(), later(0).tolist())
        >>> follow(SimpleDataset(Told(range(9))).take(5), lambda number: [4, 0], lambda: 0, lambda number: [3])
        [4, 0] 0 [3]
    """
    own = getattr(dataset, "follow", None)
    if callable(own):
        own(batches, position, later)
    elif isinstance(dataset, Joined):
        for part in dataset._parts:
            if can_follow(part):
                inner = partial(_of_part, dataset, part)
                follow(part, partial(inner, batches), position, partial(inner, later))
    elif isinstance(dataset, View):
        inner = partial(_inner, dataset)
        follow(dataset._dataset, partial(inner, batches), position, partial(inner, later))
    elif isinstance(dataset, Outer):
        for one in dataset._inside:
            follow(one, batches, position, later)


def _inner(view: View, batches: Batches, number: int) -> Any:
    found = batches(number)
    return None if found is None else view._inner(found)


def _of_part(joined: Joined, part: Any, batches: Batches, number: int) -> Any:
    found = batches(number)
    if found is None:
        return None
    chunks = [inner for one, inner, _ in joined._chunks(found) if one is part]
    return np.concatenate([np.zeros(0, np.int64), *chunks])
