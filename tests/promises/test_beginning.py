"""An epoch begins when its first batch is asked for. An iterator that gave no batch leaves no trace."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data as torch_data
from conftest import covering, make_pool
from failures import Fails, boom, raise_lookup
from samples import Bad
from test_resume import SAMPLERS, batches, stream, through_json

from sharded_loader import BatchSampler, RandomSampler, ShardedDataLoader
from sharded_loader.engine.pool import Pool


def make(pool: Any = None, **options: Any) -> ShardedDataLoader:
    options = {"batch_size": 4, "shuffle": True, "seed": 7} | options
    return ShardedDataLoader(range(23), pool=pool, **options)


EXPECTED = stream(make(), 4)


def test_to_make_an_iterator_changes_nothing(pool: Pool) -> None:
    with make(pool) as loader:
        state = loader.state_dict()
        iterators = [iter(loader) for _ in range(3)]
        assert not pool.started
        assert (loader.epoch, loader.position, len(loader), loader.state_dict()) == (0, 0, 6, state)
        del iterators
        iter(loader)
        gc.collect()
        assert (loader.epoch, loader.state_dict()) == (0, state)
        assert stream(loader, 2) == EXPECTED[:2]


def test_iterators_begin_epochs_in_the_order_of_their_first_batches(pool: Pool) -> None:
    with make(pool) as loader:
        first, second, third = iter(loader), iter(loader), iter(loader)
        got = {2: batches(third, 1), 0: batches(first, 1)}
        del second
        assert got == {2: EXPECTED[0][:1], 0: EXPECTED[1][:1]}
        assert (loader.epoch, loader.position) == (1, 1)
        assert batches(third) == EXPECTED[0][1:]
        assert batches(first) == EXPECTED[1][1:]
        assert batches(loader) == EXPECTED[2]


def test_after_set_epoch_the_samplers_of_a_loader_yield_that_epoch() -> None:
    with make() as loader:
        loader.set_epoch(2)
        assert list(loader.batch_sampler) == EXPECTED[2]
        assert batches(loader) == EXPECTED[2]


def test_a_state_loaded_between_iter_and_the_first_next_counts() -> None:
    loader = make()
    batches(iter(loader), 2)
    state = loader.state_dict()
    other = make()
    iterator = iter(other)
    other.load_state_dict(state)
    assert batches(iterator) == EXPECTED[0][2:]


def test_an_iterator_that_gave_nothing_does_not_lose_a_loaded_position(pool: Pool) -> None:
    with make(pool) as loader:
        batches(iter(loader), 2)
        state = loader.state_dict()
        loader.load_state_dict(state)
        for _ in range(3):
            iter(loader)
        gc.collect()
        assert (loader.epoch, loader.position, loader.state_dict()) == (0, 2, state)
        assert batches(loader) == EXPECTED[0][2:]


def test_a_break_is_a_position_that_iterators_without_batches_leave_alone() -> None:
    with make() as loader:
        for _ in loader:
            break
        iter(loader)
        assert (loader.epoch, loader.position) == (0, 1)
        state = loader.state_dict()
        assert batches(loader) == EXPECTED[1]
        loader.load_state_dict(state)
        assert batches(loader) == EXPECTED[0][1:]


def test_a_dataset_that_has_changed_between_iter_and_the_first_next_is_read_as_it_is_then() -> None:
    data = list(range(5))
    with ShardedDataLoader(data, 2, num_workers=1, thread_pool=True) as loader:
        iterator = iter(loader)
        data.append(5)
        loader.refresh()
        assert batches(iterator) == [[0, 1], [2, 3], [4, 5]]


def test_an_error_in_place_of_the_first_batch_is_a_batch(pool: Pool) -> None:
    with ShardedDataLoader(Bad(boom), 8, pool=pool) as loader:
        iterator = iter(loader)
        with pytest.raises(Exception, match="went wrong"):
            next(iterator)
        assert (loader.epoch, loader.position) == (0, 1)
        assert [len(batch) for batch in iterator] == [8, 4]
        assert loader.epoch == 1


@pytest.mark.parametrize("again", ["the same iterator", "another one"])
def test_an_epoch_whose_workers_did_not_start_has_not_begun(again: str, tmp_path: Path) -> None:
    fails = Fails(raise_lookup, tmp_path / "count", times=1)
    with make(make_pool("thread", 1, worker_init_fn=lambda number: fails())) as loader:
        iterator = iter(loader)
        with pytest.raises(LookupError):
            next(iterator)
        assert (loader.epoch, loader.position, loader.state_dict()["samples"]) == (0, 0, 0)
        assert batches(iterator if again == "the same iterator" else iter(loader)) == EXPECTED[0]
        assert batches(loader) == EXPECTED[1]


def test_an_epoch_without_batches_counts_when_its_end_is_seen() -> None:
    """Two samples rolled over into batches of three: of three epochs the first has no batch."""
    loader = ShardedDataLoader(range(2), 3, last_batch="rollover")
    assert [batches(loader) for _ in range(4)] == [[], [[0, 1, 0]], [[1, 0, 1]], []]
    iterator = iter(loader)
    assert loader.epoch == 4
    assert batches(iterator) == [[0, 1, 0]]


class Counts:
    """A sampler without a length whose order comes from ``set_epoch``."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(index * 5 + self.epoch) % 12 for index in range(12)])


class CountsBatches(Counts):
    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        return iter([indices[:5], indices[5:6], indices[6:]])


ENDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"batch_size": 5, "shuffle": True},
    "discard": lambda: {"batch_size": 5, "shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"batch_size": 5, "shuffle": True, "last_batch": "rollover"},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(12, seed=3), 5, "discard")},
    "torch": lambda: {"batch_size": 5, "sampler": torch_data.RandomSampler(range(12))},
    "torch, discard": lambda: {
        "batch_size": 5,
        "sampler": torch_data.RandomSampler(range(12)),
        "last_batch": "discard",
    },
    "torch batches": lambda: {"batch_sampler": torch_data.BatchSampler(RandomSampler(12, seed=3), 5, True)},
    "ranks": lambda: {"batch_size": 5, "shuffle": True, "num_replicas": 2, "rank": 1},
    "ranks, discard": lambda: {"batch_size": 5, "shuffle": True, "num_replicas": 2, "rank": 1, "last_batch": "discard"},
    "without a length": lambda: {"batch_size": 5, "sampler": Counts()},
    "without a length, discard": lambda: {"batch_size": 5, "sampler": Counts(), "last_batch": "discard"},
    "batches without a length": lambda: {"batch_sampler": CountsBatches()},
}


@covering(pool=["inline", "thread"], kind=ENDS, told=[None, "next", "same"])
def test_a_state_from_the_end_of_an_epoch_begins_the_next_one(pool: str, kind: str, told: str | None) -> None:
    def build() -> ShardedDataLoader:
        return ShardedDataLoader(range(12), seed=5, pool=make_pool(pool, 1), **ENDS[kind]())

    with build() as loader:
        expected = stream(loader, 4)
    with build() as loader:
        batches(loader)
        iterator = iter(loader)
        assert batches(iterator, len(expected[1])) == expected[1]
        state = through_json(loader.state_dict())
    with build() as loader:
        loader.load_state_dict(state)
        if "without" not in kind:
            assert (loader.epoch, loader.position) == (2, 0)
        if told is not None:
            loader.set_epoch({"next": 2, "same": 1}[told])
        assert stream(loader, 2) == (expected[1:3] if told == "same" else expected[2:])


@pytest.mark.costly(15)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_look_at_a_state_from_an_epochs_end_changes_nothing(kind: str) -> None:
    def build() -> ShardedDataLoader:
        arguments = SAMPLERS[kind]()
        length = getattr(arguments.get("batch_sampler"), "dataset_length", None) or 40
        return ShardedDataLoader(range(length), seed=5, **arguments)

    expected = stream(build(), 3)
    loader = build()
    batches(iter(loader), len(expected[0]))
    other = build()
    other.load_state_dict(through_json(loader.state_dict()))
    repr(other), other.epoch, other.position, iter(other)
    other.load_state_dict(through_json(other.state_dict()))
    assert stream(other, 2) == expected[1:]
