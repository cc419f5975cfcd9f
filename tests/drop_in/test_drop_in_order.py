"""The order of `ShardedDataLoader` under torch's class: the same batches, states and errors."""

from __future__ import annotations

import copy
import json
import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from drop_in_samples import Parts
from samples import Augmented
from torch.utils.data import DistributedSampler

from sharded_loader import BatchSampler, SequentialSampler, ShardedDataLoader, interleave
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTH, SIZE = 26, 4
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
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epoch(batches: Any) -> list[Any]:
    """What is left of an epoch."""
    return [listed(batch) for batch in batches]


PARTS = Parts(lambda number, count: range(number, LENGTH, count))


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
            assert epoch(loader) == epoch(sharded)
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
        assert epoch(resumed) == epoch(again)


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
    assert [epoch(one) for one in found[0]] == [epoch(one) for one in found[1]]


def test_iterable_data_has_parts_of_all_ranks() -> None:
    given: dict[str, Any] = {"num_replicas": 2, "rank": 1, "steps_per_epoch": 3, "streams": 4, "seed": 1}
    ours, theirs = DataLoader(PARTS, SIZE, num_workers=2, **given), ShardedDataLoader(PARTS, SIZE, **given)
    assert len(ours) == len(theirs) == 3
    for _ in range(2):
        assert epoch(ours) == epoch(theirs)
    state = ours.state_dict()
    for one in (ours, theirs):
        one.load_state_dict(state)
    assert epoch(ours) == epoch(theirs)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_with_other_ranks_and_its_copies_too(workers: int) -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 1, "num_replicas": 2, "rank": 0}
    ours, theirs = DataLoader(range(24), 2, num_workers=workers, **given), ShardedDataLoader(range(24), 2, **given)
    one, other = iter(ours), iter(theirs)
    assert listed(next(one)) == listed(next(other))
    for loader in (ours, theirs):
        loader.rescale(1, 0, batch_size=4)
    assert epoch(one) == epoch(other)
    assert (ours.batch_size, ours.num_replicas, ours.rank) == (4, 1, 0)
    assert list(ours.batch_sampler) == list(theirs.batch_sampler)
    expected = epoch(theirs)
    for twin in (copy.copy(ours), pickle.loads(pickle.dumps(ours)), ours):
        assert epoch(twin) == expected


@pytest.mark.parametrize(
    "given", [{"num_workers": "auto", "thread_pool": True}, {"shuffle": True, "steps_per_epoch": 3}]
)
def test_a_copy_has_the_workers_that_are_found_and_the_seed_that_was_drawn(given: dict[str, Any]) -> None:
    loader = DataLoader(range(LENGTH), SIZE, num_replicas=2, rank=1, **given)
    expected = epoch(pickle.loads(pickle.dumps(loader)))
    assert epoch(loader) == expected
    assert "shuffle" in given or expected == epoch(ShardedDataLoader(range(LENGTH), SIZE, num_replicas=2, rank=1))


def test_a_copy_of_given_batches_has_those_of_the_ranks_that_are_there_now() -> None:
    batches = BatchSampler(SequentialSampler(24), 2)
    loader = DataLoader(range(24), batch_sampler=batches, num_replicas=2, rank=0)
    loader.rescale(1, 0, batch_size=4)
    expected = [[*range(i, i + 4)] for i in range(0, 24, 4)]
    assert list(map(listed, copy.copy(loader))) == epoch(loader) == expected


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
    assert epoch(resumed) == epoch(one) == epoch(other)


def test_set_epoch_of_the_loader_and_of_its_sampler_count() -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 1, "num_replicas": 2, "rank": 0}
    loader, expected = (make(range(LENGTH), SIZE, **given) for make in (DataLoader, ShardedDataLoader))
    for call in (loader.set_epoch, loader.sampler.set_epoch):  # type: ignore[attr-defined]
        call(4)
        expected.set_epoch(4)
        assert epoch(loader) == epoch(expected)


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
        with pytest.raises(ValueError, match=f"^{name} goes with torch's order"):
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
    class Mesh:
        mesh_dim_names, ndim, shape = ("dp",), 1, (2,)

        def size(self, dim: int = 0) -> int:
            return 2

        def get_coordinate(self) -> list[int]:
            return [1]

    ours = DataLoader(range(LENGTH), SIZE, mesh=Mesh())  # type: ignore[arg-type]
    assert epoch(ours) == list(map(listed, ShardedDataLoader(range(LENGTH), SIZE, num_replicas=2, rank=1)))
