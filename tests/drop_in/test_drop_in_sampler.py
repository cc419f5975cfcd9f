"""`ShuffleSampler`: torch's `RandomSampler`, in its order, which knows epochs and can be resumed."""

from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from sharded_loader.base import limits
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
def test_every_epoch_is_torchs_and_leaves_the_default_generator_as_torchs(length: int) -> None:
    found = []
    for kind in (ShuffleSampler, RandomSampler):
        torch.manual_seed(3)
        sampler = kind(range(length))
        found.append([(list(sampler), torch.rand(()).item()) for _ in range(3)])
    assert found[0] == found[1]


def test_reseeding_before_an_epoch_decides_its_order() -> None:
    sampler = ShuffleSampler(range(30))
    orders = []
    for _ in range(3):
        torch.manual_seed(7)
        orders.append(list(sampler))
    assert orders[0] == orders[1] == orders[2]


def test_what_set_epoch_decides_draws_as_much_as_torchs() -> None:
    left = []
    for told in (False, True):
        torch.manual_seed(3)
        sampler = ShuffleSampler(range(9))
        for epoch in range(3):
            if told:
                sampler.set_epoch(epoch)
            list(sampler)
        left.append(torch.get_rng_state().tolist())
    assert left[0] == left[1]


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
    epochs = []
    for number in range(3):
        if seed is None:
            sampler.set_epoch(number)
        epochs.append(list(sampler))
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


@pytest.mark.parametrize("arguments", [{"seed": 4}, {"generator": seeded()}], ids=["seed", "generator"])
def test_its_state_says_the_epochs_that_come(arguments: dict[str, Any]) -> None:
    sampler = ShuffleSampler(range(30), **arguments)
    list(sampler)
    state = json.loads(json.dumps(sampler.begin_state()))
    expected = [list(sampler) for _ in range(3)]
    other = ShuffleSampler(range(30))
    other.load_begin_state(state)
    assert [list(other) for _ in range(3)] == expected


@pytest.mark.parametrize("told", [False, True])
def test_without_a_seed_its_state_says_the_epoch_that_comes_and_those_that_set_epoch_names(told: bool) -> None:
    sampler = ShuffleSampler(range(30))
    list(sampler)
    if told:
        sampler.set_epoch(5)
    state = json.loads(json.dumps(sampler.begin_state()))
    other = ShuffleSampler(range(30))
    other.load_begin_state(state)
    assert list(other) == list(sampler)
    for one in (sampler, other):
        one.set_epoch(2)
    assert list(other) == list(sampler)


def test_a_state_of_its_end_draws_nothing() -> None:
    sampler = ShuffleSampler(range(30))
    sampler.set_epoch(1)
    list(sampler)
    before = torch.get_rng_state()
    state = sampler.end_state()
    assert torch.equal(torch.get_rng_state(), before)
    other = ShuffleSampler(range(30))
    other.load_begin_state(state)
    for one in (sampler, other):
        torch.set_rng_state(before)
        assert list(one) != list(range(30))
    for one in (sampler, other):
        one.set_epoch(1)
    assert list(sampler) == list(other)


def test_a_state_of_before_in_which_a_drawn_seed_decides_all_epochs_is_loaded() -> None:
    sampler = ShuffleSampler(range(30))
    sampler.load_begin_state({"seed": 4, "epoch": 1})
    seeded_by_4 = ShuffleSampler(range(30), seed=4)
    seeded_by_4.set_epoch(1)
    assert [list(sampler), list(sampler)] == [list(seeded_by_4), list(seeded_by_4)]


def test_it_is_pickled_with_its_place() -> None:
    sampler = ShuffleSampler(range(30), seed=2)
    list(sampler)
    copied = pickle.loads(pickle.dumps(sampler))
    assert list(copied) == list(sampler)


def test_nothing_is_drawn_before_the_first_index() -> None:
    before = torch.get_rng_state()
    iter(ShuffleSampler(range(5)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("arguments", [{}, {"seed": 4}], ids=["drawn", "seed"])
def test_no_python_function_runs_for_each_index(arguments: dict[str, Any]) -> None:
    calls = []
    batches = iter(BatchSampler(ShuffleSampler(range(1000), **arguments), 100, False))
    next(batches)
    sys.setprofile(lambda frame, kind, argument: calls.append(frame.f_code.co_name) if kind == "call" else None)
    try:
        rest = list(batches)
    finally:
        sys.setprofile(None)
    assert len(rest) == 9 and len(calls) < 20


def test_with_a_generator_it_draws_when_torchs_sampler_draws() -> None:
    """torch's sampler draws once more where the indices end."""
    states = []
    for kind in (ShuffleSampler, RandomSampler):
        generator = seeded()
        batches = iter(BatchSampler(kind(range(6), generator=generator), 2, False))
        states.append([generator.get_state().tolist()])
        for _ in range(4):
            next(batches, None)
            states[-1].append(generator.get_state().tolist())
    assert states[0] == states[1] and states[0][3] != states[0][4]


def test_a_trainer_that_sets_the_epoch_of_the_loaders_sampler_has_that_epoch() -> None:
    loader = DataLoader(range(20), 20, shuffle=True, seed=3)
    epochs = [batch.tolist() for _ in range(3) for batch in loader]
    loader.sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] == [epochs[1]]


@pytest.mark.parametrize("make", [DataLoader, torch.utils.data.DataLoader])
def test_a_look_at_the_batches_of_a_distributed_sampler_changes_nothing(make: Any) -> None:
    loader = make(range(20), 2, sampler=DistributedSampler(range(20), 2, 0))  # type: ignore[arg-type]
    loader.sampler.set_epoch(2)
    expected = list(loader.batch_sampler)
    assert [batch.tolist() for _ in range(2) for batch in loader] == expected * 2


def test_a_look_at_the_batches_is_an_epoch_of_the_sampler_that_shuffles() -> None:
    loader: Any = DataLoader(range(20), 2, shuffle=True, seed=3)
    looked = [list(loader.batch_sampler) for _ in range(2)]
    loader.sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] == looked[1] != looked[0]


@pytest.mark.parametrize("seed", [-3, 2**63, 2**64 - 1, 2**70])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    assert sorted(ShuffleSampler(range(9), seed=seed)) == list(range(9))


def test_an_order_that_does_not_fit_into_memory_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: limits.Limit(10**9, "the machine's memory"))
    for arguments in ({}, {"seed": 1}, {"generator": seeded()}):
        with pytest.raises(MemoryError, match="list of all 1,000,000,000 indices.*ShardedDataLoader"):
            next(iter(DataLoader(range(10**9), 2, shuffle=True, **arguments)))


class PutsBack:
    """Its state has the global generator, which `load_state_dict` puts back."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> int:
        return index

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_dataset_that_puts_the_generator_back_changes_no_later_epoch(asks_first: bool) -> None:
    torch.manual_seed(3)
    loader = DataLoader(PutsBack(), 30, shuffle=True)
    epochs = [batch.tolist() for _ in range(4) for batch in loader]
    torch.manual_seed(3)
    loader = DataLoader(PutsBack(), 30, shuffle=True)
    found = [batch.tolist() for _ in range(2) for batch in loader]
    other = DataLoader(PutsBack(), 30, shuffle=True)
    other.load_state_dict(loader.state_dict())
    batches = iter(other)
    if asks_first:
        other.state_dict()
    found += [batch.tolist() for batch in batches]
    found += [batch.tolist() for batch in other]
    assert found == epochs
