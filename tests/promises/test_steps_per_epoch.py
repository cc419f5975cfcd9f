"""``steps_per_epoch``: every epoch has as many full batches on every rank, and the next one goes on where it ended."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from conftest import POOLS, covering, made, make_pool

from sharded_loader import (
    BatchSampler,
    FixedBucketSampler,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    SequentialSampler,
    ShardedDataLoader,
    WeightedRandomSampler,
)

LENGTH, SIZE = 11, 3


class Foreign:
    """A sampler of the user's own, of the same order in each epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter([7, 3, 5, 1, 9, 0, 2])

    def __len__(self) -> int:
        return 7


class ByEpoch(Foreign):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(7).tolist())


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": SIZE},
    "shuffled": lambda: {"batch_size": SIZE, "shuffle": True},
    "random": lambda: {"batch_size": SIZE, "sampler": RandomSampler(LENGTH, seed=4)},
    "weighted": lambda: {"batch_size": SIZE, "sampler": WeightedRandomSampler(range(1, LENGTH + 1), 8, seed=4)},
    "list": lambda: {"batch_size": SIZE, "sampler": [4, 8, 1, 10]},
    "range": lambda: {"batch_size": SIZE, "sampler": range(2, 9)},
    "foreign": lambda: {"batch_size": SIZE, "sampler": Foreign()},
    "by epoch": lambda: {"batch_size": SIZE, "sampler": ByEpoch()},
    "torch random": lambda: {"batch_size": SIZE, "sampler": torch_data.RandomSampler(range(LENGTH))},  # type: ignore
    "torch order": lambda: {"batch_size": SIZE, "sampler": torch_data.SequentialSampler(range(LENGTH))},  # type: ignore
    "batches": lambda: {"batch_sampler": BatchSampler(SequentialSampler(LENGTH), SIZE, "discard")},
    "random batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=4), SIZE)},
    "list of batches": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7]]},
    "torch batches": lambda: {
        "batch_sampler": torch_data.BatchSampler(torch_data.SequentialSampler(range(LENGTH)), SIZE, drop_last=False)
    },
    "buckets": lambda: {"batch_sampler": FixedBucketSampler(list(range(1, LENGTH + 1)), SIZE, num_buckets=2, seed=4)},
}
STEPS = (1, 3, 4, 9)


def loader_of(kind: str, steps: int | None, pool: Any = "inline", **options: Any) -> ShardedDataLoader:
    pool = make_pool(pool, 2) if isinstance(pool, str) else pool
    return made(range(LENGTH), seed=6, steps_per_epoch=steps, pool=pool, **SAMPLERS[kind](), **options)


def epochs_of(loader: ShardedDataLoader, epochs: int) -> list[list[Any]]:
    with loader:
        return [[batch.tolist() for batch in loader] for _ in range(epochs)]


def endless(kind: str, batches: int) -> list[Any]:
    """The first batches of the sampler's epochs, one after the other, as they follow without ``steps_per_epoch``."""
    found: list[Any] = []
    with loader_of(kind, None) as loader:
        given = loader.batch_size is None
        while len(found) < batches * (1 if given else SIZE):
            epoch = [batch.tolist() for batch in loader]
            found += epoch if given else sum(epoch, [])
    return found[:batches] if given else [found[i : i + SIZE] for i in range(0, batches * SIZE, SIZE)]


@covering(kind=SAMPLERS, steps=STEPS)
def test_epochs_are_stretches_of_an_endless_order(kind: str, steps: int) -> None:
    whole = endless(kind, 4 * steps)
    loader = loader_of(kind, steps)
    assert len(loader) == steps
    assert epochs_of(loader, 4) == [whole[at : at + steps] for at in range(0, 4 * steps, steps)]


@covering(kind=SAMPLERS, steps=[1, 4])
def test_set_epoch_jumps_to_what_reading_up_to_there_gives(kind: str, steps: int) -> None:
    whole = epochs_of(loader_of(kind, steps), 5)
    with loader_of(kind, steps) as loader:
        for epoch in (3, 0, 4, 1, 2):
            loader.set_epoch(epoch)
            assert [batch.tolist() for batch in loader] == whole[epoch], epoch


@covering(1, kind=SAMPLERS, pool=["inline", "thread", "fork"], count=range(6), epoch=range(3))
def test_a_state_goes_on_in_any_epoch_after_any_step(kind: str, pool: str, count: int, epoch: int) -> None:
    whole = epochs_of(loader_of(kind, 5), 5)
    with loader_of(kind, 5, pool) as loader:
        for _ in range(epoch):
            assert len(list(loader)) == 5
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(kind, 5) as loader:
        loader.load_state_dict(state)
        expected = [one for one in (whole[epoch][count:], *whole[epoch + 1 :]) if one]
        assert [[batch.tolist() for batch in loader] for _ in expected[:2]] == expected[:2]


@pytest.mark.costly(7)
@pytest.mark.parametrize("kind", ["in order", "shuffled", "random", "list", "foreign", "by epoch"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_every_rank_has_the_steps_and_all_of_them_the_samples_in_turns(kind: str, replicas: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [epochs_of(loader_of(kind, 4, num_replicas=replicas, rank=rank), 3) for rank in range(replicas)]
    assert all([len(batch) for batch in epoch] == [SIZE] * 4 for mine in found for epoch in mine)
    assert found[0] != found[1]
    for epoch in range(3):
        loaders = [loader_of(kind, 4, num_replicas=replicas, rank=rank) for rank in range(replicas)]
        for rank, loader in enumerate(loaders):
            loader.set_epoch(epoch)
            assert epochs_of(loader, 1) == [found[rank][epoch]]


def test_a_rank_goes_on_from_the_state_of_any_rank_but_not_among_another_number() -> None:
    whole = [epochs_of(loader_of("shuffled", 4, num_replicas=2, rank=rank), 2) for rank in range(2)]
    with loader_of("shuffled", 4, num_replicas=2, rank=0) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    for rank in range(2):
        with loader_of("shuffled", 4, num_replicas=2, rank=rank) as loader:
            loader.load_state_dict(state)
            assert [[batch.tolist() for batch in loader] for _ in range(2)] == [whole[rank][0][1:], whole[rank][1]]
    for options in ({}, {"num_replicas": 3, "rank": 0}):
        with loader_of("shuffled", 4, **options) as loader, pytest.raises(ValueError):
            loader.load_state_dict(state)


def test_a_state_of_other_steps_is_rejected() -> None:
    with loader_of("shuffled", 4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for steps in (5, None):
        with loader_of("shuffled", steps) as loader, pytest.raises(ValueError, match="steps_per_epoch was 4"):
            loader.load_state_dict(state)


def test_an_empty_dataset_or_sampler_has_no_steps_and_does_not_hang() -> None:
    for options in ({"dataset": []}, {"dataset": range(4), "sampler": []}, {"dataset": [], "shuffle": True}):
        loader = ShardedDataLoader(options.pop("dataset"), 2, steps_per_epoch=3, **options)  # type: ignore[arg-type]
        assert list(loader) == []


def test_a_sampler_whose_length_is_wrong_is_an_error_with_advice() -> None:
    class Wrong(Foreign):
        def __len__(self) -> int:
            return 9

    loader = ShardedDataLoader(range(LENGTH), 3, sampler=Wrong(), steps_per_epoch=4)
    with pytest.raises(ValueError, match="yielded 7 items.*its length is 9.*steps_per_epoch="):
        list(loader)


class WithoutEnd:
    """Shuffled passes, one after the other, as detectron2's samplers for training."""

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(7)
        while True:
            yield from rng.permutation(LENGTH).tolist()


class BatchesWithoutEnd:
    def __iter__(self) -> Iterator[list[int]]:
        return ([number % LENGTH, number * 3 % LENGTH] for number in itertools.count())


class PureWithoutEnd(Sampler[int]):
    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return ((epoch * 5 + number) * 7 % LENGTH for number in itertools.count(start))


class StatefulWithoutEnd:
    """It goes on where it has stopped, by a state of its own."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.number += 1
            yield self.number * 4 % LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


WITHOUT_END: dict[str, Callable[[], dict[str, Any]]] = {
    "samples": lambda: {"batch_size": 6, "sampler": WithoutEnd()},
    "pure": lambda: {"batch_size": 6, "sampler": PureWithoutEnd()},
    "stateful": lambda: {"batch_size": 6, "sampler": StatefulWithoutEnd()},
    "copies": lambda: {"batch_size": 6, "sampler": RepeatedSampler(4, WithoutEnd())},
    "batches": lambda: {"batch_sampler": BatchesWithoutEnd()},
}


def endless_loader(kind: str, replicas: int = 1, rank: int = 0, pool: str = "inline") -> ShardedDataLoader:
    given = WITHOUT_END[kind]()
    if "batch_size" in given:  # the global batch stays
        given["batch_size"] //= replicas
    ranks = {"num_replicas": replicas, "rank": rank}
    return ShardedDataLoader(range(LENGTH), seed=6, steps_per_epoch=4, pool=make_pool(pool), **ranks, **given)


def in_turns(kind: str, loaders: list[ShardedDataLoader], epochs: int) -> list[Any]:
    """The steps of all ranks as the batches of one rank."""
    found = []
    for _ in range(epochs):
        for step in zip(*loaders, strict=True):
            batches = [batch.tolist() for batch in step]
            found += batches if kind == "batches" else [[index for row in zip(*batches, strict=True) for index in row]]
    return found


@covering(1, pool=POOLS, kind=WITHOUT_END)
def test_a_sampler_without_end_has_epochs_of_these_steps_in_any_pool(pool: str, kind: str) -> None:
    expected = epochs_of(endless_loader(kind), 3)
    assert len(endless_loader(kind)) == 4 and all(len(batches) == 4 for batches in expected)
    assert epochs_of(endless_loader(kind, pool=pool), 3) == expected


@pytest.mark.parametrize("kind", WITHOUT_END)
@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_share_a_sampler_without_end_in_turns(kind: str, replicas: int) -> None:
    whole = sum(epochs_of(endless_loader(kind), 2 * replicas), [])
    found = in_turns(kind, [endless_loader(kind, replicas, rank) for rank in range(replicas)], 2)
    assert found == whole[: len(found)]


@pytest.mark.costly
@pytest.mark.parametrize("kind", WITHOUT_END)
def test_a_sampler_without_end_resumes_after_any_step_on_other_ranks_too(kind: str) -> None:
    whole = in_turns(kind, [endless_loader(kind, 2, rank) for rank in range(2)], 4)
    per_step = 2 if kind == "batches" else 1
    for done in range(11):
        ranks = [endless_loader(kind, 2, rank) for rank in range(2)]
        for loader in ranks:
            batches = (batch for _ in range(4) for batch in loader)
            for _ in range(done):
                next(batches)
        state = json.loads(json.dumps(ranks[done % 2].state_dict()))
        for replicas in (2,) if kind == "batches" else (1, 2, 3):
            resumed = [endless_loader(kind, replicas, rank) for rank in range(replicas)]
            for loader in resumed:
                loader.load_state_dict(state)
            rest = in_turns(kind, resumed, 2)
            assert rest == whole[done * per_step :][: len(rest)]
