"""Division of a batch's samples among shards: pure functions, and `Split`, which applies them to tasks.

Shards are non-empty lists of indices, or arrays where the batch is one. Shard i belongs to device i and weight i, so a
batch with fewer samples than shards fills the first ones. Invalid weights, and costs that do not cover an index, are
ValueErrors.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.data.datasets import apportioned
from sharded_loader.engine.messages import Task, cut
from sharded_loader.randomness.rng import RepeatedIndex


@dataclass
class Split:
    """Rules by which batches become shards. Read for each batch, so a change applies from the next one on.

    Attributes:
        num_shards: number of shards of a flat batch; None: not split.
        max_shards: maximum for a batch, the number of devices; None: no limit.
        weights, costs: relative sizes of the shards, and cost of each sample; None: equal.
    """

    num_shards: int | None = None
    max_shards: int | None = None
    weights: list[float] | None = None
    costs: Any = None

    def sharded(self, task: Task) -> Task:
        """Return the task with shards, by the current weights. A task with shards is returned unchanged."""
        if task.sharded or self.num_shards is None:
            return task
        indices = task.shards[0]
        if type(indices) is np.ndarray and self.costs is None:  # parts of the same memory
            shards = cut(indices, shard_sizes(len(indices), self.num_shards, self.weights))
        else:
            shards = split_batch(indices, self.num_shards, self.weights, self.costs)
        if not shards:
            raise ValueError("the batch is empty: the batch sampler must yield at least one index")
        return replace(task, shards=tuple(shards), sharded=True)


def plain_index(item: Any) -> Any:
    """Convert a NumPy or tensor integer to an int; leave anything else (a key of the user's) unchanged."""
    if isinstance(item, RepeatedIndex):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


def are_plain(items: Iterable[object]) -> bool:
    """Return True if all items are Python ints, or `RepeatedIndex`."""
    kinds = set(map(type, items))
    return kinds == {int} or all(kind is int or issubclass(kind, RepeatedIndex) for kind in kinds)


def plain_indices(indices: Any) -> list[Any]:
    """Return a new list of plain Python indices (NumPy and torch integers pickle at a hundred times the cost).

    New, because a batch sampler may refill its own list while this batch waits to be read.
    """
    if hasattr(indices, "tolist"):
        plain = indices.tolist()
        return plain if isinstance(plain, list) else [plain]
    if are_plain(indices):
        return indices if hasattr(indices, "cut") else list(indices)
    return [plain_index(index) for index in indices]


def check_shares(weights: Any, num_shards: int) -> list[float]:
    """Return the weights of shards, checked. Weights of 0 come last, so that shard i can be on device i.

    Raises:
        ValueError: wrong number of weights, one negative or not finite, all zero, or a 0 before a positive one.

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
            text = f"the weight of shard {shard} is {weight}: weights are finite and at least 0"
            raise ValueError(f"{text}, like [2, 1] for a device that is twice as fast as the other")
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
    """Return the number of samples of each shard, ``num_shards`` sizes that sum to ``n``.

    Without weights, sizes differ by one at most, and the first ones are larger. With weights (0 last), exact shares are
    rounded down, and the largest remainders get the samples that are left. A shard with a positive weight and no sample
    then gets one from the shard furthest above its exact share that has two. Ties go to the first shard. With fewer
    samples than positive weights, the first shards get one each, so that shard i still belongs to device i.

    Raises:
        TypeError, ValueError: ``num_shards`` is below 1, or the weights are invalid.

    Example:
        >>> shard_sizes(10, 4), shard_sizes(10, 2, weights=[0.7, 0.3])
        ([3, 3, 2, 2], [7, 3])

        The exact shares of 4 samples by ``[1, 9]`` are 0.4 and 3.6, which would be rounded to 0 and 4. Two samples
        cannot fill three shards: the last one stays empty, although it has the largest weight.

        >>> shard_sizes(4, 2, weights=[1, 9]), shard_sizes(2, 3, weights=[1, 1, 8])
        ([1, 3], [1, 1, 0])

    Source of the idea: Hamilton's method of apportionment, with a minimum of one.
    """
    check_int("num_shards", num_shards, 1, "give how many shards a batch is split into")
    if weights is None:
        size, larger = divmod(n, num_shards)
        return [size + (shard < larger) for shard in range(num_shards)]
    return list(_apportion(n, tuple(check_shares(weights, num_shards))))


# Cached: exact fractions take 30 us for 8 shards, and a loader uses the same one or two splits all the time.
@lru_cache(maxsize=256)
def _apportion(n: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    positive = [shard for shard, weight in enumerate(weights) if weight]
    if n < len(positive):
        return tuple(int(shard in positive[:n]) for shard in range(len(weights)))
    from fractions import Fraction  # with `decimal`: 3 ms

    # 0.7 means seven tenths, not the nearest binary fraction: str() returns the decimal number.
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [n * weight / sum(exact) for weight in exact]
    sizes = apportioned(n, shares)
    # A shard without samples would be left out, and the shards after it would move to other devices.
    for empty in positive:
        if not sizes[empty]:
            donor = max((s for s in positive if sizes[s] > 1), key=lambda shard: sizes[shard] - shares[shard])
            sizes[empty], sizes[donor] = 1, sizes[donor] - 1
    return tuple(sizes)


def split_batch(
    indices: Any, num_shards: int, weights: Sequence[float] | None = None, costs: object = None
) -> list[Any]:
    """Split one flat batch into shards, none of them empty.

    Args:
        indices: a list, tuple or 1-D array, or an object that has a method ``cut``, as `PartIndices`.
        num_shards: maximum number of shards.
        weights: one number per shard, those of 0 last; None for even shares. See `shard_sizes`.
        costs: ``costs[index]`` is the cost of a sample (its length, say), at least 0. Samples are assigned from the
            most expensive down, each to the shard that is cheapest so far relative to its weight.

    Returns:
        Up to ``num_shards`` lists of Python ints, each in batch order. List i belongs to device i.

    Example:
        >>> split_batch([3, 1, 4, 1, 5], 2)
        [[3, 1, 4], [1, 5]]
        >>> split_batch([3, 1, 4, 1, 5], 2, weights=[1, 99])
        [[3], [1, 4, 1, 5]]

    Source of the idea: longest processing time first (Graham, 1969): the most expensive shard costs at most
    4/3 - 1/(3 * num_shards) of the best possible.
    """
    if hasattr(indices, "cut"):
        if costs is not None:
            raise ValueError("rows of documents cannot be split by costs: leave out costs, because rows are full")
        return list(indices.cut(shard_sizes(indices.rows, num_shards, weights)))
    batch = indices.tolist() if isinstance(indices, np.ndarray) else [plain_index(index) for index in indices]
    if costs is not None:
        return _split_by_cost(batch, num_shards, weights, costs)
    return cut(batch, shard_sizes(len(batch), num_shards, weights))


def _split_by_cost(
    batch: list[Any], num_shards: int, weights: Sequence[float] | None, costs: object
) -> list[list[Any]]:
    check_int("num_shards", num_shards, 1, "give how many shards a batch is split into")
    shares = [1.0] * num_shards if weights is None else check_shares(weights, num_shards)
    sample_costs = [_cost(costs, index) for index in batch]
    # A heap of (load / weight, samples, shard).
    cheapest = [(0.0, 0, shard) for shard in range(num_shards) if shares[shard]]
    loads = [0.0] * num_shards
    members: list[list[int]] = [[] for _ in range(num_shards)]
    for position in sorted(range(len(batch)), key=lambda position: -sample_costs[position]):
        _, samples, shard = cheapest[0]
        members[shard].append(position)
        loads[shard] += sample_costs[position]
        heapq.heapreplace(cheapest, (loads[shard] / shares[shard], samples + 1, shard))
    return [[batch[position] for position in sorted(positions)] for positions in members if positions]


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
    """Return True if a batch sampler's item is a list of shards rather than one flat batch of indices.

    Sharded: a list or tuple of lists, tuples, ranges or arrays; a 2-D array or tensor. Flat: an empty list, a list of
    integers, 0-d arrays or other keys, a 1-D array or tensor.

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
