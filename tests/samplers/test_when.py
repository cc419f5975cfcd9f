"""``loader.when``: exactly the steps, ranks and places where a sample comes, and nothing is searched."""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data

from sharded_loader import (
    BatchSampler,
    ConcatDataset,
    FixedBucketSampler,
    IntervalSampler,
    LoaderWarning,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    ShardedDataLoader,
    ShardShuffleSampler,
    SortedSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    interleave,
)
from sharded_loader.samplers.bijections import Bijections
from sharded_loader.torch import DataLoader

LENGTH = 23

ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 3},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "discard": lambda: {"batch_size": 4, "shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"batch_size": 5, "shuffle": True, "last_batch": "rollover"},
    "steps": lambda: {"batch_size": 3, "shuffle": True, "steps_per_epoch": 4},
    "many passes": lambda: {"batch_size": 3, "shuffle": True, "steps_per_epoch": 20},
    "skip": lambda: {"batch_size": 3, "shuffle": True, "skip": [(1, 2)]},
    "list": lambda: {"batch_size": 3, "sampler": [4, 8, 1, 10, 2, 4]},
    "range": lambda: {"batch_size": 3, "sampler": range(22, 1, -2)},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(1, LENGTH, 2), seed=3)},
    "subset with repeats": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler([3, 1, 9, 3], seed=3)},
    "interval": lambda: {"batch_size": 2, "sampler": IntervalSampler(LENGTH, 4)},
    "interval once": lambda: {"batch_size": 2, "sampler": IntervalSampler(LENGTH, 4, rollover=False)},
    "split": lambda: {"batch_size": 2, "sampler": SplitSampler(LENGTH, 3, 1, seed=4)},
    "split in order": lambda: {"batch_size": 2, "sampler": SplitSampler(LENGTH, 3, 1, shuffle=False)},
    "shards": lambda: {"batch_size": 2, "sampler": ShardShuffleSampler([5, 0, 7, 3, 8], 2, lanes=3, seed=4)},
    "small shards": lambda: {
        "batch_size": 2,
        "sampler": ShardShuffleSampler([2, 0, 3, 1, 4, 2, 3, 1, 2, 5], 1, lanes=5, seed=4),
    },
    "equal shards": lambda: {"batch_size": 2, "sampler": ShardShuffleSampler([11, 11], lanes=2, seed=4)},
    "sorted": lambda: {"batch_size": 2, "sampler": SortedSampler([n * 7 % LENGTH for n in range(LENGTH)])},
    "repeated": lambda: {"batch_size": 4, "shuffle": True, "sampler": RepeatedSampler(3)},
    "repeated subset": lambda: {"batch_size": 4, "sampler": RepeatedSampler(2, SubsetRandomSampler([4, 1, 9], seed=3))},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=4), 4)},
    "whole batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=4), 4, "discard")},
    "batches, steps": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=4), 4),
        "steps_per_epoch": 5,
    },
}

MIXTURES: dict[str, dict[str, Any]] = {
    "in turns": {},
    "shuffled": {"shuffle": True},
    "each once": {"stop": "each_once", "shuffle": True},
    "schedule": {"weights": [(0, [1, 1]), (7, [1, 4]), (20, [1, 0])], "stop": 40},
}

Places = dict[Any, list[tuple[int, int, int, int]]]


def flat(batch: Any) -> list[Any]:
    return [one for part in batch for one in (flat(part) if isinstance(part, list) else [part])]


def read_places(loaders: list[ShardedDataLoader[Any]], epochs: range) -> Places:
    """Where each sample came, from the indices of all steps that were read."""
    found: Places = defaultdict(list)
    for rank, loader in enumerate(loaders):
        for epoch in epochs:
            loader.set_epoch(epoch)
            for _ in loader:
                step = loader.position - 1
                for place, index in enumerate(flat(loader.indices(epoch, step))):
                    found[index].append((epoch, step, rank, place))
    return {index: sorted(places) for index, places in found.items()}


@pytest.mark.parametrize("replicas", [1, 2, 5, 30])
@pytest.mark.parametrize("order", ORDERS)
def test_when_names_exactly_the_places_where_a_sample_comes(order: str, replicas: int) -> None:
    made = [
        ShardedDataLoader(range(LENGTH), collate_fn=list, seed=5, num_replicas=replicas, rank=rank, **ORDERS[order]())
        for rank in range(replicas)
    ]
    read = read_places(made, range(3))
    for index in range(LENGTH):
        assert [place for epoch in range(3) for place in made[0].when(index, epoch)] == read.get(index, [])


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("given", ["own order", "shuffled", "repeated"])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_sample_of_a_mixture_is_found_by_dataset_and_index(mixture: str, given: str, replicas: int) -> None:
    mixed = interleave([range(9), range(100, 114)], seed=3, **MIXTURES[mixture])
    order: Any = {"shuffle": given == "shuffled", "sampler": RepeatedSampler(2) if given == "repeated" else None}
    made = [
        ShardedDataLoader(mixed, 4, collate_fn=list, seed=5, num_replicas=replicas, rank=rank, **order)
        for rank in range(replicas)
    ]
    read = read_places(made, range(2))
    for index in [(0, number) for number in range(9)] + [(1, number) for number in range(14)]:
        assert [place for epoch in range(2) for place in made[0].when(index, epoch)] == read.get(index, [])


def test_the_index_of_a_copy_is_found_without_a_search() -> None:
    loader = ShardedDataLoader(range(10**12), 2, shuffle=True, seed=1, sampler=RepeatedSampler(2))
    assert [(found.step, found.place) for found in loader.when(loader.indices(0, 3)[1])] == [(3, 0), (3, 1)]


def test_weights_that_are_set_move_the_later_places() -> None:
    mixed = interleave([range(9), range(100, 114)], stop=40, shuffle=True, seed=3)
    loader = ShardedDataLoader(mixed, 4, collate_fn=list)
    batches = iter(loader)
    next(batches), next(batches)
    loader.set_weights([1, 5])
    rest = [loader.indices(0, step) for step in range(10)]
    found = {
        (place.step, place.place): index for index in itertools.product([1], range(14)) for place in loader.when(index)
    }
    assert all(rest[step][place] == index for (step, place), index in found.items())
    assert len(found) == sum(source == 1 for step in rest for source, _ in step)


def test_padding_of_an_evaluation_does_not_count() -> None:
    made = [ShardedDataLoader(range(10), 2, evaluate=True, num_replicas=3, rank=rank) for rank in range(3)]
    assert [len(made[0].when(index)) for index in range(10)] == [1] * 10


@pytest.mark.parametrize("steps", [None, 6])
def test_after_a_resume_on_other_ranks_the_past_is_an_error_and_the_rest_is_known(steps: int | None) -> None:
    given = {"shuffle": True, "seed": 5, "steps_per_epoch": steps}
    first = ShardedDataLoader(range(24), 2, num_replicas=2, rank=0, **given)
    batches = iter(first)
    next(batches), next(batches)
    state, past = (
        json.loads(json.dumps(first.state_dict())),
        [flat(first.indices(0, n, r)) for n in (0, 1) for r in (0, 1)],
    )
    made = [ShardedDataLoader(range(24), 2, num_replicas=4, rank=rank, **given) for rank in range(4)]
    for loader in made:
        loader.load_state_dict(state, strict=False)
    rest: Places = defaultdict(list)
    for rank, loader in enumerate(made):
        for batch in loader:
            for place, index in enumerate(batch.tolist()):
                rest[index].append((0, loader.position - 1, rank, place))
    for index in range(24):
        if rest[index]:
            assert made[0].when(index, 0) == sorted(rest[index])
        else:
            assert index in sum(past, []) or steps
            with pytest.raises(ValueError, match="other ranks"):
                made[0].when(index, 0)
    assert made[0].when(0, 1) == made[3].when(0, 1) != []
    same = ShardedDataLoader(range(24), 2, num_replicas=2, rank=1, **given)
    same.load_state_dict(state)
    assert [same.when(index, 0) for index in range(24)] == [first.when(index, 0) for index in range(24)]


def test_after_rescale_the_rest_is_on_the_new_ranks() -> None:
    loader = ShardedDataLoader(range(24), 2, shuffle=True, seed=5, num_replicas=2, rank=0)
    batches = iter(loader)
    early = next(batches).tolist()
    with pytest.warns(LoaderWarning, match="samples in a step"):
        loader.rescale(1, 0)
    later = [(loader.position - 1, batch.tolist()) for batch in batches]
    assert all(loader.when(one, 0)[0][1:] == (step, 0, n) for step, batch in later for n, one in enumerate(batch))
    with pytest.raises(ValueError, match="other ranks"):
        loader.when(early[0], 0)


@pytest.mark.parametrize("lengths", [np.full(10**4, 10**6), np.array([3, 10**10, 0, 10**9])], ids=["equal", "others"])
def test_shards_of_ten_billion_samples_are_inverted(lengths: Any) -> None:
    loader = ShardedDataLoader(range(int(lengths.sum())), 256, sampler=ShardShuffleSampler(lengths, lanes=8, seed=7))
    for step in (0, 17, 10**6):
        indices = loader.indices(1, step)
        assert [loader.when(indices[n], 1) for n in (0, 200)] == [[(1, step, 0, 0)], [(1, step, 0, 200)]]


def test_every_short_permutation_is_inverted() -> None:
    shuffle = Bijections(7, "windows")
    for length in [*range(1, 40), 1000]:
        lengths, number = np.full(length, length), np.full(length, -length)
        there = shuffle(np.arange(length), lengths, number)
        assert [shuffle.inverse(int(one), length, -length) for one in there] == list(range(length))


class Backwards(Sampler[int]):
    """A sampler of the user's, with an inverse of its own or without."""

    def len_epoch(self, epoch: int) -> int:
        return 10

    def iter_epoch(self, epoch: int, start: int = 0) -> Any:
        return iter(range(9 - start, -1, -1))


class Inverted(Backwards):
    def positions_of(self, index: int, epoch: int) -> list[int]:
        return [9 - index]


class Reversed(RandomSampler):
    def epoch_table(self, epoch: int) -> Any:
        return super().epoch_table(epoch + 1)


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("given", [{}, {"micro_batch": 2}, {"steps_per_epoch": 4}, {"last_batch": "discard"}])
def test_in_global_batches_the_shares_of_the_ranks_count(given: dict[str, Any], ranks: int) -> None:
    common: Any = {"global_batch": 7, "shuffle": True, "seed": 5, "collate_fn": list, "num_replicas": ranks, **given}
    made = [ShardedDataLoader(range(LENGTH), rank=rank, **common) for rank in range(ranks)]
    read = read_places(made, range(3))
    for index in range(LENGTH):
        assert [place for epoch in range(3) for place in made[0].when(index, epoch)] == read.get(index, [])


def test_an_order_of_your_own_has_the_inverse_that_you_write() -> None:
    assert ShardedDataLoader(range(10), 4, sampler=Inverted()).when(2) == [(0, 1, 0, 3)]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"batch_size": 2, "sampler": WeightedRandomSampler([1] * 10, 10, seed=0)}, "WeightedRandomSampler"),
        ({"batch_size": 2, "costs": [1] * 10}, "CostSampler"),
        ({"batch_size": 2, "sampler": Backwards()}, "Backwards"),
        ({"batch_size": 2, "sampler": Reversed(10, seed=0)}, "Reversed"),
        ({"batch_size": 2, "sampler": torch_data.RandomSampler(range(10))}, "RandomSampler"),  # type: ignore[arg-type]
        ({"batch_sampler": FixedBucketSampler(list(range(1, 11)), 2, num_buckets=2, seed=4)}, "FixedBucketSampler"),
        ({"batch_sampler": [[2, 3], [3, 4]]}, "list"),
        ({"batch_sampler": [[2, 3], [4]]}, "list"),
        ({"batch_sampler": np.array([[2, 3], [3, 4]])}, "ndarray"),
    ],
)
def test_an_order_without_an_inverse_is_an_error_that_says_where_to_look(given: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"of an? {kind}.*loader\.indices"):
        ShardedDataLoader(range(10), **given).when(3)


def test_wrong_questions_say_what_to_ask() -> None:
    loader = ShardedDataLoader(ConcatDataset([range(5), range(5)]), 2)
    for index in (10, -1):
        with pytest.raises(IndexError, match=f"sample {index} does not exist: the dataset has 10 samples"):
            loader.when(index)
    with pytest.raises(ValueError, match="epochs count from 0"):
        loader.when(0, -1)
    assert loader.when(np.int64(3)) == loader.when(torch.tensor(3)) == loader.when(3) != []
    with pytest.raises(TypeError, match="the index must be an integer, got '3'"):
        loader.when("3")
    mixed = ShardedDataLoader(interleave([range(5), range(5)]), 2)
    with pytest.raises(TypeError, match=r"give \(number of the dataset, index in it\)"):
        mixed.when(3)
    assert mixed.when((2, 0)) == mixed.when((1, 5)) == []
    with pytest.raises(TypeError, match="read by index"):
        ShardedDataLoader(lambda: iter(range(5)), 2, streams=1).when(0)
    with pytest.raises(TypeError, match="num_replicas=1"):
        DataLoader(range(5), 2, shuffle=True, seed=1).when(0)  # type: ignore[arg-type]
    assert DataLoader(range(5), 2, num_replicas=1).when(3) == [(0, 1, 0, 1)]  # type: ignore[arg-type]
