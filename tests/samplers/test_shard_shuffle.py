"""Shards in shuffled order, samples in a window of shards: complete, pure, the same for any number of ranks."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samplers_samples import after_steps, ranks_of, steps_of

from sharded_loader import Sampler, ShardedDataLoader, ShardShuffleSampler
from sharded_loader.sampling.own import ReplicaSampler

LENGTHS = st.one_of(
    st.lists(st.integers(0, 40), max_size=12), st.builds(np.broadcast_to, st.integers(0, 50), st.integers(0, 12))
)


def rank_of(sampler: Sampler[int], ranks: int, rank: int) -> ReplicaSampler:
    """What one of several ranks reads."""
    return ReplicaSampler(sampler, lambda: (ranks, rank))


def shards_of(indices: Sequence[int], lengths: Sequence[int]) -> np.ndarray[Any, Any]:
    """Which shard of the dataset each index lies in."""
    return np.searchsorted(np.cumsum(lengths), indices, side="right")


@given(
    lengths=LENGTHS,
    window=st.integers(1, 6),
    lanes=st.integers(1, 9),
    seed=st.integers(),
    epoch=st.integers(0, 9),
    step=st.integers(1, 50),
)
def test_every_index_comes_once_from_any_place(
    lengths: Any, window: int, lanes: int, seed: int, epoch: int, step: int
) -> None:
    sampler = ShardShuffleSampler(lengths, window, lanes, seed=seed)
    whole = list(sampler.iter_epoch(epoch))
    assert len(sampler) == len(whole) == sum(lengths) and sorted(whole) == list(range(len(whole)))
    assert all(type(index) is int for index in whole)
    for start in range(0, len(whole) + 2, step):
        assert list(sampler.iter_epoch(epoch, start)) == whole[start:]
    if whole:
        assert sampler.epoch_table(epoch).at(np.arange(0, len(whole), step)).tolist() == whole[::step]


@pytest.mark.parametrize("lengths", [[30] * 40, [30] * 39 + [7], list(range(10, 50)), [0, 30, 0, 0, 55, 1] * 7])
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("window", [1, 5])
def test_no_more_shards_are_at_hand_than_the_windows_hold(lengths: list[int], lanes: int, window: int) -> None:
    sampler = ShardShuffleSampler(lengths, window, lanes, seed=5)
    for epoch in range(3):
        found = shards_of(list(sampler.iter_epoch(epoch)), lengths)
        for lane in range(lanes):
            of_lane = found[lane::lanes].tolist()
            first = {shard: of_lane.index(shard) for shard in set(of_lane)}
            last = {shard: len(of_lane) - 1 - of_lane[::-1].index(shard) for shard in set(of_lane)}
            for position in range(len(of_lane)):
                assert sum(first[one] <= position <= last[one] for one in first) <= window


@pytest.mark.parametrize("lengths", [[25] * 64, np.broadcast_to(25, 64), [25] * 63 + [9]])
def test_ranks_that_divide_the_lanes_fetch_each_shard_once(lengths: Any) -> None:
    sampler = ShardShuffleSampler(lengths, window=4, lanes=16, seed=1)
    whole = list(sampler.iter_epoch(2))
    for ranks in (1, 2, 4, 16):
        parts = [list(rank_of(sampler, ranks, rank).iter_epoch(2)) for rank in range(ranks)]
        shards = [set(shards_of(part, lengths).tolist()) for part in parts]
        # A shard that lies across the border of two lanes is in both.
        assert sum(map(len, shards)) <= len(lengths) + (16 if len(whole) % (16 * 25) else 0)
        together = list(itertools.chain(*itertools.zip_longest(*parts)))
        assert together[: len(whole)] == whole
    one_lane = ShardShuffleSampler(lengths, window=64, lanes=1, seed=1)
    parts = [list(rank_of(one_lane, 4, rank).iter_epoch(2)) for rank in range(4)]
    assert sum(len(set(shards_of(part, lengths).tolist())) for part in parts) > 3.5 * len(lengths)


def test_shards_and_samples_are_both_shuffled() -> None:
    lengths = [100] * 50
    sampler = ShardShuffleSampler(lengths, window=5, seed=2)
    orders = []
    for epoch in (0, 1):
        found = np.array(list(sampler.iter_epoch(epoch)))
        window = found[700:1200]  # after windows of 1, 2 and 4 shards
        shards = set(shards_of(window, lengths).tolist())
        assert len(shards) == 5 and shards != set(range(7, 12))
        assert not (np.diff(window) > 0).all()
        # In the middle of a window, all of its shards come.
        assert len(set(shards_of(found[1400:1500], lengths).tolist())) == 5
        orders.append(found.tolist())
    assert orders[0] != orders[1]
    assert orders[0] != list(ShardShuffleSampler(lengths, window=5, seed=3).iter_epoch(0))
    assert orders[0] == list(ShardShuffleSampler(lengths, window=5, seed=2).iter_epoch(0))


@pytest.mark.parametrize(
    ("count", "window", "sizes"),
    [
        (20, 4, [1, 2, 4, 4, 4, 4, 1]),
        (16, 5, [1, 2, 4, 5, 4]),
        (20, 16, [1, 2, 4, 13]),
        (9, 8, [1, 8]),
        (8, 8, [8]),
        (5, 1, [1, 1, 1, 1, 1]),
        (3, 10**30, [3]),
    ],
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_the_windows_of_a_lane_grow(count: int, window: int, sizes: list[int], lanes: int) -> None:
    sampler = ShardShuffleSampler([50] * count * lanes, window, lanes, seed=2)
    for epoch in range(2):
        found = shards_of(list(sampler.iter_epoch(epoch)), [50] * count * lanes)
        for lane in range(lanes):
            begin, of_lane = 0, found[lane::lanes]
            for size in sizes:
                assert len(set(of_lane[begin : begin + 50 * size].tolist())) == size
                # All of its shards come at once.
                assert size > 5 or len(set(of_lane[begin : begin + 50].tolist())) == size
                begin += 50 * size
            assert begin == len(of_lane)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_first_batch_of_each_rank_needs_one_shard_of_each_of_its_lanes(ranks: int) -> None:
    sampler = ShardShuffleSampler(np.broadcast_to(10**4, 10**8), window=16, lanes=8, seed=2)
    for rank in range(ranks):
        first = list(itertools.islice(rank_of(sampler, ranks, rank).iter_epoch(3), 256))
        assert len({index // 10**4 for index in first}) == 8 // ranks


def test_all_orders_of_a_few_samples_are_equally_likely() -> None:
    sampler, epochs = ShardShuffleSampler([2, 2], window=2, seed=1), 4000
    orders = [sampler.epoch_table(epoch).at(np.arange(4)) for epoch in range(epochs)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - epochs / 24) ** 2).sum() / (epochs / 24) / 23 < 2


def test_a_window_of_all_shards_is_a_full_shuffle() -> None:
    """How far samples move, and how often neighbours stay neighbours, is as in an ordinary shuffle."""
    found = np.array(list(ShardShuffleSampler([50] * 40, window=40, seed=4)))
    assert np.abs(found - np.arange(2000)).mean() / 2000 == pytest.approx(1 / 3, abs=0.03)
    assert (np.abs(np.diff(found)) == 1).sum() < 12
    assert abs(np.corrcoef(found, np.arange(2000))[0, 1]) < 0.1


@pytest.mark.parametrize("given_as", [list, np.array, tuple])
def test_equal_lengths_are_one_order_however_they_are_given(given_as: Any) -> None:
    for lengths in (np.broadcast_to(100, 10), np.broadcast_to(30, 1), np.broadcast_to(7, 0), np.broadcast_to(0, 3)):
        listed = ShardShuffleSampler(given_as(list(lengths)), window=3, lanes=2, seed=1)
        assert list(listed) == list(ShardShuffleSampler(lengths, window=3, lanes=2, seed=1))


def test_a_trillion_samples_start_anywhere_at_once() -> None:
    sampler = ShardShuffleSampler(np.broadcast_to(10**4, 10**8), window=16, lanes=4096, seed=1)
    rank = rank_of(sampler, 4096, 4095)
    start = len(rank) // 3
    ahead = list(itertools.islice(rank.iter_epoch(3, start), 512))
    assert len(set(ahead)) == 512 and all(0 <= index < 10**12 for index in ahead)
    assert ahead[100:] == list(itertools.islice(rank.iter_epoch(3, start + 100), 412))
    assert len({index // 10**4 for index in ahead}) <= 16


def test_the_order_is_the_same_in_every_release() -> None:
    assert list(ShardShuffleSampler([4, 0, 3, 5], window=2, lanes=2, seed=7)) == PINNED_LISTED
    assert list(ShardShuffleSampler(np.broadcast_to(4, 3), window=2, seed=7)) == PINNED_EQUAL


PINNED_LISTED = [0, 11, 6, 9, 1, 8, 2, 10, 5, 3, 4, 7]
PINNED_EQUAL = [9, 8, 10, 11, 1, 5, 6, 7, 0, 3, 4, 2]


# -- in a loader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_goes_on_with_another_number_of_ranks(ranks: int) -> None:
    def make(num_replicas: int = 1, rank: int = 0) -> ShardedDataLoader[Any]:
        order = ShardShuffleSampler([11, 7, 20, 1, 13, 8], window=2, lanes=4, seed=5)
        return ShardedDataLoader(range(60), 24 // num_replicas, sampler=order, num_replicas=num_replicas, rank=rank)

    _, state, rest = after_steps([make()], 1)
    dealt = [
        [batch[n] for n in range(len(step[0])) for batch in step] for step in steps_of(ranks_of(ranks, make, state))
    ]
    assert sum(dealt, [])[: 60 - 24] == [index for [batch] in rest for index in batch]
