"""Repeated augmentation: each sample several times in an epoch, each copy with its own random numbers."""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, covering, make_pool
from hypothesis import given
from hypothesis import strategies as st
from samples import Drawing, DrawingInBatches, DrawingInItems, Foreign

from sharded_loader import (
    ArrayDataset,
    BatchSampler,
    Placement,
    RandomSampler,
    RepeatedSampler,
    SequentialSampler,
    ShardedDataLoader,
    SimpleDataset,
    interleave,
    sample_generator,
    sample_rng,
    sample_seed,
)
from sharded_loader.randomness.rng import repeated_index
from sharded_loader.sampling.tables import StridedTable

LENGTH = 10


class InBatches(DrawingInBatches):
    """As `DrawingInBatches`, with the indices as they come: ``int(index)`` would lose the copy."""

    def get_batch(self, indices: Any) -> Any:
        return np.stack([self.read(index, sample_rng(index)) for index in indices])


def batches_of(loader: ShardedDataLoader[Any], epochs: int = 1) -> list[Any]:
    with loader:
        return [batch.tolist() for _ in range(epochs) for batch in loader]


@covering(1, pool=POOLS, dataset=[Drawing, DrawingInItems, InBatches])
def test_each_sample_comes_k_times_and_each_copy_draws_its_own_numbers(
    pool: str, dataset: Callable[[int], Any]
) -> None:
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


@pytest.mark.costly(2)
@pytest.mark.parametrize("steps", [None, 3])
@pytest.mark.parametrize("inner", ["own", "torch"])
def test_resumes_between_two_copies_on_any_number_of_ranks(inner: str, steps: int | None) -> None:
    def loader(size: int = 4, **given: Any) -> ShardedDataLoader[Any]:
        sampler: Any = RandomSampler(LENGTH, seed=5)
        if inner == "torch":
            sampler = torch.utils.data.RandomSampler(range(LENGTH))
        return ShardedDataLoader(
            Drawing(LENGTH), size, sampler=RepeatedSampler(3, sampler), seed=5, steps_per_epoch=steps, **given
        )

    whole = batches_of(loader(), 3)
    for done in range(1, 7):
        first = loader()
        batches = (batch for _ in range(3) for batch in first)
        assert [next(batches).tolist() for _ in range(done)] == whole[:done]
        state = first.state_dict()
        resumed = loader()
        resumed.load_state_dict(state)
        assert (batches_of(resumed, 3))[: len(whole) - done] == whole[done : done + len(whole)]
        if steps is None:
            ranks = [loader(2, num_replicas=2, rank=rank) for rank in range(2)]
            for one in ranks:
                one.load_state_dict(state)
            found = [row for pair in zip(*map(batches_of, ranks), strict=True) for batch in pair for row in batch]
            assert Counter(map(tuple, found)) == Counter(tuple(row) for batch in whole[done:8] for row in batch)


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
