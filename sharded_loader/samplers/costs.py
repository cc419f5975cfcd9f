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

Plan = tuple[Int64s, int, Int64s, Int64s]
"""Samples in a line of similar ones; levels of a step; the first tuple that each is mixed with, and how many are."""

MOST_CALLS = 1 << 30
"""Samples for which a function returns the costs, at most: several minutes, and 32 GB."""
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
        self, costs: Costs, batch_size: int, length: int, seed: int | None = None, whole_steps: bool = False
    ) -> None:
        self.costs = self._work(checked_costs(costs, length))
        self._batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        self._plans: dict[int, Plan] = {}  # by the number of samples in a step; only the last one is kept
        self._whole_steps = whole_steps
        self.seed = resolve_seed(seed)

    def _work(self, costs: Floats) -> Floats:
        """Return one cost for each sample, by which a batch is split into shards for several devices."""
        return costs

    def for_ranks(self, ranks: int) -> CostSampler:
        twin = copy.copy(self)
        twin._ranks = ranks
        return twin

    def epoch_table(self, epoch: int) -> Table:
        step = self._batch_size * self._ranks
        if step not in self._plans:
            self._plans.clear()
            self._plans[step] = self._plan(step)
        return self._table(step, self._plans[step], (self.seed, "costs", epoch), self.len_epoch(epoch))

    def _plan(self, step: int) -> Plan:
        order, levels = np.argsort(self.costs, kind="stable"), levels_of(step, MAX_LEVELS)
        return order, levels, *mixable(self.costs[order], len(order) // step * levels, step // levels)

    def _table(self, step: int, plan: Plan, key: tuple[object, ...], length: int) -> Table:
        return Table(length, _CostSteps(plan, self.costs, step, self._ranks, key).at, COST_BLOCK)

    def len_epoch(self, epoch: int) -> int:
        length, step = len(self.costs), self._batch_size * self._ranks
        return length // step * step if self._whole_steps else length


class _CostSteps:
    """Steps of one epoch, each of ``size`` samples of the plan."""

    def __init__(self, plan: Plan, costs: npt.NDArray[Any], size: int, ranks: int, key: tuple[object, ...]) -> None:
        self._order, levels, self._first, self._mixed = plan
        self._costs, self._size, self._ranks = costs, size, ranks
        self._count, self._tuple = len(self._order) // size, size // levels
        shift = int(random_words(1, *key)[0]) % max(len(self._order), 1)
        self._rest = self._leftovers(len(self._order) - self._count * size, shift)
        self._passed = self._rest - np.arange(len(self._rest))
        self._tuples = [shuffle(self._count, *key, level) for level in range(levels)]
        self._shuffles = Bijections(*key, "mixed")

    def _leftovers(self, count: int, shift: int) -> Int64s:
        """Return the places of samples that are in no whole step, ascending."""
        return (np.arange(count) * len(self._order) + shift) // max(count, 1)

    def at(self, positions: Int64s) -> Int64s:
        whole = positions[: np.searchsorted(positions, self._count * self._size)]
        last = positions[len(whole) :] - self._count * self._size
        places = self._whole(self._places(whole) if len(whole) else whole)
        return self._order.take(np.concatenate([places, self._rest[last]]))

    def _whole(self, places: Int64s) -> Int64s:
        """Convert places among the samples of whole steps to places among all."""
        found: Int64s = places + np.searchsorted(self._passed, places, side="right")
        return found

    def _places(self, positions: Int64s) -> Int64s:
        """Return places among the samples of whole steps."""
        step, within = np.divmod(positions, self._size)
        steps, here = np.unique(step, return_inverse=True)
        tuples = np.stack([level * self._count + order(steps) for level, order in enumerate(self._tuples)], axis=1)
        row, rank = np.divmod(within, self._ranks)
        turned = self._shuffles(np.zeros_like(steps), np.full_like(steps, self._ranks), -1 - steps)
        return self._chosen(tuples, here, row, (rank + turned[here]) % self._ranks)

    def _chosen(self, tuples: Int64s, here: Int64s, row: Int64s, rank: Int64s) -> Int64s:
        """Return the places of the samples that ranks have in rows of steps. ``tuples`` has shape (steps, levels)."""
        rank = np.where(self._reversed_rows(tuples)[here, row], self._ranks - 1 - rank, rank)
        level, member = np.divmod(row * self._ranks + rank, self._tuple)
        return self._members(tuples[here, level], member)

    def _members(self, number: Int64s, member: Int64s) -> Int64s:
        """Return the places of members of tuples."""
        first, mixed, width = self._first[number], self._mixed[number], self._tuple
        found: Int64s = first * width + mixed * member + self._shuffles(number - first, mixed, first * width + member)
        return found

    def _reversed_rows(self, tuples: Int64s) -> npt.NDArray[np.bool_]:
        """Return which rows of each step are reversed; see `_chosen`."""
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


def mixable(line: Floats, count: int, width: int) -> tuple[Int64s, Int64s]:
    """Return, for each of ``count`` tuples of sorted costs, the first one of those to mix it with, and their number."""
    grade = np.floor(np.log(line[np.arange(count) * width]) / np.log(MAX_COST_RATIO))
    begins = np.flatnonzero(np.diff(grade, prepend=np.nan))
    lengths = np.diff(np.append(begins, count))
    begin, length = np.repeat(begins, lengths), np.repeat(lengths, lengths)
    first = begin + (np.arange(count) - begin) // MAX_MIXED * MAX_MIXED
    return first, np.minimum(begin + length - first, MAX_MIXED)


# -- several costs -----------------------------------------------------------------------------------------------------


JOINT_LEVELS = 4
"""`MAX_LEVELS` for several costs. More levels make narrower tuples, which more ranks have to share."""
MAX_SPREAD = 0.5
"""Maximum of `differences` within tuples that are mixed."""
ROUNDS = 12
"""Rounds in which each rank of a step exchanges a sample with another one."""
CANDIDATES = 16
"""Maximum samples of a rank that are tried in a round."""
UNIT = 2**30
"""The highest cost of a column, as an integer."""
MEAN = 2**12
"""The mean of ranks in a step, as an integer."""
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

    def _work(self, costs: Floats) -> Floats:
        self._columns, highest = costs, costs.max(axis=0, initial=0)
        self._exact: Int64s = np.rint(costs * (UNIT / np.where(highest > 0, highest, 1))).astype(np.int64)
        work: Floats = (self._exact / np.maximum(self._exact.sum(axis=0), 1)).sum(axis=1)
        return work

    def _plan(self, step: int) -> Plan:
        levels = levels_of(step, JOINT_LEVELS)
        edges = borders(len(self._exact), len(self._exact) // step * levels)
        count = len(self._exact)
        quarters = np.sort(self._exact, axis=0)[count // 40 :: max(count // 4, 1)]  # near the low end of each
        least = (levels - 1) * quarters.sum(axis=0) // 4
        order = similar_order(self._exact, edges, least)
        return order, levels, *similar_tuples(self._exact[order], edges, least)

    def _table(self, step: int, plan: Plan, key: tuple[object, ...], length: int) -> Table:
        at = _JointSteps(plan, self._exact, step, self._ranks, key).at
        return Table(length, at, max(PLANNED // step, 1) * self._batch_size)


class _JointSteps(_CostSteps):
    """Steps of one epoch, whose samples are `assigned` to ranks."""

    def _leftovers(self, count: int, shift: int) -> Int64s:
        # From tuples that have more samples than fit, so that the others keep theirs.
        edges = borders(len(self._order), len(self._first))
        if len(edges) == 1:
            return np.arange(count)
        sizes = np.diff(edges)
        number = np.repeat(np.arange(len(sizes)), sizes - self._tuple)
        return np.sort(edges[number] + (shift + np.arange(count)) % sizes[number])

    def _chosen(self, tuples: Int64s, here: Int64s, row: Int64s, rank: Int64s) -> Int64s:
        level, member = np.divmod(np.arange(self._size), self._tuple)
        places = self._members(tuples[:, level].ravel(), np.tile(member, len(tuples)))
        costs = self._costs[self._order[self._whole(places)]].reshape(len(tuples), self._size, -1)
        found: Int64s = places.reshape(len(tuples), -1)[here, assigned(costs, self._ranks)[here, row, rank]]
        return found


def differences(line: Int64s, begins: Int64s, least: Int64s) -> Floats:
    """Return how much the samples of each part of a line differ in each column, relative to their mean.

    ``least`` is added to the mean: what the other tuples of a step have at least, for each of this one's samples.
    """
    sizes = np.diff(np.append(begins, len(line)))[:, None]
    spread = np.maximum.reduceat(line, begins) - np.minimum.reduceat(line, begins)
    found: Floats = spread / np.maximum(np.add.reduceat(line, begins) / sizes + least, 1)
    return found


def similar_order(costs: Int64s, edges: Int64s, least: Int64s) -> Int64s:
    """Return an order in which neighbours are alike in all columns, for tuples between ``edges``; see `differences`.

    Parts are halved until each is a tuple, at the median of the column in which their samples differ most.

    Example:
        >>> costs = np.array([[0, 2], [6, 1], [0, 9], [7, 1]])
        >>> similar_order(costs, np.array([0, 2, 4]), np.zeros(2)).tolist()
        [1, 3, 0, 2]
    """
    order, nodes = np.arange(len(costs)), np.array([0, len(edges) - 1])
    while (np.diff(nodes) > 1).any():
        begin, line = edges[nodes[:-1]], costs[order]
        owner = np.repeat(np.arange(len(begin)), np.diff(edges[nodes]))
        value = line[np.arange(len(line)), differences(line, begin, least).argmax(axis=1)[owner]]
        # Every other part falls, so that ends of parts are neighbours too.
        order = order[np.lexsort([np.where(owner % 2, -value, value), owner])]
        nodes = np.unique(np.concatenate([nodes, (nodes[:-1] + nodes[1:] + 1) // 2]))
    return order


def borders(count: int, tuples: int) -> Int64s:
    """Return where each of ``tuples`` parts of ``count`` samples begins, and the end of the last one."""
    return np.arange(tuples + 1) * count // max(tuples, 1)


def similar_tuples(line: Int64s, edges: Int64s, least: Int64s) -> tuple[Int64s, Int64s]:
    """Return for each tuple of a line the first one of those to mix it with, and their number, a power of two.

    Example:
        >>> similar_tuples(np.array([[5], [5], [5], [5], [5], [9]]), np.array([0, 2, 4, 6]), np.zeros(1))[1].tolist()
        [2, 2, 1]
    """
    count = len(edges) - 1
    first, mixed, number = np.arange(count), np.ones(count, np.int64), 2
    while number <= min(MAX_MIXED, count):
        begins = edges[: count // number * number : number]
        differ = differences(line[: edges[count // number * number]], begins, least)
        here = np.flatnonzero(np.repeat((differ <= MAX_SPREAD).all(axis=1), number))
        first[here], mixed[here] = here // number * number, number
        number *= 2
    return first, mixed


def assigned(costs: Int64s, ranks: int) -> Int64s:
    """Assign the samples of steps to ranks, equally many to each, and about equal sums in each column.

    ``costs`` has shape (steps, samples, columns). Return the samples, shape (steps, rows, ranks). Ranks get neighbours
    in turn. Then, in each round, ranks with more than others, of one column after the other, exchange samples with
    those that have less: the two that make their work most alike.

    Example:
        >>> assigned(np.array([[[9, 1], [0, 5], [9, 1], [0, 5]]]), 2).tolist()
        [[[0, 1], [3, 2]]]
    """
    count, size, columns = costs.shape
    rows, half, step = size // ranks, ranks // 2, np.arange(count)[:, None, None]
    shares = costs * (MEAN * ranks) // np.maximum(costs.sum(axis=1, keepdims=True), 1)
    members = np.tile(np.arange(size).reshape(rows, ranks), (count, 1, 1))
    members[:, 1::2] = members[:, 1::2, ::-1].copy()
    members = members.transpose(0, 2, 1)
    tried = min(rows, CANDIDATES)
    for n in range(ROUNDS if half and rows > 1 else 0):
        loads = shares[step, members].sum(axis=2)
        which = n % (columns + 1)
        key = loads[:, :, which] if which < columns else np.abs(loads - MEAN).max(axis=2)
        by_load = np.argsort(key, axis=1, kind="stable")[:, :, None]
        members, loads = np.take_along_axis(members, by_load, 1), np.take_along_axis(loads, by_load, 1)
        low, high = members[:, :half], members[:, ::-1][:, :half]
        some = (np.arange(tried) * rows // tried + n) % rows
        gain = shares[step, high[:, :, some]][:, :, None] - shares[step, low[:, :, some]][:, :, :, None]
        gap = (loads[:, :half] - loads[:, ::-1][:, :half])[:, :, None, None]
        change = ((gain + gap) * gain).sum(axis=4).reshape(count, half, -1)
        best = change.argmin(axis=2)
        at, pair = np.nonzero(change.min(axis=2) < 0)
        mine, other = (some[one] for one in np.divmod(best[at, pair], tried))
        low[at, pair, mine], high[at, pair, other] = high[at, pair, other], low[at, pair, mine]
    return members.transpose(0, 2, 1)


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
    if callable(costs) and length > MOST_CALLS:
        text = f"the dataset has {length:,} samples, and a function of the index would be called for each, for days"
        raise ValueError(f"costs={costs!r}: {text}: give an array, or a smaller dataset")
    given: Any = [costs(index) for index in range(length)] if callable(costs) else costs
    try:
        columns = [*given.values()] if isinstance(given, Mapping) else None
        array = np.asarray(given, np.float64) if columns is None else np.array(columns, np.float64).T
    except (TypeError, ValueError):
        text = "costs must be numbers, one for each sample, or equally many: shape (n,) or (n, columns)"
        raise TypeError(f"{text}, a dict of columns of shape (n,), or a function of the index") from None
    if array.shape[:1] != (length,) or array.ndim > 2 or not all(array.shape[1:]):
        text = f"costs have shape {array.shape}, but the dataset has {length} samples"
        raise ValueError(f"{text}: give one number for each, or several, shape ({length}, columns)")
    several = array.shape[1:] not in ((), (1,))
    wrong = np.argwhere(~((array >= 0) & (array < np.inf) & (several | (array > 0))))
    for sample, *column in wrong[:1].tolist():
        text = f"the cost of sample {sample} is {array[(sample, *column)]}"
        where = f" in column {list(costs)[column[0]] if isinstance(costs, Mapping) else column[0]!r}" if several else ""
        raise ValueError(f"{text}{where}: costs are finite numbers above 0, or at least 0 if there are several columns")
    return array if several else array.reshape(length)
