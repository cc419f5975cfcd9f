"""``state_dict`` and ``load_state_dict``: exact from any place, into any number of workers."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import drop_in_samples
import pytest
import torch
from conftest import covering
from drop_in_samples import DATA, SAMPLERS, Counting, Keeps, Order, Parts, Resets, Shared, Stateful, plain, seeded, some
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, Subset

from sharded_loader import FixedBucketSampler, GroupedBatchSampler, PackSampler, interleave, sample_rng
from sharded_loader import RandomSampler as RandomSamplerOfEpochs
from sharded_loader.drop_in.state import next_epoch
from sharded_loader.engine.messages import PartPoint
from sharded_loader.engine.order import Position
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Uneven(Parts):
    """Parts of different lengths: worker i of any number yields 100 i, 100 i + 1, ..."""

    def __init__(self) -> None:
        super().__init__(lambda number, count: range(100 * number, 100 * number + (11, 4, 7, 0, 5)[number]))


class StatefulStream(Keeps, Parts):
    """A stream that says where it is, and counts the samples of all its epochs."""

    kept = ("place", "total")

    def __init__(self, length: int = 11) -> None:
        super().__init__(self.samples)
        self.length, self.place, self.total = length, 0, 0

    def samples(self, number: int, count: int) -> Iterator[int]:
        while self.place < self.length - number:
            self.place += 1
            self.total += 1
            yield 10_000 * number + 100 * self.total + self.place
        self.place = 0


class TakesUpLate(Keeps, Parts):
    """A stream that takes up a loaded state once, with the first sample of a pass, as many generators do."""

    kept = ("place",)

    def __init__(self) -> None:
        super().__init__(self.samples)
        self.place, self.loaded = 0, 0

    def samples(self, number: int, count: int) -> Iterator[int]:
        begin, self.loaded = self.loaded, 0
        for self.place in range(begin + 1, 12):
            if self.place % count == number:
                yield self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["place"]


class CountsPasses(Keeps, Parts):
    """A stream that counts its passes as they begin; its samples name the pass."""

    kept = ("passes", "place")

    def __init__(self) -> None:
        super().__init__(self.samples)
        self.passes, self.place, self.is_loaded = 0, 0, False

    def samples(self, number: int, count: int) -> Iterator[int]:
        if not self.is_loaded:
            self.passes, self.place = self.passes + 1, 0
        self.is_loaded = False
        return self.rest()

    def rest(self) -> Iterator[int]:
        while self.place < 11:
            self.place += 1
            yield 100 * self.passes + self.place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_loaded = state["passes"] > 0


class StatefulItems(Parts):
    """A stream whose iterators have a state."""

    def __init__(self) -> None:
        super().__init__(lambda number, count: Stateful(range(100 * number + 1, 100 * number + 10)))


DATASETS: dict[str, Callable[[], dict[str, Any]]] = {
    "stateful dataset": lambda: {"dataset": Counting(), "shuffle": True},
    "stream": lambda: {"dataset": Shared()},
    "uneven stream": lambda: {"dataset": Uneven()},
    "stateful stream": lambda: {"dataset": StatefulStream()},
    "stream that takes up late": lambda: {"dataset": TakesUpLate()},
    "stateful items": lambda: {"dataset": StatefulItems()},
    "mixture": lambda: {"dataset": interleave([range(12), interleave([range(90, 99)] * 2)], [2, 1]), "shuffle": True},
    "mixed streams": lambda: {"dataset": interleave([Shared(), range(90, 99)])},
}
LENGTHS = [3, 9, 4, 1, 7, 2, 8, 5, 6, 3]
COUNTED: dict[str, Callable[[], dict[str, Any]]] = {
    "buckets": lambda: {"batch_sampler": FixedBucketSampler(LENGTHS, 2, num_buckets=2, shuffle=True, seed=0)},
    "one kind": lambda: {"batch_sampler": GroupedBatchSampler(by=[n % 2 for n in LENGTHS], batch_size=2, seed=0)},
    "packed": lambda: {"batch_sampler": PackSampler(LENGTHS, tokens=12, rows=1, window=4, seed=0)},
    "batches of torch": lambda: {"batch_sampler": BatchSampler(RandomSamplerOfEpochs(10, seed=0), 3, False)},
}
"""Samplers that count their epochs."""

MADE = {"random": SAMPLERS["random"], **SAMPLERS, **COUNTED, **DATASETS}
STREAMS = [kind for kind in MADE if "stream" in kind or "items" in kind]
TWICE = ("eager batches", "eager, one by one", "stateful iterators")
"""They draw each time that they are asked for an iterator, and with workers torch asks twice."""


def made(kind: str, **options: Any) -> DataLoader[Any]:
    usual = {"batch_size": 3} if kind in DATASETS else {"dataset": range(10) if kind in COUNTED else DATA}
    return DataLoader(**{**usual, **MADE[kind](), **options})


def assert_resumes(
    make: Callable[[int], Any], *, saved: int, loaded: int, before: int, count: int | None, epochs: int = 3
) -> None:
    """A state goes on exactly: the rest of the epoch, and the epochs after it.

    Args:
        make: makes a loader of so many workers.
        saved, loaded: how many workers the loader has that the state is taken from, and the one that loads it.
        before: how many epochs there are before the state's.
        count: how many batches of its epoch there are before the state. None: all of them, and the end is seen.
        epochs: how many epochs are compared behind it.
    """
    torch.manual_seed(1)
    loader, begun = make(saved), None
    for _ in range(before + (count is None)):
        list(loader)
    if count:
        begun = iter(loader)
        if len(some(begun, count)) < count:
            begun = None  # the end was seen
    state, generator = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    expected = [] if begun is None else [plain(begun)]
    expected += [plain(loader) for _ in range(epochs)]
    torch.manual_seed(99)
    other = make(loaded)
    other.load_state_dict(copy.deepcopy(state))
    torch.set_rng_state(generator)  # a trainer puts the global generator back
    assert [plain(other) for _ in expected] == expected


@covering(kind=MADE, count=[0, 1, 2, 3, 5, None], before=[0, 1, 2])
def test_a_state_goes_on_without_workers(kind: str, count: int | None, before: int) -> None:
    assert_resumes(lambda workers: made(kind), saved=0, loaded=0, before=before, count=count)


@pytest.mark.parametrize("count", [2, 5])  # in the middle, and behind the last batch
@pytest.mark.parametrize("had_state", [True, False])
def test_a_dataset_has_the_state_that_it_had_if_it_had_one(count: int, had_state: bool) -> None:
    saved = DataLoader(Counting() if had_state else range(13), 3)
    batches = iter(saved)
    some(batches, count)
    state = json.loads(json.dumps(saved.state_dict()))
    dataset = Counting()
    loaded = DataLoader(dataset, 3)
    loaded.load_state_dict(state)
    rest = list(loaded)
    assert len(rest) == 5 - count
    assert dataset.reads == (13 if had_state else 13 - min(13, 3 * count))


@covering(0, kind=MADE, count=[3, 0, 1, None], persistent=[True, False])
def test_a_state_goes_on_with_workers_that_had_an_epoch_before(kind: str, count: int | None, persistent: bool) -> None:
    given = {"num_workers": 2, "persistent_workers": persistent}
    assert_resumes(lambda workers: made(kind, **given), saved=2, loaded=2, before=1, count=count)


@pytest.mark.parametrize("count", [0, 3, None])
@pytest.mark.parametrize(("saved", "loaded"), [(0, 2), (2, 0), (2, 1), (3, 4), (4, 3)])
@pytest.mark.parametrize("kind", [*SAMPLERS, *COUNTED, "uneven stream", "stateful stream"])
@pytest.mark.slow
def test_a_state_goes_on_with_another_number_of_workers(kind: str, saved: int, loaded: int, count: int | None) -> None:
    # A later epoch of iterable data has a part for each worker again, as in torch. A worker begins with the dataset of
    # the main process, which nobody else has read. What is asked for twice draws twice.
    is_of_workers = kind in STREAMS or (kind in TWICE and not (saved and loaded))
    count = 4 if is_of_workers and count is None else count
    epochs, before = (0, 0) if is_of_workers else (2, kind not in DATASETS)
    given: dict[str, Any] = {"saved": saved, "loaded": loaded, "before": before, "count": count, "epochs": epochs}
    assert_resumes(lambda workers: made(kind, num_workers=workers), **given)


@pytest.mark.costly(2)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MADE)
def test_a_job_that_is_stopped_after_every_batch_reads_the_same_epochs(kind: str, workers: int) -> None:
    def make() -> Any:
        return made(kind, num_workers=workers, persistent_workers=workers > 0)

    torch.manual_seed(1)
    loader = make()
    expected = [plain(loader) for _ in range(2)]
    torch.manual_seed(1)
    loader, found, epoch = make(), [], list[Any]()
    while len(found) < 2:
        batch = next(iter(loader), None)
        if batch is None:
            found.append(epoch)
            epoch = []
        else:
            epoch += plain([batch])
        state, generator = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
        loader = make()
        loader.load_state_dict(state)
        torch.set_rng_state(generator)
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_go_on_with_the_seeds_that_they_had(workers: int) -> None:
    loader = DataLoader(drop_in_samples.Seeds(), 2, num_workers=workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    other = DataLoader(drop_in_samples.Seeds(), 2, num_workers=workers)
    other.load_state_dict(state)
    told = slice(0, 4)  # ids and seeds
    assert repr([batch[told] for batch in other]) == repr([batch[told] for batch in batches])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_global_generator_decides_after_the_end_of_an_epoch_if_the_program_sets_it(workers: int) -> None:
    given: dict[str, Any] = {"dataset": range(20), "batch_size": 4, "shuffle": True, "num_workers": workers}
    loader, other = DataLoader(**given), DataLoader(**given)
    list(loader)
    state, rng = loader.state_dict(), torch.get_rng_state()
    expected = [plain(loader) for _ in range(3)]
    torch.rand(3)  # as an evaluation may do
    other.load_state_dict(state)
    torch.manual_seed(5)
    seeded = plain(other)
    torch.manual_seed(5)
    assert seeded == plain(torch.utils.data.DataLoader(**given))
    for is_first in (True, False):  # it is put back before the state is loaded, or after
        torch.set_rng_state(rng)
        other.load_state_dict(state)
        if not is_first:
            torch.rand(3)
            torch.set_rng_state(rng)
        assert [plain(other) for _ in range(3)] == expected


RANDOM_ITEMS = Parts(lambda number, count: (float(sample_rng().random()) for _ in range(4)))


@covering(options=[{"dataset": RANDOM_ITEMS}, {"dataset": range(20), "shuffle": True}], seed=[None, 3], workers=[0, 1])
def test_set_epoch_after_a_state_from_the_end_of_an_epoch_decides(
    options: dict[str, Any], seed: int | None, workers: int
) -> None:
    loader, other = (DataLoader(batch_size=2, seed=seed, num_workers=workers, **options) for _ in range(2))
    list(loader)
    state = loader.state_dict()
    loader.set_epoch(5)
    order = repr(list(loader))
    other.load_state_dict(state)
    other.set_epoch(5)
    assert repr(list(other)) == order


class Tells:
    """Samples contain the epoch that the dataset was told, by a name of its own or ``epoch``."""

    def __init__(self, name: str, inside: Any = None) -> None:
        self.name, self.inside = name, inside
        setattr(self, name, 0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return int(index) + 100 * (getattr(self, self.name) if self.inside is None else self.inside[index] // 100)

    def set_epoch(self, epoch: int) -> None:
        setattr(self, self.name, epoch)
        if self.inside is not None:
            self.inside.set_epoch(epoch)


class ReadsInside(Shared):
    """Iterable data that passes the epoch on, and has no attribute with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Tells("epoch")

    def __iter__(self) -> Iterator[int]:
        return (number + 100 * self.inside.epoch for number in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        self.inside.set_epoch(epoch)


HEARS: dict[str, Callable[[], Any]] = {
    "epoch": lambda: Tells("epoch"),
    "named otherwise": lambda: Tells("number"),
    "inside": lambda: Tells("other", Tells("epoch")),
    "in a part": lambda: Subset(Tells("epoch"), range(12)),  # type: ignore[arg-type]
    "mixture": lambda: interleave([range(20), range(100, 120)], shuffle=True, seed=1, stop=12),
    "transformed mixture": lambda: interleave([range(20), range(100, 120)], shuffle=True, stop=12).transform(abs),
    "iterable": ReadsInside,
    "mixed iterables": lambda: interleave([ReadsInside(), ReadsInside()]),
}


@covering(kind=HEARS, workers=[0, 1], count=[0, 2, None], persistent=[False, True], told=["loader", "dataset"])
def test_a_dataset_is_in_the_epoch_that_it_was_told_before_the_state_was_saved(
    kind: str, workers: int, count: int | None, persistent: bool, told: str
) -> None:
    def make() -> DataLoader[Any]:
        lives_on = persistent and workers > 0
        return DataLoader(HEARS[kind](), 3, num_workers=workers, persistent_workers=lives_on, seed=1)

    loader = make()
    listener: Any = loader.dataset if told == "dataset" and kind not in ("named otherwise", "in a part") else loader
    listener.set_epoch(3)
    begun = iter(loader)
    some(begun, count or 0) if count is not None else list(begun)
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [plain(begun) if count else plain(loader), plain(loader)]
    other = make()
    other.load_state_dict(state)
    assert [plain(other), plain(other)] == expected


def test_a_dataset_that_nobody_has_told_an_epoch_is_not_told_one() -> None:
    state = DataLoader(Tells("epoch"), 3).state_dict()
    assert "_epoch_of_dataset" not in state
    loader = DataLoader(Tells("epoch"), 3)
    loader.load_state_dict(state)
    assert loader.dataset.epoch == 0
    with pytest.raises(ValueError, match="'_epoch_of_dataset' must be an integer"):
        loader.load_state_dict({**state, "_epoch_of_dataset": "3"})


def test_a_state_shows_what_torchdatas_shows() -> None:
    loader = DataLoader(Counting(), 3, snapshot_every_n_steps=5)  # torchdata's argument, which is not needed
    some(iter(loader), 2)
    state = loader.state_dict()
    assert (state["_num_yielded"], state["_iterator_finished"]) == (2, False)
    assert state["dataset_state"] == {"reads": 6}
    loader = DataLoader(StatefulStream(), 3, num_workers=2)
    batches = iter(loader)
    not_begun = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    assert [one["dataset_state"] for one in not_begun.values()] == [None, None]
    list(batches)
    state = loader.state_dict()
    assert state["_iterator_finished"]
    workers = state["_snapshot"]["_worker_snapshots"]
    assert [(name, one["worker_id"]) for name, one in workers.items()] == [("worker_0", 0), ("worker_1", 1)]
    assert workers["worker_0"]["dataset_state"] == {"place": 0, "total": 11}
    assert workers["worker_0"]["fetcher_state"]["fetcher_ended"]


def test_a_state_is_a_copy() -> None:
    loader, other = DataLoader(Counting(), 3), DataLoader(Counting(), 3)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    next(batches)
    assert state == kept
    other.load_state_dict(state)
    state["_sampler"]["yielded"] = 4
    assert other.state_dict() == kept
    next(iter(other))
    assert kept["_num_yielded"] == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="spawned workers live on")
@pytest.mark.parametrize("given", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_an_iterator_goes_on_when_a_state_is_loaded_and_persistent_workers_end(given: dict[str, Any]) -> None:
    loader = DataLoader(range(8), 2, multiprocessing_context="fork" if given else None, **given)
    batches: Any = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    if "persistent_workers" in given:
        assert loader._iterator is None and not any(worker.is_alive() for worker in batches._workers)
    else:
        assert plain(batches) == [[2, 3], [4, 5], [6, 7]]
    assert plain(loader) == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("persistent", [False, True])
def test_only_the_newest_epoch_is_kept(persistent: bool) -> None:
    given: Any = {"num_workers": 1, "thread_pool": True, "persistent_workers": persistent}
    loader, begun = DataLoader(range(4), 2, **given), list[Any]()
    for _ in range(3):
        batches = iter(loader)
        assert sum(plain(batches), []) == [0, 1, 2, 3]
        begun.append(weakref.ref(batches))
    del batches
    gc.collect()
    assert not {one() for one in begun} - {loader._iterator, None}


# -- states that are none, or of other data ---------------------------------------------------------------


def without(name: str) -> Callable[[], Any]:
    return lambda: {key: value for key, value in DataLoader(range(3)).state_dict().items() if key != name}


NO_STATE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{
        str(bad): (lambda bad=bad: bad, TypeError, r"the state is an? \w+; give what state_dict\(\) has returned")  # type: ignore[misc]
        for bad in (None, 3, [], "state")
    },
    **{
        name: (without(name), ValueError, f"the state has no '{name}'")
        for name in ("_num_yielded", "_iterator_finished", "_base_seed", "_sampler")
    },
    "of iterable data": (lambda: DataLoader(Shared()).state_dict(), ValueError, "the state has no '_sampler'"),
    "whose order is no dict": (
        lambda: {**(state := DataLoader(range(3)).state_dict()), "_sampler": {**state["_sampler"], "shuffle": "3"}},
        ValueError,
        "its 'shuffle' is '3'; it must be a dict",
    ),
    **{
        f"with the sampler's {name} {bad!r}": (
            lambda name=name, bad=bad: {  # type: ignore[misc]
                **(state := DataLoader(range(3)).state_dict()),
                "_sampler": {**state["_sampler"], name: bad},
            },
            ValueError,
            f"the state's '_sampler' is wrong: its '{name}'.*give what state_dict",
        )
        for name, bad in (
            *(("rng", bad) for bad in (-1, "00", [3], [[3]])),
            *(("epochs", bad) for bad in (5, ["a"], [None])),
            *(("generators", bad) for bad in (5, [5])),
            *(("ahead", 5), ("ahead", [-1]), ("over", 1), ("datasets", 3), ("weights", [])),
            *(("shuffle", {"next": bad}) for bad in (None, [1], ["a", 0], 7)),
            *(("shuffle", bad) for bad in ({"seed": 1}, {"seed": "1", "epoch": 0}, {"seed": 1, "epoch": -1})),
            *(("shuffle", {"generator": bad}) for bad in (None, "00", ["a"])),
        )
    },
    "with one draw too few": (
        lambda: {**DataLoader(range(3)).state_dict(), "_next": [1]},
        ValueError,
        r"the state's '_next' is \[1\]; it must be a list of two numbers",
    ),
    "without a sampler's place": (
        lambda: {**DataLoader(range(3)).state_dict(), "_sampler": None},
        ValueError,
        "the state's '_sampler' is None; it must be a dict",
    ),
    "of data with indices": (lambda: DataLoader(range(3)).state_dict(), ValueError, "the state has no '_stream'"),
}


@pytest.mark.parametrize("kind", NO_STATE)
def test_what_is_no_state_is_an_error_and_changes_nothing(kind: str) -> None:
    make, error, said = NO_STATE[kind]
    loader: Any = DataLoader(Shared(3) if kind == "of data with indices" else range(3))
    with pytest.raises(error, match=said):
        loader.load_state_dict(make())
    assert sum(plain(loader), []) == [0, 1, 2]


@pytest.mark.parametrize("damage", ["x", "", "00"])
def test_a_damaged_state_of_a_generator_is_an_error_that_says_so(damage: str) -> None:
    def loader() -> Any:
        return DataLoader(range(8), sampler=RandomSampler(range(8)), generator=seeded())

    read = loader()
    next(iter(read))
    state = read.state_dict()
    for changed in (
        {**state, "_generator": damage, "_iterator_finished": True},
        {**state, "_sampler": {**state["_sampler"], "rng": [[damage]]}},
    ):
        other = loader()
        other.load_state_dict(changed)
        with pytest.raises(ValueError, match="the state of a generator, .*, is .*: give what state_dict"):
            next(iter(other))


OTHER_DATA: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "another batch size": (dict, lambda: {"batch_size": 4}, "yields other indices"),
    "another batch size, iterable": (
        lambda: {"dataset": Shared()},
        lambda: {"dataset": Shared(), "batch_size": 4},
        "batch_size was 3, and is 4",
    ),
    "another class": (
        lambda: {"dataset": Shared()},
        lambda: {"dataset": Uneven()},
        "the dataset was a Shared, and is a Uneven",
    ),
    "other samples": (
        lambda: {"dataset": Parts(lambda number, count: range(9))},
        lambda: {"dataset": Parts(lambda number, count: range(100, 109))},
        "part 0 of the dataset, a Parts, yields other samples",
    ),
    "other indices": (
        lambda: {"sampler": DATA},
        lambda: {"sampler": DATA[::-1]},
        "the sampler, a BatchSampler, yields other indices in epoch 0 than the 2 before",
    ),
    "other batches": (
        lambda: {"batch_size": 2},
        lambda: {"batch_size": 4},
        "Make it with the same batch size, arguments and seed",
    ),
    "fewer": (
        lambda: {"batch_sampler": [[1], [2], [3]], "batch_size": 1},
        lambda: {"batch_sampler": [[1]], "batch_size": 1},
        "the sampler, a list, yields only 1 items in epoch 0, where it had yielded 2",
    ),
}
"""Options before, options now, and what is said."""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", OTHER_DATA)
def test_a_state_of_other_data_is_an_error_that_names_it(kind: str, workers: int) -> None:
    *options, said = OTHER_DATA[kind]
    usual: dict[str, Any] = {"dataset": DATA, "batch_size": 3, "num_workers": workers}
    loader, other = (DataLoader(**{**usual, **make()}) for make in options)
    some(iter(loader), 2)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=said):
        list(other)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_state_over_data_of_another_length_is_an_error_with_a_way_on(shuffle: bool, workers: int) -> None:
    def over(dataset: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=2, shuffle=shuffle, seed=1, num_workers=workers)

    loader = over(range(12))
    iterator = iter(loader)
    next(iterator)
    state, rest = json.loads(json.dumps(loader.state_dict())), plain(iterator)
    with pytest.raises(ValueError, match=r"had 12 samples, and has 10: samples 10 to 11 are missing.*set_epoch\(1\)"):
        over(range(10)).load_state_dict(state)
    longer = over(range(14))
    if shuffle:
        with pytest.raises(ValueError, match=r"had 12 samples, and has 14: .*Subset\(dataset, range\(12\)\)"):
            longer.load_state_dict(state)
    else:  # the new samples come behind the others
        longer.load_state_dict(state)
        assert plain(longer) == [*rest, [12, 13]]
    part = over(Subset(range(14), range(12)))  # type: ignore[arg-type]
    part.load_state_dict(state)
    assert plain(part) == rest
    over(range(14)).load_state_dict(loader.state_dict())  # at the end of an epoch they may have grown


def test_the_next_epoch_begins_behind_the_datasets_states() -> None:
    ended = PartPoint(3, 0, 7, 12, True, ({"total": 7}, None))
    begun = next_epoch(Position(0, 3, None, {0: 3}, {0: ended}))
    assert (begun.done, begun.counts, begun.points[0]) == (0, {0: 0}, PartPoint(state=({"total": 7}, None, "next")))
    assert next_epoch(Position(0, 3, None, {0: 3}, {0: ended._replace(state=None)})).points[0] == PartPoint()


def test_an_epoch_after_a_state_is_whole_though_the_stream_takes_the_state_up_with_its_first_sample() -> None:
    saved = DataLoader(TakesUpLate(), 3)
    epoch = plain(saved)
    for _ in range(2):  # from the end of an epoch, and from the beginning of the next one
        state = json.loads(json.dumps(saved.state_dict()))
        loaded = DataLoader(TakesUpLate(), 3)
        loaded.load_state_dict(state)
        assert [plain(loaded), plain(loaded)] == [epoch, epoch]
        iter(saved)


@pytest.mark.parametrize("stream", [TakesUpLate, StatefulStream, CountsPasses])
def test_the_epochs_after_a_state_are_those_of_a_job_that_goes_on(stream: Any) -> None:
    whole = DataLoader(stream(), 3)
    epochs = [plain(whole) for _ in range(4)]
    for count in range(3):
        for read in (*range(len(epochs[0]) + 1), None):  # before the end is seen, and after it
            saved = DataLoader(stream(), 3)
            for _ in range(count):
                plain(saved)
            plain(itertools.islice(iter(saved), read))
            loaded = DataLoader(stream(), 3)
            loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
            expected = epochs[count + 1 :] if read is None else [epochs[count][read:], *epochs[count + 1 :]]
            assert [plain(loaded) for _ in expected] == expected, (count, read)


TOLD: dict[str, Callable[[], dict[str, Any]]] = {
    "distributed": lambda: {"sampler": DistributedSampler(range(20), 2, 0)},  # type: ignore[arg-type]
    "shuffle, seed": lambda: {"shuffle": True, "seed": 3},
    "shuffle": lambda: {"shuffle": True},
    "in order, seed": lambda: {"seed": 3},
}


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=[pytest.mark.costly, pytest.mark.slow])])
@pytest.mark.parametrize("kind", TOLD)
def test_behind_the_last_batch_of_an_epoch_set_epoch_begins_another_one(kind: str, workers: int) -> None:
    """As in a loop that begins with epoch ``step // len(loader)``. The same epoch has no batch left."""

    def make() -> Any:
        return DataLoader(range(20), 2, num_workers=workers, **TOLD[kind]())

    loader, epochs = make(), []
    shown: Any = len if kind == "shuffle" else list  # without a seed, set_epoch says no order
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        epochs.append(some(batches, len(loader)))
        if epoch == 1:
            state = loader.state_dict()
    for epoch in (1, 3):
        other = make()
        other.load_state_dict(state)
        other.sampler.set_epoch(epoch)
        assert shown(plain(other)) == shown([] if epoch == 1 else epochs[3])
        rest = make()
        rest.load_state_dict(state)
        rest.sampler.set_epoch(3)
        begun = some(iter(rest), 2)
        other.load_state_dict(rest.state_dict())
        assert shown(begun + plain(other)) == shown(epochs[3])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", COUNTED)
def test_a_sampler_that_counts_is_heard_until_the_first_batch(kind: str, workers: int) -> None:
    epochs = [list(map(list, sampler)) for sampler in [made(kind).batch_sampler] for _ in range(5)]
    loader = made(kind, num_workers=workers)
    assert plain(loader) == epochs[0]
    batches = iter(loader)
    named: Any = loader.batch_sampler.sampler if kind == "batches of torch" else loader.batch_sampler
    named.set_epoch(3)
    assert [plain(batches), plain(loader)] == epochs[3:]


@pytest.mark.parametrize("kind", ["one kind", "packed"])
def test_a_sampler_with_the_lengths_of_another_dataset_is_refused_at_once(kind: str) -> None:
    with pytest.raises(ValueError, match="the dataset has 9"):
        made(kind, dataset=range(9))


# -- iter() without next ------------------------------------------------------------------------------------

_QUIET: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "seed": lambda: {"shuffle": True, "seed": 2},
    "counts": lambda: {"sampler": RandomSamplerOfEpochs(20, seed=1)},
    "drawn": lambda: {"shuffle": True, "generator": seeded()},
}
_WORKERS: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2, "thread_pool": True},
    "persistent": {"num_workers": 2, "thread_pool": True, "persistent_workers": True},
}


def quiet(kind: str, given: str) -> DataLoader[Any]:
    return DataLoader(range(20), **{"batch_size": 4, **_QUIET[kind](), **_WORKERS[given]})


@pytest.mark.parametrize("given", _WORKERS)
@pytest.mark.parametrize("kind", _QUIET)
def test_an_iterator_that_reads_nothing_counts_no_epoch_and_uses_up_no_state(kind: str, given: str) -> None:
    fresh, stopped = quiet(kind, given), quiet(kind, given)
    for _ in range(2):
        iter(stopped), iter(stopped)
        assert plain(stopped) == plain(fresh) or kind == "drawn"
    assert stopped.stats().batches == 10
    next(iter(stopped))
    for _ in range(2):  # within an epoch, and at its end
        state = stopped.state_dict()
        expected, loader, late, kept = (quiet(kind, given) for _ in range(4))
        for one in (expected, loader):
            one.load_state_dict(state)
        iter(loader), iter(loader)
        assert loader.state_dict() == state
        rest = plain(expected)
        assert plain(loader) == rest
        batches = iter(late)
        late.load_state_dict(state)
        assert plain([next(batches)]) == rest[:1]
        kept.load_state_dict(late.state_dict())
        assert plain(kept) == rest[1:]
        list(stopped)


# -- after the last batch -----------------------------------------------------------------------------------

_ENDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": seeded()},
    "stateful": lambda: {"sampler": Resets(18)},
    "drop_last": lambda: {"sampler": RandomSampler(range(18), generator=seeded()), "drop_last": True},
    "batches": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(18), generator=seeded()), 4, False),
        "batch_size": 1,
    },
}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("given", _WORKERS)
@pytest.mark.parametrize("kind", _ENDS)
def test_a_loop_that_stops_at_the_last_batch_goes_on_alike_after_a_resume(kind: str, given: str, asks: bool) -> None:
    usual: dict[str, Any] = {"batch_size": 4, **_WORKERS[given]}
    loader, resumed = (DataLoader(range(18), **{**usual, **_ENDS[kind]()}) for _ in range(2))
    torch.manual_seed(5)
    batches = iter(loader)
    some(batches, len(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    if asks:
        assert next(batches, None) is None
    expected = some(iter(loader), len(loader))
    torch.manual_seed(6)
    resumed.load_state_dict(state)
    assert plain(resumed) == []
    assert some(iter(resumed), len(resumed)) == expected


def test_a_sampler_with_set_epoch_counts_when_its_end_is_asked_for() -> None:
    """As Accelerate's ``SeedableRandomSampler``, whose epoch trainers read and name."""

    class Counts(SequentialSampler):
        epoch = 3

        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            self.set_epoch(self.epoch + 1)

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = DataLoader(range(4), 2, sampler=(sampler := Counts(range(4))))
    batches = iter(loader)
    some(batches, 2)
    assert sampler.epoch == 3
    assert loader.state_dict()["_next"] is not None  # the seed of the next epoch is known already
    assert next(batches, None) is None and sampler.epoch == 4


def test_an_error_at_the_end_of_a_sampler_comes_after_the_last_batch() -> None:
    def items() -> Iterator[int]:
        yield from range(4)
        raise RuntimeError("at its end")

    batches = iter(DataLoader(range(4), None, sampler=Order(items, 4)))
    assert [int(next(batches)) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="at its end") as caught:
        next(batches)
    assert "raised by the sampler at batch 4" in caught.value.__notes__[-1]
    assert next(batches, None) is None
