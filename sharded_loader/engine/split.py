"""Which samples of a batch go to which shard: pure functions, and `Split`, which applies them to tasks.

    shard_sizes(7, 2)                                    -> [4, 3]                evenly
    shard_sizes(7, 2, weights=[2, 1])                    -> [5, 2]                by weight
    split_batch([9, 4, 7], 2)                            -> [[9, 4], [7]]         in order
    split_batch([0, 1, 2], 2, costs=[5, 9, 3])           -> [[1], [0, 2]]         by cost
    Split(2).sharded(task)                               -> the task, with two shards

In: one flat batch of indices. Out: a list of shards, lists of indices, none of them empty. Shard i belongs to device i
and to weight i. So only shards at the end may be missing: a batch with fewer samples than shards fills the first ones.

What can go wrong: weights that are no weights, costs that do not cover an index; both are ValueErrors that
say which.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.data.datasets import apportioned
from sharded_loader.engine.messages import PartIndices, RowIndices, Task
from sharded_loader.randomness.rng import RepeatedIndex


@dataclass
class Split:
    """How batches become shards. Read for each batch, so a change holds from the next one.

    Attributes:
        num_shards: into how many shards flat batches are split; None: not at all.
        max_shards: how many a batch may have, the number of devices; None: any number.
        weights: shares of the shards; None: equal ones.
        costs: what each sample costs; None: all the same.
    """

    num_shards: int | None = None
    max_shards: int | None = None
    weights: list[float] | None = None
    costs: Any = None

    def sharded(self, task: Task) -> Task:
        """The task with shards, by the weights of this moment. One that has shards already stays as it is."""
        if task.sharded or self.num_shards is None:
            return task
        indices, shards = task.shards[0], list[Any]()
        if type(indices) is PartIndices:
            shards += indices.cut(shard_sizes(len(indices), self.num_shards, self.weights))
        else:
            shards += split_batch(indices, self.num_shards, self.weights, self.costs)
        if not shards:
            raise ValueError("the batch is empty: the batch sampler must yield at least one index")
        return replace(task, shards=tuple(shards), sharded=True)


def plain_index(item: Any) -> Any:
    """A NumPy or tensor integer as an int; anything else (a key of the user's) as it is."""
    if isinstance(item, RepeatedIndex):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


def are_plain(items: Iterable[object]) -> bool:
    """Whether all items are ints of Python's. The index of a copy is one of them."""
    kinds = set(map(type, items))
    return kinds == {int} or all(kind is int or issubclass(kind, RepeatedIndex) for kind in kinds)


def plain_indices(indices: Any) -> list[Any]:
    """A new list of plain Python indices (NumPy and torch integers pickle at a hundred times the cost).

    New, because a batch sampler may fill its own list again for the next batch while this one waits to be read.
    """
    if hasattr(indices, "tolist"):
        found = indices.tolist()
        return found if isinstance(found, list) else [found]
    if are_plain(indices):
        return indices if isinstance(indices, RowIndices) else list(indices)
    return [plain_index(index) for index in indices]


def check_shares(weights: Any, num_shards: int) -> list[float]:
    """Weights of shards that belong to devices. Weights of 0 come last, so that shard i can be on device i.

    Raises:
        ValueError: if there are not ``num_shards`` of them, one is negative or not finite, all are zero, or a weight of
            0 stands before a positive one.

    Example:
        >>> check_shares([2, 1, 0], 3)
        [2, 1, 0]
    """
    try:
        numbers = [weight if isinstance(weight, int | float) else float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise ValueError(f"weights must be numbers, one per shard, got {weights!r}") from None
    if len(numbers) != num_shards:
        raise ValueError(f"there are {len(numbers)} weights for {num_shards} shards: give one weight per shard")
    for shard, weight in enumerate(numbers):
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(
                f"the weight of shard {shard} is {weight}: weights are finite and at least 0, like [2, 1] for a "
                "device that is twice as fast as the other"
            )
    positive = [shard for shard, weight in enumerate(numbers) if weight]
    if not positive:
        raise ValueError(f"all {num_shards} weights are zero, so no shard could get a sample: make one positive")
    if 0 in numbers[: positive[-1]]:
        order = [*positive, *(shard for shard, weight in enumerate(numbers) if not weight)]
        raise ValueError(
            f"the shard weights are {numbers}, and weight {numbers.index(0)} is 0. An empty shard is left out, so the "
            f"shards after it would be on other devices. Weights of 0 must come last: give the weights "
            f"{[numbers[shard] for shard in order]} and list the devices in the order {order}"
        )
    return numbers


def shard_sizes(n: int, num_shards: int, weights: Sequence[float] | None = None) -> list[int]:
    """The number of samples that each shard gets of ``n``.

    Args:
        n: number of samples.
        num_shards: number of shards.
        weights: one number per shard, those of 0 last; None for even shares.

    Returns:
        ``num_shards`` sizes that sum to ``n``.

        Even: sizes differ by one at most, and the first ones are larger.

        By weight: each exact share is rounded down. The samples that remain go to the largest remainders (to the
        first of equal ones). Then each shard with a positive weight that has no sample gets one. It comes from the
        shard that is furthest above its exact share and has at least two samples (the first of equal ones).

        With fewer samples than positive weights, the first shards with a positive weight get one sample each. Shard i
        then still belongs to device i.

    Raises:
        TypeError, ValueError: for ``num_shards`` below 1 and for bad weights.

    Example:
        >>> shard_sizes(10, 4), shard_sizes(10, 2, weights=[0.7, 0.3])
        ([3, 3, 2, 2], [7, 3])

        The exact shares of 4 samples by ``[1, 9]`` are 0.4 and 3.6, which would be rounded to 0 and 4:

        >>> shard_sizes(4, 2, weights=[1, 9])
        [1, 3]

        Two samples cannot fill three shards, so the last shard gets none, although it has the largest weight:

        >>> shard_sizes(2, 3, weights=[1, 1, 8])
        [1, 1, 0]

    Source of the idea: Hamilton's method of apportionment, with a minimum of one.
    """
    check_int("num_shards", num_shards, 1, "give how many shards a batch is split into")
    if weights is None:
        size, larger = divmod(n, num_shards)
        return [size + (shard < larger) for shard in range(num_shards)]
    return list(_apportion(n, tuple(check_shares(weights, num_shards))))


# Exact fractions take 30 us for 8 shards; a loader asks for the same one or two splits for ever.
@lru_cache(maxsize=256)
def _apportion(n: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    positive = [shard for shard, weight in enumerate(weights) if weight]
    if n < len(positive):
        return tuple(int(shard in positive[:n]) for shard in range(len(weights)))
    # 0.7 means seven tenths, not the nearest binary fraction: str() gives the decimal that was meant.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [n * weight / sum(exact) for weight in exact]
    sizes = apportioned(n, shares)
    # Without a sample of its own a light shard would be left out, and the shards after it would change devices.
    for light in positive:
        if not sizes[light]:
            giver = max((s for s in positive if sizes[s] > 1), key=lambda shard: sizes[shard] - shares[shard])
            sizes[light], sizes[giver] = 1, sizes[giver] - 1
    return tuple(sizes)


def split_batch(
    indices: Sequence[object], num_shards: int, weights: Sequence[float] | None = None, costs: object = None
) -> list[list[Any]]:
    """Split one flat batch into shards, none of them empty.

    Args:
        indices: the batch: a list, tuple or 1-D array. If it is `RowIndices`, its rows are split, without costs.
        num_shards: most shards to make.
        weights: one number per shard, those of 0 last; None for even shares. See `shard_sizes`.
        costs: ``costs[index]`` is what the sample costs (its length, say; at least 0). The most expensive
            sample goes first, each to the shard that is cheapest so far, relative to its weight.

    Returns:
        Up to ``num_shards`` lists of Python ints, each in the order of the batch. List i belongs to device i: every
        shard with a positive weight has a sample, or with fewer samples than such shards, the first ones have one.

    Raises:
        ValueError: for bad weights, and for an index without a usable cost.

    Example:
        >>> split_batch([3, 1, 4, 1, 5], 2)
        [[3, 1, 4], [1, 5]]
        >>> split_batch([3, 1, 4, 1, 5], 2, weights=[1, 99])
        [[3], [1, 4, 1, 5]]

    Source of the idea: longest processing time first (Graham, 1969): the most expensive shard costs at most
    4/3 - 1/(3 * num_shards) of the best possible.
    """
    if isinstance(indices, RowIndices):
        if costs is not None:
            raise ValueError("rows of documents cannot be split by costs: leave out costs, because rows are full")
        return [*indices.cut(shard_sizes(indices.rows, num_shards, weights))]
    batch = indices.tolist() if isinstance(indices, np.ndarray) else [plain_index(index) for index in indices]
    if costs is not None:
        return _split_by_cost(batch, num_shards, weights, costs)
    shards = []
    begin = 0
    for size in shard_sizes(len(batch), num_shards, weights):
        if size:
            shards.append(batch[begin : begin + size])
            begin += size
    return shards


def _split_by_cost(
    batch: list[Any], num_shards: int, weights: Sequence[float] | None, costs: object
) -> list[list[Any]]:
    check_int("num_shards", num_shards, 1, "give how many shards a batch is split into")
    shares = [1.0] * num_shards if weights is None else check_shares(weights, num_shards)
    prices = [_cost(costs, index) for index in batch]
    # Cheapest first: (load / weight, samples, shard).
    cheapest = [(0.0, 0, shard) for shard in range(num_shards) if shares[shard]]
    loads = [0.0] * num_shards
    members: list[list[int]] = [[] for _ in range(num_shards)]
    for place in sorted(range(len(batch)), key=lambda place: -prices[place]):
        _, samples, shard = cheapest[0]
        members[shard].append(place)
        loads[shard] += prices[place]
        heapq.heapreplace(cheapest, (loads[shard] / shares[shard], samples + 1, shard))
    return [[batch[place] for place in sorted(places)] for places in members if places]


def _cost(costs: Any, index: Any) -> float:
    try:
        if isinstance(index, int) and index < 0:
            raise IndexError
        cost = float(costs[index])
    except (IndexError, KeyError):
        size = f"{len(costs)} costs" if hasattr(costs, "__len__") else "costs"
        raise ValueError(
            f"sample {index} has no cost, there are {size}: give one number per sample of the dataset"
        ) from None
    if not math.isfinite(cost) or cost < 0:
        raise ValueError(f"the cost of sample {index} is {cost}: costs are finite and at least 0")
    return cost


def is_sharded(batch: Any) -> bool:
    """Whether a batch sampler's item is a list of shards rather than one flat batch of indices.

    Sharded: a list or tuple of lists, tuples, ranges or arrays; an array or tensor of two dimensions. Flat:
    integers, NumPy's too, zero-dimensional arrays and tensors, other keys; an empty list; a 1-D array or tensor.

    Example:
        >>> is_sharded([[3, 9], [5]]), is_sharded([3, 9, 5]), is_sharded([np.arange(2), np.arange(3)])
        (True, False, True)
    """
    dimensions = getattr(batch, "ndim", None)
    if isinstance(dimensions, int) and (dimensions != 1 or getattr(batch, "dtype", None) != np.object_):
        return dimensions > 1
    try:
        first = next(iter(batch), None)
    except TypeError:
        return False
    if isinstance(first, list | tuple | range):
        return True
    dimensions = getattr(first, "ndim", None)
    return isinstance(dimensions, int) and dimensions > 0
