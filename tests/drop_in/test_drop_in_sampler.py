"""The drop-in's samplers: in torch's order, and they can be resumed. Any sampler begins as it does under torch."""

from __future__ import annotations

import json
import pickle
import sys
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

from sharded_loader import FixedBucketSampler, GroupedBatchSampler, PackSampler, sample_rng
from sharded_loader import RandomSampler as RandomSamplerOfEpochs
from sharded_loader.base.entries import to_state
from sharded_loader.drop_in.sampler import EpochCount, SamplerStart, ShuffleSampler
from sharded_loader.torch import DataLoader


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


@pytest.mark.parametrize("arguments", [dict, lambda: {"generator": seeded()}], ids=["drawn", "generator"])
def test_without_a_seed_set_epoch_changes_nothing(arguments: Callable[[], dict[str, Any]]) -> None:
    left = []
    for told in (False, True):
        torch.manual_seed(3)
        sampler = ShuffleSampler(range(9), **arguments())
        for epoch in range(3):
            if told:
                sampler.set_epoch(epoch)
            left.append((list(sampler), torch.get_rng_state().tolist()))
    assert left[:3] == left[3:]


def test_with_a_generator_every_epoch_is_torchs() -> None:
    own, torchs = (kind(range(20), generator=seeded()) for kind in (ShuffleSampler, RandomSampler))
    assert [list(own) for _ in range(3)] == [list(torchs) for _ in range(3)]


class Named(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 20


_TOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "seed": lambda: {"shuffle": True, "seed": 2},
    "seed, generator": lambda: {"shuffle": True, "generator": seeded(), "seed": 2},
    "own": lambda: {"sampler": Named()},
}


@pytest.mark.parametrize("when", ["before iter", "after iter"])
@pytest.mark.parametrize("given", [{}, {"num_workers": 1, "thread_pool": True}], ids=["inline", "thread"])
@pytest.mark.parametrize("kind", _TOLD)
def test_set_epoch_of_the_loader_names_the_order_in_every_process(kind: str, given: Any, when: str) -> None:
    def made() -> DataLoader[Any]:
        torch.manual_seed(3)
        return DataLoader(range(20), 4, **_TOLD[kind](), **given)

    def read(loader: DataLoader[Any], epoch: int) -> list[Any]:
        batches = iter(loader) if when == "after iter" else None
        loader.set_epoch(epoch)
        return plain(loader if batches is None else batches)

    loader = made()
    epochs = [read(loader, epoch) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert read(made(), 1) == epochs[1]  # as in another process
    stopped, resumed = made(), made()
    stopped.set_epoch(1)
    next(iter(stopped))
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert plain(resumed) == epochs[1][1:]
    assert read(resumed, 2) == epochs[2]


def test_epochs_differ_and_each_has_every_index_once() -> None:
    sampler = ShuffleSampler(range(30), seed=1)
    epochs = [list(sampler) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_an_epoch_is_a_function_of_the_seed_and_its_number(seed: int) -> None:
    sampler = ShuffleSampler(range(30), seed=seed)
    epochs = [list(sampler) for _ in range(3)]
    for number in (2, 0, 1):
        sampler.set_epoch(number)
        assert list(sampler) == epochs[number]
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


def test_without_a_seed_its_state_says_the_epoch_that_comes() -> None:
    sampler, other = ShuffleSampler(range(30)), ShuffleSampler(range(30))
    other.load_begin_state(json.loads(json.dumps(sampler.begin_state())))
    before = torch.get_rng_state()
    assert sampler.end_state() == {}
    assert list(other) == list(sampler)
    assert torch.equal(torch.get_rng_state(), before)  # its seed was drawn when the state was taken


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


# -- any sampler begins, and goes on from a state ---------------------------------------------------------------------

TWICE = ("eager batches", "eager, one by one", "stateful iterators")
"""They draw each time that they are asked for an iterator, and with workers torch asks twice."""


class Drawn(Dataset[Any]):
    """The index, what the default generator gives for it, and the seed of the process that reads it."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), torch.rand(()).item(), float(torch.initial_seed() % 2**32)]


def listed(batch: Any) -> list[Any]:
    """What can be compared, and is made sooner than the repr of tensors."""
    return [(column.dtype, column.tolist()) if isinstance(column, torch.Tensor) else column for column in batch]


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
            found += [listed(batch) for batch in rows]
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
@pytest.mark.slow
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
        return DataLoader(DATA, num_workers=workers, sampler=sampler, shuffle=sampler is None, seed=1, **given)

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
@pytest.mark.slow
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
    shuffled.draw_seed()
    assert to_state(shuffled.state) == {"yielded": 0, "checksum": 0, "shuffle": {"seed": 4, "epoch": 0}}
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


@pytest.mark.costly
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


_LENGTHS = [3, 9, 4, 1, 7, 2, 8, 5, 6, 3]
_COUNTED: dict[str, Callable[[], Any]] = {
    "buckets": lambda: FixedBucketSampler(_LENGTHS, 2, num_buckets=2, shuffle=True, seed=0),
    "one kind": lambda: GroupedBatchSampler(by=[length % 2 for length in _LENGTHS], batch_size=2, seed=0),
    "packed": lambda: PackSampler(_LENGTHS, tokens=12, rows=1, window=4, seed=0),
    "batches of torch": lambda: BatchSampler(RandomSamplerOfEpochs(10, seed=0), 3, False),
}


@pytest.mark.costly
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", _COUNTED)
def test_samplers_that_count_their_epochs_resume_in_any_epoch_with_any_number_of_workers(
    kind: str, workers: int
) -> None:
    def made() -> DataLoader[Any]:
        return DataLoader(range(10), batch_sampler=_COUNTED[kind](), num_workers=workers)

    sampler = _COUNTED[kind]()
    epochs = [list(map(list, sampler)) for _ in range(3)]
    loader = made()
    assert [plain(loader) for _ in range(3)] == epochs
    for epoch, read in [(0, 0), (0, 2), (1, len(epochs[1]))]:
        stopped, resumed = made(), made()
        for _ in range(epoch):
            list(stopped)
        batches = iter(stopped)
        for _ in range(read):
            next(batches)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert plain(resumed) == epochs[epoch][read:]
        assert plain(resumed) == epochs[epoch + 1]
    ended, following = made(), made()
    list(ended)
    following.load_state_dict(ended.state_dict())
    assert plain(following) == epochs[1]


@pytest.mark.parametrize("kind", ["one kind", "packed"])
def test_a_sampler_with_the_lengths_of_another_dataset_is_refused_at_once(kind: str) -> None:
    with pytest.raises(ValueError, match="the dataset has 9"):
        DataLoader(range(9), batch_sampler=_COUNTED[kind]())


@pytest.mark.parametrize("kind", ["buckets", "batches of torch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_set_epoch_of_a_sampler_that_counts_decides_until_the_first_batch(kind: str, workers: int) -> None:
    sampler = _COUNTED[kind]()
    epochs = [list(map(list, sampler)) for _ in range(4)]
    loader = DataLoader(range(10), batch_sampler=_COUNTED[kind](), num_workers=workers)
    batches = iter(loader)
    named = loader.batch_sampler.sampler if kind == "batches of torch" else loader.batch_sampler
    named.set_epoch(2)
    assert plain(batches) == epochs[2]
    assert plain(loader) == epochs[3]
