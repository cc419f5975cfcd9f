"""``num_replicas=``, ``costs=`` and so on of the drop-in, and any step of its epochs: as with `ShardedDataLoader`.

``indices``, ``batch``, ``skip``, ``fingerprint`` and ``check`` tell of any step as far as the sampler tells the order.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import random
from collections.abc import Callable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, PROCESS_POOLS, covering
from drop_in_samples import Counting, Order, Parts, Reads, Shared, workers
from samples import Augmented, ByEpoch, Told, summed
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, WeightedRandomSampler
from torch.utils.data.datapipes.map import SequenceWrapper

import sharded_loader
from sharded_loader import FixedBucketSampler, LoaderWarning, ShardedDataLoader, interleave, sample_rng
from sharded_loader.sampling.order import step_checksum
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTH, SIZE = 22, 3  # 8 steps
DATA = range(LENGTH)
GIVEN: dict[str, dict[str, Any]] = {
    "num_replicas": {"num_replicas": 2, "rank": 1, "shuffle": True},
    "in turn": {"num_replicas": 2, "rank": 0, "drop_last": True},
    "costs": {"costs": list(range(1, LENGTH + 1)), "num_replicas": 2, "rank": 0},
    "evaluate": {"evaluate": True, "num_replicas": 3, "rank": 2},
    "steps_per_epoch": {"steps_per_epoch": 5, "shuffle": True},
    "steps_per_epoch, ranks": {"steps_per_epoch": 4, "num_replicas": 2, "rank": 1, "shuffle": True},
    "skip": {"num_replicas": 2, "rank": 1, "shuffle": True, "skip": [(1, 2)]},
    "sampler": {"num_replicas": 2, "rank": 1, "sampler": list(range(0, LENGTH, 2))},
}


def listed(batch: Any) -> Any:
    if isinstance(batch, tuple | list):
        return [listed(one) for one in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def rest_of(batches: Any) -> list[Any]:
    """What is left of an epoch."""
    return [listed(batch) for batch in batches]


PARTS = Parts(lambda number, count: range(number, LENGTH, count))


@pytest.mark.costly(4)
@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", GIVEN)
def test_batches_and_states_are_those_of_the_other_loader(kind: str, workers: int, seed: int | None) -> None:
    given, data = GIVEN[kind], Augmented(LENGTH)
    torch.manual_seed(1)
    loader = DataLoader(data, SIZE, seed=seed, num_workers=workers, **given)
    torch.manual_seed(1)
    with ShardedDataLoader(data, SIZE, seed=seed, **given) as sharded:
        for _ in range(2):
            assert len(loader) == len(sharded)
            assert rest_of(loader) == rest_of(sharded)
        list(islice(loader, 1)), list(islice(sharded, 1))
        state = json.loads(json.dumps(loader.state_dict()))
        assert state == json.loads(json.dumps(sharded.state_dict()))
        assert listed(loader.batch(1, 0)) == listed(sharded.batch(1, 0))
        assert loader.indices(1, 0) == sharded.indices(1, 0)
        assert str(loader.fingerprint(1)) == str(sharded.fingerprint(1))
        assert loader.read(3, 1)[0] == sharded.read(3, 1)[0]
    resumed = DataLoader(data, SIZE, seed=None if seed is None else 6, num_workers=2 - workers, **given)
    has_no_seed = seed is None and "num_replicas" in given
    again = ShardedDataLoader(data, SIZE, seed=None if has_no_seed else 6, **given)
    for one in (resumed, again):
        one.load_state_dict(state)
    for _ in range(2):
        assert rest_of(resumed) == rest_of(again)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_goes_on_with_other_ranks_in_either_loader(workers: int) -> None:
    def loaders(make: Any, ranks: int, size: int, **given: Any) -> list[Any]:
        given |= {"shuffle": True, "seed": 2, "num_replicas": ranks}
        return [make(range(LENGTH), size, rank=rank, **given) for rank in range(ranks)]

    loader = loaders(DataLoader, 2, 4, num_workers=workers)[0]
    next(iter(loader))
    found = [loaders(DataLoader, 4, 2, num_workers=workers), loaders(ShardedDataLoader, 4, 2)]
    for one in sum(found, []):
        one.load_state_dict(loader.state_dict())
    assert [rest_of(one) for one in found[0]] == [rest_of(one) for one in found[1]]


def test_iterable_data_has_parts_of_all_ranks() -> None:
    given: dict[str, Any] = {"num_replicas": 2, "rank": 1, "steps_per_epoch": 3, "streams": 4, "seed": 1}
    ours, theirs = DataLoader(PARTS, SIZE, num_workers=2, **given), ShardedDataLoader(PARTS, SIZE, **given)
    assert len(ours) == len(theirs) == 3
    for _ in range(2):
        assert rest_of(ours) == rest_of(theirs)
    state = ours.state_dict()
    for one in (ours, theirs):
        one.load_state_dict(state)
    assert rest_of(ours) == rest_of(theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_with_other_ranks_and_its_copies_too(workers: int) -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 1, "num_replicas": 2, "rank": 0}
    ours, theirs = DataLoader(range(24), 2, num_workers=workers, **given), ShardedDataLoader(range(24), 2, **given)
    one, other = iter(ours), iter(theirs)
    assert listed(next(one)) == listed(next(other))
    for loader in (ours, theirs):
        loader.rescale(1, 0, batch_size=4)
    assert rest_of(one) == rest_of(other)
    assert (ours.batch_size, ours.num_replicas, ours.rank) == (4, 1, 0)
    assert list(ours.batch_sampler) == list(theirs.batch_sampler)
    expected = rest_of(theirs)
    for twin in (copy.copy(ours), pickle.loads(pickle.dumps(ours)), ours):
        assert rest_of(twin) == expected


@pytest.mark.parametrize(
    "given", [{"num_workers": "auto", "thread_pool": True}, {"shuffle": True, "steps_per_epoch": 3}]
)
def test_a_copy_has_the_workers_that_are_found_and_the_seed_that_was_drawn(given: dict[str, Any]) -> None:
    loader = DataLoader(range(LENGTH), SIZE, num_replicas=2, rank=1, **given)
    expected = rest_of(pickle.loads(pickle.dumps(loader)))
    assert rest_of(loader) == expected
    assert "shuffle" in given or expected == rest_of(ShardedDataLoader(range(LENGTH), SIZE, num_replicas=2, rank=1))


def test_a_copy_of_given_batches_has_those_of_the_ranks_that_are_there_now() -> None:
    batches = sharded_loader.BatchSampler(sharded_loader.SequentialSampler(24), 2)
    loader = DataLoader(range(24), batch_sampler=batches, num_replicas=2, rank=0)
    loader.rescale(1, 0, batch_size=4)
    expected = [[*range(i, i + 4)] for i in range(0, 24, 4)]
    assert list(map(listed, copy.copy(loader))) == rest_of(loader) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_change_while_it_is_read_and_a_state_has_them(workers: int) -> None:
    def mixed() -> Any:
        return interleave([[0] * 40, [1] * 40], stop=48, shuffle=True, seed=1)

    ours = DataLoader(mixed(), SIZE, num_replicas=1, num_workers=workers)
    theirs = ShardedDataLoader(mixed(), SIZE)
    one, other = iter(ours), iter(theirs)
    assert listed(next(one)) == listed(next(other))
    for loader in (ours, theirs):
        loader.set_weights([0, 1])
    assert listed(next(one)) == listed(next(other)) == [1] * SIZE
    resumed = DataLoader(mixed(), SIZE, num_replicas=1)
    resumed.load_state_dict(ours.state_dict())
    assert rest_of(resumed) == rest_of(one) == rest_of(other)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_changed_dataset_reaches_workers_that_live_as_long_as_the_loader(workers: int) -> None:
    data = [1, 2]
    loader = DataLoader(data, 2, num_replicas=1, num_workers=workers)  # type: ignore[arg-type]
    assert rest_of(loader) == [[1, 2]]
    data[:] = [3, 4, 5]
    loader.refresh()
    assert len(loader) == len(loader.batch_sampler) == 2
    assert rest_of(loader) == [[3, 4], [5]]
    with pytest.raises(TypeError, match="refresh needs the order of ShardedDataLoader"):
        DataLoader(range(2)).refresh()


def test_set_epoch_of_the_loader_and_of_its_sampler_count() -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 1, "num_replicas": 2, "rank": 0}
    loader, expected = (make(range(LENGTH), SIZE, **given) for make in (DataLoader, ShardedDataLoader))
    for call in (loader.set_epoch, loader.sampler.set_epoch):  # type: ignore[attr-defined]
        call(4)
        expected.set_epoch(4)
        assert rest_of(loader) == rest_of(expected)


def test_batches_are_collated_and_placed_as_before() -> None:
    data = [(torch.tensor([float(i)]), {"number": i}) for i in range(8)]
    ours = DataLoader(data, SIZE, num_replicas=1, num_workers=2, devices=["cpu", "cpu"])
    plain = DataLoader(data, SIZE, devices=["cpu", "cpu"])
    assert str(list(ours)) == str(list(plain))
    assert next(iter(DataLoader(data, SIZE, num_replicas=1, collate_fn=len))) == SIZE
    assert ours.stats().samples == 8 and ours.ready_event is None


@pytest.mark.parametrize(
    "given",
    [
        {"costs": [1] * LENGTH, "sampler": list(range(LENGTH))},
        {"costs": [1] * LENGTH, "batch_sampler": [[1, 2]], "batch_size": 1},
        {"evaluate": True, "steps_per_epoch": 3},
        {"evaluate": True, "drop_last": True},
        {"evaluate": True, "on_error": "skip"},
        {"num_replicas": 2},
        {"num_replicas": 2, "rank": 2},
        {"steps_per_epoch": 0},
        {"num_replicas": 2, "rank": 0, "sampler": DistributedSampler(range(LENGTH), 2, 0)},  # type: ignore[arg-type]
    ],
    ids=lambda given: ", ".join(given),
)
def test_what_contradicts_itself_is_the_error_of_the_other_loader(given: dict[str, Any]) -> None:
    theirs = {key: value for key, value in given.items() if key != "batch_size"}
    sizes = {} if "batch_sampler" in given else {"batch_size": SIZE}
    with pytest.raises((TypeError, ValueError)) as expected:
        ShardedDataLoader(range(LENGTH), **sizes, **theirs)
    with pytest.raises(type(expected.value)) as found:
        DataLoader(range(LENGTH), **sizes, **theirs)
    assert str(found.value) == str(expected.value)


def test_what_only_torchs_order_has_is_an_error() -> None:
    for name, value in {"generator": torch.Generator(), "in_order": False}.items():
        with pytest.raises(ValueError, match=f"^{name} goes with torch's order; num_replicas, .*, keep and on_error"):
            DataLoader(range(4), 2, num_replicas=1, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size=None gives single samples"):
        DataLoader(range(4), None, num_replicas=1)
    with pytest.raises(ValueError, match="leave out costs"):
        DataLoader(PARTS, SIZE, costs=[1])
    loader = DataLoader(range(4), 2)
    for call in (lambda: loader.rescale(1, 0), lambda: loader.set_weights([1])):
        with pytest.raises(TypeError, match="give num_replicas=1$"):
            call()


def test_a_mesh_says_the_ranks() -> None:
    dims = {"mesh_dim_names": ("dp",), "ndim": 1, "shape": (2,), "size": lambda dim=0: 2}
    mesh: Any = SimpleNamespace(**dims, get_coordinate=lambda: [1])
    ours = DataLoader(range(LENGTH), SIZE, mesh=mesh)
    assert rest_of(ours) == rest_of(ShardedDataLoader(range(LENGTH), SIZE, num_replicas=2, rank=1))


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
}
EACH_DRAWN = Order(lambda: (int(torch.randint(LENGTH, ())) for _ in DATA), LENGTH)
DRAWN: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
    "random": lambda: {"sampler": RandomSampler(DATA)},  # type: ignore[arg-type]
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * LENGTH, LENGTH)},
    "each drawn": lambda: {"sampler": EACH_DRAWN},
    "from python": lambda: {"sampler": Order(lambda: random.sample(DATA, LENGTH), LENGTH)},
}


ORDERS = {**BY_NUMBER, **NAMED}


def loader_of(made: Callable[[], dict[str, Any]], dataset: Any = DATA, **given: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": SIZE, "collate_fn": list, **made(), **given})


def numbers(batch: Any) -> list[int]:
    return np.ravel(batch).tolist()


def seeded(**given: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(LENGTH), SIZE, shuffle=True, seed=5, collate_fn=summed, **given)


def epochs_of(loader: DataLoader[Any], count: int = 3) -> list[list[Any]]:
    return [rest_of(loader) for _ in range(count)]


# -- indices and batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_any_step_of_any_epoch_is_known_where_its_number_decides(order: str) -> None:
    torch.manual_seed(9)
    loader, read = loader_of(ORDERS[order]), []
    for epoch in range(3):
        if order in NAMED:
            loader.set_epoch(epoch)
        read.append([numbers(batch) for batch in loader])
    generator, state = torch.get_rng_state(), loader.state_dict()
    known = [[loader.indices(epoch, step) for step in range(len(read[epoch]))] for epoch in range(3)]
    assert known == read
    coming = loader.indices(3, 1)
    for epoch in (1, 2, 3):
        with pytest.raises(IndexError, match=f"epoch {epoch} has no step {len(read[0]) + 9}"):
            loader.indices(epoch, len(read[0]) + 9)
    assert numbers(loader.batch(1, 2)) == read[1][2]
    assert loader.state_dict() == state and torch.equal(torch.get_rng_state(), generator)
    for epoch, steps in enumerate(known):
        assert loader.fingerprint(epoch).steps == "".join(step_checksum([indices]) for indices in steps)
    if order in NAMED:
        loader.set_epoch(3)
    assert numbers([*loader][1]) == coming


def test_epochs_that_nobody_has_named_are_not_known() -> None:
    loader = loader_of(NAMED["distributed"])
    [*loader], next(iter(loader))
    other = loader_of(NAMED["distributed"])
    other.load_state_dict(loader.state_dict())
    for one in (loader, other):
        with pytest.raises(ValueError, match=r"epoch 1 cannot be looked up.*Call loader.set_epoch\(epoch\)"):
            one.indices(1, 0)


@covering(pool=POOLS)
def test_a_batch_of_any_step_has_its_random_numbers(pool: str) -> None:
    loader = seeded(**workers(pool))
    read = epochs_of(loader, 2)
    assert [[loader.batch(epoch, step).tolist() for step in range(8)] for epoch in range(2)] == read
    iterator = iter(loader)
    third = [next(iterator).tolist()]
    again = loader.batch(2, 4).tolist()
    third += rest_of(iterator)
    assert again == third[4]


@covering(pool=POOLS)
def test_a_dataset_is_told_the_epoch_that_is_looked_at_and_then_its_own(pool: str) -> None:
    loader, read = DataLoader(Told(), SIZE, shuffle=True, seed=5, **workers(pool)), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        read.append([numbers(batch) for batch in loader])
    assert [numbers(loader.batch(epoch, 1)) for epoch in (0, 2, 1)] == [read[0][1], read[2][1], read[1][1]]
    of_epochs = [loader.fingerprint(epoch).state["digests"] for epoch in (0, 1)]
    assert of_epochs[0] != of_epochs[1]
    assert loader.dataset.epoch == 2


def test_a_batch_of_any_step_comes_in_shards_or_is_an_error_if_all_its_samples_were_skipped() -> None:
    loader: Any = DataLoader(range(9), 4, num_shards=2, seed=1)
    assert [shard.tolist() for shard in loader.batch(0, 0)] == [[0, 1], [2, 3]]
    loader = DataLoader(sharded_loader.SimpleDataset(["no number"]).transform(int), on_error="skip")
    with pytest.raises(ValueError, match="epoch 0, batch 0 was left out"):
        loader.batch(0, 0)


# -- skip -----------------------------------------------------------------------------------------------------

SKIP = [(1, 2), (7, 7), (8, 8), (13, 15)]


def without(epochs: list[list[Any]], skip: list[tuple[int, int]] = SKIP) -> list[list[Any]]:
    steps = iter(range(1000))
    return [[b for b in batches if not any(i <= n <= j for n in [next(steps)] for i, j in skip)] for batches in epochs]


@covering(pool=POOLS, persistent=[False, True])
def test_steps_are_left_out_and_a_state_between_any_two_goes_on_exactly(pool: str, persistent: bool) -> None:
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
    in_any_order = seeded(skip=SKIP, persistent_workers=persistent, in_order=False, **given)
    assert sorted(rest_of(in_any_order)) == sorted(wanted[0])
    for epoch, count, state in states:
        resumed = seeded()  # the state has the steps
        resumed.load_state_dict(state)
        assert resumed.skip == SKIP
        assert rest_of(resumed) == wanted[epoch][count:]
        if epoch < 2:
            assert rest_of(resumed) == wanted[epoch + 1]


@pytest.mark.parametrize("order", ["in turn", "ours", "our batches", "single samples"])
def test_steps_of_other_samplers_are_left_out(order: str) -> None:
    whole = [[numbers(batch) for batch in loader] for loader in [loader_of(BY_NUMBER[order])] for _ in range(3)]
    skip = [(0, 1), (len(whole[0]) + 2, len(whole[0]) + 2)]
    loader = loader_of(BY_NUMBER[order], skip=skip)
    assert [[numbers(batch) for batch in loader] for _ in range(3)] == without(whole, skip)


def test_a_dataset_with_a_state_goes_on_over_the_steps_that_are_left_out() -> None:
    loader = DataLoader(Counting(), 2, num_workers=2, skip=[(1, 2)])
    iterator = iter(loader)
    first, state = next(iterator), loader.state_dict()
    rest = [*iterator]
    resumed = DataLoader(Counting(), 2, num_workers=2)
    resumed.load_state_dict(state)
    assert str([*resumed]) == str(rest) and first is not None


def test_steps_can_be_left_out_when_a_state_is_loaded_and_the_next_state_has_them() -> None:
    whole = epochs_of(seeded(), 2)
    first = seeded(skip=[(1, 1)])
    next(iter(first))
    second = seeded()
    second.load_state_dict(first.state_dict(), skip=[(4, 5)])
    assert (second.skip, len(second), second.state_dict()["_skip"]) == ([(1, 1), (4, 5)], 5, [[1, 1], [4, 5]])
    assert rest_of(second) == [whole[0][n] for n in (2, 3, 6, 7)]
    third = seeded(skip=[(9, 9)])
    third.load_state_dict(first.state_dict())
    assert third.skip == [(1, 1), (9, 9)]
    assert [third.indices(0, step) for step in (1, 2)] == [seeded().indices(0, step) for step in (1, 2)]
    done = seeded()
    iterator = iter(done)
    next(iterator), next(iterator), next(iterator)
    with pytest.warns(LoaderWarning, match=r"skip has the steps \(2, 4\), and some of them were done before"):
        seeded().load_state_dict(done.state_dict(), skip=[(2, 4)])


@pytest.mark.parametrize(
    ("skip", "error", "match"),
    [([(3, 1)], ValueError, "last step comes before its first"), ([1, 2], TypeError, "pairs of steps")],
)
def test_what_is_no_range_of_steps_is_rejected(skip: Any, error: type[Exception], match: str) -> None:
    loader = seeded()
    before = loader.state_dict()
    for refused in (lambda: seeded(skip=skip), lambda: loader.load_state_dict(before, skip=skip)):
        with pytest.raises(error, match=match):
            refused()
    assert (loader.state_dict(), loader.skip, len(loader)) == (before, [], 8)
    with pytest.raises(ValueError, match="the state's '_skip' is wrong"):
        loader.load_state_dict({**before, "_skip": [[2, 0]]})


def test_the_steps_must_be_countable() -> None:
    without_length: Any = Parts(lambda number, count: DATA)
    with pytest.raises(ValueError, match="skip counts the steps of all epochs.*no length"):
        DataLoader(DATA, batch_sampler=without_length, skip=[(1, 1)])
    with pytest.raises(TypeError, match="Iterable data must be read"):
        DataLoader(without_length, skip=[(1, 1)])


def random_states() -> Any:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@covering(pool=POOLS)
def test_a_fingerprint_is_the_same_in_every_pool_before_in_and_after_an_epoch(pool: str) -> None:
    loader, before = seeded(**workers(pool)), random_states()
    found = loader.fingerprint(0)
    assert random_states() == before
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert str(loader.fingerprint()) == str(found) == "1112145858cc6203"
    assert loader.state_dict() == state
    assert len([*iterator]) == 7
    assert str(loader.fingerprint(0)) == str(found) != str(loader.fingerprint()) == str(loader.fingerprint(1))


@pytest.mark.parametrize("given", [{}, {"drop_last": True}, {"skip": [(1, 2)]}, {"seed": 5}], ids=str)
def test_a_fingerprint_is_that_of_the_other_loader_with_the_same_order(given: dict[str, Any]) -> None:
    loader = DataLoader(Augmented(LENGTH), 3, **given)
    last_batch = {"last_batch": "discard"} if given.pop("drop_last", False) else {}
    other = ShardedDataLoader(Augmented(LENGTH), 3, **{"seed": 0, **given, **last_batch})
    assert str(loader.fingerprint(2)) == str(other.fingerprint(2))


def test_steps_that_are_left_out_are_marked_and_samples_without_a_seed_count_too() -> None:
    steps = seeded(skip=SKIP).fingerprint(1).steps
    wanted = seeded().fingerprint(1).steps
    assert steps == "-" * 8 + wanted[8:40] + "-" * 24 + wanted[64:]
    one, other = (DataLoader([*DATA[:-1], last], 3).fingerprint(0) for last in (0, 1))
    assert one.steps == other.steps and str(one) != str(other)
    mixed = [str(DataLoader(interleave([["a"] * 9, ["b"] * 9]), 4).fingerprint(0)) for _ in range(2)]
    assert mixed[0] == mixed[1]


# -- check --------------------------------------------------------------------------------------------------------

OWN = Reads(lambda index: (index, sample_rng().random()), LENGTH)
"""Samples that depend on their index alone."""


@covering(pool=POOLS)
def test_samples_that_depend_on_their_index_alone_are_the_same_everywhere(pool: str) -> None:
    loader = DataLoader(OWN, 3, shuffle=True, seed=5, **workers(pool))
    iterator, before = iter(loader), random_states()
    read = [next(iterator)]
    state = loader.state_dict()
    found = loader.check()
    assert random_states() == before and loader.state_dict() == state
    assert (found.samples, found.differing, found.failed) == (7, (), None)  # the last step has one
    assert (found.worker_bytes or 0) > 1e6 or pool == "thread"
    assert ("ThreadPool" in found.worker) == (pool == "thread")
    read += iterator
    assert str(read) == str([*DataLoader(OWN, 3, shuffle=True, seed=5)])


def test_a_check_needs_no_order_that_is_not_drawn_yet() -> None:
    loader = DataLoader(OWN, 3, shuffle=True)
    for _ in range(2):
        found, state = loader.check(), loader.state_dict()
        assert (found.samples, found.differing, loader.state_dict()) == (11, (), state)
        list(loader)


@covering(method=PROCESS_POOLS)
def test_what_differs_is_named_with_its_source(method: str) -> None:
    given: Any = workers(method)
    assert "draws from Python's random" in str(
        DataLoader(Reads(lambda index: random.random(), LENGTH), 3, **given).check(2)
    )
    assert "The worker reads others." in str(DataLoader(Reads(lambda index: os.getpid(), LENGTH), 3, **given).check(2))


def test_a_dataset_with_a_state_keeps_the_one_of_its_workers() -> None:
    read = []
    for checks in (False, True):
        loader = DataLoader(Counting(), 2, num_workers=2)
        iterator = iter(loader)
        read.append([next(iterator)])
        if checks:
            loader.fingerprint(), loader.check(2)
        read[-1] += iterator
    assert str(read[0]) == str(read[1])


# -- what is not known --------------------------------------------------------------------------------------------

DRAWS = (ValueError, "epoch 0 cannot be looked up.*(Give the loader a seed=|yields other indices)")
UNKNOWN: dict[str, tuple[Callable[[], DataLoader[Any]], type[Exception], str]] = {
    "iterable": (lambda: DataLoader(Shared(), num_workers=2), TypeError, "is iterable data: which samples"),
    "datapipe": (lambda: DataLoader(SequenceWrapper([0, 1])), TypeError, "datapipes are read by torch's own workers"),
    **{order: (lambda made=made: loader_of(made), *DRAWS) for order, made in DRAWN.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("row", UNKNOWN)
def test_where_the_order_is_not_known_the_error_says_why(row: str) -> None:
    make, error, match = UNKNOWN[row]
    loader = make()
    # For a check any sample of a known number will do.
    checks = () if row in ("shuffle", "generator", "random", "weighted") else (loader.check,)
    for call in (lambda: loader.indices(0, 0), loader.fingerprint, *checks):
        with pytest.raises(error, match=match):
            call()
    if row in DRAWN:
        next(iter(loader))
        for call in (lambda: loader.indices(0, 1), loader.fingerprint):
            with pytest.raises(error, match="epoch 0 cannot be looked up"):
                call()


def test_no_such_step_no_such_number_and_an_order_without_end_are_errors() -> None:
    with pytest.raises(TypeError, match="is iterable data: which samples a step has"):
        DataLoader(Shared(), num_workers=2).indices(0, 5)
    for wrong in ((-1, 0), (0, -1), ("a", 0), (0, 1.5)):
        with pytest.raises((TypeError, ValueError)):
            loader_of(dict).indices(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count from 0"):
        seeded().fingerprint(-1)
    endless = loader_of(lambda: {"sampler": Parts(lambda number, count: itertools.repeat(1))})
    with pytest.raises(TypeError, match="has no length"):
        endless.fingerprint()
    assert endless.check(2).differing == ()
