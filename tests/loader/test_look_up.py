"""``loader.indices`` and ``loader.batch``: any step of any epoch, past or to come; nothing changes."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, covering, make_pool
from samples import ByEpoch, Drawing, GluonStyle, NoLength, summed

from sharded_loader import (
    BatchSampler,
    Dataset,
    FixedBucketSampler,
    LoaderWarning,
    PackSampler,
    Placement,
    RandomSampler,
    RepeatedSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    interleave,
    sample_rng,
)
from sharded_loader.sampling import own

LENGTH = 23


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 3},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "discard": lambda: {"batch_size": 4, "shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"batch_size": 5, "shuffle": True, "last_batch": "rollover"},
    "steps": lambda: {"batch_size": 3, "shuffle": True, "steps_per_epoch": 4},
    "evaluate": lambda: {"batch_size": 4, "evaluate": True},
    "costs": lambda: {"batch_size": 3, "costs": np.arange(LENGTH) + 1},
    "repeated": lambda: {"batch_size": 4, "shuffle": True, "sampler": RepeatedSampler(2)},
    "list": lambda: {"batch_size": 3, "sampler": [4, 8, 1, 10, 2]},
    "buckets": lambda: {"batch_sampler": FixedBucketSampler(list(range(1, LENGTH + 1)), 3, num_buckets=2, seed=4)},
    "shards": lambda: {
        "batch_sampler": ShardedBatchSampler(BatchSampler(RandomSampler(LENGTH, seed=4), 4), num_shards=2)
    },
    "packed": lambda: {"batch_sampler": PackSampler(list(range(1, LENGTH + 1)), LENGTH, 2, seed=4)},
    "by epoch": lambda: {"batch_size": 3, "sampler": ByEpoch(LENGTH)},
    "own": lambda: {"batch_size": 3, "sampler": GluonStyle(lambda: random.sample(range(LENGTH), LENGTH), LENGTH)},
    "torch": lambda: {"batch_size": 3, "sampler": torch_data.RandomSampler(range(LENGTH))},  # type: ignore[arg-type]
    "torch, steps": lambda: {**ORDERS["torch"](), "steps_per_epoch": 5},
}
RANKS = {"alone": {}, "rank 1 of 2": {"num_replicas": 2, "rank": 1}}


def loader_of(order: str, **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(range(LENGTH), collate_fn=list, seed=5, **ORDERS[order](), **given)


def plain(batch: Any) -> Any:
    if isinstance(batch, tuple):
        return plain(batch[0]), batch[1]
    return [plain(one) if isinstance(one, list) else int(one) for one in batch]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_indices_and_the_batch_of_a_step_are_those_that_come(order: str, ranks: str) -> None:
    loader, other = loader_of(order, **RANKS[ranks]), loader_of(order, **RANKS[ranks])
    coming = [loader.indices(epoch, 0) for epoch in range(3)]
    read = [[plain(batch) for batch in loader] for _ in range(3)]
    assert coming == [batches[0] for batches in read]
    state = loader.state_dict()
    past = [[loader.indices(epoch, step) for step in range(len(read[epoch]))] for epoch in range(3)]
    assert past == read
    assert plain(loader.batch(1, len(read[1]) - 1)) == read[1][-1]
    for number in (np.int64, np.array, torch.tensor):
        assert loader.indices(number(1), number(0)) == plain(loader.batch(number(1), number(0))) == read[1][0]
    for epoch in range(3):
        with pytest.raises(IndexError, match=f"epoch {epoch} has no step {len(read[epoch])}"):
            loader.indices(epoch, len(read[epoch]))
    assert loader.state_dict() == state
    other.set_epoch(3)
    assert [plain(batch) for batch in loader] == [plain(batch) for batch in other]


@pytest.mark.parametrize("order", ["shuffled", "rollover", "steps", "buckets", "by epoch"])
def test_in_mid_epoch_and_after_a_resume_past_steps_are_known(order: str) -> None:
    whole = loader_of(order)
    read = [[plain(batch) for batch in whole] for _ in range(2)]
    loader = loader_of(order)
    loader.set_epoch(1)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert [loader.indices(1, step) for step in range(len(read[1]))] == read[1]
    assert [plain(batch) for batch in iterator] == read[1][2:]
    resumed = loader_of(order)
    resumed.load_state_dict(state)
    assert [[resumed.indices(e, step) for step in range(len(read[e]))] for e in range(2)] == read
    assert [plain(batch) for batch in resumed] == read[1][2:]


@pytest.mark.parametrize("order", ["shuffled", "evaluate", "buckets", "costs", "steps"])
def test_one_rank_knows_the_steps_of_all_ranks(order: str) -> None:
    loaders = [loader_of(order, num_replicas=3, rank=rank) for rank in range(3)]
    read = [[plain(batch) for batch in loader] for loader in loaders]
    assert [[loaders[0].indices(0, step, rank) for step in range(len(read[0]))] for rank in range(3)] == read
    with pytest.raises(ValueError, match="rank is 3, and this loader knows 3 ranks"):
        loaders[0].indices(0, 0, 3)


def test_a_distributed_sampler_knows_its_own_rank_only() -> None:
    sampler = torch_data.DistributedSampler(range(LENGTH), 2, 1, shuffle=True)  # type: ignore[arg-type]
    loader = ShardedDataLoader(range(LENGTH), 3, sampler=sampler)
    read = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert [[loader.indices(epoch, step) for step in range(4)] for epoch in range(2)] == read
    assert loader.indices(0, 0, 1) == read[0][0]
    with pytest.raises(ValueError, match="samples of rank 1 only"):
        loader.indices(0, 0, 0)


class Counting(ByEpoch):
    """One that counts its epochs itself."""

    set_epoch: Any = None

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return super().__iter__()


def from_globals() -> Iterator[int]:
    """Draws from a global generator for each item."""
    return (random.randrange(LENGTH) for _ in range(LENGTH))


@pytest.mark.parametrize("make", [lambda: Counting(LENGTH), lambda: NoLength(from_globals)])
def test_a_sampler_that_cannot_be_read_again_is_named(make: Callable[[], Any]) -> None:
    loader, twin = (ShardedDataLoader(range(LENGTH), 3, sampler=make(), seed=1) for _ in range(2))
    random.seed(3)
    before = random.getstate()
    with pytest.raises(ValueError, match="epoch 4 cannot be looked up: the sampler, a (Counting|NoLength)"):
        loader.indices(4, 2)
    assert random.getstate() == before
    read = [batch.tolist() for batch in loader]
    random.setstate(before)
    assert [batch.tolist() for batch in twin] == read


def test_the_samples_of_a_mixture_are_named_by_dataset_and_index() -> None:
    datasets = [[f"a{i}" for i in range(9)], [f"b{i}" for i in range(4)], ["never"]]
    for given in ({"shuffle": True}, {"stop": "each_once"}, {}):
        mixed = interleave(datasets, weights=[2, 1, 0], **given)  # type: ignore[arg-type]
        loader = ShardedDataLoader(mixed, 2)
        for epoch in range(2):
            named = [loader.indices(epoch, step) for step in range(len(loader))]
            assert [[datasets[source][index] for source, index in step] for step in named] == list(loader)


def test_weights_that_were_set_count_for_the_steps_since_then() -> None:
    def make() -> ShardedDataLoader[Any]:
        return ShardedDataLoader(interleave([["a"] * 30, ["b"] * 30], stop=24, shuffle=True), 4)

    loader, read = make(), []
    for epoch in range(4):
        for step, batch in enumerate(loader):
            read.append(batch)
            if (epoch, step) in ((0, 1), (0, 3), (2, 2), (3, 0)):
                loader.set_weights([epoch, step])

    def of(one: ShardedDataLoader[Any], epoch: int) -> list[list[str]]:
        return [["ab"[source] for source, _ in one.indices(epoch, step)] for step in range(6)]

    assert [batch for epoch in range(4) for batch in of(loader, epoch)] == read
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert of(resumed, 3) == read[18:]
    with pytest.raises(ValueError, match="weights of step 0 in epoch 1 are not known"):
        resumed.indices(1, 0)


def test_steps_that_other_ranks_or_other_batches_have_read_are_not_made_up() -> None:
    loader = ShardedDataLoader(range(24), 2, shuffle=True, seed=1, num_replicas=2, rank=0)
    iterator = iter(loader)
    read = [next(iterator).tolist() for _ in range(3)]
    assert [loader.indices(0, step) for step in range(3)] == read
    with pytest.warns(LoaderWarning, match="To keep the 4, give batch_size=4"):
        loader.rescale(1, 0)
    position, rest = loader.position, [batch.tolist() for batch in iterator]
    assert [loader.indices(0, position + n) for n in range(len(rest))] == rest
    with pytest.raises(ValueError, match="step 1 of epoch 0 was read by other ranks.*goes on from step 6 of epoch 0"):
        loader.indices(0, 1)
    assert loader.indices(1, 0) == next(iter(loader)).tolist()
    first = ShardedDataLoader(range(24), 3, shuffle=True, seed=1)
    iterator = iter(first)
    next(iterator), next(iterator)
    loader = ShardedDataLoader(range(24), 4, shuffle=True)
    loader.load_state_dict(first.state_dict(), strict=False)
    with pytest.raises(ValueError, match="in other batches"):
        loader.indices(0, 0)
    read = [batch.tolist() for batch in loader]
    assert [loader.indices(0, 1 + step) for step in range(len(read))] == read
    later = ShardedDataLoader(range(24), 4, shuffle=True)
    later.load_state_dict(first.state_dict(), strict=False)
    next(iter(later))
    later.load_state_dict(later.state_dict())  # of the same batches
    with pytest.raises(ValueError, match="in other batches"):
        later.indices(0, 0)
    loader.load_state_dict(ShardedDataLoader(range(24), 4, shuffle=True, seed=1).state_dict())
    assert loader.indices(0, 0) == first.indices(0, 0) + first.indices(0, 1)[:1]


def test_what_can_be_told_of_iterable_data_is_told_and_no_step_and_a_closed_loader_are_refused() -> None:
    loader = ShardedDataLoader(lambda: iter(range(9)), 2, streams=4, num_replicas=2, rank=1)
    with pytest.raises(TypeError, match="is iterable data: which samples a step has"):
        loader.indices(0, 3)
    with pytest.raises(TypeError, match="iterable data"):
        loader.batch(0, 3)
    loader = ShardedDataLoader(range(9), 2)
    for place, error in (((0, -1), ValueError), ((-1, 0), ValueError), ((0, 1.5), TypeError)):
        with pytest.raises(error, match="count from 0"):
            loader.indices(*place)
    loader.close()
    for look in (loader.indices, loader.batch):
        with pytest.raises(RuntimeError, match="closed"):
            look(0, 0)


class Drawn(Dataset):
    """Samples with random numbers of each kind, and of the epoch."""

    epoch = -1

    def __init__(self, globals_too: bool) -> None:
        self.globals_too = globals_too

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()] if self.globals_too else []
        return np.array([index, self.epoch, sample_rng().random(), *drawn])


@covering(pool=POOLS)
def test_a_batch_has_the_values_that_came_to_the_last_bit(pool: str) -> None:
    loader = ShardedDataLoader(
        Drawn(pool not in ("inline", "thread")),
        4,
        shuffle=True,
        seed=3,
        collate_fn=summed,
        pool=make_pool(pool, 2),
        num_shards=2,
        device=Placement(device_transform=lambda batch, rng: batch + rng.random()),
    )
    with loader:
        coming = loader.batch(1, 2)
        read = [list(loader) for _ in range(2)]
        state, drawn = loader.state_dict(), (random.getstate(), torch.get_rng_state())
        for epoch, batches in enumerate(read):
            for step, batch in enumerate(batches):
                assert all(map(torch.equal, loader.batch(epoch, step), batch))
        assert all(map(torch.equal, coming, read[1][2]))
        assert loader.state_dict() == state
        assert random.getstate() == drawn[0] and torch.equal(torch.get_rng_state(), drawn[1])


def test_on_error_counts_for_a_batch_that_is_read_again() -> None:
    bad = Drawing(8, bad=(1, 4, 5))
    with pytest.raises(ValueError, match="bad 1"):
        ShardedDataLoader(bad, 2).batch(0, 0)
    loader = ShardedDataLoader(bad, 2, on_error="skip")
    assert loader.batch(0, 0)[:, 0].tolist() == [0]
    with pytest.raises(ValueError, match="epoch 0, batch 2 was left out"):
        loader.batch(0, 2)
    assert loader.num_skipped == 0


def test_steps_of_one_epoch_are_looked_up_with_one_shuffle() -> None:
    before = own.kept_shuffle.cache_info().misses
    loader = ShardedDataLoader(range(100), 10, shuffle=True, seed=977_231)
    steps = [loader.indices(3, step) for step in range(10)]
    assert sorted(sum(steps, [])) == list(range(100))
    assert [loader.batch(3, step).tolist() for step in range(10)] == steps
    assert loader.when(steps[4][2], epoch=3) == [(3, 4, 0, 2)]
    assert own.kept_shuffle.cache_info().misses == before + 1  # of 4 million samples, each takes 0.2 s
