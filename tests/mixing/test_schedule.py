"""The schedule of a mixture: the shares hold for every n-th sample and every seed; samples are found without a walk."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader.mixing.schedule import CIRCLE, MOST, Schedule, whole_numbers

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)
SEEDS = st.integers(-(2**70), 2**70)


def furthest(schedule, positions):
    """How many samples a source is away from its share, at most, after any number of these positions."""
    weights = np.array(schedule.weights)
    sources, _ = schedule.at_many(positions)
    given = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, len(positions) + 1)[:, None] * (weights / weights.sum())
    return np.abs(given - shares).max()


@pytest.mark.costly(4)
@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1], [5, 3, 2], [7, 2, 1], [1000, 1], [13, 8, 5, 3, 2], [1] * 16])
def test_every_nth_sample_has_the_shares_of_the_whole_for_any_n(weights):
    schedule = Schedule(weights, 0)
    for limit, strides in (
        (5, [1]),
        (12, range(2, 17)),
        (10, [32, 64, 128]),
        (45, [17, 24, 41, 48, 56, 59, 60]),
        (80, [72, 99, 112]),
    ):
        for stride in strides:
            assert furthest(schedule, stride // 3 + stride * np.arange(5000)) < limit, stride


@given(WEIGHTS, SEEDS, st.integers(1, 64), st.integers(0, 10**15))
def test_a_rank_has_its_shares_from_any_position_on(weights, seed, stride, position):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    assert furthest(schedule, position + stride * np.arange(1000)) < 60


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=5).filter(any), SEEDS)
def test_any_weights_give_the_shares_of_whole_numbers_that_are_near_to_them(weights, seed):
    counts = whole_numbers(weights, len(weights))
    assert sum(counts) <= MOST and math.gcd(*counts) == 1
    total = sum(map(Fraction, weights))
    for weight, count in zip(weights, counts, strict=True):
        assert (count > 0) == (weight > 0)
        assert abs(Fraction(count, sum(counts)) - Fraction(weight) / total) <= Fraction(len(weights), MOST)
    assert furthest(Schedule(counts, seed), np.arange(MOST)) < 9


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


@pytest.mark.slow
@given(WEIGHTS, SEEDS, st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_a_sample_at_a_far_position_is_found_in_both_directions(weights, seed, positions):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    sources, numbers = schedule.at_many(np.array(positions))
    for position, source, number in zip(positions, sources.tolist(), numbers.tolist(), strict=True):
        assert schedule.at(position) == (source, number)
        assert schedule.owner(position) == source
        assert schedule.position(number, source) == position


@given(WEIGHTS, SEEDS, st.integers(0, 2**61))
def test_the_samples_of_each_source_come_in_order_without_a_gap(weights, seed, begin):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    for start in (0, begin, CIRCLE - 100):
        sources, numbers = schedule.at_many(start + np.arange(500))
        for source in set(sources.tolist()):
            own = numbers[sources == source]
            assert (own - own[0]).tolist() == list(range(len(own)))
            assert start or own[0] == 0
        few = list(zip(sources[::7].tolist(), numbers[::7].tolist(), strict=True))
        assert few == [schedule.at(start + n) for n in range(0, 500, 7)]


def test_2_to_the_32_samples_have_exactly_the_shares():
    schedule = Schedule([3, 0, 1], 5)
    assert [schedule.at(CIRCLE + n)[1] - schedule.at(n)[1] for n in range(4)] == [
        [CIRCLE * 3 // 4, 0, CIRCLE // 4][schedule.owner(n)] for n in range(4)
    ]


def test_the_seed_decides_who_comes_first_and_nothing_else_does():
    assert {Schedule([1, 1], seed).owner(0) for seed in range(20)} == {0, 1}
    always = [1, 0, 0, 1, 2, 0, 1, 2, 0, 0, 1, 0]  # the same in every release: runs are resumed
    assert [Schedule([3, 2, 1], 5).owner(position) for position in range(12)] == always


@pytest.mark.parametrize("count", [1, 2, pytest.param(MOST, marks=pytest.mark.slow)])
def test_up_to_65536_sources_fit(count):
    schedule = Schedule(whole_numbers(None, count), 0)
    assert set(schedule.at_many(np.arange(5 * count))[0].tolist()) == set(range(count))
