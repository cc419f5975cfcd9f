"""P6, resume: a state taken anywhere resumes exactly. An epoch begins when its first batch is asked for."""

from __future__ import annotations

import gc
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from conftest import covering, made, make_pool
from failures import Fails, boom, raise_lookup
from samples import Bad, Drawing, Foreign, NoLength
from samples import ByEpoch as OthersByEpoch
from samples import GluonStyle as OursInGluonStyle

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    FilterSampler,
    FixedBucketSampler,
    IntervalSampler,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    SortedBucketSampler,
    SortedSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.engine.pool import Pool

Loader = Callable[..., ShardedDataLoader]


def plain(batch: Any) -> Any:
    return [plain(part) for part in batch] if isinstance(batch, list) else batch.tolist()


def batches(iterator: Any, count: int | None = None) -> list[Any]:
    return [plain(batch) for batch in itertools.islice(iterator, count)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 1000
    loaded: dict[str, Any] = json.loads(text)
    assert loaded == state
    return loaded


class GluonStyle:
    """Draws from the global generators when it is started, and knows no epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.length


class Stateful(GluonStyle):
    """Has a place of its own, as torchdata's samplers; its order is drawn from history, so nobody else can find it."""

    def __init__(self, length: int, seed: int = 0) -> None:
        super().__init__(length)
        self.generator_state = seed
        self.order: list[int] = []
        self.yielded = 0
        self.resumed = False
        self.started = 0

    def __iter__(self) -> Iterator[int]:
        self.started += 1
        if not self.resumed:
            self.generator_state += 1
            self.order = np.random.default_rng(self.generator_state).permutation(self.length).tolist()
            self.yielded = 0
        self.resumed = False
        while self.yielded < self.length:
            self.yielded += 1
            yield self.order[self.yielded - 1]
        self.yielded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator_state, "order": self.order, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator_state, self.order, self.yielded = state["generator"], list(state["order"]), state["yielded"]
        self.resumed = True


class StatefulIterator:
    """An iterator that has the place."""

    def __init__(self, length: int) -> None:
        self.items = list(range(length))
        self.at = 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> int:
        if self.at == len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class ByEpoch(torch_data.DistributedSampler):  # type: ignore[type-arg]
    """torch's, over one rank."""

    def __init__(self, length: int, replicas: int = 1, rank: int = 0) -> None:
        super().__init__(range(length), replicas, rank)  # type: ignore[arg-type]


class HasPlace:
    """Has the place in itself, as the samplers of torchdata; ``order`` is the order of an epoch."""

    yielded = loaded = 0
    order: Callable[[], Iterator[int]]

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.loaded = self.loaded, 0
        for index in itertools.islice(self.order(), self.yielded, None):
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["yielded"]


class StatefulByEpoch(HasPlace, ByEpoch):
    def order(self) -> Iterator[int]:
        return ByEpoch.__iter__(self)


class StatefulShuffle(HasPlace, OthersByEpoch):
    """With a ``set_epoch`` of its own and nothing of torch's."""

    def order(self) -> Iterator[int]:
        return OthersByEpoch.__iter__(self)


class BeginsAnew(StatefulIterator):
    """Its own iterator, which each ``iter()`` begins anew, or at the place that was loaded."""

    loaded = 0

    def __iter__(self) -> BeginsAnew:
        self.at, self.loaded = self.loaded, 0
        return self

    def __len__(self) -> int:
        return len(self.items)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["at"]


class StatefulTooShort(StatefulShuffle):
    def __len__(self) -> int:
        return 8


class Growing(Sampler[int]):
    """Ours, of another length each epoch."""

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return iter(range(start, self.len_epoch(epoch)))

    def len_epoch(self, epoch: int) -> int:
        return 9 + 5 * epoch


def configuration(**options: Any) -> Loader:
    return lambda: ShardedDataLoader(
        Drawing(23), **{"batch_size": 4, "seed": 5, **{k: v() if callable(v) else v for k, v in options.items()}}
    )


CONFIGURATIONS: dict[str, Loader] = {
    "shuffled": configuration(shuffle=True),
    "rollover": configuration(shuffle=True, last_batch="rollover"),
    "foreign": configuration(sampler=lambda: GluonStyle(23)),
    "by epoch": configuration(sampler=lambda: OthersByEpoch(23)),
    "sharded batches": configuration(
        batch_size=None, batch_sampler=lambda: ShardedBatchSampler(BatchSampler(RandomSampler(23, seed=3), 5), 2)
    ),
}


def resumed(make: Loader, count: int, before: int = 0, **options: Any) -> ShardedDataLoader:
    """A loader that has the state of another one: after so many batches, behind whole epochs."""
    loader, again = make(), make()
    for _ in range(before):
        batches(loader)
    batches(iter(loader), count)
    again.load_state_dict(through_json(loader.state_dict()), **options)
    return again


LENGTHS = [3 + 7 * i % 11 for i in range(23)]

SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sequential": lambda: {"sampler": SequentialSampler(23), "batch_size": 4},
    "random": lambda: {"sampler": RandomSampler(23, seed=1), "batch_size": 4},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(3, 20), seed=1), "batch_size": 4},
    "weighted": lambda: {"sampler": WeightedRandomSampler(LENGTHS, 30, seed=1), "batch_size": 4},
    "filter": lambda: {"sampler": FilterSampler(lambda x: x % 2 == 0, range(23)), "batch_size": 4},
    "interval": lambda: {"sampler": IntervalSampler(23, 3), "batch_size": 4},
    "sorted": lambda: {"sampler": SortedSampler(LENGTHS), "batch_size": 4},
    "split": lambda: {"sampler": SplitSampler(23, 2, 1, seed=1), "batch_size": 4},
    "list": lambda: {"sampler": [3, 1, 4, 1, 5, 9, 2, 6], "batch_size": 3},
    "discard": lambda: {"sampler": RandomSampler(23, seed=1), "batch_size": 4, "last_batch": "discard"},
    "rollover": lambda: {"sampler": RandomSampler(23, seed=1), "batch_size": 4, "last_batch": "rollover"},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(23, seed=1), 4, "rollover")},
    "sorted buckets": lambda: {"batch_sampler": SortedBucketSampler(LENGTHS, 3, 2, shuffle=True, seed=1)},
    "fixed buckets": lambda: {"batch_sampler": FixedBucketSampler(LENGTHS, 3, 3, shuffle=True, seed=1)},
    "budget": lambda: {"batch_sampler": BoundedBudgetSampler(LENGTHS, 30, seed=1)},
    "sharded": lambda: {"batch_sampler": ShardedBatchSampler(BatchSampler(RandomSampler(23, seed=1), 4), 2)},
    "gluon style": lambda: {"sampler": GluonStyle(23), "batch_size": 4},
    "gluon style, rollover": lambda: {"sampler": GluonStyle(23), "batch_size": 4, "last_batch": "rollover"},
    "subclass of ours": lambda: {
        "sampler": OursInGluonStyle(permutation, 23),
        "batch_size": 4,
        "last_batch": "discard",
    },
    "unequal epochs": lambda: {"sampler": Growing(), "batch_size": 4},
    "reads another loader": lambda: {"sampler": Foreign(read_by_another_loader, 23), "batch_size": 4},
    "unsized": lambda: {"sampler": NoLength(range(23)), "batch_size": 4},
    "unsized, discard": lambda: {"sampler": NoLength(range(23)), "batch_size": 4, "last_batch": "discard"},
    "unsized batches": lambda: {"batch_sampler": NoLength([[3, 1, 4, 1, 5], [9], [2, 6, 5]])},
    "ranks": lambda: {"shuffle": True, "batch_size": 4, "num_replicas": 2, "rank": 1},
    "ranks, discard": lambda: {**SAMPLERS["ranks"](), "last_batch": "discard"},
    "torch random": lambda: {"sampler": torch_data.RandomSampler(range(23)), "batch_size": 4},
    "torch random, discard": lambda: {**SAMPLERS["torch random"](), "last_batch": "discard"},
    "torch distributed": lambda: {"sampler": ByEpoch(23), "batch_size": 4},
    "torch batches": lambda: {"batch_sampler": torch_data.BatchSampler(torch_data.RandomSampler(range(23)), 4, False)},
    "torch batches of ours": lambda: {"batch_sampler": torch_data.BatchSampler(RandomSampler(23, seed=1), 4, True)},
    "our batches of torch's": lambda: {"batch_sampler": BatchSampler(torch_data.RandomSampler(range(23)), 4, seed=2)},
    "discard, of torch's": lambda: {"batch_sampler": BatchSampler(torch_data.RandomSampler(range(23)), 4, "discard")},
    "rollover, of torch's": lambda: {"batch_sampler": BatchSampler(torch_data.RandomSampler(range(23)), 4, "rollover")},
    "stateful": lambda: {"sampler": Stateful(23), "batch_size": 4},
    "stateful by epoch": lambda: {"sampler": StatefulByEpoch(23), "batch_size": 4},
    "stateful by epoch, rollover": lambda: {"sampler": StatefulByEpoch(23), "batch_size": 4, "last_batch": "rollover"},
    "stateful by epoch, discard": lambda: {"sampler": StatefulByEpoch(23), "batch_size": 4, "last_batch": "discard"},
    "stateful, even": lambda: {"sampler": Stateful(24), "batch_size": 4},
    "stateful iterator": lambda: {"sampler": Foreign(lambda: StatefulIterator(23), 23), "batch_size": 4},
    "begins anew": lambda: {"sampler": BeginsAnew(23), "batch_size": 4},
    "tells too short a length": lambda: {"sampler": Foreign(range(23), 8), "batch_size": 4},
    "stateful, tells too short a length": lambda: {"sampler": StatefulTooShort(23), "batch_size": 4},
}


def permutation() -> Any:
    return np.random.permutation(23).tolist()


def read_by_another_loader() -> list[int]:
    return [index for batch in ShardedDataLoader(range(23), 5, seed=2) for index in batch.tolist()]


def sampled(kind: str, orders: dict[str, Callable[[], dict[str, Any]]] = SAMPLERS, **other: Any) -> ShardedDataLoader:
    arguments = orders[kind]()
    length = getattr(arguments.get("batch_sampler"), "dataset_length", None) or 40
    return ShardedDataLoader(range(length), seed=5, **arguments, **other)


def stream(loader: ShardedDataLoader, epochs: int = 3) -> list[list[Any]]:
    return [batches(loader) for _ in range(epochs)]


@pytest.mark.costly(5)
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler_resumes_after_every_batch(kind: str, every: int) -> None:
    """The quick cases take each third state, and those of an epoch's end."""
    whole = [batch for epoch in stream(sampled(kind), 3) for batch in epoch]
    loader = sampled(kind, pool="thread", num_workers=1, prefetch=9)  # reads ahead
    states = [loader.state_dict()]
    ends = set()
    for _ in range(2):
        for _ in loader:
            states.append(through_json(loader.state_dict()))
        ends.add(len(states))
        states.append(through_json(loader.state_dict()))
    delivered = 0
    for number, state in enumerate(states):
        if number and number not in ends:
            delivered += 1
        if number % every and number + 1 not in ends and number not in ends:
            continue
        with sampled(kind, pool="thread", num_workers=1, prefetch=3) as again:
            again.load_state_dict(state)
            rest = sum(stream(again), [])
        assert rest[: len(whole) - delivered] == whole[delivered:], number


def test_a_rank_that_a_state_has_taken_past_the_padding_reads_it_again() -> None:
    make = configuration(sampler=lambda: StatefulShuffle(23), num_replicas=2, rank=1)
    assert batches(resumed(make, 2)) == batches(make())[2:]


def test_the_rest_of_an_epoch_of_unknown_length_is_read_with_discard() -> None:
    loader = resumed(lambda: sampled("unsized, discard"), 1)
    assert (loader.epoch, loader.position, next(iter(loader)).tolist()) == (0, 1, [4, 5, 6, 7])


@covering(kind=SAMPLERS, told=[None, "next", "same"])
def test_a_state_from_the_end_of_an_epoch_begins_the_next_one_whoever_looks_at_it(kind: str, told: str | None) -> None:
    expected = stream(sampled(kind), 4)
    loader, other = sampled(kind), sampled(kind)
    batches(loader)
    batches(iter(loader), len(expected[1]))
    other.load_state_dict(through_json(loader.state_dict()))
    if "unsized" not in kind and "too short" not in kind:
        assert (other.epoch, other.position) == (2, 0)
    repr(other), iter(other)
    other.load_state_dict(through_json(other.state_dict()))
    if told is not None:
        other.set_epoch(1 if told == "same" else 2)
    if told != "same":
        assert stream(other, 2) == expected[2:]
    elif kind not in ("stateful", "stateful, even"):  # whose order comes from what was read
        assert stream(other, 3) == expected[1:]


def deliver(
    make: Callable[[int, int], ShardedDataLoader], ranks: int, state: Any, count: int | None, strict: bool = True
) -> tuple[list[Any], dict[str, Any]]:
    """Load on every rank, deliver so many batches of the epoch on each; the indices by rank, and rank 0's state."""
    shares, states = [], []
    for rank in range(ranks):
        loader = make(ranks, rank)
        if state is not None:
            loader.load_state_dict(state, strict=strict)
        shares.append(batches(iter(loader), count))
        states.append(through_json(loader.state_dict()))
    assert all(one == states[0] for one in states), "ranks disagree"
    assert len(set(map(len, shares))) == 1, "ranks have unequal numbers of steps"
    return shares, states[0]


def flat(shares: list[Any]) -> list[int]:
    """Indices in the global order: sample by sample, rank by rank."""
    return [int(i) for step in zip(*shares, strict=True) for group in zip(*step, strict=True) for i in group]


SEQUENCES = [(1, 2, 3, 1), (3, 1), (2, 4, 2), (4, 3, 2, 1), (2, 2), (1, 5)]
ORDERS = {
    "in order": lambda length: {},
    "shuffled": lambda length: {"shuffle": True},
    "foreign": lambda length: {"sampler": GluonStyle(length)},
    "stateful": lambda length: {"sampler": StatefulShuffle(length)},
}


def elastic(length: int, batch_size: int, order: str, last_batch: str) -> Callable[[int, int], ShardedDataLoader]:
    def make(ranks: int, rank: int, batch_size: int = batch_size) -> ShardedDataLoader:
        replicas = {"num_replicas": ranks, "rank": rank} if ranks > 1 or order != "in order" else {"seed": 0}
        return ShardedDataLoader(
            range(length),
            batch_size,
            last_batch=last_batch,
            **ORDERS[order](length),
            **replicas,  # type: ignore[operator]
        )

    return make


@covering(length=[60, 61, 67], ranks=SEQUENCES, order=ORDERS, last_batch=["keep", "discard"])
def test_other_numbers_of_ranks_see_the_samples_not_yet_seen_once_each(
    length: int, ranks: tuple[int, ...], order: str, last_batch: str
) -> None:
    make = elastic(length, 3, order, last_batch)
    whole = [int(i) for batch in make(1, 0) for i in batch]
    if last_batch == "discard":
        whole = [int(i) for batch in elastic(length, 1, order, "keep")(1, 0) for i in batch]
    seen: list[int] = []
    state = None
    for number in ranks[:-1]:
        shares, state = deliver(make, number, state, 2)
        seen += flat(shares)
        assert state["samples"] == len(seen)
    shares, state = deliver(make, ranks[-1], state, None)
    seen += flat(shares)
    left = length - len(seen)
    if last_batch == "keep":
        # What is too much is padding, from the beginning of the epoch.
        assert seen[:length] == whole
        assert -ranks[-1] < left <= 0
        assert all(index in whole for index in seen[length:])
    else:
        assert seen == whole[: len(seen)]
        assert 0 <= left < 3 * ranks[-1] and len(set(seen)) == len(seen)
    # The epoch after it is a whole one again.
    shares, _ = deliver(make, ranks[-1], state, None)
    pure = []
    for rank in range(ranks[-1]):
        loader = make(ranks[-1], rank)
        loader.set_epoch(1)
        pure.append(batches(loader))
    assert shares == pure


def roll(make: Callable[[int, int], ShardedDataLoader], ranks: tuple[int, ...]) -> tuple[list[int], dict[str, Any]]:
    """An epoch and a bit of the next on each number of ranks, then two more epochs; what was seen, and the state."""
    seen: list[int] = []
    state: Any = None
    for number in ranks:
        for count in (None, 2):
            shares, state = deliver(make, number, state, count)
            seen += flat(shares)
    for _ in range(2):
        shares, state = deliver(make, ranks[-1], state, None)
        seen += flat(shares)
    return seen, state


@pytest.mark.costly(3)
@covering(1, ranks=[(1, 2, 3, 1), (3, 1), (2, 4, 2), (4, 3, 2, 1), (2, 2), (1, 4)], order=ORDERS)
def test_with_rollover_other_numbers_of_ranks_see_the_endless_stream_once(ranks: tuple[int, ...], order: str) -> None:
    # 132 samples in twelves: no number of ranks up to 4 needs padding, and few of them fill an epoch with batches.
    seen, state = roll(elastic(132, 12, order, "rollover"), ranks)
    pure = elastic(132, 1, order, "keep")(1, 0)
    endless = [int(i) for epoch in stream(pure, 10) for batch in epoch for i in batch]
    assert seen == endless[: len(seen)]
    assert len(seen) == state["epoch"] * 132 + state["samples"] > 3 * 132


@pytest.mark.parametrize("ranks", SEQUENCES)
def test_other_numbers_of_ranks_see_the_batches_not_yet_seen_once_each(ranks: tuple[int, ...]) -> None:
    def make(replicas: int, rank: int) -> ShardedDataLoader:
        sampler = torch_data.BatchSampler(torch_data.RandomSampler(range(61)), 2, False)
        return ShardedDataLoader(range(61), batch_sampler=sampler, num_replicas=replicas, rank=rank)

    whole = batches(make(1, 0))
    seen: list[Any] = []
    state: Any = None
    for place, number in enumerate(ranks, 1):
        shares, state = deliver(make, number, state, None if place == len(ranks) else 2)
        seen += [batch for step in zip(*shares, strict=True) for batch in step]
    assert seen[: len(whole)] == whole
    assert 0 <= len(seen) - len(whole) < ranks[-1], "more than padding"


@pytest.mark.costly(5)
@pytest.mark.parametrize("last_batch", ["keep", "discard", "rollover"])
@pytest.mark.parametrize("order", ORDERS)
def test_with_another_batch_size_the_samples_not_yet_seen_come_once_each(order: str, last_batch: str) -> None:
    whole = [int(i) for epoch in stream(elastic(61, 1, order, "keep")(1, 0), 8) for batch in epoch for i in batch]
    seen: list[int] = []
    state: Any = None
    for batch_size in (4, 7, 3, 11, 4):
        loader = elastic(61, batch_size, order, last_batch)(1, 0)
        if state is not None:
            if batch_size != state["batch_size"]:
                with pytest.raises(ValueError, match="strict=False"):
                    loader.load_state_dict(state)
            loader.load_state_dict(state, strict=False)
        for count in (None, 2) if last_batch == "rollover" else (2,):
            seen += [int(i) for batch in batches(iter(loader), count) for i in batch]
        state = through_json(loader.state_dict())
    assert seen == whole[: len(seen)] and len(seen) > 50


def test_a_batch_size_that_divides_differently_tells_a_length_that_fits() -> None:
    loader, again = (ShardedDataLoader(range(100), size, seed=0) for size in (5, 10))
    batches(iter(loader), 3)
    again.load_state_dict(loader.state_dict(), strict=False)
    assert again.position == 1
    rest = batches(again)
    assert [len(batch) for batch in rest] == [10] * 8 + [5] and rest[0][0] == 15


SPLITS: dict[str, dict[str, Any]] = {
    "host": {},
    "one device": {"device": "cpu"},
    "list of one": {"devices": ["cpu"]},
    "list of two": {"devices": ["cpu", "cpu"]},
    "more than samples": {"devices": ["cpu"] * 9},
    "fewer shards than devices": {"devices": ["cpu"] * 3, "num_shards": 2},
    "uneven": {"devices": ["cpu", "cpu"], "shard_weights": [3, 1]},
    "shards": {"num_shards": 3},
}


def split(name: str, **other: Any) -> ShardedDataLoader:
    return made(Drawing(23), 8, True, seed=5, **SPLITS[name], **other)


@covering(saved=SPLITS, loaded=SPLITS)
def test_a_state_resumes_on_other_devices_as_if_it_had_been_read_there(saved: str, loaded: str) -> None:
    expected = stream(split(loaded), 2)
    again = resumed(iter([split(saved), split(loaded)]).__next__, 2)
    assert stream(again, 2) == [expected[0][2:], expected[1]]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (2, 3)])
def test_a_sharded_batch_sampler_may_split_into_other_shards(saved: int, loaded: int) -> None:
    def make(shards: int) -> ShardedDataLoader:
        sampler = ShardedBatchSampler(BatchSampler(RandomSampler(23, seed=3), 5), shards)
        return ShardedDataLoader(Drawing(23), batch_sampler=sampler, seed=5)

    assert batches(resumed(iter([make(saved), make(loaded)]).__next__, 2)) == batches(make(loaded))[2:]


@pytest.mark.parametrize("kind", ["shuffled", "by epoch"])
@pytest.mark.parametrize("where", ["loader", "sampler", "batch_sampler"])
def test_set_epoch_keeps_a_loaded_place_in_that_epoch_and_drops_any_other(where: str, kind: str) -> None:
    expected = stream(CONFIGURATIONS[kind]())
    for epoch, rest in ((1, expected[1][2:]), (0, expected[0]), (2, expected[2])):
        again = resumed(CONFIGURATIONS[kind], 2, before=1)
        (again if where == "loader" else getattr(again, where)).set_epoch(epoch)
        assert (again.epoch, again.position) == (epoch, 2 if epoch == 1 else 0)
        assert batches(again) == rest
        assert again.epoch == epoch + 1


def test_of_several_iterators_the_one_that_delivered_last_is_told() -> None:
    loader = CONFIGURATIONS["shuffled"]()
    expected = stream(CONFIGURATIONS["shuffled"](), 2)
    first, second = iter(loader), iter(loader)
    got = batches(first, 1)
    assert got + batches(second, 3) == expected[0][:1] + expected[1][:3]
    batches(first, 1)
    state = loader.state_dict()
    assert (state["epoch"], state["samples"], loader.epoch, loader.position) == (0, 8, 0, 2)
    batches(second, 1)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 16)
    again = CONFIGURATIONS["shuffled"]()
    again.load_state_dict(state)
    assert batches(again) == expected[0][2:]


def test_loading_leaves_a_live_iterator_alone() -> None:
    loader = CONFIGURATIONS["shuffled"]()
    expected = stream(CONFIGURATIONS["shuffled"](), 3)
    live = iter(loader)
    got = batches(live, 2)
    state = loader.state_dict()
    got += batches(live, 1)
    loader.load_state_dict(state)
    got += batches(live, 1)
    assert loader.state_dict() == state, "until the next iter it is what was loaded"
    resumed = iter(loader)
    got += batches(live)
    assert got == expected[0]
    assert batches(resumed) == expected[0][2:]
    assert batches(loader) == expected[1]


def test_a_batch_that_was_left_out_is_done() -> None:
    loader = ShardedDataLoader(Drawing(23, range(4, 8)), 4, on_error="skip", seed=0)
    with pytest.warns(UserWarning, match="batch 1 was left out"):
        batches(iter(loader), 2)
    assert loader.state_dict()["samples"] == 12


def test_a_dataset_that_has_grown_since_loading_is_refused() -> None:
    data = list(range(20))
    loader = ShardedDataLoader(data, 4, True, seed=1)
    batches(iter(loader), 2)
    loader.load_state_dict(loader.state_dict())
    data.append(20)
    loader.refresh()
    with pytest.raises(ValueError, match="a dataset of 20 samples, and loader.refresh\\(\\) found 21"):
        next(iter(loader))
    loader.set_epoch(1)
    assert len(batches(loader)) == 6


UNSEEDED: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "own sampler": lambda: {"batch_size": 4, "sampler": RandomSampler(23)},
    "own batch sampler": lambda: {"batch_sampler": SortedBucketSampler(LENGTHS, 3, 2, shuffle=True)},
    "wrapped": lambda: {"batch_sampler": torch_data.BatchSampler(RandomSampler(23), 4, False)},
    "own over torch's": lambda: {"batch_sampler": BatchSampler(torch_data.RandomSampler(range(23)), 4)},
    "torch": lambda: {"batch_size": 4, "sampler": torch_data.RandomSampler(range(23))},
}


@covering(seeds=[(None, None), (1, None), (None, 2), (1, 2)], kind=UNSEEDED, pool=["inline", "process"])
def test_a_seed_that_was_drawn_or_given_comes_with_the_state(kind: str, seeds: Any, pool: str) -> None:
    def make(seed: int | None, **other: Any) -> ShardedDataLoader:
        return ShardedDataLoader(Drawing(23), seed=seed, **UNSEEDED[kind](), **other)

    loader = make(seeds[0])
    batches(iter(loader), 2)
    state = through_json(loader.state_dict())
    loader.load_state_dict(state)
    expected = batches(loader) + batches(loader)
    with make(seeds[1], pool=pool, num_workers=1) as again:
        batches(iter(again), 1)  # the workers have started, with another seed
        again.load_state_dict(state)
        assert again.seed == loader.seed
        assert batches(again) + batches(again) == expected


@pytest.mark.parametrize("batch", [False, True])
def test_a_sampler_that_yields_others_is_refused_by_name(batch: bool) -> None:
    turns = itertools.count()
    changing = Foreign(lambda: [(index + turn) % 23 for turn in [next(turns)] for index in range(23)], 23)
    given = {"batch_sampler": torch_data.BatchSampler(changing, 4, False)} if batch else {"sampler": changing}
    with pytest.raises(ValueError, match="the sampler, a .*(Foreign|BatchSampler), yields other indices in epoch 0"):
        next(iter(resumed(lambda: ShardedDataLoader(range(23), None if batch else 4, seed=1, **given), 2)))


def test_a_sampler_that_has_become_shorter_is_refused_by_name() -> None:
    loaders = (ShardedDataLoader(range(23), 4, sampler=list(range(length)), seed=1) for length in (23, 10))
    with pytest.raises(ValueError, match="a list, yields only 10 items in epoch 0, where it had yielded 20"):
        next(iter(resumed(loaders.__next__, 5)))


def test_a_fast_forward_reads_no_data_and_a_sampler_with_a_state_not_even_its_indices() -> None:
    counts: Counter[str] = Counter()

    class Counting(Drawing):
        def __getitem__(self, index: int) -> Any:
            counts["reads"] += 1
            return super().__getitem__(index)

    class Counted(StatefulShuffle):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                counts["yields"] += 1
                yield index

    class CountedIterator(StatefulIterator):
        def __next__(self) -> int:
            counts["yields"] += 1
            return super().__next__()

    for kind in (GluonStyle, Counted, lambda length: Foreign(lambda: CountedIterator(length), length)):
        again = resumed(lambda: ShardedDataLoader(Counting(100), 4, sampler=kind(100), seed=1), 20)  # noqa: B023
        counts.clear()
        batches(iter(again), 1)
        assert counts == {"reads": 4, **({} if kind is GluonStyle else {"yields": 4})}


@pytest.mark.parametrize("kind", [ByEpoch, StatefulByEpoch])
def test_with_a_distributed_sampler_of_torchs_one_rank_saves_and_all_load(kind: Any) -> None:
    def make(rank: int) -> ShardedDataLoader:
        return ShardedDataLoader(range(40), 4, sampler=kind(40, 2, rank), seed=1)

    for rank in range(2):
        assert batches(resumed(iter([make(0), make(rank)]).__next__, 2)) == batches(make(rank))[2:]


def test_our_samplers_jump_to_any_place_of_a_trillion() -> None:
    loader = ShardedDataLoader(range(10**12), 4, True, seed=1)
    state = {**loader.state_dict(), "samples": 4 * 10**11}
    loader.load_state_dict(state)
    assert loader.position == 10**11
    first = next(iter(loader)).tolist()
    assert first == list(itertools.islice(RandomSampler(10**12, seed=1).iter_epoch(0, 4 * 10**11), 4))
    other = ShardedDataLoader(range(10**12), 4, True, num_replicas=3, rank=1)
    other.load_state_dict(state)
    assert len(batches(iter(other), 2)) == 2


COSTS = [1 + index * 7 % 50 for index in range(120)]

OF_LENGTH: dict[str, Callable[[int], dict[str, Any]]] = {
    "in order": lambda n: {},
    "shuffled": lambda n: {"shuffle": True},
    "discard": lambda n: {"shuffle": True, "last_batch": "discard"},
    "evaluate": lambda n: {"evaluate": True},
    "costs": lambda n: {"costs": COSTS[:n]},
    "repeated": lambda n: {"shuffle": True, "sampler": RepeatedSampler(2)},
    "a given sampler": lambda n: {"sampler": RandomSampler(n, seed=1)},
    "a sampler of the first samples": lambda n: {"sampler": WeightedRandomSampler(COSTS[:100], 100, seed=1)},
    "batches": lambda n: {"batch_size": None, "batch_sampler": BatchSampler(RandomSampler(n, seed=1), 4)},
}


def of_length(kind: str, length: int, replicas: int = 1, rank: int = 0) -> ShardedDataLoader[Any]:
    given = {"batch_size": 4, "collate_fn": list, "seed": 3, **OF_LENGTH[kind](length)}
    return ShardedDataLoader(range(length), num_replicas=replicas, rank=rank, **given)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", OF_LENGTH)
def test_over_data_that_have_grown_the_rest_of_an_epoch_is_that_of_before(kind: str, replicas: int) -> None:
    loader = of_length(kind, 100, replicas)
    loader.set_epoch(1)
    iterator = iter(loader)
    assert len(list(itertools.islice(iterator, 3))) == 3
    state = through_json(loader.state_dict())
    grown = of_length(kind, 120, replicas)
    before = grown.state_dict()
    with pytest.raises(ValueError, match="had 100 samples, and has 120.*With strict=False, .* of all; .*grow"):
        grown.load_state_dict(state)
    assert grown.state_dict() == before
    grown.load_state_dict(state, strict=False)
    assert (grown.epoch, grown.position, len(grown)) == (1, 3, len(loader))
    first = next(resumed := iter(grown))
    again = of_length(kind, 120, replicas)
    again.load_state_dict(through_json(grown.state_dict()), strict=False)  # in the rest of that epoch
    rest, new = list(iterator), of_length(kind, 120, replicas)
    assert [first, *resumed] == rest and list(again) == rest[1:]
    assert kind == "costs" or grown.indices(1, 0) == loader.indices(1, 0)  # also what was read before
    new.set_epoch(2)
    assert list(grown) == list(new)  # the next epoch has all of them


@pytest.mark.parametrize("kind", ["in order", "shuffled", "batches"])
def test_at_the_end_of_an_epoch_data_may_have_grown(kind: str) -> None:
    loader, new = of_length(kind, 100), of_length(kind, 120)
    list(loader)
    grown = of_length(kind, 120)
    grown.load_state_dict(loader.state_dict(), strict=False)
    new.set_epoch(1)
    assert grown.epoch == 1 and list(grown) == list(new)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda n: {"sampler": WeightedRandomSampler(COSTS[:n], n, seed=1)}, "the sampler had 100 samples"),
        (
            lambda n: {"batch_sampler": SortedBucketSampler(COSTS[:n], 4), "batch_size": None},
            "the sampler had 25 batches",
        ),
        (lambda n: {"steps_per_epoch": 5}, "the dataset had 100"),
        (lambda n: {"last_batch": "rollover"}, "the dataset had 100"),
    ],
)
def test_an_order_that_is_another_one_over_grown_data_is_an_error_with_a_way_on(given: Any, said: str) -> None:
    def made(length: int) -> ShardedDataLoader[Any]:
        return ShardedDataLoader(range(length), **{"batch_size": 4, "seed": 3, **given(length)})

    loader, grown = made(100), made(120)
    next(iter(loader))
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"has 120.*Read the epoch to its end with the first 100.*set_epoch\(1\)"):
            grown.load_state_dict(loader.state_dict(), strict=strict)
    with pytest.raises(ValueError, match=said):
        grown.load_state_dict(loader.state_dict(), strict=False)
    grown.set_epoch(1)
    assert next(iter(grown)) is not None


@pytest.mark.parametrize("kind", OF_LENGTH)
@pytest.mark.parametrize("done", [0, 2, 60])
def test_data_that_have_shrunk_are_an_error_that_says_what_is_missing(kind: str, done: int) -> None:
    loader = of_length(kind, 120)
    assert len(list(itertools.islice(iter(loader), done))) == min(done, len(loader))
    state = loader.state_dict()
    for strict in (True, False):
        with pytest.raises(ValueError, match="had 120 samples, and has 110.*Samples 110 to 119 are missing"):
            of_length(kind, 110).load_state_dict(state, strict=strict)


def test_a_loaded_place_does_not_come_back_with_its_epoch() -> None:
    loader = ShardedDataLoader(range(10), 3)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    for epoch in (1, 0):
        loader.set_epoch(epoch)
    assert (loader.epoch, loader.position, next(iter(loader)).tolist()) == (0, 0, [0, 1, 2])


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


def test_an_iterator_that_gave_nothing_has_a_state_that_is_loaded_later_and_loses_no_loaded_place(pool: Pool) -> None:
    with make(pool) as loader:
        batches(iter(loader), 2)
        state = loader.state_dict()
        for _ in range(2):
            iterator = iter(loader)
            loader.load_state_dict(state)
            iter(loader)
            gc.collect()
            assert (loader.epoch, loader.position, loader.state_dict()) == (0, 2, state)
            assert batches(iterator) == EXPECTED[0][2:]


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
