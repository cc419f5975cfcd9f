"""`Plan`: which source yields each sample of a mixture, and which of its samples.

    changes_of(weights) -> Plan(changes, seed, sizes)        weights that may change, sources that may drop out
    Schedule(weights, seed, level, begin, before)            one segment: constant weights from a position on
    position n <-> (source, number of the sample within the source)

Each source has an interval of the numbers below 2^32, proportional to its weight. Position n belongs to the source
whose interval contains ``(start + n * step) mod 2^32``. The step is close to 2^32 times an irrational number, so every
n-th position visits all intervals evenly. A rank that reads every n-th sample has the shares of the whole. As the step
is odd, the schedule repeats after 2^32 positions. The number of earlier samples of a source is a difference of two sums
of ``floor((step * k + b) / 2^32)``, which a Euclidean algorithm computes in up to 28 steps at any position.

Maximum deviation from the share, over 60,000 samples and weights such as 5, 3, 2: 4 samples. Among every n-th sample: 8
for n up to 16, 13 for powers of 2, 26 for n up to 64, 131 for n up to 1,000 (n = 239). In random order: 130.

Source of the idea: H. Weyl, "Über die Gleichverteilung von Zahlen mod. Eins", 1916; the sum is ``floor_sum`` of the
AtCoder Library.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.extend import Array, Int64s
from sharded_loader.extend.data import apportioned
from sharded_loader.extend.order import philox

FIRST = "first_exhausted"
ALL = "all_exhausted"
EACH = "each_once"
"""Ends of a mixture, see `interleave`."""

MOST = 65_536
"""Maximum sum of the whole-number weights, so that the shortest interval has 65,536 numbers."""

MOST_EACH_ONCE = 500
"""Maximum number of sources that can drop out. A plan has a segment for each, which takes 20 ms in total."""

FAR = 1 << 62
"""Beyond all positions."""

CIRCLE = 1 << 32
"""Size for which products in `_floor_sum` fit into 63 bits."""

STEPS = (1_257_966_797, 3_144_134_277, 2_654_435_769)
"""Odd numbers next to ``(1 - sqrt(1/2)) * 2^32``, ``(sqrt(3) - 1) * 2^32`` and ``(sqrt(5) - 1) / 2 * 2^32``, for each
level of nested mixtures. With one step for all levels, a rank reads an inner mixture of 1:1:1 up to 94 of 1,000 samples
off its shares. With these it is up to 30, as in random order. Strides after which the first one nearly repeats are 3,
7, 17, 41,
99, 239: few rank counts are multiples of the large ones. For sqrt(3), they are 15, 56, 209."""

MOST_OFF = 168
"""More than any source is off its share, at any position: more than twice the sum of the partial quotients of the
continued fraction of a step / 2^32 (83, 58, 74; inequality of Denjoy and Koksma)."""


def whole_numbers(weights: Any, count: int, name: str = "interleave", place: str = "") -> list[int]:
    """Convert weights to the smallest whole numbers in their ratio, with a sum of up to `MOST`.

    If that is impossible, the ratio is rounded to 65,536ths; positive weights stay positive. Raises a ValueError
    unless the weights are ``count`` finite numbers from 0, and not all 0.

    Example:
        >>> whole_numbers([0.5, 1 / 3, 0], 3), whole_numbers([10**9, 1], 2)
        ([3, 2, 0], [65535, 1])
    """
    try:
        found = [_fraction(weight) for weight in ([1] * count if weights is None else weights)]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}(weights={weights!r}){place}: give a list of finite numbers of 0 or more") from None
    if len(found) != count:
        raise ValueError(f"{name}: {len(found)} weights for {count} datasets{place}: give one weight per dataset")
    if not 0 < (positive := sum(map(bool, found))) <= MOST:
        text = f"{name}: {positive:,} datasets have a weight above 0{place}"
        raise ValueError(f"{text}: give at least one dataset such a weight, and at most {MOST:,}, or join some first")
    total = sum(found)
    shares = [weight / total for weight in found]
    size = min(MOST, math.lcm(*(share.denominator for share in shares)))
    counts = apportioned(size, [share * size for share in shares])  # exact below MOST; ties go to the earlier source
    for i, share in enumerate(shares):
        if share and not counts[i]:  # positive weights stay positive
            counts[counts.index(max(counts))] -= 1
            counts[i] = 1
    common = math.gcd(*counts)
    return [count // common for count in counts]


class Change(NamedTuple):
    """Weights, as whole numbers, that hold from the position ``begin`` on."""

    begin: int
    weights: list[int]


def changes_of(weights: object, count: int) -> list[Change]:
    """Parse weights, or a schedule of them, to ascending changes, the first at position 0; raise ValueError if invalid.

    Example:
        >>> changes_of([3, 1], 2), changes_of([(0, [1, 1]), (100, [0.9, 0.1])], 2)[1]
        ([Change(begin=0, weights=[3, 1])], Change(begin=100, weights=[9, 1]))
    """
    weights = list(weights.items()) if isinstance(weights, Mapping) else weights
    if not isinstance(weights, (list, tuple)) or not any(isinstance(one, (list, tuple)) for one in weights):
        return [Change(0, whole_numbers(weights, count))]
    changes: list[Change] = []
    for number, one in enumerate(weights):
        name = f"interleave: weights[{number}]"
        if not isinstance(one, (list, tuple)) or len(one) != 2 or not isinstance(one[0], (int, np.integer)):
            raise ValueError(f"{name} is {one!r}: in a schedule, give pairs (sample, weights), such as (1000, [3, 1])")
        begin, before = int(one[0]), changes[-1].begin if changes else -1
        if not before < begin < FAR or (begin and not changes):
            where = f"after {before}" if changes else "and is the first one"
            raise ValueError(f"{name} begins at sample {begin}, {where}: a schedule begins at 0, and must not go back")
        changes.append(Change(begin, whole_numbers(one[1], count, place=f" from sample {begin} on")))
    return changes


def _fraction(weight: Any) -> Fraction:
    """Convert a weight to the fraction that was meant: 0.1 is 1/10."""
    if isinstance(weight, (str, bytes)):
        raise TypeError
    exact = Fraction(weight if isinstance(weight, (int, Fraction, Decimal)) else float(weight))
    if exact < 0:
        raise ValueError
    near = exact.limit_denominator(MOST)
    return near if abs(near - exact) * 2**50 <= exact else exact  # within a few roundings of a float


class Schedule:
    """Mapping from positions to sources with constant weights.

    Args:
        weights: whole numbers, one per source.
        seed: decides the start and the order of the intervals.
        level: depth of nested mixtures below this one.
        begin: position from which it holds.
        before: number of samples of each source before ``begin``, kept; by default as if it held from 0 on.

    Example:
        >>> schedule = Schedule([2, 0, 1], seed=0)
        >>> [schedule.owner(position) for position in range(6)], schedule.at(3)
        ([2, 0, 0, 0, 2, 0], (0, 2))
    """

    def __init__(
        self, weights: list[int], seed: int, level: int = 0, begin: int = 0, before: Int64s | None = None
    ) -> None:
        self.weights, self.begin, self._step = weights, begin, STEPS[level % len(STEPS)]
        sources = np.flatnonzero(weights)
        start, *raw = philox(seed, "interleave").bit_generator.random_raw(1 + len(sources)).tolist()
        order = sources[np.argsort(raw, kind="stable")]  # of their intervals
        parts, whole = accumulate((weights[source] for source in order), initial=0), sum(weights)
        edges = np.array([CIRCLE * int(part) // whole for part in parts])
        self._start, self._order, self._ends = start % CIRCLE, order, edges[1:]
        self._bounds = np.zeros((2, len(weights)), np.int64)  # begin and end of each source's interval
        self._bounds[:, order] = edges[:-1], edges[1:]
        self._offset = np.zeros(len(weights), np.int64)  # added to sample numbers
        self.before = self.counts(begin) if before is None else before
        self._offset = self.before - self.counts(begin)
        self._lists: tuple[list[int], list[int], list[list[int]], list[int]]  # faster for one position
        self._lists = self._ends.tolist(), order.tolist(), self._bounds.T.tolist(), self._offset.tolist()

    def owner(self, position: int) -> int:
        return self._lists[1][bisect(self._lists[0], (self._start + position * self._step) % CIRCLE)]

    def at(self, position: int) -> tuple[int, int]:
        """Return the source at a position, and the number of the sample within the source."""
        source, (period, slot) = self.owner(position), divmod(position, CIRCLE)
        begin, end = self._lists[2][source]
        return source, period * (end - begin) + self._before_one(slot, begin, end) + self._lists[3][source]

    def position(self, number: int, source: int) -> int:
        """Return the position of a sample."""
        begin, end = self._lists[2][source]
        period, rest = divmod(number - self._lists[3][source], end - begin)
        before = partial(self._before_one, begin=begin, end=end)
        low, high = (CIRCLE * (rest + off) // (end - begin) for off in (-MOST_OFF, MOST_OFF))
        near = range(max(low, 0), min(high, CIRCLE) + 1)
        return period * CIRCLE + near[bisect(near, rest, key=before) - 1]

    def _before_one(self, slot: int, begin: int, end: int) -> int:
        shift = self._start + CIRCLE
        return int(_floor_sum(self._step, slot, shift - begin) - _floor_sum(self._step, slot, shift - end))

    def owners(self, positions: Int64s) -> Int64s:
        slots = (positions % CIRCLE).astype(np.uint64)
        points = (np.uint64(self._start) + slots * np.uint64(self._step)) % np.uint64(CIRCLE)
        found: Int64s = self._order[np.searchsorted(self._ends, points.astype(np.int64), side="right")]
        return found

    def at_many(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        sources = self.owners(positions)
        return sources, self._before(positions, sources)

    def counts(self, position: int) -> Int64s:
        """Return the number of samples of each source before a position."""
        sources = np.arange(len(self.weights))
        return self._before(np.full(len(sources), position), sources)

    def _before(self, positions: Int64s, sources: Int64s) -> Int64s:
        """Return the number of samples of a source before a position, for many pairs of them."""
        slots, bounds = positions % CIRCLE, self._bounds[:, sources]
        shifts = self._start + CIRCLE - bounds
        sums = _floor_sum(self._step, np.stack([slots, slots]).astype(np.uint64), shifts.astype(np.uint64))
        within = (sums[0] - sums[1]).astype(np.int64)  # both are exact modulo 2^64
        before: Int64s = positions // CIRCLE * (bounds[1] - bounds[0]) + within + self._offset[sources]
        return before


class Plan:
    """Mapping from positions to sources where weights change, or sources drop out after their last sample.

    It is a ValueError if only sources with weight 0 have samples left.

    Args:
        changes: from `changes_of`.
        seed, level: as for `Schedule`.
        sizes: number of samples of each source, after which it drops out; by default none does. A source without a
            weight at any position is never read.

    Attributes:
        sources: sources with a weight at some position; methods count only these.
        length: number of positions with ``sizes``, otherwise None.
        is_fixed: True if weights never change and no source drops out.
        weights: whole numbers for a state; if they change, with the positions in front of them.
        step: distinguishes levels of mixtures in a state.

    Example:
        >>> plan = Plan(changes_of([(0, [1, 1]), (4, [1, 0])], 2), seed=0)
        >>> [plan.owner(position) for position in range(8)]
        [1, 0, 0, 1, 0, 0, 0, 0]
        >>> Plan(changes_of([1, 1], 2), seed=0, sizes=[4, 1]).length
        5
    """

    def __init__(self, changes: list[Change], seed: int, level: int = 0, sizes: list[int] | None = None) -> None:
        self.seed, self.level, self.step = seed, level, STEPS[level % len(STEPS)]
        self.is_fixed = len(changes) == 1 and sizes is None
        whole = [number for one in changes for number in (one.begin, *one.weights)]
        self.weights = changes[0].weights if self.is_fixed else whole
        self.sources: list[int] = np.flatnonzero(np.any([one.weights for one in changes], axis=0)).tolist()
        self._limits = np.array([FAR if sizes is None else sizes[number] for number in self.sources], np.int64)
        if sizes is not None and len(sizes) > MOST_EACH_ONCE:
            text = f"interleave: {len(sizes)} datasets, of which each drops out at its end"
            raise ValueError(f"{text}: give up to {MOST_EACH_ONCE}, or join some first, with ConcatDataset")
        self.length = None if sizes is None else int(self._limits.sum())
        self.changes: list[Change] = []
        self._segments: list[Schedule] = []
        for change, end in zip(changes, [*(one.begin for one in changes[1:]), FAR], strict=True):
            self._add_segments(change, end)

    def changed(self, begin: int, weights: list[int]) -> Plan:
        """Return a plan with other weights from a position on, for sources that are in the plan."""
        twin = copy.copy(self)
        for number in np.flatnonzero(weights).tolist():
            if number not in self.sources:
                text = f"datasets[{number}] had the weight 0 when the mixture was made, and is never read"
                advice = f"if only from a far sample on: weights=[(0, [1, 0]), ({FAR - 1}, [1, 1])]"
                raise ValueError(f"{text}: give it a weight there, {advice}")
        twin.changes = [one for one in self.changes if one.begin < begin]
        twin._segments = [one for one in self._segments if one.begin < begin]
        twin._add_segments(Change(begin, weights), FAR)
        return twin

    def _add_segments(self, change: Change, end: int) -> None:
        self.changes = [*self.changes, change]
        begin, row = change.begin, np.array(change.weights)[self.sources]
        while begin < end and ((counts := self._counts(begin)) < self._limits).any():
            begin = self._add_segment(np.where(counts < self._limits, row, 0), counts, begin, end)
        self._begins = [segment.begin for segment in self._segments]

    def _counts(self, position: int) -> Int64s:
        """Return the number of samples of each source before a position in or beyond the last segment."""
        return self._segments[-1].counts(position) if self._segments else np.zeros(len(self.sources), np.int64)

    def _add_segment(self, weights: Int64s, counts: Int64s, begin: int, end: int) -> int:
        """Add a segment that ends at ``end``, or where a source is exhausted. Return its end."""
        sources = np.flatnonzero(weights)
        if not len(sources):
            number = self.sources[int(np.argmax(counts < self._limits))]
            text = f"interleave: at sample {begin}, only datasets with the weight 0 have samples left, such as"
            raise ValueError(f"{text} datasets[{number}]: give it a weight there, as each sample is to come once")
        schedule = Schedule(weights.tolist(), self.seed, self.level, begin, counts)
        self._segments.append(schedule)
        if self.length is not None:
            lasts = (self._limits - 1).tolist()
            first = sources[np.argmin((self._limits - counts)[sources] / weights[sources])]  # about
            end = min(end, 1 + schedule.position(lasts[first], first))
            for source in sources[(schedule.counts(end) >= self._limits)[sources]].tolist():
                end = min(end, 1 + schedule.position(lasts[source], source))
        return end

    @property
    def _fingerprint(self) -> str:
        """Weights, seed and first sources: the fingerprint of a mixture (`data.inspection`)."""
        weights = f"{self.seed}{self.weights[:16]}" if self.is_fixed else f"{self.changes[:16]}{self.seed}"
        return f"{weights}{list(map(self._segments[0].owner, range(128)))}"

    def owner(self, position: int, place: int | None = None) -> int:
        """Return the source at a position, by the segment that holds at ``place`` if that is given."""
        return self._segments[bisect(self._begins, position if place is None else place) - 1].owner(position)

    def at(self, position: int) -> tuple[int, int]:
        return self._segments[bisect(self._begins, position) - 1].at(position)

    def owners(self, positions: Int64s) -> Int64s:
        found = np.empty_like(positions)
        for segment, here in self._by_segment(positions):
            found[here] = segment.owners(positions[here])
        return found

    def at_many(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the sources at many positions, and the numbers of the samples within them."""
        found = np.empty((2, len(positions)), np.int64)
        for segment, here in self._by_segment(positions):
            found[:, here] = segment.at_many(positions[here])
        return found[0], found[1]

    def _by_segment(self, positions: Int64s) -> Iterator[tuple[Schedule, Array]]:
        """Yield the segments that contain positions, each with a mask of its positions."""
        where = np.searchsorted(self._begins, positions, side="right") - 1
        for each in np.unique(where).tolist():
            yield self._segments[each], where == each

    def position(self, number: int, source: int) -> float:
        """Return the position of a sample of a source; infinity if it never comes."""
        segment = self._segments[bisect(self._segments, number, key=lambda one: one.before[source]) - 1]
        return segment.position(number, source) if segment.weights[source] else math.inf


def _floor_sum(step: int, count: Any, shift: Any) -> Any:
    """Return the sum of ``(step * k + shift) // CIRCLE`` for k below ``count``; for uint64 arrays modulo 2^64.

    Example:
        >>> _floor_sum(5**13, 1000, 7) == sum((5**13 * k + 7) // CIRCLE for k in range(1000))
        True
    """
    some, total = np.any if isinstance(count, np.ndarray) else bool, 0 * count
    for quotient, factor, divisor in _divisions(step, CIRCLE):
        over = shift // divisor
        total = total + count * (count - 1) // 2 * quotient + count * over
        highest = factor * count + shift - over * divisor
        count = highest // divisor
        if not some(count):
            break
        shift = highest - count * divisor
    return total


@cache
def _divisions(factor: int, divisor: int) -> list[tuple[int, int, int]]:
    """Return quotient, rest and divisor of each step of the Euclidean algorithm."""
    quotient, rest = divmod(factor, divisor)
    return [(quotient, rest, divisor), *(_divisions(divisor, rest) if rest else [])]
