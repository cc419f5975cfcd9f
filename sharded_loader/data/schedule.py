"""`Schedule`: which of several sources gives each sample of a mixture, exact at every position.

    whole_numbers(weights) -> Schedule(weights, seed)
    position n <-> (source, number of the sample among those of the source)

The schedule repeats. Its period is the sum of the whole numbers, at most 65,536. Sample j of a source with the share p
may stand at the positions ``floor(j / p)`` to ``ceil((j + 1) / p) - 1``. At each position the schedule takes, among the
samples that may stand there, the one whose last position comes first. This keeps every sample in its range. So after n
samples, a source has given less than one sample more or less than ``p * n``. This holds however ties are decided, so
the seed decides them.

Example: the shares 1/2, 1/3 and 1/6 give the period 6 and, with one seed, the order 0 1 0 2 1 0.

What can go wrong: weights that are no finite numbers of 0 or more, or all 0 (ValueError that says what to give).

Source of the idea: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from heapq import heappop, heappush
from typing import Any

import numpy as np

from sharded_loader.data.bulk import Int64s
from sharded_loader.rng import philox

MOST = 65_536
"""The longest period. It takes up to 6 bytes per position and is made in 0.1 s."""


def whole_numbers(weights: Iterable[Any] | None, count: int) -> list[int]:
    """Whole numbers in the ratio of the weights, with a sum of up to `MOST`.

    Args:
        weights: numbers of 0 or more; None: equal ones.
        count: the number of weights that are needed.

    Returns:
        The smallest ones, where a sum of up to `MOST` keeps the ratio. Otherwise the ratio is rounded to 65,536ths, and
        a positive weight is at least one of them.

    Raises:
        ValueError: weights that do not fit.

    Example:
        >>> whole_numbers([0.5, 1 / 3, 0], 3), whole_numbers([10**9, 1], 2)
        ([3, 2, 0], [65535, 1])
    """
    if weights is None:
        weights = [1] * count
    wrong = ValueError(f"interleave(weights={weights!r}): give a list of finite numbers of 0 or more")
    try:
        found = [_fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):
        raise wrong from None
    if any(weight < 0 for weight in found):
        raise wrong
    if len(found) != count:
        raise ValueError(f"interleave: {len(found)} weights for {count} datasets: give one weight per dataset")
    positive = sum(map(bool, found))
    if not positive:
        raise ValueError("interleave: all weights are 0: give at least one dataset a positive weight")
    if positive > MOST:
        raise ValueError(f"interleave: {positive:,} datasets have a weight: give at most {MOST:,}, or join some first")
    total = sum(found)
    shares = [weight / total for weight in found]
    period = math.lcm(*(share.denominator for share in shares))
    return [int(share * period) for share in shares] if period <= MOST else _rounded(shares)


def _fraction(weight: Any) -> Fraction:
    """A weight as it was meant: 0.1 is 1/10."""
    if isinstance(weight, (str, bytes)):
        raise TypeError
    exact = Fraction(weight if isinstance(weight, (int, Fraction, Decimal)) else float(weight))
    near = exact.limit_denominator(MOST)
    return near if abs(near - exact) * 2**50 <= exact else exact  # not further than some roundings of a float


def _rounded(shares: list[Fraction]) -> list[int]:
    """Shares as 65,536ths, by largest remainder; ties go to the earlier source."""
    counts = [int(share * MOST) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * MOST)
    for i in by_remainder[: MOST - sum(counts)]:
        counts[i] += 1
    for i, share in enumerate(shares):
        if share and not counts[i]:  # a source with a weight is read, however rarely
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    common = math.gcd(*counts)
    return [count // common for count in counts]


class Schedule:
    """Which source gives the sample at each position. Sources are counted without those of weight 0.

    Example:
        >>> schedule = Schedule([2, 0, 1], seed=0)
        >>> schedule.owners.tolist(), schedule.sources, schedule.at(3)
        ([0, 0, 1], [0, 2], (0, 2))
    """

    def __init__(self, weights: list[int], seed: int) -> None:
        self.weights, self.seed = weights, seed
        self.sources = [number for number, weight in enumerate(weights) if weight]
        self._counts = counts = np.array([weights[number] for number in self.sources], np.int64)
        kind = np.uint8 if len(counts) <= 256 else np.uint16
        self.owners = owners = np.array(_earliest_deadline_first(counts.tolist(), seed), kind)
        slots = np.argsort(owners, kind="stable")  # of source 0, then of source 1, ...
        self._starts = np.cumsum(counts) - counts
        self._before = np.empty(len(owners), np.uint16)  # how many samples of its source a slot has before it
        self._before[slots] = np.arange(len(owners)) - np.repeat(self._starts, counts)
        self._slots = slots.astype(np.uint16)

    def at(self, position: int) -> tuple[int, int]:
        """The source at a position, and the number of the sample among those of the source."""
        period, slot = divmod(position, len(self.owners))
        source = int(self.owners[slot])
        return source, period * int(self._counts[source]) + int(self._before[slot])

    def at_many(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The same of many positions."""
        periods, slots = np.divmod(positions, len(self.owners))
        sources = self.owners[slots].astype(np.int64)
        return sources, periods * self._counts[sources] + self._before[slots]

    def position(self, source: int, number: int) -> int:
        """Where this sample of a source stands."""
        period, rest = divmod(number, int(self._counts[source]))
        return period * len(self.owners) + int(self._slots[self._starts[source] + rest])


def _earliest_deadline_first(counts: list[int], seed: int) -> list[int]:
    """The sources at the slots of one period."""
    period, width = sum(counts), len(counts)
    order = np.argsort(philox(seed, "interleave").bit_generator.random_raw(width), kind="stable")
    ranks = np.argsort(order)
    jobs = []  # (first slot, last slot and rank in one number, so that the smallest comes first)
    for count, rank in zip(counts, ranks.tolist(), strict=True):
        jobs += [(j * period // count, -(-(j + 1) * period // count) * width + rank) for j in range(count)]
    jobs.sort(reverse=True)
    ready: list[int] = []
    ranked = []
    for slot in range(period):
        while jobs and jobs[-1][0] <= slot:
            heappush(ready, jobs.pop()[1])
        ranked.append(heappop(ready) % width)
    return order[ranked].tolist()  # type: ignore[no-any-return]
