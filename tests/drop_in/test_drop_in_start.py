"""A sampler begins as it does under torch, and goes on from a state: whatever it draws from, wherever it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import covering
from drop_in_samples import (
    DATA,
    SAMPLERS,
    TORCHS,
    Backwards,
    Resets,
    assert_resumes,
    plain,
    seeded,
    some,
)
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
)
from torch.utils.data import DataLoader as TorchsLoader

from sharded_loader import sample_rng
from sharded_loader.base.entries import written
from sharded_loader.drop_in.sampler import EpochCount, SamplerStart, ShuffleSampler
from sharded_loader.torch import DataLoader

TWICE = ("eager batches", "eager, one by one", "stateful iterators")
"""They draw each time that they are asked for an iterator, and with workers torch asks twice."""


class Drawn(Dataset[Any]):
    """The index, what the default generator gives for it, and the seed of the process that reads it."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), torch.rand(()).item(), float(torch.initial_seed() % 2**32)]


def epochs_and_draws(kind: Any, make: Callable[[], dict[str, Any]], reseeds: bool, **given: Any) -> list[Any]:
    """Three epochs of two loaders, read in turn, and what the default generator gives in between."""
    torch.manual_seed(3)
    loaders = [kind(Drawn(), **given, **make()) for _ in range(2)]
    found: list[Any] = []
    for epoch in range(3):
        if reseeds:
            torch.manual_seed(100 + epoch)
        batches = [iter(loader) for loader in loaders]
        found.append(torch.rand(()).item())
        for rows in zip(*batches, strict=True):
            found += [repr(batch) for batch in rows]
        found.append(torch.rand(()).item())
    return found


@covering(kind=[kind for kind in SAMPLERS if kind != "shuffle, seed"], reseeds=[False, True])
def test_every_epoch_and_the_default_generator_are_torchs(kind: str, reseeds: bool) -> None:
    own, torchs = (epochs_and_draws(loader, SAMPLERS[kind], reseeds) for loader in (DataLoader, TORCHS))
    assert own == torchs


@covering(
    kind=[kind for kind in SAMPLERS if kind != "shuffle, seed"],
    reseeds=[False, True],
    persistent=[False, True],
)
@pytest.mark.costly
def test_every_epoch_and_the_default_generator_are_torchs_with_workers(
    kind: str, reseeds: bool, persistent: bool
) -> None:
    given = {"num_workers": 2, "persistent_workers": persistent}
    own, torchs = (epochs_and_draws(loader, SAMPLERS[kind], reseeds, **given) for loader in (DataLoader, TORCHS))
    assert own == torchs


class EveryOther(Sampler[int]):
    """An order of its own for each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(place * (1 + self.epoch)) % 13 for place in range(13)])


TOLD: dict[str, Callable[[], Any]] = {
    "distributed": lambda: DistributedSampler(DATA, 2, 0, seed=1),
    "of the user's": EveryOther,
    "shuffle": lambda: None,
}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.costly)])
@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("given", [{"batch_size": 2}, {"batch_size": None}], ids=["batches", "samples"])
def test_set_epoch_may_come_after_iter_and_before_the_first_batch(
    kind: str, epoch: int, workers: int, given: dict[str, Any]
) -> None:
    def make() -> Any:
        sampler = TOLD[kind]()
        return DataLoader(DATA, num_workers=workers, sampler=sampler, shuffle=sampler is None, **given)

    loader = make()
    for number in range(epoch + 1):
        begun = iter(loader)
        loader.sampler.set_epoch(number)
        before = some(begun, 3)
    state, rest = loader.state_dict(), plain(begun)
    assert rest
    other = make()
    other.load_state_dict(state)
    begun = iter(other)
    assert other.state_dict() == state
    other.sampler.set_epoch(epoch)
    assert plain(begun) == rest
    begun = iter(other)
    other.sampler.set_epoch(epoch)
    assert plain(begun) == before + rest


@pytest.mark.parametrize("when", ["before iter", "after iter", "never"])
@pytest.mark.parametrize("kind", TOLD)
def test_a_state_within_an_epoch_says_the_epoch(kind: str, when: str) -> None:
    """Fabric names epoch 0 to the sampler after every resume."""

    def make() -> Any:
        sampler = TOLD[kind]()
        return DataLoader(DATA, 2, sampler=sampler, shuffle=sampler is None, seed=4)

    loader, other = make(), make()
    loader.sampler.set_epoch(2)
    batches = iter(loader)
    some(batches, 2)
    other.load_state_dict(loader.state_dict())
    if when == "before iter":
        other.sampler.set_epoch(0)
    begun = iter(other)
    if when == "after iter":
        other.sampler.set_epoch(0)
    assert plain(begun) == plain(batches)
    assert plain(other) == plain(loader)


class RandomSamples(Drawn):
    def __getitem__(self, index: int) -> Any:
        return index, sample_rng().random()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("order", ["shuffled", "in order", "distributed"])
@pytest.mark.costly(2)
def test_with_a_seed_the_random_numbers_of_samples_are_those_of_the_epoch_that_set_epoch_names(
    order: str, workers: int
) -> None:
    def make() -> Any:
        sampler = DistributedSampler(DATA, 2, 0, seed=1) if order == "distributed" else None
        options = {"shuffle": True} if order == "shuffled" else {"sampler": sampler}
        return DataLoader(RandomSamples(), 2, seed=3, num_workers=workers, **options)

    def told(loader: Any, epoch: int) -> Any:
        begun = iter(loader)
        loader.sampler.set_epoch(epoch)
        return begun

    loader = make()
    expected = [repr(list(told(loader, epoch))) for epoch in range(4)]
    assert len(set(expected)) == 4
    loader = make()
    assert [repr(list(told(loader, epoch))) for epoch in (2, 3)] == expected[2:]
    loader = make()
    begun = told(loader, 2)
    first, state = next(begun), loader.state_dict()
    other = make()
    other.load_state_dict(state)
    assert repr([first, *told(other, 2)]) == expected[2]
    if order != "distributed":  # torch's sampler counts nothing
        assert repr(list(other)) == repr(list(loader)) == expected[3]


@covering(kind=SAMPLERS, count=[0, 1, 3, 5, None], before=[0, 2])
def test_a_state_goes_on_in_this_process(kind: str, count: int | None, before: int) -> None:
    def make(workers: int) -> Any:
        return DataLoader(DATA, num_workers=workers, **SAMPLERS[kind]())

    assert_resumes(make, saved=0, loaded=0, before=before, count=count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 3, None])
@pytest.mark.parametrize(("saved", "loaded"), [(0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_state_goes_on_with_another_number_of_workers(kind: str, saved: int, loaded: int, count: int | None) -> None:
    def make(workers: int) -> Any:
        return DataLoader(DATA, num_workers=workers, **SAMPLERS[kind]())

    # What is asked for twice draws twice: of these the epoch itself is the same, not those after it.
    epochs = 0 if kind in TWICE and not (saved and loaded) else 2
    assert_resumes(make, saved=saved, loaded=loaded, before=1, count=count, epochs=epochs)


def test_what_a_loaded_epoch_draws_is_put_back() -> None:
    loader = DataLoader(DATA, 3, sampler=RandomSampler(DATA))
    some(iter(loader), 2)
    state, before = loader.state_dict(), torch.get_rng_state()
    loader.load_state_dict(state)
    list(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_order_than_before_is_an_error_that_names_the_sampler() -> None:
    loader = DataLoader(DATA, 2, sampler=Backwards(13))
    some(iter(loader), 3)
    other = DataLoader(DATA, 2, sampler=Backwards(12))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(
        ValueError, match=r"the sampler, a BatchSampler, yields other indices in epoch 0 than the 3 before"
    ):
        next(iter(other))


def test_a_sampler_that_is_shorter_than_before_is_the_same_error() -> None:
    loader = DataLoader(DATA, batch_sampler=[[1], [2], [3], [4]])
    some(iter(loader), 3)
    other = DataLoader(DATA, batch_sampler=[[1], [2]])
    other.load_state_dict(loader.state_dict())
    batches = iter(other)
    with pytest.raises(ValueError, match="the sampler, a list, yields only 2 items in epoch 0, where it had yielded 3"):
        next(batches)
    assert list(batches) == []


def test_an_error_of_a_loaded_sampler_comes_as_it_is() -> None:
    class Fails(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            raise OSError("no order")
            yield 0

    loader = DataLoader(DATA, 3, sampler=Fails())
    state = loader.state_dict()
    with pytest.raises(OSError, match="no order"):
        next(iter(loader))
    loader.load_state_dict(state)
    with pytest.raises(OSError, match="no order"):
        next(iter(loader))


def test_a_state_before_the_first_batch_settles_the_order() -> None:
    torch.manual_seed(1)
    loader = DataLoader(DATA, 3, sampler=RandomSampler(DATA))
    state = loader.state_dict()
    torch.manual_seed(2)  # a model is made
    expected = plain(loader)
    other = DataLoader(DATA, 3, sampler=RandomSampler(DATA))
    other.load_state_dict(state)
    assert plain(other) == expected


def test_only_samplers_that_may_draw_are_noted() -> None:
    assert SamplerStart(BatchSampler(range(5), 2, False), None, False, EpochCount()).state.rng is None
    assert SamplerStart([[1], [2]], None, False, EpochCount()).state.rng is None
    assert SamplerStart(Resets(), None, False, EpochCount()).state.rng is None
    shuffled = SamplerStart(BatchSampler(ShuffleSampler(DATA, seed=4), 2, False), None, False, EpochCount())
    shuffled.settle()
    assert written(shuffled.state) == {"yielded": 0, "checksum": 0, "shuffle": {"seed": 4, "epoch": 0}}
    drawing = SamplerStart(RandomSampler(DATA, generator=seeded()), None, False, EpochCount())
    assert drawing.state.rng is not None and len(drawing.state.rng[0]) == 2


class WithAPrivateGenerator(Sampler[int]):
    def __init__(self) -> None:
        self._random = seeded()

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(13, generator=self._random).tolist()


@pytest.mark.parametrize("before", [0, 2])
def test_a_generator_of_a_sampler_is_found_by_any_name(before: int) -> None:
    loader = DataLoader(DATA, 3, sampler=WithAPrivateGenerator())
    plain(loader)
    batches = iter(loader)
    some(batches, before)
    state, expected = loader.state_dict(), [plain(batches), plain(loader)]
    other = DataLoader(DATA, 3, sampler=WithAPrivateGenerator())
    other.load_state_dict(state)
    assert [plain(other), plain(other)] == expected


class DrawsEachBatch(Sampler[list[int]]):
    """Draws the size of each batch when it is asked for it."""

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, 60, 3):
            yield list(range(begin, begin + 1 + int(torch.randint(3, ()))))


@pytest.mark.parametrize("given", [{}, {"prefetch_factor": 3, "persistent_workers": True}], ids=["default", "given"])
def test_a_sampler_that_draws_for_each_batch_is_asked_when_torch_asks_it(given: dict[str, Any]) -> None:
    def run(kind: type) -> list[list[int]]:
        torch.manual_seed(1)
        loader, found = kind(range(60), batch_sampler=DrawsEachBatch(), num_workers=2, **given), []
        for _ in range(2):
            for batch in loader:
                found.append(batch.tolist())
                torch.rand(1)  # as dropout does
        return found

    assert run(DataLoader) == run(TorchsLoader)
