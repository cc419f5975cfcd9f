"""``indices``, ``batch`` and ``skip`` of the drop-in: any step, and steps that are left out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import POOLS, covering
from drop_in_samples import Counting, Shared
from samples import Augmented, ByEpoch, summed
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

import sharded_loader
from sharded_loader import FixedBucketSampler, LoaderWarning
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTH, SIZE = 22, 3  # 8 steps
DATA = range(LENGTH)


class EachFromGlobals(Sampler[int]):
    """Draws from the global generator for each item, as some programs' samplers do."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(LENGTH, ())) for _ in DATA)

    def __len__(self) -> int:
        return LENGTH


class FromPython(EachFromGlobals):
    """Draws from a generator that is not torch's."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(DATA, LENGTH))


BY_NUMBER: dict[str, Callable[[], dict[str, Any]]] = {
    "in turn": dict,
    "seed": lambda: {"shuffle": True, "seed": 5},
    "seed, in turn": lambda: {"seed": 5},
    "drop_last": lambda: {"shuffle": True, "seed": 5, "drop_last": True},
    "single samples": lambda: {"shuffle": True, "seed": 5, "batch_size": None, "collate_fn": None},
    "ours": lambda: {"sampler": sharded_loader.RandomSampler(LENGTH, seed=3)},
    "our batches": lambda: {
        "batch_size": 1,
        "batch_sampler": FixedBucketSampler(list(range(1, LENGTH + 1)), SIZE, num_buckets=2, seed=4, shuffle=True),
    },
}
NAMED: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed": lambda: {"sampler": DistributedSampler(DATA, 2, 1, seed=3)},  # type: ignore[arg-type]
    "by epoch": lambda: {"sampler": ByEpoch(LENGTH)},
    "batches by epoch": lambda: {"batch_size": 1, "batch_sampler": BatchSampler(ByEpoch(LENGTH), SIZE, False)},
    "shuffle": lambda: {"shuffle": True},
}
NEWEST: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "random": lambda: {"sampler": RandomSampler(DATA)},  # type: ignore[arg-type]
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)},
    "distributed": lambda: {"sampler": DistributedSampler(DATA, 2, 1, seed=3)},  # type: ignore[arg-type]
}


def loader_of(made: Callable[[], dict[str, Any]], dataset: Any = DATA, **given: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": SIZE, "collate_fn": list, **made(), **given})


def plain(batch: Any) -> list[int]:
    return [int(one) for one in batch] if isinstance(batch, list) else [int(batch)]


def seeded(**given: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(LENGTH), SIZE, shuffle=True, seed=5, collate_fn=summed, **given)


def workers(pool: str, num_workers: int = 2) -> dict[str, Any]:
    """The arguments of a pool by the name that tests are parametrised with."""
    if pool == "inline":
        return {}
    return {"num_workers": num_workers} | ({"thread_pool": True} if pool == "thread" else {"start_method": pool})


def epochs_of(loader: DataLoader[Any], count: int = 3) -> list[list[Any]]:
    return [[batch.tolist() for batch in loader] for _ in range(count)]


# -- indices and batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*BY_NUMBER, *(f"named: {name}" for name in NAMED)])
def test_any_step_of_any_epoch_is_known_where_its_number_decides(order: str) -> None:
    named = order.startswith("named: ")
    made = NAMED[order.removeprefix("named: ")] if named else BY_NUMBER[order]
    torch.manual_seed(9)
    loader, read = loader_of(made), []
    for epoch in range(3):
        if named:
            loader.set_epoch(epoch)
        read.append([plain(batch) for batch in loader])
    generator, state = torch.get_rng_state(), loader.state_dict()
    known = [[loader.indices(epoch, step) for step in range(len(read[epoch]))] for epoch in range(3)]
    assert known == read
    coming = loader.indices(3, 1)
    for epoch in (1, 2, 3):
        with pytest.raises(IndexError, match=f"epoch {epoch} has no step {len(read[0]) + 9}"):
            loader.indices(epoch, len(read[0]) + 9)
    assert plain(loader.batch(1, 2)) == read[1][2]
    assert loader.state_dict() == state and torch.equal(torch.get_rng_state(), generator)
    if named:
        loader.set_epoch(3)
    assert plain([*loader][1]) == coming


@pytest.mark.parametrize("order", NEWEST)
def test_of_other_orders_the_newest_epoch_is_known_and_a_loaded_one(order: str) -> None:
    loader, unknown = (
        loader_of(NEWEST[order]),
        "epoch . cannot be looked up|only epoch 1 is known.*call loader.set_epoch",
    )
    [*loader]
    iterator = iter(loader)
    read = [plain(next(iterator)), plain(next(iterator))]
    before = torch.get_rng_state()
    known = [loader.indices(1, step) for step in range(4)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)
    read += [plain(batch) for batch in iterator]
    assert known == read[:4]
    assert [loader.indices(1, step) for step in range(len(read))] == read
    for epoch in (0, 2):
        with pytest.raises(ValueError, match=unknown):
            loader.indices(epoch, 0)
    other = loader_of(NEWEST[order])
    other.load_state_dict(state)
    assert [other.indices(1, step) for step in range(len(read))] == read
    assert [plain(batch) for batch in other] == read[2:]
    assert [other.indices(1, step) for step in range(len(read))] == read


def test_of_a_sampler_that_draws_each_batch_those_are_known_that_it_has_drawn() -> None:
    torch.manual_seed(3)
    loader = loader_of(lambda: {"sampler": EachFromGlobals()}, num_workers=2, thread_pool=True)
    iterator = iter(loader)
    read = [plain(next(iterator)) for _ in range(3)]
    drawn = 3 + 4  # two for each worker
    known = [loader.indices(0, step) for step in range(drawn)]
    with pytest.raises(ValueError, match=f"step {drawn} of epoch 0 is not known yet.*has yielded {drawn} steps"):
        loader.indices(0, drawn)
    read += [plain(batch) for batch in iterator]
    assert known == read[:drawn]
    assert [loader.indices(0, step) for step in range(len(read))] == read


def test_a_sampler_that_draws_from_elsewhere_is_refused() -> None:
    loader = loader_of(lambda: {"sampler": FromPython()})
    with pytest.raises(ValueError, match="epoch 0 cannot be looked up: the sampler, a BatchSampler, yields other"):
        loader.indices(0, 0)
    iterator = iter(loader)
    next(iterator), next(iterator), next(iterator)
    with pytest.raises(ValueError, match="yields other indices when it is read again"):
        loader.indices(0, 0)


@covering(pool=POOLS)
def test_a_batch_of_any_step_has_its_random_numbers(pool: str) -> None:
    loader = seeded(**workers(pool))
    read = epochs_of(loader, 2)
    assert [[loader.batch(epoch, step).tolist() for step in range(8)] for epoch in range(2)] == read
    iterator = iter(loader)
    third = [next(iterator).tolist()]
    again = loader.batch(2, 4).tolist()
    third += [batch.tolist() for batch in iterator]
    assert again == third[4]


class Told(Augmented):
    """Its samples depend on the epoch that it was told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + 100 * self.epoch


@covering(pool=POOLS)
def test_a_dataset_is_told_the_epoch_of_the_batch_and_then_its_own(pool: str) -> None:
    loader, read = DataLoader(Told(LENGTH), SIZE, shuffle=True, seed=5, collate_fn=summed, **workers(pool)), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        read.append([batch.tolist() for batch in loader])
    assert [loader.batch(epoch, 1).tolist() for epoch in (0, 2, 1)] == [read[0][1], read[2][1], read[1][1]]
    assert loader.dataset.epoch == 2


def test_iterable_data_is_refused_with_the_part_of_the_step() -> None:
    with pytest.raises(TypeError, match="step 5 of epoch 0 is batch 2 of part 1 of 2"):
        DataLoader(Shared(), num_workers=2).indices(0, 5)
    for wrong in ((-1, 0), (0, -1), ("a", 0), (0, 1.5)):
        with pytest.raises((TypeError, ValueError)):
            loader_of(dict).indices(*wrong)  # type: ignore[arg-type]


def test_it_comes_in_shards() -> None:
    loader = DataLoader(range(9), 4, num_shards=2, seed=1)
    assert [shard.tolist() for shard in loader.batch(0, 0)] == [[0, 1], [2, 3]]


def test_a_batch_whose_samples_were_all_skipped_is_an_error() -> None:
    loader = DataLoader(sharded_loader.SimpleDataset(["no number"]).transform(int), on_error="skip")
    with pytest.raises(ValueError, match="epoch 0, batch 0 was left out"):
        loader.batch(0, 0)


# -- skip -----------------------------------------------------------------------------------------------------

SKIP = [(1, 2), (7, 7), (8, 8), (13, 15)]


def without(epochs: list[list[Any]], skip: list[tuple[int, int]] = SKIP) -> list[list[Any]]:
    steps = iter(range(1000))
    return [[b for b in batches if not any(i <= n <= j for n in [next(steps)] for i, j in skip)] for batches in epochs]


@covering(pool=POOLS, persistent=[False, True])
def test_the_other_batches_stay_and_a_state_between_any_two_goes_on_exactly(pool: str, persistent: bool) -> None:
    given = workers(pool)
    persistent &= bool(given)
    wanted = without(epochs_of(seeded()))
    loader, states, read = seeded(skip=SKIP, persistent_workers=persistent, **given), [], list[list[Any]]()
    for epoch in range(3):
        assert len(loader) == len(wanted[epoch])
        read.append([])
        for batch in loader:
            read[-1].append(batch.tolist())
            states.append((epoch, len(read[-1]), json.loads(json.dumps(loader.state_dict()))))
    assert read == wanted
    for epoch, count, state in states:
        resumed = seeded()  # the state has the steps
        resumed.load_state_dict(state)
        assert resumed.skip == SKIP
        assert [batch.tolist() for batch in resumed] == wanted[epoch][count:]
        if epoch < 2:
            assert [batch.tolist() for batch in resumed] == wanted[epoch + 1]


@pytest.mark.parametrize("order", ["in turn", "ours", "our batches", "single samples"])
def test_steps_of_other_samplers_are_left_out(order: str) -> None:
    whole = [[plain(batch) for batch in loader] for loader in [loader_of(BY_NUMBER[order])] for _ in range(3)]
    skip = [(0, 1), (len(whole[0]) + 2, len(whole[0]) + 2)]
    loader = loader_of(BY_NUMBER[order], skip=skip)
    assert [[plain(batch) for batch in loader] for _ in range(3)] == without(whole, skip)


def test_a_dataset_with_a_state_goes_on_over_the_steps_that_are_left_out() -> None:
    loader = DataLoader(Counting(), 2, num_workers=2, skip=[(1, 2)])
    iterator = iter(loader)
    first, state = next(iterator), loader.state_dict()
    rest = [*iterator]
    resumed = DataLoader(Counting(), 2, num_workers=2)
    resumed.load_state_dict(state)
    assert str([*resumed]) == str(rest) and first is not None


def test_batches_that_come_in_any_order_are_left_out_too() -> None:
    loader = seeded(skip=SKIP, in_order=False, num_workers=2, thread_pool=True)
    assert sorted(batch.tolist() for batch in loader) == sorted(without(epochs_of(seeded(), 1))[0])


def test_steps_can_be_left_out_when_a_state_is_loaded_and_the_next_state_has_them() -> None:
    whole = epochs_of(seeded(), 2)
    first = seeded(skip=[(1, 1)])
    next(iter(first))
    second = seeded()
    second.load_state_dict(first.state_dict(), skip=[(4, 5)])
    assert (second.skip, len(second), second.state_dict()["_skip"]) == ([(1, 1), (4, 5)], 5, [[1, 1], [4, 5]])
    assert [batch.tolist() for batch in second] == [whole[0][n] for n in (2, 3, 6, 7)]
    third = seeded(skip=[(9, 9)])
    third.load_state_dict(first.state_dict())
    assert third.skip == [(1, 1), (9, 9)]
    assert [third.indices(0, step) for step in (1, 2)] == [seeded().indices(0, step) for step in (1, 2)]
    done = seeded()
    iterator = iter(done)
    next(iterator), next(iterator), next(iterator)
    with pytest.warns(LoaderWarning, match=r"skip has the steps \(2, 4\), and some of them were done before"):
        seeded().load_state_dict(done.state_dict(), skip=[(2, 4)])


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "reversed": ([(3, 1)], ValueError, "last step comes before its first"),
    "no pairs": ([1, 2], TypeError, "pairs of steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_range_of_steps_is_rejected(name: str) -> None:
    skip, error, match = BAD[name]
    with pytest.raises(error, match=match):
        seeded(skip=skip)
    loader = seeded()
    before = loader.state_dict()
    with pytest.raises(error, match=match):
        loader.load_state_dict(before, skip=skip)
    assert (loader.state_dict(), loader.skip, len(loader)) == (before, [], 8)
    with pytest.raises(ValueError, match="the state's '_skip' is wrong"):
        loader.load_state_dict({**before, "_skip": [[2, 0]]})


def test_the_steps_must_be_countable() -> None:
    class NoLength(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(DATA)

    with pytest.raises(ValueError, match="skip counts the steps of all epochs.*no length"):
        DataLoader(DATA, batch_sampler=NoLength(), skip=[(1, 1)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Iterable data must be read"):
        DataLoader(NoLength(), skip=[(1, 1)])


# -- stats ----------------------------------------------------------------------------------------------------


@covering(pool=POOLS)
def test_its_statistics_are_those_of_the_other_loader(pool: str) -> None:
    loader = seeded(**workers(pool))
    epochs_of(loader, 1)
    other = sharded_loader.ShardedDataLoader(Augmented(LENGTH), SIZE, shuffle=True, seed=5, collate_fn=summed)
    [*other]
    found = loader.stats()
    assert vars(found).keys() == vars(other.stats()).keys() and found.verdict
    assert set(found.causes) == set(other.stats().causes) and found.stages.keys() == other.stats().stages.keys()
    assert sum(one.batches for one in found.workers.values()) > 0
