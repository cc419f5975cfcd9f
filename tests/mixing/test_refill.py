"""Batches that stay full: rejected and failed samples make room for the next ones of the order, on all ranks."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, make_pool

from sharded_loader import (
    OnError,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    ShardedDataLoader,
    TooManySkippedError,
    WeightedRandomSampler,
    interleave,
    sample_rng,
)
from sharded_loader.torch import DataLoader

LENGTH = 97


class Damaged(list[int]):
    """Some samples cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        if index % 10 == 3:
            raise OSError(f"sample {index} is damaged")
        return super().__getitem__(index)


def keep(sample: int) -> bool:
    return sample % 3 > 0


def is_good(index: int) -> bool:
    return keep(index) and index % 10 != 3


def loader(given: Any = None, size: int = 4, dataset: Any = None, **named: Any) -> ShardedDataLoader[Any]:
    data = Damaged(range(LENGTH)) if dataset is None else dataset
    return ShardedDataLoader(data, size, keep=keep, on_error="refill", **{"streams": 6, **(given or {}), **named})


def values(batches: Any, count: int | None = None) -> list[Any]:
    return [batch.tolist() for batch in islice(batches, count)]


ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"shuffle": True, "seed": 3},
    "sampler": {"sampler": RandomSampler(LENGTH, seed=5)},
    "weights": {"sampler": WeightedRandomSampler(np.arange(LENGTH), 50, seed=1)},
}


def of_part(items: Iterator[Any], part: int, streams: int) -> Iterator[Any]:
    """One of each n items, in turn."""
    for place, item in enumerate(items):
        if place % streams == (part + place // streams) % streams:
            yield item


def expected(sampler: Any, streams: int, size: int) -> Iterator[list[int]]:
    """What is left of the order of all epochs, of which each part has one of each n positions, in turn."""
    parts = []
    for part in range(streams):
        indices = itertools.chain.from_iterable(map(sampler.iter_epoch, itertools.count()))
        parts.append(filter(is_good, of_part(indices, part, streams)))
    while True:
        yield from [list(islice(part, size)) for part in parts]


@pytest.mark.parametrize("order", ["sampler", "weights"])
@pytest.mark.parametrize("streams", [1, 6])
def test_batches_are_full_with_the_next_samples_of_the_order(order: str, streams: int) -> None:
    found = loader(ORDERS[order], streams=streams, steps_per_epoch=30)
    assert values(found) + values(found) == list(islice(expected(ORDERS[order]["sampler"], streams, 4), 60))
    assert {index % 10 for index, _ in found.skipped} == {3}


class Turned(Sampler[int]):
    """An order of your own, by iterators."""

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return ((number + epoch) % 60 for number in range(start, 60))

    def len_epoch(self, epoch: int) -> int:
        return 60


@pytest.mark.parametrize("streams", [1, 6])
def test_an_order_that_is_written_as_an_iterator_is_filtered_too(streams: int) -> None:
    found = loader({"sampler": Turned()}, streams=streams, steps_per_epoch=30)
    assert values(found) == list(islice(expected(Turned(), streams, 4), 30))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("order", ORDERS)
def test_they_are_the_same_in_every_pool(order: str, pool: str) -> None:
    with loader(ORDERS[order], pool=make_pool(pool)) as found:
        assert values(found) == values(loader(ORDERS[order]))


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_stay_in_step_and_continue_from_each_others_states(order: str) -> None:
    def ranks(count: int) -> list[ShardedDataLoader[Any]]:
        given = {**ORDERS[order], "streams": 24, "steps_per_epoch": 50, "num_replicas": count}
        return [loader(given, 2, rank=rank) for rank in range(count)]

    (one,) = ranks(1)
    whole, found, states = values(one), list[Any](), list[Any]()
    for count, steps in ((1, 5), (3, 7), (8, 2), (1, 6)):
        loaders = ranks(count)
        for loaded in loaders if states else ():
            loaded.load_state_dict(json.loads(json.dumps(states)))
        batches = [batch for each in loaders for batch in values(each, steps)]
        assert len(batches) == count * steps and all(len(batch) == 2 for batch in batches)
        found, states = found + batches, [each.state_dict() for each in loaders]
        assert Counter(map(tuple, found)) == Counter(map(tuple, whole[: len(found)]))


def test_an_epoch_has_as_many_steps_as_without_a_filter_on_all_ranks() -> None:
    assert len(loader()) == 24
    lengths = [len(values(loader(num_replicas=3, rank=rank))) for rank in range(3)]
    assert lengths == [8, 8, 8]
    assert len(ShardedDataLoader(range(3), 5, keep=keep)) == 1


def test_both_loaders_and_no_other_arguments() -> None:
    for named in ({"keep": keep}, {"on_error": "refill"}, {"keep": keep, "on_error": "refill"}):
        options: dict[str, Any] = {"dataset": list(range(40)), "batch_size": 4, "shuffle": True, "seed": 1, **named}
        assert values(DataLoader(num_workers=2, **options)) == values(ShardedDataLoader(**options))


class Drawing(list[int]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index), int(sample_rng().integers(1 << 30))


def test_a_sample_has_the_random_numbers_that_it_has_without_a_filter() -> None:
    plain, filtered = (ShardedDataLoader(Drawing(range(40)), 4, seed=1, **named) for named in ({}, {"keep": bool}))
    pairs = (pair for batch in plain for pair in zip(*(one.tolist() for one in batch), strict=True))
    numbers = dict(pairs)
    samples, many = next(iter(filtered))
    assert [numbers[sample] for sample in samples.tolist()] == many.tolist()


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_rejecting_everything_is_an_error_that_says_how_many_were_read() -> None:
    with pytest.raises(ValueError, match=r"keep has rejected 1000 samples in a row.*part 0, which has read 1000"):
        values(ShardedDataLoader(range(20), batch_size=4, keep=lambda sample: False, streams=1))


def test_the_limit_of_failed_samples_holds() -> None:
    with pytest.raises(TooManySkippedError):
        values(ShardedDataLoader(Damaged(range(LENGTH)), 4, on_error=OnError("refill", limit=2)))
    with pytest.raises(OSError, match="sample 3 is damaged"):
        values(ShardedDataLoader(Damaged(range(LENGTH)), 4, keep=keep, streams=1))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"keep": 3}, TypeError, "keep is 3; it must be a function of a sample"),
        ({"sampler": [1, 2]}, TypeError, "give shuffle=True alone, or a sampler of this library"),
        (
            {"dataset": interleave([[1], [2]], shuffle=True)},
            TypeError,
            "Filter iterable data, and the datasets of a mixture",
        ),
        ({"dataset": lambda: iter(range(9))}, TypeError, "Filter iterable data"),
        ({"dataset": []}, ValueError, "has no samples, so that no batch can be full"),
        (
            {"batch_sampler": [[1, 2]], "batch_size": None},
            ValueError,
            "^keep= and on_error='refill' read the order in parts: leave out batch_sampler, or filter",
        ),
        ({"evaluate": True}, ValueError, "^keep= and on_error='refill' .* leave out evaluate, or filter the data$"),
        ({"global_batch": 4, "batch_size": None}, ValueError, "as with keep=: leave out global_batch"),
        ({"skip": [(1, 2)]}, TypeError, "skip leaves out steps of a dataset that is read by index"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        ShardedDataLoader(**{"dataset": range(9), "batch_size": 2, "keep": keep, **given})


def test_a_state_of_another_order_is_refused() -> None:
    found = loader(ORDERS["shuffled"])
    values(found, 3)
    for other in (loader(ORDERS["sampler"]), loader(ORDERS["shuffled"], dataset=Damaged(range(96)))):
        other.load_state_dict(found.state_dict())
        with pytest.raises(ValueError, match="the state is that of another order: it was Refill of 97 samples, seed=3"):
            values(other)


@pytest.mark.parametrize("outer", [lambda sampler: sampler, lambda sampler: RepeatedSampler(2, sampler)])
def test_weights_do_not_change_while_a_filter_reads_the_sampler(outer: Any) -> None:
    sampler = WeightedRandomSampler(np.ones(40), 40, seed=1)
    filtered = ShardedDataLoader(range(40), 4, sampler=outer(sampler), keep=keep)
    with pytest.raises(TypeError, match="keep= or on_error='refill'.*cannot follow changes"):
        sampler.update([1], [2])
    assert set(sampler.weights) == {1}
    del filtered
    sampler.update([1], [2])


def test_an_order_without_a_seed_is_that_of_the_seed_that_the_loader_shows() -> None:
    first, other = (ShardedDataLoader(range(200), 8, shuffle=True, keep=keep) for _ in range(2))
    read = values(first)
    assert read == values(ShardedDataLoader(**first.arguments, seed=first.seed)) != values(other)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "thread_pool": True}], ids=str)
@pytest.mark.parametrize("filtered", [{"keep": keep}, {"on_error": "refill"}], ids=["keep", "refill"])
def test_the_drop_in_reads_an_order_in_as_many_parts(filtered: Any, workers: Any) -> None:
    one, other = (
        kind(range(40), 4, streams=3, seed=1, **filtered, **workers) for kind in (ShardedDataLoader, DataLoader)
    )
    assert values(one) == values(other)
    with pytest.raises(ValueError, match="streams=3 is for iterable data"):
        DataLoader(range(40), 4, streams=3, num_replicas=1)


WITHOUT_SEED: dict[str, Any] = {
    "shuffle": lambda: {"shuffle": True},
    "sampler": lambda: {"sampler": RandomSampler(200)},
    "sampler inside": lambda: {"sampler": RepeatedSampler(1, WeightedRandomSampler(np.ones(200), 200, False))},
}


@pytest.mark.parametrize("order", WITHOUT_SEED)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_without_a_seed_ranks_share_one_order_and_another_program_goes_on_in_it(kind: Any, order: str) -> None:
    def make(**named: Any) -> Any:
        return kind(range(200), 8, keep=keep, **WITHOUT_SEED[order](), **named)

    ranks = [make(num_replicas=2, rank=rank, steps_per_epoch=2) for rank in range(2)]
    assert len({index for rank in ranks for batch in values(rank) for index in batch}) == 32
    first = iter(loader := make())
    next(first)
    other, state = make(), json.loads(json.dumps(loader.state_dict()))
    other.load_state_dict(state)
    assert values(other) == values(first)
