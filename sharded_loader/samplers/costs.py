"""``costs=``: orders in which all ranks have nearly equal work in each step, by one cost of each sample or by several.

`CostSampler`: costs -> sorted once -> tuples of neighbours -> steps of several tuples -> rows of one sample per rank

A step of all ranks takes one tuple of neighbours from each level of the sorted costs, chosen by a shuffle per level. A
random shift moves the borders of tuples. Sorted by cost, the step is cut into rows of one sample per rank. From the
most expensive row down, a row is reversed if the rows so far give the last rank more than the first (greedy snake
order). Leftovers, taken at equal distances of the sorted costs, are the last step. With random steps, as in Graham
(1969), a rank with one very expensive sample would be the slowest.

`JointCostSampler`: columns of costs -> sorted once, so that neighbours are alike in all -> tuples, as above -> steps
-> assigned to ranks

Samples are halved again and again, each time at the median of the column that differs most, relative to what a step has
of it (`similar_order`). The halves, one after the other, are the line that tuples are cut from. A column may be 0 for
most samples, such as pictures beside text; a tuple then has it in all of its samples, or in none. In each step, the
ranks get neighbours in turn, and pairs of ranks exchange samples while that makes them more alike (`assigned`). All
decisions compare integers, so that ranks on different processors agree.

Random are: the tuples that meet in a step, one of each quarter of the line; the samples of a tuple, among up to 16
neighbouring tuples; the places of the leftovers. Outliers keep their neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s, Sampler, Table
from sharded_loader.extend.order import random_words, resolve_seed, shuffle
from sharded_loader.extend.tools import check_int
from sharded_loader.samplers.bijections import Bijections
from sharded_loader.samplers.index_samplers import Numbers

Costs = Numbers | Mapping[str, Numbers] | Callable[[int], Any]
"""One number per sample, or several: shape (n,) or (n, columns), a dict of columns, or a function of the index."""

Floats = npt.NDArray[np.float64]

Integers = npt.NDArray[Any]
"""Costs as integers, of shape (samples, columns)."""

MAX_LEVELS = 8
"""Maximum tuples per step. More make steps more alike, but tuples smaller, so that fewer ranks share one."""
MAX_COST_RATIO = 1.05
"""Maximum ratio of costs within tuples that are mixed."""
MAX_MIXED = 16
"""Maximum number of tuples that are mixed."""
COST_BLOCK = 2**13


class CostSampler(Sampler[int]):
    """All indices once per epoch, in random order, with nearly equal costs for all ranks in each step.

    Args:
        costs: cost of each sample, such as its length: finite numbers above 0, shape (length,), or a function of the
            index.
        batch_size: samples per step and rank.
        length: number of samples.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.
        whole_steps: drop the samples that do not fill a step of all ranks, different ones each epoch.

    Example:
        >>> sampler = CostSampler([1, 9, 8, 1, 2, 9, 2, 8], 2, 8, seed=0).for_ranks(2)
        >>> [sorted(step) for step in np.array(list(sampler)).reshape(2, 4).tolist()]
        [[0, 1, 3, 5], [2, 4, 6, 7]]
    """

    decided_by = (("costs", "costs"),)
    fixed = ("costs",)
    order_version = 2
    _ranks = 1

    def __init__(
        self,
        costs: Numbers | Callable[[int], float],
        batch_size: int,
        length: int,
        seed: int | None = None,
        whole_steps: bool = False,
    ) -> None:
        self.costs = checked_costs(costs, length)
        self._batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        self._sorted: Int64s = np.argsort(self.costs, kind="stable")
        self._whole_steps = whole_steps
        self.seed = resolve_seed(seed)

    def for_ranks(self, ranks: int) -> CostSampler:
        twin = copy.copy(self)
        twin._ranks = ranks
        return twin

    def epoch_table(self, epoch: int) -> Table:
        step, key = self._batch_size * self._ranks, self._key(epoch)
        steps = _CostSteps(self._sorted, self.costs, step, self._ranks, key)
        return Table(self.len_epoch(epoch), steps.at, COST_BLOCK)

    def _key(self, epoch: int) -> tuple[object, ...]:
        return self.seed, "costs", epoch

    def len_epoch(self, epoch: int) -> int:
        length, step = len(self.costs), self._batch_size * self._ranks
        return length // step * step if self._whole_steps else length


class _CostSteps:
    """Steps of one epoch: ``order`` has the indices by ascending cost, ``size`` is the number of samples in a step."""

    max_levels = MAX_LEVELS

    def __init__(self, order: Int64s, costs: Floats, size: int, ranks: int, key: tuple[object, ...]):
        self._order, self._costs, self._size, self._ranks = order, costs, size, ranks
        self._count = steps = len(order) // size
        self._levels = levels_of(size, self.max_levels)
        self._tuple = size // self._levels
        rest = len(order) - steps * size
        shift = int(random_words(1, *key)[0]) % max(len(order), 1)
        self._rest = self._leftovers(rest, shift)
        self._passed = self._rest - np.arange(rest)
        self._tuples = [shuffle(steps, *key, level) for level in range(self._levels)]
        self._first, self._mixed = self._mixable(steps * self._levels)
        self._shuffles = Bijections(*key, "mixed")

    def _leftovers(self, count: int, shift: int) -> Int64s:
        """Return the places of samples that are in no whole step, ascending."""
        return (np.arange(count) * len(self._order) + shift) // max(count, 1)

    def _mixable(self, count: int) -> tuple[Int64s, Int64s]:
        """Return, for each tuple, the first one of those that are mixed with it, and their number."""
        costs = self._costs[self._order[np.arange(count) * self._tuple]]
        grade = np.floor(np.log(costs) / np.log(MAX_COST_RATIO))
        begins = np.flatnonzero(np.diff(grade, prepend=np.nan))
        lengths = np.diff(np.append(begins, count))
        begin, length = np.repeat(begins, lengths), np.repeat(lengths, lengths)
        first = begin + (np.arange(count) - begin) // MAX_MIXED * MAX_MIXED
        return first, np.minimum(begin + length - first, MAX_MIXED)

    def at(self, positions: Int64s) -> Int64s:
        whole = positions[: np.searchsorted(positions, self._count * self._size)]
        places = self._places(whole) if len(whole) else whole
        places = places + np.searchsorted(self._passed, places, side="right")
        last = positions[len(whole) :] - self._count * self._size
        found: Int64s = self._order[np.concatenate([places, self._rest[last]])]
        return found

    def _places(self, positions: Int64s) -> Int64s:
        """Return places in the sorted order without the leftovers in `_rest`."""
        size, ranks, width = self._size, self._ranks, self._tuple
        step, within = np.divmod(positions, size)
        steps, here = np.unique(step, return_inverse=True)
        tuples = self._tuples_of(steps)
        row, rank = np.divmod(within, ranks)
        rank = (rank + self._turned(steps)[here]) % ranks
        rank = np.where(self._reversed_rows(tuples)[here, row], ranks - 1 - rank, rank)
        level, member = np.divmod(row * ranks + rank, width)
        return self._members(tuples[here, level], member)

    def _tuples_of(self, steps: Int64s) -> Int64s:
        return np.stack([level * self._count + tuples(steps) for level, tuples in enumerate(self._tuples)], axis=1)

    def _turned(self, steps: Int64s) -> Int64s:
        """Return by how many ranks each step is turned."""
        return self._shuffles(np.zeros_like(steps), np.full_like(steps, self._ranks), -1 - steps)

    def _members(self, number: Int64s, member: Int64s) -> Int64s:
        """Return the places of members of tuples."""
        first, mixed, width = self._first[number], self._mixed[number], self._tuple
        found: Int64s = first * width + mixed * member + self._shuffles(number - first, mixed, first * width + member)
        return found

    def _reversed_rows(self, tuples: Int64s) -> npt.NDArray[np.bool_]:
        """Return which rows of each step are reversed. ``tuples`` has shape (steps, levels)."""
        rows, width = self._size // self._ranks, self._tuple
        ends = np.arange(rows)[:, None] * self._ranks + np.array([0, self._ranks - 1])
        number = tuples[:, ends // width]
        first, mixed = self._first[number], self._mixed[number]
        cost = self._costs[self._order[first * width + mixed * (ends % width) + (number - first)]]
        gain = cost[:, :, 1] - cost[:, :, 0]
        found, total = np.zeros(gain.shape, bool), np.zeros(len(gain))
        for row in range(rows)[::-1]:
            found[:, row] = total > 0
            total += np.where(total > 0, -1, 1) * gain[:, row]
        return found


def levels_of(size: int, most: int) -> int:
    """Return the number of levels, each of which gives a step of ``size`` samples one tuple."""
    return max(n for n in range(1, most + 1) if size % n == 0 and n * n <= size)


# -- several costs -----------------------------------------------------------------------------------------------------


JOINT_LEVELS = 4
"""`MAX_LEVELS` for several costs. More levels make narrower tuples, which more ranks have to share."""
MAX_SPREAD = 0.5
"""Maximum difference within mixed tuples, relative to the mean of a step for as many ranks as a tuple has samples."""
ROUNDS = 12
"""Rounds in which each rank of a step exchanges a sample with another one."""
CANDIDATES = 16
"""Maximum samples of a rank that are tried in a round."""
UNIT = 2**30
"""The highest cost of a column, as an integer."""
MEAN = 2**16
"""The mean of ranks in a step, as an integer. Samples above 64 times the mean count as 64 times."""
TINY = float(np.finfo(float).tiny)
PLANNED = 2**12
"""Samples that are assigned at once: 64 steps of 64 samples."""


class JointCostSampler(CostSampler):
    """All indices once per epoch, in random order, with nearly equal work for all ranks in each of several columns.

    A sample may cost nothing in some columns, such as a text without pictures. Arguments are those of `CostSampler`,
    with ``costs`` of shape (length, columns).

    Example:
        >>> vision, text = [0, 8, 0, 9, 0, 0, 8, 9], [5, 1, 5, 1, 5, 5, 1, 1]
        >>> sampler = JointCostSampler(np.array([vision, text], float).T, 2, 8, seed=0).for_ranks(4)
        >>> order = list(sampler)
        >>> [sum(vision[index] for index in order[rank::4]) for rank in range(4)]
        [8, 8, 9, 9]
    """

    decided_by = (("costs", "_columns"),)
    shown = (("costs", "costs"),)
    order_version = 1

    def __init__(
        self,
        costs: Floats,
        batch_size: int,
        length: int,
        seed: int | None = None,
        whole_steps: bool = False,
    ) -> None:
        self._columns, self._batch_size = costs, batch_size
        self._exact: Integers = np.rint(costs / np.maximum(costs.max(axis=0, initial=0), TINY) * UNIT).astype(np.int32)
        # The work in all columns, by which a batch is split into shards for several devices.
        self.costs = (self._exact / np.maximum(self._exact.sum(axis=0, dtype=np.int64), 1)).sum(axis=1)
        self._plans: dict[int, tuple[Int64s, tuple[Int64s, Int64s]]] = {}  # by the number of samples in a step
        self._whole_steps, self.seed = whole_steps, resolve_seed(seed)

    def epoch_table(self, epoch: int) -> Table:
        step, key = self._batch_size * self._ranks, self._key(epoch)
        if step not in self._plans:
            self._plans.clear()
            levels = levels_of(step, JOINT_LEVELS)
            order, rest = similar_order(self._exact, step, levels)
            mixed = mixable(self._exact[order], rest, len(order) // step * levels, step // levels)
            self._plans[step] = order, mixed
        steps = _JointSteps(*self._plans[step], self._exact, step, self._ranks, key)
        return Table(self.len_epoch(epoch), steps.at, max(PLANNED // step, 1) * self._batch_size)


class _JointSteps(_CostSteps):
    """Steps of one epoch: ``order`` is from `similar_order`, and ``mixed`` from `mixable`."""

    max_levels = JOINT_LEVELS

    def __init__(
        self, order: Int64s, mixed: tuple[Int64s, Int64s], costs: Integers, size: int, ranks: int, key: tuple[Any, ...]
    ) -> None:
        self._pair = mixed
        super().__init__(order, costs, size, ranks, key)

    def _leftovers(self, count: int, shift: int) -> Int64s:
        # From tuples that have more samples than fit, so that the others keep theirs.
        sizes = np.diff(borders(len(self._order), self._count * self._levels))
        extra = np.maximum(sizes - self._tuple, 0)
        if not len(sizes):
            return super()._leftovers(count, shift)
        number = np.repeat(np.arange(len(sizes)), extra)
        nth = np.arange(count) - np.repeat(np.cumsum(extra) - extra, extra)
        return np.sort((np.cumsum(sizes) - sizes)[number] + (shift + nth) % sizes[number])

    def _mixable(self, count: int) -> tuple[Int64s, Int64s]:
        return self._pair

    def _places(self, positions: Int64s) -> Int64s:
        step, within = np.divmod(positions, self._size)
        steps, here = np.unique(step, return_inverse=True)
        at_once = max(PLANNED // self._size, 1)
        planned = [self._planned(steps[begin : begin + at_once]) for begin in range(0, len(steps), at_once)]
        found: Int64s = np.concatenate(planned)[here, within]
        return found

    def _planned(self, steps: Int64s) -> Int64s:
        """Return the places of all samples of steps, shape (steps, size): first those of row 0, by rank."""
        count, members = len(steps), np.arange(self._size)
        tuples = self._tuples_of(steps)[:, members // self._tuple]
        places = self._members(tuples.ravel(), np.tile(members % self._tuple, count))
        costs = self._costs[self._order[places + np.searchsorted(self._passed, places, side="right")]]
        chosen = assigned(costs.reshape(count, self._size, -1).astype(np.int64), self._ranks)
        row, rank = np.divmod(members, self._ranks)
        slots = row * self._ranks + (rank + self._turned(steps)[:, None]) % self._ranks
        return np.take_along_axis(places.reshape(count, -1), np.take_along_axis(chosen, slots, axis=1), axis=1)


def similar_order(costs: Integers, size: int, levels: int) -> tuple[Int64s, Floats]:
    """Return an order in which neighbours are alike in all columns, for tuples of ``size // levels`` samples.

    Also return how much of each column the rest of a step has at least, in most steps. Takes O(n log n) for each
    column.

    Example:
        >>> costs = np.array([[0, 2], [6, 1], [0, 9], [7, 1]])
        >>> similar_order(costs, 4, 2)[0].tolist()
        [1, 3, 0, 2]
    """
    count, width, columns = len(costs), size // levels, np.arange(costs.shape[1])[:, None]
    edges = borders(count, count // size * levels)
    lines = np.stack([np.argsort(column, kind="stable") for column in costs.T])  # each is sorted within its nodes
    nodes, rising = np.array([0, len(edges) - 1]), np.ones((1, len(columns)), bool)
    rest = (size - width) * (costs.sum(axis=0, dtype=np.int64) / max(count, 1))
    while (several := np.diff(nodes) > 1).any():
        begin, sizes = edges[nodes[:-1]], np.diff(edges[nodes])
        if len(nodes) == 5:
            low = costs[lines[:, begin + sizes // 10], columns]
            rest = (size - width) * (low.sum(axis=1, dtype=np.int64) / 4)
        spread = costs[lines[:, begin + sizes - 1], columns] - costs[lines[:, begin], columns]
        sums = np.add.reduceat(costs[lines[0]], begin, dtype=np.int64)
        column = (spread.T / np.maximum(width * (sums / sizes[:, None]) + rest, 1)).argmax(axis=1)
        middle = (nodes[:-1] + nodes[1:] + 1) // 2
        half, owner = edges[middle] - begin, np.repeat(np.arange(len(begin)), sizes)
        place, first = np.arange(count) - begin[owner], np.empty(count, bool)
        # Where the line comes back through a column it falls, so that the ends of halves are neighbours too.
        rises = rising[np.arange(len(column)), column][owner]
        first[lines[column[owner], np.arange(count)]] = np.where(
            rises, place < half[owner], place >= (sizes - half)[owner]
        )
        for line in lines:
            is_first = first[line]
            passed = np.cumsum(is_first) - is_first
            before = passed - passed[begin][owner]
            line[begin[owner] + np.where(is_first, before, half[owner] + place - before)] = line.copy()
        turned = rising ^ (column[:, None] != columns.T)
        rising = np.stack([rising, turned], axis=1)[np.stack([several | True, several], axis=1)]
        nodes = np.unique(np.concatenate([nodes, middle]))
    return lines[0], rest


def borders(count: int, tuples: int) -> Int64s:
    """Return where each of ``tuples`` parts of ``count`` samples begins, and the end of the last one."""
    return np.arange(tuples + 1) * count // max(tuples, 1)


def mixable(line: Integers, rest: Floats, count: int, width: int) -> tuple[Int64s, Int64s]:
    """Return, for each of ``count`` tuples of a line of costs, the first one of those to mix it with, and their number.

    Example:
        >>> mixable(np.array([[5], [5], [5], [5], [5], [9]]), np.zeros(1), 3, 2)[1].tolist()
        [2, 2, 1]
    """
    first, mixed = np.arange(count), np.ones(count, np.int64)
    if not count:
        return first, mixed
    begins = borders(len(line), count)[:-1]
    most, least = np.maximum.reduceat(line, begins), np.minimum.reduceat(line, begins)
    sums = np.add.reduceat(line, begins, dtype=np.int64)
    for number in (2, 4, 8, MAX_MIXED):
        end = count // number * number
        groups = [one[:end].reshape(-1, number, line.shape[1]) for one in (most, least, sums)]
        spread = (groups[0].max(axis=1) - groups[1].min(axis=1)).astype(np.int64)
        alike = (spread * width <= MAX_SPREAD * (groups[2].sum(axis=1) / number + rest)).all(axis=1)
        here = np.flatnonzero(np.repeat(alike, number))
        first[here], mixed[here] = here // number * number, number
    return first, mixed


def assigned(costs: Int64s, ranks: int) -> Int64s:
    """Assign the samples of steps to ranks, equally many to each, and about equal sums in each column.

    ``costs`` has shape (steps, samples, columns). Return the samples by row and rank, shape (steps, samples).

    Example:
        >>> assigned(np.array([[[9, 1], [0, 5], [9, 1], [0, 5]]]), 2)
        array([[0, 1, 3, 2]])
    """
    count, size, columns = costs.shape
    rows, half, total = size // ranks, ranks // 2, costs.sum(axis=1, keepdims=True)
    shares = np.rint(np.minimum(costs * (ranks / np.maximum(total, 1)), 64) * MEAN).astype(np.int64)
    order = np.tile(np.arange(size), (count, 1)).reshape(count, rows, ranks)
    order[:, 1::2] = order[:, 1::2, ::-1]
    if rows == 1:
        return order.reshape(count, size)
    members = order.transpose(0, 2, 1).copy()
    step = np.arange(count)[:, None]
    loads = shares[step[:, :, None], members].sum(axis=2)
    tried = min(rows, CANDIDATES)
    for n in range(ROUNDS * (half > 0)):
        excess = loads - loads.sum(axis=1, keepdims=True) // ranks
        # Pair the highest rank with the lowest, of one column after the other, or of all.
        which = n % (columns + 1)
        key = excess[:, :, which] if which < columns else np.abs(excess).max(axis=2)
        by_load = np.argsort(key, axis=1, kind="stable")
        low, high = by_load[:, :half], np.roll(by_load[:, ::-1][:, :half], n // 2 * (n % 2), axis=1)
        some = (np.arange(tried) * rows // tried + n) % rows
        gain = shares[step[:, :, None], members[step, high][:, :, some]][:, :, None]
        gain = gain - shares[step[:, :, None], members[step, low][:, :, some]][:, :, :, None]
        gap = (excess[step, low] - excess[step, high])[:, :, None, None]
        change = ((gain + gap) * gain).sum(axis=4).reshape(count, half, -1)
        best = change.argmin(axis=2)
        at, pair = np.nonzero(np.take_along_axis(change, best[:, :, None], axis=2)[:, :, 0] < 0)
        mine, other = (some[one] for one in np.divmod(best[at, pair], tried))
        low, high = low[at, pair], high[at, pair]
        moved = gain.reshape(count, half, -1, columns)[at, pair, best[at, pair]]
        loads[at, low] += moved
        loads[at, high] -= moved
        members[at, low, mine], members[at, high, other] = members[at, high, other], members[at, low, mine]
    return members.transpose(0, 2, 1).reshape(count, size)


# -- the argument ------------------------------------------------------------------------------------------------------


def sampler_of(
    costs: Costs, batch_size: int, length: int, seed: int | None, whole_steps: bool, known: int
) -> CostSampler:
    """Return the sampler of ``costs=`` for the first ``length`` samples; there are costs of ``known`` samples."""
    array = checked_costs(costs, length if callable(costs) else known)[:length]
    kind = CostSampler if array.ndim == 1 else JointCostSampler
    return kind(array, batch_size, length, seed, whole_steps)


def checked_costs(costs: Costs, length: int) -> Floats:
    """Return the costs as float64, shape (length,) or (length, columns). TypeError or ValueError: they are invalid."""
    given: Any = [costs(index) for index in range(length)] if callable(costs) else costs
    names: Any = list(costs) if isinstance(costs, Mapping) else range(1 << 31)
    try:
        columns = [np.asarray(column, np.float64) for column in given.values()] if isinstance(given, Mapping) else None
        array = np.asarray(given if columns is None else [], np.float64)
    except (TypeError, ValueError):
        advice = "or several (shape (n, columns), a dict of columns), or a function of the index"
        raise TypeError(f"costs must be numbers, one for each sample, {advice}") from None
    if columns is not None:
        shapes = {name: column.shape for name, column in zip(names, columns, strict=True)}
        if set(shapes.values()) != {(length,)}:
            text = f"costs have columns of shapes {shapes}, but the dataset has {length} samples"
            raise ValueError(f"{text}: give one number for each in every column")
        array = np.stack(columns, axis=1)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape[:1] != (length,) or array.ndim > 2 or not all(array.shape[1:]):
        text = f"costs have shape {array.shape}, but the dataset has {length} samples"
        raise ValueError(f"{text}: give one number for each, or several, shape ({length}, columns)")
    if array.ndim == 1:
        wrong = np.flatnonzero(~((array > 0) & (array < np.inf)))
        if len(wrong):
            raise ValueError(f"the cost of sample {wrong[0]} is {array[wrong[0]]}: costs are finite numbers above 0")
        return array
    for sample, column in np.argwhere(~((array >= 0) & (array < np.inf)))[:1].tolist():
        text = f"the cost of sample {sample} is {array[sample, column]} in column {names[column]!r}"
        raise ValueError(f"{text}: costs are finite, and at least 0 if there are several columns")
    for sample in np.flatnonzero(~array.any(axis=1))[:1].tolist():
        raise ValueError(f"all costs of sample {sample} are 0: one of them must be above 0")
    for column in np.flatnonzero(~array.any(axis=0))[:length].tolist():
        raise ValueError(f"all costs in column {names[column]!r} are 0: leave out the column")
    return array
