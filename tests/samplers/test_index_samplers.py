"""Orders of indices: draws by weight, shards in shuffled order, copies; complete, pure, the same for any ranks."""

import copy
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, covering, make_pool
from hypothesis import example, given
from hypothesis import strategies as st
from samples import Drawing, DrawingInBatches, DrawingInItems, Foreign

from sharded_loader import (
    ArrayDataset,
    BatchSampler,
    Placement,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    SequentialSampler,
    ShardedDataLoader,
    ShardShuffleSampler,
    SimpleDataset,
    WeightedRandomSampler,
    interleave,
    sample_generator,
    sample_rng,
    sample_seed,
)
from sharded_loader.randomness.rng import repeated_index
from sharded_loader.sampling.own import ReplicaSampler
from sharded_loader.sampling.tables import BLOCK, StridedTable


def test_weighted_draws_follow_the_weights() -> None:
    count = 3 * BLOCK + 17
    drawn = Counter(WeightedRandomSampler([0, 1, 0, 3, 6, 0], count, seed=5))
    assert set(drawn) == {1, 3, 4}
    for index, share in ((1, 0.1), (3, 0.3), (4, 0.6)):
        assert drawn[index] / count == pytest.approx(share, abs=0.01)


EXTREME = [1.5e308, 5e-324, 0, 0.5e308, 1e-310, 0]


@pytest.mark.parametrize("replacement", [True, False])
def test_extreme_weights_are_weights_as_any_others(replacement: bool) -> None:
    for scale in (1e-310, 1e-300, 1.0, 1e307) if replacement else (1e-300, 1.0, 3e289):
        weights = [3 * scale, 0, scale]
        if replacement:
            first = list(WeightedRandomSampler(weights, 800, seed=1))
        else:
            first = [next(iter(WeightedRandomSampler(weights, 1, False, seed=seed))) for seed in range(800)]
        assert set(first) == {0, 2} and 520 < first.count(0) < 680  # 600 of 800; 6 sigma are 74
    # What is lighter by 580 orders of magnitude comes last.
    for seed in range(30):
        drawn = list(WeightedRandomSampler([1e290, 1e-300, 0, 3e289, 1e-280, 0], 4, False, seed=seed))
        assert drawn[2:] == [4, 1]
        assert set(WeightedRandomSampler(EXTREME, 50, seed=seed)) == {0, 3}


@example(EXTREME, 0)
@example([0, 5e-324, 0, 1e-323], 0)
@example([1e-310, 0, 2e-308, 0], 0)
@example([0, 1.7e308, 1.7e308], 0)
@given(st.lists(st.floats(0, 1.7e308), min_size=1, max_size=30), st.integers(0, 99))
def test_any_weights_at_all_are_drawn_by(weights: list[float], seed: int) -> None:
    positive = {index for index, weight in enumerate(weights) if weight}
    if not positive:
        return
    assert set(WeightedRandomSampler(weights, len(positive), False, seed=seed)) == positive
    assert set(WeightedRandomSampler(weights, 50, seed=seed)) <= positive


def test_draws_are_the_same_from_any_block_on_and_in_every_release() -> None:
    sampler = WeightedRandomSampler([1, 2, 3], 2 * BLOCK + 9, seed=5)
    whole = list(sampler.iter_epoch(0))
    for start in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8):
        assert list(sampler.iter_epoch(0, start)) == whole[start:]
    assert list(WeightedRandomSampler([1, 2, 3], 8, seed=7)) == [0, 1, 1, 2, 1, 2, 1, 1]  # runs are resumed


def test_draws_of_ranks_and_epochs_do_not_resemble_each_other() -> None:
    sampler = WeightedRandomSampler(np.ones(64), 10**12, seed=5)  # no rank computes all draws
    by_epoch = [
        np.array(StridedTable(sampler.epoch_table(epoch), 4096, rank).at(np.arange(20_000)))
        for epoch, rank in ((0, 0), (0, 1), (1, 0))
    ]
    for one, other in itertools.combinations(by_epoch, 2):
        pairs = np.bincount(one * 64 + other, minlength=64 * 64)
        expected = len(one) / 64**2
        assert abs(((pairs - expected) ** 2).sum() / expected / (64**2 - 1) - 1) < 0.15


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
def test_every_index_comes_once_from_any_place(lengths, window, lanes, seed, epoch, step):
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
    sampler, epochs = ShardShuffleSampler([2, 2], window=2, seed=1), 2000
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


def test_the_order_is_the_same_in_every_release() -> None:
    listed, equal = [4, 0, 3, 5], np.broadcast_to(4, 3)
    assert list(ShardShuffleSampler(listed, window=2, lanes=2, seed=7)) == [0, 11, 6, 9, 1, 8, 2, 10, 5, 3, 4, 7]
    assert list(ShardShuffleSampler(equal, window=2, seed=7)) == [9, 8, 10, 11, 1, 5, 6, 7, 0, 3, 4, 2]


LENGTH = 10


class InBatches(DrawingInBatches):
    """As `DrawingInBatches`, with the indices as they come: ``int(index)`` would lose the copy."""

    def get_batch(self, indices: Any) -> Any:
        return np.stack([self.read(index, sample_rng(index)) for index in indices])


def batches_of(loader: ShardedDataLoader[Any], epochs: int = 1) -> list[Any]:
    with loader:
        return [batch.tolist() for _ in range(epochs) for batch in loader]


@covering(1, pool=POOLS, dataset=[Drawing, DrawingInItems, InBatches])
def test_each_sample_comes_k_times_and_each_copy_draws_its_own_numbers(pool, dataset):
    order: dict[str, Any] = {"shuffle": True, "sampler": RepeatedSampler(3), "seed": 1}
    rows = [
        tuple(row)
        for batch in batches_of(ShardedDataLoader(dataset(LENGTH), 4, pool=make_pool(pool), **order))
        for row in batch
    ]
    assert Counter(index for index, _ in rows) == dict.fromkeys(range(LENGTH), 3)
    assert len(set(rows)) == 3 * LENGTH
    # The first copy is what the sample is without copies.
    alone = batches_of(ShardedDataLoader(dataset(LENGTH), 4, shuffle=True, seed=1))
    assert rows[::3] == [tuple(row) for batch in alone for row in batch]


def draws(_: int) -> Any:
    with sample_seed():
        seeded = random.random()
    return np.array([seeded, torch.rand((), generator=sample_generator()).item(), sample_rng().random()])


def test_every_way_to_draw_knows_the_copy() -> None:
    batch = next(iter(ShardedDataLoader(SimpleDataset(range(2)).transform(draws), 8, sampler=RepeatedSampler(4))))
    assert all(len(set(column)) == 8 for column in batch.T.tolist())


def test_the_copies_keep_their_numbers_under_wrappers_and_in_shards() -> None:
    def rows(dataset: Any, **given: Any) -> list[Any]:
        shards = next(iter(ShardedDataLoader(dataset, 9, sampler=RepeatedSampler(3), seed=2, **given)))
        return [row for shard in shards for row in shard.tolist()] if given else shards.tolist()  # type: ignore[no-any-return]

    whole = rows(SimpleDataset(Drawing(LENGTH)).take(3))
    assert len({tuple(row) for row in whole}) == 9
    assert rows(SimpleDataset(Drawing(LENGTH)).take(3), num_shards=2) == whole
    for bulk in (SimpleDataset(DrawingInItems(3)), SimpleDataset(DrawingInItems(3)).transform(lambda sample: sample)):
        assert rows(bulk) == rows(DrawingInItems(3))


def test_on_ranks_the_copies_go_where_timm_sends_them() -> None:
    inner, copies, replicas = RandomSampler(LENGTH, seed=3), 3, 4
    order = [index for index in inner.iter_epoch(0) for _ in range(copies)]
    order += order[: -len(order) % replicas]  # as RepeatAugSampler: repeat, pad, then every n-th
    for rank in range(replicas):
        ranks = {"num_replicas": replicas, "rank": rank}
        loader = ShardedDataLoader(range(LENGTH), 2, sampler=RepeatedSampler(copies, inner), **ranks)
        assert [index for batch in loader for index in batch.tolist()] == order[rank::replicas]


def test_without_a_sampler_the_loader_gives_its_own_order() -> None:
    shuffled = ShardedDataLoader(range(LENGTH), 5, shuffle=True, seed=1)
    sampler = RepeatedSampler(2)
    repeated = ShardedDataLoader(range(LENGTH), 5, shuffle=True, sampler=sampler, seed=1)
    assert len(repeated) == 4
    for _ in range(2):
        order = [index for batch in shuffled for index in batch.tolist()]
        assert [index for batch in repeated for index in batch.tolist()] == [index for index in order for _ in "ab"]
    sampler.set_epoch(4)
    assert repeated.epoch == 4
    data = [1, 2]
    grows = ShardedDataLoader(data, 10, sampler=RepeatedSampler(2))
    data.append(3)
    grows.refresh()
    assert [batch.tolist() for batch in grows] == [[1, 1, 2, 2, 3, 3]]


def test_a_sampler_of_another_library_is_read_once_though_copies_lie_in_two_batches() -> None:
    begun: list[int] = []
    foreign = Foreign(lambda: begun.append(1) or range(6), 6)
    loader = ShardedDataLoader(range(6), 4, sampler=RepeatedSampler(3, foreign))
    assert [batch.tolist() for batch in loader] == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3], [4, 4, 4, 5], [5, 5]]
    assert begun == [1]


def test_arrays_give_rows_for_copies_too() -> None:
    for dataset in (ArrayDataset(np.arange(5) * 10), torch.arange(5) * 10):
        loader = ShardedDataLoader(dataset, 10, sampler=RepeatedSampler(2), num_replicas=1)
        assert [batch.tolist() for batch in loader] == [[0, 0, 10, 10, 20, 20, 30, 30, 40, 40]]
    resident = ShardedDataLoader(
        torch.arange(5), 10, sampler=RepeatedSampler(2), devices=Placement(["cpu"], resident=True)
    )
    assert [batch.tolist() for (batch,) in resident] == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]]


@given(length=st.integers(0, 20), copies=st.integers(1, 5), start=st.integers(0, 30), replicas=st.integers(1, 4))
def test_any_position_is_read_by_itself(length: int, copies: int, start: int, replicas: int) -> None:
    sampler = RepeatedSampler(copies, SequentialSampler(length))
    order = [index for index in range(length) for _ in range(copies)]
    assert list(sampler.iter_epoch(0, start)) == order[start:]
    assert len(sampler) == len(order)
    for rank in range(replicas):
        dealt = list(StridedTable(sampler.epoch_table(0), replicas, rank, truncate=True).items())
        assert dealt == order[: len(order) // replicas * replicas][rank::replicas]
    batches = list(BatchSampler(sampler, 3))
    assert batches == [order[begin : begin + 3] for begin in range(0, len(order), 3)]


def test_the_index_of_a_copy_is_an_int_that_travels() -> None:
    index = repeated_index(2)(7)
    assert index == 7 and hash(index) == hash(7) and repr(index) == "7" and [*[10] * 7, 70] == [10] * 7 + [70]
    for same in (pickle.loads(pickle.dumps(index)), copy.deepcopy(index)):
        assert same == 7 and type(same) is type(index) and same.copy == 2


@pytest.mark.parametrize(
    "given", [{}, {"shuffle": True}, {"weights": [(0, [1, 1]), (6, [3, 1])]}, {"stop": "each_once"}, {"stop": 20}]
)
def test_the_copies_of_a_mixture_are_those_of_its_own_order(given: dict[str, Any]) -> None:
    def rows(**order: Any) -> list[Any]:
        mixture = interleave([Drawing(8), Drawing(6)], seed=1, **given)
        return [tuple(row) for batch in batches_of(ShardedDataLoader(mixture, 4, seed=1, **order)) for row in batch]

    once, twice = rows(), rows(sampler=RepeatedSampler(2))
    assert twice[::2] == once
    assert [index for index, _ in twice[1::2]] == [index for index, _ in once] and len(set(twice)) == len(twice)
