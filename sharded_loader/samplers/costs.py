"""Samples in random order, where in each step all ranks have samples of nearly the same cost in all: `CostSampler`.

    costs -> sorted once -> tuples of neighbours -> steps of several tuples -> rows of one sample per rank

All ranks together read ``batch_size * ranks`` samples in a step. Samples of similar cost stand side by side in a tuple.
A step takes one tuple of each level: of the cheapest samples, of dearer ones, up to the dearest. Which tuple is decided
by a shuffle for each level, and which neighbours come together by a random shift. So a step is a sample of all costs.

A step, sorted by cost, is cut into rows of one sample for each rank. Some rows go from cheap to dear, some the other
way round. That is settled from the dearest row down: if the rows so far give the last rank more than the first, the
next row goes the other way round. Which rank is the first is another one in each step.

The samples of a step do not depend on the number of ranks, as long as the step has as many samples. A rank computes its
own samples only: time and memory of a step do not grow with the ranks. Samples that do not fill a step come in the last
one: they are taken out at equal distances of the sorted costs, others in each epoch.

Owns two numbers per sample: its cost, and its place in the sorted order. What can go wrong: arguments, all rejected in
the constructor.

Source of the idea: to deal out the samples of each random step, the longest first, so that ranks have equal work
(Graham, 1969, as in `engine.split`). There a rank with one sample above the mean is the slowest. A step that is made of
tuples of neighbours has no such sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.randomness.shuffle import Bijections, Indices, random_words, shuffle
from sharded_loader.sampling.base import Sampler, resolve_seed
from sharded_loader.sampling.tables import Table

LEVELS = 8
"""The most tuples in a step. More make steps more alike, and tuples smaller: then fewer ranks share one tuple."""
NEAR = 1.05
"""The greatest ratio of costs in tuples whose samples are mixed."""
MIXED = 16
"""The most tuples whose samples are mixed."""
BLOCK = 2**13


class CostSampler(Sampler[int]):
    """All indices once per epoch, in random order, with equal costs for all ranks in each step.

    Args:
        costs: what each sample costs, such as its length: numbers above 0, shape (n,); or a function of the index.
        batch_size: samples per step of one rank.
        length: the number of samples.
        seed: with the epoch it decides the order. None draws one from torch's default generator.
        whole_steps: leave out the samples that do not fill a step of all ranks, in each epoch others.

    Raises:
        ValueError: there are not ``length`` costs, or one of them is not a finite number above 0.

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
        costs: Sequence[float] | npt.NDArray[Any] | Callable[[int], float],
        batch_size: int,
        length: int,
        seed: int | None = None,
        whole_steps: bool = False,
    ) -> None:
        self.costs = checked_costs(costs, length)
        self._batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        self._sorted: Indices = np.argsort(self.costs, kind="stable")
        self._whole_steps = whole_steps
        self.seed = resolve_seed(seed)

    def for_ranks(self, ranks: int) -> CostSampler:
        twin = copy.copy(self)
        twin._ranks = ranks
        return twin

    def epoch_table(self, epoch: int) -> Table:
        steps = _CostSteps(
            self._sorted, self.costs, self._batch_size * self._ranks, self._ranks, (self.seed, "costs", epoch)
        )
        return Table(self.len_epoch(epoch), steps.at, BLOCK)

    def len_epoch(self, epoch: int) -> int:
        length, step = len(self.costs), self._batch_size * self._ranks
        return length // step * step if self._whole_steps else length


class _CostSteps:
    """The steps of one epoch.

    Args:
        order: the indices, the cheapest first.
        costs: of each index.
        size, ranks: of a step.
        key: what decides the order.
    """

    def __init__(self, order: Indices, costs: npt.NDArray[np.float64], size: int, ranks: int, key: tuple[Any, ...]):
        self._order, self._costs, self._size, self._ranks = order, costs, size, ranks
        self._count = steps = len(order) // size
        self._levels = max(n for n in range(1, LEVELS + 1) if size % n == 0 and n * n <= size)
        self._tuple = size // self._levels
        rest = len(order) - steps * size
        shift = int(random_words(1, *key)[0]) % max(len(order), 1)
        self._rest = (np.arange(rest) * len(order) + shift) // max(rest, 1)
        self._passed = self._rest - np.arange(rest)
        self._tuples = [shuffle(steps, *key, level) for level in range(self._levels)]
        self._first, self._mixed = self._blocks()
        self._shuffles = Bijections(*key, "mixed")

    def _blocks(self) -> tuple[Indices, Indices]:
        """Of each tuple, the first one that it is mixed with, and how many those are."""
        count = self._count * self._levels
        cheapest = self._costs[self._order[np.arange(count) * self._tuple]]
        grade = np.floor(np.log(cheapest) / np.log(NEAR))
        begins = np.flatnonzero(np.concatenate([[True], grade[1:] != grade[:-1]])) if count else np.zeros(0, np.int64)
        lengths = np.diff(np.append(begins, count))
        begin, length = np.repeat(begins, lengths), np.repeat(lengths, lengths)
        first = begin + (np.arange(count) - begin) // MIXED * MIXED
        return first, np.minimum(begin + length - first, MIXED)

    def at(self, positions: Indices) -> Indices:
        """The indices at these positions."""
        whole = positions[: np.searchsorted(positions, self._count * self._size)]
        places = self._places(whole) if len(whole) else whole
        places = places + np.searchsorted(self._passed, places, side="right")
        last = positions[len(whole) :] - self._count * self._size
        found: Indices = self._order[np.concatenate([places, self._rest[last]])]
        return found

    def _places(self, positions: Indices) -> Indices:
        """Places in the sorted order, those in `_rest` left out."""
        size, ranks, width = self._size, self._ranks, self._tuple
        step, within = np.divmod(positions, size)
        steps, here = np.unique(step, return_inverse=True)
        tuples = np.stack([level * self._count + tuples(steps) for level, tuples in enumerate(self._tuples)], axis=1)
        row, rank = np.divmod(within, ranks)
        turned = self._shuffles(np.zeros_like(steps), np.full_like(steps, ranks), -1 - steps)
        rank = (rank + turned[here]) % ranks
        rank = np.where(self._backwards(tuples)[here, row], ranks - 1 - rank, rank)
        level, member = np.divmod(row * ranks + rank, width)
        number = tuples[here, level]
        first, mixed = self._first[number], self._mixed[number]
        return first * width + mixed * member + self._shuffles(number - first, mixed, first * width + member)

    def _backwards(self, tuples: Indices) -> npt.NDArray[np.bool_]:
        """Which rows of each step go from dear to cheap. In: the tuples of each step, shape (steps, levels)."""
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


def checked_costs(costs: Any, length: int) -> npt.NDArray[np.float64]:
    """The costs of ``length`` samples as float64, shape (length,).

    Raises:
        TypeError: they are no numbers.
        ValueError: they are others than `CostSampler` takes.
    """
    given = [costs(index) for index in range(length)] if callable(costs) else costs
    try:
        array = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise TypeError("costs must be numbers, one for each sample, or a function of the index") from None
    if array.shape != (length,):
        raise ValueError(
            f"costs have shape {array.shape}, but the dataset has {length} samples: give one number for each"
        )
    wrong = np.flatnonzero(~((array > 0) & (array < np.inf)))
    if len(wrong):
        raise ValueError(
            f"the cost of sample {wrong[0]} is {array[wrong[0]]}: costs are finite numbers above 0, such as lengths: "
            "give a small one, or leave the sample out"
        )
    return array
