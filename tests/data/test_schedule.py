"""The schedule of a mixture: exact shares after every prefix, for every seed, and samples found in constant time."""

import math
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader.data.schedule import MOST, Schedule, whole_numbers

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)
SEEDS = st.integers(-(2**70), 2**70)


def first(schedule, count):
    return [schedule.at(position)[0] for position in range(count)]


def assert_exact(schedule, count):
    """After each of the first ``count`` samples, every source is less than one sample from its share."""
    weights = np.array([schedule.weights[source] for source in schedule.sources])
    total = weights.sum()
    sources, _ = schedule.at_many(np.arange(count))
    given = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    prefix = np.arange(1, count + 1)[:, None]
    assert (np.abs(given * total - prefix * weights) < total).all()


@given(WEIGHTS, SEEDS)
def test_after_every_prefix_each_source_is_less_than_one_sample_from_its_share(weights, seed):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    assert_exact(schedule, 2 * len(schedule.owners) + 3)


@settings(max_examples=20)  # most of them have the longest period
@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=5).filter(any), SEEDS)
def test_any_weights_give_exact_shares_of_whole_numbers_that_are_near_to_them(weights, seed):
    counts = whole_numbers(weights, len(weights))
    assert sum(counts) <= MOST and math.gcd(*counts) == 1
    total = sum(map(Fraction, weights))
    for weight, count in zip(weights, counts, strict=True):
        assert (count > 0) == (weight > 0)
        assert abs(Fraction(count, sum(counts)) - Fraction(weight) / total) <= Fraction(len(weights), MOST)
    assert_exact(Schedule(counts, seed), sum(counts))


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        (None, [1, 1, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([0.1 + 0.2, 0.3, 0.4], [3, 3, 4]),  # 0.1 + 0.2 is not 0.3 to the last bit
        ([10, 20, 0], [1, 2, 0]),
        ([5e-324, 5e-324, 0], [1, 1, 0]),
        ([1.7e308, 1.7e308, 1.7e308], [1, 1, 1]),
        ([Fraction(1, 7), Fraction(2, 7), 1], [1, 2, 7]),
        ([Decimal("0.1"), 0.2, 1], [1, 2, 10]),
        (np.array([3, 2, 1]), [3, 2, 1]),
        (np.array([0.5, 0.25, 0.25], np.float32), [2, 1, 1]),
        (torch.tensor([0.5, 0.25, 0.25]), [2, 1, 1]),
        ([65_533, 2, 1], [65_533, 2, 1]),
        ([10**9, 1, 1e-300], [65_534, 1, 1]),  # each is read, however rarely
    ],
)
def test_weights_become_the_smallest_whole_numbers_of_their_ratio(weights, counts):
    assert whole_numbers(weights, 3) == counts


def test_other_weights_are_rounded_to_65536ths_by_largest_remainder():
    assert whole_numbers([2**0.5, 1], 2) == [19_195, 13_573]  # half of 38,390.0 and 27,146.0
    assert whole_numbers([math.pi, math.e, 1], 3) == [30_013, 25_969, 9_554]  # 30,013.29, 25,969.18 and 9,553.53


@given(WEIGHTS, SEEDS, st.integers(0, 10**15))
def test_a_position_far_away_costs_the_same_and_is_right(weights, seed, periods):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    length = len(schedule.owners)
    for slot in range(length):
        source, number = schedule.at(slot)
        count = schedule.weights[schedule.sources[source]]
        assert schedule.at(periods * length + slot) == (source, periods * count + number)
        assert schedule.position(source, periods * count + number) == periods * length + slot


@given(WEIGHTS, SEEDS)
def test_the_samples_of_each_source_come_in_order_without_a_gap(weights, seed):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    sources, numbers = schedule.at_many(np.arange(3 * len(schedule.owners)))
    for source in range(len(schedule.sources)):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == [*map(schedule.at, range(len(sources)))]


def test_the_seed_decides_who_comes_first_and_nothing_else_does():
    assert {Schedule([1, 1], seed).at(0)[0] for seed in range(20)} == {0, 1}
    assert len({tuple(first(Schedule([1] * 4, seed), 4)) for seed in range(200)}) == 24
    assert first(Schedule([3, 2, 1], 5), 6) == [0, 1, 0, 2, 1, 0]  # the same in every release: runs are resumed


@pytest.mark.parametrize("count", [1, 256, 257, MOST])
def test_up_to_65536_sources_fit(count):
    schedule = Schedule(whole_numbers(None, count), 0)
    assert schedule.owners.itemsize == (1 if count <= 256 else 2)
    assert Counter(schedule.owners.tolist()) == dict.fromkeys(range(count), 1)
    assert schedule.position(count - 1, 7) // count == 7


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, 2], "2 weights for 3 datasets: give one weight per dataset"),
        ([], "0 weights for 3 datasets"),
        ([1, -1, 1], r"weights=\[1, -1, 1\]\): give a list of finite numbers of 0 or more"),
        ([1, float("nan"), 1], "finite numbers of 0 or more"),
        ([1, float("inf"), 1], "finite numbers of 0 or more"),
        ([1, None, 1], "finite numbers of 0 or more"),
        ("123", "weights='123'"),
        (5, r"weights=5\): give a list"),
        ([0, 0.0, 0], "all weights are 0: give at least one dataset a positive weight"),
    ],
)
def test_weights_that_do_not_fit_are_rejected(weights, said):
    with pytest.raises(ValueError, match=said):
        whole_numbers(weights, 3)


def test_more_sources_than_slots_are_rejected():
    with pytest.raises(ValueError, match="65,537 datasets have a weight: give at most 65,536"):
        whole_numbers(None, MOST + 1)
