"""A shuffle of any size is a permutation, looks random, and is a pure function of its key."""

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


def is_uniform(values: np.ndarray, bins: int) -> bool:
    """Whether numbers from 0 to 1 are spread evenly."""
    return abs(chi_square_z(np.histogram(values, bins=bins, range=(0, 1))[0])) < 6


@given(lengths=st.lists(st.integers(1, 300) | st.integers(1, 3000), min_size=1, max_size=9), key=st.integers())
def test_shuffles_of_every_kind_reach_every_index_once(lengths: list[int], key: int) -> None:
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int64)
    of_each, numbers = np.repeat(lengths, lengths), np.repeat(np.arange(len(lengths)), lengths)
    shuffles = shuffle.Bijections(key)
    mixed = shuffles(positions, of_each, numbers)
    assert mixed.dtype == np.int64
    for number, length in enumerate(lengths):
        here = numbers == number
        assert shuffles(positions[here], of_each[here], numbers[here]).tolist() == mixed[here].tolist()  # alone
        single = shuffle.Bijection(length, key)(np.arange(length, dtype=np.uint64))
        assert single.dtype == np.int64
        for order in (mixed[here], single, shuffle.shuffled(length, key)):
            assert sorted(order.tolist()) == list(range(length))
    assert len(shuffle.shuffled(0, key)) == 0


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


def of_windows(length: int, count: int) -> np.ndarray:
    return shuffle.Bijections("structure")(np.arange(count), np.full(count, length), np.full(count, 12345))


@pytest.mark.parametrize(
    ("make", "length"),
    [
        *((None, length) for length in (2**25, 2**25 + 1, 10**8 + 7, 10**12, 2**61 + 3)),
        *((of_windows, length) for length in (1000, 2**14, 160_000, 2**33 + 1)),
    ],
)
def test_shuffles_show_no_structure_between_neighbours(make: Any, length: int) -> None:
    count = min(length, 100_000)
    values = make(length, count) if make else shuffle.Bijection(length, "structure")(np.arange(count, dtype=np.uint64))
    place = values / length
    if make is None:
        assert is_uniform(place, 256) and abs(chi_square_z(np.bincount(values & 255, minlength=256))) < 6
    for distance in (1, 2, 16, 256, 4096) if make is None else (1, 2, 16, 256):
        assert is_uniform((place[distance:] - place[:-distance]) % 1, 64 if make else 256)
        assert abs(np.corrcoef(place[distance:], place[:-distance])[0, 1]) < (0.12 if make else 0.02)
        if make is None:
            low_bits = (values[distance:] ^ values[:-distance]) & 255
            assert abs(chi_square_z(np.bincount(low_bits, minlength=256))) < 6


@pytest.mark.parametrize(
    ("make", "length"), [("bijection", 21), ("shuffled", 21), *(("windows", n) for n in (2, 21, 64))]
)
def test_over_many_keys_every_index_comes_everywhere_equally_often(make: str, length: int) -> None:
    places, count = np.arange(length), 1500
    if make == "windows":
        numbers = np.repeat(np.arange(count) * 7919, length)
        mixed = shuffle.Bijections("spread")(np.tile(places, count), np.full(count * length, length), numbers)
        orders = mixed.reshape(count, length)
    elif make == "bijection":
        orders = np.array([shuffle.Bijection(length, key)(places.astype(np.uint64)) for key in range(count)])
    else:
        orders = np.array([shuffle.shuffled(length, key) for key in range(count)])
    seen = np.zeros((length, length), dtype=np.int64)
    np.add.at(seen, (np.tile(places, count), orders.ravel()), 1)
    assert abs(chi_square_z(seen.ravel())) < 6
    # A random permutation has one fixed point on average, whatever its length.
    assert (orders == places).sum() / count == pytest.approx(1, abs=0.15)
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


def test_a_random_number_depends_on_its_position_alone() -> None:
    draws = shuffle.uniforms_at("draws")
    positions = np.array([0, 10**15, 7, 2**62 - 1])
    assert draws(positions).tolist() == [float(draws(positions[i : i + 1])[0]) for i in range(4)]
    for stride in (1, 2, 64, 4096, 2**32):
        found = draws(np.arange(50_000) * stride)
        assert 0 <= found.min() < found.max() < 1 and is_uniform(found, 100)
        for lag in (1, 2, 16, 4096):
            assert is_uniform((found[lag:] - found[:-lag]) % 1, 64)
    found = shuffle.uniforms(50_000, "uniform")
    assert found.dtype == np.float64 and 0 <= found.min() < found.max() < 1 and is_uniform(found, 100)


def test_the_order_is_the_same_in_every_release() -> None:
    """A resumed run may meet a newer version of this library, NumPy or Python."""
    assert list(RandomSampler(8, seed=7)) == [3, 5, 7, 2, 6, 4, 1, 0]
    assert list(itertools.islice(RandomSampler(10**12, seed=7), 3)) == [885393042808, 368485720333, 767832743092]
    windows = shuffle.Bijections(7, "pinned")(np.arange(4), np.full(4, 1000), np.array([0, 0, 1, 1]))
    assert windows.tolist() == [784, 937, 747, 31]
    # The order of `SubsetRandomSampler` over long ranges, and saved states, depend on their checksums.
    assert checksum_of(range(0, 10**12, 2)) == zlib.crc32(b"range(0, 1000000000000, 2)")


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
    where = np.array([3, 0, 3])
    for indices in (np.array([5, 6, 7, 8]), range(5, 9), range(20, 0, -5)):
        assert taken(indices, where).tolist() == [indices[3], indices[0], indices[3]]
