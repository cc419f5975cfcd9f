"""`ShuffleSampler`: torch's `RandomSampler`, in its order, which knows epochs and can be resumed."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from sharded_loader import system
from sharded_loader.drop_in.sampler import ShuffleSampler
from sharded_loader.torch import DataLoader


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_it_is_torchs_sampler() -> None:
    sampler = ShuffleSampler(range(7))
    assert isinstance(sampler, RandomSampler)
    assert len(sampler) == sampler.num_samples == 7
    assert sampler.replacement is False


@pytest.mark.parametrize("length", [1, 2, 100])
def test_its_first_epoch_is_torchs(length: int) -> None:
    torch.manual_seed(3)
    expected = list(RandomSampler(range(length)))
    torch.manual_seed(3)
    assert list(ShuffleSampler(range(length))) == expected


def test_with_a_generator_every_epoch_is_torchs() -> None:
    own, torchs = (kind(range(20), generator=seeded()) for kind in (ShuffleSampler, RandomSampler))
    assert [list(own) for _ in range(3)] == [list(torchs) for _ in range(3)]


def test_epochs_differ_and_each_has_every_index_once() -> None:
    sampler = ShuffleSampler(range(30), seed=1)
    epochs = [list(sampler) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)


@pytest.mark.parametrize("seed", [None, 0, 7, 2**63 - 1])
def test_an_epoch_is_a_function_of_the_seed_and_its_number(seed: int | None) -> None:
    sampler = ShuffleSampler(range(30), seed=seed)
    epochs = [list(sampler) for _ in range(3)]
    for number in (2, 0, 1):
        sampler.set_epoch(number)
        assert list(sampler) == epochs[number]
    if seed is not None:
        other = ShuffleSampler(range(30), seed=seed)
        other.set_epoch(2)
        assert list(other) == epochs[2]


def test_a_seed_comes_before_a_generator() -> None:
    assert list(ShuffleSampler(range(9), seeded(), 3)) == list(ShuffleSampler(range(9), seed=3))


@pytest.mark.parametrize("bad", [-1, "1", 1.5, None])
def test_an_epoch_is_a_number_from_0_on(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="epoch"):
        ShuffleSampler(range(3)).set_epoch(bad)


@pytest.mark.parametrize("arguments", [{}, {"seed": 4}, {"generator": seeded()}], ids=["", "seed", "generator"])
def test_its_state_says_the_epochs_that_come(arguments: dict[str, Any]) -> None:
    sampler = ShuffleSampler(range(30), **arguments)
    list(sampler)
    state = json.loads(json.dumps(sampler.begin_state()))
    expected = [list(sampler) for _ in range(3)]
    other = ShuffleSampler(range(30))
    other.load_begin_state(state)
    assert [list(other) for _ in range(3)] == expected


def test_it_is_pickled_with_its_place() -> None:
    sampler = ShuffleSampler(range(30), seed=2)
    list(sampler)
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(sampler)


def test_nothing_is_drawn_before_the_first_index() -> None:
    before = torch.get_rng_state()
    iter(ShuffleSampler(range(5)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trainer_that_sets_the_epoch_of_the_loaders_sampler_has_that_epoch() -> None:
    loader = DataLoader(range(20), 20, shuffle=True, seed=3)
    epochs = [batch.tolist() for _ in range(3) for batch in loader]
    loader.sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] == [epochs[1]]


@pytest.mark.parametrize("seed", [-3, 2**63, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert sorted(ShuffleSampler(range(9), seed=seed)) == list(range(9))


def test_an_order_that_does_not_fit_into_memory_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_bytes", lambda: system.Limit(10**9, "the machine's memory"))
    for arguments in ({}, {"seed": 1}, {"generator": seeded()}):
        with pytest.raises(MemoryError, match="list of all 1,000,000,000 indices.*ShardedDataLoader"):
            next(iter(DataLoader(range(10**9), 2, shuffle=True, **arguments)))
