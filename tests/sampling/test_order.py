"""A loader's order, without a loader: which epoch is next, what a state is compared with, whose seed counts."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from samples import Foreign, NoLength

from sharded_loader import BatchSampler, IntervalSampler, RandomSampler, ShardedDataLoader
from sharded_loader.engine.order import Position
from sharded_loader.randomness.shuffle import Bijection
from sharded_loader.sampling.epoch import MapEpoch
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.state import Signature


def order(length: int | None = 10, **given: Any) -> MapOrder:
    arguments: dict[str, Any] = dict.fromkeys(("sampler", "last_batch", "batch_sampler", "num_replicas", "rank"))
    size = None if "batch_sampler" in given else 3
    return MapOrder(length, **{**arguments, "batch_size": size, "shuffle": False, "seed": 1, **given})


def listed(batch: Any) -> Any:
    """A batch as a list: an array of indices may come in its place."""
    return batch.tolist() if isinstance(batch, np.ndarray) else batch


def rest(reading: MapEpoch, number: int) -> list[Any]:
    """The batches of an epoch from a number on."""
    found = []
    while (batch := reading.batch(number)) is not None:
        found.append(listed(batch[0]))
        number += 1
    return found


def batches(one: MapOrder, epoch: int = 0, position: Position | None = None) -> list[Any]:
    reading = one.epoch(epoch, position)
    return rest(reading, reading.first)


def test_the_batches_of_an_epoch_are_numbered() -> None:
    assert batches(order()) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert batches(order(last_batch="discard")) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    rolling = order(last_batch="rollover")
    assert [batches(rolling, epoch) for epoch in range(2)] == [
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
        [[9, 0, 1], [2, 3, 4], [5, 6, 7]],
    ]
    assert [rolling.length(epoch) for epoch in range(4)] == [3, 3, 4, 3]
    assert batches(order(batch_sampler=[[1, 2], [3]])) == [[1, 2], [3]]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_reads_its_part(rank: int) -> None:
    one = order(num_replicas=3, rank=rank, batch_size=2)
    expected = [[[0, 3], [6, 9]], [[1, 4], [7, 0]], [[2, 5], [8, 1]]][rank]
    assert batches(one) == expected == list(one.batch_sampler.iter_epoch(0))
    batch, first = one.epoch(0).batch(1) or ([], -1)
    assert (one.length(0), one.replicas()) == (2, (3, rank))
    assert (listed(batch), first) == (expected[1], 6 + rank)


def test_a_batch_of_one_rank_of_4096_computes_its_own_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    sampler = RandomSampler(10**12, seed=1)
    monkeypatch.setattr(
        Bijection, "__call__", lambda self, at, real=Bijection.__call__: computed.append(len(at)) or real(self, at)
    )
    batch, first = order(10**12, sampler=sampler, batch_size=256, num_replicas=4096, rank=7).epoch(0).batch(1000)
    assert first == 256_000 * 4096 + 7
    assert computed == [2**15]  # a block of 128 batches
    assert listed(batch) == [next(sampler.iter_epoch(0, (256_000 + step) * 4096 + 7)) for step in range(256)]


def test_the_next_epoch_is_what_the_loader_counts_or_a_sampler_was_told() -> None:
    sampler = RandomSampler(10)
    one = order(sampler=sampler)
    one.set_epoch(4)
    assert one.next_epoch == 4
    sampler.set_epoch(2)
    assert (one.next_epoch, one.next_epoch) == (2, 2)


def test_a_sampler_without_a_seed_takes_the_orders_and_is_not_changed() -> None:
    sampler = RandomSampler(10)
    before = sampler.seed
    one, other = order(sampler=sampler, seed=5), order(sampler=sampler, seed=6)
    assert sampler.seed == before and batches(one) != batches(other)
    assert batches(one) == batches(order(sampler=RandomSampler(10, seed=5)))


def test_a_signature_says_what_decides_the_order() -> None:
    arguments = ("IntervalSampler.interval", 3), ("IntervalSampler.rollover", True)
    expected = Signature(1, 10, "IntervalSampler", 10, (None,), 3, "keep", arguments)
    assert order(sampler=IntervalSampler(10, 3)).signature(0) == expected
    arguments = ("BatchSampler.batch_size", 4), ("BatchSampler.last_batch", "keep")
    expected = Signature(1, 10, "BatchSampler(torch.RandomSampler)", None, (2, None), None, None, arguments)
    assert order(batch_sampler=BatchSampler(torch_data.RandomSampler(range(10)), 4, seed=2)).signature(0) == expected


def test_a_dataset_of_another_length_makes_the_orders_own_sampler_again() -> None:
    one = order(shuffle=True)
    one.set_epoch(3)
    one.sampler.set_epoch(4)
    one.resize(12)
    assert (one.dataset_length, len(one.sampler), one.next_epoch, one.length(4)) == (12, 12, 4, 4)


class Counting:
    """Counts without end, from 0 in each iteration, and begins with 0 again after the last index."""

    read = at = 0

    def __init__(self, length: int = 50) -> None:
        self.length = length

    def __iter__(self):
        self.at = 0
        while True:
            self.read, self.at = self.read + 1, self.at + 1
            yield (self.at - 1) % self.length


class Keeping(Counting):
    """Goes on where it was, and has a state."""

    def __iter__(self):
        while True:
            self.at += 1
            yield (self.at - 1) % self.length

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class KeepingEpochs(Keeping):
    """Also has a length, where it starts over."""

    def __iter__(self):
        for number in range(self.at % self.length, self.length):
            self.at = number + 1
            yield number

    def __len__(self):
        return self.length


@pytest.mark.parametrize("kind", [Counting, Keeping, KeepingEpochs])
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_per_epoch_reads_on_in_each_epoch_and_after_a_state(kind: Any, ranks: int) -> None:
    def loader() -> ShardedDataLoader:
        return ShardedDataLoader(range(50), 3, sampler=kind(), steps_per_epoch=4, num_replicas=ranks, rank=0, seed=1)

    expected = [number % 50 for number in range(0, 12 * 12 * ranks, ranks)]
    one, read, states = loader(), [], []
    assert len(one) == 4
    for _ in range(12):
        for batch in one:
            read += batch.tolist()
            states.append(one.state_dict())
    assert read == expected
    if kind is Counting and ranks == 1:  # each epoch reads as much
        assert one.sampler.read == 12 * 12
    for done in (1, 3, 4, 5, 16, 18):
        other = loader()
        other.load_state_dict(states[done - 1])
        rest = [number for _ in range(2) for batch in other for number in batch.tolist()]
        assert rest == expected[3 * done :][: len(rest)] and len(rest) > 12
    left = [next(iter(one)).tolist() for one in [loader()] for _ in range(6)]  # the loop was left each time
    assert left == [[(12 * epoch + number) * ranks % 50 for number in range(3)] for epoch in range(6)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_without_a_length_that_ends_under_steps_per_epoch_is_an_error(ranks: int) -> None:
    ends = NoLength(range(20))
    loader = ShardedDataLoader(range(50), 3, sampler=ends, steps_per_epoch=2, num_replicas=ranks, rank=0)
    with pytest.raises(ValueError, match="has no length and ended after 20 items: give it a __len__, so that it can"):
        for _ in range(4):
            list(loader)


SAMPLERS: dict[str, Any] = {
    "the loader's": lambda: {"batch_size": 2, "shuffle": True},
    "ours": lambda: {"batch_size": 2, "sampler": RandomSampler(12)},
    "torch": lambda: {"batch_size": 2, "sampler": torch_data.RandomSampler(range(12))},
    "generator": lambda: {"batch_size": 2, "sampler": torch_data.RandomSampler(range(12), generator=torch.Generator())},
    "distributed": lambda: {"batch_size": 2, "sampler": torch_data.DistributedSampler(range(12), 2, 1)},
    "own": lambda: {"batch_size": 2, "sampler": Foreign(lambda: torch.randperm(12).tolist(), 12)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(12, seed=1), 4)},
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_samplers_of_a_loader_begin_the_epoch_that_the_loader_was_told(kind: str) -> None:
    loader = ShardedDataLoader(range(12), **SAMPLERS[kind](), seed=1)
    tells = loader if kind != "batches" else loader.batch_sampler
    tells.set_epoch(2)
    shown = [list(batch) for batch in loader.batch_sampler]
    assert shown == [batch.tolist() for batch in loader] and loader.epoch == 3
    if kind in ("the loader's", "ours", "distributed"):  # these know their epochs themselves
        loader.sampler.set_epoch(2)
        samples = list(loader.sampler)
        assert samples == sum(shown, []) and [batch.tolist() for batch in loader] == shown
