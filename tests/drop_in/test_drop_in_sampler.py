"""The drop-in's samplers: in torch's order, and they can be resumed. Any sampler begins as it does under torch."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from conftest import covering
from drop_in_samples import DATA, SAMPLERS, TORCHS, Order, Reads, Shared, plain, seeded, some
from injection import HANDLERS, InterruptAt, next_interrupted
from samples import ByEpoch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sharded_loader import RandomSampler as RandomSamplerOfEpochs
from sharded_loader import sample_rng
from sharded_loader.base import limits
from sharded_loader.drop_in.sampler import EpochCount, SamplerStart, ShuffleSampler, TorchEpoch
from sharded_loader.torch import DataLoader


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


@pytest.mark.parametrize("copied", [False, True])
def test_the_epoch_can_be_set_on_the_loader_and_on_its_batch_sampler(copied: bool) -> None:
    """transformers calls the first, and the second after it has wrapped the batch sampler."""
    loader = DataLoader(range(8), batch_size=4, shuffle=True, seed=1)
    epochs = [plain(loader) for _ in range(2)]
    if copied:
        loader = copy.deepcopy(loader)
    assert type(loader.batch_sampler) is BatchSampler  # Lightning builds it again
    for told in (loader, loader.batch_sampler):
        for epoch in (1, 0):
            told.set_epoch(epoch)  # type: ignore[union-attr]
            assert plain(loader) == epochs[epoch]


@pytest.mark.parametrize("given", [{}, {"seed": 3}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_the_default_device_of_torch_changes_no_order(given: dict[str, Any]) -> None:
    """Under a default device of "cuda", torch's own loader cannot shuffle."""

    def epochs() -> list[Any]:
        torch.manual_seed(4)
        loader = DataLoader(range(9), 3, shuffle=True, **given)
        first = [plain(loader), plain(loader)]
        again = DataLoader(range(9), 3, shuffle=True, **given)
        again.load_state_dict(loader.state_dict())
        return [*first, plain(again), torch.rand(1, device="cpu").item()]

    expected = epochs()
    torch.set_default_device("meta")
    try:
        assert epochs() == expected and torch.empty(0).device.type == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -3, 2**63, 2**64 - 1, 2**70])
def test_an_epoch_is_a_function_of_the_seed_and_its_number(seed: int) -> None:
    sampler = ShuffleSampler(range(30), seed=seed)
    epochs = [list(sampler) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    other = ShuffleSampler(range(30), seeded(), seed)  # the seed decides
    for number in (2, 0, 1):
        for one in (sampler, other):
            one.set_epoch(number)
            assert list(one) == epochs[number]


@pytest.mark.parametrize("bad", [-1, "1", 1.5, None])
def test_an_epoch_is_a_number_from_0_on(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="epoch"):
        ShuffleSampler(range(3)).set_epoch(bad)


@pytest.mark.parametrize("arguments", [{}, {"seed": 4}, {"generator": seeded()}], ids=["drawn", "seed", "generator"])
def test_its_state_and_its_copy_say_the_epochs_that_come(arguments: dict[str, Any]) -> None:
    sampler, other = ShuffleSampler(range(30), **arguments), ShuffleSampler(range(30))
    list(sampler)
    other.load_begin_state(json.loads(json.dumps(sampler.begin_state())))
    copied, before = pickle.loads(pickle.dumps(sampler)), torch.get_rng_state()
    later = 3 if arguments else 1  # otherwise the global generator decides
    expected = [list(sampler) for _ in range(later)]
    assert [list(other) for _ in range(later)] == [list(copied) for _ in range(later)] == expected
    if not arguments:
        assert sampler.end_state() == {}
        assert torch.equal(torch.get_rng_state(), before)  # its seed was drawn when the state was taken


def test_a_state_of_before_in_which_a_drawn_seed_decides_all_epochs_is_loaded() -> None:
    sampler = ShuffleSampler(range(30))
    sampler.load_begin_state({"seed": 4, "epoch": 1})
    seeded_by_4 = ShuffleSampler(range(30), seed=4)
    seeded_by_4.set_epoch(1)
    assert [list(sampler), list(sampler)] == [list(seeded_by_4), list(seeded_by_4)]


def test_a_look_at_the_batches_is_an_epoch_of_the_sampler_that_shuffles_alone() -> None:
    loader: Any = DataLoader(range(20), 2, shuffle=True, seed=3)
    looked = [list(loader.batch_sampler) for _ in range(2)]
    loader.sampler.set_epoch(1)
    assert plain(loader) == looked[1] != looked[0]
    loader = DataLoader(range(20), 2, sampler=DistributedSampler(range(20), 2, 0))  # type: ignore[arg-type]
    loader.sampler.set_epoch(2)
    assert list(loader.batch_sampler) == plain(loader) == plain(loader)


class PutsBack(Reads):
    """Its state has the global generator, which `load_state_dict` puts back."""

    def __init__(self) -> None:
        super().__init__(int, 30)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["generator"])


class Draws(PutsBack):
    def __getitem__(self, index: int) -> Any:
        return 1000 * index + int(torch.randint(1000, ()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("read", [0, 1, 4])
def test_a_dataset_that_keeps_the_generator_draws_the_same_again(workers: int, read: int) -> None:
    """Also from a state before the first batch, when the sampler has its seed from the same generator."""
    loader: Any = DataLoader(Draws(), 5, shuffle=True, num_workers=workers)
    iterator = iter(loader)
    states, batches = [loader.state_dict()], []
    for _ in range(read):
        batches.append(plain([next(iterator)])[0])
        states.append(loader.state_dict())
    batches += plain(iterator)
    for done, state in enumerate(states):
        loader.load_state_dict(state)
        assert plain(loader) == batches[done:]


@pytest.mark.parametrize("given", [{}, {"num_replicas": 1}], ids=["torch's order", "ours"])
def test_what_is_no_batch_and_a_length_that_is_none_are_errors_that_say_so(given: dict[str, Any]) -> None:
    for batches in ([1, 2], [[0], None], torch.tensor([1, 2])):
        loader: Any = DataLoader(range(4), batch_sampler=batches, **given)
        with pytest.raises(TypeError, match=r"batch [01]: the batch sampler yielded .*; it must yield lists"):
            list(loader)
    for sampler in ([[0, 1], [2]], torch.tensor([[0, 1], [2, 3]]), BatchSampler(range(4), 2, False)):
        with pytest.raises(TypeError) as caught:
            list(DataLoader([*range(4)], 2, sampler=sampler, **given))
        assert "(several indices: batches need batch_sampler=)" in caught.value.__notes__[0]
    for length in (-1, "5", None):
        data: Any = type("Data", (), {"__len__": lambda _, length=length: length, "__getitem__": lambda _, n: n})()
        for shuffle in (False, True):
            with pytest.raises(TypeError, match="the dataset, a Data, has no length: its __len__ raised"):
                list(DataLoader(data, 2, shuffle=shuffle, **given))


def test_an_order_that_does_not_fit_into_memory_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: limits.Limit(10**9, "the machine's memory"))
    with pytest.raises(MemoryError, match="all 1,000,000,000 indices in memory.* give num_replicas=1"):
        next(iter(DataLoader(range(10**9), shuffle=True)))
    assert len(next(iter(DataLoader(range(10**9), 3, shuffle=True, num_replicas=1)))) == 3


@pytest.mark.parametrize("asks_first", [False, True])
def test_a_dataset_that_puts_the_generator_back_changes_no_later_epoch(asks_first: bool) -> None:
    whole, first, second = (DataLoader(PutsBack(), 30, shuffle=True) for _ in range(3))
    torch.manual_seed(3)
    expected = [plain(whole) for _ in range(4)]
    torch.manual_seed(3)
    found = [plain(first) for _ in range(2)]
    second.load_state_dict(first.state_dict())
    batches = iter(second)
    if asks_first:
        second.state_dict()
    assert [*found, plain(batches), plain(second)] == expected


# -- any sampler begins, and goes on from a state ---------------------------------------------------------------------


def drawn(index: int) -> list[float]:
    """The index, what the default generator gives for it, and the seed of the process that reads it."""
    return [float(index), torch.rand(()).item(), float(torch.initial_seed() % 2**32)]


def epochs_and_draws(kind: Any, make: Callable[[], dict[str, Any]], reseeds: bool, **given: Any) -> list[Any]:
    """Three epochs of two loaders, read in turn, and what the default generator gives in between."""
    torch.manual_seed(3)
    loaders = [kind(Reads(drawn, 13), **given, **make()) for _ in range(2)]
    found: list[Any] = []
    for epoch in range(3):
        if reseeds:
            torch.manual_seed(100 + epoch)
        batches = [iter(loader) for loader in loaders]
        found.append(torch.rand(()).item())
        for rows in zip(*batches, strict=True):
            found += [plain(batch) for batch in rows]
        found.append(torch.rand(()).item())
    return found


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@covering(kind=[kind for kind in SAMPLERS if kind != "shuffle, seed"], reseeds=[False, True])
def test_every_epoch_and_the_default_generator_are_torchs(kind: str, reseeds: bool, given: dict[str, Any]) -> None:
    own, torchs = (epochs_and_draws(loader, SAMPLERS[kind], reseeds, **given) for loader in (DataLoader, TORCHS))
    assert own == torchs


TOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed": lambda: {"sampler": DistributedSampler(DATA, 2, 0, seed=1)},
    "of the user's": lambda: {"sampler": ByEpoch(13)},
    "shuffle": lambda: {"shuffle": True},
    "in order": dict,
}


def told(kind: str, **given: Any) -> Any:
    """A loader whose samples draw a number of the epoch."""
    return DataLoader(Reads(lambda index: [index, sample_rng().random()], 13), seed=3, **{**TOLD[kind](), **given})


def rows(batches: Iterable[Any]) -> list[tuple[str, str]]:
    return [(str(indices), str(numbers)) for indices, numbers in batches]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.costly)])
@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("size", [2, None], ids=["batches", "samples"])
@pytest.mark.parametrize("of", [lambda loader: loader, lambda loader: loader.sampler], ids=["loader", "sampler"])
def test_set_epoch_may_come_after_iter_and_before_the_first_batch(
    kind: str, epoch: int, workers: int, size: int | None, of: Callable[[Any], Any]
) -> None:
    loader, other = (told(kind, batch_size=size, num_workers=workers) for _ in range(2))
    seen: list[list[tuple[str, str]]] = []
    for number in range(epoch + 1):
        begun = iter(loader)
        of(loader).set_epoch(number)
        seen.append(rows(itertools.islice(begun, 3)))
    assert len({*map(str, seen)}) == epoch + 1
    state, rest = loader.state_dict(), rows(begun)
    assert rest
    other.load_state_dict(state)
    begun = iter(other)
    assert other.state_dict() == state
    of(other).set_epoch(epoch)
    assert rows(begun) == rest
    begun = iter(other)
    of(other).set_epoch(epoch)
    assert [indices for indices, _ in rows(begun)] == [indices for indices, _ in seen[-1] + rest]


@pytest.mark.parametrize("sampler", [None, RandomSamplerOfEpochs(13, seed=0)], ids=["torch's", "counts its epochs"])
@pytest.mark.parametrize("kind", TOLD)
def test_a_state_asked_for_behind_set_epoch_is_that_of_the_iterator_that_waits(kind: str, sampler: Any) -> None:
    given = {} if sampler is None else {"sampler": sampler, "shuffle": None}
    first, loader, resumed = (told(kind, batch_size=2, **copy.deepcopy(given)) for _ in range(3))
    first.set_epoch(2)
    expected = rows(first)
    begun = iter(loader)
    for epoch in (1, 2):
        loader.state_dict()
        loader.set_epoch(epoch)
    resumed.load_state_dict(loader.state_dict())
    assert rows(begun) == expected == rows(resumed)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("streams", [None, 4])
def test_an_epoch_named_between_iter_and_the_first_batch_reads_iterable_data(workers: int, streams: int | None) -> None:
    loader = DataLoader(Shared(), 4, num_workers=workers, seed=7, streams=streams, thread_pool=True)
    expected = [batch.tolist() for batch in loader]
    batches = iter(loader)
    loader.set_epoch(0)  # back from a higher one
    assert [batch.tolist() for batch in batches] == expected


@pytest.mark.parametrize("when", ["before iter", "after iter", "never"])
@pytest.mark.parametrize("kind", TOLD)
def test_a_state_within_an_epoch_says_the_epoch(kind: str, when: str) -> None:
    """Fabric names epoch 0 to the sampler after every resume."""
    loader, other = told(kind, batch_size=2), told(kind, batch_size=2)
    loader.sampler.set_epoch(2)
    batches = iter(loader)
    next(batches), next(batches)
    other.load_state_dict(loader.state_dict())
    if when == "before iter":
        other.sampler.set_epoch(0)
    begun = iter(other)
    if when == "after iter":
        other.sampler.set_epoch(0)
    assert rows(begun) == rows(batches)
    assert rows(other) == rows(loader)


def test_an_error_of_a_loaded_sampler_comes_as_it_is() -> None:
    def fail() -> Iterator[int]:
        raise OSError("no order")
        yield 0

    loader = DataLoader(DATA, 3, sampler=Order(fail))
    state = loader.state_dict()
    for _ in range(2):
        with pytest.raises(OSError, match="no order"):
            next(iter(loader))
        loader.load_state_dict(state)


@pytest.mark.parametrize("count", [0, 2])
def test_a_state_settles_the_order_and_what_a_loaded_epoch_draws_is_put_back(count: int) -> None:
    torch.manual_seed(1)
    loader, other = (DataLoader(DATA, 3, sampler=RandomSampler(DATA)) for _ in range(2))
    begun = iter(loader)
    some(begun, count)
    state = loader.state_dict()
    torch.manual_seed(2)  # a model is made
    expected, before = plain(begun), torch.get_rng_state()
    other.load_state_dict(state)
    assert plain(other) == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["in turn", "shuffle, seed", "listed batches", "stateful", "random, own generator"])
def test_only_samplers_that_may_draw_are_noted(kind: str) -> None:
    state = DataLoader(DATA, **SAMPLERS[kind]()).state_dict()["_sampler"]
    assert {*state} - {"yielded", "checksum", "shuffle", "state"} == ({"rng"} if "random" in kind else set())
    assert state.get("shuffle") == ({"seed": 4, "epoch": 0} if "shuffle" in kind else None)


def with_a_private_generator() -> Any:
    sampler: Any = Order(lambda: torch.randperm(13, generator=sampler.any_name).tolist())
    sampler.any_name = seeded()
    return sampler


@pytest.mark.parametrize("before", [0, 2])
def test_a_generator_of_a_sampler_is_found_by_any_name(before: int) -> None:
    loader = DataLoader(DATA, 3, sampler=with_a_private_generator())
    plain(loader)
    batches = iter(loader)
    some(batches, before)
    state, expected = loader.state_dict(), [plain(batches), plain(loader)]
    other = DataLoader(DATA, 3, sampler=with_a_private_generator())
    other.load_state_dict(state)
    assert [plain(other), plain(other)] == expected


@pytest.mark.costly
@pytest.mark.parametrize("given", [{}, {"prefetch_factor": 3, "persistent_workers": True}], ids=["default", "given"])
def test_a_sampler_that_draws_for_each_batch_is_asked_when_torch_asks_it(given: dict[str, Any]) -> None:
    def sizes() -> Iterator[list[int]]:  # each drawn when the batch is asked for
        for begin in range(0, 60, 3):
            yield list(range(begin, begin + 1 + int(torch.randint(3, ()))))

    def run(kind: type) -> list[list[int]]:
        torch.manual_seed(1)
        loader, found = kind(range(60), batch_sampler=Order(sizes, 20), num_workers=2, **given), []
        for _ in range(2):
            for batch in loader:
                found.append(batch.tolist())
                torch.rand(1)  # as dropout does
        return found

    assert run(DataLoader) == run(TORCHS)


# -- one epoch of it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffle", "ranks", "single"])
def test_a_patched_constructor_of_torch_may_skip_items(kind: str, workers: int, monkeypatch: Any) -> None:
    """SpeechBrain resumes so: it reads items of the iterator that torch's constructor has made, and notes how many."""
    constructor, reset, skip = _BaseDataLoaderIter.__init__, vars(_BaseDataLoaderIter)["_reset"], list[int]()

    def patched(self: Any, loader: Any, *args: Any) -> None:
        constructor(self, loader, *args)
        while skip:
            self._num_yielded = len(list(itertools.islice(self._sampler_iter, skip.pop())))

    monkeypatch.setattr(_BaseDataLoaderIter, "__init__", patched)
    monkeypatch.setattr(_BaseDataLoaderIter, "_reset", lambda self, loader, first=False: first or reset(self, loader))
    found = []
    for loader_class in (TORCHS, DataLoader):
        torch.manual_seed(5)
        ranks = {"sampler": DistributedSampler(range(20), 1, 0), "batch_size": None if kind == "single" else 2}
        given: dict[str, Any] = {"shuffle": True, "batch_size": 2} if kind == "shuffle" else ranks
        loader = loader_class(range(20), num_workers=workers, persistent_workers=workers > 0, **given)
        skip.append(3)
        iterator = iter(loader)
        first = some(iterator, 1), vars(iterator)["_num_yielded"]
        found.append([first, plain(iterator), plain(loader), torch.get_rng_state().tolist()])
    assert found[0] == found[1]
    assert found[0][0][1] == 4


def test_an_item_is_read_once_and_kept_until_it_is_forgotten() -> None:
    drawn = list[int]()
    items = Order(lambda: ([drawn.append(index) or index] for index in range(4)))  # type: ignore[func-returns-value]
    start = SamplerStart(items, None, False, EpochCount())
    start.begin()
    reading = TorchEpoch(start, 2, True, {}, False, lambda number: ())
    one, zero = reading.batch(1), reading.batch(0)
    assert one and zero and (one.item, zero.item, drawn) == ([1], [0], [0, 1])
    assert reading.batch(4) is None and drawn == [0, 1, 2, 3]
    reading.forget(3)
    assert reading.batch(0) is None
    assert reading.batch(2) is not None  # the last one delivered may be taken back


@pytest.mark.parametrize("again", [False, True])
def test_batches_of_a_sampler_are_any_collections_or_one_list_that_is_filled_again(again: bool) -> None:
    def refilled() -> Iterator[list[int]]:
        batch = [0]
        for batch[0] in range(4):
            yield batch

    batches: Any = Order(refilled, 4) if again else [range(1), {1: 1}, (2,), [3]]
    loader = DataLoader(range(4), batch_sampler=batches, num_workers=2, thread_pool=True)
    assert plain(loader) == [[0], [1], [2], [3]]


def interrupted(at: int | None = None, name: str = "SIGINT") -> Order:
    """Batches of two in random order, from a generator that interrupts itself before a batch, once; None: never."""
    left = [at]

    def items() -> Iterator[list[int]]:
        for number, batch in enumerate(torch.randperm(12).reshape(6, 2).tolist()):
            if left == [number]:
                left.clear()
                signal.raise_signal(getattr(signal, name))
            yield batch

    return Order(items, 6)


def over(sampler: Order, **given: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(range(12), batch_sampler=sampler, **given)


# With workers, iter() draws the first batch, as torch's does: a signal in there leaves no iterator.
@pytest.mark.parametrize(("at", "workers"), [(at, workers) for workers in (0, 2) for at in range(workers > 0, 6)])
def test_a_sampler_that_a_signal_ended_is_started_again_where_it_was(at: int, workers: int, signal_name: str) -> None:
    given: dict[str, Any] = {"num_workers": workers, "thread_pool": True} if workers else {}
    expected = plain(over(interrupted(), **given))
    iterator, found, interrupts = iter(over(interrupted(at, signal_name), **given)), list[Any](), 0
    while len(found) < 7:
        try:
            found.append(next(iterator, None))
        except HANDLERS[signal_name][0]:
            interrupts += 1
    assert interrupts == 1 and found.pop() is None
    assert plain(found) == expected


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interruption_at_any_line_that_reads_the_sampler_loses_no_batch(step: int, signal_name: str) -> None:
    interrupt = functools.partial(InterruptAt, modules=("sampler.py", "third_party.py"), name=signal_name)
    line, fired = 1, True
    while fired:
        whole, iterator = plain(over(interrupted())), iter(over(interrupted()))
        found, fired = next_interrupted(iterator, line, interrupt)
        assert plain([*found, *iterator]) == whole
        line += step
    assert line > 40
