"""A shuffle of any size is a permutation, looks random, and is a pure function of its key."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import RandomSampler
from sharded_loader.randomness import shuffle
from sharded_loader.randomness.shuffle import composed, taken
from sharded_loader.sampling.tables import BLOCK, checksum_of


def chi_square_z(counts: np.ndarray) -> float:
    """How many standard deviations the counts are from uniform."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@given(length=st.integers(1, 3000), key=st.integers())
def test_bijection_reaches_every_index_once(length: int, key: int) -> None:
    values = shuffle.Bijection(length, key)(np.arange(length, dtype=np.uint64))
    assert values.dtype == np.int64
    assert sorted(values.tolist()) == list(range(length))


@given(length=st.integers(0, 3000), key=st.integers())
def test_shuffled_reaches_every_index_once(length: int, key: int) -> None:
    assert sorted(shuffle.shuffled(length, key).tolist()) == list(range(length))


@pytest.mark.parametrize("in_memory", [2**24, 0])
@pytest.mark.parametrize("length", [0, 1, 2, 1000, BLOCK + 5])
def test_the_order_is_the_same_from_any_position(monkeypatch: pytest.MonkeyPatch, in_memory: int, length: int) -> None:
    monkeypatch.setattr(shuffle, "IN_MEMORY", in_memory)
    sampler = RandomSampler(length, seed=3)
    whole = list(sampler.iter_epoch(2))
    assert sorted(whole) == list(range(length))
    for start in {0, 1, length // 2, max(length - 1, 0), length, length + 7}:
        assert list(sampler.iter_epoch(2, start)) == whole[start:]


@pytest.mark.parametrize("length", [2**24 + 1, 10**12, 2**62 - 1, 2**62])
def test_huge_shuffles_start_anywhere_at_once(length: int) -> None:
    sampler = RandomSampler(length, seed=1)
    assert len(sampler) == length
    tail = list(sampler.iter_epoch(0, length - 5))
    assert len(set(tail)) == 5
    assert all(0 <= index < length for index in tail)
    middle = length // 2
    ahead = list(itertools.islice(sampler.iter_epoch(0, middle), 10))
    assert ahead[4:] == list(itertools.islice(sampler.iter_epoch(0, middle + 4), 6))
    assert ahead != list(itertools.islice(sampler.iter_epoch(1, middle), 10))


@pytest.mark.parametrize("length", [2**25, 2**25 + 1, 10**8 + 7, 10**12, 2**61 + 3])
def test_bijection_shows_no_structure_between_neighbours(length: int) -> None:
    values = shuffle.Bijection(length, "structure")(np.arange(100_000, dtype=np.uint64))
    place = values / length
    assert abs(chi_square_z(np.histogram(place, bins=256, range=(0, 1))[0])) < 6
    assert abs(chi_square_z(np.bincount(values & 255, minlength=256))) < 6
    for distance in (1, 2, 16, 256, 4096):
        difference = (place[distance:] - place[:-distance]) % 1
        assert abs(chi_square_z(np.histogram(difference, bins=256, range=(0, 1))[0])) < 6
        low_bits = (values[distance:] ^ values[:-distance]) & 255
        assert abs(chi_square_z(np.bincount(low_bits, minlength=256))) < 6
        assert abs(np.corrcoef(place[distance:], place[:-distance])[0, 1]) < 0.02


@pytest.mark.costly
@pytest.mark.parametrize("make", ["bijection", "shuffled"])
def test_over_many_keys_every_index_comes_everywhere_equally_often(make: str) -> None:
    length, keys = 21, 1500
    counts = np.zeros((length, length), dtype=np.int64)
    places = np.arange(length)
    fixed_points = 0
    for key in range(keys):
        if make == "bijection":
            order = shuffle.Bijection(length, key)(places.astype(np.uint64))
        else:
            order = shuffle.shuffled(length, key)
        counts[places, order] += 1
        fixed_points += int((order == places).sum())
    assert abs(chi_square_z(counts.ravel())) < 6
    # A random permutation has one fixed point on average, whatever its length.
    assert fixed_points / keys == pytest.approx(1, abs=0.15)


# -- many shuffles at once ---------------------------------------------------------------------------------------------


def windows(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each position of windows of these lengths, with the length and the number of its window."""
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
    return positions, np.repeat(lengths, lengths), np.repeat(np.arange(len(lengths)), lengths)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=9), key=st.integers())
def test_many_shuffles_at_once_each_reach_every_index_once(lengths: list[int], key: int) -> None:
    positions, of_each, numbers = windows(lengths)
    mixed = shuffle.Bijections(key)(positions, of_each, numbers)
    assert mixed.dtype == np.int64
    for number, length in enumerate(lengths):
        assert sorted(mixed[numbers == number].tolist()) == list(range(length))


def test_a_shuffle_among_many_is_the_same_alone() -> None:
    lengths = [5, 1000, 1, 17, 64]
    positions, of_each, numbers = windows(lengths)
    shuffles = shuffle.Bijections("alone")
    mixed = shuffles(positions, of_each, numbers)
    for number in range(len(lengths)):
        here = numbers == number
        assert shuffles(positions[here], of_each[here], numbers[here]).tolist() == mixed[here].tolist()


@pytest.mark.parametrize("length", [2, 3, 21, 64])
def test_over_many_numbers_every_index_comes_everywhere_equally_often(length: int) -> None:
    count = 3000
    positions = np.tile(np.arange(length), count)
    numbers = np.repeat(np.arange(count) * 7919, length)
    mixed = shuffle.Bijections("spread")(positions, np.full(len(positions), length), numbers)
    seen = np.zeros((length, length), dtype=np.int64)
    np.add.at(seen, (positions, mixed), 1)
    assert abs(chi_square_z(seen.ravel())) < 6
    orders = mixed.reshape(count, length)
    assert (orders == np.arange(length)).sum() / count == pytest.approx(1, abs=0.15)
    if length == 3:  # all six orders, equally often
        assert abs(chi_square_z(np.unique(orders, axis=0, return_counts=True)[1])) < 6
        assert len(np.unique(orders, axis=0)) == 6
    if length == 64:  # windows do not resemble their neighbours
        assert abs(chi_square_z(np.bincount((orders[1:] - orders[:-1]).ravel() % length))) < 6


@pytest.mark.parametrize("length", range(2, shuffle.FEW + 1))
def test_all_orders_of_few_indices_are_equally_likely(length: int) -> None:
    count, orders = 40_000, math.factorial(length)
    of_each = np.full(count * length, length)
    mixed = shuffle.Bijections("few")(np.tile(np.arange(length), count), of_each, np.repeat(np.arange(count), length))
    seen = np.zeros(orders, np.int64)
    found = np.unique(mixed.reshape(count, length), axis=0, return_counts=True)[1]
    seen[: len(found)] = found
    assert abs(chi_square_z(seen)) < 5
    assert sorted(set(mixed.tolist())) == list(range(length))


@pytest.mark.parametrize("length", [1000, 2**14, 160_000, 2**33 + 1])
def test_windows_show_no_structure_between_neighbours(length: int) -> None:
    count = min(length, 100_000)
    values = shuffle.Bijections("structure")(np.arange(count), np.full(count, length), np.full(count, 12345))
    place = values / length
    for distance in (1, 2, 16, 256):
        difference = (place[distance:] - place[:-distance]) % 1
        assert abs(chi_square_z(np.histogram(difference, bins=64, range=(0, 1))[0])) < 6
        assert abs(np.corrcoef(place[distance:], place[:-distance])[0, 1]) < 0.12


def test_uniforms_fill_the_unit_interval() -> None:
    draws = shuffle.uniforms(50_000, "uniform")
    assert draws.dtype == np.float64
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(chi_square_z(np.histogram(draws, bins=100, range=(0, 1))[0])) < 6


def test_a_random_number_depends_on_its_position_alone() -> None:
    draws = shuffle.uniforms_at("draws")
    positions = np.array([0, 10**15, 7, 2**62 - 1])
    assert draws(positions).tolist() == [float(draws(positions[i : i + 1])[0]) for i in range(4)]
    for stride in (1, 2, 64, 4096, 2**32):
        found = draws(np.arange(50_000) * stride)
        assert 0 <= found.min() < found.max() < 1
        assert abs(chi_square_z(np.histogram(found, bins=100, range=(0, 1))[0])) < 6
        for lag in (1, 2, 16, 4096):
            assert abs(chi_square_z(np.histogram((found[lag:] - found[:-lag]) % 1, bins=64, range=(0, 1))[0])) < 6


def test_the_order_is_the_same_in_every_release() -> None:
    """A resumed run may meet a newer version of this library, NumPy or Python."""
    assert list(RandomSampler(8, seed=7)) == PINNED_SMALL
    assert list(itertools.islice(RandomSampler(10**12, seed=7), 3)) == PINNED_LARGE
    windows = shuffle.Bijections(7, "pinned")(np.arange(4), np.full(4, 1000), np.array([0, 0, 1, 1]))
    assert windows.tolist() == PINNED_WINDOWS


PINNED_SMALL = [3, 5, 7, 2, 6, 4, 1, 0]
PINNED_LARGE = [885393042808, 368485720333, 767832743092]
PINNED_WINDOWS = [784, 937, 747, 31]


# -- the indices of parts, and of parts of parts -----------------------------------------------------------------------


def test_taken_is_plain_indexing() -> None:
    where = np.array([3, 0, 3])
    for indices in (np.array([5, 6, 7, 8]), range(5, 9), range(20, 0, -5)):
        assert taken(indices, where).tolist() == [indices[3], indices[0], indices[3]]


def selections(draw: Any, length: int) -> Any:
    """Some indices below ``length``: a range, or an array."""
    if draw(st.booleans()) or not length:
        return np.array(draw(st.lists(st.integers(0, length - 1), max_size=9)) if length else [], np.int64)
    return range(length)[draw(st.slices(length))]


@given(st.data())
def test_a_part_of_a_part_of_a_part_is_plain_indexing(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40))
    found: Any = range(length)
    wanted = list(found)
    for _ in range(data.draw(st.integers(1, 4))):
        inner = selections(data.draw, len(found))
        found, wanted = composed(found, inner), [wanted[index] for index in inner]
        assert list(map(int, found)) == wanted and len(found) == len(wanted)
        assert taken(found, np.arange(len(found))).tolist() == wanted


def test_checksums_of_long_ranges_are_the_same_in_every_release() -> None:
    """The order of `SubsetRandomSampler` over them, and saved states, depend on it."""
    assert checksum_of(range(0, 10**12, 2)) == zlib.crc32(b"range(0, 1000000000000, 2)")
